"""Once a step: gradients and updated weights of a whole stage, over the ranks that have the same ones."""

from __future__ import annotations

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.terms import ZERO, Linear, StageLoads, TimeContext
from mist_megatron.cost.traffic import whole_buckets
from mist_megatron.price.prices import Array
from mist_megatron.spec.mesh import Group


def expert_count(grid: StageGrid, loads: StageLoads) -> Array:
    """Parameters of experts on a rank of the stage."""
    count: Array = ZERO if loads.head is None else loads.head.expert_parameters
    for layers, block in zip(grid.by_kind, loads.blocks, strict=True):
        if np.any(block.expert_parameters):
            count = count + layers.layers * block.expert_parameters
    return count


def expert_gather(grid: StageGrid, experts: Array, context: TimeContext) -> Linear:
    """Updated weights of experts, when nothing hides it."""
    width = context.weight_bytes
    once = whole_buckets("all_gather", width * experts, width, grid, context, Group.EXPERT_DATA)
    return Linear(np.where(grid.zero == 1, once, 0.0))


def reduced_once(count: Array, grid: StageGrid, context: TimeContext, group: Group) -> Array:
    """Gradients of a whole stage, over the ranks that have the same weights."""
    whole = context.grad_bytes * count
    scatter = whole_buckets("reduce_scatter", whole, context.grad_bytes, grid, context, group)
    reduce = whole_buckets("all_reduce", whole, context.grad_bytes, grid, context, group)
    return np.where(grid.zero == 1, scatter, np.where(grid.zero == 0, reduce, 0.0))
