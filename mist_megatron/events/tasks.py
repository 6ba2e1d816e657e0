"""What a stage has to do, layer by layer and chunk by chunk, laid out for playing.

Nothing is composed or priced here: this takes one row of `cost.work.StageWork`, which the closed form adds
up. Every distinct stage is asked for once, and every kind of layer is then reused for all of its layers,
micro-batches and data-parallel replicas (DistSim's observation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mist_megatron.cost.borders import Border, border_seconds
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.neighbours import in_buckets
from mist_megatron.cost.predict import grid_of, grids_of, recomputed_layers
from mist_megatron.cost.terms import LayerLoad
from mist_megatron.cost.traffic import gathers_by_chunk, reduces_by_chunk
from mist_megatron.cost.turning import found_there, last_layer_stays
from mist_megatron.cost.work import LayerWork, PassWork, StageWork
from mist_megatron.events.engine import Stream
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.passes import Pass, PassKind
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.term import Term


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTasks:
    """One pass over one layer, in the order in which it is played."""

    blocking_gather_s: float = 0.0
    step_s: float = 0.0
    """Optimizer step of the layer, where the target takes it just before the first forward."""
    recompute_s: float = 0.0
    compute_s: float = 0.0
    weight_s: float = 0.0
    """Part of compute that only makes weight gradients."""
    accumulate_s: float = 0.0
    """After compute, from the second micro-batch on."""
    inside_s: float = 0.0
    """Part of compute that experts do while tokens are with them."""
    sent_s: float = 0.0
    """Tokens on their way to experts and back, one as long as the other, as far as they stop compute."""
    tensor_s: float = 0.0
    blocking_reduce_s: float = 0.0
    gather_s: float = 0.0
    copy_in_s: float = 0.0
    reduce_s: float = 0.0
    copy_out_s: float = 0.0

    @property
    def serial_s(self) -> float:
        """Of the second and later micro-batches, when nothing that runs beside compute holds it up."""
        before_s = self.blocking_gather_s + self.step_s + self.recompute_s
        stopped_s = self.sent_s + self.tensor_s + self.blocking_reduce_s
        return before_s + self.compute_s + self.accumulate_s + stopped_s


def around_experts(name: str, work: PassTasks, compute_s: float) -> tuple[tuple[str, Stream, float], ...]:
    """The compute of a pass with the journeys of tokens in it: tokens leave, experts compute, and results
    come back; backward passes send the gradients of results first."""
    if work.sent_s <= 0.0:
        return ((name, Stream.COMPUTE, compute_s),)
    inside_s = min(work.inside_s, compute_s)
    there, back = ("dispatch", "combine") if name == "forward" else ("combine", "dispatch")
    outside = (name, Stream.COMPUTE, compute_s - inside_s)
    journeys = (
        (there, Stream.GPU_TO_GPU, work.sent_s / 2.0),
        (name, Stream.COMPUTE, inside_s),
        (back, Stream.GPU_TO_GPU, work.sent_s / 2.0),
    )
    return (outside, *journeys) if name == "forward" else (*journeys, outside)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTasks:
    """The four passes of a kind of layer."""

    first: PassTasks
    forward: PassTasks
    backward: PassTasks
    last: PassTasks


@dataclass(frozen=True, slots=True)
class NamedLayer:
    """A layer of the model on its stage."""

    name: str
    work: LayerTasks
    between: bool = False
    """It sends no activations off, but other kinds of layers do, whose copies run on beside it."""
    in_buckets: bool = False
    """Its weights come once a step, in buckets with those of other kinds of layers."""

    def arriving_s(self, streams: PassTasks, beside: NamedLayer | None) -> float:
        """What is gathered for such a pass of it while another layer computes. Of buckets that mix kinds of
        layers what comes then is that layer's share, whichever layer it is for: as measured hybrids have it
        (`cost.neighbours`)."""
        mixed = beside is not None and beside.in_buckets and self.in_buckets
        return beside.work.first.gather_s if mixed and beside is not None else streams.gather_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTasks:
    """Once per iteration, after the last backward pass."""

    visits_s: float = 0.0
    """Offloaded states come to the device for what follows."""
    turn_round: bool = False
    """Those on their way out do so: nobody waits until they are gone."""
    reduction_s: float
    tied_s: float
    optimizer_s: float
    """What of the update, and of the gradient norm, is not part of a layer's first pass."""
    host_adam_s: float
    host_copies_s: float
    gather_s: float
    host_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTasks:
    """Everything a stage does in an iteration."""

    chunks: tuple[tuple[NamedLayer, ...], ...]
    """Layers of each chunk, in forward order."""
    host_s: float
    """Per micro-batch, forward and backward together."""
    hop_inside_s: float
    """One boundary tensor to a stage on the same node ..."""
    hop_across_s: float
    """... and on another."""
    step: StepTasks
    hand_on_s: float = 0.0
    """One that came over a bridge, to the rest of the tensor-parallel group."""
    between_nodes: frozenset[str] = frozenset()
    """Kinds of its collectives that have ranks on several nodes."""

    @property
    def pass_s(self) -> tuple[float, float, float]:
        """Forward, backward without weight gradients, and weight gradients, alone."""
        layers = [layer.work for chunk in self.chunks for layer in chunk]
        forward_s = sum(work.forward.serial_s for work in layers)
        backward_s = sum(work.backward.serial_s for work in layers)
        weight_s = sum(work.backward.weight_s for work in layers)
        return forward_s, backward_s - weight_s, weight_s


@dataclass(frozen=True)
class Workload:
    """The stages of a plan, and what holds for all of them."""

    plan: Plan
    stages: tuple[StageTasks, ...]
    prices: int
    """Distinct layer passes and transfers that were priced."""
    interference: np.ndarray[Any, np.dtype[np.float64]]
    step_waits_for_all: bool
    """The step needs the gradient norm over all stages first."""
    steps_early: bool
    """Each layer steps before its first forward, not at the end of the iteration, as soon as the iteration
    before has ended."""
    sends_overlap: bool
    """Stages compute on while a boundary tensor leaves."""
    reduces_by_chunk: bool = False
    """Reductions of a last backward pass begin when it has ended."""
    gathers_by_chunk: bool = False
    """Weights are gathered ahead of the first forward pass of their chunk."""
    steps_on_arrival: bool = False
    """Each layer steps before its first forward, when its stage's input has come."""
    copies_on_arrival: bool = False
    """Copies in for the first layer of a pass begin when the pass's input has come."""
    sends_in_turn: bool = False
    """Neighbours stop for each other, and send one after the other."""
    tied_before_reduction: bool = False
    leaves_by_modules: bool = False
    """Activations leave by modules of layers: backward passes wait for none that leave but their own."""
    borders: Mapping[Border, tuple[float, float]] = field(default_factory=dict)
    """Transfers forward and backward between neighbours that differ."""


def workload_of(plan: Plan, evaluator: StageEvaluator) -> Workload:
    """Ask the cost model for every distinct stage of a plan; `evaluator` is of `job_of(plan)`."""
    context = evaluator.time_context
    kinds: dict[object, tuple[_Kinds, StageTasks]] = {}
    stages = []
    grids = grids_of(plan)
    for position, stage in enumerate(plan.stages):
        grid = grids[position]
        key = (grid.role, stage, grid.group, grid.placed, _kinds_in(plan, position))
        if key not in kinds:
            kinds[key] = _priced(grid, evaluator.of(grid))
        layer_kinds, work = kinds[key]
        chunks, crossing = _chunks(plan, position, layer_kinds), _between_nodes(plan, position)
        stages.append(replace(work, chunks=chunks, between_nodes=crossing))
    prices = {work for layer_kinds, _ in kinds.values() for work in layer_kinds.passes()}
    facts = context.facts
    return Workload(
        plan=plan,
        stages=tuple(stages),
        prices=len(prices) + 2 * len(kinds),
        interference=np.stack([evaluator.of(grid).time_context.interference for grid in grids]),
        step_waits_for_all=facts.step.norm_pass,
        steps_early=facts.step.taken == "while_waiting",
        steps_on_arrival=facts.step.taken == "on_arrival",
        sends_overlap=plan.vpp > 1 and facts.pipeline.sends_overlap_when_interleaved,
        reduces_by_chunk=any(reduces_by_chunk(grid, facts) for grid in grids),
        gathers_by_chunk=any(gathers_by_chunk(grid, facts) for grid in grids),
        copies_on_arrival=facts.host_copies.on_arrival,
        sends_in_turn=facts.pipeline.sends_in_turn,
        tied_before_reduction=facts.reduction.tied_first,
        leaves_by_modules=facts.host_copies.last_comes_early,
        borders=border_seconds(plan, grids, evaluator),
    )


def _between_nodes(plan: Plan, position: int) -> frozenset[str]:
    """Kinds of a stage's collectives that have ranks on several nodes."""
    groups = {
        "tensor-parallel collective": Group.TENSOR,
        "dispatch": Group.EXPERT_ALL,
        "combine": Group.EXPERT_ALL,
        "weight gather": Group.SHARDS,
        "gradient reduction": Group.DATA,
    }
    return frozenset(
        kind
        for kind, group in groups.items()
        if any(len(plan.nodes_of(ranks)) > 1 for ranks in plan.groups(position, group))
    )


@dataclass(frozen=True)
class _Kinds:
    """The kinds of layers of a stage."""

    blocks: tuple[tuple[LayerTasks, LayerTasks], ...]
    """Of each kind of transformer layer: kept, and recomputed."""
    last_kept: tuple[LayerTasks, ...]
    """The last layer of a pass, if it is kept, of each kind, ..."""
    very_last: tuple[LayerTasks, ...]
    """... and that of the model."""
    resharding_s: tuple[tuple[float, float], ...]
    """Before layers of each kind, forward and backward, where each run of layers is a kind of its own; before
    a head with its own strategy besides."""
    embedding: LayerTasks | None
    head: LayerTasks | None
    in_buckets: bool = False
    """Weights of layers come once a step, in buckets that mix their kinds."""

    def passes(self) -> list[PassTasks]:
        layers = [one for both in self.blocks for one in both]
        kinds = [k for k in (*layers, self.embedding, self.head) if k is not None]
        return [one for k in kinds for one in (k.first, k.forward, k.backward, k.last)]


def _priced(grid: StageGrid, evaluator: StageEvaluator) -> tuple[_Kinds, StageTasks]:
    work = evaluator.work(grid)
    blocks, last_kept, very_last, stays = [], [], [], last_layer_stays(work)
    for block, load in zip(work.blocks, work.loads.blocks, strict=True):
        kept = _layer(block.kept)
        last_kept.append(_without_arrivals(kept, load, work) if stays else kept)
        leaves = not work.context.facts.host_copies.last_comes_early
        very_last.append(last_kept[-1] if leaves else _without_departures(last_kept[-1]))
        blocks.append((kept, kept if block.recomputed is block.kept else _layer(block.recomputed)))
    embedding, head = (None if edge is None else _layer(edge) for edge in (work.embedding, work.head))
    step = {term: float(seconds.at(grid)) for term, seconds in work.step.items()}
    tasks = StageTasks(
        chunks=(),
        host_s=float(work.host_s),
        hop_inside_s=float(work.boundary.inside_s),
        hop_across_s=float(work.boundary.across_s),
        step=StepTasks(
            visits_s=step.get(Term.STATES_AT_STEP, 0.0),
            turn_round=work.context.facts.host_copies.states_visit,
            reduction_s=step.get(Term.GRADIENT_REDUCTION, 0.0),
            tied_s=step.get(Term.TIED_EMBEDDINGS, 0.0),
            optimizer_s=step.get(Term.OPTIMIZER_COMPUTE, 0.0),
            host_adam_s=step.get(Term.HOST_ADAM, 0.0),
            host_copies_s=step.get(Term.HOST_ADAM_COPIES, 0.0),
            gather_s=step.get(Term.WEIGHT_GATHER, 0.0),
            host_s=step.get(Term.HOST_STEP, 0.0),
        ),
        hand_on_s=float(work.boundary.handed_on_s),
    )
    resharding_s = tuple((float(there), float(back)) for there, back in work.resharding_s)
    kinds = _Kinds(
        tuple(blocks), tuple(last_kept), tuple(very_last), resharding_s, embedding, head, in_buckets(work)
    )
    return kinds, tasks


def _without_arrivals(kept: LayerTasks, load: LayerLoad, work: StageWork) -> LayerTasks:
    """A layer whose backward pass finds on the device what its forward pass sends off."""
    quiet = _layer(found_there(work, load))
    return replace(
        kept,
        backward=replace(kept.backward, copy_in_s=quiet.backward.copy_in_s),
        last=replace(kept.last, copy_in_s=quiet.last.copy_in_s),
    )


def _without_departures(kept: LayerTasks) -> LayerTasks:
    """A layer of which Megatron's offload by modules sends nothing off, because its backward pass comes next
    (`should_bulk_offload` of fine_grained_activation_offload.py)."""
    out_s = kept.forward.copy_out_s
    return replace(
        kept,
        forward=replace(kept.forward, copy_out_s=0.0),
        first=replace(kept.first, copy_out_s=kept.first.copy_out_s - out_s),
    )


def _layer(work: LayerWork) -> LayerTasks:
    step_s, again_s = float(work.traffic.step_compute_s), float(work.recompute_s)
    weight_s = float(work.load.weight_grad_s)

    def backward(streams: PassWork) -> PassTasks:
        tasks = _pass(streams, less_s=again_s)
        # Waiting for the host is part of compute: weight gradients cannot be more than what is left.
        return replace(
            tasks,
            recompute_s=again_s,
            weight_s=min(weight_s, tasks.compute_s),
            accumulate_s=float(work.accumulate_s),
        )

    return LayerTasks(
        first=replace(_pass(work.first, less_s=step_s), step_s=step_s),
        forward=_pass(work.forward),
        backward=backward(work.backward),
        last=backward(work.last),
    )


def _pass(streams: PassWork, less_s: float = 0.0) -> PassTasks:
    """`less_s` of compute is told apart from the rest by the caller."""
    return PassTasks(
        blocking_gather_s=float(streams.blocking_gather_s),
        compute_s=max(float(streams.compute_s) - less_s, 0.0),
        inside_s=float(streams.inside_s),
        sent_s=float(streams.sent_s),
        tensor_s=float(streams.tensor_s - streams.sent_s),
        blocking_reduce_s=float(streams.blocking_reduce_s),
        gather_s=float(streams.gather_s),
        copy_in_s=float(streams.copy_in_s),
        reduce_s=float(streams.reduce_s),
        copy_out_s=float(streams.copy_out_s),
    )


def _kinds_in(plan: Plan, position: int) -> tuple[tuple[int, ...], ...]:
    """Kinds of the layers of a stage's chunks, where a model has several."""
    if len(plan.model.kinds) == 1:
        return ()
    return tuple(plan.model.kind_of_layer[chunk.start : chunk.stop] for chunk in plan.layers_of(position))


def _chunks(plan: Plan, position: int, kinds: _Kinds) -> tuple[tuple[NamedLayer, ...], ...]:
    """Layers of every chunk."""
    vpp, last, of_layer = plan.vpp, len(plan.stages) - 1, plan.model.kind_of_layer
    if plan.stages[position].strategies:
        return (_runs(plan, position, kinds),)
    chunks, again = plan.layers_of(position), recomputed_layers(plan, position)
    sends = [kept.forward.copy_out_s > 0.0 for kept, _ in kinds.blocks]
    played = []
    for chunk in range(vpp):
        layers = [
            NamedLayer(
                f"layer {layer}",
                kinds.blocks[of_layer[layer]][layer in again[chunk]],
                between=any(sends) and not sends[of_layer[layer]],
                in_buckets=kinds.in_buckets,
            )
            for layer in chunks[chunk]
        ]
        end = max((k for k in chunks[chunk] if sends[of_layer[k]]), default=chunks[chunk].stop - 1)
        if layers and end not in again[chunk]:
            place = end - chunks[chunk].start
            ended = kinds.very_last if (position, chunk) == (last, vpp - 1) else kinds.last_kept
            layers[place] = replace(layers[place], work=ended[of_layer[end]])
        if position == 0 and chunk == 0 and kinds.embedding is not None:
            layers.insert(0, NamedLayer("embedding", kinds.embedding))
        if position == last and chunk == vpp - 1 and kinds.head is not None:
            layers.append(NamedLayer("head", kinds.head))
        played.append(tuple(layers))
    return tuple(played)


def _runs(plan: Plan, position: int, kinds: _Kinds) -> tuple[NamedLayer, ...]:
    """Layers of a stage whose runs have strategies of their own."""
    counts = [int(part.layers) for part in grid_of(plan, position).parts]
    layers, at = [], plan.layers_of(position)[0].start
    for count, (work, _), moved_s in zip(counts, kinds.blocks, kinds.resharding_s, strict=False):
        first = _resharded(work, moved_s)
        layers += [NamedLayer(f"layer {at + k}", work if k else first) for k in range(count)]
        at += count
    begin = [] if kinds.embedding is None else [NamedLayer("embedding", kinds.embedding)]
    before_head_s = (*kinds.resharding_s[len(counts) :], (0.0, 0.0))[0]
    end = [] if kinds.head is None else [NamedLayer("head", _resharded(kinds.head, before_head_s))]
    return (*begin, *layers, *end)


def _resharded(work: LayerTasks, seconds: tuple[float, float]) -> LayerTasks:
    """With what it waits for where its activations come from another layout, forward and backward."""
    there_s, back_s = seconds
    return replace(
        work,
        first=_stopped(work.first, there_s),
        forward=_stopped(work.forward, there_s),
        backward=_stopped(work.backward, back_s),
        last=_stopped(work.last, back_s),
    )


def _stopped(work: PassTasks, seconds: float) -> PassTasks:
    """With a collective more that compute waits for."""
    return replace(work, tensor_s=work.tensor_s + seconds)


def sends_tokens(stage: StageTasks) -> bool:
    """Whether any of its layers stops for tokens on their way to experts."""
    return any(layer.work.forward.sent_s > 0.0 for chunk in stage.chunks for layer in chunk)


Chain = tuple[tuple[str, str, Stream, float], ...]
"""Kind, name, stream and seconds of each."""


def reduced(stage: StageTasks, *, alone: bool) -> Chain:
    """Once per iteration, one after another: all gradients at once, if it is their turn."""
    return (("gradient reduction", "all gradients", Stream.GPU_TO_GPU, stage.step.reduction_s * alone),)


def on_arrival(stage: StageTasks) -> Chain:
    """What of a step that each layer takes before its first forward pass stops that pass."""
    return (
        ("host Adam", "host Adam", Stream.HOST, stage.step.host_adam_s),
        ("weight gather", "all weights", Stream.GPU_TO_GPU, stage.step.gather_s),
    )


def end_of_iteration(stage: StageTasks, steps_on_arrival: bool) -> Chain:
    """The update and what surrounds it."""
    step = stage.step
    adam, gathered = on_arrival(stage)
    return (
        ("optimizer step", "optimizer step", Stream.COMPUTE, step.optimizer_s),
        *(() if steps_on_arrival else (adam,)),
        ("copy in", "updated weights", Stream.HOST_TO_DEVICE, step.host_copies_s),
        *(() if steps_on_arrival else (gathered,)),
        ("host work", "end of step", Stream.HOST, step.host_s),
    )


def chain_of(step: Pass, work: PassTasks, *, split: bool) -> tuple[tuple[str, Stream, float], ...]:
    """What of a layer pass is one after another; `split` where weights' gradients are a pass of their own."""
    compute, network = Stream.COMPUTE, Stream.GPU_TO_GPU
    gather = ("weight gather", network, work.blocking_gather_s)
    tensor = ("tensor-parallel collective", network, work.tensor_s)
    reduce = ("gradient reduction", network, work.blocking_reduce_s)
    again = ("recompute", compute, work.recompute_s)
    # The first micro-batch has nothing to add to.
    added_s = work.accumulate_s if step.micro_batch else 0.0
    added = ("gradient accumulation", compute, added_s)
    if step.kind is PassKind.FORWARD:
        stepped = ("optimizer step", compute, work.step_s)
        return gather, stepped, *around_experts("forward", work, work.compute_s), tensor
    if step.kind is PassKind.WEIGHT:
        return ("weight gradient", compute, work.weight_s), added, reduce
    if split:
        return gather, again, *around_experts("backward", work, work.compute_s - work.weight_s), tensor
    return gather, again, *around_experts("backward", work, work.compute_s), added, tensor, reduce
