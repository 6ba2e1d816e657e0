"""What reductions of ZeRO 0 and 1 add to the last backward pass of an iteration, and sub-groups of replicas
that join what each of them reduces in every pass.

A layer's gradients leave when its backward pass has ended, beside the layer that comes next: those of a head
beside the stage's last layer, those of its first layer beside the embedding, and those of the embedding
beside nothing. They go over one communicator, one after the other, and hold nothing up. What the head's take
longer than the layer beside them hides behind whatever the following layers leave of their time.

What follows reductions of every pass comes beside these, and holds up what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.neighbours import takes_turns
from mist_megatron.cost.phases import dropped_if_idle
from mist_megatron.cost.sends import sent_before
from mist_megatron.cost.terms import ZERO, Linear, of_kind
from mist_megatron.cost.traffic import replica_nodes
from mist_megatron.cost.turning import recomputed_of
from mist_megatron.cost.work import LayerWork, PassWork, StageWork
from mist_megatron.price.overlap import COMPUTE, GPU_GPU, overlapped_time
from mist_megatron.price.prices import Array, any_of
from mist_megatron.spec.mesh import StageRole

Copies = tuple[Array, Array, Array]
"""In and out, and collectives that follow compute while these go on."""
NO_COPIES: Copies = (ZERO, ZERO, ZERO)
Beside = Callable[..., Array]
"""What a reduction adds to what it runs beside."""


def counted_apart(layer: LayerWork) -> PassWork:
    """The last backward pass without them."""
    if layer.last is layer.backward:
        return layer.last
    return replace(layer.last, reduce_s=layer.backward.reduce_s)


def last_reductions(work: StageWork, *, followed: bool, waits_s: Array = ZERO) -> Linear:
    """In d, of a stage that is no chunks; of single layers (`StageGrid.runs`) what each adds. Where those
    that are run again follow others, backward passes begin with them, and activations come in beside their
    last one. Of a head's reduction `waits_s` is done before."""
    followed = followed and any_of(work.grid.offload.activations)
    grid, factors = work.grid, work.context.interference
    edges = [_reduced_s(work.head, waits_s), _reduced_s(work.embedding)]
    blocks = [_reduced_s(block.kept) for block in work.blocks]
    if not any(any_of(seconds) for seconds in (*edges, *blocks)):
        return Linear()

    beside_s, added, spare_s = _beside(factors), Linear(), ZERO
    for place, (block, reduce_s) in enumerate(zip(work.blocks, blocks, strict=True)):
        kept_s, whole_s = (
            beside_s(_compute_s(one), reduce_s, _usual_s(one, one), _copies_s(one))
            for one in (block.kept, block.recomputed)
        )
        added = added + of_kind(place, kept_s, whole_s - kept_s)
        if followed:
            added = added + Linear(_coming_back_s(work, place, reduce_s, beside_s))
        spare_s = spare_s + np.where(_joins(block.kept), 0.0, _left_s(work, place, reduce_s))
    first, last = (grid.runs[0][0], grid.runs[-1][1]) if grid.runs else (0, 0)
    joins = any(any_of(_joins(block.kept)) for block in work.blocks)
    if takes_turns(work) and first >= 0 and last >= 0 and not joins:
        queued_s, spare_s = _queued_s(work, blocks, (first, last), beside_s)
        added = added + Linear(queued_s - added.at(grid))
    elif len(blocks) > 1 and not joins:
        added = added + Linear(_at_borders_s(work, blocks, beside_s))
    if last >= 0:
        kept, compute_s = work.blocks[last].kept, _at_end_s(work, last)
        ends = recomputed_of(work, last) if followed else kept
        if followed:
            compute_s = np.where(grid.offload.activations > 0.0, _compute_s(ends), compute_s)
        before_s, behind_s = _usual_s(kept, kept), _usual_s(kept, work.head)
        copies = _copies_s(ends) if followed else _beside_last(work, last)
        added = added + Linear(
            beside_s(compute_s, edges[0], behind_s, copies)
            - beside_s(compute_s, blocks[last], before_s, copies)
        )
        held_s = np.where(_joins(kept), 0.0, kept.backward.reduce_s)
        if any_of(edges[0]) and any_of(held_s):
            later_s = _behind_head_s(compute_s, edges[0], held_s, copies, factors)
            later_s = later_s - beside_s(compute_s, edges[0], behind_s, copies)
            both = (held_s > 0.0) & (edges[0] > 0.0)
            added = added + Linear(np.where(both, later_s, 0.0))
            spare_s = np.where(both, 0.0, spare_s)
        if first >= 0 and any_of(edges[0]):
            spare_s = spare_s - np.maximum(_room(factors) * compute_s - blocks[last], 0.0)
            longer_s = edges[0] - _beside_head_s(compute_s, copies, factors)
            added = added + Linear(-_hidden_s(longer_s, spare_s, factors))
    if first >= 0:
        beside, kept = ZERO if work.embedding is None else _compute_s(work.embedding), work.blocks[first].kept
        added = added + Linear(_quiet_end_s(work, first, (blocks[first], edges[0]), beside_s))
        usual_s = np.where(_joins(kept), kept.backward.reduce_s, 0.0)
        added = added + Linear(beside_s(beside, blocks[first], usual_s) + edges[1])
        leaves_s = np.where(_joins(kept), 0.0, kept.backward.reduce_s)
        if any_of(beside) and any_of(edges[1]) and any_of(leaves_s):
            # Counted as leaving when nothing else runs.
            added = added + Linear(np.where(edges[1] > 0.0, beside_s(beside, leaves_s) - leaves_s, 0.0))
    return added


def handed_on_late(work: StageWork) -> Linear:
    """By how much later than t has it the stage before has the result of the last backward pass, which is in
    d: reductions that begin in that pass slow it down, and go on beside its result, with which they share
    links. Where gradients leave in every pass, layers wait for them behind those of a head. Of a stage that
    all wait for that makes the step so much longer: t has an equal part of it for each micro-batch, and d
    that much less."""
    grid, factors = work.grid, work.context.interference
    apart = grid.interleaved or work.context.facts.pipeline.sends_in_turn
    if grid.role not in (StageRole.MIDDLE, StageRole.LAST) or apart:
        return Linear()
    reduces, head_s = [_reduced_s(block.kept) for block in work.blocks], _reduced_s(work.head)
    first, last = (grid.runs[0][0], grid.runs[-1][1]) if grid.runs else (0, 0)
    begun = work.blocks[last].kept
    held_s = np.where(_joins(begun), 0.0, begun.backward.reduce_s)
    waits = (head_s > 0.0) & (held_s > 0.0)
    if not any(any_of(one) for one in reduces) and not any_of(waits):
        return Linear()
    late = Linear()
    for place, (block, reduce_s) in enumerate(zip(work.blocks, reduces, strict=True)):
        kept_s, whole_s = (
            _slower_s(_compute_s(one), reduce_s, factors) / grid.grad_accum
            for one in (block.kept, block.recomputed)
        )
        late = late + of_kind(place, kept_s, whole_s - kept_s)
    begins_s, left_s = ZERO, np.maximum(reduces[first], 0.0)
    if last >= 0:
        own_s, other_s = (_slower_s(_compute_s(begun), one, factors) for one in (reduces[last], head_s))
        begins_s = other_s - own_s
    if any_of(waits):
        # Of one or two layers none waits; t has one rate for any number of them.
        queued_s = _behind_head_s(_compute_s(begun), head_s, held_s, _copies_s(begun), factors)
        begins_s = np.where(waits, queued_s, begins_s)
        left_s = np.where(
            waits, held_s + np.maximum(held_s - _room(factors) * _compute_s(begun), 0.0), left_s
        )
    sent_s, crosses = sent_before(work)
    shared = (replica_nodes(grid, work.context) > 1.0) == crosses
    sent_late_s = np.where(shared, np.minimum(sent_s, left_s), 0.0) if first >= 0 else ZERO
    return late + Linear((begins_s + sent_late_s) / grid.grad_accum)


def _slower_s(compute_s: Array, reduce_s: Array, factors: Array) -> Array:
    """What a reduction adds to compute while both go on."""
    slow_compute, slow = (float(factors[0b0011, stream]) for stream in (COMPUTE, GPU_GPU))
    together_s = np.minimum(compute_s * slow_compute, np.maximum(reduce_s, 0.0) * slow)
    return np.asarray(together_s * (1.0 - 1.0 / slow_compute))


def _room(factors: Array) -> float:
    """Seconds of reductions that go beside a second of compute: each slows the other down."""
    slow_compute, slow = (float(factors[0b0011, stream]) for stream in (COMPUTE, GPU_GPU))
    return slow_compute / slow


def _beside_head_s(compute_s: Array, copies: Copies, factors: Array) -> Array:
    """What a head's reduction has of the layer beside it: copies that this waits for too."""
    if not _any_come(copies):
        return _room(factors) * compute_s
    return overlapped_time((compute_s, ZERO, *copies[:2]), factors)


def _hidden_s(longer_s: Array, spare_s: Array, factors: Array) -> Array:
    """What a head's reduction takes longer than the layer beside it, where the following ones leave time."""
    hidden_s = np.minimum(np.maximum(longer_s, 0.0), np.maximum(spare_s, 0.0))
    slow_compute, slow = (float(factors[0b0011, stream]) for stream in (COMPUTE, GPU_GPU))
    return hidden_s * (1.0 - slow * (1.0 - 1.0 / slow_compute))


def _any_come(copies: Copies) -> bool:
    """Or go."""
    return any_of(copies[0]) or any_of(copies[1])


def _beside(factors: Array) -> Beside:
    """What a reduction adds to compute, with reductions of every pass and copies beside them."""

    def beside_s(
        compute_s: Array, reduce_s: Array, usual_s: Array = ZERO, copies: Copies = NO_COPIES
    ) -> Array:
        quiet = not (any_of(usual_s) or _any_come(copies))
        copied, then = copies[:2], ZERO if quiet else copies[2]
        alone_s = compute_s if quiet else overlapped_time((compute_s, usual_s, *copied), factors, then)
        return overlapped_time((compute_s, usual_s + reduce_s, *copied), factors, then) - alone_s

    return beside_s


def _coming_back_s(work: StageWork, place: int, reduce_s: Array, beside_s: Beside) -> Array:
    """Less is added to the recomputed layer beside which the first activations come in."""
    again, count = recomputed_of(work, place), work.grid.by_kind[place]
    usual_s, copies = _usual_s(again, again), _copies_s(again)
    arriving = _copies_s(work.blocks[place].kept)[0], *copies[1:]
    there_s = beside_s(_compute_s(again), reduce_s, usual_s, arriving)
    quiet_s = beside_s(_compute_s(again), reduce_s, usual_s, copies)
    return np.where(count.ckpt < count.layers, there_s - quiet_s, 0.0)


def _left_s(work: StageWork, place: int, reduce_s: Array) -> Array:
    """What reductions leave of the time of all layers of a kind: the most of those that are run again."""
    block, count = work.blocks[place], work.grid.by_kind[place]
    own_s = reduce_s + block.kept.backward.reduce_s + block.kept.backward.gather_s
    room = _room(work.context.interference)
    kept_s, whole_s = (
        np.maximum(room * _compute_s(one) - own_s, 0.0) for one in (block.kept, block.recomputed)
    )
    return np.asarray(count.layers * kept_s + count.ckpt * (whole_s - kept_s))


def _quiet_end_s(work: StageWork, place: int, reduced: tuple[Array, Array], beside_s: Beside) -> Array:
    """Nothing comes in beside the last of the kept layers that the pass comes to, or of all where none is
    kept: more is added to it. Beside a single layer a head's gradients leave, not those of another layer."""
    block, count = work.blocks[place], work.grid.by_kind[place]
    if not any_of(_copies_s(block.kept)[0]):
        return ZERO
    reduce_s, head_s = reduced
    alone = (work.grid.layers == 1.0) & (block.kept.backward.reduce_s == 0.0)
    reduce_s = np.where(alone, head_s, reduce_s)
    kept_s, whole_s = (_quieter_s(layer, reduce_s, beside_s) for layer in (block.kept, block.recomputed))
    return np.where(count.ckpt < count.layers, kept_s, whole_s)


def _quieter_s(layer: LayerWork, reduce_s: Array, beside_s: Beside) -> Array:
    compute_s, usual_s, copies = _compute_s(layer), _usual_s(layer, layer), _copies_s(layer)
    quiet_s = beside_s(compute_s, reduce_s, usual_s, (ZERO, *copies[1:]))
    return np.asarray(quiet_s - beside_s(compute_s, reduce_s, usual_s, copies))


def _beside_last(work: StageWork, place: int) -> Copies:
    """Beside the layer that the pass begins with, where that is kept if any is: what comes in is of the layer
    before it, which has nothing to come where it is run again."""
    block, count = work.blocks[place], work.grid.by_kind[place]
    copies = _copies_s(block.kept)
    if not any_of(copies[0]) or block.recomputed is block.kept:
        return copies
    kept, whole = count.layers - count.ckpt, _copies_s(block.recomputed)
    comes_s = np.where((kept == 1.0) & (count.ckpt > 0.0), whole[0], copies[0])
    every = zip((comes_s, *copies[1:]), whole, strict=True)
    arrive, leave, then = (np.where(kept > 0.0, own_s, other_s) for own_s, other_s in every)
    return arrive, leave, then


def _at_borders_s(work: StageWork, blocks: Sequence[Array], beside_s: Beside) -> Array:
    """Of runs of layers behind each other: gradients of the first layer of a run leave beside the run
    before it, to which the passes come next."""
    more_s, leaving_s, begun = ZERO, ZERO, np.zeros((), dtype=bool)
    for place in reversed(range(len(blocks))):
        here = work.grid.by_kind[place].layers > 0.0
        compute_s = _at_end_s(work, place)
        beyond_s = beside_s(compute_s, leaving_s) - beside_s(compute_s, blocks[place])
        more_s = more_s + np.where(here & begun, beyond_s, 0.0)
        leaving_s, begun = np.where(here, blocks[place], leaving_s), here | begun
    return more_s


def _queued_s(
    work: StageWork,
    blocks: Sequence[Array],
    ends: tuple[int, int],
    beside_s: Beside,
) -> tuple[Array, Array]:
    """Of kinds of layers in turn, all layers: what one takes longer than the layer beside it hides behind
    others. As told of layers that are alike, with a layer of the last kind beside its own; and what they
    leave of their time."""
    compute_s, reduce_s = ZERO, ZERO
    for block, each_s, count in zip(work.blocks, blocks, work.grid.by_kind, strict=True):
        kept = count.layers - count.ckpt
        compute_s = compute_s + kept * _compute_s(block.kept) + count.ckpt * _compute_s(block.recomputed)
        reduce_s = reduce_s + count.layers * each_s
    first, last = ends
    last_s = _at_end_s(work, last)
    compute_s, reduce_s = np.maximum(compute_s - last_s, 0.0), np.maximum(reduce_s - blocks[first], 0.0)
    room = _room(work.context.interference)
    spare_s = np.maximum(room * compute_s - reduce_s, 0.0) + np.maximum(room * last_s - blocks[last], 0.0)
    return beside_s(compute_s, reduce_s) + beside_s(last_s, blocks[last]), spare_s


def _behind_head_s(compute_s: Array, head_s: Array, held_s: Array, copies: Copies, factors: Array) -> Array:
    """Where gradients of layers leave in every pass, and the layer after the next waits for them, but those
    of the head do not: these are before the last layer's, which the third layer from the end waits for."""
    copied, then = copies[:2], copies[2]
    twice = [2.0 * each for each in copied]
    both_s = overlapped_time((2.0 * compute_s, head_s + held_s, *twice), factors, 2.0 * then)
    usual_s = overlapped_time((compute_s, held_s, *copied), factors, then)
    return both_s - 2.0 * usual_s


def _reduced_s(layer: LayerWork | None, done_s: Array = ZERO) -> Array:
    """Gradients of a layer that leave in the last backward pass only, so much of them before."""
    if layer is None or layer.last is layer.backward:
        return ZERO
    seconds = layer.last.reduce_s - layer.backward.reduce_s
    return np.maximum(seconds - done_s, np.minimum(seconds, 0.0)) if any_of(done_s) else seconds


def _joins(layer: LayerWork) -> NDArray[np.bool_]:
    """Whether more follows what is reduced in every pass."""
    return np.asarray((_reduced_s(layer) > 0.0) & (layer.backward.reduce_s > 0.0))


def _usual_s(layer: LayerWork, behind: LayerWork | None) -> Array:
    """Beside such a layer: weights of the one before it, gradients of the one behind it."""
    leaving_s = ZERO if behind is None else behind.backward.reduce_s
    return np.where(_joins(layer), layer.last.gather_s + leaving_s, 0.0)


def _copies_s(layer: LayerWork) -> Copies:
    """To and from host memory beside such a layer, which a reduction hides as much as it hides compute."""
    last = layer.last
    then = last.tensor_s + last.blocking_gather_s + last.blocking_reduce_s
    return dropped_if_idle(last.copy_in_s), dropped_if_idle(last.copy_out_s), then


def _compute_s(layer: LayerWork) -> Array:
    return layer.last.compute_s + layer.accumulate_s


def _at_end_s(work: StageWork, place: int) -> Array:
    """Of a layer of that kind: kept, where any is."""
    block, count = work.blocks[place], work.grid.by_kind[place]
    kept_s, whole_s = _compute_s(block.kept), _compute_s(block.recomputed)
    if block.recomputed is block.kept:
        return kept_s
    return np.where((count.ckpt < count.layers) | (count.layers == 0.0), kept_s, whole_s)
