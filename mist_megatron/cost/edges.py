"""What embedding and head expose where their weights are gathered for every pass (ZeRO 3).

What a layer needs comes in beside the layer before it, and what it made leaves beside the one after it.
Between equal layers that is the layer's own compute; beside embedding and head, which may be many times as
large as a layer or next to nothing, it is not: the head's weights come in beside the last layer and, in a
backward pass, beside nothing; its gradients leave beside that layer. The embedding's come in beside the
host's work, or the first layer's backward pass, and its gradients leave before the next pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.last_reductions import counted_apart
from mist_megatron.cost.phases import Between, Phase, departure_s, turned_round_s
from mist_megatron.cost.terms import ZERO
from mist_megatron.cost.work import LayerWork, PassWork, StageWork, recomputed_layer
from mist_megatron.price.overlap import (
    COMPUTE,
    DEVICE_TO_HOST,
    GPU_GPU,
    HOST_TO_DEVICE,
    overlapped_time,
    until_done,
    until_first,
)
from mist_megatron.price.prices import Array, any_of


@dataclass(frozen=True)
class EdgeWaits:
    """Seconds beyond the compute of the edge and of the layer beside it, and beyond what that layer's own run
    exposes: of a forward, a backward, the first forward and the last backward pass."""

    forward_s: Array
    backward_s: Array
    first_s: Array
    last_s: Array


def arriving_s(one: PassWork) -> Array:
    """Weights of an edge that come in for a pass."""
    return one.gather_s + one.copy_in_s


def leaving_s(one: PassWork) -> Array:
    """Gradients of an edge that leave after it."""
    return one.reduce_s + one.copy_out_s


def head_waits(
    head: LayerWork, layer: LayerWork, host_s: Array, factors: Array, *, apart: bool = False
) -> EdgeWaits:
    """`layer` comes before the head, `host_s` is what the host does at the begin of a pass. Of a first
    pass a run counts what leaves beside all layers but one as if something came in beside each of these, or,
    where it has that `apart`, without."""

    def there(beside: PassWork, own: PassWork, *, begins: bool = False) -> Array:
        without = _together(beside, (beside.reduce_s, ZERO, beside.copy_out_s), ZERO, factors)
        left_s = beside.copy_out_s
        if begins and any_of(beside.copy_out_s):
            moved_s = beside.gather_s + beside.reduce_s
            both = _together(beside, (moved_s, beside.copy_in_s, beside.copy_out_s), ZERO, factors)
            alone, left_s = _begun_s(beside, moved_s, factors)
            without = both - alone + _together(beside, (beside.reduce_s, ZERO, ZERO), ZERO, factors)
        arriving = own.gather_s + beside.reduce_s, own.copy_in_s, left_s
        more_s = _together(beside, arriving, ZERO, factors) - without
        if not any_of(beside.copy_in_s):
            return more_s
        # The layer itself waits for copies, and the head's weights come meanwhile.
        moved_s, copies = beside.gather_s + beside.reduce_s, (beside.copy_in_s, beside.copy_out_s)
        with_head = _together(beside, (moved_s + own.gather_s, *copies), ZERO, factors)
        waiting_s = with_head - _together(beside, (moved_s, *copies), ZERO, factors)
        meanwhile = (beside.copy_in_s > 0.0) & (own.copy_in_s == 0.0)
        return np.where(meanwhile, np.minimum(more_s, waiting_s), more_s)

    def back(beside: PassWork, own: PassWork) -> Array:
        usual = beside.gather_s + beside.reduce_s, beside.copy_in_s, beside.copy_out_s
        leaving = beside.gather_s + own.reduce_s, beside.copy_in_s, own.copy_out_s
        added_s = layer.accumulate_s
        more_s = _together(beside, leaving, added_s, factors) - _together(beside, usual, added_s, factors)
        return _arrival_s(own, host_s, factors) + more_s

    # Weights that have stepped turn round where they are on their way out.
    out_s, in_s = head.traffic.step_out_s, _arrival_s(head.backward, host_s, factors)
    turned_s = np.where(out_s > 0.0, np.maximum(out_s - host_s, 0.0) - in_s, 0.0)
    return EdgeWaits(
        forward_s=there(layer.forward, head.forward),
        backward_s=back(layer.backward, head.backward),
        first_s=there(layer.first, head.first, begins=not apart) + turned_s,
        last_s=back(counted_apart(layer), counted_apart(head)),
    )


def late_behind_steps_s(work: StageWork) -> Array:
    """What a head waits for its weights beyond what t and d say, where layers step while a stage waits for
    its input: they are gathered behind all steps, beside the forward passes of layers, where t and d hide
    them behind the head's own step and pass. Where states are copied to be stepped, the link has time."""
    head = work.head
    if head is None or not any_of(head.first.gather_s):
        return ZERO
    steps_s = passes_s = layers_s = gathers_s = copied = ZERO
    for count, block in zip(work.grid.by_kind, work.blocks, strict=True):
        layer = block.kept
        once, there = layer.traffic.step_compute_s, layer.forward
        pass_s = there.compute_s + there.tensor_s + there.blocking_gather_s + there.blocking_reduce_s
        steps_s = steps_s + count.layers * once
        passes_s = passes_s + count.layers * pass_s
        layers_s = layers_s + count.layers * np.maximum(once + pass_s, layer.first.gather_s)
        gathers_s = gathers_s + count.layers * layer.first.gather_s
        copied = copied + layer.first.copy_in_s + layer.traffic.step_out_s
    one = work.blocks[0].kept
    own_s, pass_s = head.traffic.step_compute_s, head.forward.compute_s
    begun_s = np.minimum(one.traffic.step_compute_s + one.forward.compute_s, one.first.gather_s)
    stepped_s = steps_s + own_s
    there_s = np.maximum(stepped_s, one.traffic.step_compute_s + gathers_s) + head.first.gather_s
    begins_s = np.maximum(np.maximum(layers_s + begun_s, stepped_s + passes_s), there_s)
    counted_s = layers_s + begun_s + np.maximum(own_s + pass_s, head.first.gather_s)
    return np.where(copied > 0.0, 0.0, np.maximum(begins_s + pass_s - counted_s, 0.0))


def embedding_waits(
    embedding: LayerWork,
    layer: LayerWork,
    host_s: Array,
    factors: Array,
    left_s: Array = ZERO,
    own_s: Array | None = None,
) -> EdgeWaits:
    """`layer` comes after the embedding, with what its neighbours gather and reduce beside it; what it makes
    itself (`own_s`, if that differs) leaves beside the embedding. `left_s` is what leaves beside the first of
    such layers that a backward pass comes to. Where that is nothing, one layer's gradients fewer leave beside
    them than there are layers: those of the last one leave beside the embedding."""

    # Only a pass into which something is copied needs room, and waits for what is still on its way out. Where
    # activations leave too, what its layers wait for is told amply without (benchmarks/offload_timeline.py).
    copies = (embedding.forward.copy_in_s + layer.forward.copy_in_s > 0.0) & (layer.forward.copy_out_s == 0.0)

    def back(beside: PassWork, own: PassWork, waits: Array) -> Array:
        added_s = layer.accumulate_s
        without = _together(beside, (beside.reduce_s, ZERO, beside.copy_out_s), added_s, factors)
        arriving = own.gather_s + beside.reduce_s, own.copy_in_s, beside.copy_out_s
        leaves_s = beside.reduce_s if own_s is None else own_s
        copied_s = np.where(waits, beside.copy_out_s, 0.0)
        leaving = overlapped_time((own.compute_s, leaves_s, ZERO, copied_s), factors)
        quiet = beside.gather_s, beside.copy_in_s, beside.copy_out_s
        usual = beside.gather_s + beside.reduce_s, beside.copy_in_s, beside.copy_out_s
        fewer_s = _together(beside, usual, added_s, factors) - _together(beside, quiet, added_s, factors)
        more_s = _together(beside, arriving, added_s, factors) - without + leaving - own.compute_s
        return more_s - np.where(left_s > 0.0, 0.0, fewer_s)

    left = embedding.backward
    both = overlapped_time(
        (
            ZERO,
            left.reduce_s + embedding.forward.gather_s,
            embedding.forward.copy_in_s,
            np.where(copies, left.copy_out_s, 0.0),
        ),
        factors,
    )
    last, own_last = counted_apart(layer), counted_apart(embedding)
    ended_s = departure_s(own_last, factors) - departure_s(last, factors)
    # Where nothing is gathered, it computes beside what it has sent off before, and its neighbour waits.
    beside_s = np.where(embedding.forward.gather_s > 0.0, 0.0, embedding.forward.compute_s)
    # What has stepped leaves beside the next layer, and the one after that waits for it.
    next_s = layer.first.compute_s + layer.first.tensor_s
    gone_s = np.maximum(embedding.traffic.step_out_s - next_s, 0.0)
    return EdgeWaits(
        forward_s=np.maximum(both - host_s - beside_s, 0.0),
        backward_s=back(layer.backward, embedding.backward, copies),
        first_s=_arrival_s(embedding.first, host_s, factors) + gone_s,
        # An iteration ends when all is gone.
        last_s=back(last, own_last, np.ones((), dtype=bool)) + ended_s,
    )


def before_head(work: StageWork, place: int, *, alone: bool | NDArray[np.bool_]) -> LayerWork:
    """The layer before the head. Where it is the only one that is kept, no other's activations leave or come
    beside it. Where weights or gradients of the head are copied too, it is taken so in any case: what they
    hide behind copies of activations is not counted, as t has one rate for any number of kept layers, and one
    alone would look faster than none."""
    block, head = work.blocks[place], work.head
    if head is None or not any_of(work.grid.offload.activations):
        return block.kept
    again = block.recomputed
    if again is block.kept:
        again = recomputed_layer(work.grid, work.loads.blocks[place], work.context)
    copied = alone | (head.forward.copy_in_s + head.backward.copy_in_s + head.backward.copy_out_s > 0.0)

    def usual(kept: PassWork, quiet: PassWork) -> PassWork:
        copy_in_s = np.where(copied, quiet.copy_in_s, kept.copy_in_s)
        return replace(
            kept, copy_in_s=copy_in_s, copy_out_s=np.where(copied, quiet.copy_out_s, kept.copy_out_s)
        )

    return replace(
        block.kept,
        forward=usual(block.kept.forward, again.forward),
        backward=usual(block.kept.backward, again.backward),
        first=usual(block.kept.first, again.first),
        last=usual(block.kept.last, again.last),
    )


def begun_beside(work: StageWork, usual: Between) -> Between:
    """What the first layer's arrival hides behind in the very first pass: an embedding may copy its weights
    or step before it, and wait for its weights when the host has begun."""
    if work.embedding is None:
        return usual
    first = work.embedding.first
    if not work.context.facts.step.in_first_forward:
        return replace(usual, beside_s=first.compute_s)
    host_s = work.host_s / (2 * work.grid.vpp)
    waits_s = np.maximum(first.gather_s - host_s, 0.0) if any_of(first.gather_s) else ZERO
    return replace(usual, beside_s=first.compute_s, gathers_s=waits_s)


def turned_at_head(
    work: StageWork,
    leaving: PassWork,
    ends: LayerWork,
    usual: Phase,
    followed: bool,
    *,
    steps: bool = False,
) -> Phase:
    """A forward pass that turns round at the head: what its last layer saved leaves beside the head, and has
    to be gone before that layer's backward pass."""
    head = work.head
    if head is None or not _turns(work, followed) or not any_of(leaving.copy_out_s):
        return usual
    if work.context.facts.host_copies.last_comes_early:
        # It stays.
        return replace(usual, last_s=np.where(leaving.copy_out_s > 0.0, 0.0, usual.last_s))
    passes, given = (
        (head.first if steps else head.forward, head),
        (work.host_s / 2, work.context.interference),
    )
    departing_s = turned_round_s(
        leaving, ends.backward, passes, *given, queued=not work.context.recomputes_first_layers
    )
    return replace(usual, last_s=np.where(leaving.copy_out_s > 0.0, departing_s, usual.last_s))


def states_leave_at_head(work: StageWork, layer: LayerWork, ends: LayerWork, usual: Phase) -> Phase:
    """A first forward pass whose layers send their states off, the last ones beside the head and its step: a
    recomputed layer, which saves nothing for host memory, is the last."""
    head, out_s = work.head, layer.traffic.step_out_s
    if head is None:
        return usual
    leaving = replace(layer.first, copy_out_s=out_s)
    both, given = (head.first, head), (work.host_s / 2, work.context.interference)
    departing_s = turned_round_s(leaving, ends.backward, both, *given, queued=True)
    return replace(usual, last_s=np.where(out_s > 0.0, departing_s, usual.last_s))


def still_leaving(work: StageWork, usual: PassWork, followed: bool) -> PassWork:
    """What leaves when a backward pass begins: of one that follows its forward pass at once nothing comes in
    before that has left, which `turned_at_head` counts."""
    return replace(usual, copy_out_s=ZERO) if work.head is not None and _turns(work, followed) else usual


def _turns(work: StageWork, followed: bool) -> bool:
    return not (work.grid.interleaved or followed)


def _arrival_s(own: PassWork, host_s: Array, factors: Array) -> Array:
    """With nothing beside it but the host's work."""
    there_s = overlapped_time((ZERO, own.gather_s, own.copy_in_s, ZERO), factors)
    return np.maximum(there_s - host_s, 0.0)


def _begun_s(one: PassWork, moved_s: Array, factors: Array) -> tuple[Array, Array]:
    """A layer's first pass of an iteration, until what the next one needs is there, and what is left then of
    its own copies out: while that is waited for they go on already, beside it."""
    computed_s, moved_s = until_first(COMPUTE, one.compute_s, GPU_GPU, moved_s, factors)
    _, (in_s, _) = until_done(COMPUTE, one.compute_s, (one.copy_in_s, ZERO), factors)
    then_s = one.tensor_s + one.blocking_gather_s + one.blocking_reduce_s
    in_s = np.maximum(in_s - then_s, 0.0)
    waited_s, (in_s, out_s) = until_done(GPU_GPU, moved_s, (in_s, one.copy_out_s), factors)
    copied_s, out_s = until_first(HOST_TO_DEVICE, in_s, DEVICE_TO_HOST, out_s, factors)
    return computed_s + then_s + waited_s + copied_s, out_s


def _together(beside: PassWork, streams: tuple[Array, Array, Array], added_s: Array, factors: Array) -> Array:
    """A layer's pass, with these on the other streams."""
    then = beside.tensor_s + beside.blocking_gather_s + beside.blocking_reduce_s
    return overlapped_time((beside.compute_s + added_s, *streams), factors, then)
