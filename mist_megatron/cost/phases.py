"""What the traffic of a pass over a run of layers exposes beyond compute, as the schedule lets them overlap.

While layer k computes, what k + 1 needs comes in and what k - 1 made goes out, and collectives that wait for
the layer's compute follow it while copies go on. So a layer inside a run takes as long as all of its streams
together. Beside the last layer of a run nothing comes in, and nobody waits yet for what goes out: that leaves
beside the next pass, which comes at once in the stable state. What the first layer needs comes in before it,
beside whatever the stage does between two passes. Where only some kinds of layers send activations off, a
layer of these here is all from the last one on (`turning.copies_beside`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mist_megatron.cost.terms import ZERO
from mist_megatron.cost.work import LayerWork, PassWork
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
class Phase:
    """Seconds that a pass exposes."""

    inside_s: Array
    """Of a layer inside a run of layers ..."""
    last_s: Array
    """... and of its last one."""
    alone_s: Array
    """Once per run: its first arrival, and its last departure where nothing follows."""

    def minus(self, other: Phase) -> Phase:
        """What it exposes beyond another one."""
        return Phase(self.inside_s - other.inside_s, self.last_s - other.last_s, self.alone_s - other.alone_s)


def averaged(own: Phase, shares: Sequence[tuple[float, Phase]]) -> Phase:
    """Shares of others inside a pass; what is exposed once is its own."""
    inside_s: Array = ZERO
    last_s: Array = ZERO
    for share, one in shares:
        inside_s, last_s = inside_s + share * one.inside_s, last_s + share * one.last_s
    return Phase(inside_s, last_s, own.alone_s)


def chosen(where: Array, one: Phase, other: Phase) -> Phase:
    """One on some rows, another on the others."""
    return Phase(
        np.where(where, one.inside_s, other.inside_s),
        np.where(where, one.last_s, other.last_s),
        np.where(where, one.alone_s, other.alone_s),
    )


def begun_by_host(first: Phase, host_s: Array) -> Phase:
    """What an embedding waits for in the very first pass comes in while the host begins it."""
    if not any_of(first.inside_s):
        return first
    return replace(first, inside_s=np.maximum(first.inside_s - host_s, 0.0))


@dataclass(frozen=True)
class Between:
    """What a stage does between the layers of two passes, in this order."""

    send_s: Array
    """A boundary tensor, for which it stops."""
    host_s: Array
    beside_s: Array
    """Compute of embedding or head, where the pass begins with it."""
    gathers_s: Array = field(default_factory=lambda: ZERO)
    """What an embedding waits for its weights, behind which those of others come in, and beside which copies
    do."""

    on_arrival: bool = False
    """Copies in begin when the pass's input has come, not while it is sent."""
    others: tuple[float | Array, Between] | None = None
    """Where passes of a stage differ, as those of chunks of which one has embedding or head: the share of
    the others, and what they do."""

    def exposed_s(self, arriving: PassWork, leaving: PassWork, factors: Array) -> Array:
        """What the first arrival of the next pass and the last departure of the one before add to that."""
        own_s = self._exposed_s(arriving, leaving, factors)
        if self.others is None:
            return own_s
        share, others = self.others
        return own_s + share * (others.exposed_s(arriving, leaving, factors) - own_s)

    def _exposed_s(self, arriving: PassWork, leaving: PassWork, factors: Array) -> Array:
        gather, copy_in = dropped_if_idle(arriving.gather_s), dropped_if_idle(arriving.copy_in_s)
        copy_out = dropped_if_idle(leaving.copy_out_s)
        beside = ZERO if self.on_arrival else copy_in
        sent_s, (left_in, copy_out) = until_done(GPU_GPU, self.send_s, (beside, copy_out), factors)
        copy_in = copy_in if self.on_arrival else left_in
        slower_s = sent_s - self.send_s
        if gather is ZERO and copy_in is ZERO:
            return slower_s
        # What still leaves slows down what arrives.
        copy_in, _ = until_first(HOST_TO_DEVICE, copy_in, DEVICE_TO_HOST, copy_out, factors)
        if self.gathers_s is not ZERO:
            waited_s, (copy_in, _) = until_done(GPU_GPU, self.gathers_s, (copy_in, ZERO), factors)
            slower_s = slower_s + waited_s - self.gathers_s
        there_s = overlapped_time((self.beside_s, gather, copy_in, ZERO), factors)
        return slower_s + np.maximum(there_s - self.beside_s - self.host_s, 0.0)


NOTHING_BETWEEN = Between(ZERO, ZERO, ZERO)


def phase(
    streams: PassWork, factors: Array, added_s: Array, alone_s: Array, *, followed: bool = False
) -> Phase:
    """`added_s` is compute besides (gradients added to old ones), `alone_s` what is exposed once per run.
    A run may be followed by other layers of the pass, which wait for what its last ones send off."""
    gather, copy_in = dropped_if_idle(streams.gather_s), dropped_if_idle(streams.copy_in_s)
    reduce, copy_out = dropped_if_idle(streams.reduce_s), dropped_if_idle(streams.copy_out_s)
    if all(stream is ZERO for stream in (gather, copy_in, reduce, copy_out)):
        return Phase(ZERO, ZERO, alone_s)
    compute = streams.compute_s + added_s
    then = streams.tensor_s + streams.blocking_gather_s + streams.blocking_reduce_s
    serial = compute + then
    inside = overlapped_time((compute, gather + reduce, copy_in, copy_out), factors, then)
    if any_of(streams.sent_s) and not (copy_in is ZERO and copy_out is ZERO):
        return _among_tokens(streams, compute, inside, alone_s, factors)
    if followed:
        last = overlapped_time((compute, reduce, ZERO, copy_out), factors, then)
        return Phase(inside - serial, last - serial, alone_s)
    # A reduction still holds the stream on which the layer's collectives follow.
    before = compute if reduce is ZERO else overlapped_time((compute, reduce, ZERO, ZERO), factors)
    computed, copies = until_done(COMPUTE, before, (ZERO, copy_out), factors)
    ended, _ = until_done(GPU_GPU, then, copies, factors)
    return Phase(inside - serial, np.minimum(computed + ended, inside) - serial, alone_s)


def _among_tokens(
    streams: PassWork, compute_s: Array, inside_s: Array, alone_s: Array, factors: Array
) -> Phase:
    """The same where tokens travel while copies go on: in the midst of compute, not behind it. Copies out go
    beside forward passes, in which tokens leave after attention; in backward passes they leave first."""
    outside, within = compute_s - streams.inside_s, streams.inside_s
    others = streams.tensor_s - streams.sent_s + streams.blocking_gather_s + streams.blocking_reduce_s
    half = streams.sent_s / 2
    travels = ((GPU_GPU, half), (COMPUTE, within), (GPU_GPU, half))
    forward = any_of(streams.copy_out_s)
    apart = (COMPUTE, outside)
    chain = [apart, *travels] if forward else [*travels, apart]
    chain.append((GPU_GPU, others))

    def beside(copies: tuple[Array, Array]) -> tuple[Array, Array]:
        total = ZERO
        for stream, seconds in chain:
            spent, copies = until_done(stream, seconds, copies, factors)
            total = total + spent
        return total, overlapped_time((ZERO, ZERO, *copies), factors)

    serial = compute_s + others + streams.sent_s
    copies = dropped_if_idle(streams.copy_in_s), dropped_if_idle(streams.copy_out_s)
    ended, left = beside(copies)
    behind = overlapped_time((compute_s, ZERO, *copies), factors, others + streams.sent_s)
    # Weights and gradients that travel too add what they would if tokens came last.
    whole = ended + left + np.maximum(inside_s - behind, 0.0)
    last, _ = beside((ZERO, copies[1]))
    return Phase(whole - serial, np.minimum(last, whole) - serial, alone_s)


def steps_ahead(layer: LayerWork, step_s: Array, forward: Phase, factors: Array) -> Phase:
    """The first forward pass of a stage that steps its layers while it waits for its input: what the steps of
    n layers take longer than that waits for them. States of the first come in alone; then each layer's step,
    gather and forward pass run beside the states of the next, which come in, and of the one before, which
    leave; the last has only the latter beside it. Weights that are on the host come in again for the forward
    passes, which follow all steps then. The steps' own compute is counted elsewhere."""
    first, beside = layer.first, np.where(layer.forward.copy_in_s > 0.0, 0.0, 1.0)
    tensor_s, forward_s = beside * layer.forward.tensor_s, beside * layer.forward.compute_s
    compute = step_s + forward_s
    gather, copy_in = dropped_if_idle(first.gather_s), dropped_if_idle(first.copy_in_s)
    copy_out = dropped_if_idle(first.copy_out_s)
    each_s = overlapped_time((compute, gather, copy_in, copy_out), factors, tensor_s)
    if not (copy_in is ZERO and copy_out is ZERO):
        # Where copies last longest, a layer gathers after its step, both beside them, not beside the next.
        computed_s, left = until_done(COMPUTE, compute, (copy_in, copy_out), factors)
        gathered_s, left = until_done(GPU_GPU, gather + tensor_s, left, factors)
        copied_s = overlapped_time((ZERO, ZERO, *left), factors)
        each_s = np.where(copied_s > 0.0, computed_s + gathered_s + copied_s, each_s)
    computed_s, left = until_done(COMPUTE, compute, (ZERO, copy_out), factors)
    gathered_s, _ = until_done(GPU_GPU, gather + tensor_s, left, factors)
    layer_s = forward_s + tensor_s + beside * forward.inside_s
    late_s = np.maximum(each_s - layer_s, 0.0)
    there_s = first.copy_in_s + computed_s + gathered_s - layer_s
    more_s = late_s - step_s
    return Phase(forward.inside_s + more_s, forward.last_s + more_s, there_s - late_s)


def turned_round_s(
    leaving: PassWork,
    arriving: PassWork,
    head: tuple[PassWork, LayerWork],
    host_s: Array,
    factors: Array,
    *,
    queued: bool,
) -> Array:
    """What a last layer's copies out, and in again where it is not still there, add to a forward pass of the
    head and to its backward pass, beside which they run, and beside what it waits for its weights, whether
    gathered or copied in; the host works so long between the two."""
    there, back = head[0], head[1].backward
    came_s = leaving.compute_s + idle_for_copies_s(leaving, factors)
    waits_s = np.maximum(there.gather_s - came_s, 0.0)
    if queued:
        # Collectives of the layer, which what leaves has to wait for, come behind that gather.
        behind = leaving.tensor_s + leaving.blocking_gather_s + leaving.blocking_reduce_s > 0.0
        waits_s = np.where(behind, 0.0, waits_s)
    waited_s, (_, left_s) = until_done(GPU_GPU, waits_s, (ZERO, leaving.copy_out_s), factors)
    copied_s = np.maximum(dropped_if_idle(there.copy_in_s) - came_s, 0.0)
    if any_of(copied_s):
        beside_s, left_s = until_first(HOST_TO_DEVICE, copied_s, DEVICE_TO_HOST, left_s, factors)
        waited_s, waits_s = waited_s + beside_s, waits_s + copied_s
    there_s, (_, left_s) = until_done(COMPUTE, there.compute_s, (ZERO, left_s), factors)
    there_s = there_s + waited_s - waits_s
    # Weights that step there turn round behind what the layer sends off.
    again_s = np.where(there.copy_out_s > 0.0, 0.0, back.copy_in_s)
    left_s = np.maximum(left_s - there.tensor_s - np.maximum(host_s, back.gather_s + again_s), 0.0)
    gather, copy_in = dropped_if_idle(arriving.gather_s), dropped_if_idle(arriving.copy_in_s)
    copies = (ZERO, left_s) if copy_in is ZERO else (left_s + copy_in, ZERO)
    compute_s = back.compute_s + head[1].accumulate_s
    back_s = overlapped_time((compute_s, gather, *copies), factors, back.tensor_s) - compute_s - back.tensor_s
    # What comes in counts already, as if it began when the head does.
    usual_s = overlapped_time((back.compute_s, gather, copy_in, ZERO), factors) - back.compute_s
    return np.asarray(there_s - there.compute_s + back_s - usual_s)


def idle_for_copies_s(streams: PassWork, factors: Array) -> Array:
    """What of a layer's pass inside a run has neither compute nor collectives, while copies come in."""
    copy_in = dropped_if_idle(streams.copy_in_s)
    if copy_in is ZERO:
        return ZERO
    then = streams.tensor_s + streams.blocking_gather_s + streams.blocking_reduce_s
    moved = streams.gather_s + streams.reduce_s
    inside = overlapped_time((streams.compute_s, moved, copy_in, streams.copy_out_s), factors, then)
    return np.maximum(inside - streams.compute_s - then - moved, 0.0)


def departure_s(streams: PassWork, factors: Array) -> Array:
    """What the last layer of an iteration sends off, beside which nothing runs."""
    return overlapped_time((ZERO, streams.reduce_s, ZERO, streams.copy_out_s), factors)


def dropped_if_idle(stream: Array) -> Array:
    """An idle stream loses its axes, so that it does not blow up the grid for nothing."""
    return stream if any_of(stream) else ZERO
