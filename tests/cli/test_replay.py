"""The page of `replay`, its JSON, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hand_made import two_streams

from mist_megatron.ask.recalibrate import Recalibrated
from mist_megatron.recorded.against import Compared, Line


@pytest.fixture
def trace(tmp_path: Path) -> str:
    two_streams().write(tmp_path / "t.json.gz", deviceProperties=[{"name": "NVIDIA A100-SXM4-80GB"}])
    return "t.json.gz"


def test_the_page(ran_here, trace):  # type: ignore[no-untyped-def]
    ran = ran_here("replay", trace)
    assert ran.code == 0
    told = (
        "step 1 of 1 rank: 0.4 ms",
        "longest kernels",
        "gemm",
        "waits said by cuda_sync",
        "100.0% of kernels",
    )
    assert not [words for words in told if words not in ran.out]
    assert "with waits" in ran.out  # a collective of one rank


def test_the_document(ran_here, trace, tmp_path):  # type: ignore[no-untyped-def]
    ran = ran_here("replay", trace, "--json", "--scale", "kernel=gemm:2", "--trace", "new.json")
    document = json.loads(ran.out)
    (rank,) = document["recorded"]["ranks"]
    parts = ("exposed_compute_s", "exposed_communication_s", "overlapped_s", "host_bound_s", "idle_s")
    assert sum(rank[part] for part in parts) == pytest.approx(rank["window_s"])
    assert rank["window_s"] == pytest.approx(400e-6)
    assert document["what_if"]["step_s"] == pytest.approx(500e-6)
    assert document["retimed"][0]["share_of_gpu_work"] == pytest.approx(100 / 180)
    assert (tmp_path / "new.json").exists()
    again = json.loads(ran_here("replay", "new.json", "--json").out)
    assert again["recorded"]["step_s"] == pytest.approx(500e-6)


def test_every_key_of_the_document_is_described(ran_here, trace):  # type: ignore[no-untyped-def]
    text = (Path(__file__).parents[2] / "docs" / "tutorials" / "traces.md").read_text()
    document = json.loads(ran_here("replay", trace, "--json", "--scale", "kernel=gemm:2").out)
    document["links"]["evidence"] = {}
    keys = {key for key in keys_of(document) if not key.isdigit()}
    keys |= {field.name for kind in (Compared, Line, Recalibrated) for field in fields(kind)}
    assert not sorted(key for key in keys if not re.search(rf"[`.]{key}`", text))


def keys_of(value: object) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    return {*value, *set().union(*map(keys_of, value.values()))}


@pytest.mark.parametrize("framework", ["torch", "megatron", "deepspeed"])
def test_how_to_record(ran_here, framework):  # type: ignore[no-untyped-def]
    ran = ran_here("replay", "--how", framework)
    assert ran.code == 0
    assert 8 <= len(ran.out.splitlines()) <= 30
    assert json.loads(ran_here("replay", "--how", framework, "--json").out)["how"] == framework


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no trace is given"),
        (["absent.json"], "does not exist"),
        (["t.json.gz", "t.json.gz"], "given twice"),
        (["t.json.gz", "--step", "9"], "no step 9; steps in it: 1"),
        (["t.json.gz", "--waits", "all"], "unknown choice"),
        (["t.json.gz", "--scale", "gemm:2"], "wanted kernel=REGEX:FACTOR"),
        (["t.json.gz", "--recalibrate"], "needs --out"),
        (["t.json.gz", "--recalibrate", "--out", "p.yaml"], "--against PLAN"),
        (["t.json.gz", "--trace", "t.json.gz"], "what the command reads"),
        (["--how", "jax"], "--how"),
    ],
)
def test_what_is_refused(ran_here, trace, arguments, told):  # type: ignore[no-untyped-def]
    ran = ran_here("replay", *arguments)
    assert ran.code == 2
    assert told in ran.err
    assert "Traceback" not in ran.err
