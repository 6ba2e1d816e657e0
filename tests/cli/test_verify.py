"""The simulator as a second opinion on a search, and on measured runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mist_megatron.ask.plan_words import told_apart
from mist_megatron.formats.plan_yaml import plan_from_mapping

JOB = (
    "--model",
    "gpt3-1.3b",
    "--gpus",
    "4",
    "--gpu",
    "a10g-24gb",
    "--global-batch",
    "16",
    "--target",
    "mist",
)
QUICK = ("--space", "full", "--grid", "0.5", "--top", "4", "--fix", "tp=1", "--fix", "pp=2")


def test_tune_verified_by_simulation(mist) -> None:  # type: ignore[no-untyped-def]
    ran = mist("tune", *JOB, *QUICK, "--verify", "simulate", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    plans = found["verify"]["plans"]
    times = [plan["iteration_s"] for plan in plans]
    ranks = [plan["rank_by_closed_form"] for plan in plans]
    assert times == sorted(times)
    assert sorted(ranks) == list(range(1, len(plans) + 1))
    assert found["verify"]["reranked"] == (ranks != sorted(ranks))
    assert found["provenance"]["rank"] == ranks[0]
    for plan in plans:
        apart_s = plan["closed_form_s"] - plan["iteration_s"]
        assert plan["passes_s"] + plan["waiting_s"] == pytest.approx(apart_s, abs=1e-9)


def test_verify_for_people_fits_80_columns(mist) -> None:  # type: ignore[no-untyped-def]
    ran = mist("tune", *JOB, *QUICK, "--verify", "simulate")
    assert ran.code == 0, ran.err
    assert "verified by simulation" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_plans_of_one_shape_are_told_apart() -> None:
    fast, slow = (
        {"layers": 12, "nodes": 1, "gpus_per_node": 2, "dp": 2, "tp": 1, "micro_batch": 2, "ckpt": ckpt}
        for ckpt in (0, 3)
    )
    stages = ([fast, fast], [fast, slow], [{**fast, "zero": 2}, fast])
    one, two, three = (
        plan_from_mapping(
            {
                "schema": 1,
                "model": "gpt3-1.3b",
                "training": {"global_batch": 16, "seq_len": 2048},
                "cluster": {"gpu": "a10g-24gb", "nodes": 1, "gpus_per_node": 4},
                "target": "mist",
                "grad_accum": 4,
                "stages": each,
            }
        )
        for each in stages
    )
    shape = "pp 2, dp 2, tp 1, micro-batch 2, 4 micro-batches"
    assert told_apart([one, two]) == [f"{shape}, recomputed none", f"{shape}, recomputed none/3 full"]
    assert told_apart([one, three])[1] == f"{shape}, ZeRO 2/{fast.get('zero', one.stages[0].zero)}"
    assert told_apart([one]) == [shape]


def test_refused_ways(mist) -> None:  # type: ignore[no-untyped-def]
    ran = mist("tune", *JOB, "--verify", "guess")
    assert (ran.code, ran.out) == (2, "")
    assert "known: simulate" in ran.err
    ran = mist("validate", "rows.csv", "--by", "guess")
    assert ran.code == 2
    assert "known: closed-form, simulate" in ran.err


def test_measured_runs_by_simulation(mist, runs_dir: Path) -> None:  # type: ignore[no-untyped-def]
    """Mist's six runs, by both: the simulation is at most half a percent worse on average."""
    path = runs_dir / "mist_l4.csv"
    errors = {}
    for by in ("closed-form", "simulate"):
        ran = mist("validate", str(path), "--by", by, "--json")
        errors[by] = json.loads(ran.out)["overall"]["time_mape"]
    assert errors["simulate"] <= errors["closed-form"] + 0.005
