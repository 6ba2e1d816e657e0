"""What a stage pays once per optimizer step, and at its boundaries with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mist_megatron.cost.communication import boundary_crossing_share, nodes_spanned
from mist_megatron.cost.grid import StageGrid, StageRole
from mist_megatron.cost.terms import ZERO, LayerLoad, Linear, StageLoads, TimeContext, add_term
from mist_megatron.cost.traffic import (
    STEP_GRAD_BYTES,
    collective,
    host_copy,
    layer_traffic,
    replicas,
    step_copies_s,
    whole_buckets,
)
from mist_megatron.price.prices import Array, Collective, DeviceAdam, HostAdam, MemoryPass
from mist_megatron.spec.term import AT_STEP, IN_STEPPING_PASS, Term
from mist_megatron.targets.facts import TrafficFacts


def first_terms(facts: TrafficFacts) -> tuple[Term, ...]:
    """Terms of d for which a first forward pass stands still, and with it all later stages."""
    on_arrival = facts.step.taken == "on_arrival"
    return IN_STEPPING_PASS if on_arrival else (Term.FIRST_GATHER,)


def step_names(facts: TrafficFacts) -> tuple[Term, ...]:
    """Terms of d that begin when a stage may step."""
    first = first_terms(facts)
    return tuple(name for name in AT_STEP if name not in first)


def reduces_in_passes(grid: StageGrid, facts: TrafficFacts) -> bool:
    """Whether gradients of ZeRO 0 and 1 are reduced beside backward passes, not after the last of them."""
    later = facts.pipeline.later_stages_at_once and grid.vpp == 1 and not grid.role.has_embedding
    return facts.reduction.last_overlaps and not later


def gathers_on_arrival(grid: StageGrid, facts: TrafficFacts) -> bool:
    """Whether weights of ZeRO 1 and 2 are gathered when the first micro-batch has come, which holds up all
    later stages."""
    alone = facts.step.gather_overlaps and not facts.step.in_first_forward
    return alone and facts.pipeline.later_stages_at_once and grid.vpp == 1


def reduces_by_chunk(grid: StageGrid, facts: TrafficFacts) -> bool:
    """Whether a chunk's gradients of ZeRO 0 and 1 are reduced when all of them are made."""
    return facts.reduction.last_overlaps and facts.pipeline.later_stages_at_once and grid.vpp > 1


def step_terms(grid: StageGrid, loads: StageLoads, context: TimeContext, delta: dict[Term, Linear]) -> None:
    """What happens once per step and stops compute: reductions and gathers that nothing hides, the
    optimizer at the end of the step, and updates on the host."""
    facts, prices, zero = context.facts, context.prices, grid.zero
    count = grid.layers * loads.block.parameters
    for load in (loads.embedding, loads.head):
        if load is not None:
            count = count + load.parameters
    if not reduces_in_passes(grid, facts):
        whole = context.grad_bytes * count
        scatter = whole_buckets("reduce_scatter", whole, context.grad_bytes, grid, context)
        reduce = whole_buckets("all_reduce", whole, context.grad_bytes, grid, context)
        once = np.where(zero == 1, scatter, np.where(zero == 0, reduce, 0.0))
        delta[Term.GRADIENT_REDUCTION] = Linear(once)
    if not facts.step.gather_overlaps:
        delta[Term.WEIGHT_GATHER] = _weight_gather(grid, loads, count, context)
    if loads.tied_parameters is not None:
        message = context.grad_bytes * loads.tied_parameters
        pair = np.asarray(2.0)
        nodes = np.asarray(2.0 if context.cluster_gpus > context.cluster_gpus_per_node else 1.0)
        delta[Term.TIED_EMBEDDINGS] = Linear(
            prices.of(Collective("all_reduce", message, pair, nodes)).seconds
        )
    share = count / np.where(zero >= 1, replicas(grid, context), 1.0)
    if facts.host_copies.states_visit:
        _visits(grid, count, context, delta)
    if facts.step.in_first_forward:
        _steps_in_first_forward(grid, loads, count, context, delta)
        return
    on_host = share * grid.offload.optimizer
    compute = prices.of(DeviceAdam(share - on_host)).seconds
    if facts.step.norm_pass:
        # The norm reads every gradient, scaling reads and writes it.
        compute = compute + prices.of(MemoryPass(3.0 * context.grad_bytes * share)).seconds
    delta[Term.OPTIMIZER_COMPUTE] = Linear(compute)
    if facts.step.by_place:
        delta[Term.HOST_ADAM] = Linear(prices.of(HostAdam(on_host)).seconds)
        gone_s = _gradients_to_states(grid, share, context)
        delta[Term.HOST_ADAM_COPIES] = Linear(gone_s + step_copies_s(grid, share, context))
        # Weights of ZeRO 1 and 2 that visited go back when they are new.
        visited = context.weight_bytes * count * np.where(zero >= 3, 0.0, grid.offload.weights)
        delta[Term.STATES_AT_STEP] = Linear(host_copy(visited, "d2h", context))
    elif np.any(grid.offload.optimizer):
        still_on_device = 1.0 if facts.host_copies.states_visit else 1.0 - grid.offload.grads
        update = prices.of(HostAdam(on_host)).seconds
        out = host_copy(context.grad_bytes * on_host * still_on_device, "d2h", context)
        back = host_copy(context.weight_bytes * on_host, "h2d", context)
        copies = np.maximum(out + back - update, 0.0) if facts.step.host_copies_overlap else out + back
        delta[Term.HOST_ADAM] = Linear(update)
        delta[Term.HOST_ADAM_COPIES] = Linear(copies)


def _gradients_to_states(grid: StageGrid, share: Array, context: TimeContext) -> Array:
    """In the last backward pass gradients go to the host's states in fp32. Nothing is added up on the host:
    ZeRO 1 does that on the GPU (stage_1_and_2.py, copy_grads_in_partition: micro_step_id is 0 when it
    reduces, with or without a pipeline)."""
    return host_copy(STEP_GRAD_BYTES * grid.offload.optimizer * share, "d2h", context)


def _weight_gather(grid: StageGrid, loads: StageLoads, count: Array, context: TimeContext) -> Linear:
    """Updated weights of ZeRO 1 and 2, when nothing hides it: in full buckets, or, where groups are stepped
    by layer, one after the other."""
    facts = context.facts
    sharded = (grid.zero == 1) | (grid.zero == 2)
    whole = context.weight_bytes * count
    gather = whole_buckets("all_gather", whole, context.weight_bytes, grid, context)
    if not facts.step.by_place:
        return Linear(np.where(sharded, gather, 0.0))
    by_layer = sharded & ((grid.offload.weights > 0.0) | facts.step.in_first_forward)

    def one(parameters: Array) -> Array:
        each = collective("all_gather", context.weight_bytes * parameters, grid, context)
        return np.where(by_layer, each, 0.0)

    edges = [one(load.parameters) for load in (loads.embedding, loads.head) if load is not None]
    at_once = np.where(sharded & ~by_layer, gather, 0.0)
    return Linear(sum(edges, start=at_once), one(loads.block.parameters))


def _visits(grid: StageGrid, count: Array, context: TimeContext, delta: dict[Term, Linear]) -> None:
    """Offloaded gradients come back before the reduction, when nothing else runs; offloaded weights
    come and go for an update that is not part of a forward pass."""
    if not (np.any(grid.offload.grads) or np.any(grid.offload.weights)):
        return
    seconds = host_copy(grid.offload.grads * context.grad_bytes * count, "h2d", context)
    if not context.facts.step.in_first_forward:
        weights = grid.offload.weights * context.weight_bytes * count
        seconds = seconds + host_copy(weights, "h2d", context) + host_copy(weights, "d2h", context)
    delta[Term.STATES_AT_STEP] = Linear(seconds)


def _steps_in_first_forward(
    grid: StageGrid, loads: StageLoads, count: Array, context: TimeContext, delta: dict[Term, Linear]
) -> None:
    """Updates between the layers of the first forward pass; the copies are part of its traffic."""
    facts, prices = context.facts, context.prices
    share = count / np.where(grid.zero >= 1, replicas(grid, context), 1.0)
    steps = layer_traffic(grid, loads.block, context).step_compute_s
    add_term(delta, Term.OPTIMIZER_COMPUTE, Linear(per_layer=steps))
    if facts.step.norm_pass:
        norm = prices.of(MemoryPass(3.0 * context.grad_bytes * share)).seconds
        add_term(delta, Term.OPTIMIZER_COMPUTE, Linear(norm))
    if facts.step.adam_on_host and np.any(grid.offload.optimizer):
        # The thread that updates a layer launches nothing: the device has the layer before it to run.
        divisor = np.where(grid.zero >= 1, replicas(grid, context), 1.0)
        update = prices.of(HostAdam(grid.offload.optimizer * loads.block.parameters / divisor)).seconds
        delta[Term.HOST_ADAM] = Linear(per_layer=np.maximum(update - loads.block.forward_s, 0.0))
        if facts.step.by_place:
            add_term(delta, Term.HOST_ADAM, _edges_on_host(grid, loads, divisor, context))
            delta[Term.HOST_ADAM_COPIES] = Linear(_gradients_to_states(grid, share, context))


def _edges_on_host(grid: StageGrid, loads: StageLoads, divisor: Array, context: TimeContext) -> Linear:
    """Nothing runs before the embedding, and the last layer before the head."""
    exposed: Array = ZERO
    for load, before_s in ((loads.embedding, ZERO), (loads.head, loads.block.forward_s)):
        if load is not None:
            update = context.prices.of(HostAdam(grid.offload.optimizer * load.parameters / divisor)).seconds
            exposed = exposed + np.maximum(update - before_s, 0.0)
    return Linear(exposed)


def boundary_terms(
    grid: StageGrid,
    loads: StageLoads,
    context: TimeContext,
    stable: dict[Term, Linear],
    delta: dict[Term, Linear],
) -> None:
    """Activations to the next stage and their gradients back. A stage with two neighbours meets two
    exchanges per micro-batch, one at an end of the pipeline meets one, so that their sum over the stages
    is the 2 (S-1) hops of one micro-batch there and back, as many of them between nodes as there are borders
    of nodes. Where stages differ in size, each pays for what its own ranks send and receive, and crosses
    nodes as often as a stage of its role among stages of its size that fill the cluster."""
    if grid.stages <= 1:
        return
    gpus = grid.nodes * grid.gpus_per_node
    alike = max(context.cluster_gpus // gpus, 2)
    overlaps = grid.vpp > 1 and context.facts.pipeline.sends_overlap_when_interleaved
    # Chunks pass every boundary on their way, wherever their stage stands.
    role = None if overlaps else grid.role
    share = boundary_crossing_share(alike, gpus, context.cluster_gpus_per_node, role)
    (inside, across), handed_on = boundary_seconds(grid, loads, context)
    hop = (1.0 - share) * inside + share * across + handed_on
    if overlaps:
        # At a border of nodes a stage has one neighbour on each side of it.
        own = (inside, across) if 0.0 < share < 1.0 else (hop, hop)
        sends = _Sends(grid, hop, own, host_seconds(grid, context), _edge_seconds(loads))
        stable[Term.PIPELINE_P2P], delta[Term.PIPELINE_P2P] = _sent_beside_chunks(sends, loads.block, context)
        return
    exchanges = 2.0 if grid.role is StageRole.MIDDLE else 1.0
    each = 2.0 if context.facts.pipeline.sends_in_turn else 1.0
    stable[Term.PIPELINE_P2P] = Linear(each * exchanges * grid.vpp * hop)


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
    """What a stage with chunks sends, and what besides its layers it does meanwhile."""

    grid: StageGrid
    hop_s: Array
    """Mean of all boundaries, which every micro-batch passes."""
    own_s: tuple[Array, Array]
    """Sends of a stage to either side, where they slow its compute most."""
    host_s: Array
    edges_s: Array


def _sent_beside_chunks(sends: _Sends, block: LayerLoad, context: TimeContext) -> tuple[Linear, Linear]:
    """Sends of p stages with v chunks that compute (f forward, b backward) beside them, in t and in d.

    A chunk's output travels while a backward pass runs, its gradients while a forward pass does; p stages and
    p pairs of passes later the micro-batch's next chunk needs them. So a pair takes f + b or, at least,

    * the longer of both passes and a send: of every v chunks in a row but the first, which waits for nothing;
    * two sends: a stage's link does not rest. Of two stages each is an end of the pipeline, and has one
      chunk in v that sends once only.

    Filling and draining are the trip of one micro-batch through p v chunks and back, and p pairs of the
    chunk that waits for nothing but the link. A layer hides its share of a send, which keeps all this linear
    in recomputed layers (chunks are equal, so a stage has no other number of layers); embedding or head hide
    waits too."""
    grid = sends.grid
    again = block.dropped
    kept_s, kept_d = _per_layer(sends, block, again, context)
    trip = 2.0 * (grid.stages * grid.vpp - 1) * sends.hop_s
    if not np.any(grid.ckpt):
        return Linear(per_layer=kept_s), Linear(trip, kept_d)
    whole_s, whole_d = _per_layer(sends, block, block.again, context)
    return Linear(per_layer=kept_s, per_ckpt=whole_s - kept_s), Linear(trip, kept_d, whole_d - kept_d)


def _edge_seconds(loads: StageLoads) -> Array:
    """Embedding and head, forward and backward."""
    return sum(
        (load.forward_s + load.backward_s for load in (loads.embedding, loads.head) if load is not None),
        start=ZERO,
    )


def _per_layer(
    sends: _Sends, load: LayerLoad, again: tuple[Array, Array], context: TimeContext
) -> tuple[Array, Array]:
    """What sends add to t for a layer, and what of it d takes back."""
    stages, chunks = sends.grid.stages, sends.grid.vpp
    a_layer = stages / context.model_layers
    share, host_s = chunks * sends.hop_s * a_layer, 0.5 * sends.host_s * a_layer
    forward_parts = (host_s, load.forward_s, load.forward_collective_s)
    backward_parts = (host_s, load.backward_s + again[0], load.backward_collective_s + again[1])
    forward, backward = (_beside(share, parts, context) for parts in (forward_parts, backward_parts))
    slower = forward.slower_s + backward.slower_s
    if sends.own_s[0] is not sends.own_s[1]:
        each = [chunks * hop * a_layer for hop in sends.own_s]
        found = [_beside(one, parts, context) for one in each for parts in (forward_parts, backward_parts)]
        slower = 0.5 * sum((beside.slower_s for beside in found), start=ZERO)
    link = np.maximum(forward.waits_s + backward.waits_s - forward.spare_s - backward.spare_s, 0.0)
    round_trip = np.maximum(forward.waits_s, backward.waits_s)
    alone = np.maximum(share - sum(forward_parts) - sum(backward_parts), 0.0)
    if stages == 2:
        # The chunk that sends once is half hidden by the one before, which still sends.
        once = np.maximum(alone, np.where(backward.waits_s > 0.0, 0.5 * forward.waits_s, 0.0))
        waits = exposed = ((chunks - 1) * np.maximum(link, round_trip) + once) / chunks
    else:
        trips = (chunks - 1) / chunks * round_trip
        waits = np.maximum(link, trips)
        exposed = np.maximum(link - sends.edges_s * a_layer, trips)
    pairs = stages * chunks - 1
    in_chunk = (alone if stages == 2 else stages * link) - pairs * slower - (pairs + stages) * waits
    return slower + exposed, in_chunk / chunks


def _beside(sent: Array, parts: tuple[Array, Array, Array], context: TimeContext) -> _Beside:
    """Host work, compute and collectives of a pass, in this order; only compute and sends disturb each
    other."""
    host, compute, collectives = parts
    slow_compute, slow_send = (float(factor) for factor in context.interference[0b0011, :2])
    together = np.minimum(compute * slow_compute, np.maximum(sent - host, 0.0) * slow_send)
    slower = together * (1.0 - 1.0 / slow_compute)
    left = sent - host - together / slow_send - collectives
    idle = (compute - together / slow_compute) + np.maximum(-left, 0.0)
    return _Beside(slower, np.maximum(left, 0.0), np.where(left > 0.0, 0.0, idle))


def slowed_by_reduction(grid: StageGrid, loads: StageLoads, reduction: Array, context: TimeContext) -> Array:
    """Interleaved stages reduce when their last backward pass has ended; its gradients still leave then, and
    where both go over the same links, have half of them."""
    sends_beside = grid.vpp > 1 and context.facts.pipeline.sends_overlap_when_interleaved
    if not sends_beside or not np.any(reduction):
        return ZERO
    each_s = sent_beside_reductions(grid, loads, context) * context.model_layers / (grid.vpp * grid.stages)
    return (grid.stages - 1) * np.minimum(each_s, reduction)


def sent_beside_reductions(grid: StageGrid, loads: StageLoads, context: TimeContext) -> Array:
    """A layer's share of a send between chunks, as far as it goes over links that reductions go over too."""
    gpus = grid.nodes * grid.gpus_per_node
    alike = max(context.cluster_gpus // gpus, 2)
    share = boundary_crossing_share(alike, gpus, context.cluster_gpus_per_node)
    inside, across = hop_seconds(loads.boundary_bytes, context)
    spanned = np.minimum(nodes_spanned(replicas(grid, context), grid.tp, grid.gpus_per_node), grid.nodes)
    sent_s = np.where(spanned > 1.0, share * across, (1.0 - share) * inside)
    return np.asarray(grid.vpp * sent_s * grid.stages / context.model_layers)


def host_seconds(grid: StageGrid, context: TimeContext) -> Array:
    """Host work per micro-batch. Every chunk of an interleaved stage meets its neighbours for itself."""
    if Term.HOST_WORK in context.without:
        return ZERO
    exchange_s = grid.vpp * context.facts.host.per_exchange_s if grid.stages > 1 else 0.0
    return np.asarray(context.facts.host.per_micro_batch_s + exchange_s)


def _handed_on(whole_bytes: Array, grid: StageGrid, context: TimeContext) -> Array:
    """A broadcast in a tensor-parallel group: a ring passes every byte once, as a gather does."""
    nodes = np.ceil(grid.tp / context.cluster_gpus_per_node)
    seconds = context.prices.of(Collective("all_gather", whole_bytes, grid.tp, nodes)).seconds
    return np.where(grid.tp > 1.0, seconds, 0.0)


def boundary_seconds(
    grid: StageGrid, loads: StageLoads, context: TimeContext
) -> tuple[tuple[Array, Array], Array]:
    """What one boundary tensor takes: the way to a neighbour, inside a node and between nodes, and then, over
    a bridge, from the rank that received it to the others of its tensor-parallel group."""
    if not grid.bridged:
        return hop_seconds(loads.boundary_bytes, context), ZERO
    whole_bytes = loads.boundary_bytes * (grid.tp if grid.sequence_parallel else 1.0)
    return hop_seconds(whole_bytes, context), _handed_on(whole_bytes, grid, context)


def hop_seconds(boundary_bytes: Array, context: TimeContext) -> tuple[Array, Array]:
    """One transfer to a neighbouring stage, inside a node and between nodes."""
    inside, across = (
        context.prices.of(Collective("send_recv", boundary_bytes, np.asarray(2.0), np.asarray(nodes))).seconds
        for nodes in (1.0, 2.0)
    )
    return inside, across
