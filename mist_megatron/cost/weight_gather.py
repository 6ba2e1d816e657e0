"""Updated weights of a stage's ZeRO 1 and 2, which come back together when nothing hides it."""

from __future__ import annotations

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.terms import ZERO, Linear, StageLoads, TimeContext, of_kind
from mist_megatron.cost.traffic import collective, gathered_bytes, whole_buckets
from mist_megatron.price.prices import Array, any_of
from mist_megatron.spec.mesh import Group


def weight_gather(
    grid: StageGrid, loads: StageLoads, count: Array, experts: Array, context: TimeContext
) -> Linear:
    """Of so many weights, and of so many of routed experts, which have other copies."""
    narrow, narrow_experts = _narrow(grid, loads)
    gathered = _others(grid, loads, gathered_bytes(count, narrow, context), context)
    if not any_of(experts):
        return gathered
    whole = gathered_bytes(experts, narrow_experts, context)
    once = whole_buckets("all_gather", whole, context.weight_bytes, grid, context, Group.EXPERT_SHARDS)
    return gathered + Linear(np.where(grid.zero == 1, once, 0.0))


def _narrow(grid: StageGrid, loads: StageLoads) -> tuple[Array, Array]:
    """Those that travel in 8 bits."""
    narrow, experts = (ZERO, ZERO) if loads.head is None else (loads.head.narrow, loads.head.narrow_experts)
    for layers, block in zip(grid.by_kind, loads.blocks, strict=True):
        if any_of(block.narrow) or any_of(block.narrow_experts):
            narrow = narrow + layers.layers * block.narrow
            experts = experts + layers.layers * block.narrow_experts
    return narrow, experts


def _others(grid: StageGrid, loads: StageLoads, whole: Array, context: TimeContext) -> Linear:
    """In full buckets, or, where groups are stepped by layer, one after the other."""
    facts = context.facts
    sharded = (grid.zero == 1) | (grid.zero == 2)
    gather = whole_buckets("all_gather", whole, context.weight_bytes, grid, context, Group.SHARDS)
    if not facts.step.by_place:
        return Linear(np.where(sharded, gather, 0.0))
    by_layer = sharded & ((grid.offload.weights > 0.0) | facts.step.in_first_forward)

    def one(parameters: Array) -> Array:
        each = collective("all_gather", context.weight_bytes * parameters, grid, context)
        return np.where(by_layer, each, 0.0)

    edges = [one(load.parameters) for load in (loads.embedding, loads.head) if load is not None]
    at_once = np.where(sharded & ~by_layer, gather, 0.0)
    layers = [of_kind(place, one(load.parameters)) for place, load in enumerate(loads.blocks)]
    return sum(layers, start=Linear(sum(edges, start=at_once)))
