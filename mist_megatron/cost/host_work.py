"""What a stage does between passes, while its multiprocessors rest."""

from __future__ import annotations

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.terms import ZERO, TimeContext
from mist_megatron.price.prices import Array, Collective
from mist_megatron.spec.term import Term


def host_seconds(grid: StageGrid, context: TimeContext) -> Array:
    """Host work per micro-batch. Every chunk of an interleaved stage meets its neighbours for itself; where
    transfers run beside compute it waits for none of them, and the bookkeeping of one exchange is left."""
    if Term.HOST_WORK in context.without:
        return ZERO
    exchanges = 1 if context.facts.pipeline.sends_overlap_when_interleaved else grid.vpp
    exchange_s = exchanges * context.facts.host.per_exchange_s if np.max(grid.stages) > 1 else 0.0
    own_s = np.asanyarray(context.facts.host.per_micro_batch_s + exchange_s)
    return own_s + _maxima_s(grid, context) if context.agrees_on_maxima else own_s


def _maxima_s(grid: StageGrid, context: TimeContext) -> Array:
    """All ranks of a stage agree on the largest element of each operand, some hundred bytes, behind each
    pass of each chunk, forward and backward, while they compute nothing (Transformer Engine 2.3,
    pytorch/fp8.py, fp8_autocast_exit and reduce_and_update_fp8_tensors; the ranks are those of
    get_amax_reduction_group in megatron-core's parallel_state.py: tensor, context and data parallel)."""
    ranks = context.mesh(grid).gpus
    once = Collective("all_reduce", np.ones(()), ranks, np.ceil(ranks / context.cluster_gpus_per_node))
    return np.asanyarray(2.0 * grid.vpp * context.prices.of(once).seconds)
