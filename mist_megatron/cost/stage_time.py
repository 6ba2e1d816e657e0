"""Stable time t and extra time d of pipeline stages, as named terms linear in layers and recomputed layers.

A layer pass has compute, traffic that must have come in before it (weights gathered or copied in, offloaded
activations) and traffic that leaves after it (reduced gradients, offloaded activations). While layer k
computes, what k+1 needs comes in and what k-1 made goes out; so in a run of l layers all four streams
overlap in l-2 steps, and the first arrival and last departure stand alone (`_edge_s`).

Every term is `fixed + layers * per_layer + ckpt * per_ckpt`, so a search can price a whole (layers, ckpt) plane
from three numbers and prune exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mist_megatron.cost.communication import Template, boundary_crossing_share, nodes_spanned
from mist_megatron.cost.grid import StageGrid, StageRole
from mist_megatron.cost.overlap import overlapped_time
from mist_megatron.cost.pricing import Array, Collective, Prices

ZERO = np.zeros(())


@dataclass(frozen=True)
class Linear:
    """fixed + layers * per_layer + ckpt * per_ckpt."""

    fixed: Array = field(default_factory=lambda: ZERO)
    per_layer: Array = field(default_factory=lambda: ZERO)
    per_ckpt: Array = field(default_factory=lambda: ZERO)

    def at(self, layers: Array, ckpt: Array) -> Array:
        value = self.fixed
        if np.any(self.per_layer):
            value = value + layers * self.per_layer
        if np.any(self.per_ckpt):
            value = value + ckpt * self.per_ckpt
        return value

    def __add__(self, other: Linear) -> Linear:
        return Linear(
            self.fixed + other.fixed,
            self.per_layer + other.per_layer,
            self.per_ckpt + other.per_ckpt,
        )


@dataclass(frozen=True)
class LayerLoad:
    """One layer's passes on one tensor-parallel rank, arrays over (micro-batch, tp)."""

    forward_s: Array
    backward_s: Array
    forward_collective_s: Array
    backward_collective_s: Array
    parameters: Array
    saved_bytes: Array = field(default_factory=lambda: ZERO)
    """Kept for backward by a layer that is not recomputed in full."""
    input_bytes: Array = field(default_factory=lambda: ZERO)
    """Kept by a layer that is."""
    selective_s: Array = field(default_factory=lambda: ZERO)
    selective_collective_s: Array = field(default_factory=lambda: ZERO)
    weight_grad_s: Array = field(default_factory=lambda: ZERO)


@dataclass(frozen=True, kw_only=True)
class TimeContext:
    """What one evaluator's stages have in common."""

    prices: Prices
    template: Template
    interference: Array
    weight_bytes: float
    grad_bytes: float
    optimizer_bytes: float
    """Bytes per parameter of master weights and moments: what a swap of optimizer states copies."""
    tensor_collectives_overlap: bool
    cluster_gpus_per_node: int
    context_parallel: int
    without: frozenset[str]
    """Names of terms that are left out, for comparison with models that leave them out."""


@dataclass(frozen=True)
class StageLoads:
    """The layers of a stage's role; None where the role has no such layer."""

    block: LayerLoad
    embedding: LayerLoad | None
    head: LayerLoad | None
    boundary_bytes: Array
    """One activation at a stage boundary, per rank."""


@dataclass(frozen=True)
class StageTerms:
    """Named parts of t and d; each dictionary sums to its total."""

    stable: dict[str, Linear]
    delta: dict[str, Linear]


@dataclass(frozen=True)
class _Phase:
    compute_s: Array
    exposed_s: Array
    """Beyond compute, of a layer inside a run of layers."""
    edge_s: Array
    """Beyond that, once per run."""


@dataclass(frozen=True)
class _Run:
    """The four passes of a kind of layer."""

    forward: _Phase
    backward: _Phase
    first: _Phase
    last: _Phase
    tensor_s: Array
    """Tensor-parallel collectives that stop compute, forward and backward together."""
    blocking_s: Array
    """Data-parallel collectives that do."""


@dataclass(frozen=True)
class _Traffic:
    """Seconds (alone) of what one layer moves, before asking what hides it."""

    gather_s: Array
    reduce_s: Array
    weights_in_s: Array
    grads_in_s: Array
    grads_out_s: Array
    step_in_s: Array
    step_out_s: Array
    step_compute_s: Array


def stage_terms(grid: StageGrid, loads: StageLoads, context: TimeContext) -> StageTerms:
    """All terms of t and d over a grid."""
    stable: dict[str, Linear] = {}
    delta: dict[str, Linear] = {}
    _block_terms(grid, loads.block, context, stable, delta)
    for name, load in (("embedding", loads.embedding), ("head", loads.head)):
        if load is not None:
            _edge_layer_terms(name, _edge_grid(grid, context.template), load, context, stable, delta)
    _step_terms(grid, loads, context, delta)
    _boundary_terms(grid, loads.boundary_bytes, context, stable, delta)
    for name in context.without:
        stable.pop(name, None)
        delta.pop(name, None)
    return StageTerms(stable, delta)


def _block_terms(
    grid: StageGrid,
    load: LayerLoad,
    context: TimeContext,
    stable: dict[str, Linear],
    delta: dict[str, Linear],
) -> None:
    traffic = _traffic(grid, load, context)
    again = (load.selective_s, load.selective_collective_s) if grid.selective else (ZERO, ZERO)
    kept = _run(grid, load, traffic, context, again=again, saved_bytes=load.saved_bytes)
    whole = kept
    if np.any(grid.ckpt):
        again_whole = (load.forward_s, load.forward_collective_s)
        whole = _run(grid, load, traffic, context, again=again_whole, saved_bytes=load.input_bytes)
    stable["forward"] = Linear(per_layer=load.forward_s)
    stable["backward"] = Linear(per_layer=load.backward_s)
    stable["recompute"] = Linear(per_layer=again[0], per_ckpt=load.forward_s - again[0])
    stable["tensor_parallel"] = _mixed(kept.tensor_s, whole.tensor_s)
    stable["blocking_data_parallel"] = Linear(per_layer=kept.blocking_s)
    stable["exposed_traffic"] = _mixed(
        kept.forward.exposed_s + kept.backward.exposed_s,
        whole.forward.exposed_s + whole.backward.exposed_s,
    )
    stable["pipeline_fill_of_layers"] = _edge(
        grid,
        kept.forward.edge_s + kept.backward.edge_s,
        whole.forward.edge_s + whole.backward.edge_s,
    )
    delta["first_forward_traffic"] = _beyond(grid, (kept.first, kept.forward), (whole.first, whole.forward))
    delta["last_backward_traffic"] = _beyond(grid, (kept.last, kept.backward), (whole.last, whole.backward))
    _accumulation_terms(Linear(per_layer=load.parameters), context, stable, delta)


def _beyond(grid: StageGrid, kept: tuple[_Phase, _Phase], whole: tuple[_Phase, _Phase]) -> Linear:
    """What a first or last pass exposes beyond the steady one, (pass, steady) of both kinds of layers."""
    exposed = [special.exposed_s - steady.exposed_s for special, steady in (kept, whole)]
    edges = [special.edge_s - steady.edge_s for special, steady in (kept, whole)]
    return _mixed(exposed[0], exposed[1]) + _edge(grid, edges[0], edges[1])


def _edge_layer_terms(
    name: str,
    grid: StageGrid,
    load: LayerLoad,
    context: TimeContext,
    stable: dict[str, Linear],
    delta: dict[str, Linear],
) -> None:
    """Embedding and head: one layer each, never recomputed, its activations never offloaded."""
    quiet = replace(grid, activations_offload=ZERO)
    traffic = _traffic(quiet, load, context)
    run = _run(quiet, load, traffic, context, again=(ZERO, ZERO), saved_bytes=ZERO)
    stable[name] = Linear(
        load.forward_s
        + load.backward_s
        + run.tensor_s
        + run.blocking_s
        + run.forward.exposed_s
        + run.backward.exposed_s
    )
    delta[f"{name}_traffic"] = Linear(
        run.first.exposed_s - run.forward.exposed_s + run.last.exposed_s - run.backward.exposed_s
    )
    if context.template.step_in_first_forward:
        _add(delta, "optimizer_compute", Linear(traffic.step_compute_s))
    _accumulation_terms(Linear(load.parameters), context, stable, delta)


def _add(terms: dict[str, Linear], name: str, term: Linear) -> None:
    terms[name] = terms[name] + term if name in terms else term


def _accumulation_terms(
    parameters: Linear, context: TimeContext, stable: dict[str, Linear], delta: dict[str, Linear]
) -> None:
    """Adding new gradients to old ones: read two, write one; the first micro-batch has nothing to add to."""
    if not context.template.accumulation_pass:
        return
    share = context.prices.memory_bound(
        3.0 * context.grad_bytes * (parameters.fixed + parameters.per_layer)
    ).seconds
    on_layers = bool(np.any(parameters.per_layer))
    term = Linear(per_layer=share) if on_layers else Linear(share)
    back = Linear(per_layer=-share) if on_layers else Linear(-share)
    _add(stable, "gradient_accumulation", term)
    _add(delta, "gradient_accumulation", back)


def _traffic(grid: StageGrid, load: LayerLoad, context: TimeContext) -> _Traffic:
    template, prices = context.template, context.prices
    count, zero, dp = load.parameters, grid.zero, grid.dp
    weights = context.weight_bytes * count
    weight_shard = weights / np.where(zero >= 3, dp, 1.0)
    grad_shard = context.grad_bytes * count / np.where(zero >= 2, dp, 1.0)
    step_share = count / np.where(zero >= 1, dp, 1.0)
    weights_out = grid.weights_offload * weight_shard
    grads_out = grid.grads_offload * grad_shard
    states_out = grid.optimizer_offload * context.optimizer_bytes * step_share
    swaps = template.step_in_first_forward and not template.adam_on_host
    compute: Array = ZERO
    if template.step_in_first_forward and "optimizer_compute" not in context.without:
        on_device = 1.0 - (0.0 if swaps else 1.0) * grid.optimizer_offload
        compute = prices.device_adam(step_share * on_device).seconds
    reduce_bytes = context.grad_bytes * count
    gather = _collective("all_gather", weights, grid, context)
    reduce_scatter = _bucketed("reduce_scatter", reduce_bytes, grid, context)
    all_reduce = _bucketed("all_reduce", reduce_bytes, grid, context)
    return _Traffic(
        gather_s=gather,
        reduce_s=np.where(zero >= 1, reduce_scatter, all_reduce),
        weights_in_s=_copy(weights_out, "h2d", context),
        # Mist adds on the device, so old gradients come back; a host that updates also adds.
        grads_in_s=_copy(grads_out, "h2d", context) if not template.adam_on_host else ZERO,
        grads_out_s=_copy(grads_out, "d2h", context),
        step_in_s=_copy(states_out + grads_out, "h2d", context) if swaps else ZERO,
        step_out_s=_copy(states_out + weights_out, "d2h", context) if swaps else ZERO,
        step_compute_s=compute,
    )


def _run(
    grid: StageGrid,
    load: LayerLoad,
    traffic: _Traffic,
    context: TimeContext,
    *,
    again: tuple[Array, Array],
    saved_bytes: Array,
) -> _Run:
    """The four passes of one kind of layer; `again` is recomputed compute and collectives."""
    template, zero = context.template, grid.zero
    saved = grid.activations_offload * saved_bytes
    saved_out, saved_in = _copy(saved, "d2h", context), _copy(saved, "h2d", context)
    forward_tp, backward_tp = load.forward_collective_s, load.backward_collective_s + again[1]
    beside_forward, beside_backward = ZERO, ZERO
    if context.tensor_collectives_overlap:
        beside_forward, beside_backward = forward_tp, backward_tp
        forward_tp, backward_tp = ZERO, ZERO

    gather3 = np.where(zero >= 3, traffic.gather_s, 0.0)
    reduce2 = np.where(zero == 2, traffic.reduce_s, 0.0)
    reduce3 = np.where(zero >= 3, traffic.reduce_s, 0.0)
    reduce1 = np.where(zero <= 1, traffic.reduce_s, 0.0) * template.last_reduce_overlaps
    gather1 = np.where((zero == 1) | (zero == 2), traffic.gather_s, 0.0) * template.first_gather_overlaps
    gather_beside = gather3 * template.zero3_gather_overlaps
    reduce_beside = reduce2 * template.zero2_reduce_overlaps + reduce3 * template.zero3_reduce_overlaps
    stopped = 2.0 * (gather3 - gather_beside) + (reduce2 + reduce3 - reduce_beside)

    backward_compute = load.backward_s + again[0]
    copies_in = traffic.weights_in_s + traffic.grads_in_s + saved_in
    factors = context.interference
    forward_in = (gather_beside + beside_forward, traffic.weights_in_s)
    forward = _phase(load.forward_s, forward_in, (ZERO, saved_out), factors)
    backward_in = (gather_beside + beside_backward, copies_in)
    backward_out = (reduce_beside, traffic.grads_out_s)
    backward = _phase(backward_compute, backward_in, backward_out, factors)
    # With a swapped step the new weights are made here, so old ones need not come in.
    first_copies_in = traffic.step_in_s if template.step_in_first_forward else traffic.weights_in_s
    first_in = (gather_beside + gather1 + beside_forward, first_copies_in)
    first_out = (ZERO, saved_out + traffic.step_out_s)
    first = _phase(load.forward_s + traffic.step_compute_s, first_in, first_out, factors)
    last_out = (reduce_beside + reduce1, traffic.grads_out_s)
    last = _phase(backward_compute, backward_in, last_out, factors) if np.any(reduce1) else backward
    return _Run(forward, backward, first, last, forward_tp + backward_tp, stopped)


def _phase(
    compute: Array, arriving: tuple[Array, Array], leaving: tuple[Array, Array], factors: Array
) -> _Phase:
    """`arriving` is (gathered, copied in), `leaving` is (reduced, copied out)."""
    gather, copy_in = (_dropped_if_idle(stream) for stream in arriving)
    reduce, copy_out = (_dropped_if_idle(stream) for stream in leaving)
    if all(stream is ZERO for stream in (gather, copy_in, reduce, copy_out)):
        return _Phase(compute, ZERO, ZERO)
    steady = overlapped_time((compute, gather + reduce, copy_in, copy_out), factors)
    beginning = overlapped_time((compute, gather, copy_in, ZERO), factors)
    ending = overlapped_time((compute, reduce, ZERO, copy_out), factors)
    arrival = overlapped_time((ZERO, gather, copy_in, ZERO), factors)
    departure = overlapped_time((ZERO, reduce, ZERO, copy_out), factors)
    return _Phase(compute, steady - compute, arrival + beginning + ending + departure - 2.0 * steady)


def _dropped_if_idle(stream: Array) -> Array:
    """An idle stream loses its axes, so that it does not blow up the grid for nothing."""
    return stream if np.any(stream) else ZERO


def _mixed(kept: Array, whole: Array) -> Linear:
    return Linear(per_layer=kept, per_ckpt=_dropped_if_idle(np.asarray(whole - kept)))


def _edge(grid: StageGrid, kept: Array, whole: Array) -> Linear:
    """Once per run of layers: of recomputed layers when there are no others."""
    if not (np.any(kept) or np.any(whole)):
        return Linear()
    if kept is whole or not np.any(grid.ckpt):
        return Linear(kept)
    return Linear(np.where(grid.ckpt < grid.layers, kept, whole))


def _edge_grid(grid: StageGrid, template: Template) -> StageGrid:
    changed = grid
    if template.edges_zero is not None:
        changed = replace(changed, zero=np.asarray(float(template.edges_zero)))
    if not template.edges_offload:
        changed = replace(
            changed, weights_offload=ZERO, grads_offload=ZERO, optimizer_offload=ZERO
        )
    return changed


def _step_terms(
    grid: StageGrid, loads: StageLoads, context: TimeContext, delta: dict[str, Linear]
) -> None:
    """What happens once per step and stops compute: reductions and gathers that nothing hides, the
    optimizer at the end of the step, and updates on the host."""
    template, prices, zero = context.template, context.prices, grid.zero
    count = grid.layers * loads.block.parameters
    for load in (loads.embedding, loads.head):
        if load is not None:
            count = count + load.parameters
    if not template.last_reduce_overlaps:
        whole = context.grad_bytes * count
        scatter = _whole_buckets("reduce_scatter", whole, context.grad_bytes, grid, context)
        reduce = _whole_buckets("all_reduce", whole, context.grad_bytes, grid, context)
        once = np.where(zero == 1, scatter, np.where(zero == 0, reduce, 0.0))
        delta["gradient_reduction"] = Linear(once)
    if not template.first_gather_overlaps:
        whole = context.weight_bytes * count
        gather = _whole_buckets("all_gather", whole, context.weight_bytes, grid, context)
        delta["weight_gather"] = Linear(np.where((zero == 1) | (zero == 2), gather, 0.0))
    if template.step_in_first_forward:
        steps = _traffic(grid, loads.block, context).step_compute_s
        _add(delta, "optimizer_compute", Linear(per_layer=steps))
        return
    share = count / np.where(zero >= 1, grid.dp, 1.0)
    on_host = share * grid.optimizer_offload
    compute = prices.device_adam(share - on_host).seconds
    if template.grad_norm_pass:
        # The norm reads every gradient, scaling reads and writes it.
        compute = compute + prices.memory_bound(3.0 * context.grad_bytes * share).seconds
    delta["optimizer_compute"] = Linear(compute)
    if np.any(grid.optimizer_offload):
        still_on_device = 1.0 - grid.grads_offload
        delta["host_adam"] = Linear(prices.host_adam(on_host).seconds)
        delta["host_adam_copies"] = Linear(
            _copy(context.grad_bytes * on_host * still_on_device, "d2h", context)
            + _copy(context.weight_bytes * on_host, "h2d", context)
        )


def _boundary_terms(
    grid: StageGrid,
    boundary_bytes: Array,
    context: TimeContext,
    stable: dict[str, Linear],
    delta: dict[str, Linear],
) -> None:
    """Activations to the next stage and their gradients back. A stage with two neighbours meets two
    exchanges per micro-batch, one at each end of the pipeline, so that their sum over the stages is the 2 (S-1) hops of
    one micro-batch through the pipeline."""
    if grid.stages <= 1:
        return
    gpus = grid.nodes * grid.gpus_per_node
    share = boundary_crossing_share(grid.stages, gpus, context.cluster_gpus_per_node)
    inside, across = (
        context.prices.collective(
            "send_recv", boundary_bytes, np.asarray(2.0), np.asarray(nodes)
        ).seconds
        for nodes in (1.0, 2.0)
    )
    hop = (1.0 - share) * inside + share * across
    exchanges = 2.0 if grid.role is StageRole.MIDDLE else 1.0
    if grid.vpp > 1 and context.template.boundary_overlaps_when_interleaved:
        # Hidden in the steady state; the first and last micro-batch still wait for every hop.
        delta["pipeline_p2p"] = Linear(2.0 * (grid.stages - 1) * hop)
        return
    stable["pipeline_p2p"] = Linear(exchanges * grid.vpp * hop)


def _collective(
    kind: Collective, message_bytes: Array, grid: StageGrid, context: TimeContext
) -> Array:
    """Over the data-parallel group of the stage; nothing for a group of one."""
    if not np.any(grid.dp > 1.0):
        return ZERO
    stride = grid.tp * context.context_parallel
    nodes = np.minimum(nodes_spanned(grid.dp, stride, grid.gpus_per_node), grid.nodes)
    seconds = context.prices.collective(kind, message_bytes, grid.dp, nodes).seconds
    return np.where(grid.dp > 1.0, seconds, 0.0)


def _bucketed(kind: Collective, layer_bytes: Array, grid: StageGrid, context: TimeContext) -> Array:
    """A layer's share of full buckets: keeps overlapped traffic linear in layers."""
    if context.template.bucket_elements is None:
        return _collective(kind, layer_bytes, grid, context)
    bucket = _bucket_bytes(context.grad_bytes, grid, context)
    return _collective(kind, bucket, grid, context) * (layer_bytes / bucket)


def _whole_buckets(
    kind: Collective,
    whole_bytes: Array,
    bytes_per_element: float,
    grid: StageGrid,
    context: TimeContext,
) -> Array:
    if context.template.bucket_elements is None:
        return _collective(kind, whole_bytes, grid, context)
    bucket = np.minimum(_bucket_bytes(bytes_per_element, grid, context), whole_bytes)
    return _collective(kind, bucket, grid, context) * (whole_bytes / np.maximum(bucket, 1.0))


def _bucket_bytes(bytes_per_element: float, grid: StageGrid, context: TimeContext) -> Array:
    template = context.template
    elements = np.maximum(
        template.bucket_elements or 0.0, template.bucket_elements_per_rank * grid.dp
    )
    return np.asarray(bytes_per_element * elements, dtype=np.float64)


def _copy(copied_bytes: Array, direction: str, context: TimeContext) -> Array:
    if not np.any(copied_bytes):
        return ZERO
    if direction == "h2d":
        return context.prices.host_copy(copied_bytes, "h2d").seconds
    return context.prices.host_copy(copied_bytes, "d2h").seconds


def totals(terms: Mapping[str, Linear]) -> Linear:
    """The sum of all terms, still linear."""
    total = Linear()
    for term in terms.values():
        total = total + term
    return total
