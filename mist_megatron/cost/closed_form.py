"""Stable time t and extra time d of pipeline stages, as named terms linear in layers and recomputed layers.

A layer pass has compute, traffic that must have come in before it (weights gathered or copied in, offloaded
activations) and traffic that leaves after it (reduced gradients, offloaded activations). `phases` says what
of it a run of layers exposes. In the stable state a pass follows at once, so that what leaves last leaves
beside the next pass; the first arrival of a pass does not hide but behind what the stage does between two.

Which layers of a stage are the recomputed ones matters at the ends of passes. Where they are the last (Mist),
a backward pass begins with them, and offloaded activations come in beside the last of them; terms could say
that only where some layers are recomputed, but are said of all stages that keep a layer, because a search
reads terms of any number of recomputed layers off those of none. With none and offloaded activations t is off
by the arrival of one layer's, less what hides it, and too large by what two layers' departures take longer
than their compute: `refinement` tells that to `predict`.

Every term is `fixed + layers * per_layer + ckpt * per_ckpt`, so a search can price a whole plane of
(layers, ckpt) from three numbers and prune exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mist_megatron.cost.by_chunk import Round, gathered_apart
from mist_megatron.cost.edges import (
    arriving_s,
    before_head,
    begun_beside,
    embedding_waits,
    head_waits,
    late_behind_steps_s,
    leaving_s,
    states_leave_at_head,
    still_leaving,
    turned_at_head,
)
from mist_megatron.cost.last_reductions import counted_apart, handed_on_late, last_reductions
from mist_megatron.cost.layer_runs import Way, mixed, once_a_run
from mist_megatron.cost.neighbours import (
    LayerRun,
    add_gathered_at_borders,
    among_others,
    ended_by,
    later,
    of_phases,
    usually_among,
)
from mist_megatron.cost.phases import (
    NOTHING_BETWEEN,
    Between,
    Phase,
    averaged,
    begun_by_host,
    chosen,
    departure_s,
    dropped_if_idle,
    phase,
    steps_ahead,
)
from mist_megatron.cost.refinement import Refinement
from mist_megatron.cost.sends import least_sent, sent_to_neighbours, slowed_by_reduction
from mist_megatron.cost.terms import ZERO, Linear, StageTerms, add_term, of_kind
from mist_megatron.cost.traffic import gathers_by_chunk, gathers_on_arrival, reduces_by_chunk
from mist_megatron.cost.turning import (
    apart_at_head,
    begun_with,
    comes_back_s,
    copies_beside,
    recomputed_of,
    turns_taken,
    warmed_up,
)
from mist_megatron.cost.work import LayerWork, StageWork, edge_grid
from mist_megatron.price.overlap import DEVICE_TO_HOST, GPU_GPU, HOST_TO_DEVICE, overlapped_time
from mist_megatron.price.prices import Array, any_of
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.term import Term


def closed_form(work: StageWork) -> StageTerms:
    """All terms of t and d over a grid."""
    stable: dict[Term, Linear] = {}
    delta: dict[Term, Linear] = {}
    sent, sent_beyond = sent_to_neighbours(work)
    between = _between_passes(work, least_sent(work))
    for place in range(len(work.blocks)):
        _block_terms(work, place, between, stable, delta)
    add_gathered_at_borders(work, stable, delta)
    if work.embedding is not None:
        _edge_terms(work, work.embedding, (Term.EMBEDDING, Term.EMBEDDING_TRAFFIC), stable, delta)
    if work.head is not None:
        _edge_terms(work, work.head, (Term.HEAD, Term.HEAD_TRAFFIC), stable, delta)
    if not reduces_by_chunk(work.grid, work.context.facts):
        add_term(delta, Term.LAST_BACKWARD_TRAFFIC, last_reductions(work, followed=_followed(work)))
    stable[Term.HOST_WORK] = Linear(work.host_s)
    if work.resharding_s:
        stable[Term.RESHARDING] = Linear(sum((there + back for there, back in work.resharding_s), start=ZERO))
    for term, seconds in work.step.items():
        add_term(delta, term, seconds)
    if work.context.facts.step.in_first_forward:
        for place, block in enumerate(work.blocks):
            each = of_kind(place, block.kept.traffic.step_compute_s)
            add_term(delta, Term.OPTIMIZER_COMPUTE, each)
    slowed_s = slowed_by_reduction(work, work.step.get(Term.GRADIENT_REDUCTION, Linear()).fixed)
    if sent is not None:
        stable[Term.PIPELINE_P2P], late = sent, handed_on_late(work)
        add_term(stable, Term.EXPOSED_TRAFFIC, late)
        add_term(delta, Term.LAST_BACKWARD_TRAFFIC, late.times(-1.0))
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
    stage has sent nothing then, the pass before having ended the pipeline. What arrives hides behind the
    least that a stage of this role sends, so that where it stands adds sends and no more."""
    grid, loads = work.grid, work.loads
    exchanges = 2.0 if grid.role is StageRole.MIDDLE else 1.0
    send_s = ZERO if Term.PIPELINE_P2P in work.context.without else sent.fixed / (exchanges * grid.vpp)
    arrives = work.context.facts.host_copies.on_arrival
    usual = Between(send_s, work.host_s / (2 * grid.vpp), ZERO, on_arrival=arrives)
    # Of chunks one has the embedding, and one the head.
    others = ((grid.vpp - 1.0) / grid.vpp, usual) if grid.interleaved else None
    embedding, head = loads.embedding, loads.head
    forward = usual if embedding is None else Between(ZERO, ZERO, embedding.forward_s, others=others)
    backward = usual if head is None else Between(ZERO, ZERO, head.backward_s, others=others)
    return forward, backward


def _block_terms(
    work: StageWork,
    place: int,
    between: tuple[Between, Between],
    stable: dict[Term, Linear],
    delta: dict[Term, Linear],
) -> None:
    """Of the kind of layer at that place."""
    grid, facts, load = work.grid, work.context.facts, work.loads.blocks[place]
    kept, whole = _runs(work, place, between)
    forward, backward = Way(grid, place, forward=True), Way(grid, place, forward=False)
    again_s = kept.layer.recompute_s
    add_term(stable, Term.FORWARD, of_kind(place, load.forward_s))
    add_term(stable, Term.BACKWARD, of_kind(place, load.backward_s))
    add_term(stable, Term.RECOMPUTE, of_kind(place, again_s, load.again[0] - again_s))
    add_term(stable, Term.TENSOR_PARALLEL, mixed(place, kept.others_s, whole.others_s))
    if any_of(kept.sent_s):
        add_term(stable, Term.EXPERT_TRAFFIC, mixed(place, kept.sent_s, whole.sent_s))
    add_term(stable, Term.BLOCKING_DATA_PARALLEL, mixed(place, kept.blocking_s, whole.blocking_s))
    exposed = forward.exposed(kept.forward, whole.forward) + backward.exposed(kept.backward, whole.backward)
    exposed = exposed + turns_taken(work, forward, kept.forward)
    add_term(stable, Term.EXPOSED_TRAFFIC, exposed)
    add_term(stable, Term.PIPELINE_FILL_OF_LAYERS, _arrivals(forward, backward, kept, whole))
    first = forward.beyond((kept.first, kept.forward), (whole.first, whole.forward))
    first = first + warmed_up(work, forward.runs_ended, kept.forward, kept.layer)
    last = backward.beyond((kept.last, kept.backward), (whole.last, whole.backward))
    add_term(delta, Term.LAST_BACKWARD_TRAFFIC, last)
    stops = gathers_on_arrival(grid, facts)
    first = first + of_kind(place, dropped_if_idle(kept.gather_before_s))
    add_term(delta, Term.FIRST_GATHER if stops else Term.FIRST_FORWARD_TRAFFIC, first)
    if gathers_by_chunk(grid, facts):
        gathered = Round.of(work).gathered_s(work.blocks[place].kept, place)
        add_term(delta, Term.FIRST_FORWARD_TRAFFIC, gathered)
    if reduces_by_chunk(grid, facts):
        each = [Round.of(work).reduced_s(run.layer) for run in (kept, whole)]
        add_term(delta, Term.CHUNK_REDUCTIONS, mixed(place, *each))
    if facts.reduction.accumulation_pass:
        # Read two, write one; the first micro-batch has nothing to add to.
        added_s = kept.layer.accumulate_s
        add_term(stable, Term.GRADIENT_ACCUMULATION, of_kind(place, added_s))
        add_term(delta, Term.GRADIENT_ACCUMULATION, of_kind(place, -added_s))


def _arrivals(forward: Way, backward: Way, kept: LayerRun, whole: LayerRun) -> Linear:
    """What passes wait for before their first layer."""
    if np.array_equal(forward.runs_begun, backward.runs_begun):
        both = [run.forward.alone_s + run.backward.alone_s for run in (kept, whole)]
        return once_a_run(forward.grid, forward.runs_begun, *both)
    there = forward.begun(kept.forward.alone_s, whole.forward.alone_s)
    return there + backward.begun(kept.backward.alone_s, whole.backward.alone_s)


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
    if layer is work.embedding and not gathers_on_arrival(grid, facts):
        run = replace(run, first=begun_by_host(run.first, work.host_s / (2 * grid.vpp)))
    if _travels(work, layer):
        run = _gathered(work, layer, run)
    stable[names[0]] = Linear(
        load.forward_s
        + load.backward_s
        + run.tensor_s
        + run.blocking_s
        + run.forward.inside_s
        + run.backward.inside_s
    )
    first_s = run.first.inside_s - run.forward.inside_s + dropped_if_idle(run.gather_before_s)
    if gathers_on_arrival(grid, facts) or facts.step.taken == "on_arrival":
        stopped = Term.FIRST_FORWARD_TRAFFIC if facts.step.in_first_forward else Term.FIRST_GATHER
        add_term(delta, stopped, Linear(first_s))
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


def _travels(work: StageWork, layer: LayerWork) -> bool:
    """Whether weights or gradients of an edge do while it and its neighbour compute."""
    arriving = arriving_s(layer.first), arriving_s(layer.forward)
    traffic = *arriving, leaving_s(layer.backward), layer.traffic.step_out_s
    return any(any_of(one) for one in traffic) and not work.grid.interleaved


def _gathered(work: StageWork, layer: LayerWork, run: LayerRun, *, special: bool = False) -> LayerRun:
    """An edge whose weights come in for every pass, or for the first, and those of the layer next to it,
    where they do. Where recomputed layers come last, one of these is before the head. What is `special` is
    that none is, or elsewhere that the layer before the head is the only one that is kept."""
    grid, factors, host_s = work.grid, work.context.interference, work.host_s / (2 * work.grid.vpp)
    last = layer is work.head
    place = (grid.runs[-1][1] if last else grid.runs[0][0]) if grid.runs else -1 * last
    block = work.blocks[place]
    followed = last and _followed(work) and not special and any_of(grid.offload.activations)
    apart = special and _followed(work)
    alone = grid.layers == 1.0 if apart else special
    before = before_head(work, place, alone=alone) if last else block.kept
    behind = recomputed_of(work, place) if followed else block.recomputed
    usual = [usually_among(work, place, one) for one in (before, behind)]
    if last:
        kept, whole = (head_waits(layer, one, host_s, factors, apart=apart) for one in usual)
    else:
        # Backward passes come to that block's layers from the next run of layers, or from the head.
        following = work.blocks[1].kept if work.resharding_s and len(work.blocks) > 1 else work.head
        left_s = ZERO if following is None else following.backward.reduce_s
        own_s = block.kept.backward.reduce_s
        kept, whole = (embedding_waits(layer, one, host_s, factors, left_s, own_s) for one in usual)
    each = (arriving_s(layer.forward) > 0.0) & (arriving_s(block.kept.forward) > 0.0)
    once = arriving_s(layer.first) + layer.traffic.step_out_s > 0.0
    reduces = (leaving_s(layer.backward) > 0.0) & (leaving_s(block.kept.backward) > 0.0)
    some = grid.by_kind[place].ckpt < grid.by_kind[place].layers
    if followed:
        some = some & (grid.offload.activations == 0.0)

    def seconds(name: str, usual: Phase) -> Phase:
        waits_s = np.where(some, getattr(kept, name), getattr(whole, name))
        # What an embedding has reduced last goes before the next pass; a head's gradients never wait for one.
        there = each if last else each | reduces
        where = {"first_s": once, "forward_s": there}.get(name, each | reduces)
        return replace(usual, inside_s=np.where(where, waits_s, usual.inside_s))

    forward, first = seconds("forward_s", run.forward), seconds("first_s", run.first)
    if _ahead(work):
        # What comes in for the steps is in it, and what comes for its forward pass follows them.
        first = replace(run.first, inside_s=run.first.inside_s + forward.inside_s - run.forward.inside_s)
    backward, ended = seconds("backward_s", run.backward), seconds("last_s", run.last)
    return replace(run, forward=forward, backward=backward, first=first, last=ended)


def _followed(work: StageWork) -> bool:
    """Whether a run of layers may be followed by other ones in forward passes, and these come first in
    backward passes: where a stage's last layers are the recomputed ones."""
    return not work.context.recomputes_first_layers


def _runs(work: StageWork, place: int, between: tuple[Between, Between]) -> tuple[LayerRun, LayerRun]:
    """Layers of the kind at that place, kept and recomputed."""
    block = gathered_apart(work, place)
    kept, followed = block.kept, _followed(work)
    ends = begun_with(work, place, kept, followed=followed)
    others = [
        (share, _run(work, other, ends, between, followed))
        for share, other in copies_beside(work, place, kept)
    ]
    if others:
        run = _averaged(_run(work, kept, ends, between, followed), others)
    else:
        run = among_others(work, place, kept, lambda one: _run(work, one, ends, between, followed))
    sends = followed and any_of(work.grid.offload.activations)
    whole = recomputed_of(work, place) if sends else block.recomputed
    if whole is kept:
        return run, run
    again = among_others(work, place, whole, lambda one: _run(work, one, whole, between, followed))
    if sends:
        run = later(ended_by(run, again), comes_back_s(work, place))
    return run, again


def _averaged(run: LayerRun, others: Sequence[tuple[float, LayerRun]]) -> LayerRun:
    """Passes of layers beside which such shares of others' copies run."""
    return of_phases(run, lambda name: averaged(name(run), [(share, name(one)) for share, one in others]))


def _run(
    work: StageWork, layer: LayerWork, ends: LayerWork, between: tuple[Between, Between], followed: bool
) -> LayerRun:
    """The four passes of one kind of layer; `ends` is what the first layer of a backward pass waits for."""
    factors, facts, role = work.context.interference, work.context.facts, work.grid.role
    step_s, step_out_s = layer.traffic.step_compute_s, layer.traffic.step_out_s
    into_forward = between[0].exposed_s(layer.forward, layer.backward, factors)
    into_backward = between[1].exposed_s(ends.backward, still_leaving(work, ends.forward, followed), factors)
    last = layer.backward if reduces_by_chunk(work.grid, facts) else counted_apart(layer)
    forward = phase(layer.forward, factors, ZERO, into_forward, followed=followed)
    forward = turned_at_head(work, layer.forward, ends, forward, followed)
    if _ahead(work):
        first = steps_ahead(layer, step_s, forward, factors)
    else:
        into_first = begun_beside(work, between[0]).exposed_s(layer.first, layer.backward, factors)
        first = phase(layer.first, factors, ZERO, into_first, followed=followed)
        first = turned_at_head(work, layer.first, ends, first, followed, steps=True)
        if followed and any_of(step_out_s) and role is StageRole.FIRST:
            # Every layer sends its states off, the last ones beside the second forward pass, which a first
            # stage takes while it waits for the first micro-batch to come back.
            ends_pass = phase(layer.first, factors, ZERO, into_first)
            first = replace(first, last_s=np.where(step_out_s > 0.0, ends_pass.last_s, first.last_s))
        if followed and any_of(step_out_s) and role is StageRole.ONLY:
            first = states_leave_at_head(work, layer, ends, first)
    backward = phase(layer.backward, factors, layer.accumulate_s, into_backward)
    # Gradients that visit turn round where they are on their way out when the last backward pass ends.
    ending = replace(last, copy_out_s=ZERO) if facts.host_copies.states_visit else last
    departing_s = into_backward + departure_s(ending, factors)
    last_backward = phase(last, factors, layer.accumulate_s, departing_s)
    return LayerRun(forward, backward, first, last_backward, layer)


def _ahead(work: StageWork) -> bool:
    """Whether layers step, and gather, while the stage waits for its first input."""
    waiting = work.context.facts.step.taken == "while_waiting"
    return waiting and work.grid.role in (StageRole.MIDDLE, StageRole.LAST)


def refinement(work: StageWork) -> Refinement:
    """What `closed_form` has to leave out."""
    joined, *others = (_refinement(work, place) for place in range(len(work.blocks)))
    for other in others:
        joined = joined.joined(other)
    stable_s, delta_s = _beside_kept_layer(work)
    delta_s = delta_s + (late_behind_steps_s(work) if _ahead(work) else 0.0)
    none = (work.grid.ckpt == 0.0) & (work.grid.offload.activations > 0.0)
    if _followed(work) and any_of(none) and not reduces_by_chunk(work.grid, work.context.facts):
        own = last_reductions(work, followed=False, waits_s=_copied_at_head_s(work))
        usual = last_reductions(work, followed=True)
        delta_s = delta_s + np.where(none, own.at(work.grid) - usual.at(work.grid), 0.0)
    return replace(joined, stable_s=joined.stable_s + stable_s, delta_s=joined.delta_s + delta_s)


def _beside_kept_layer(work: StageWork) -> tuple[Array, Array]:
    """What t and d lack where a head stands beside a layer that is kept, though recomputed ones come last
    elsewhere, or beside the only one that is: of stages that offload activations."""
    head, grid, followed = work.head, work.grid, _followed(work)
    if followed:
        here = (grid.ckpt == 0.0) & (grid.offload.activations > 0.0)
    else:
        here = (grid.layers - grid.ckpt == 1.0) & (grid.layers > 1.0)
    if head is None or not any_of(grid.offload.activations) or not any_of(here):
        return ZERO, ZERO
    if not _travels(work, head):
        return ZERO, ZERO
    run = _run(work, head, head, (NOTHING_BETWEEN, NOTHING_BETWEEN), followed=False)
    usual, own = (_gathered(work, head, run, special=special) for special in (False, True))
    stable_s = own.forward.inside_s + own.backward.inside_s
    stable_s = stable_s - usual.forward.inside_s - usual.backward.inside_s
    ends_s = own.first.inside_s + own.last.inside_s - usual.first.inside_s - usual.last.inside_s
    return np.where(here, stable_s, 0.0), np.where(here, ends_s - stable_s, 0.0)


def _refinement(work: StageWork, place: int) -> Refinement:
    """The part of the kind of layer at that place."""
    grid, block = work.grid, gathered_apart(work, place)
    between = _between_passes(work, least_sent(work))
    counted, whole = _runs(work, place, between)
    kept, none = counted, grid.ckpt == 0.0
    if _followed(work) and any_of(none & (grid.offload.activations > 0.0)):
        alone_run = _run(work, block.kept, block.kept, between, followed=False)
        there, first = (
            apart_at_head(work, place, *pair)
            for pair in ((block.kept.forward, alone_run.forward), (block.kept.first, alone_run.first))
        )
        kept = _chosen(none, replace(alone_run, forward=there, first=first), counted)
    alone = 0.0 if Term.PIPELINE_FILL_OF_LAYERS in work.context.without else 1.0
    forward, backward = Way(grid, place, forward=True), Way(grid, place, forward=False)

    def seconds(way: Way, one: Phase, other: Phase) -> Array:
        return (way.exposed(one, other) + way.begun(alone * one.alone_s, alone * other.alone_s)).at(grid)

    def more(run: LayerRun) -> Array:
        ends = ((run.first, run.forward), (whole.first, whole.forward))
        last = ((run.last, run.backward), (whole.last, whole.backward))
        return (forward.beyond(*ends) + backward.beyond(*last)).at(grid)

    forward_s = seconds(forward, kept.forward, whole.forward)
    backward_s = seconds(backward, kept.backward, whole.backward)
    counted_s = seconds(forward, counted.forward, whole.forward)
    counted_s = counted_s + seconds(backward, counted.backward, whole.backward)
    gathers = [run.layer.forward.blocking_gather_s for run in (kept, whole)]
    late_s, behind_all_s, behind_own_s, share = _late(work, place, kept, whole)
    second_s, cycle_s = _comings_and_goings(work, place, kept.layer)
    return Refinement(
        forward_s=forward_s + mixed(place, *gathers).at(grid),
        stable_s=forward_s + backward_s - counted_s,
        delta_s=more(kept) - more(counted),
        late_s=late_s,
        behind_all_s=behind_all_s,
        behind_own_s=behind_own_s,
        hidden_share=share,
        second_s=second_s,
        cycle_s=cycle_s,
    )


def _copied_at_head_s(work: StageWork) -> Array:
    """What of its reduction is done while the last backward pass waits, when the head's has ended, for copies
    from and to the last layer, which is kept; nothing where gradients leave in every pass."""
    place, factors = work.grid.runs[-1][1] if work.grid.runs else 0, work.context.interference
    if work.head is None or place < 0:
        return ZERO
    kept, between = work.blocks[place].kept, _between_passes(work, least_sent(work))
    run = _run(work, kept, kept, between, followed=False)
    arriving = begun_with(work, place, kept, followed=False).backward
    without = replace(arriving, copy_in_s=ZERO), replace(arriving, copy_out_s=ZERO)
    waits_s = np.maximum(run.backward.alone_s - between[1].exposed_s(*without, factors), 0.0)
    waits_s = waits_s + np.where(work.grid.grad_accum > 1.0, run.forward.last_s, run.first.last_s)
    slow = max(float(factors[1 << GPU_GPU | 1 << copy, GPU_GPU]) for copy in (HOST_TO_DEVICE, DEVICE_TO_HOST))
    return np.where(kept.backward.reduce_s > 0.0, 0.0, np.maximum(waits_s, 0.0) / slow)


def _chosen(where: Array, one: LayerRun, other: LayerRun) -> LayerRun:
    """Passes of one run on some rows, of another on the others."""
    return of_phases(other, lambda name: chosen(where, name(one), name(other)))


def _late(work: StageWork, place: int, kept: LayerRun, whole: LayerRun) -> tuple[Array, Array, Array, Array]:
    """The last four of a refinement."""
    grid, factors, passes, traffic = work.grid, work.context.interference, kept.layer, kept.layer.traffic
    states_s, saved_s = traffic.step_out_s, passes.forward.copy_out_s
    both = (states_s > 0.0) & (saved_s > 0.0)
    if grid.role not in (StageRole.MIDDLE, StageRole.LAST) or not any_of(both):
        return ZERO, ZERO, ZERO, np.ones(())
    quiet = replace(passes, first=replace(passes.first, copy_out_s=passes.first.copy_out_s - saved_s))
    first = steps_ahead(quiet, traffic.step_compute_s, kept.forward, factors)
    way, count = Way(grid, place, forward=True), grid.by_kind[place]
    late_s = way.beyond((kept.first, first), (whole.first, whole.first)).at(grid)
    streams = (traffic.step_compute_s, passes.first.gather_s, passes.first.copy_in_s, states_s)
    each_s = overlapped_time(streams, factors)
    out_s = states_s * float(factors[1 << HOST_TO_DEVICE | 1 << DEVICE_TO_HOST, DEVICE_TO_HOST])
    share = np.minimum(out_s / np.where(both, each_s, 1.0), 1.0)
    layer_s = passes.forward.compute_s + passes.forward.tensor_s + kept.forward.inside_s
    # Copies in go on meanwhile.
    beside_s = (count.layers - count.ckpt) * (saved_s * out_s / np.where(both, states_s, 1.0) - layer_s)
    return (
        np.where(both, np.maximum(late_s, 0.0), 0.0),
        np.where(both, count.layers * out_s + beside_s, 0.0),
        np.where(both, (count.layers - count.ckpt) * out_s + beside_s, 0.0),
        np.where(both, share, 1.0),
    )


def _comings_and_goings(work: StageWork, place: int, layer: LayerWork) -> tuple[Array, Array]:
    """The last two of a refinement. Copies of one layer run beside those of the next, and the first stage's
    last ones beside what it does until its second forward pass comes to a layer."""
    grid, traffic, factors = work.grid, layer.traffic, work.context.interference
    out_s = traffic.step_out_s
    if grid.role is StageRole.ONLY or not any_of(out_s):
        return ZERO, ZERO
    second_s = ZERO
    if work.embedding is not None:
        between_s = least_sent(work).fixed + work.host_s / 2 + work.embedding.forward.compute_s
        second_s = np.maximum(out_s - between_s, 0.0)
    streams = (traffic.step_compute_s, layer.first.gather_s, layer.first.copy_in_s, out_s)
    each_s = overlapped_time(streams, factors)
    alone_s = layer.first.copy_in_s + traffic.step_compute_s + out_s + work.step[Term.HOST_STEP].fixed
    cycle_s = alone_s + (grid.by_kind[place].layers - 1.0) * each_s
    return second_s, np.where(out_s > 0.0, cycle_s, 0.0)
