"""Which ranks form which stage when every pipeline stage has its own data- and tensor-parallel sizes.

Standard library only: read and checked before torch is imported, from the `stages` of stages.json.
What runs on it is in megatron/stage_grids.py.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mist_patches.core.hooking import PatchRefused


@dataclass(frozen=True)
class StageGrid:
    """One stage: `dp * tp` contiguous ranks, the tensor-parallel index running fastest."""

    stage: int
    first_rank: int
    dp: int
    tp: int
    micro_batch: int
    zero: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.dp * self.tp)


@dataclass(frozen=True)
class StageGrids:
    """All stages of a pipeline, first to last."""

    stages: tuple[StageGrid, ...]

    @property
    def world_size(self) -> int:
        return self.stages[-1].ranks.stop

    @property
    def uniform(self) -> bool:
        return len({(grid.dp, grid.tp) for grid in self.stages}) == 1

    def of_rank(self, rank: int) -> StageGrid:
        return next(grid for grid in self.stages if rank in grid.ranks)

    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Rank tuples with one rank of each stage that together hold every rank.

        They only say "which stage am I, of how many" where Megatron asks a process group for it; no data flow
        along them. On equal grids they are Megatron's own pipeline groups; a rank of a smaller stage is in
        several.
        """
        longest = max(len(grid.ranks) for grid in self.stages)
        return tuple(
            tuple(grid.ranks[step * len(grid.ranks) // longest] for grid in self.stages)
            for step in range(longest)
        )

    def shard_index(self, rank: int) -> int:
        """Number of the rank's data-parallel group among all of the pipeline: stages first, then tp."""
        grid = self.of_rank(rank)
        before = sum(earlier.tp for earlier in self.stages[: grid.stage])
        return before + (rank - grid.first_rank) % grid.tp

    def described(self) -> str:
        return " -> ".join(f"dp{grid.dp} x tp{grid.tp}" for grid in self.stages)


def rank_of_environment() -> int:
    """This process's rank before torch.distributed is there; the stage arguments have set it."""
    return int(os.environ["RANK"])


def read_grids(document: Mapping[str, Any]) -> StageGrids:
    """The grids of stages.json; refuses what the bridge between two grids cannot carry."""
    if document["virtual_pipeline"] != 1:
        raise PatchRefused(
            f"stage_grids: virtual_pipeline is {document['virtual_pipeline']}; "
            "different grids run the plain 1F1B schedule only, wanted 1"
        )
    if document["context_parallel"] != 1:
        raise PatchRefused(
            f"stage_grids: context_parallel is {document['context_parallel']}; "
            "the bridge between two grids splits the batch only, wanted 1"
        )
    if len(document["stages"]) < 2:
        raise PatchRefused("stage_grids: the plan has one stage; different grids need at least 2")
    names = ("stage", "first_rank", "dp", "tp", "micro_batch", "zero")
    grids = StageGrids(
        tuple(StageGrid(**{name: entry[name] for name in names}) for entry in document["stages"])
    )
    _check_ranks(grids, document)
    _check_neighbours(grids)
    return grids


def _check_ranks(grids: StageGrids, document: Mapping[str, Any]) -> None:
    following = 0
    for number, (grid, entry) in enumerate(zip(grids.stages, document["stages"], strict=True)):
        if grid.stage != number or grid.first_rank != following or len(grid.ranks) != entry["ranks"]:
            raise PatchRefused(
                f"stage_grids: stages[{number}] is stage {grid.stage} on {entry['ranks']} ranks from rank "
                f"{grid.first_rank} with dp {grid.dp} x tp {grid.tp}; "
                f"wanted stage {number} on dp * tp ranks from rank {following}"
            )
        following = grid.ranks.stop
    if following != document["world_size"]:
        raise PatchRefused(
            f"stage_grids: the stages hold {following} ranks together, world_size is {document['world_size']}"
        )


def _check_neighbours(grids: StageGrids) -> None:
    first = grids.stages[0]
    for grid in grids.stages:
        if grid.zero not in (0, 1):
            raise PatchRefused(f"stage_grids: stages[{grid.stage}].zero is {grid.zero}; wanted 0 or 1")
        if grid.micro_batch * grid.dp != first.micro_batch * first.dp:
            raise PatchRefused(
                f"stage_grids: stages[{grid.stage}] takes micro_batch * dp = {grid.micro_batch} * {grid.dp} "
                f"sequences at a time, stages[0] {first.micro_batch} * {first.dp}; wanted the same"
            )
    for one, two in itertools.pairwise(grids.stages):
        if one.dp % two.dp and two.dp % one.dp:
            raise PatchRefused(
                f"stage_grids: dp is {one.dp} on stage {one.stage} and {two.dp} on stage {two.stage}; "
                "wanted one of two neighbours to divide the other"
            )


@dataclass(frozen=True)
class BuiltGrids:
    """What this rank needs to know of the grids after its process groups are made."""

    grids: StageGrids
    mine: StageGrid
    rank: int
    bridges: tuple[Any, ...]
    """One BridgeCommunicator between each two neighbouring stages."""

    @property
    def data_rank(self) -> int:
        return (self.rank - self.mine.first_rank) // self.mine.tp

    @property
    def gradient_share(self) -> float:
        """By what to multiply the stage's mean over its own data ranks to get the mean over the last stage's.

        Each data rank of the last stage differentiates the mean of its own part of the batch; those parts
        together are the batch, however many data ranks an earlier stage spreads them over.
        """
        return self.mine.dp / self.grids.stages[-1].dp


BUILT: list[BuiltGrids] = []
"""Of this process, the last one counts."""


def built_grids() -> BuiltGrids:
    if not BUILT:
        raise PatchRefused("stage_grids: the process groups are not there yet; build_stage_grids comes first")
    return BUILT[-1]
