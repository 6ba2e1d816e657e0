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

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.phases import (
    NOTHING_BETWEEN,
    Between,
    Phase,
    departure_s,
    dropped_if_idle,
    phase,
    steps_ahead,
)
from mist_megatron.cost.sends import sent_beside_reductions, sent_to_neighbours, slowed_by_reduction
from mist_megatron.cost.terms import ZERO, Linear, StageTerms, add_term
from mist_megatron.cost.traffic import gathers_on_arrival, reduces_by_chunk
from mist_megatron.cost.work import LayerWork, PassWork, StageWork, edge_grid, kept_layer
from mist_megatron.price.overlap import DEVICE_TO_HOST, HOST_TO_DEVICE, overlapped_time
from mist_megatron.price.prices import Array
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.term import Term


@dataclass(frozen=True)
class _Run:
    """What the four passes of one kind of layer expose."""

    forward: Phase
    backward: Phase
    first: Phase
    last: Phase
    layer: LayerWork

    @property
    def tensor_s(self) -> Array:
        """Tensor-parallel collectives that stop compute, forward and backward together."""
        return self.layer.forward.tensor_s + self.layer.backward.tensor_s

    @property
    def blocking_s(self) -> Array:
        """Data-parallel collectives that do."""
        forward, backward = self.layer.forward, self.layer.backward
        return forward.blocking_gather_s + backward.blocking_gather_s + backward.blocking_reduce_s

    @property
    def gather_before_s(self) -> Array:
        """Weights that the first pass waits for besides."""
        return self.layer.first.blocking_gather_s - self.layer.forward.blocking_gather_s


def closed_form(work: StageWork) -> StageTerms:
    """All terms of t and d over a grid."""
    stable: dict[Term, Linear] = {}
    delta: dict[Term, Linear] = {}
    sent, sent_beyond = sent_to_neighbours(work)
    between = _between_passes(work, sent or Linear())
    _block_terms(work, between, stable, delta)
    if work.embedding is not None:
        _edge_terms(work, work.embedding, (Term.EMBEDDING, Term.EMBEDDING_TRAFFIC), stable, delta)
    if work.head is not None:
        _edge_terms(work, work.head, (Term.HEAD, Term.HEAD_TRAFFIC), stable, delta)
    stable[Term.HOST_WORK] = Linear(work.host_s)
    for term, seconds in work.step.items():
        add_term(delta, term, seconds)
    if work.context.facts.step.in_first_forward:
        add_term(delta, Term.OPTIMIZER_COMPUTE, Linear(per_layer=work.kept.traffic.step_compute_s))
    slowed_s = slowed_by_reduction(work, work.step.get(Term.GRADIENT_REDUCTION, Linear()).fixed)
    if sent is not None:
        stable[Term.PIPELINE_P2P] = sent
    if sent_beyond is not None:
        delta[Term.PIPELINE_P2P] = sent_beyond
    if slowed_s is not ZERO:
        add_term(delta, Term.PIPELINE_P2P, Linear(slowed_s))
    for term in work.context.without:
        stable.pop(term, None)
        delta.pop(term, None)
    return StageTerms(stable, delta)


def _between_passes(work: StageWork, sent: Linear) -> tuple[Between, Between]:
    """Before the first layer of a forward and of a backward pass: the stage sends off the result of the pass
    before and does its host work. Where embedding or head come first, these are what hides arrivals; the
    stage has sent nothing then, the pass before having ended the pipeline."""
    grid, loads = work.grid, work.loads
    exchanges = 2.0 if grid.role is StageRole.MIDDLE else 1.0
    send_s = ZERO if Term.PIPELINE_P2P in work.context.without else sent.fixed / (exchanges * grid.vpp)
    usual = Between(send_s, work.host_s / (2 * grid.vpp), ZERO)
    forward = usual if loads.embedding is None else Between(ZERO, ZERO, loads.embedding.forward_s)
    backward = usual if loads.head is None else Between(ZERO, ZERO, loads.head.backward_s)
    return forward, backward


def _block_terms(
    work: StageWork,
    between: tuple[Between, Between],
    stable: dict[Term, Linear],
    delta: dict[Term, Linear],
) -> None:
    grid, facts, load = work.grid, work.context.facts, work.loads.block
    kept, whole = _runs(work, between)
    again_s = work.kept.recompute_s
    stable[Term.FORWARD] = Linear(per_layer=load.forward_s)
    stable[Term.BACKWARD] = Linear(per_layer=load.backward_s)
    stable[Term.RECOMPUTE] = Linear(per_layer=again_s, per_ckpt=load.again[0] - again_s)
    stable[Term.TENSOR_PARALLEL] = _mixed(kept.tensor_s, whole.tensor_s)
    stable[Term.BLOCKING_DATA_PARALLEL] = _mixed(kept.blocking_s, whole.blocking_s)
    stable[Term.EXPOSED_TRAFFIC] = _exposed(grid, kept.forward, whole.forward) + _exposed(
        grid, kept.backward, whole.backward
    )
    stable[Term.PIPELINE_FILL_OF_LAYERS] = _once(
        grid, kept.forward.alone_s + kept.backward.alone_s, whole.forward.alone_s + whole.backward.alone_s
    )
    first = _beyond(grid, (kept.first, kept.forward), (whole.first, whole.forward))
    last = _beyond(grid, (kept.last, kept.backward), (whole.last, whole.backward))
    if gathers_on_arrival(grid, facts):
        delta[Term.LAST_BACKWARD_TRAFFIC] = last
        delta[Term.FIRST_GATHER] = first + Linear(per_layer=kept.gather_before_s)
    else:
        delta[Term.FIRST_FORWARD_TRAFFIC] = first
        delta[Term.LAST_BACKWARD_TRAFFIC] = last
    if reduces_by_chunk(grid, facts):
        sent_s = sent_beside_reductions(work)
        each = [_by_chunk_s(grid, run.layer.last, sent_s, work.context.interference) for run in (kept, whole)]
        delta[Term.CHUNK_REDUCTIONS] = _mixed(*each)
    if facts.reduction.accumulation_pass:
        # Read two, write one; the first micro-batch has nothing to add to.
        added_s = work.kept.accumulate_s
        add_term(stable, Term.GRADIENT_ACCUMULATION, Linear(per_layer=added_s))
        add_term(delta, Term.GRADIENT_ACCUMULATION, Linear(per_layer=-added_s))


def _edge_terms(
    work: StageWork,
    layer: LayerWork,
    names: tuple[Term, Term],
    stable: dict[Term, Linear],
    delta: dict[Term, Linear],
) -> None:
    """Embedding and head: one layer each, never recomputed, its activations never offloaded."""
    grid, facts, load = work.grid, work.context.facts, layer.load
    run = _run(work, layer, layer, (NOTHING_BETWEEN, NOTHING_BETWEEN), _followed(work))
    stable[names[0]] = Linear(
        load.forward_s
        + load.backward_s
        + run.tensor_s
        + run.blocking_s
        + run.forward.inside_s
        + run.backward.inside_s
    )
    first_s = run.first.inside_s - run.forward.inside_s
    if gathers_on_arrival(grid, facts):
        add_term(delta, Term.FIRST_GATHER, Linear(first_s + run.gather_before_s))
        first_s = ZERO
    delta[names[1]] = Linear(first_s + run.last.inside_s - run.backward.inside_s)
    if reduces_by_chunk(grid, facts) and layer is work.embedding:
        # Of the chunk that ends the iteration; the head is of the first whose passes end.
        reduced_s = np.where(edge_grid(grid, facts).zero <= 1, layer.traffic.reduce_s, 0.0)
        add_term(delta, Term.CHUNK_REDUCTIONS, Linear(reduced_s))
    if facts.step.in_first_forward:
        add_term(delta, Term.OPTIMIZER_COMPUTE, Linear(layer.traffic.step_compute_s))
    if facts.reduction.accumulation_pass:
        add_term(stable, Term.GRADIENT_ACCUMULATION, Linear(layer.accumulate_s))
        add_term(delta, Term.GRADIENT_ACCUMULATION, Linear(-layer.accumulate_s))


def _followed(work: StageWork) -> bool:
    """Whether a run of layers may be followed by other ones in forward passes, and these come first in
    backward passes: where a stage's last layers are the recomputed ones."""
    return not work.context.recomputes_first_layers


def _runs(work: StageWork, between: tuple[Between, Between]) -> tuple[_Run, _Run]:
    """Both kinds of layers."""
    kept, ends, followed = work.kept, work.kept, _followed(work)
    if followed and np.any(work.grid.offload.activations):
        # The recomputed layers' backward pass comes first: nothing that they saved has to come in before it.
        quiet = work.grid.offloading(activations=ZERO)
        ends = kept_layer(quiet, work.loads.block, work.context)
    run = _run(work, kept, ends, between, followed)
    if work.recomputed is kept:
        return run, run
    return run, _run(work, work.recomputed, work.recomputed, between, followed)


def _run(
    work: StageWork, layer: LayerWork, ends: LayerWork, between: tuple[Between, Between], followed: bool
) -> _Run:
    """The four passes of one kind of layer; `ends` is what the first layer of a backward pass waits for."""
    factors, facts, role = work.context.interference, work.context.facts, work.grid.role
    step_s, step_out_s = layer.traffic.step_compute_s, layer.traffic.step_out_s
    into_forward = between[0].exposed_s(layer.forward, layer.backward, factors)
    into_backward = between[1].exposed_s(ends.backward, ends.forward, factors)
    last = layer.backward if reduces_by_chunk(work.grid, facts) else layer.last
    forward = phase(layer.forward, factors, ZERO, into_forward, followed=followed)
    ahead = facts.step.taken == "while_waiting"
    if ahead and role in (StageRole.MIDDLE, StageRole.LAST):
        first = steps_ahead(layer, step_s, forward, factors)
    else:
        into_first = between[0].exposed_s(layer.first, layer.backward, factors)
        first = phase(layer.first, factors, ZERO, into_first, followed=followed)
        if followed and step_out_s.any() and role is StageRole.FIRST:
            # Every layer sends its states off, the last ones beside the second forward pass, which a first
            # stage takes while it waits for the first micro-batch to come back.
            ends_pass = phase(layer.first, factors, ZERO, into_first)
            first = replace(first, last_s=np.where(step_out_s > 0.0, ends_pass.last_s, first.last_s))
    backward = phase(layer.backward, factors, layer.accumulate_s, into_backward)
    departing_s = into_backward + departure_s(last, factors)
    last_backward = phase(last, factors, layer.accumulate_s, departing_s)
    if last is not layer.backward and facts.pipeline.later_stages_at_once:
        last_backward = _begun_alone(last_backward, layer)
    return _Run(forward, backward, first, last_backward, layer)


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


def refinement(work: StageWork) -> Refinement:
    """What `closed_form` has to leave out."""
    grid = work.grid
    between = _between_passes(work, sent_to_neighbours(work)[0] or Linear())
    counted, whole = _runs(work, between)
    kept, none = counted, grid.ckpt == 0.0
    if _followed(work) and np.any(none & (grid.offload.activations > 0.0)):
        alone_run = _run(work, work.kept, work.kept, between, followed=False)
        kept = _chosen(none, alone_run, counted)
    alone = 0.0 if Term.PIPELINE_FILL_OF_LAYERS in work.context.without else 1.0

    def seconds(one: Phase, other: Phase) -> Array:
        term = _exposed(grid, one, other) + _once(grid, alone * one.alone_s, alone * other.alone_s)
        return term.at(grid.layers, grid.ckpt)

    def more(run: _Run) -> Array:
        ends = ((run.first, run.forward), (whole.first, whole.forward))
        last = ((run.last, run.backward), (whole.last, whole.backward))
        return (_beyond(grid, *ends) + _beyond(grid, *last)).at(grid.layers, grid.ckpt)

    forward_s, backward_s = seconds(kept.forward, whole.forward), seconds(kept.backward, whole.backward)
    counted_s = seconds(counted.forward, whole.forward) + seconds(counted.backward, whole.backward)
    gathers = [run.layer.forward.blocking_gather_s for run in (kept, whole)]
    late_s, behind_all_s, behind_own_s, share = _late(work, kept, whole)
    return Refinement(
        forward_s=forward_s + _mixed(*gathers).at(grid.layers, grid.ckpt),
        stable_s=forward_s + backward_s - counted_s,
        delta_s=more(kept) - more(counted),
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


def _late(work: StageWork, kept: _Run, whole: _Run) -> tuple[Array, Array, Array, Array]:
    """The last four of a refinement."""
    grid, factors, passes, traffic = work.grid, work.context.interference, kept.layer, kept.layer.traffic
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


def _begun_alone(last: Phase, layer: LayerWork) -> Phase:
    """Nothing is reduced beside the first layer of the last backward pass (what the head leaves is counted
    with the head), and what its last layer leaves is on its own: n layers, n - 1 of them beside others."""
    waits_s = np.maximum(layer.last.reduce_s - layer.last.compute_s, 0.0)
    return replace(last, alone_s=last.alone_s - waits_s)


def _by_chunk_s(grid: StageGrid, last: PassWork, sent_s: Array, factors: Array) -> Array:
    """A layer's share of reductions that follow their chunk's last backward pass: of the chunk that ends the
    iteration all of it, of the others what as many passes as there are stages do not hide. Over links that
    sends go over too, a reduction has what these leave, and the last micro-batch's sends are slowed down."""
    chunks, count = grid.vpp, grid.stages
    reduce, compute, tensor = last.reduce_s, count * last.compute_s, count * last.tensor_s
    beside_s = overlapped_time((compute, reduce, ZERO, ZERO), factors, tensor) - compute - tensor
    on_link_s = reduce + count * sent_s - np.maximum(compute + tensor, count * sent_s)
    slowed_s = np.minimum(count * sent_s, reduce)
    exposed_s = np.maximum(beside_s, np.where(sent_s > 0.0, np.maximum(on_link_s, slowed_s), 0.0))
    return np.asanyarray((reduce + (chunks - 1) * exposed_s) / chunks)


def _mixed(kept: Array, whole: Array) -> Linear:
    return Linear(per_layer=kept, per_ckpt=dropped_if_idle(np.asanyarray(whole - kept)))


def _once(grid: StageGrid, kept: Array, whole: Array) -> Linear:
    """Once per run of layers, of which every chunk of an interleaved stage is one: of recomputed layers when
    there are no others."""
    if not (kept.any() or whole.any()):
        return Linear()
    if kept is whole or not np.any(grid.ckpt):
        return Linear(grid.vpp * kept)
    return Linear(grid.vpp * np.where(grid.ckpt < grid.layers, kept, whole))
