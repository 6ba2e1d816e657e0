"""The simulator as a second opinion on a search, and on measured runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def test_refused_ways(mist) -> None:  # type: ignore[no-untyped-def]
    ran = mist("tune", *JOB, "--verify", "guess")
    assert (ran.code, ran.out) == (2, "")
    assert "known: simulate" in ran.err
    ran = mist("validate", "rows.csv", "--by", "guess")
    assert ran.code == 2
    assert "known: closed-form, simulate" in ran.err
    ran = mist("validate", "rows.csv", "--by", "simulate", "--cross-validate")
    assert ran.code == 2


def test_measured_runs_by_simulation(mist, measured_dir: Path) -> None:  # type: ignore[no-untyped-def]
    """Mist's six runs, by both: the simulation is at most half a percent worse on average."""
    path = measured_dir / "end_to_end" / "mist_l4.csv"
    if not path.is_file():
        pytest.skip(f"{path.name} is not on this machine")
    errors = {}
    for by in ("closed-form", "simulate"):
        ran = mist("validate", str(path), "--by", by, "--json")
        errors[by] = json.loads(ran.out)["overall"]["time_mape"]
    assert errors["simulate"] <= errors["closed-form"] + 0.005
