"""Sweeps, settings and numbers of GPUs against the single searches that they stand for."""

from __future__ import annotations

import csv
import io
import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from dying_pool import Dying

import mist_megatron as mm
from mist_megatron.ask.gpu_counts import counts
from mist_megatron.ask.ranges import (
    most_of_any,
    seconds_of,
    token_count,
    tokens_of,
    tokens_words,
    whole_numbers,
)
from mist_megatron.search.search import Watch

JOB = {"model": "gpt3-1.3b", "gpu": "l4-24gb", "space": "megatron"}


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("8k", 8192), ("1K", 1024)])
def test_tokens_of_a_sequence(text: str, tokens: int) -> None:
    assert token_count(text) == tokens


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "8kk", "", "9" * 5000])
def test_what_are_no_tokens(text: str) -> None:
    with pytest.raises(mm.InputError, match=r"--seq is .*; wanted a whole number such as 8192, or 8k"):
        token_count(text)


def test_each_point_is_what_tune_finds() -> None:
    swept = mm.sweep(**JOB, gpus=[2, 4], seq="1k,2k", price=0.5)
    assert [(point.gpus, point.seq) for point in swept.points] == [(2, 1024), (4, 1024), (2, 2048), (4, 2048)]
    for point in swept.points:
        alone = mm.tune(**JOB, gpus=point.gpus, seq=point.seq)
        assert point.iteration_s == alone.iteration_s
        tokens_per_s = 16 * point.gpus * point.seq / alone.iteration_s
        assert point.tokens_per_s == pytest.approx(tokens_per_s)
        assert point.gpu_hours == pytest.approx(1e12 / tokens_per_s * point.gpus / 3600)
        assert point.dollars == pytest.approx(0.5 * point.gpu_hours)
        base = next(one for one in swept.points if one.seq == point.seq)
        assert point.efficiency == pytest.approx(
            point.tokens_per_s / base.tokens_per_s * base.gpus / point.gpus
        )


@pytest.mark.parametrize("lives", [0, 1])
def test_a_sweep_goes_on_where_a_worker_was_killed(lives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**JOB, "gpus": [1, 2, 4], "seq": "1k"}
    whole = mm.sweep(**asked)
    said: list[str] = []
    monkeypatch.setattr("mist_megatron.ask.sweep.worker_pool", lambda workers: nullcontext(Dying(lives)))
    found = mm.sweep(**asked, workers=2, watch=Watch(tell=said.append))
    assert found.points == whole.points
    assert len(said) == 1 and "worker process died" in said[0]


def test_a_sweep_as_it_is_typed(ran_here, tmp_path: Path) -> None:
    typed = ("sweep", "--model", "gpt3-13b", "--gpus", "1,2", "--gpu", "l4-24gb", "--space", "megatron")
    ran = ran_here(*typed, "--csv", "s.csv", "--workers", "2", "--json")
    assert ran.code == 0, ran.err
    points = json.loads(ran.out)["points"]
    assert [point["why"] for point in points] == ["nothing fits", "nothing fits"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "s.csv").read_text())))
    assert [(row["gpus"], row["iteration_s"], row["reason"]) for row in rows] == [
        (str(point["gpus"]), "", point["reason"]) for point in points
    ]
    typed = (
        "sweep",
        "--model",
        "gpt3-1.3b",
        "--gpus",
        "2,4",
        "--gpu",
        "l4-24gb,a10g-24gb",
        "--space",
        "megatron",
    )
    ran = ran_here(*typed, "--price", "l4-24gb=0.7", "--chart", "s.svg")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["GPU", "GPUs", "s/step", "tokens/s", "scaling", "GPU-h/Tt", "$/Tt", "plan"]
    assert len(lines) == 7
    assert ElementTree.parse(tmp_path / "s.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", "8,x"), "--gpus is 'x'; wanted a whole number"),
        (("--gpus", "8xa100-sxm-80gb+8xh100-sxm-80gb"), "wanted numbers of GPUs of one kind"),
        (("--gpus", "8,4,..,64"), "does not ascend"),
        (("--gpus", "8,8"), "each once"),
        (("--gpus", "1,3,..,100000"), "wanted at most 64"),
        (("--gpus", "2", "--price", "free"), "--price: 'free'"),
        (("--gpus", "2", "--gpu", "h1000"), "h1000"),
        (("--gpus", "2", "--workers", "0"), "--workers is 0; wanted 1 to 256"),
        (("--gpus", "2", "--workers", "1000000000000"), "--workers is 1000000000000; wanted 1 to 256"),
        (("--gpus", "2,4", "--strategies"), "one value of each option, not 2"),
        (("--gpus", "2", "--chart", "no/s.svg"), "no folder no"),
        ((), "--gpus is missing"),
    ],
)
def test_refusals(ran_here, arguments: tuple[str, ...], said: str) -> None:
    ran = ran_here("sweep", "--model", "gpt3-1.3b", *arguments)
    assert (ran.code, ran.out, "Traceback" in ran.err) == (2, "", False)
    assert said in ran.err


def test_every_setting_is_played(tmp_path: Path, ran_here) -> None:
    """DistSim's use case: 15 settings of 16 GPUs; here the 6 of 4, each against the search that fixes it."""
    found = mm.strategies(model="gpt3-1.3b", gpu="l4-24gb", gpus=4)
    settings = {(each.dp, each.tp, each.pp) for each in found.strategies}
    assert settings == {(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)}
    times = [each.iteration_s for each in found.strategies if each.iteration_s]
    assert times == sorted(times)
    assert found.gain == times[-1] / times[0]
    best = found.strategies[0]
    assert mm.simulate(best.plan).iteration_s == best.iteration_s
    alone = mm.tune(**JOB, gpus=4, fix={"dp": best.dp, "tp": best.tp, "pp": best.pp})
    assert alone.iteration_s == best.closed_form_s
    typed = ("--model", "gpt3-1.3b", "--gpus", "4", "--gpu", "l4-24gb", "--strategies", "--chart", "h.svg")
    ran = ran_here("sweep", *typed)
    assert ran.code == 0, ran.err
    assert max(map(len, ran.out.splitlines())) <= 80
    drawn = "".join(ElementTree.parse(tmp_path / "h.svg").getroot().itertext())
    assert "1.00" in drawn
    assert f"{found.gain:.2f}" in drawn


def test_sixteen_gpus_have_fifteen_settings() -> None:
    from mist_megatron.ask.strategies import settings_of

    assert len(set(settings_of(16))) == 15
    assert {dp * tp * pp for dp, tp, pp in settings_of(24)} == {24}


def test_the_fewest_gpus_are_the_first_that_are_in_time() -> None:
    job = {**JOB, "global_batch": 64}
    times = {gpus: mm.tune(**job, gpus=gpus).iteration_s for gpus in (2, 4, 8)}
    tokens, steps = 1e9, -(-(10**9) // (64 * 2048))
    for gpus, iteration_s in times.items():
        seconds = steps * iteration_s
        found = mm.tune(**job, any_gpus=8, tokens=tokens, deadline=f"{seconds * 1.0001:.3f}s")
        assert (found.plan.cluster.gpus, found.iteration_s) == (gpus, iteration_s)
        assert f"{gpus} GPUs are the fewest" in found.notes[0]
    with pytest.raises(mm.NoFeasiblePlan, match="no number of GPUs up to 8 trains 1B tokens"):
        mm.tune(**job, any_gpus=8, tokens=tokens, deadline=f"{steps * times[8] * 0.999:.3f}s")


def test_any_number_of_gpus_is_the_best_of_all(ran_here) -> None:
    # A batch of 12 on 8 GPUs: 6 of them, were they a node, would do as well; of 1, 2, 4 and 8 all are tried.
    job = {**JOB, "global_batch": 12}
    best_s = min(mm.tune(**job, gpus=gpus).iteration_s for gpus in (2, 4, 8))
    assert mm.tune(**job, any_gpus=8).iteration_s == best_s
    typed = ("--model", "gpt3-1.3b", "--gpu", "l4-24gb", "--space", "megatron", "--global-batch", "12")
    ran = ran_here("tune", *typed, "--gpus", "any<=8", "--json")
    told = json.loads(ran.out)
    assert told["prediction"]["iteration_s"] == best_s
    assert "of 4 numbers of GPUs from 1 to 8" in told["notes"][0]
    refused = ran_here("compare", *typed[:4], "--gpus", "any<=8")
    assert (refused.code, "`tune` alone chooses" in refused.err) == (2, True)
    refused = ran_here("tune", *typed, "--gpus", "8", "--deadline", "3d")
    assert (refused.code, "--deadline and --tokens go together" in refused.err) == (2, True)


def test_numbers_that_are_tried() -> None:
    assert counts(8, 40) == (1, 2, 4, 8, 16, 24, 32, 40)
    many = counts(8, 4096)
    assert many[-1] == 4096
    steps = [(after - before) / after for before, after in pairwise(many)]
    assert max(steps[35:]) <= 1 / 32


def test_compare_tells_what_cannot_run_from_what_does_not_fit(ran_here) -> None:
    small = ("--gpu", "l4-24gb", "--json")
    ran = ran_here(
        "compare", "--model", "falcon-1.3b", "--gpus", "2", "--targets", "megatron,deepspeed", *small
    )
    told = json.loads(ran.out)["targets"]
    assert told["megatron"]["why"] == "cannot run"
    alone = mm.tune(model="falcon-1.3b", gpus=2, gpu="l4-24gb", target="deepspeed")
    assert told["deepspeed"]["iteration_s"] == alone.iteration_s
    ran = ran_here("compare", "--model", "gpt3-7b", "--gpus", "1", "--targets", "megatron", *small)
    assert (ran.code, "megatron: nothing fits" in ran.err) == (3, True)
    ran = ran_here("compare", "--model", "gpt2", "--gpus", "1", "--targets", "jax", *small)
    assert (ran.code, "jax" in ran.err) == (2, True)


def test_papers_spaces_are_compared_where_they_are_named() -> None:
    told = mm.compare(model="gpt2", gpus=1, gpu="l4-24gb").to_dict()["spaces"]
    assert list(told) == ["megatron", "megatron-expert", "deepspeed", "full"]


def test_words() -> None:
    assert whole_numbers("--gpus", "8,16,..,128") == (8, 16, 32, 64, 128)
    assert whole_numbers("--gpus", "8,12,..,24") == (8, 12, 16, 20, 24)
    assert whole_numbers("--seq", "4k,8192", binary=True) == (4096, 8192)
    assert whole_numbers("--gpus", [2, 4]) == (2, 4)
    assert (tokens_of("t", "1T"), tokens_of("t", "300b"), tokens_of("t", 5e9)) == (1e12, 3e11, 5e9)
    assert (tokens_words(3e11), tokens_words(1.5e12), tokens_words(12)) == (
        "300B tokens",
        "1.5T tokens",
        "12 tokens",
    )
    assert (seconds_of("d", "30d"), seconds_of("d", "90min")) == (2592000, 5400)
    assert (most_of_any("g", "any<=512"), most_of_any("g", "8"), most_of_any("g", None)) == (512, None, None)
    for wrong in ("", "-1T", "1Q", "nan", "1e40"):
        with pytest.raises(mm.InputError, match="wanted tokens"):
            tokens_of("--tokens", wrong)
    for wrong in ("30", "d", "-1d", "0d"):
        with pytest.raises(mm.InputError, match="wanted a time"):
            seconds_of("--deadline", wrong)
