"""What a stage has to do in an iteration, in seconds alone on each stream.

Composed here once, over whole grids of configurations: the closed form says what of it a stage exposes
(`closed_form`), and the events play one row of it (`events/tasks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mist_megatron.cost.boundary import BoundaryWork, boundary_work
from mist_megatron.cost.expert_traffic import expert_count, exposed_exchange, reduced_once
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.host_work import host_seconds
from mist_megatron.cost.placed import slowest
from mist_megatron.cost.terms import (
    NOTHING_AGAIN,
    ZERO,
    Again,
    LayerLoad,
    Linear,
    StageLoads,
    TimeContext,
    add_term,
    of_kind,
)
from mist_megatron.cost.traffic import (
    Traffic,
    accumulation_seconds,
    added_pieces_s,
    crossing_bytes,
    exposed_beside_products,
    gathers_on_arrival,
    host_copy,
    joined_s,
    layer_traffic,
    reduces_in_passes,
    replicas,
    shard_passes_s,
    shares,
    step_copies_s,
)
from mist_megatron.cost.weight_gather import weight_gather
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.price.prices import Array, Collective, DeviceAdam, HostAdam, MemoryPass, any_of
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.term import Term
from mist_megatron.targets.facts import TrafficFacts


@dataclass(frozen=True, kw_only=True)
class PassWork:
    """One pass over one layer: seconds alone on each stream. What arrives must be there before compute
    begins and comes in during the layer before; what leaves goes out during the layer after."""

    compute_s: Array
    gather_s: Array = field(default_factory=lambda: ZERO)
    """Weights that arrive."""
    copy_in_s: Array = field(default_factory=lambda: ZERO)
    reduce_s: Array = field(default_factory=lambda: ZERO)
    """Collectives that leave: gradients."""
    copy_out_s: Array = field(default_factory=lambda: ZERO)
    tensor_s: Array = field(default_factory=lambda: ZERO)
    """By how much tensor-parallel collectives, and tokens on their way to experts and back, stop compute,"""
    sent_s: Array = field(default_factory=lambda: ZERO)
    """the tokens' part of that,"""
    inside_s: Array = field(default_factory=lambda: ZERO)
    """and what of compute experts do while they have them."""
    blocking_gather_s: Array = field(default_factory=lambda: ZERO)
    """Data-parallel collectives that do, before compute ..."""
    blocking_reduce_s: Array = field(default_factory=lambda: ZERO)
    """... and after it."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One kind of layer: its passes, and what they are made of."""

    load: LayerLoad
    traffic: Traffic
    recompute_s: Array
    """What the backward pass computes again, part of its compute."""
    accumulate_s: Array
    """Adding new gradients to old ones, from the second micro-batch on, where that is a pass of its own."""
    forward: PassWork
    backward: PassWork
    first: PassWork
    """The first forward pass of an iteration ..."""
    last: PassWork
    """... and the last backward pass; `backward` itself where they are equal."""


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """A kind of transformer layer ..."""

    kept: LayerWork
    """... that is not recomputed in full, ..."""
    recomputed: LayerWork
    """... and that is; `kept` itself where no configuration has one."""


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Everything that the stages of a grid have to do."""

    grid: StageGrid
    loads: StageLoads
    context: TimeContext
    kept: LayerWork
    """A layer that is not recomputed in full ..."""
    recomputed: LayerWork
    """... and one that is; `kept` itself where no configuration has one."""
    others: Mapping[str, BlockWork]
    """The same of the other kinds of layers, by their names."""
    embedding: LayerWork | None
    head: LayerWork | None
    boundary: BoundaryWork
    host_s: Array
    """The host's work per micro-batch, and what ranks agree on, forward and backward together."""
    step: Mapping[Term, Linear]
    """Once per optimizer step, besides what the layers' own passes have of it."""
    resharding_s: tuple[tuple[Array, Array], ...] = ()
    """Before the layers of each of `blocks`, and before a head whose strategy is its own, forward and
    backward, where strategies are per layer."""

    @property
    def blocks(self) -> tuple[BlockWork, ...]:
        """Of each kind of transformer layer."""
        return BlockWork(kept=self.kept, recomputed=self.recomputed), *self.others.values()


def stage_work(grid: StageGrid, loads: StageLoads, context: TimeContext) -> StageWork:
    """The work of stages with these layers."""
    edge = edge_grid(grid, context.facts)
    first = _block_work(grid, loads.block, context)
    others = {name: _block_work(grid, load, context) for name, load in loads.others.items()}
    # Megatron's token table and logits are no modules of Transformer Engine.
    plain = replace(context, tensor_collectives_overlap=False)
    embedding, head = (
        # Never recomputed, and their activations are never offloaded.
        None if load is None else layer_work(edge, load, plain, again=NOTHING_AGAIN, moved_bytes=ZERO)
        for load in (loads.embedding, loads.head)
    )
    return StageWork(
        grid=grid,
        loads=loads,
        context=context,
        kept=first.kept,
        recomputed=first.recomputed,
        others=others,
        embedding=embedding,
        head=head,
        boundary=boundary_work(grid, loads, context),
        host_s=host_seconds(grid, context),
        step=_step_work(grid, loads, (first, *others.values()), context),
    )


def _block_work(grid: StageGrid, block: LayerLoad, context: TimeContext) -> BlockWork:
    kept = recomputed = kept_layer(grid, block, context)
    if any_of(grid.ckpt):
        recomputed = recomputed_layer(grid, block, context)
    return BlockWork(kept=kept, recomputed=recomputed)


def recomputed_layer(grid: StageGrid, load: LayerLoad, context: TimeContext) -> LayerWork:
    """A layer that is recomputed in full. What it keeps is its input, which is too small to be worth
    offloading."""
    return layer_work(grid, load, context, again=load.again, moved_bytes=ZERO)


def kept_layer(grid: StageGrid, load: LayerLoad, context: TimeContext) -> LayerWork:
    """A layer of which nothing or a part is recomputed."""
    moved = grid.offload.activations * load.saved_bytes + load.moved_bytes
    return layer_work(grid, load, context, again=load.dropped, moved_bytes=moved)


def layer_work(
    grid: StageGrid, load: LayerLoad, context: TimeContext, *, again: Again, moved_bytes: Array
) -> LayerWork:
    """One kind of layer; `again` is the compute and the collectives that its backward pass does again, and
    `moved_bytes` what of its activations goes to host memory and back."""
    traffic, around = layer_traffic(grid, load, context), shard_passes_s(load.parameters, grid, context)
    shared = _data_parallel(grid, traffic, joined_s(load, grid, context), context.facts)
    gathers = 1.0 + _gathers_again(load, context.facts, again[0]) if load.passes_back else ZERO
    saved_out, saved_in = (host_copy(moved_bytes, way, context) for way in ("d2h", "h2d"))
    backward_s = load.backward_s + again[0]
    (forward_tp, forward_sent), (backward_tp, backward_sent) = _stopping(grid, load, context, again)
    forward = PassWork(
        compute_s=load.forward_s,
        gather_s=shared.gather_s,
        copy_in_s=traffic.weights_in_s,
        copy_out_s=saved_out,
        tensor_s=forward_tp + forward_sent,
        sent_s=forward_sent,
        inside_s=load.forward_inside_s,
        blocking_gather_s=shared.blocking_gather_s + around[0],
    )
    backward = PassWork(
        compute_s=backward_s,
        gather_s=gathers * shared.gather_s,
        copy_in_s=traffic.weights_in_s + traffic.grads_in_s + saved_in,
        reduce_s=shared.reduce_s,
        copy_out_s=traffic.grads_out_s,
        tensor_s=backward_tp + backward_sent,
        sent_s=backward_sent,
        inside_s=load.backward_inside_s,
        blocking_gather_s=gathers * (shared.blocking_gather_s + np.where(grid.zero >= 3, around[0], 0.0)),
        blocking_reduce_s=shared.blocking_reduce_s + around[1],
    )
    first = replace(
        forward,
        compute_s=load.forward_s + traffic.step_compute_s + traffic.copied_s,
        gather_s=shared.gather_s + shared.first_gather_s,
        blocking_gather_s=forward.blocking_gather_s + shared.first_blocking_gather_s,
        # With a swapped step the new weights are made here, so old ones need not come in.
        copy_in_s=traffic.step_in_s if context.facts.step.in_first_forward else traffic.weights_in_s,
        copy_out_s=saved_out + traffic.step_out_s,
    )
    last = _last_pass(backward, shared, load)
    if context.facts.host_copies.states_visit and any_of(grid.offload.grads):
        # One micro-batch of a step finds gradients that are zero, for which nothing comes in: the first, but
        # an iteration is as long if it is the last.
        last = replace(last, copy_in_s=traffic.weights_in_s + saved_in)
    return LayerWork(
        load=load,
        traffic=traffic,
        recompute_s=again[0],
        accumulate_s=accumulation_seconds(load.parameters, grid, context),
        forward=forward,
        backward=backward,
        first=first,
        last=last,
    )


def _last_pass(backward: PassWork, shared: _DataParallel, load: LayerLoad) -> PassWork:
    """The last backward pass of an iteration; what sub-groups of replicas gather before the first is counted
    there, as an iteration is as long if it is the last."""
    if any_of(shared.outer_gather_s) and load.passes_back:
        gather_s = backward.gather_s + shared.outer_gather_s
        return replace(backward, gather_s=gather_s, reduce_s=shared.reduce_s + shared.last_reduce_s)
    if not any_of(shared.last_reduce_s):
        return backward
    return replace(backward, reduce_s=shared.reduce_s + shared.last_reduce_s)


def _stopping(
    grid: StageGrid, load: LayerLoad, context: TimeContext, again: Again
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Tensor-parallel collectives and journeys of tokens that stop compute, forward and backward."""
    forward_tp, backward_tp, again_tp = load.forward_collective_s, load.backward_collective_s, again[1]
    forward_sent, backward_sent = exposed_exchange(grid, load, again, context)
    if any_of(load.forward_exchange_s):
        forward_tp = forward_tp - load.forward_exchange_s
        backward_tp, again_tp = backward_tp - load.backward_exchange_s, again_tp - again.exchange_s
    if context.tensor_collectives_overlap:
        each, ranks = context.interference, grid.tp
        if context.context_parallel > 1:
            # Userbuffers move what tensor-parallel ranks send, and nothing else.
            forward_cp, backward_cp = load.forward_context_s, load.backward_context_s + again.context_s
            forward_tp, backward_tp = forward_tp - forward_cp, backward_tp - load.backward_context_s
            again_tp = again_tp - again.context_s
        added_s = added_pieces_s(forward_tp, ranks)
        forward_tp = exposed_beside_products(load.forward_s, forward_tp, ranks, each) + added_s
        backward_tp = exposed_beside_products(load.backward_s, backward_tp, ranks, each)
        if any_of(again_tp):
            # What is run again hides what it sends again, and nothing of the backward pass proper.
            again_tp = exposed_beside_products(again[0], again_tp, ranks, each)
        if context.context_parallel > 1:
            forward_tp, backward_tp = forward_tp + forward_cp, backward_tp + backward_cp
    return (forward_tp, forward_sent), (backward_tp + again_tp, backward_sent)


@dataclass(frozen=True, kw_only=True)
class _DataParallel:
    """Data-parallel collectives of one layer: beside compute, or stopping it (`blocking`)."""

    gather_s: Array
    """Weights of ZeRO 3, in every pass."""
    blocking_gather_s: Array
    reduce_s: Array
    """Gradients of ZeRO 2 and 3, in every backward pass."""
    blocking_reduce_s: Array
    first_gather_s: Array
    """Updated weights of ZeRO 1 and 2, in the first forward pass; of ZeRO 3 a rank's part of them, or what
    gathering over all replicas takes longer than inside sub-groups."""
    first_blocking_gather_s: Array
    last_reduce_s: Array
    """Gradients of ZeRO 0 and 1, in the last backward pass; of ZeRO 2 and 3 a rank's part of them."""
    outer_gather_s: Array
    """Of `first_gather_s` what comes for the first backward pass once more."""


def _data_parallel(
    grid: StageGrid, traffic: Traffic, joined: tuple[Array, Array], facts: TrafficFacts
) -> _DataParallel:
    """`joined` is what sub-groups of replicas gather and reduce among each other, once a step."""
    zero = grid.zero
    gather3 = np.where(zero >= 3, traffic.gather_s, 0.0)
    reduce2 = np.where(zero == 2, traffic.reduce_s, 0.0)
    reduce3 = np.where(zero >= 3, traffic.reduce_s, 0.0)
    reduce1 = np.where(zero <= 1, traffic.reduce_s, 0.0) * reduces_in_passes(grid, facts)
    gather1 = np.where((zero == 1) | (zero == 2), traffic.gather_s, 0.0) * facts.step.gather_overlaps
    in_one = gathers_on_arrival(grid, facts) and not grid.role.has_embedding
    gather_before = gather1 * in_one
    gather_beside = gather3 * facts.zero3.gather_overlaps
    first3 = np.where(zero >= 3, traffic.first_gather_s, 0.0)
    first_beside = first3 * facts.zero3.gather_overlaps
    reduce_beside = reduce2 * facts.reduction.zero2_overlaps + reduce3 * facts.zero3.reduce_overlaps
    return _DataParallel(
        gather_s=gather_beside,
        blocking_gather_s=gather3 - gather_beside,
        reduce_s=reduce_beside,
        blocking_reduce_s=reduce2 + reduce3 - reduce_beside,
        first_gather_s=gather1 - gather_before + joined[0] + first_beside,
        first_blocking_gather_s=gather_before + first3 - first_beside,
        last_reduce_s=reduce1 + joined[1],
        outer_gather_s=joined[0],
    )


def _gathers_again(load: LayerLoad, facts: TrafficFacts, recomputed_s: Array) -> Array:
    """1 where ZeRO 3 lets go of a recomputed layer's weights before its backward pass, else 0."""
    if facts.zero3.reuse_elements is None or not any_of(recomputed_s):
        return ZERO
    return np.asarray(load.parameters > facts.zero3.reuse_elements, dtype=np.float64)


def edge_grid(grid: StageGrid, facts: TrafficFacts) -> StageGrid:
    """The stage as embedding and head see it."""
    if facts.edges_follow:
        return grid
    on_device = grid.offloading(weights=ZERO, grads=ZERO, optimizer=ZERO)
    return replace(on_device, zero=np.ones(()))


def _tied_s(message_bytes: Array, grid: StageGrid, context: TimeContext) -> Array:
    """Gradients of a tied embedding, summed by both ends of the pipeline as quickly as the slower of them."""
    nodes = np.asarray(2.0 if context.cluster_gpus > context.cluster_gpus_per_node else 1.0)
    work = Collective("all_reduce", message_bytes, np.asarray(2.0), nodes)
    ends = context.tied_prices or (context.prices,)
    if grid.placed is None:
        each = [end.of(work).seconds for end in ends]
    else:
        each = [slowest(work, grid.placed.tied, end).seconds for end in ends]
    return np.asarray(np.max(np.stack(each), axis=0))


def _step_work(
    grid: StageGrid, loads: StageLoads, blocks: tuple[BlockWork, ...], context: TimeContext
) -> Mapping[Term, Linear]:
    """What happens once per step and stops compute: reductions and gathers that nothing hides, the
    optimizer at the end of the step, and updates on the host."""
    step: dict[Term, Linear] = {}
    facts, prices, zero = context.facts, context.prices, grid.zero
    step[Term.HOST_STEP] = Linear(np.asanyarray(facts.host.per_step_s))
    count: Array = ZERO
    for layers, block in zip(grid.by_kind, loads.blocks, strict=True):
        count = count + layers.layers * block.parameters
    for load in (loads.embedding, loads.head):
        if load is not None:
            count = count + load.parameters
    experts = expert_count(grid, loads)
    if not reduces_in_passes(grid, facts):
        once = reduced_once(count - experts, grid, context, Group.DATA)
        if any_of(experts):
            once = once + reduced_once(experts, grid, context, Group.EXPERT_DATA)
        step[Term.GRADIENT_REDUCTION] = Linear(once)
    if not facts.step.gather_overlaps:
        step[Term.WEIGHT_GATHER] = weight_gather(grid, loads, count - experts, experts, context)
    if loads.tied_parameters is not None:
        step[Term.TIED_EMBEDDINGS] = Linear(
            _tied_s(context.grad_bytes * loads.tied_parameters, grid, context)
        )
    share = shares(count, experts, grid, context)
    if facts.host_copies.states_visit:
        _visits(grid, loads, count, context, step)
    if facts.step.in_first_forward:
        _steps_in_first_forward(grid, loads, count, blocks, context, step)
        return step
    on_host = share * grid.offload.optimizer
    compute = prices.of(DeviceAdam(share - on_host)).seconds
    if facts.step.norm_pass:
        # The norm reads every gradient, scaling reads and writes it.
        compute = compute + prices.of(MemoryPass(3.0 * context.grad_bytes * share)).seconds
    step[Term.OPTIMIZER_COMPUTE] = Linear(compute)
    if facts.step.by_place:
        step[Term.HOST_ADAM] = Linear(prices.of(HostAdam(on_host)).seconds)
        gone_s = _gradients_to_states(grid, share, context)
        step[Term.HOST_ADAM_COPIES] = Linear(gone_s + step_copies_s(grid, share, context))
        # Weights of ZeRO 1 and 2 that visited go back when they are new.
        visited = context.weight_bytes * count * np.where(zero >= 3, 0.0, grid.offload.weights)
        step[Term.STATES_AT_STEP] = Linear(host_copy(visited, "d2h", context))
    elif any_of(grid.offload.optimizer):
        still_on_device = 1.0 if facts.host_copies.states_visit else 1.0 - grid.offload.grads
        update = prices.of(HostAdam(on_host)).seconds
        gradient_bytes, weight_bytes = crossing_bytes(context)
        out = host_copy(gradient_bytes * on_host * still_on_device, "d2h", context)
        back = host_copy(weight_bytes * on_host, "h2d", context)
        copies = np.maximum(out + back - update, 0.0) if facts.step.host_copies_overlap else out + back
        step[Term.HOST_ADAM] = Linear(update)
        step[Term.HOST_ADAM_COPIES] = Linear(copies)
    return step


def _gradients_to_states(grid: StageGrid, share: Array, context: TimeContext) -> Array:
    """In the last backward pass gradients go to the host's states in fp32. Nothing is added up on the host:
    ZeRO 1 does that on the GPU (stage_1_and_2.py, copy_grads_in_partition: micro_step_id is 0 when it
    reduces, with or without a pipeline)."""
    return host_copy(context.facts.step.grad_bytes * grid.offload.optimizer * share, "d2h", context)


def _visits(
    grid: StageGrid, loads: StageLoads, count: Array, context: TimeContext, step: dict[Term, Linear]
) -> None:
    """Offloaded gradients come back before the reduction, when nothing else runs, but for the last three that
    left, which are still there; offloaded weights come and go unit by unit, one after another's update, where
    those are not part of a forward pass."""
    if not (any_of(grid.offload.grads) or any_of(grid.offload.weights)):
        return
    first = loads.blocks[grid.runs[0][0] if grid.runs else 0].parameters
    there = 3.0 * first
    if loads.embedding is not None:
        there = np.where(grid.offload.grads < 1.0, there, 2.0 * first + loads.embedding.parameters)
    away = np.maximum(grid.offload.grads * count - there, 0.0)
    seconds = host_copy(context.grad_bytes * away, "h2d", context)
    if not context.facts.step.in_first_forward:
        weights = grid.offload.weights * context.weight_bytes * count
        both = host_copy(weights, "h2d", context), host_copy(weights, "d2h", context)
        seconds = seconds + overlapped_time((ZERO, ZERO, *both), context.interference)
    step[Term.STATES_AT_STEP] = Linear(seconds)


def _steps_in_first_forward(
    grid: StageGrid,
    loads: StageLoads,
    count: Array,
    blocks: tuple[BlockWork, ...],
    context: TimeContext,
    step: dict[Term, Linear],
) -> None:
    """Updates between the layers of the first forward pass; the copies are part of its traffic."""
    facts, prices = context.facts, context.prices
    share = count / np.where(grid.zero >= 1, replicas(grid, context), 1.0)
    if facts.step.norm_pass:
        norm = prices.of(MemoryPass(3.0 * context.grad_bytes * share)).seconds
        step[Term.OPTIMIZER_COMPUTE] = Linear(norm)
    if facts.step.adam_on_host and any_of(grid.offload.optimizer):
        # The thread that updates a layer launches nothing: the device has the layer before it to run, and the
        # links copies that were launched.
        divisor = np.where(grid.zero >= 1, replicas(grid, context), 1.0)
        for place, (block, layer) in enumerate(zip(loads.blocks, blocks, strict=True)):
            update = prices.of(HostAdam(grid.offload.optimizer * block.parameters / divisor)).seconds
            # Of layers that are run again no activations leave, which updates could hide behind.
            kept_s, whole_s = (
                np.maximum(update - np.maximum(block.forward_s, _copies_s(one.first)), 0.0)
                for one in (layer.kept, layer.recomputed)
            )
            add_term(step, Term.HOST_ADAM, of_kind(place, kept_s, whole_s - kept_s))
        add_term(step, Term.HOST_ADAM, _edges_on_host(grid, loads, divisor, context))
        if facts.step.by_place:
            step[Term.HOST_ADAM_COPIES] = Linear(_gradients_to_states(grid, share, context))


def _copies_s(first: PassWork) -> Array:
    return np.maximum(first.copy_in_s, first.copy_out_s)


def _edges_on_host(grid: StageGrid, loads: StageLoads, divisor: Array, context: TimeContext) -> Linear:
    """Nothing runs before the embedding, and the last layer before the head."""
    exposed: Array = ZERO
    before_head_s = loads.blocks[grid.runs[-1][1] if grid.runs else 0].forward_s
    for load, before_s in ((loads.embedding, ZERO), (loads.head, before_head_s)):
        if load is not None:
            update = context.prices.of(HostAdam(grid.offload.optimizer * load.parameters / divisor)).seconds
            exposed = exposed + np.maximum(update - before_s, 0.0)
    return Linear(exposed)
