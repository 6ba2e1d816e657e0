"""DeepSpeed 0.19.0, which tests/setup_frameworks.sh lays beside the newest: every patch but pipeline_stages.

The same trainer and the same comparison, in processes of their own that find the older package first. That
release skips no step for an infinite gradient but with fp16, so that infinite ones are there in fp16 alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs the test framework environment")
from deepspeed_cases import (
    FULL,
    Z1_HOST,
    Z2_HOST,
    Z3_HOST,
    beside_plain,
    require_equal,
    require_shares,
    with_patches,
    with_references,
)
from ranks import run_ranks
from short_form import some_of

OLDER = Path(sys.prefix) / "deepspeed-0.19.0"
pytestmark = pytest.mark.skipif(
    not (OLDER / "deepspeed").is_dir(),
    reason=f"no DeepSpeed 0.19.0 in {OLDER.name}; run setup_frameworks.sh",
)
ACTIVATIONS = {"recomputed": 2, "fraction": 0.5}
NO_INF = {key: step for key, step in FULL.items() if key != "inf_at"}
IN_FP16 = {"precision": "fp16", "accumulate_in": "fp16", **FULL}
IN_BF16 = {"precision": "bf16", "accumulate_in": "bf16", **NO_INF}
OFFLOAD = {
    "optimizer_fraction": 0.6,
    "weight_fraction": 0.3,
    "activations": ACTIVATIONS,
    "decoupled_step": True,
}
CASES = {
    "all z3": with_patches(replace(Z3_HOST, **NO_INF), **OFFLOAD, gradient_fraction=0.5),
    "all z2 fp16": with_patches(replace(Z2_HOST, **IN_FP16), **OFFLOAD, gradient_fraction=0.6),
    "all z1 bf16": with_patches(replace(Z1_HOST, **IN_BF16), **OFFLOAD),
}
CASES = some_of(3, CASES)
RANKS = 2


@cache
def told() -> list[dict]:
    """What each rank of the one start printed."""
    plan = with_references(list(CASES.values()))
    argument = json.dumps([asdict(case) for case in plan])
    words = {"ready": "deepspeed", "first": str(OLDER)}
    return [found for (found,) in run_ranks("patched_deepspeed.py", argument, ranks=RANKS, **words)]


def ran(name: str) -> list[tuple[dict, dict]]:
    """Per rank, a run and the plain run it is held against."""
    return beside_plain(CASES, [rank["cases"] for rank in told()])[name]


def test_it_is_the_older_version() -> None:
    for rank in told():
        assert (rank["deepspeed"], rank["package"]) == ("0.19.0", "0.19.0")


@pytest.mark.parametrize("name", CASES)
def test_patched_run_equals_the_plain_one(name: str) -> None:
    for run, reference in ran(name):
        require_equal(CASES[name], run, reference)
    require_shares(CASES[name], [run for run, _ in ran(name)])


def test_its_pipelines_are_refused() -> None:
    from mist_patches.core.stage_guards import version_problem

    assert version_problem("deepspeed", "0.19.0", {}, ["optimizer_fraction", "decoupled_steps"]) is None
    problem = version_problem("deepspeed", "0.19.0", {}, ["pipeline_stages"])
    assert problem is not None and "pipeline_stages was not run on deepspeed 0.19.0" in problem
    assert "wanted 0.19.8" in problem
