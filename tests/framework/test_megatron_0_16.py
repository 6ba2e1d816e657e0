"""Every patch on megatron-core 0.16.1, which tests/setup_frameworks.sh lays beside the newest one.

The same trainer and the same cases, in processes of their own that find the older package first.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from short_form import one_of

pytest.importorskip("megatron", reason="needs the test framework environment")
from ranks import run_ranks
from test_megatron_patches import Runs, assert_same, run_all
from test_megatron_steps_and_states import (
    ALL,
    BUSY,
    FULL,
    HALF,
    LAYOUT,
    SHARDED,
    STATES,
    STEPS,
    assert_layout_is_essential,
    one_bucket,
    with_patches,
)

OLDER = Path(sys.prefix) / "megatron-0.16.1"
pytestmark = pytest.mark.skipif(
    not (OLDER / "megatron").is_dir(),
    reason=f"no megatron-core 0.16.1 in {OLDER.name}; run setup_frameworks.sh",
)
ODD = replace(FULL, **SHARDED, **BUSY, hidden=40)
"""Norms of 40 values, which the distributed optimizer pads to 64 in its buckets."""


def run(cases: dict, processes: int) -> Runs:
    return run_all(cases, processes, str(OLDER))


MUTANTS = {
    "no_hooks": {"patches": STEPS, "mutate": "no_hooks"},
    "no_copy_in": {"patches": {"state_offload": [[0.5, 0.5]]}, "mutate": "no_copy_in"},
    "empty_host": {"patches": {"activation_offload": [0.5]}, "mutate": "empty_host"},
}


PATCHES = {"steps": STEPS, "states": STATES, "activations": {"activation_offload": [0.5]}}
# What states and steps have moved is looked at below.
ALONE = [
    ("bf16", "states"),
    ("fp32 sharded", "steps"),
    *one_of(
        2,
        [
            ("bf16", "steps"),
            ("fp32 sharded", "states"),
            ("bf16", "activations"),
            ("fp32 sharded", "activations"),
        ],
    ),
]


@cache
def one_process() -> Runs:
    base = {"bf16": replace(HALF, **BUSY), "fp32 sharded": ODD}
    host = replace(HALF, **SHARDED, **BUSY, optimizer_fraction=[0.5])
    exact = {"optimizer_fraction": [0.5]}
    return run(
        {
            **{(name, "plain"): case for name, case in base.items()},
            **{(name, patch): replace(base[name], patches=PATCHES[patch]) for name, patch in ALONE},
            ("host", "native"): host,
            ("host", "exact"): replace(host, patches=exact),
            ("host", "all"): replace(host, patches={**ALL, **exact}, twice=True),
            ("host not resumed", "native"): replace(host, resume_at=None),
            ("host not resumed", "exact"): replace(host, resume_at=None, patches=exact),
            ("bf16", "all"): replace(base["bf16"], patches=ALL, twice=True),
            ("fp32 sharded", "all"): replace(ODD, patches=ALL),
            ("bf16", "plain again"): base["bf16"],
            **{("mutant", name): replace(base["bf16"], **words) for name, words in MUTANTS.items()},
        },
        1,
    )


REFUSED = """
import json
import megatron_cpu, staged_model
megatron_cpu.import_megatron()
import megatron.core
from mist_patches.core import hooking
from mist_patches.megatron import stage_grids as patch
case = staged_model.Case([[3, 2, 1, 1, 0], [1, 1, 2, 2, 0]])
try:
    patch.hook_stage_grids(case.document())
except hooking.PatchRefused as refused:
    print("RESULT", json.dumps({"version": megatron.core.__version__, "refused": str(refused)}))
assert not hooking._installed
"""


def test_it_is_the_older_version(tmp_path: Path) -> None:
    """And it is too old for stages on grids of their own, which it is told in one line."""
    (tmp_path / "refused.py").write_text(REFUSED)
    ((found,),) = run_ranks(str(tmp_path / "refused.py"), ranks=1, first=str(OLDER))
    assert found["version"] == "0.16.1"
    assert found["refused"] == (
        "stage_grids: initialize_model_parallel of megatron-core 0.16.1 takes no rank_offset, so stages "
        "cannot have process groups of their own; wanted 0.19.2"
    )


@pytest.mark.parametrize(("name", "patch"), ALONE)
def test_alone(name, patch):
    found = one_process()
    assert_same(found[name, "plain"], found[name, patch])
    (plain,) = found[name, "plain"]
    assert plain["losses"][-1] < plain["losses"][0] - 0.3, "the tiny model does not learn"
    assert plain["skipped"] == [3]


def test_all_together_and_undone():
    found = one_process()
    for label in ("all", "plain again"):
        assert_same(found["bf16", "plain"], found["bf16", label])
    assert_same(found["fp32 sharded", "plain"], found["fp32 sharded", "all"])
    assert_same(found["host", "exact"], found["host", "all"])


@pytest.mark.parametrize("name", MUTANTS)
def test_essential_lines(name):
    """Without this line of the patch training differs, or fails."""
    (plain,), (mutant,) = one_process()["bf16", "plain"], one_process()["mutant", name]
    assert "failed" in mutant or mutant["digest"] != plain["digest"]


def test_layout_by_layer_is_essential():
    found = data_parallel()
    assert_layout_is_essential(found["laid out", "steps"][0], found["one_bucket", "mutant"][0])


def test_exact_optimizer_fraction():
    native, exact = (one_process()["host not resumed", name] for name in ("native", "exact"))
    assert_same(native, exact)
    assert abs(exact[0]["host_share"] - 0.5) < abs(native[0]["host_share"] - 0.5)


def test_what_is_offloaded_is_away():
    (plain,), (moved,) = one_process()["bf16", "plain"], one_process()["bf16", "states"]
    for kind, share in zip(("weights", "grads"), STATES["state_offload"][0], strict=True):
        whole = plain["bytes"][f"{kind}_device"]
        assert moved["bytes"][f"{kind}_device"] == pytest.approx((1 - share) * whole, abs=0.1 * whole)


def test_steps_come_layer_by_layer():
    (ran,) = one_process()["fp32 sharded", "steps"]
    units = [unit for event, unit in ran["events"][1] if event == "gather"]
    assert units[1:5] == [f"decoder.layers.{k}" for k in range(4)]


@cache
def two_processes() -> Runs:
    pipeline = replace(
        HALF, pp=2, layers_per_stage=[3, 1], recompute=[1, 0], **SHARDED, micro_batches=4, **BUSY
    )
    return run(with_patches({"pipeline": pipeline}, all=ALL), 2)


def test_pipeline_of_two_stages():
    assert_same(two_processes()["pipeline", "plain"], two_processes()["pipeline", "all"])


@cache
def data_parallel() -> Runs:
    laid_out = replace(HALF, **SHARDED, **BUSY, hidden=40, patches=LAYOUT)
    cases = {"laid out": laid_out, "overlap": replace(laid_out, overlap=True)}
    every = with_patches(cases, steps=STEPS, both={**STEPS, **STATES})
    every["overlap", "both"] = replace(every["overlap", "both"], may_fail=True)
    every["one_bucket", "mutant"] = one_bucket(laid_out)
    return run(every, 2)


def test_two_data_parallel_ranks():
    found = data_parallel()
    for name, patch in (("laid out", "steps"), ("laid out", "both"), ("overlap", "steps")):
        assert_same(found[name, "plain"], found[name, patch])
    for rank in found["overlap", "both"]:
        assert rank["failed"].startswith("PatchRefused: weight offload: overlap_param_gather")
