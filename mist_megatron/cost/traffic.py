"""Seconds, alone, of all that layers and stages move: data-parallel collectives and host copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.placed import slowest
from mist_megatron.cost.terms import ZERO, LayerLoad, TimeContext
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.price.prices import Array, Collective, DeviceAdam, HostCopy, MemoryPass, any_of
from mist_megatron.spec.mesh import WHOLE, Group, Mesh
from mist_megatron.spec.profile import CollectiveKind
from mist_megatron.spec.term import Term
from mist_megatron.targets.facts import TrafficFacts


@dataclass(frozen=True)
class Traffic:
    """Seconds (alone) of what one layer moves, before asking what hides it."""

    gather_s: Array
    reduce_s: Array
    weights_in_s: Array
    grads_in_s: Array
    grads_out_s: Array
    step_in_s: Array
    step_out_s: Array
    step_compute_s: Array
    first_gather_s: Array = field(default_factory=lambda: ZERO)
    """By how much the first gather of a step lasts longer, over all replicas, than those inside sub-groups
    with a second copy ..."""
    copied_s: Array = field(default_factory=lambda: ZERO)
    """... and what compute stops for to make that copy."""


def layer_traffic(grid: StageGrid, load: LayerLoad, context: TimeContext) -> Traffic:
    """All volumes of one layer by ZeRO level and offload ratios, priced."""
    facts, prices = context.facts, context.prices
    count, zero, dp = load.parameters, grid.zero, replicas(grid, context)
    weights = context.weight_bytes * count
    grad_shard = context.grad_bytes * count / np.where(zero >= 2, dp, 1.0)
    step_share = count / np.where(zero >= 1, replicas(grid, context, owners(context)), 1.0)
    weights_out = grid.offload.weights * (weights / np.where(zero >= 3, dp, 1.0))
    grads_out = grid.offload.grads * grad_shard
    states_out = grid.offload.optimizer * context.optimizer_bytes * step_share
    swaps = facts.step.in_first_forward and not facts.step.adam_on_host
    step_in, step_out = ZERO, ZERO
    if swaps:
        step_in, step_out = states_out + grads_out, states_out + weights_out
    elif facts.step.in_first_forward and not facts.step.by_place:
        # The host keeps its states: gradients go to it, new weights come back. Gradients that are added up on
        # the device have come back for the norm, and are zero when they leave again.
        on_host = grid.offload.optimizer * step_share
        gradient_bytes, weight_bytes = crossing_bytes(context)
        added = ZERO if facts.host_copies.states_visit else grads_out
        step_in = weights_out + added + weight_bytes * on_host
        step_out = weights_out + added + gradient_bytes * on_host
    added_on_device = facts.host_copies.states_visit or not facts.step.adam_on_host
    compute: Array = ZERO
    if facts.step.in_first_forward and Term.OPTIMIZER_COMPUTE not in context.without:
        on_device = 1.0 - (0.0 if swaps else 1.0) * grid.offload.optimizer
        compute = prices.of(DeviceAdam(step_share * on_device)).seconds
        if facts.step.by_place:
            compute = compute + step_copies_s(grid, step_share, context)
    if any_of(load.expert_parameters):
        gather, reduce = _with_experts(load, grid, context)
    else:
        gather = _weight_gather(_gathered(load, grid, context), grid, context)
        reduce = _reduction(context.grad_bytes * count, grid, context)
    if facts.host_copies.in_collectives:
        added, visits = _added_gradients(grid, count, grads_out, context), zero < 3
        shards, visiting = np.where(visits, 0.0, weights_out), np.where(visits, weights_out, 0.0)
        return Traffic(
            gather_s=gather + host_copy(shards, "h2d", context),
            reduce_s=reduce + host_copy(added, "h2d", context) + host_copy(added, "d2h", context),
            weights_in_s=host_copy(visiting, "h2d", context),
            grads_in_s=ZERO,
            grads_out_s=ZERO,
            step_in_s=ZERO,
            step_out_s=host_copy(visiting, "d2h", context) if facts.step.in_first_forward else ZERO,
            step_compute_s=compute,
            **_beyond_copies(count, grid, context),
        )
    return Traffic(
        gather_s=gather,
        reduce_s=reduce,
        weights_in_s=host_copy(weights_out, "h2d", context),
        # Mist adds on the device, so old gradients come back; a host that updates also adds, but for the
        # patch, which adds where Megatron's fused kernels do.
        grads_in_s=host_copy(grads_out, "h2d", context) if added_on_device else ZERO,
        grads_out_s=host_copy(grads_out, "d2h", context),
        step_in_s=host_copy(step_in, "h2d", context),
        step_out_s=host_copy(step_out, "d2h", context),
        step_compute_s=compute,
    )


def gathered_bytes(count: Array, narrow: Array, context: TimeContext) -> Array:
    """Of so many weights, some of which travel in 8 bits."""
    return context.weight_bytes * count - (context.weight_bytes - 1.0) * narrow


def _gathered(load: LayerLoad, grid: StageGrid, context: TimeContext) -> Array:
    """Frozen weights too where all are gathered; where only updated ones are, these."""
    weights = gathered_bytes(load.parameters, load.narrow, context)
    if not any_of(load.still):
        return weights
    return weights + np.where(grid.zero >= 3, context.weight_bytes * load.still, 0.0)


def _beyond_copies(count: Array, grid: StageGrid, context: TimeContext) -> dict[str, Array]:
    """Of trained weights, whose second copy is let go of in every step (invalidate_secondary_tensor of
    stage3.py) and made again, zeros first, when the first forward pass lets go of what it has gathered
    (_partition_param_sec of partition_parameters.py)."""
    if not (context.facts.instances.second_weights and any_of(grid.instances > 1.0)):
        return {}
    groups, weights = (Group.DATA, Group.SHARDS), context.weight_bytes * count
    everywhere_s, inside_s = (_weight_gather(weights, grid, context, group) for group in groups)
    own = 3.0 * weights / replicas(grid, context, Group.SHARDS)
    copied_s = np.where(
        (grid.instances > 1.0) & (grid.zero >= 3.0), context.prices.of(MemoryPass(own)).seconds, 0.0
    )
    return {"first_gather_s": everywhere_s - inside_s, "copied_s": copied_s}


def _reduction(message: Array, grid: StageGrid, context: TimeContext, group: Group = Group.DATA) -> Array:
    """Gradients of a layer, where optimizer states are sharded or not."""
    in_buckets = scattered_buckets(message, grid, context, group)
    if context.facts.reduction.on_all_ranks and any_of(grid.zero < 3):
        on_all = bucketed("all_reduce", message, grid, context, group)
        in_buckets = np.where(grid.zero >= 3, in_buckets, on_all)
    if context.facts.zero3.reduces_layers:
        at_once = collective("reduce_scatter", message, grid, context, group)
        in_buckets = np.where(grid.zero >= 3, at_once, in_buckets)
    return np.where(grid.zero >= 1, in_buckets, bucketed("all_reduce", message, grid, context, group))


def _with_experts(load: LayerLoad, grid: StageGrid, context: TimeContext) -> tuple[Array, Array]:
    """Gather and reduction of a layer whose experts have other copies than the rest of it."""
    gather: Array = ZERO
    reduce: Array = ZERO
    experts = load.expert_parameters
    for count, narrow, group in (
        (load.parameters - experts, load.narrow, Group.DATA),
        (experts, load.narrow_experts, Group.EXPERT_DATA),
    ):
        gathered = gathered_bytes(count, narrow, context)
        gather = gather + collective("all_gather", gathered, grid, context, SUB_GROUP[group])
        reduce = reduce + _reduction(context.grad_bytes * count, grid, context, group)
    return gather, reduce


def _added_gradients(grid: StageGrid, count: Array, shards: Array, context: TimeContext) -> Array:
    """Bytes of gradients on the host to which a micro-batch adds. ZeRO 3 adds to its shards. ZeRO 2 hands
    those of a lone micro-batch to the optimizer at once, and else adds to the whole of each parameter that a
    rank's part of a group touches: of groups cut by layer, at either end up to a layer's largest matrix.
    (The first micro-batch of ZeRO 2 copies nothing in; here it does, as in ZeRO 3.) Gradients wider than the
    weights ZeRO 2 adds up on the GPU (_use_compact_grad_partition_buffer)."""
    if context.grad_bytes == context.facts.step.grad_bytes:
        return np.where(grid.zero >= 3, shards, 0.0)
    whole = grid.offload.grads * context.grad_bytes * touched_parameters(grid, count, context)
    zero2 = np.where((grid.zero == 2) & (grid.grad_accum > 1), whole, 0.0)
    return np.where(grid.zero >= 3, shards, zero2)


def touched_parameters(grid: StageGrid, count: Array, context: TimeContext) -> Array:
    """Of so many, those that a rank's part of ZeRO 1 and 2 lies in."""
    cut = (grid.offload.weights > 0.0) | context.facts.step.in_first_forward
    part = count / replicas(grid, context)
    return np.where(cut, np.minimum(part + 2.0 * LARGEST_SHARE * count, count), part)


def crossing_bytes(context: TimeContext) -> tuple[float, float]:
    """Of the gradient and of the new weight of a parameter that the host updates."""
    both = context.facts.step.crossing_bytes
    return (context.grad_bytes, context.weight_bytes) if both is None else (both, both)


def step_copies_s(grid: StageGrid, share: Array, context: TimeContext) -> Array:
    """What the update of so many parameters copies once their gradients are where the states are: weights to
    where they belong. The fraction of each kind that is on the host is the same end of the model, so that
    weights of ZeRO 3 that are on the host mostly meet their states there. Where no states are on the host,
    gradients that are come to the GPU."""
    on_host = grid.offload.optimizer
    away = np.where(grid.zero >= 3, grid.offload.weights, 0.0)
    back = context.weight_bytes * share * np.maximum(on_host - away, 0.0)
    out = context.weight_bytes * share * np.maximum(away - on_host, 0.0)
    grads = context.grad_bytes * share * np.where(on_host > 0.0, 0.0, grid.offload.grads)
    return host_copy(back + grads, "h2d", context) + host_copy(out, "d2h", context)


LARGEST_SHARE = 1.0 / 3.0
"""Of a layer's weights in its largest matrix: 4 of 12 hidden^2, or 11 of 33 with a gated MLP."""


def _weight_gather(
    weights: Array, grid: StageGrid, context: TimeContext, group: Group = Group.SHARDS
) -> Array:
    """A layer's weights, at once or matrix by matrix where that is more than the least that is fetched."""
    least = context.facts.zero3.gather_elements
    whole = collective("all_gather", weights, grid, context, group)
    if least is None or not any_of(grid.zero >= 3):
        return whole
    piece = np.minimum(np.maximum(LARGEST_SHARE * weights, context.weight_bytes * least), weights)
    pieces = weights / np.maximum(piece, 1.0)
    by_piece = collective("all_gather", piece, grid, context, group)
    return np.where(grid.zero >= 3, pieces * by_piece, whole)


def collective(
    kind: CollectiveKind,
    message_bytes: Array,
    grid: StageGrid,
    context: TimeContext,
    group: Group = Group.DATA,
) -> Array:
    """Over the data-parallel group of the stage, or that of its experts; nothing for a group of one."""
    mesh = context.mesh(grid)
    ranks = mesh.size(group)
    several = ranks > 1.0
    if not any_of(several):
        return ZERO
    nodes = _nodes(mesh, grid, group)
    share = context.facts.zero3.network_share
    if share < 1.0:
        message_bytes = message_bytes / np.where((grid.zero >= 2) & (nodes > 1.0), share, 1.0)
    work = Collective(kind, message_bytes, ranks, nodes, strided=np.asarray(mesh.stride(group) > 1.0))
    if grid.placed is not None:
        priced = slowest(work, grid.placed.of(group), context.prices)
    else:
        priced = context.prices.of(work)
    seconds = priced.seconds
    return np.where(several, seconds, 0.0)


def replicas(grid: StageGrid, context: TimeContext, group: Group = Group.DATA) -> Array:
    """Ranks with the same weights, or the same experts."""
    return context.mesh(grid).size(group)


def replica_nodes(grid: StageGrid, context: TimeContext, group: Group = Group.DATA) -> Array:
    """Nodes on which they lie."""
    return _nodes(context.mesh(grid), grid, group)


def _nodes(mesh: Mesh[Array], grid: StageGrid, group: Group) -> Array:
    if grid.placed is not None:
        return np.asarray(float(grid.placed.nodes(group)))
    return np.minimum(mesh.nodes(group), grid.nodes)


def shares(count: Array, experts: Array, grid: StageGrid, context: TimeContext) -> Array:
    """Of so many parameters, some of them experts', those that a rank updates."""
    among = owners(context), owners(context, Group.EXPERT_DATA)
    share = (count - experts) / np.where(grid.zero >= 1, replicas(grid, context, among[0]), 1.0)
    if any_of(experts):
        share = share + experts / np.where(grid.zero >= 1, replicas(grid, context, among[1]), 1.0)
    return np.asarray(share)


def owners(context: TimeContext, group: Group = Group.DATA) -> Group:
    """Of ranks with the same weights, those that share out one set of their optimizer states."""
    facts = context.facts.instances
    return group if facts.joint_states or facts.second_weights else SUB_GROUP[group]


SUB_GROUP: Mapping[Group, Group] = MappingProxyType({whole: part for part, whole in WHOLE.items()})
"""Of ranks with the same weights, those among which optimizer states are shared out."""


def scattered(message: Array, grid: StageGrid, context: TimeContext, group: Group = Group.DATA) -> Array:
    """Gradients of a message, reduced among the ranks that share out optimizer states, then, where that is
    once a step, each rank's part over the sub-groups, one after the other (start_grad_sync of Megatron-core's
    param_and_grad_buffer.py)."""
    if context.facts.instances.second_weights:
        return collective("reduce_scatter", message, grid, context, group)
    part = SUB_GROUP[group]
    seconds = collective("reduce_scatter", message, grid, context, part)
    if any_of(grid.instances > 1.0):
        own = message if context.facts.instances.joins_whole else message / replicas(grid, context, part)
        joined_s = collective("all_reduce", own, grid, context, Group.INSTANCES)
        seconds = seconds + np.where(grid.zero <= 1.0, joined_s, 0.0)
    return seconds


def joined_s(load: LayerLoad, grid: StageGrid, context: TimeContext) -> tuple[Array, Array]:
    """What sub-groups of replicas send each other of a layer whose gradients each of them reduces in every
    micro-batch: weights that are gathered before the first, gradients that are reduced behind the last
    (_bucket_group_gradient_reduce and all_gather_params of Megatron-FSDP's param_and_grad_buffer.py)."""
    if not (any_of(grid.instances > 1.0) and any_of(grid.zero >= 2.0)):
        return ZERO, ZERO
    if context.facts.instances.second_weights:
        return ZERO, ZERO
    joint = context.facts.instances.joint_states
    kind: CollectiveKind = "reduce_scatter" if joint else "all_reduce"
    gather: Array = ZERO
    reduce: Array = ZERO
    experts, every = load.expert_parameters, grid.zero >= 2.0
    parts = (
        (load.parameters - experts, load.narrow, Group.DATA),
        (experts, load.narrow_experts, Group.EXPERT_DATA),
    )
    for count, narrow, group in parts if any_of(experts) else parts[:1]:
        among = replicas(grid, context, SUB_GROUP[group])
        reduced_s = collective(kind, context.grad_bytes * (count / among), grid, context, Group.INSTANCES)
        reduce = reduce + np.where(every, reduced_s, 0.0)
        if joint:
            gathered = gathered_bytes(count / among, narrow / among, context)
            gathered_s = collective("all_gather", gathered, grid, context, Group.INSTANCES)
            gather = gather + np.where(every, gathered_s, 0.0)
    return gather, reduce


def scattered_buckets(
    layer_bytes: Array, grid: StageGrid, context: TimeContext, group: Group = Group.DATA
) -> Array:
    """A layer's share of full buckets, where optimizer states are sharded."""
    if context.facts.reduction.bucket_elements is None:
        return scattered(layer_bytes, grid, context, group)
    bucket = _bucket_bytes(context.grad_bytes, grid, context)
    return scattered(bucket, grid, context, group) * (layer_bytes / bucket)


def scattered_whole(whole_bytes: Array, grid: StageGrid, context: TimeContext, group: Group) -> Array:
    """A whole stage at once, in full buckets or one smaller message."""
    if context.facts.reduction.bucket_elements is None:
        return scattered(whole_bytes, grid, context, group)
    bucket = np.minimum(_bucket_bytes(context.grad_bytes, grid, context), whole_bytes)
    return scattered(bucket, grid, context, group) * (whole_bytes / np.maximum(bucket, 1.0))


def bucketed(
    kind: CollectiveKind,
    layer_bytes: Array,
    grid: StageGrid,
    context: TimeContext,
    group: Group = Group.DATA,
) -> Array:
    """A layer's share of full buckets: keeps overlapped traffic linear in layers."""
    if context.facts.reduction.bucket_elements is None:
        return collective(kind, layer_bytes, grid, context, group)
    bucket = _bucket_bytes(context.grad_bytes, grid, context)
    return collective(kind, bucket, grid, context, group) * (layer_bytes / bucket)


def whole_buckets(
    kind: CollectiveKind,
    whole_bytes: Array,
    bytes_per_element: float,
    grid: StageGrid,
    context: TimeContext,
    group: Group = Group.DATA,
) -> Array:
    """A whole stage at once, in full buckets or one smaller message."""
    if context.facts.reduction.bucket_elements is None:
        return collective(kind, whole_bytes, grid, context, group)
    bucket = np.minimum(_bucket_bytes(bytes_per_element, grid, context), whole_bytes)
    return collective(kind, bucket, grid, context, group) * (whole_bytes / np.maximum(bucket, 1.0))


def _bucket_bytes(bytes_per_element: float, grid: StageGrid, context: TimeContext) -> Array:
    facts = context.facts
    by_ranks = facts.reduction.bucket_elements_per_rank * replicas(grid, context)
    elements = np.maximum(facts.reduction.bucket_elements or 0.0, by_ranks)
    return np.asanyarray(bytes_per_element * elements, dtype=np.float64)


def host_copy(copied_bytes: Array, direction: Literal["h2d", "d2h"], context: TimeContext) -> Array:
    """One copy per layer, `h2d` or `d2h`; nothing when nothing is offloaded."""
    if not any_of(copied_bytes):
        return ZERO
    return context.prices.of(HostCopy(copied_bytes, direction)).seconds


def reduces_in_passes(grid: StageGrid, facts: TrafficFacts) -> bool:
    """Whether gradients of ZeRO 0 and 1 are reduced beside backward passes, not after the last of them."""
    later = facts.pipeline.later_stages_at_once and not (grid.interleaved or grid.role.has_embedding)
    return facts.reduction.last_overlaps and not later


def gathers_on_arrival(grid: StageGrid, facts: TrafficFacts) -> bool:
    """Whether weights of ZeRO 1 and 2 are gathered when the first micro-batch has come, which holds up all
    later stages."""
    alone = facts.step.gather_overlaps and not facts.step.in_first_forward
    return alone and facts.pipeline.later_stages_at_once and not grid.interleaved


def gathers_by_chunk(grid: StageGrid, facts: TrafficFacts) -> bool:
    """Whether they are gathered ahead, a chunk at a time."""
    alone = facts.step.gather_overlaps and not facts.step.in_first_forward
    return alone and facts.pipeline.later_stages_at_once and grid.interleaved


def reduces_by_chunk(grid: StageGrid, facts: TrafficFacts) -> bool:
    """Whether a chunk's gradients of ZeRO 0 and 1 are reduced when all of them are made."""
    return facts.reduction.last_overlaps and facts.pipeline.later_stages_at_once and grid.interleaved


def shard_passes_s(parameters: Array, grid: StageGrid, context: TimeContext) -> tuple[Array, Array]:
    """Seconds of the passes over memory around one gather and one reduction of a layer's shards."""
    facts, of = context.facts.shard_passes, context.prices.of
    ranks = replicas(grid, context)
    shared = (grid.zero >= 2) & (ranks > 1.0)

    def seconds(whole: float, shard: float) -> Array:
        if not (whole or shard):
            return ZERO
        moved = of(MemoryPass((whole + shard / ranks) * parameters)).seconds
        return np.where(shared & (parameters > 0.0), moved, 0.0)

    gathered_s = seconds(0.0, facts.before_gather)
    return gathered_s, seconds(facts.before_reduction, facts.after_reduction)


def accumulation_seconds(parameters: Array, grid: StageGrid, context: TimeContext) -> Array:
    """Adding a layer's new gradients to its old ones, where that is a pass of its own and there are any."""
    if not context.facts.reduction.accumulation_pass:
        return ZERO
    shards = (grid.zero >= 2) & context.facts.reduction.adds_shards
    added = parameters / np.where(shards, replicas(grid, context), 1.0)
    added_s = context.prices.of(MemoryPass(3.0 * context.grad_bytes * added)).seconds
    return added_s if np.all(grid.grad_accum > 1.0) else np.where(grid.grad_accum > 1.0, added_s, 0.0)


def exposed_beside_products(compute_s: Array, collective_s: Array, ranks: Array, factors: Array) -> Array:
    """What tensor-parallel collectives beside compute add to it. Userbuffers cut each, and the product that
    it feeds or follows, into as many pieces as there are ranks. A rank begins with the piece that it has, or
    ends with the one that it keeps: one piece of the product runs alone, and none of the traffic
    (split_overlap_ag and split_overlap_rs of Transformer Engine's comm_gemm_overlap.cpp)."""
    alone_s = compute_s / ranks
    together_s = overlapped_time((compute_s - alone_s, collective_s, ZERO, ZERO), factors)
    return np.asarray(together_s + alone_s - compute_s)


def added_pieces_s(collective_s: Array, ranks: Array) -> Array:
    """What adding up the pieces takes that forward passes scatter, half of their traffic: about as long as
    one of them travels (reduce_bf16 of userbuffers). Backward passes scatter whole, beside gradients of
    weights (bulk_overlap)."""
    return np.asarray(0.5 * collective_s / ranks)
