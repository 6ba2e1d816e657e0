"""Real Megatron-core training with and without our patches, on CPU: same losses, norms and parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")
from megatron_case import Case, as_argument
from ranks import run_ranks

Runs = dict[str, tuple[dict, ...]]


@cache
def _run(argument: str, processes: int, megatron: str) -> tuple[tuple[dict, ...], ...]:
    by_rank = run_ranks("patched_megatron.py", argument, ranks=processes, ready="megatron", first=megatron)
    return tuple(zip(*by_rank, strict=True))


def run_all(cases: dict[str, Case], processes: int, megatron: str = "") -> Runs:
    """Each case's results, one per rank; all run in the same processes, so they share their grid.

    `megatron`: a folder with another megatron-core than the installed one.
    """
    return dict(zip(cases, _run(as_argument(cases.values()), processes, megatron), strict=True))


def assert_same(plain, patched):
    """Bit for bit."""
    for left, right in zip(plain, patched, strict=True):
        for what in ("losses", "norms", "evaluated", "skipped", "digest"):
            assert right[what] == left[what], what


def assert_close(plain, patched, relative=1e-6):
    """Where sums are taken in another order."""
    for left, right in zip(plain, patched, strict=True):
        for what in ("losses", "norms", "evaluated", "sums"):
            known = [[value for value in run[what] if value is not None] for run in (left, right)]
            assert known[1] == pytest.approx(known[0], rel=relative, abs=relative), what
        assert right["skipped"] == left["skipped"]


UNEVEN = Case(pp=2, layers_per_stage=[3, 1], recompute=[0, 0], evaluate_at=[2], resume_at=4)
"""Patched, stage 0 recomputes one of three layers and offloads half of the rest, stage 1 a quarter."""
OFFLOADED = {"recompute": [1, 0], "patches": {"activation_offload": [0.5, 0.25]}}
HALF = replace(UNEVEN, bf16=True, loss_scale=8.0, inf_at=5)
HOST = replace(HALF, distributed_optimizer=True, optimizer_fraction=[0.75, 0.25])


@cache
def two_stages() -> Runs:
    exact = {"optimizer_fraction": [0.75, 0.25]}
    both = {"activation_offload": [1.0, 0.5], **exact}
    cases = {
        "fp32": UNEVEN,
        "fp32 patched": replace(UNEVEN, **OFFLOADED),
        "bf16": HALF,
        "bf16 patched": replace(HALF, **OFFLOADED),
        # With the same shards on the host: see test_exact_fraction_alone_and_all_together.
        "host": replace(HOST, patches=exact),
        "host patched": replace(HOST, recompute=[2, 0], patches=both),
    }
    return run_all(cases, 2)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_activation_offload_per_stage_with_recompute(name):
    reference, found = two_stages()[name], two_stages()[f"{name} patched"]
    assert_same(reference, found)
    assert len(reference[1]["losses"]) == UNEVEN.steps
    assert reference[1]["skipped"] == ([5] if name == "bf16" else [])
    assert reference[1]["losses"][-1] < reference[1]["losses"][0]
    for stage, fraction in enumerate((0.5, 0.25)):
        share = found[stage]["offloaded_bytes"] / found[stage]["saved_bytes"]
        assert share == pytest.approx(fraction, abs=0.002)
    # Two layers keep on stage 0, one on stage 1: recomputed layers count for nothing.
    assert found[0]["saved_bytes"] == 2 * found[1]["saved_bytes"]


def test_exact_optimizer_fraction():
    """Megatron's own split overshoots; ours lands within half the smallest shard; training is the same."""
    base = Case(bf16=True, distributed_optimizer=True, optimizer_fraction=[0.5], micro_batches=2)
    asked = replace(base, patches={"optimizer_fraction": [0.5]})
    cases = {"native": base, "exact": asked}
    for name in ("megatrons_split", "first_copies"):
        cases[name] = replace(asked, steps=1, mutate=name)
    native, exact, megatrons_split, first_copies = run_all(cases, 1).values()
    assert_same(native, exact)
    assert abs(exact[0]["host_share"] - 0.5) < abs(native[0]["host_share"] - 0.5)
    assert exact[0]["host_share"] == pytest.approx(0.5, abs=0.01)
    # Megatron's first optimizer, on whole parameters, stays alive beside the one on shards.
    assert len(native[0]["hybrids"]) == 2 and min(native[0]["hybrids"]) > 0
    assert "failed" not in first_copies[0] and len(first_copies[0]["hybrids"]) == 2
    assert megatrons_split[0]["host_share"] == native[0]["host_share"]
    assert (native[0]["pinned_share"], exact[0]["pinned_share"]) == (0.0, 1.0), "fp32 copies on the host"
    assert exact[0]["hybrids"] == [4 * exact[0]["parameters"]], "fp32 copies of this rank's shards alone"


def test_both_patches_together():
    found = two_stages()["host patched"]
    assert_same(two_stages()["host"], found)
    for stage, fraction in enumerate((0.75, 0.25)):
        # One layer and the head make few shards, so the bound is a shard of this tiny model.
        assert found[stage]["host_share"] == pytest.approx(fraction, abs=0.03)
