"""What may be asked together and what not: each refusal of the functions behind the commands, and its
neighbour that is taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import mist_megatron as mm
from mist_megatron.ask import evaluators
from mist_megatron.ask.convert_patched import keep_covers
from mist_megatron.ask.links import import_link_files
from mist_megatron.ask.place import _check, nodes_to_choose
from mist_megatron.ask.plan_words import host_words, told_apart
from mist_megatron.ask.report import MOST_PLANS
from mist_megatron.ask.simulate import rescheduled
from mist_megatron.ask.tune_words import check_numbers, per_layer_of
from mist_megatron.errors import InputError, MistError
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.plan import Plan

SMALL: dict[str, Any] = {
    "model": "gpt2",
    "gpus": 2,
    "gpus_per_node": 2,
    "gpu": "l4-24gb",
    "grid": 0.5,
    "global_batch": 8,
}
SAMPLES = Path(__file__).resolve().parents[2] / "reliability" / "samples"


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = mm.tune(**SMALL, fix="pp=2,dp=1,tp=1").plan
    assert found is not None
    return found


REFUSED: dict[str, tuple[Callable[[Plan, Path], object], str]] = {
    "an unknown verifier": (lambda plan, folder: mm.tune(**SMALL, verify="guess"), "--verify: unknown way"),
    "an unknown solver": (lambda plan, folder: mm.tune(**SMALL, solver="magic"), "--solver: unknown solver"),
    "no grid": (lambda plan, folder: check_numbers(0.3, 1, 1, None), "--grid is 0.3"),
    "a grid of nothing": (lambda plan, folder: check_numbers(0.0, 1, 1, None), "--grid is 0"),
    "no plans": (lambda plan, folder: check_numbers(0.5, 0, 1, None), "--top is 0"),
    "no time": (lambda plan, folder: check_numbers(0.5, 1, 1, 0.0), "--time-limit is 0"),
    "all time": (lambda plan, folder: check_numbers(0.5, 1, 1, float("inf")), "--time-limit is inf"),
    "links of any number": (
        lambda plan, folder: mm.tune(model="gpt2", any_gpus=4, gpu="l4-24gb", links=SAMPLES / "links.yaml"),
        "--links is of one number of GPUs",
    ),
    "strategies of nothing": (
        lambda plan, folder: per_layer_of("0", "heuristic", "galvatron-bmw"),
        "wanted a number",
    ),
    "strategies of full": (lambda plan, folder: per_layer_of("3", "heuristic", "full"), "is of spaces"),
    "balance of full": (
        lambda plan, folder: per_layer_of("2", "exact", "full"),
        "--balance exact is of spaces",
    ),
    "an unknown balance": (lambda plan, folder: per_layer_of("2", "odd", "galvatron-bmw"), "odd"),
    "a file for a folder": (lambda plan, folder: mm.tune(**SMALL, out=folder / "file"), "wanted a folder"),
    "below a file": (
        lambda plan, folder: mm.tune(**SMALL, out=folder / "file" / "x"),
        "cannot be (made|used)",
    ),
    "a full folder": (lambda plan, folder: mm.tune(**SMALL, out=folder), "is not empty"),
    "uneven experts of none": (lambda plan, folder: mm.tune(**SMALL, moe_imbalance=1.5), "has no experts"),
    "experts below even": (
        lambda plan, folder: mm.tune(**{**SMALL, "model": "mixtral-8x7b"}, moe_imbalance=0.5),
        "1 to",
    ),
    "a GPU beside kinds": (
        lambda plan, folder: mm.tune(**{**SMALL, "gpus": "2xl4-24gb+2xt4-16gb"}),
        "--gpu is given beside --gpus",
    ),
    "no plan to report": (lambda plan, folder: mm.report([]), "0 plans; wanted 1"),
    "many plans to report": (lambda plan, folder: mm.report([plan] * (MOST_PLANS + 1)), "plans; wanted 1"),
    "unknown ranks": (lambda plan, folder: mm.simulate(plan, ranks="some"), "--ranks: unknown choice"),
    "chunks of no schedule": (lambda plan, folder: rescheduled(plan, None, 2), "without --schedule"),
    "chunks of 1F1B": (lambda plan, folder: rescheduled(plan, "1f1b", 2), "has chunks"),
    "an unknown schedule": (
        lambda plan, folder: rescheduled(plan, "zigzag", None),
        "unknown schedule 'zigzag'",
    ),
    "chunks that do not divide": (
        lambda plan, folder: rescheduled(plan, "interleaved", 5),
        "--schedule interleaved --vpp 5",
    ),
    "an empty folder of links": (
        lambda plan, folder: import_link_files([folder / "empty"]),
        "no files in it",
    ),
    "one file that tells no link": (lambda plan, folder: import_link_files([folder / "file"]), "file"),
    "files that tell no link": (lambda plan, folder: import_link_files([folder / "bad"]), "bad"),
    "a place on one node": (lambda plan, folder: _check(plan.cluster), "wanted two or more"),
    "a place of domains": (
        lambda plan, folder: _check(ClusterSpec(gpu=gpu("gb200-186gb"), nodes=4, gpus_per_node=4)),
        "domains of",
    ),
    "a trace twice": (
        lambda plan, folder: mm.replay([SAMPLES / "trace.json", SAMPLES / "trace.json"]),
        "is given twice",
    ),
    "no trace": (lambda plan, folder: mm.replay([]), "no trace is given"),
    "unknown waits": (
        lambda plan, folder: mm.replay(SAMPLES / "trace.json", waits="some"),
        "--waits: unknown",
    ),
    "a new profile of no plan": (
        lambda plan, folder: mm.replay(SAMPLES / "trace.json", recalibrate=folder / "p.yaml"),
        "--against PLAN",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_a_line(case: str, plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("nothing\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    for name in ("a", "b", ".hidden"):
        (tmp_path / "bad" / name).write_text("nothing\n")
    asked, told = REFUSED[case]
    with pytest.raises(MistError, match=told):
        asked(plan, tmp_path)


def test_files_that_tell_links_among_others(tmp_path: Path) -> None:
    for name, text in (
        ("one.log", (SAMPLES / "mpigraph.log").read_text()),
        ("two.txt", "nothing\n"),
        (".three", "x"),
    ):
        (tmp_path / name).write_text(text)
    told = import_link_files([tmp_path])
    assert (told.files, len(told.refused), len(told.matrices)) == (2, 1, 1)
    assert "two.txt" in told.refused[0]


def test_taken_together(plan: Plan, tmp_path: Path) -> None:
    assert rescheduled(plan, None, None) is plan
    assert rescheduled(plan, "gpipe", None).schedule == "gpipe"
    assert (rescheduled(plan, "interleaved", 2).schedule, rescheduled(plan, "interleaved", 2).vpp) == (
        "interleaved",
        2,
    )
    assert per_layer_of("full", "exact", "galvatron-bmw").most is None
    assert (
        per_layer_of("3", "heuristic", "galvatron-bmw").most,
        per_layer_of("2", "heuristic", "full").most,
    ) == (3, 2)
    check_numbers(1 / 3, 1, 1, 0.5)
    done: list[tuple[int, int]] = []
    page = mm.report(
        [plan, replace(plan, schedule="gpipe")], out=tmp_path / "r.html", progress=lambda *at: done.append(at)
    )
    assert (
        done == [(1, 2), (2, 2)]
        and (tmp_path / "r.html").read_text() == page.html
        and "2 plans" in page.page.title
    )
    played = mm.simulate(plan)
    told: list[tuple[int, int]] = []
    played.with_trace(tmp_path / "t.json", lambda *at: told.append(at))
    assert told == sorted(told) and told[-1][0] <= told[-1][1]
    assert [keep_covers(("a.b", "c"), key) for key in ("a.b", "a.b.c", "a", "a.bc", "c.d")] == [
        True, True, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("system", "said", "wanted"),
    [
        ("linux", {}, "/of/me/.cache/mist-megatron"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/mist-megatron"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/of/me/Library/Caches/mist-megatron"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/mist-megatron/cache"),
        ("win32", {}, "/of/me/mist-megatron/cache"),
        ("linux", {"MIST_MEGATRON_CACHE": "/c"}, "/c"),
        ("linux", {"MIST_MEGATRON_CACHE": ""}, None),
        ("homeless", {}, None),
    ],
)
def test_where_programs_are_kept(
    monkeypatch: pytest.MonkeyPatch, system: str, said: dict[str, str], wanted: str | None
) -> None:
    def home() -> Path:
        if system == "homeless":
            raise RuntimeError("no home")
        return Path("/of/me")

    for name in ("MIST_MEGATRON_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(evaluators.Path, "home", staticmethod(home))
    found = evaluators.cache_directory()
    assert (found and found.as_posix()) == wanted


@pytest.mark.parametrize(
    ("used", "limit", "fits", "told"),
    [
        (0.0, 1.0, True, []),
        (
            2.0,
            float("inf"),
            True,
            ["host memory: 2.0 GiB per GPU; what the node has is not known: say --host-memory"],
        ),
        (2.0, 4.0, True, ["host memory: 2.0 GiB per GPU of 4.0, its share of the node's"]),
        (5.0, 4.0, False, ["host memory: 5.0 GiB per GPU of 4.0, its share of the node's: does NOT fit"]),
    ],
)
def test_what_the_host_holds(used: float, limit: float, fits: bool, told: list[str]) -> None:
    stages = [
        SimpleNamespace(host_bytes=share * used * 2**30, host_limit_bytes=limit * 2**30, host_fits=fits)
        for share in (0.5, 1)
    ]
    assert host_words(cast(Any, SimpleNamespace(stages=stages))) == told


def test_plans_of_one_shape_are_told_apart_by_what_differs(plan: Plan) -> None:
    other = replace(plan, stages=(replace(plan.stages[0], ckpt=3), plan.stages[1]))
    one, two = told_apart([plan, other])
    assert one != two and one.split(",")[0] == two.split(",")[0]
    assert told_apart([plan])[0] == told_apart([plan, plan])[0]


def test_links_of_as_many_gpus_as_are_asked_for() -> None:
    cluster = ClusterSpec(gpu=gpu("a100-sxm-40gb"), nodes=2, gpus_per_node=8)
    rates = ((None, 1e9), (1e9, None))
    matrices = [LinkMatrix(hosts=("a", "b"), bytes_per_s=rates, gpus_at_once=count) for count in (1, 8)]
    assert nodes_to_choose(cluster, matrices, {})[0].gpus_at_once == 8
    chosen, notes = nodes_to_choose(cluster, matrices, {"gpus_at_once": 1})
    assert chosen.gpus_at_once == 1 and "1 at once of the GPUs of a node" in notes[0]
    with pytest.raises(InputError, match="measured were 1, 8"):
        nodes_to_choose(cluster, matrices, {"gpus_at_once": 4})
