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
their compute: `refinement` tells that to `predict`.

Every term is `fixed + layers * per_layer + ckpt * per_ckpt`, so a search can price a whole plane of
(layers, ckpt) from three numbers and prune exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.grid import StageGrid, StageRole
from mist_megatron.cost.layer_passes import accumulation_seconds, edge_grid, layer_passes
from mist_megatron.cost.phases import (
    NOTHING_BETWEEN,
    Between,
    Phase,
    departure_s,
    dropped_if_idle,
    phase,
    steps_ahead,
)
from mist_megatron.cost.step_time import (
    boundary_terms,
    gathers_on_arrival,
    host_seconds,
    reduces_by_chunk,
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
from mist_megatron.cost.traffic import Traffic, layer_traffic
from mist_megatron.price.overlap import DEVICE_TO_HOST, HOST_TO_DEVICE, overlapped_time
from mist_megatron.price.prices import Array
from mist_megatron.spec.term import Term


@dataclass(frozen=True)
class _Kind:
    """What tells a recomputed layer from one that is not."""

    again: tuple[Array, Array]
    """Recomputed compute and collectives."""
    saved_bytes: Array
    followed: bool
    """A run of them may be followed by other layers in forward passes, and these come first in backward
    passes."""


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
    passes: LayerPasses


def stage_terms(grid: StageGrid, loads: StageLoads, context: TimeContext) -> StageTerms:
    """All terms of t and d over a grid."""
    stable: dict[Term, Linear] = {}
    delta: dict[Term, Linear] = {}
    hops: dict[Term, Linear] = {}
    last_hops: dict[Term, Linear] = {}
    boundary_terms(grid, loads, context, hops, last_hops)
    between = _between_passes(grid, loads, context, hops.get(Term.PIPELINE_P2P, Linear()))
    _block_terms(grid, loads, context, between, (stable, delta))
    for name, load in ((Term.EMBEDDING, loads.embedding), (Term.HEAD, loads.head)):
        if load is not None:
            _edge_layer_terms(name, edge_grid(grid, context.facts), load, context, stable, delta)
    stable[Term.HOST_WORK] = Linear(host_seconds(grid, context))
    delta[Term.HOST_STEP] = Linear(np.asarray(context.facts.host.per_step_s))
    step_terms(grid, loads, context, delta)
    reduction = delta.get(Term.GRADIENT_REDUCTION, Linear()).fixed
    slowed_s = slowed_by_reduction(grid, loads, reduction, context)
    if slowed_s is not ZERO:
        add_term(last_hops, Term.PIPELINE_P2P, Linear(slowed_s))
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
    send_s = ZERO if Term.PIPELINE_P2P in context.without else hops.fixed / (exchanges * grid.vpp)
    usual = Between(send_s, host_s, ZERO)
    forward = usual if loads.embedding is None else Between(ZERO, ZERO, loads.embedding.forward_s)
    backward = usual if loads.head is None else Between(ZERO, ZERO, loads.head.backward_s)
    return forward, backward


def _block_terms(
    grid: StageGrid,
    loads: StageLoads,
    context: TimeContext,
    between: tuple[Between, Between],
    terms: tuple[dict[Term, Linear], dict[Term, Linear]],
) -> None:
    (stable, delta), load = terms, loads.block
    traffic = layer_traffic(grid, load, context)
    again = _again(grid, load)
    kept, whole = _runs(grid, load, traffic, context, between)
    stable[Term.FORWARD] = Linear(per_layer=load.forward_s)
    stable[Term.BACKWARD] = Linear(per_layer=load.backward_s)
    stable[Term.RECOMPUTE] = Linear(per_layer=again[0], per_ckpt=load.again[0] - again[0])
    stable[Term.TENSOR_PARALLEL] = _mixed(kept.tensor_s, whole.tensor_s)
    stable[Term.BLOCKING_DATA_PARALLEL] = _mixed(kept.blocking_s, whole.blocking_s)
    stable[Term.EXPOSED_TRAFFIC] = _exposed(grid, kept.forward, whole.forward) + _exposed(
        grid, kept.backward, whole.backward
    )
    stable[Term.PIPELINE_FILL_OF_LAYERS] = _once(
        grid, kept.forward.alone_s + kept.backward.alone_s, whole.forward.alone_s + whole.backward.alone_s
    )
    delta[Term.FIRST_FORWARD_TRAFFIC] = _beyond(
        grid, (kept.first, kept.forward), (whole.first, whole.forward)
    )
    delta[Term.LAST_BACKWARD_TRAFFIC] = _beyond(
        grid, (kept.last, kept.backward), (whole.last, whole.backward)
    )
    if gathers_on_arrival(grid, context.facts):
        first = delta.pop(Term.FIRST_FORWARD_TRAFFIC)
        delta[Term.FIRST_GATHER] = first + Linear(per_layer=kept.gather_before_s)
    if reduces_by_chunk(grid, context.facts):
        sent_s = sent_beside_reductions(grid, loads, context)
        each = [_by_chunk_s(grid, run.passes.last, sent_s, context.interference) for run in (kept, whole)]
        delta[Term.CHUNK_REDUCTIONS] = _mixed(*each)
    _accumulation_terms(Linear(per_layer=load.parameters), context, stable, delta)


def _again(grid: StageGrid, load: LayerLoad) -> tuple[Array, Array]:
    """What is computed again of a layer that is not recomputed in full."""
    return (load.selective_s, load.selective_collective_s) if grid.selective else (ZERO, ZERO)


def _runs(
    grid: StageGrid,
    load: LayerLoad,
    traffic: Traffic,
    context: TimeContext,
    between: tuple[Between, Between],
) -> tuple[_Run, _Run]:
    """Both kinds of layers."""
    followed = not context.recomputes_first_layers
    usual = _Kind(_again(grid, load), load.saved_bytes, followed)
    kept = _run(grid, load, traffic, context, usual, between)
    if not np.any(grid.ckpt):
        return kept, kept
    # What a recomputed layer keeps is its input, which is too small to be worth offloading.
    return kept, _run(grid, load, traffic, context, _Kind(load.again, ZERO, followed), between)


@dataclass(frozen=True)
class Refinement:
    """What is known of a stage beyond t and d, which searches add up from terms linear in layers."""

    forward_s: Array
    """Of the traffic that t exposes, what forward passes have, which run ahead while a pipeline fills."""
    stable_s: Array
    """What t lacks where no layer is recomputed ..."""
    delta_s: Array
    """... and d."""
    late_s: Array
    """By how much d is longer because activations leave in the first pass, behind states. They cannot before
    the stage's input has come: then the pass waits this much longer for them ..."""
    behind_all_s: Array
    """... if no states had left meanwhile ..."""
    behind_own_s: Array
    """... and at most this much, for each layer that offloads activations leaves one's states before it."""
    hidden_share: Array
    """Share of the wait in which states leave: as fast as others come in."""


def refinement(grid: StageGrid, loads: StageLoads, context: TimeContext) -> Refinement:
    """What `stage_terms` has to leave out."""
    load, hops = loads.block, dict[Term, Linear]()
    traffic = layer_traffic(grid, load, context)
    boundary_terms(grid, loads, context, hops, {})
    between = _between_passes(grid, loads, context, hops.get(Term.PIPELINE_P2P, Linear()))
    said, whole = _runs(grid, load, traffic, context, between)
    kept, none = said, grid.ckpt == 0.0
    if not context.recomputes_first_layers and np.any(none & (grid.offload.activations > 0.0)):
        kind = _Kind(_again(grid, load), load.saved_bytes, followed=False)
        kept = _chosen(none, _run(grid, load, traffic, context, kind, between), said)
    alone = 0.0 if Term.PIPELINE_FILL_OF_LAYERS in context.without else 1.0

    def seconds(one: Phase, other: Phase) -> Array:
        term = _exposed(grid, one, other) + _once(grid, alone * one.alone_s, alone * other.alone_s)
        return term.at(grid.layers, grid.ckpt)

    def more(run: _Run) -> Array:
        ends = ((run.first, run.forward), (whole.first, whole.forward))
        last = ((run.last, run.backward), (whole.last, whole.backward))
        return (_beyond(grid, *ends) + _beyond(grid, *last)).at(grid.layers, grid.ckpt)

    forward_s, backward_s = seconds(kept.forward, whole.forward), seconds(kept.backward, whole.backward)
    said_s = seconds(said.forward, whole.forward) + seconds(said.backward, whole.backward)
    gathers = [run.passes.forward.blocking_gather_s for run in (kept, whole)]
    late_s, behind_all_s, behind_own_s, share = _late(grid, (kept, whole), traffic, context)
    return Refinement(
        forward_s=forward_s + _mixed(*gathers).at(grid.layers, grid.ckpt),
        stable_s=forward_s + backward_s - said_s,
        delta_s=more(kept) - more(said),
        late_s=late_s,
        behind_all_s=behind_all_s,
        behind_own_s=behind_own_s,
        hidden_share=share,
    )


def _chosen(where: Array, one: _Run, other: _Run) -> _Run:
    """Passes of one run on some rows, of another on the others."""

    def phases(first: Phase, second: Phase) -> Phase:
        pairs = (
            (first.inside_s, second.inside_s),
            (first.last_s, second.last_s),
            (first.alone_s, second.alone_s),
        )
        return Phase(*(np.where(where, *pair) for pair in pairs))

    return replace(
        other,
        forward=phases(one.forward, other.forward),
        backward=phases(one.backward, other.backward),
        first=phases(one.first, other.first),
        last=phases(one.last, other.last),
    )


def _late(
    grid: StageGrid, runs: tuple[_Run, _Run], traffic: Traffic, context: TimeContext
) -> tuple[Array, Array, Array, Array]:
    """The last four of a refinement."""
    kept, whole = runs
    passes, factors = kept.passes, context.interference
    states_s, saved_s = traffic.step_out_s, passes.forward.copy_out_s
    both = (states_s > 0.0) & (saved_s > 0.0)
    if grid.role not in (StageRole.MIDDLE, StageRole.LAST) or not np.any(both):
        return ZERO, ZERO, ZERO, np.ones(())
    quiet = replace(passes, first=replace(passes.first, copy_out_s=passes.first.copy_out_s - saved_s))
    first = steps_ahead(quiet, traffic.step_compute_s, kept.forward, factors)
    late_s = _beyond(grid, (kept.first, first), (whole.first, whole.first)).at(grid.layers, grid.ckpt)
    streams = (traffic.step_compute_s, passes.first.gather_s, passes.first.copy_in_s, states_s)
    each_s = overlapped_time(streams, factors)
    out_s = states_s * float(factors[1 << HOST_TO_DEVICE | 1 << DEVICE_TO_HOST, DEVICE_TO_HOST])
    share = np.minimum(out_s / np.where(both, each_s, 1.0), 1.0)
    layer_s = passes.forward.compute_s + passes.forward.tensor_s + kept.forward.inside_s
    # Copies in go on meanwhile.
    beside_s = (grid.layers - grid.ckpt) * (saved_s * out_s / np.where(both, states_s, 1.0) - layer_s)
    return (
        np.where(both, np.maximum(late_s, 0.0), 0.0),
        np.where(both, grid.layers * out_s + beside_s, 0.0),
        np.where(both, (grid.layers - grid.ckpt) * out_s + beside_s, 0.0),
        np.where(both, share, 1.0),
    )


def _exposed(grid: StageGrid, kept: Phase, whole: Phase) -> Linear:
    """What the layers of a pass expose; one of each run of them is its last."""
    inside = _mixed(kept.inside_s, whole.inside_s)
    return inside + _once(grid, kept.last_s - kept.inside_s, whole.last_s - whole.inside_s)


def _beyond(grid: StageGrid, kept: tuple[Phase, Phase], whole: tuple[Phase, Phase]) -> Linear:
    """What a first or last pass exposes beyond the steady one, (pass, steady) of both kinds of layers."""
    more = [special.minus(steady) for special, steady in (kept, whole)]
    return _exposed(grid, *more) + _once(grid, more[0].alone_s, more[1].alone_s)


def _edge_layer_terms(
    name: Term,
    grid: StageGrid,
    load: LayerLoad,
    context: TimeContext,
    stable: dict[Term, Linear],
    delta: dict[Term, Linear],
) -> None:
    """Embedding and head: one layer each, never recomputed, its activations never offloaded."""
    quiet = grid.offloading(activations=ZERO)
    traffic = layer_traffic(quiet, load, context)
    alone = (NOTHING_BETWEEN, NOTHING_BETWEEN)
    kind = _Kind((ZERO, ZERO), ZERO, followed=not context.recomputes_first_layers)
    run = _run(quiet, load, traffic, context, kind, alone)
    stable[name] = Linear(
        load.forward_s
        + load.backward_s
        + run.tensor_s
        + run.blocking_s
        + run.forward.inside_s
        + run.backward.inside_s
    )
    first_s = run.first.inside_s - run.forward.inside_s
    if gathers_on_arrival(grid, context.facts):
        add_term(delta, Term.FIRST_GATHER, Linear(first_s + run.gather_before_s))
        first_s = ZERO
    traffic_of = {Term.EMBEDDING: Term.EMBEDDING_TRAFFIC, Term.HEAD: Term.HEAD_TRAFFIC}
    delta[traffic_of[name]] = Linear(first_s + run.last.inside_s - run.backward.inside_s)
    if reduces_by_chunk(grid, context.facts) and name is Term.EMBEDDING:
        # Of the chunk that ends the iteration; the head is of the first whose passes end.
        reduced_s = np.where(grid.zero <= 1, traffic.reduce_s, 0.0)
        add_term(delta, Term.CHUNK_REDUCTIONS, Linear(reduced_s))
    if context.facts.step.in_first_forward:
        add_term(delta, Term.OPTIMIZER_COMPUTE, Linear(traffic.step_compute_s))
    _accumulation_terms(Linear(load.parameters), context, stable, delta)


def _accumulation_terms(
    parameters: Linear, context: TimeContext, stable: dict[Term, Linear], delta: dict[Term, Linear]
) -> None:
    """Adding new gradients to old ones: read two, write one; the first micro-batch has nothing to add to."""
    if not context.facts.reduction.accumulation_pass:
        return
    share = accumulation_seconds(parameters.fixed + parameters.per_layer, context)
    on_layers = bool(np.any(parameters.per_layer))
    term = Linear(per_layer=share) if on_layers else Linear(share)
    back = Linear(per_layer=-share) if on_layers else Linear(-share)
    add_term(stable, Term.GRADIENT_ACCUMULATION, term)
    add_term(delta, Term.GRADIENT_ACCUMULATION, back)


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
    ends, followed = passes, kind.followed
    if followed and np.any(saved_bytes):
        quiet = grid.offloading(activations=ZERO)
        ends = layer_passes(quiet, load, traffic, context, again=again, saved_bytes=ZERO)
    into_backward = between[1].exposed_s(ends.backward, ends.forward, factors)
    last = passes.backward if reduces_by_chunk(grid, context.facts) else passes.last
    departure = departure_s(last, factors)
    forward = phase(passes.forward, factors, ZERO, into_forward, followed=followed)
    ahead = context.facts.step.taken == "while_waiting"
    if ahead and grid.role in (StageRole.MIDDLE, StageRole.LAST):
        first = steps_ahead(passes, traffic.step_compute_s, forward, factors)
    else:
        into_first = between[0].exposed_s(passes.first, passes.backward, factors)
        first = phase(passes.first, factors, ZERO, into_first, followed=followed)
        if followed and traffic.step_out_s.any() and grid.role is StageRole.FIRST:
            # Every layer sends its states off, the last ones beside the second forward pass, which a first
            # stage takes while it waits for the first micro-batch to come back.
            ends_pass = phase(passes.first, factors, ZERO, into_first)
            first = replace(first, last_s=np.where(traffic.step_out_s > 0.0, ends_pass.last_s, first.last_s))
    backward = phase(passes.backward, factors, added, into_backward)
    last_backward = phase(last, factors, added, into_backward + departure)
    if last is not passes.backward and context.facts.pipeline.later_stages_at_once:
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
        passes,
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
