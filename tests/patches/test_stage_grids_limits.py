"""Which grids are taken and which refused, and the rank tuples that stand for pipelines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mist_patches.core.hooking import PatchRefused
from mist_patches.megatron.grids import read_grids


def document(*stages: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """Stages as (dp, tp, micro_batch)."""
    entries, first = [], 0
    for number, (dp, tp, micro_batch) in enumerate(stages):
        place = {"stage": number, "first_rank": first, "ranks": dp * tp}
        entries.append({**place, "dp": dp, "tp": tp, "micro_batch": micro_batch, "zero": 1})
        first += dp * tp
    whole = {"world_size": first, "virtual_pipeline": 1, "context_parallel": 1, "stages": entries}
    return {**whole, **more}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (document((2, 1, 1)), "at least 2"),
        (document((2, 1, 1), (1, 2, 2), virtual_pipeline=2), "1F1B schedule only, wanted 1"),
        (document((2, 1, 1), (1, 2, 2), context_parallel=2), "batch only, wanted 1"),
        (document((3, 1, 2), (2, 1, 3)), "dp is 3 on stage 0 and 2 on stage 1"),
        (document((2, 1, 1), (1, 2, 1)), "micro_batch * dp = 1 * 1"),
        (document((2, 1, 1), (1, 2, 2), world_size=5), "hold 4 ranks together, world_size is 5"),
    ],
)
def test_refused_with_the_reason(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchRefused, match="stage_grids") as refused:
        read_grids(given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"), [("zero", 2), ("first_rank", 3), ("stage", 0), ("ranks", 3), ("tp", 3)]
)
def test_a_wrong_entry_is_refused(key: str, value: int) -> None:
    wrong = document((2, 1, 1), (1, 2, 2))
    wrong["stages"][1][key] = value
    with pytest.raises(PatchRefused):
        read_grids(wrong)


def test_dp_may_grow_and_shrink_along_the_pipeline() -> None:
    grids = read_grids(document((4, 1, 1), (2, 2, 2), (1, 1, 4), (2, 1, 2)))
    assert grids.world_size == 11
    assert grids.described() == "dp4 x tp1 -> dp2 x tp2 -> dp1 x tp1 -> dp2 x tp1"


def test_equal_grids_have_megatrons_own_pipelines() -> None:
    """Megatron's documentation of 16 GPUs on tp2, pp4: [g0, g4, g8, g12], [g1, g5, g9, g13], ..."""
    grids = read_grids(document(*[(2, 2, 1)] * 4))
    assert grids.pipelines() == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8)), min_size=2, max_size=5))
@settings(max_examples=100, deadline=None)
def test_every_rank_is_in_a_pipeline_and_every_shard_has_a_number(sizes: list[tuple[int, int]]) -> None:
    grids = read_grids(document(*[(dp, tp, 8 // dp) for dp, tp in sizes]))
    pipelines = grids.pipelines()
    assert {rank for pipeline in pipelines for rank in pipeline} == set(range(grids.world_size))
    for pipeline in pipelines:
        assert [grids.of_rank(rank).stage for rank in pipeline] == list(range(len(sizes)))
    members: dict[int, set[tuple[int, int]]] = {}
    for rank in range(grids.world_size):
        grid = grids.of_rank(rank)
        place = grid.stage, (rank - grid.first_rank) % grid.tp
        members.setdefault(grids.shard_index(rank), set()).add(place)
    assert sorted(members) == list(range(sum(tp for _, tp in sizes)))
    assert all(len(places) == 1 for places in members.values()), "one number, one data-parallel group"
