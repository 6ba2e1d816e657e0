"""What experts send: tokens to experts and back, as far as nothing hides them; and once a step gradients and
updated weights of a whole stage, over the ranks that have the same ones."""

from __future__ import annotations

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.terms import ZERO, Again, LayerLoad, StageLoads, TimeContext
from mist_megatron.cost.traffic import scattered_whole, whole_buckets
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.price.prices import Array, any_of
from mist_megatron.spec.mesh import Group

REACHED = 0.72
"""Of the traffic that could run beside compute, the part that does: waits of the host and of other ranks keep
the rest. Fitted to the matched pairs of Qwen3-30B on 16 H100 (Megatron-Bridge, expert-parallel-overlap skill:
24.71 and 20.99 s by HybridEP, 41.25 and 31.31 s by NCCL), in which nothing else differs."""


def exposed_exchange(
    grid: StageGrid, load: LayerLoad, again: Again, context: TimeContext
) -> tuple[Array, Array]:
    """By how much tokens on their way stop compute, forward and backward.

    Beside another micro-batch (Megatron's model_chunk_schedule_plan.py) each of the four journeys of a pair
    of passes has one piece of compute of the other pass: the gradient of the combine the attention's forward
    pass, the dispatch the experts' backward pass, its gradient their forward pass, and the combine the
    attention's backward pass. Where gradients of weights are delayed (--delay-wgrad-compute) they run beside
    whichever of two journeys leaves them time. The first and the last passes of a step have no partner."""
    forward_s, backward_s = load.forward_exchange_s, load.backward_exchange_s
    if not (context.expert_overlap or any_of(load.forward_beside_s)):
        return forward_s, backward_s + again.exchange_s
    factors = context.interference
    if context.expert_overlap:
        hidden_s = _beside_passes(load, again, factors)
        if context.delayed_weight_grad:
            late_s = load.weight_grad_s - load.inside_weight_grad_s, load.inside_weight_grad_s
            hidden_s = np.maximum(hidden_s, _beside_passes(load, again, factors, late_s))
        hidden_s = hidden_s * np.maximum(1.0 - grid.stages / grid.grad_accum, 0.0)
    else:
        hidden_s = ZERO + _hidden(load.forward_beside_s, forward_s, factors)
        hidden_s = hidden_s + _hidden(load.backward_beside_s, backward_s, factors)
    share = 1.0 - REACHED * hidden_s / np.maximum(forward_s + backward_s, 1e-12)
    return forward_s * share, backward_s * share + again.exchange_s


def _beside_passes(
    load: LayerLoad, again: Again, factors: Array, late_s: tuple[Array, Array] = (ZERO, ZERO)
) -> Array:
    """What of a layer's four journeys passes of another micro-batch hide. `late_s` are gradients of weights
    of attention and of experts that are made last (backward_dw): the journey behind sets out before they are
    made, and they compute beside it as far as the journey beside their own pass is over by then."""
    there_s, back_s = load.forward_exchange_s / 2.0, load.backward_exchange_s / 2.0
    before_s = load.forward_s - load.forward_inside_s
    after_s = load.backward_s + again.compute_s - load.backward_inside_s
    beside_s = there_s * factors[0b0011, 1] / factors[0b0011, 0]
    moved_s = np.clip(after_s - beside_s, 0.0, late_s[0])
    moved_inside_s = np.clip(load.backward_inside_s - beside_s, 0.0, late_s[1])
    pieces = (
        (before_s + moved_s, back_s),
        (load.backward_inside_s - moved_inside_s, there_s),
        (load.forward_inside_s + moved_inside_s, back_s),
        (after_s - moved_s, there_s),
    )
    hidden_s: Array = ZERO
    for compute_s, sent_s in pieces:
        hidden_s = hidden_s + _hidden(compute_s, sent_s, factors)
    return hidden_s


def _hidden(compute_s: Array, sent_s: Array, factors: Array) -> Array:
    """What running beside each other saves."""
    return compute_s + sent_s - overlapped_time((compute_s, sent_s, ZERO, ZERO), factors)


def expert_count(grid: StageGrid, loads: StageLoads) -> Array:
    """Parameters of experts on a rank of the stage."""
    count: Array = ZERO if loads.head is None else loads.head.expert_parameters
    for layers, block in zip(grid.by_kind, loads.blocks, strict=True):
        if any_of(block.expert_parameters):
            count = count + layers.layers * block.expert_parameters
    return count


def reduced_once(count: Array, grid: StageGrid, context: TimeContext, group: Group) -> Array:
    """Gradients of a whole stage, over the ranks that have the same weights."""
    whole = context.grad_bytes * count
    scatter = scattered_whole(whole, grid, context, group)
    reduce = whole_buckets("all_reduce", whole, context.grad_bytes, grid, context, group)
    sharded = reduce if context.facts.reduction.on_all_ranks else scatter
    return np.where(grid.zero == 1, sharded, np.where(grid.zero == 0, reduce, 0.0))
