"""Stable time t and extra time d of pipeline stages, as named terms linear in layers and recomputed layers.

A layer pass has compute, traffic that must have come in before it (weights gathered or copied in, offloaded
activations) and traffic that leaves after it (reduced gradients, offloaded activations). `phases` says what
of it a run of layers exposes. In the stable state a pass follows at once, so that what leaves last leaves
beside the next pass; the first arrival of a pass does not hide but behind what the stage does between two.

Which layers of a stage are the recomputed ones matters at the ends of passes. Where they are the last (Mist),
a backward pass begins with them and needs no offloaded activations at first; terms could say that only where
some layers are recomputed, but are said of all stages that keep a layer, because a search reads terms of any
number of recomputed layers off those of none. With none and offloaded activations t is too small by the
arrival of one layer's, less what hides it, and too large by what two layers' departures take longer than
their compute.

Every term is `fixed + layers * per_layer + ckpt * per_ckpt`, so a search can price a whole plane of
(layers, ckpt) from three numbers and prune exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.communication import Template
from mist_megatron.cost.grid import StageGrid, StageRole
from mist_megatron.cost.overlap import overlapped_time
from mist_megatron.cost.phases import (
    NOTHING_BETWEEN,
    Between,
    Phase,
    departure_s,
    dropped_if_idle,
    phase,
    steps_ahead,
)
from mist_megatron.cost.pricing import Array
from mist_megatron.cost.step_time import (
    boundary_terms,
    gathers_on_arrival,
    host_seconds,
    reduces_by_chunk,
    reduces_in_passes,
    sent_beside_reductions,
    slowed_by_reduction,
    step_terms,
)
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
class _Kind:
    """What tells a recomputed layer from one that is not."""

    again: tuple[Array, Array]
    """Recomputed compute and collectives."""
    saved_bytes: Array


@dataclass(frozen=True)
class _Run:
    """The four passes of a kind of layer."""

    forward: Phase
    backward: Phase
    first: Phase
    last: Phase
    tensor_s: Array
    """Tensor-parallel collectives that stop compute, forward and backward together."""
    blocking_s: Array
    """Data-parallel collectives that do."""
    gather_before_s: Array
    """Weights that the first pass waits for besides."""
    last_streams: PassStreams


def stage_terms(grid: StageGrid, loads: StageLoads, context: TimeContext) -> StageTerms:
    """All terms of t and d over a grid."""
    stable: dict[str, Linear] = {}
    delta: dict[str, Linear] = {}
    hops: dict[str, Linear] = {}
    last_hops: dict[str, Linear] = {}
    boundary_terms(grid, loads, context, hops, last_hops)
    between = _between_passes(grid, loads, context, hops.get("pipeline_p2p", Linear()))
    _block_terms(grid, loads, context, between, (stable, delta))
    for name, load in (("embedding", loads.embedding), ("head", loads.head)):
        if load is not None:
            _edge_layer_terms(name, edge_grid(grid, context.template), load, context, stable, delta)
    stable["host_work"] = Linear(host_seconds(grid, context))
    delta["host_step"] = Linear(np.asarray(context.template.host_s_per_step))
    step_terms(grid, loads, context, delta)
    reduction = delta.get("gradient_reduction", Linear()).fixed
    slowed_s = slowed_by_reduction(grid, loads, reduction, context)
    if slowed_s is not ZERO:
        add_term(last_hops, "pipeline_p2p", Linear(slowed_s))
    stable.update(hops)
    delta.update(last_hops)
    for name in context.without:
        stable.pop(name, None)
        delta.pop(name, None)
    return StageTerms(stable, delta)


def _between_passes(
    grid: StageGrid, loads: StageLoads, context: TimeContext, hops: Linear
) -> tuple[Between, Between]:
    """Before the first layer of a forward and of a backward pass: the stage sends off the result of the pass
    before and does its host work. Where embedding or head come first, these are what hides arrivals; the
    stage has sent nothing then, the pass before having ended the pipeline."""
    host_s = host_seconds(grid, context) / (2 * grid.vpp)
    exchanges = 2.0 if grid.role is StageRole.MIDDLE else 1.0
    send_s = ZERO if "pipeline_p2p" in context.without else hops.fixed / (exchanges * grid.vpp)
    usual = Between(send_s, host_s, ZERO)
    forward = usual if loads.embedding is None else Between(ZERO, ZERO, loads.embedding.forward_s)
    backward = usual if loads.head is None else Between(ZERO, ZERO, loads.head.backward_s)
    return forward, backward


def _block_terms(
    grid: StageGrid,
    loads: StageLoads,
    context: TimeContext,
    between: tuple[Between, Between],
    terms: tuple[dict[str, Linear], dict[str, Linear]],
) -> None:
    (stable, delta), load = terms, loads.block
    traffic = layer_traffic(grid, load, context)
    again = (load.selective_s, load.selective_collective_s) if grid.selective else (ZERO, ZERO)
    kept = _run(grid, load, traffic, context, _Kind(again, load.saved_bytes), between)
    whole = kept
    if np.any(grid.ckpt):
        # What a recomputed layer keeps is its input, which is too small to be worth offloading.
        recomputed = _Kind(load.again, ZERO)
        whole = _run(grid, load, traffic, context, recomputed, between)
    stable["forward"] = Linear(per_layer=load.forward_s)
    stable["backward"] = Linear(per_layer=load.backward_s)
    stable["recompute"] = Linear(per_layer=again[0], per_ckpt=load.again[0] - again[0])
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
    if gathers_on_arrival(grid, context.template):
        first = delta.pop("first_forward_traffic")
        delta["first_gather"] = first + Linear(per_layer=kept.gather_before_s)
    if reduces_by_chunk(grid, context.template):
        sent_s = sent_beside_reductions(grid, loads, context)
        each = [_by_chunk_s(grid, run.last_streams, sent_s, context.interference) for run in (kept, whole)]
        delta["chunk_reductions"] = _mixed(*each)
    _accumulation_terms(Linear(per_layer=load.parameters), context, stable, delta)


def _exposed(grid: StageGrid, kept: Phase, whole: Phase) -> Linear:
    """What the layers of a pass expose; one of each run of them is its last."""
    inside = _mixed(kept.inside_s, whole.inside_s)
    return inside + _once(grid, kept.last_s - kept.inside_s, whole.last_s - whole.inside_s)


def _beyond(grid: StageGrid, kept: tuple[Phase, Phase], whole: tuple[Phase, Phase]) -> Linear:
    """What a first or last pass exposes beyond the steady one, (pass, steady) of both kinds of layers."""
    more = [special.minus(steady) for special, steady in (kept, whole)]
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
    alone = (NOTHING_BETWEEN, NOTHING_BETWEEN)
    run = _run(quiet, load, traffic, context, _Kind((ZERO, ZERO), ZERO), alone)
    stable[name] = Linear(
        load.forward_s
        + load.backward_s
        + run.tensor_s
        + run.blocking_s
        + run.forward.inside_s
        + run.backward.inside_s
    )
    first_s = run.first.inside_s - run.forward.inside_s
    if gathers_on_arrival(grid, context.template):
        add_term(delta, "first_gather", Linear(first_s + run.gather_before_s))
        first_s = ZERO
    delta[f"{name}_traffic"] = Linear(first_s + run.last.inside_s - run.backward.inside_s)
    if reduces_by_chunk(grid, context.template) and name == "embedding":
        # Of the chunk that ends the iteration; the head is of the first whose passes end.
        reduced_s = np.where(grid.zero <= 1, traffic.reduce_s, 0.0)
        add_term(delta, "chunk_reductions", Linear(reduced_s))
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
    kind: _Kind,
    between: tuple[Between, Between],
) -> _Run:
    """The four passes of one kind of layer."""
    again, saved_bytes = kind.again, kind.saved_bytes
    passes = layer_passes(grid, load, traffic, context, again=again, saved_bytes=saved_bytes)
    factors = context.interference
    added = accumulation_seconds(load.parameters, context)
    into_forward = between[0].exposed_s(passes.forward, passes.backward, factors)
    # Where a stage's last layers are the recomputed ones, they follow the others forward, and their backward
    # pass comes first: nothing that they saved has to come in before it.
    followed = not context.recomputes_first_layers
    ends = passes
    if followed and np.any(saved_bytes):
        quiet = replace(grid, activations_offload=ZERO)
        ends = layer_passes(quiet, load, traffic, context, again=again, saved_bytes=ZERO)
    into_backward = between[1].exposed_s(ends.backward, ends.forward, factors)
    last = passes.backward if reduces_by_chunk(grid, context.template) else passes.last
    departure = departure_s(last, factors)
    forward = phase(passes.forward, factors, ZERO, into_forward, followed=followed)
    if context.template.step_in_first_forward and grid.role in (StageRole.MIDDLE, StageRole.LAST):
        first = steps_ahead(passes, traffic.step_compute_s, forward, factors)
    else:
        into_first = between[0].exposed_s(passes.first, passes.backward, factors)
        first = phase(passes.first, factors, ZERO, into_first, followed=followed)
    backward = phase(passes.backward, factors, added, into_backward)
    last_backward = phase(last, factors, added, into_backward + departure)
    if last is not passes.backward and context.template.later_stages_at_once:
        last_backward = _begun_alone(last_backward, passes)
    return _Run(
        forward,
        backward,
        first,
        last_backward,
        passes.forward.tensor_s + passes.backward.tensor_s,
        passes.forward.blocking_gather_s
        + passes.backward.blocking_gather_s
        + passes.backward.blocking_reduce_s,
        passes.first.blocking_gather_s - passes.forward.blocking_gather_s,
        passes.last,
    )


def _begun_alone(last: Phase, passes: LayerPasses) -> Phase:
    """Nothing is reduced beside the first layer of the last backward pass (what the head leaves is counted
    with the head), and what its last layer leaves is on its own: n layers, n - 1 of them beside others."""
    waits_s = np.maximum(passes.last.reduce_s - passes.last.compute_s, 0.0)
    return replace(last, alone_s=last.alone_s - waits_s)


def _by_chunk_s(grid: StageGrid, last: PassStreams, sent_s: Array, factors: Array) -> Array:
    """A layer's share of reductions that follow their chunk's last backward pass: of the chunk that ends the
    iteration all of it, of the others what as many passes as there are stages do not hide. Over links that
    sends go over too, a reduction has what these leave, and the last micro-batch's sends are slowed down."""
    chunks, count = grid.vpp, grid.stages
    reduce, compute, tensor = last.reduce_s, count * last.compute_s, count * last.tensor_s
    beside_s = overlapped_time((compute, reduce, ZERO, ZERO), factors, tensor) - compute - tensor
    on_link_s = reduce + count * sent_s - np.maximum(compute + tensor, count * sent_s)
    slowed_s = np.minimum(count * sent_s, reduce)
    exposed_s = np.maximum(beside_s, np.where(sent_s > 0.0, np.maximum(on_link_s, slowed_s), 0.0))
    return np.asarray((reduce + (chunks - 1) * exposed_s) / chunks)


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
    reduce1 = np.where(zero <= 1, traffic.reduce_s, 0.0) * reduces_in_passes(grid, template)
    gather1 = np.where((zero == 1) | (zero == 2), traffic.gather_s, 0.0) * template.first_gather_overlaps
    in_one = gathers_on_arrival(grid, template) and not grid.role.has_embedding
    gather_before = gather1 * in_one
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
        gather_s=gather_beside + gather1 - gather_before + beside_forward,
        blocking_gather_s=forward.blocking_gather_s + gather_before,
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


def _mixed(kept: Array, whole: Array) -> Linear:
    return Linear(per_layer=kept, per_ckpt=dropped_if_idle(np.asarray(whole - kept)))


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
