"""What boundary tensors add to t and d: sends for which stages stop, and sends beside chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.boundary import hop_seconds, sent_by_rank
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.placed import Spans, send_seconds
from mist_megatron.cost.terms import ZERO, Linear, StageLoads, TimeContext, of_kind
from mist_megatron.cost.traffic import replica_nodes
from mist_megatron.cost.work import LayerWork, StageWork, recomputed_layer
from mist_megatron.price.overlap import COMPUTE, DEVICE_TO_HOST, GPU_GPU, until_done
from mist_megatron.price.prices import Array, any_of
from mist_megatron.spec.mesh import Group, StageRole, boundary_crossing_share


def sent_to_neighbours(work: StageWork) -> tuple[Linear | None, Linear | None]:
    """Activations to the next stage and their gradients back, in t and in d. A stage with two neighbours
    meets two exchanges per micro-batch, one at an end of the pipeline meets one, so that their sum over the
    stages is the 2 (S-1) hops of one micro-batch there and back, as many of them between nodes as there are
    borders of nodes. Where stages differ in size, each pays for what its own ranks send and receive. A stage
    of which no more is known than its role crosses nodes as seldom as one of these may (`least_sent`)."""
    grid, context, boundary = work.grid, work.context, work.boundary
    if np.max(grid.stages) <= 1:
        return None, None
    overlaps = _beside_chunks(grid, context)
    # Chunks pass every boundary on their way, wherever their stage stands.
    share = _crossing_share(grid, context, None if grid.interleaved else grid.role)
    if grid.crossed and not grid.interleaved:
        share = sum(grid.crossed) / len(grid.crossed)
    inside, across = boundary.inside_s, boundary.across_s
    hop = (1.0 - share) * inside + share * across + boundary.handed_on_s
    if grid.placed is not None:
        sides = _placed_hops(work, (grid.placed.before, grid.placed.after))
        if overlaps:
            return _sent_beside_chunks(_Sends(work, mean_hop_s(work), (sides[0], sides[-1])))
        hop = _mean(sides)
    elif overlaps:
        # At a border of nodes a stage has one neighbour on each side of it.
        mixed = np.asarray((share > 0.0) & (share < 1.0))
        if not any_of(mixed):
            return _sent_beside_chunks(_Sends(work, hop, (hop, hop)))
        own = np.where(mixed, inside, hop), np.where(mixed, across, hop)
        both = [one + boundary.handed_on_s for one in (inside, across)]
        return _sent_beside_chunks(_Sends(work, hop, own, list(zip((1.0 - share, share), both, strict=True))))
    exchanges = 2.0 if grid.role is StageRole.MIDDLE else 1.0
    each = 2.0 if context.facts.pipeline.sends_in_turn else 1.0
    return Linear(grid.vpp * (each * exchanges * hop + _slowed_by_copies(work, hop))), None


def _slowed_by_copies(work: StageWork, hop: Array) -> Array:
    """What modules of the last layer of a forward pass send to host memory goes beside what the stage sends
    on. (Where fractions of layers leave, t counts what copies add to passes as if nothing stopped them.)"""
    last = work.blocks[work.grid.runs[-1][1] if work.grid.runs else -1].kept
    if work.grid.role is StageRole.LAST or not any_of(last.load.moved_bytes):
        return ZERO
    copies = ZERO, last.forward.copy_out_s
    return until_done(GPU_GPU, hop, copies, work.context.interference)[0] - hop


def mean_hop_s(work: StageWork) -> Array:
    """A boundary tensor of a micro-batch that passes all borders, each time."""
    grid, boundary = work.grid, work.boundary
    if grid.placed is not None:
        return _mean(_placed_hops(work, grid.placed.every_border))
    share = _crossing_share(grid, work.context, None)
    return (1.0 - share) * boundary.inside_s + share * boundary.across_s + boundary.handed_on_s


def least_sent(work: StageWork) -> Linear:
    """What a stage of a role stops for in t to send, wherever it stands, which is all that a search prices by
    role; stages with chunks wait for what others send."""
    if _beside_chunks(work.grid, work.context):
        return Linear()
    if work.grid.crossed:
        work = replace(work, grid=replace(work.grid, crossed=()))
    return sent_to_neighbours(work)[0] or Linear()


def sent_forward_s(work: StageWork) -> Array:
    """What a stage whose borders are known takes of that for the forward pass, which leaves over the last."""
    boundary = work.boundary
    return (boundary.across_s if work.grid.crossed[-1] else boundary.inside_s) + boundary.handed_on_s


def sent_before(work: StageWork) -> tuple[Array, Array]:
    """What a stage sends to the one before it, and whether that goes between nodes, as its role tells, which
    is what searches know; nothing where it may or may not."""
    grid, boundary = work.grid, work.boundary
    if grid.placed is not None:
        crosses = np.asarray(any(span.nodes > 1 for span in grid.placed.before))
        return sum(_placed_hops(work, (grid.placed.before,)), start=ZERO), crosses
    share = np.asarray(_crossing_share(grid, work.context, grid.role))
    known = (share == 0.0) | (share == 1.0) | (grid.role is StageRole.LAST)
    return np.where(known, np.where(share == 1.0, boundary.across_s, boundary.inside_s), 0.0), share == 1.0


def _placed_hops(work: StageWork, borders: Sequence[Spans]) -> list[Array]:
    """A boundary tensor over each of these borders, and handed on."""
    boundary = work.boundary
    seconds = [send_seconds(boundary.sent_bytes, spans, work.context.prices) for spans in borders if spans]
    return [one + boundary.handed_on_s for one in seconds]


def _mean(values: Sequence[Array]) -> Array:
    return sum(values, start=ZERO) / len(values)


def _beside_chunks(grid: StageGrid, context: TimeContext) -> bool:
    return grid.interleaved and context.facts.pipeline.sends_overlap_when_interleaved


def _crossing_share(grid: StageGrid, context: TimeContext, role: StageRole | None) -> float | Array:
    """Of the borders of a role, or of all: of chunks one more, from the last stage to the first."""

    def share(gpus: int) -> float:
        alike = max(context.cluster_gpus // gpus, 2)
        line = boundary_crossing_share(alike, gpus, context.cluster_gpus_per_node, role)
        around = role is None and grid.interleaved and line > 0.0
        return (line * (alike - 1) + 1.0) / alike if around else line

    gpus = grid.nodes * grid.gpus_per_node
    if isinstance(gpus, int):
        return share(gpus)
    sizes, places = np.unique(gpus, return_inverse=True)
    return np.array([share(int(size)) for size in sizes])[places].reshape(gpus.shape)


@dataclass(frozen=True)
class _Beside:
    """A layer's share of a send beside the layer's compute (and collectives behind it) of one pass."""

    slower_s: Array
    """What the send adds to compute."""
    waits_s: Array
    """By how much it takes longer than both ..."""
    spare_s: Array
    """... or shorter."""


@dataclass(frozen=True)
class _Sends:
    """What a stage with chunks sends, beside what it has to do."""

    work: StageWork
    hop_s: Array
    """Mean of all boundaries, which every micro-batch passes."""
    own_s: tuple[Array, Array]
    """Sends of a stage to either side, where they slow its compute most."""
    every: Sequence[tuple[float | Array, Array]] = ()
    """Boundaries that differ, with the share of each."""


def _sent_beside_chunks(sends: _Sends) -> tuple[Linear, Linear]:
    """Sends of p stages with v chunks that compute (f forward, b backward) beside them, in t and in d.

    A chunk's output travels while a backward pass runs, its gradients while a forward pass does; p stages and
    p pairs of passes later the micro-batch's next chunk needs them. So a pair takes f + b or, at least,

    * the longer of both passes and a send: of every v chunks in a row but the first, which waits for nothing;
    * two sends: a stage's link does not rest. An end of the pipeline has one chunk in v that sends once only.

    Filling and draining are the trip of one micro-batch through p v chunks and back, and p pairs of the
    chunk that waits for nothing but the link. A layer hides its share of a send, which keeps all this linear
    in layers and in recomputed ones; embedding or head hide waits too. What a stage waits is, where layers
    are alike, what the largest of even splits does: any other sends as often. (Layers that are run again
    hide more.) Where chunks are not equal, filling and draining are of that stage, too."""
    grid, work = sends.work.grid, sends.work
    equal = work.context.model_layers % (grid.stages * grid.vpp) == 0
    others = len(work.blocks) == 1 and bool(np.all(np.logical_not(equal) & (np.asarray(grid.stages) > 2)))
    own_s = (grid.vpp - 1) * grid.stages * waits_of_own_s(work, sends.hop_s)
    stable, delta = Linear(), Linear(2.0 * ((grid.stages * grid.vpp - 1) * sends.hop_s - own_s))
    for place, block in enumerate(work.blocks):
        kept_s, kept_d = _per_layer(sends, block.kept)
        more_s = more_d = ZERO
        whole = block.recomputed
        if len(work.blocks) == 1 and whole is block.kept:
            # What a stage waits follows from both, whether any is run again or not.
            whole = recomputed_layer(grid, block.kept.load, work.context)
        if whole is not block.kept:
            whole_s, whole_d = _per_layer(sends, whole)
            more_s, more_d = whole_s - kept_s, whole_d - kept_d
        if len(work.blocks) == 1:
            least_s = layers_of_most(work) * (kept_s + np.minimum(more_s, 0.0))
            stable = stable + Linear(least_s, np.maximum(-more_s, 0.0), more_s)
        else:
            stable = stable + of_kind(place, kept_s, more_s)
        layers = Linear(layers_of_most(work) * kept_d, per_ckpt=more_d)
        delta = delta + (layers if others else of_kind(place, kept_d, more_d))
    return stable, delta


OWN_SHARE = 0.2
"""Of a chunk's forward pass. Bounds of a search know nothing of what stages wait for themselves, and with
quicker sends it is little: these are told in full, up to some 3 % of a step of few micro-batches too slow."""


def waits_of_own_s(work: StageWork, hop_s: Array) -> Array:
    """Of a send between chunks that are not equal what is no part of d, but of what a stage waits for itself,
    by what its own passes leave (`spec.interleaved`): so much more than a fifth of a chunk's forward pass."""
    grid, passes = work.grid, [block.kept.forward for block in work.blocks]
    longest_s = np.maximum.reduce([one.compute_s + one.tensor_s for one in passes])
    equal = work.context.model_layers % (grid.stages * grid.vpp) == 0
    usual_s = OWN_SHARE * longest_s * layers_of_most(work) / grid.vpp
    return np.where(equal, 0.0, np.maximum(hop_s - usual_s, 0.0))


def _edge_seconds(loads: StageLoads) -> Array:
    """Embedding and head, forward and backward."""
    return sum(
        (load.forward_s + load.backward_s for load in (loads.embedding, loads.head) if load is not None),
        start=ZERO,
    )


def _per_layer(sends: _Sends, layer: LayerWork) -> tuple[Array, Array]:
    """What sends add to t for a layer, and what of it d takes back."""
    work = sends.work
    stages, chunks = work.grid.stages, work.grid.vpp
    a_layer = 1.0 / layers_of_most(work)
    share, host_s = chunks * sends.hop_s * a_layer, 0.5 * work.host_s * a_layer
    forward_parts = (host_s, layer.forward.compute_s, layer.forward.tensor_s)
    backward_parts = (host_s, layer.backward.compute_s, layer.backward.tensor_s)
    factors = work.context.interference
    out_s = layer.forward.copy_out_s
    copied_s = chunks * a_layer * out_s
    left_s = more_s = ZERO
    if any_of(out_s):
        # Gradients follow an activation when it has gone and their pass has ended, beside a forward pass
        # whose layers send off theirs.
        there_s, (_, beside_s) = until_done(GPU_GPU, share, (ZERO, copied_s), factors)
        later_s = np.maximum(sum(backward_parts, start=ZERO) - there_s, 0.0)
        left_s = np.maximum(beside_s - later_s, 0.0) + out_s - copied_s
        # The first micro-batch travels beside all that the pass behind it sends off, too.
        trip_s, _ = until_done(GPU_GPU, share, (ZERO, copied_s + out_s), factors)
        # A pass that waits for copies of layers before its last one hides as much of that.
        waited_s = np.maximum(out_s - sum(forward_parts, start=ZERO), 0.0)
        more_s = np.maximum(trip_s - share - (1.0 - chunks * a_layer) * waited_s, 0.0)

    def beside(hop: float | Array) -> tuple[_Beside, _Beside]:
        """Gradients beside a forward pass, an activation beside a backward pass and what leaves for host
        memory, of which gradients meet the rest."""
        sent = chunks * hop * a_layer
        return _beside(sent, forward_parts, left_s, factors), _beside(sent, backward_parts, copied_s, factors)

    forward, backward = beside(sends.hop_s)
    slower = forward.slower_s + backward.slower_s
    if sends.own_s[0] is not sends.own_s[1]:
        slower = 0.5 * sum((one.slower_s for hop in sends.own_s for one in beside(hop)), start=ZERO)
    if any_of(layer.forward.sent_s):
        slower = slower + chunks * a_layer * tokens_slowed_s(work, layer)
    link = np.maximum(forward.waits_s + backward.waits_s - forward.spare_s - backward.spare_s, 0.0)
    round_trip = np.maximum(forward.waits_s, backward.waits_s)
    if sends.every:
        # For a slow boundary a micro-batch waits though others hide their sends.
        round_trip = ZERO
        for part, hop in sends.every:
            one, other = beside(hop)
            round_trip = round_trip + part * np.maximum(one.waits_s, other.waits_s)
    alone = np.maximum(share - sum(forward_parts) - sum(backward_parts), 0.0)
    two = bool(np.all(stages == 2))
    if two:
        # The chunk that sends once is half hidden by the one before, which still sends.
        once = np.maximum(alone, np.where(backward.waits_s > 0.0, 0.5 * forward.waits_s, 0.0))
        waits = exposed = ((chunks - 1) * np.maximum(link, round_trip) + once) / chunks
    else:
        trips = (chunks - 1) / chunks * round_trip
        waits = np.maximum(link, trips)
        once = ZERO if work.grid.role is StageRole.MIDDLE else share / chunks
        exposed = np.maximum(link - once - _edge_seconds(work.loads) * a_layer, trips)
    pairs = stages * chunks - 1
    in_chunk = (alone if two else stages * link) - pairs * slower - (pairs + stages) * waits
    in_chunk = in_chunk + pairs * more_s
    return slower + exposed, in_chunk / chunks


def tokens_slowed_s(work: StageWork, layer: LayerWork) -> Array:
    """By how much longer tokens of a chunk's first layer travel, both ways, while the result of the stage's
    last pass goes over the same links, of which each has half. A first stage's first chunk sends no gradients
    before a forward pass, and a last one's last chunk nothing before a backward pass."""
    grid, context = work.grid, work.context
    there, back = layer.forward, layer.backward
    attention_s, ends = there.compute_s - there.inside_s, 1.0 - 1.0 / grid.vpp
    some = ends if grid.role is StageRole.FIRST else 1.0, ends if grid.role is StageRole.LAST else 1.0
    slowed_s: Array = ZERO
    for share, hop in _hops_of_kind(work, context.mesh(grid).nodes(Group.EXPERT_ALL) > 1.0):
        # Backward passes begin with them, behind what is run again.
        passes = (some[0], attention_s, there), (some[1], layer.recompute_s, back)
        for part, before_s, one in passes:
            journey_s, left_s = one.sent_s / 2.0, np.maximum(hop - before_s, 0.0)
            first_s = np.minimum(journey_s, left_s)
            left_s = np.maximum(left_s - first_s - one.inside_s, 0.0)
            slowed_s = slowed_s + share * part * (first_s + np.minimum(journey_s, left_s))
    return slowed_s


def _hops_of_kind(work: StageWork, between: NDArray[np.bool_]) -> list[tuple[Array, Array]]:
    """Sends between nodes or inside them, with their share of all."""
    grid, boundary, context = work.grid, work.boundary, work.context
    if grid.placed is not None:
        spans = grid.placed.every_border
        hops = _placed_hops(work, spans)
        part = 1.0 / len(spans)
        alike = [np.asarray(any(span.nodes > 1 for span in one)) == between for one in spans]
        return [(part * same, hop) for same, hop in zip(alike, hops, strict=True)]
    share = np.asarray(_crossing_share(grid, context, None))
    hop = np.where(between, boundary.across_s, boundary.inside_s)
    return [(np.where(between, share, 1.0 - share), hop)]


_COPIED = 1 << GPU_GPU | 1 << DEVICE_TO_HOST
"""What a stage sends to others and to host memory at once."""


def _beside(sent: float | Array, parts: tuple[Array, Array, Array], copied: Array, factors: Array) -> _Beside:
    """Host work, compute and collectives of a pass, in this order; only compute and sends disturb each
    other, and what the last layer of a chunk sends to host memory disturbs both."""
    host, compute, collectives = parts
    pair, three = 1 << COMPUTE | 1 << GPU_GPU, 1 << COMPUTE | _COPIED
    slow_compute: float | Array = float(factors[pair, COMPUTE])
    slow_send: float | Array = float(factors[pair, GPU_GPU])
    slow_alone: float | Array = 1.0
    if any_of(copied):
        among, copying = (float(factors[_COPIED, stream]) for stream in (GPU_GPU, DEVICE_TO_HOST))
        share = np.minimum(copied * copying / np.maximum(sent * among, 1e-12), 1.0)
        slow_alone = 1.0 + share * (among - 1.0)
        slow_compute = slow_compute + share * (float(factors[three, COMPUTE]) - slow_compute)
        slow_send = slow_send + share * (float(factors[three, GPU_GPU]) - slow_send)
    together = np.minimum(compute * slow_compute, np.maximum(sent - host / slow_alone, 0.0) * slow_send)
    slower = together * (1.0 - 1.0 / slow_compute)
    left = sent * slow_alone - host - together / slow_send * slow_alone - collectives
    idle = (compute - together / slow_compute) + np.maximum(-left, 0.0)
    return _Beside(slower, np.maximum(left, 0.0), np.where(left > 0.0, 0.0, idle))


def layers_of_most(work: StageWork) -> int | Array:
    """Of the largest stage where they have as many layers as they can: a stage with fewer, beside embedding
    or head, sends as often and waits for the others."""
    return -(-work.context.model_layers // work.grid.stages)


def slowed_by_reduction(work: StageWork, reduction: Array) -> Array:
    """Interleaved stages reduce when their last backward pass has ended; its gradients still leave then, and
    where both go over the same links, have half of them."""
    grid, context = work.grid, work.context
    if not _beside_chunks(grid, context) or not any_of(reduction):
        return ZERO
    each_s = sent_beside_reductions(work) * layers_of_most(work) / grid.vpp
    return (grid.stages - 1) * np.minimum(each_s, reduction)


def sent_beside_reductions(work: StageWork) -> Array:
    """A layer's share of a send between chunks, as far as it goes over links that reductions go over too."""
    grid, context = work.grid, work.context
    spanned = replica_nodes(grid, context)
    if grid.placed is not None:
        alike = [any((span.nodes > 1) == bool(spanned > 1.0) for span in spans)
                 for spans in grid.placed.every_border]  # fmt: skip
        hops = _placed_hops(work, grid.placed.every_border)
        sent_s = _mean([hop * same for hop, same in zip(hops, alike, strict=True)])
    else:
        share = _crossing_share(grid, context, None)
        inside, across = hop_seconds(sent_by_rank(grid, work.loads.boundary_bytes, context), context)
        sent_s = np.where(spanned > 1.0, share * across, (1.0 - share) * inside)
    return np.asanyarray(grid.vpp * sent_s / layers_of_most(work))
