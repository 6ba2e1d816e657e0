"""What crosses the boundaries of a stage, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.placed import slowest
from mist_megatron.cost.terms import ZERO, BoundarySide, StageLoads, TimeContext
from mist_megatron.price.prices import Array, Collective
from mist_megatron.spec.mesh import Group


@dataclass(frozen=True, kw_only=True)
class BoundaryWork:
    """One boundary tensor on its way to a neighbour ..."""

    inside_s: Array
    """... on the same node ..."""
    across_s: Array
    """... or on another, ..."""
    handed_on_s: Array
    """... and then from the rank that received it, or a part of it, to the rest of its tensor group."""
    sent_bytes: Array
    """What a rank that sends sends."""


def boundary_work(grid: StageGrid, loads: StageLoads, context: TimeContext) -> BoundaryWork:
    """What one boundary tensor takes; over a bridge one rank sends and receives it whole. Where boundaries
    differ, their mean: a stage pays for as many transfers as it has boundaries, of each one there or back."""
    if loads.sides:
        hops = [(side, hop_seconds(side.sent_bytes, context)) for side in loads.sides]
        inside, across = (
            sum((hop[way] * side_share(side) for side, hop in hops), start=ZERO) / len(hops) for way in (0, 1)
        )
        most = max((side.sent_bytes for side in loads.sides), key=np.max)
        return BoundaryWork(inside_s=inside, across_s=across, handed_on_s=ZERO, sent_bytes=most)
    sent_bytes = sent_by_rank(grid, loads.boundary_bytes, context)
    inside_s, across_s = hop_seconds(sent_bytes, context)
    handed_on_s: Array = ZERO
    if grid.bridged or _scattered(grid, context):
        whole = loads.boundary_bytes * (grid.tp if grid.sequence_parallel else 1.0)
        handed_on_s = _handed_on(whole, grid, context)
    return BoundaryWork(inside_s=inside_s, across_s=across_s, handed_on_s=handed_on_s, sent_bytes=sent_bytes)


def sent_by_rank(grid: StageGrid, own_bytes: Array, context: TimeContext) -> Array:
    """What a rank that sends sends, of a boundary tensor of which it has so many bytes: over a bridge all
    that its tensor-parallel group has; a part of its own where the receivers gather it again."""
    if grid.bridged:
        return own_bytes * grid.tp if grid.sequence_parallel else own_bytes
    return own_bytes / grid.tp if _scattered(grid, context) else own_bytes


def _scattered(grid: StageGrid, context: TimeContext) -> bool:
    return context.facts.pipeline.scatters_boundaries and not grid.sequence_parallel


def side_share(side: BoundarySide) -> float:
    """Of a transfer there and one back, what there is."""
    return 1.0 if side.returns else 0.5


def _handed_on(whole_bytes: Array, grid: StageGrid, context: TimeContext) -> Array:
    """A broadcast in a tensor-parallel group: a ring passes every byte once, as a gather does."""
    nodes = replace(context.mesh(grid), gpus_per_node=context.cluster_gpus_per_node).nodes(Group.TENSOR)
    work = Collective("all_gather", whole_bytes, grid.tp, nodes)
    if grid.placed is not None:
        return np.where(
            grid.tp > 1.0, slowest(work, grid.placed.of(Group.TENSOR), context.prices).seconds, 0.0
        )
    seconds = context.prices.of(work).seconds
    return np.where(grid.tp > 1.0, seconds, 0.0)


def hop_seconds(boundary_bytes: Array, context: TimeContext) -> tuple[Array, Array]:
    """One transfer to a neighbouring stage, inside a node and between nodes."""
    inside, across = (
        context.prices.of(Collective("send_recv", boundary_bytes, np.asarray(2.0), np.asarray(nodes))).seconds
        for nodes in (1.0, 2.0)
    )
    return inside, across
