"""What the passes over one layer put on each stream: the closed form overlaps these, the events play them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.step_time import gathers_on_arrival, reduces_in_passes
from mist_megatron.cost.terms import ZERO, LayerLoad, LayerPasses, PassStreams, TimeContext
from mist_megatron.cost.traffic import Traffic, host_copy
from mist_megatron.price.prices import Array, MemoryPass
from mist_megatron.targets.facts import TrafficFacts


def layer_passes(
    grid: StageGrid,
    load: LayerLoad,
    traffic: Traffic,
    context: TimeContext,
    *,
    again: tuple[Array, Array],
    saved_bytes: Array,
) -> LayerPasses:
    """What the four passes of one kind of layer put on each stream: the closed form overlaps these, the
    event simulator plays them."""
    facts, zero = context.facts, grid.zero
    saved = grid.offload.activations * saved_bytes
    saved_out, saved_in = host_copy(saved, "d2h", context), host_copy(saved, "h2d", context)
    forward_tp, backward_tp = load.forward_collective_s, load.backward_collective_s + again[1]
    gathers_again = _gathers_again(load, facts, again[0])
    beside_forward, beside_backward = ZERO, ZERO
    if context.tensor_collectives_overlap:
        beside_forward, beside_backward = forward_tp, backward_tp
        forward_tp, backward_tp = ZERO, ZERO

    gather3 = np.where(zero >= 3, traffic.gather_s, 0.0)
    reduce2 = np.where(zero == 2, traffic.reduce_s, 0.0)
    reduce3 = np.where(zero >= 3, traffic.reduce_s, 0.0)
    reduce1 = np.where(zero <= 1, traffic.reduce_s, 0.0) * reduces_in_passes(grid, facts)
    gather1 = np.where((zero == 1) | (zero == 2), traffic.gather_s, 0.0) * facts.step.gather_overlaps
    in_one = gathers_on_arrival(grid, facts) and not grid.role.has_embedding
    gather_before = gather1 * in_one
    gather_beside = gather3 * facts.zero3.gather_overlaps
    reduce_beside = reduce2 * facts.reduction.zero2_overlaps + reduce3 * facts.zero3.reduce_overlaps

    forward = PassStreams(
        compute_s=load.forward_s,
        gather_s=gather_beside + beside_forward,
        copy_in_s=traffic.weights_in_s,
        copy_out_s=saved_out,
        tensor_s=forward_tp,
        blocking_gather_s=gather3 - gather_beside,
    )
    backward = PassStreams(
        compute_s=load.backward_s + again[0],
        gather_s=(1.0 + gathers_again) * gather_beside + beside_backward,
        copy_in_s=traffic.weights_in_s + traffic.grads_in_s + saved_in,
        reduce_s=reduce_beside,
        copy_out_s=traffic.grads_out_s,
        tensor_s=backward_tp,
        blocking_gather_s=(1.0 + gathers_again) * (gather3 - gather_beside),
        blocking_reduce_s=reduce2 + reduce3 - reduce_beside,
    )
    first = replace(
        forward,
        compute_s=load.forward_s + traffic.step_compute_s,
        gather_s=gather_beside + gather1 - gather_before + beside_forward,
        blocking_gather_s=forward.blocking_gather_s + gather_before,
        # With a swapped step the new weights are made here, so old ones need not come in.
        copy_in_s=traffic.step_in_s if facts.step.in_first_forward else traffic.weights_in_s,
        copy_out_s=saved_out + traffic.step_out_s,
    )
    last = replace(backward, reduce_s=reduce_beside + reduce1) if np.any(reduce1) else backward
    return LayerPasses(forward, backward, first, last)


def _gathers_again(load: LayerLoad, facts: TrafficFacts, recomputed_s: Array) -> Array:
    """1 where ZeRO 3 lets go of a recomputed layer's weights before its backward pass, else 0."""
    if facts.zero3.reuse_elements is None or not np.any(recomputed_s):
        return ZERO
    return np.asarray(load.parameters > facts.zero3.reuse_elements, dtype=np.float64)


def accumulation_seconds(parameters: Array, context: TimeContext) -> Array:
    """Adding a layer's new gradients to its old ones, where that is a pass of its own."""
    if not context.facts.reduction.accumulation_pass:
        return ZERO
    return context.prices.of(MemoryPass(3.0 * context.grad_bytes * parameters)).seconds


def edge_grid(grid: StageGrid, facts: TrafficFacts) -> StageGrid:
    """The stage as embedding and head see it."""
    if facts.edges_follow:
        return grid
    on_device = grid.offloading(weights=ZERO, grads=ZERO, optimizer=ZERO)
    return replace(on_device, zero=np.ones(()))
