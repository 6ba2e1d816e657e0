"""Stable time t and extra time d of pipeline stages, as named terms linear in layers and recomputed layers.

A layer pass has compute, traffic that must have come in before it (weights gathered or copied in, offloaded
activations) and traffic that leaves after it (reduced gradients, offloaded activations). While layer k
computes, what k+1 needs comes in and what k-1 made goes out; so in a run of l layers all four streams
overlap in l-2 steps, and the first arrival and last departure stand alone (`edge_s`).

Every term is `fixed + layers * per_layer + ckpt * per_ckpt`, so a search can price a whole plane of
(layers, ckpt) from three numbers and prune exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.communication import Template
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.overlap import overlapped_time
from mist_megatron.cost.pricing import Array
from mist_megatron.cost.step_time import boundary_terms, step_terms
from mist_megatron.cost.terms import (
    ZERO,
    LayerLoad,
    LayerPasses,
    Linear,
    PassStreams,
    StageLoads,
    StageTerms,
    TimeContext,
    add_term,
)
from mist_megatron.cost.traffic import Traffic, host_copy, layer_traffic


@dataclass(frozen=True)
class _Phase:
    inside_s: Array
    """Exposed beyond compute and what stops it, of a layer inside a run of layers ..."""
    last_s: Array
    """... and of its last one, beside which nothing comes in."""
    alone_s: Array
    """Once per run: the first arrival, and the last departure where nothing follows."""


@dataclass(frozen=True)
class _Before:
    """What a stage is busy with when the first layer of a pass may fetch what it needs."""

    host_s: Array
    compute_s: Array
    """Embedding or head, where the pass begins with it."""

    def arrival_s(self, gather_s: Array, copy_in_s: Array, factors: Array) -> Array:
        """What the first arrival adds to that."""
        if gather_s is ZERO and copy_in_s is ZERO:
            return ZERO
        beside = (self.compute_s, gather_s, copy_in_s, ZERO)
        return np.maximum(overlapped_time(beside, factors) - self.compute_s - self.host_s, 0.0)


@dataclass(frozen=True)
class _Run:
    """The four passes of a kind of layer."""

    forward: _Phase
    backward: _Phase
    first: _Phase
    last: _Phase
    tensor_s: Array
    """Tensor-parallel collectives that stop compute, forward and backward together."""
    blocking_s: Array
    """Data-parallel collectives that do."""


def stage_terms(grid: StageGrid, loads: StageLoads, context: TimeContext) -> StageTerms:
    """All terms of t and d over a grid."""
    stable: dict[str, Linear] = {}
    delta: dict[str, Linear] = {}
    _block_terms(grid, loads, context, stable, delta)
    for name, load in (("embedding", loads.embedding), ("head", loads.head)):
        if load is not None:
            _edge_layer_terms(name, edge_grid(grid, context.template), load, context, stable, delta)
    stable["host_work"] = Linear(np.asarray(_host_s(grid, context)))
    delta["host_step"] = Linear(np.asarray(context.template.host_s_per_step))
    step_terms(grid, loads, context, delta)
    boundary_terms(grid, loads.boundary_bytes, context, stable, delta)
    for name in context.without:
        stable.pop(name, None)
        delta.pop(name, None)
    return StageTerms(stable, delta)


def _host_s(grid: StageGrid, context: TimeContext) -> float:
    """Host work per micro-batch. Every chunk of an interleaved stage meets its neighbours for itself."""
    exchange_s = grid.vpp * context.template.host_s_per_exchange if grid.stages > 1 else 0.0
    return context.template.host_s_per_micro_batch + exchange_s


def _before_passes(grid: StageGrid, loads: StageLoads, context: TimeContext) -> tuple[_Before, _Before]:
    """Before the first layer of a forward and of a backward pass. The stage's host work comes first; where
    embedding or head do, it is their own arrivals that it hides."""
    host_s = 0.0 if "host_work" in context.without else _host_s(grid, context) / (2 * grid.vpp)
    host = _Before(np.asarray(host_s), ZERO)
    forward = host if loads.embedding is None else _Before(ZERO, loads.embedding.forward_s)
    backward = host if loads.head is None else _Before(ZERO, loads.head.backward_s)
    return forward, backward


def _block_terms(
    grid: StageGrid,
    loads: StageLoads,
    context: TimeContext,
    stable: dict[str, Linear],
    delta: dict[str, Linear],
) -> None:
    load, before = loads.block, _before_passes(grid, loads, context)
    traffic = layer_traffic(grid, load, context)
    again = (load.selective_s, load.selective_collective_s) if grid.selective else (ZERO, ZERO)
    kept = _run(grid, load, traffic, context, again=again, saved_bytes=load.saved_bytes, before=before)
    whole = kept
    if np.any(grid.ckpt):
        # What a recomputed layer keeps is its input, which is too small to be worth offloading.
        again_whole = (load.forward_s, load.forward_collective_s)
        whole = _run(grid, load, traffic, context, again=again_whole, saved_bytes=ZERO, before=before)
    stable["forward"] = Linear(per_layer=load.forward_s)
    stable["backward"] = Linear(per_layer=load.backward_s)
    stable["recompute"] = Linear(per_layer=again[0], per_ckpt=load.forward_s - again[0])
    stable["tensor_parallel"] = _mixed(kept.tensor_s, whole.tensor_s)
    stable["blocking_data_parallel"] = _mixed(kept.blocking_s, whole.blocking_s)
    stable["exposed_traffic"] = _exposed(grid, kept.forward, whole.forward) + _exposed(
        grid, kept.backward, whole.backward
    )
    stable["pipeline_fill_of_layers"] = _once(
        grid, kept.forward.alone_s + kept.backward.alone_s, whole.forward.alone_s + whole.backward.alone_s
    )
    delta["first_forward_traffic"] = _beyond(grid, (kept.first, kept.forward), (whole.first, whole.forward))
    delta["last_backward_traffic"] = _beyond(grid, (kept.last, kept.backward), (whole.last, whole.backward))
    _accumulation_terms(Linear(per_layer=load.parameters), context, stable, delta)


def _exposed(grid: StageGrid, kept: _Phase, whole: _Phase) -> Linear:
    """What the layers of a pass expose; one of each run of them is its last."""
    inside = _mixed(kept.inside_s, whole.inside_s)
    return inside + _once(grid, kept.last_s - kept.inside_s, whole.last_s - whole.inside_s)


def _beyond(grid: StageGrid, kept: tuple[_Phase, _Phase], whole: tuple[_Phase, _Phase]) -> Linear:
    """What a first or last pass exposes beyond the steady one, (pass, steady) of both kinds of layers."""
    more = [
        _Phase(
            special.inside_s - steady.inside_s,
            special.last_s - steady.last_s,
            special.alone_s - steady.alone_s,
        )
        for special, steady in (kept, whole)
    ]
    return _exposed(grid, *more) + _once(grid, more[0].alone_s, more[1].alone_s)


def _edge_layer_terms(
    name: str,
    grid: StageGrid,
    load: LayerLoad,
    context: TimeContext,
    stable: dict[str, Linear],
    delta: dict[str, Linear],
) -> None:
    """Embedding and head: one layer each, never recomputed, its activations never offloaded."""
    quiet = replace(grid, activations_offload=ZERO)
    traffic = layer_traffic(quiet, load, context)
    alone = (_Before(ZERO, ZERO),) * 2
    run = _run(quiet, load, traffic, context, again=(ZERO, ZERO), saved_bytes=ZERO, before=alone)
    stable[name] = Linear(
        load.forward_s
        + load.backward_s
        + run.tensor_s
        + run.blocking_s
        + run.forward.inside_s
        + run.backward.inside_s
    )
    delta[f"{name}_traffic"] = Linear(
        run.first.inside_s - run.forward.inside_s + run.last.inside_s - run.backward.inside_s
    )
    if context.template.step_in_first_forward:
        add_term(delta, "optimizer_compute", Linear(traffic.step_compute_s))
    _accumulation_terms(Linear(load.parameters), context, stable, delta)


def _accumulation_terms(
    parameters: Linear, context: TimeContext, stable: dict[str, Linear], delta: dict[str, Linear]
) -> None:
    """Adding new gradients to old ones: read two, write one; the first micro-batch has nothing to add to."""
    if not context.template.accumulation_pass:
        return
    share = accumulation_seconds(parameters.fixed + parameters.per_layer, context)
    on_layers = bool(np.any(parameters.per_layer))
    term = Linear(per_layer=share) if on_layers else Linear(share)
    back = Linear(per_layer=-share) if on_layers else Linear(-share)
    add_term(stable, "gradient_accumulation", term)
    add_term(delta, "gradient_accumulation", back)


def accumulation_seconds(parameters: Array, context: TimeContext) -> Array:
    """Adding a layer's new gradients to its old ones, where that is a pass of its own."""
    if not context.template.accumulation_pass:
        return ZERO
    return context.prices.memory_bound(3.0 * context.grad_bytes * parameters).seconds


def _run(
    grid: StageGrid,
    load: LayerLoad,
    traffic: Traffic,
    context: TimeContext,
    *,
    again: tuple[Array, Array],
    saved_bytes: Array,
    before: tuple[_Before, _Before],
) -> _Run:
    """The four passes of one kind of layer; `again` is recomputed compute and collectives."""
    passes = layer_passes(grid, load, traffic, context, again=again, saved_bytes=saved_bytes)
    factors = context.interference
    added = accumulation_seconds(load.parameters, context)
    into_forward, into_backward = before
    backward = _phase(passes.backward, factors, added, into_backward)
    last = backward if passes.last is passes.backward else _phase(passes.last, factors, added, into_backward)
    departure = _departure_s(passes.last, factors)
    return _Run(
        _phase(passes.forward, factors, ZERO, into_forward),
        backward,
        _phase(passes.first, factors, ZERO, into_forward),
        replace(last, alone_s=last.alone_s + departure),
        passes.forward.tensor_s + passes.backward.tensor_s,
        passes.forward.blocking_gather_s
        + passes.backward.blocking_gather_s
        + passes.backward.blocking_reduce_s,
    )


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
    template, zero = context.template, grid.zero
    saved = grid.activations_offload * saved_bytes
    saved_out, saved_in = host_copy(saved, "d2h", context), host_copy(saved, "h2d", context)
    forward_tp, backward_tp = load.forward_collective_s, load.backward_collective_s + again[1]
    gathers_again = _gathers_again(load, template, again[0])
    beside_forward, beside_backward = ZERO, ZERO
    if context.tensor_collectives_overlap:
        beside_forward, beside_backward = forward_tp, backward_tp
        forward_tp, backward_tp = ZERO, ZERO

    gather3 = np.where(zero >= 3, traffic.gather_s, 0.0)
    reduce2 = np.where(zero == 2, traffic.reduce_s, 0.0)
    reduce3 = np.where(zero >= 3, traffic.reduce_s, 0.0)
    reduce1 = np.where(zero <= 1, traffic.reduce_s, 0.0) * template.last_reduce_overlaps
    gather1 = np.where((zero == 1) | (zero == 2), traffic.gather_s, 0.0) * template.first_gather_overlaps
    gather_beside = gather3 * template.zero3_gather_overlaps
    reduce_beside = reduce2 * template.zero2_reduce_overlaps + reduce3 * template.zero3_reduce_overlaps

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
        gather_s=gather_beside + gather1 + beside_forward,
        # With a swapped step the new weights are made here, so old ones need not come in.
        copy_in_s=traffic.step_in_s if template.step_in_first_forward else traffic.weights_in_s,
        copy_out_s=saved_out + traffic.step_out_s,
    )
    last = replace(backward, reduce_s=reduce_beside + reduce1) if np.any(reduce1) else backward
    return LayerPasses(forward, backward, first, last)


def _gathers_again(load: LayerLoad, template: Template, recomputed_s: Array) -> Array:
    """1 where ZeRO 3 lets go of a recomputed layer's weights before its backward pass, else 0."""
    if template.zero3_reuse_elements is None or not np.any(recomputed_s):
        return ZERO
    return np.asarray(load.parameters > template.zero3_reuse_elements, dtype=np.float64)


def _phase(streams: PassStreams, factors: Array, added_s: Array, before: _Before) -> _Phase:
    """`added_s` is compute besides: gradients added to old ones."""
    gather, copy_in = _dropped_if_idle(streams.gather_s), _dropped_if_idle(streams.copy_in_s)
    reduce, copy_out = _dropped_if_idle(streams.reduce_s), _dropped_if_idle(streams.copy_out_s)
    if all(stream is ZERO for stream in (gather, copy_in, reduce, copy_out)):
        return _Phase(ZERO, ZERO, ZERO)
    compute = streams.compute_s + added_s
    then = streams.tensor_s + streams.blocking_gather_s + streams.blocking_reduce_s
    inside = overlapped_time((compute, gather + reduce, copy_in, copy_out), factors, then)
    last = inside
    if gather is not ZERO or copy_in is not ZERO:
        last = overlapped_time((compute, reduce, ZERO, copy_out), factors, then)
    serial = compute + then
    return _Phase(inside - serial, last - serial, before.arrival_s(gather, copy_in, factors))


def _departure_s(streams: PassStreams, factors: Array) -> Array:
    """What the last layer of an iteration sends off, beside which nothing runs."""
    return overlapped_time((ZERO, streams.reduce_s, ZERO, streams.copy_out_s), factors)


def _dropped_if_idle(stream: Array) -> Array:
    """An idle stream loses its axes, so that it does not blow up the grid for nothing."""
    return stream if stream.any() else ZERO


def _mixed(kept: Array, whole: Array) -> Linear:
    return Linear(per_layer=kept, per_ckpt=_dropped_if_idle(np.asarray(whole - kept)))


def _once(grid: StageGrid, kept: Array, whole: Array) -> Linear:
    """Once per run of layers, of which every chunk of an interleaved stage is one: of recomputed layers when
    there are no others."""
    if not (kept.any() or whole.any()):
        return Linear()
    if kept is whole or not np.any(grid.ckpt):
        return Linear(grid.vpp * kept)
    return Linear(grid.vpp * np.where(grid.ckpt < grid.layers, kept, whole))


def edge_grid(grid: StageGrid, template: Template) -> StageGrid:
    """The stage as embedding and head see it."""
    changed = grid
    if template.edges_zero is not None:
        changed = replace(changed, zero=np.asarray(float(template.edges_zero)))
    if not template.edges_offload:
        changed = replace(changed, weights_offload=ZERO, grads_offload=ZERO, optimizer_offload=ZERO)
    return changed
