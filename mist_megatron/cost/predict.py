"""Time and memory of one plan, with every term, from the evaluator that the search uses too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mist_megatron.cost.borders import busiest_link_s, exchanges_seconds
from mist_megatron.cost.chunk_ends import ChunkParts, chunk_parts
from mist_megatron.cost.closed_form import closed_form, refinement
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.flops import model_flops, peak_flops_per_s
from mist_megatron.cost.grid import LayerCount, StageGrid
from mist_megatron.cost.iteration import (
    NEVER_LATE,
    STEPS_LATER,
    IterationTime,
    Late,
    StageTiming,
    Stepping,
    balance,
    iteration_time,
)
from mist_megatron.cost.layerwise import parts_of
from mist_megatron.cost.placed import placed_stages
from mist_megatron.cost.refinement import Refinement
from mist_megatron.cost.sends import sent_forward_s
from mist_megatron.cost.terms import Linear, ending_terms, first_terms, steps_of, totals
from mist_megatron.spec.job import Job
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.schedule import in_flight, recomputed_per_chunk
from mist_megatron.spec.term import Term
from mist_megatron.targets.facts import TrafficFacts
from mist_megatron.targets.table import TARGETS


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """One stage: seconds and bytes, each total with the terms that it is the sum of."""

    stable_s: float
    delta_s: float
    forward_s: float
    """Forward part of `stable_s`, transfers to the next stage aside: what a simulator plays."""
    step_s: float
    """Part of `delta_s` that begins when the stage may step."""
    ending_s: float = 0.0
    """Part of `delta_s` that begins when the stage has done its last backward pass."""
    weight_grad_s: float
    peak_memory_bytes: float
    limit_bytes: float
    host_bytes: float
    """What a GPU of the stage keeps in host memory ..."""
    host_limit_bytes: float
    """... and may: infinite where nobody knows what its node has."""
    stable_terms_s: Mapping[Term, float]
    delta_terms_s: Mapping[Term, float]
    memory_terms_bytes: Mapping[str, float]
    peak_moment: str
    """When it holds most: forward, backward, loss, step, ..."""
    beyond_s: tuple[float, float] = (0.0, 0.0)
    """What the iteration counts of this stage beyond t and d, which are what a search adds up: layers of a
    stage that recomputes none, and borders to neighbours that differ."""
    forward_traffic_s: float = 0.0
    """What traffic makes forward passes longer."""
    first_s: float = 0.0
    """Part of `delta_s` for which the first forward pass stands still."""
    in_turn_s: float = 0.0
    """Part of `stable_s` that is not there while the pipeline fills and drains."""
    forward_exchange_s: float | None = None
    """What of `pipeline_p2p` is of forward passes, where neighbours or borders differ; else its role
    tells."""
    late: Late = NEVER_LATE
    """Activations that leave in the first pass, behind states."""
    stepping: Stepping = STEPS_LATER
    """What steps before first passes make others wait for."""
    chunks: ChunkParts | None = None
    """Its first and its last chunk, where it has several."""

    @property
    def fits(self) -> bool:
        return self.peak_memory_bytes <= self.limit_bytes and self.host_fits

    @property
    def host_fits(self) -> bool:
        """Whether the host has room for what is kept there."""
        return self.host_bytes <= self.host_limit_bytes


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One optimizer step of a plan."""

    time: IterationTime
    stages: tuple[StagePrediction, ...]
    samples_per_s: float
    tokens_per_s: float
    tflops_per_gpu: float
    """Model FLOPs (nothing recomputed counts) as Megatron-LM has counted since August 2025, which takes half
    of attention, the rest being masked; in TFLOP/s."""
    full_tflops_per_gpu: float
    """The same with all of attention, as it was before and elsewhere; `mfu` is this over the peak."""
    mfu: float
    measured_share: Mapping[str, float]
    """Share of layer time that the profile held exactly, interpolated, or extrapolated."""
    step_hides: bool = True
    """Whether a stage may step while those before it still drain."""

    @property
    def iteration_s(self) -> float:
        return self.time.total_s

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def alike(self) -> bool:
        """Whether layers have no strategies of their own."""
        return all(Term.RESHARDING not in stage.stable_terms_s for stage in self.stages)


def job_of(plan: Plan) -> Job:
    """What of a plan does not vary between stages and configurations."""
    return Job(
        model=plan.model,
        training=plan.training,
        cluster=plan.cluster,
        target=plan.target,
        execution=plan.execution,
    )


def bridged(plan: Plan) -> bool:
    """Whether a bridge carries activations between stages on different grids."""
    return plan.grids_differ and TARGETS[plan.target].capability.bridge is not None


def grids_of(plan: Plan) -> list[StageGrid]:
    """The configurations of a plan's stages, each where its ranks are."""
    placed = placed_stages(plan)
    return [replace(grid_of(plan, position), placed=where) for position, where in enumerate(placed)]


def grid_of(plan: Plan, position: int) -> StageGrid:
    """The one configuration of a plan's stage, as the evaluator asks for it, wherever it is."""
    stage, stages = plan.stages[position], len(plan.stages)
    chunks = plan.chunk_layers[position] if plan.vpp > 1 else None
    held = in_flight(plan.schedule, position, stages, plan.grad_accum, plan.vpp, chunks)
    grid = StageGrid(
        role=role_of(position, stages),
        nodes=stage.nodes,
        gpus_per_node=stage.gpus_per_node,
        sequence_parallel=plan.sequence_parallel,
        recompute=stage.recompute,
        layers=_one(stage.layers),
        ckpt=_one(stage.ckpt),
        in_flight=_one(held),
        micro_batch=_one(stage.micro_batch),
        dp=_one(stage.dp),
        tp=_one(stage.tp),
        zero=_one(stage.zero),
        grad_accum=_one(plan.grad_accum),
        offload=stage.offload.map(_one),
        ep=_one(plan.execution.ep),
        etp=_one(plan.execution.etp),
        instances=_one(stage.mesh(plan.execution).instances),
        stages=stages,
        vpp=plan.vpp,
        lone_layers_wait=stages > 1,
        bridged=bridged(plan),
        group=plan.group_of_stage[position],
        crossed=_crossed(plan, position),
    )
    return replace(grid, **_layers_of(plan, position), end_chunks=_end_chunks(plan, position))


def _end_chunks(plan: Plan, position: int) -> tuple[tuple[LayerCount, ...], ...]:
    """Layers of the first and of the last chunk, where chunks are not alike."""
    kinds, of_layer = range(len(plan.model.kinds)), plan.model.kind_of_layer
    counts = [
        tuple(
            (sum(of_layer[k] == kind for k in chunk), sum(of_layer[k] == kind for k in some))
            for kind in kinds
        )
        for chunk, some in zip(plan.layers_of(position), recomputed_layers(plan, position), strict=True)
    ]
    if len(set(counts)) == 1:
        return ()
    return tuple(tuple(LayerCount(*map(_one, pair)) for pair in counts[end]) for end in (0, -1))


def _crossed(plan: Plan, position: int) -> tuple[bool, ...]:
    """Which of the stage's borders lie between nodes, where stages share a node; chunks pass all."""
    last = len(plan.stages) - 1
    if plan.vpp > 1 or not last or plan.stages[position].gpus >= plan.cluster.linked_gpus:
        return ()
    lefts = (left for left in (position - 1, position) if 0 <= left < last)
    return tuple(plan.hop_across(left, left + 1) for left in lefts)


def _layers_of(plan: Plan, position: int) -> dict[str, Any]:
    known = _kinds_of(plan, position)
    return {**known, **parts_of(plan, position)} if plan.stages[position].strategies else known


def _kinds_of(plan: Plan, position: int) -> dict[str, Any]:
    """What the layers of a stage are, where a model has several kinds."""
    kinds, of_layer = plan.model.kinds, plan.model.kind_of_layer
    if len(kinds) == 1:
        return {}
    chunks = plan.layers_of(position)
    again = [layer for chunk in recomputed_layers(plan, position) for layer in chunk]
    layers = [layer for chunk in chunks for layer in chunk]
    counts = [
        LayerCount(*(_one(sum(of_layer[layer] == place for layer in some)) for some in (layers, again)))
        for place in range(len(kinds))
    ]
    return {
        "counts": tuple(counts),
        "runs": tuple((of_layer[chunk[0]], of_layer[chunk[-1]]) for chunk in chunks if chunk),
        "before": of_layer[chunks[0].start - 1] if chunks[0].start and not plan.model.alike else None,
    }


def recomputed_layers(plan: Plan, position: int) -> tuple[range, ...]:
    """Of each chunk of a stage, the layers that are recomputed in full: which ones follows the target
    (Megatron's block method takes a chunk's first ones, Mist's runtime a stage's last)."""
    first = TARGETS[plan.target].memory(plan.execution).recomputes_first_layers
    ckpt, chunk_layers = plan.stages[position].ckpt, plan.chunk_layers[position]
    again = recomputed_per_chunk(chunk_layers, ckpt)
    # As many of each chunk where the target runs it; a what-if plan may leave a rest to the first chunks.
    each, rest = divmod(ckpt, plan.vpp)
    counts = [each + (chunk < rest) for chunk in range(plan.vpp)]
    if again is not None:
        counts = [min(again, layers) for layers in chunk_layers]
    chunks = zip(plan.layers_of(position), counts, strict=True)
    return tuple(chunk[:count] if first else chunk[len(chunk) - count :] for chunk, count in chunks)


def predict(plan: Plan, evaluator: StageEvaluator) -> Prediction:
    """Price every stage and put them together; `evaluator` is of `job_of(plan)`."""
    grids = grids_of(plan)
    stages = priced_stages(plan, grids, evaluator)
    time = iteration_of(plan, grids, stages, evaluator, plan.grad_accum)
    training = plan.training
    tokens = training.global_batch * training.seq_len
    gpu_s = plan.cluster.gpus * time.total_s
    flops, causal = (model_flops(plan.model, training, causal=half) / gpu_s for half in (False, True))
    return Prediction(
        time=time,
        stages=stages,
        samples_per_s=training.global_batch / time.total_s,
        tokens_per_s=tokens / time.total_s,
        tflops_per_gpu=causal / 1e12,
        full_tflops_per_gpu=flops / 1e12,
        mfu=flops / _mean_peak_flops_per_s(plan),
        measured_share=_measured_share(plan, evaluator),
        step_hides=evaluator.time_context.facts.step.hides,
    )


def priced_stages(
    plan: Plan,
    grids: Sequence[StageGrid],
    evaluator: StageEvaluator,
    alone: Iterable[StagePrediction] | None = None,
) -> tuple[StagePrediction, ...]:
    """The stages of a plan, `grids` being their configurations, with what really crosses their borders;
    `alone` is each for itself, where that is known."""
    stages = tuple(alone or (predicted_stage(grid, evaluator) for grid in grids))
    if plan.vpp == 1 and Term.PIPELINE_P2P not in evaluator.time_context.without:
        for position, (there_s, back_s) in exchanges_seconds(plan, grids, evaluator).items():
            stages = _with_exchanges(stages, position, there_s, back_s)
    return stages


def iteration_of(
    plan: Plan,
    grids: Sequence[StageGrid],
    stages: Sequence[StagePrediction],
    evaluator: StageEvaluator,
    grad_accum: int,
) -> IterationTime:
    """The stages put together, and no less than the link that carries most."""
    timings = [timing_of(stages, position) for position in range(len(stages))]
    hides = evaluator.time_context.facts.step.hides
    time = iteration_time(timings, grad_accum, plan.schedule, plan.vpp, step_hides=hides)
    return time.no_shorter_than(busiest_link_s(plan, grids, evaluator, time.behind_s))


def _with_exchanges(
    stages: tuple[StagePrediction, ...], position: int, there_s: float, back_s: float
) -> tuple[StagePrediction, ...]:
    """A stage that differs from a neighbour, with what really crosses its borders."""
    stage = stages[position]
    more_s = there_s + back_s - stage.stable_terms_s.get(Term.PIPELINE_P2P, 0.0)
    beyond_s = stage.beyond_s[0] + more_s, stage.beyond_s[1]
    changed = replace(stage, beyond_s=beyond_s, forward_exchange_s=there_s)
    return (*stages[:position], changed, *stages[position + 1 :])


def in_turn_share(facts: TrafficFacts) -> float:
    """Of what a stage sends per micro-batch, the part that waits for what comes from the other side: there
    while both do."""
    return 0.5 if facts.pipeline.sends_in_turn else 0.0


def timing_of(stages: Sequence[StagePrediction], position: int) -> StageTiming:
    """A stage as the iteration formula knows it. The first stage hands on forward passes only, the last one
    backward passes only, but for those of chunks that go round."""
    stage, terms = stages[position], stages[position].stable_terms_s
    forward_s = stage.forward_s + stage.forward_traffic_s
    shares = _forward_shares(role_of(position, len(stages)) if stage.chunks is None else StageRole.MIDDLE)
    if stage.forward_exchange_s is not None:
        forward_s += stage.forward_exchange_s
        del shares[Term.PIPELINE_P2P]
    for name, share in shares.items():
        apart_s = stage.in_turn_s if name is Term.PIPELINE_P2P else 0.0
        forward_s += share * (terms.get(name, 0.0) - apart_s)
    stable_s = stage.stable_s + stage.beyond_s[0]
    forward_s = min(forward_s, stable_s)
    return StageTiming(
        stable_s=stable_s,
        delta_s=stage.delta_s + stage.beyond_s[1],
        forward_s=forward_s,
        first_s=stage.first_s,
        in_turn_s=stage.in_turn_s,
        step_s=stage.step_s,
        ending_s=stage.ending_s,
        weight_grad_s=stage.weight_grad_s,
        late=stage.late,
        stepping=stage.stepping,
        chunks=None if stage.chunks is None else stage.chunks.ends(stable_s, forward_s),
    )


def _forward_shares(role: StageRole) -> dict[Term, float]:
    """What forward passes have of the terms of t that are not layers'."""
    sent = 0.0 if role.has_head else 1.0 if role is StageRole.FIRST else 0.5
    return {Term.PIPELINE_P2P: sent, Term.HOST_WORK: 0.5}


def refined(evaluator: StageEvaluator, grid: StageGrid) -> Refinement:
    """What a search leaves out of many configurations at once."""
    return refinement(evaluator.work(grid))


def predicted_stage(grid: StageGrid, evaluator: StageEvaluator) -> StagePrediction:
    """One stage for itself; what crosses its borders to stages that differ is not in it."""
    evaluator = evaluator.of(grid)
    work, facts = evaluator.work(grid), evaluator.time_context.facts
    terms, fine, parts = closed_form(work), refinement(work), evaluator.passes(grid)
    stable_terms_s, delta_terms_s = _at(terms.stable, grid), _at(terms.delta, grid)
    steps, whole = steps_of(delta_terms_s, facts), totals(terms.stable)
    told = Term.PIPELINE_P2P in stable_terms_s and grid.placed is None and not in_turn_share(facts)
    uneven = told and len(set(grid.crossed)) > 1
    late = fine.late_s, fine.behind_all_s, fine.behind_own_s, fine.hidden_share
    return StagePrediction(
        stable_s=whole.at(grid).item(),
        delta_s=totals(terms.delta).at(grid).item(),
        forward_s=parts["forward_s"].item(),
        step_s=sum(delta_terms_s.get(name, 0.0) for name in steps),
        ending_s=sum(delta_terms_s.get(name, 0.0) for name in ending_terms(delta_terms_s, facts)),
        first_s=sum(delta_terms_s.get(name, 0.0) for name in first_terms(facts)),
        in_turn_s=in_turn_share(facts) * stable_terms_s.get(Term.PIPELINE_P2P, 0.0),
        weight_grad_s=parts["weight_grad_s"].item(),
        peak_memory_bytes=evaluator.peak_bytes(grid).item(),
        limit_bytes=evaluator.limit_bytes,
        host_bytes=float(evaluator.host_bytes(grid)),
        host_limit_bytes=evaluator.host_limit_bytes,
        stable_terms_s=stable_terms_s,
        delta_terms_s=delta_terms_s,
        memory_terms_bytes={name: v.item() for name, v in evaluator.memory_terms(grid).items()},
        peak_moment=evaluator.peak_moment(grid),
        beyond_s=(fine.stable_s.item(), fine.delta_s.item()),
        forward_traffic_s=fine.forward_s.item(),
        forward_exchange_s=sent_forward_s(work).item() if uneven else None,
        late=Late(*(part.item() for part in late)),
        stepping=_stepping(delta_terms_s, fine, facts),
        chunks=chunk_parts(work, whole, terms.stable, fine.stable_s),
    )


def _stepping(delta_s: Mapping[Term, float], fine: Refinement, facts: TrafficFacts) -> Stepping:
    """Of a stage whose d has these terms."""
    if facts.step.taken != "while_waiting":
        return STEPS_LATER
    tied_s, begins = delta_s.get(Term.TIED_EMBEDDINGS), [Term.FIRST_FORWARD_TRAFFIC, Term.OPTIMIZER_COMPUTE]
    host_s, after_all = delta_s.get(Term.HOST_STEP, 0.0), facts.step.norm_pass
    if after_all:
        begins += [Term.EMBEDDING_TRAFFIC, Term.HEAD_TRAFFIC, Term.HOST_ADAM, Term.HOST_STEP]
    return Stepping(
        begins_s=sum(delta_s.get(name, 0.0) for name in begins),
        together_s=0.0 if tied_s is None else tied_s + (0.0 if after_all else host_s),
        after_all=after_all,
        second_s=fine.second_s.item(),
        cycle_s=fine.cycle_s.item(),
    )


def _at(terms: Mapping[Term, Linear], grid: StageGrid) -> dict[Term, float]:
    return {name: term.at(grid).item() for name, term in terms.items()}


def _measured_share(plan: Plan, evaluator: StageEvaluator) -> dict[str, float]:
    """Weighted by each stage's layer time, the slowest stages counting most."""
    sums = {"exact": 0.0, "interpolated": 0.0, "extrapolated": 0.0}
    for position in range(len(plan.stages)):
        grid = grid_of(plan, position)
        for name, seconds in evaluator.of(grid).provenance(grid).items():
            sums[name] += float(seconds)
    total = sum(sums.values())
    return {name: seconds / total if total > 0.0 else 0.0 for name, seconds in sums.items()}


def _mean_peak_flops_per_s(plan: Plan) -> float:
    """Of its GPUs, where they are of several kinds."""
    kinds = plan.cluster.kinds
    peaks = [peak_flops_per_s(kinds[group], plan.training) for group in plan.group_of_stage]
    return sum(peak * stage.gpus for peak, stage in zip(peaks, plan.stages, strict=True)) / plan.gpus


def binding(prediction: Prediction) -> dict[str, Any]:
    """What holds the plan back: the slowest stage and its largest term, and the fullest stage."""
    slowest = prediction.time.slowest_stage
    fullest = max(
        range(len(prediction.stages)),
        key=lambda i: prediction.stages[i].peak_memory_bytes / prediction.stages[i].limit_bytes,
    )
    time_terms = prediction.stages[slowest].stable_terms_s
    stage = prediction.stages[fullest]
    return {
        "slowest_stage": slowest,
        "largest_time_term": max(time_terms, key=lambda name: time_terms[name]).value,
        "fullest_stage": fullest,
        "memory_used_fraction": stage.peak_memory_bytes / stage.limit_bytes,
        "largest_memory_term": max(stage.memory_terms_bytes, key=lambda name: stage.memory_terms_bytes[name]),
        "peak_moment": stage.peak_moment,
    }


def balance_degrees(prediction: Prediction) -> tuple[float, float]:
    """Galvatron-BMW's alpha_t and alpha_m."""
    times = [stage.stable_s + stage.beyond_s[0] for stage in prediction.stages]
    return balance(times), balance([stage.peak_memory_bytes for stage in prediction.stages])


def prediction_document(prediction: Prediction) -> dict[str, Any]:
    """The JSON of `predict --json` and of a plan's `prediction`: seconds and bytes throughout."""
    time = prediction.time
    return {
        "iteration_s": time.total_s,
        "samples_per_s": prediction.samples_per_s,
        "tokens_per_s": prediction.tokens_per_s,
        "tflops_per_gpu": prediction.tflops_per_gpu,
        "full_tflops_per_gpu": prediction.full_tflops_per_gpu,
        "mfu": prediction.mfu,
        "fits": prediction.fits,
        "bubble_fraction": time.bubble_fraction,
        "terms_s": {
            "steady": time.steady_s,
            "ramp": time.ramp_s,
            "first_and_last": time.first_and_last_s,
        },
        "binding": binding(prediction),
        "measured_share": dict(prediction.measured_share),
        **({} if prediction.alike else {"balance": [*balance_degrees(prediction)]}),
        "stages": [_stage_document(stage) for stage in prediction.stages],
    }


def _stage_document(stage: StagePrediction) -> dict[str, Any]:
    beyond_s = dict(zip(("stable", "delta"), stage.beyond_s, strict=True))
    return {
        "stable_s": stage.stable_s,
        "delta_s": stage.delta_s,
        "forward_s": stage.forward_s,
        "step_s": stage.step_s,
        "weight_grad_s": stage.weight_grad_s,
        "peak_memory_bytes": stage.peak_memory_bytes,
        "limit_bytes": stage.limit_bytes,
        "host_bytes": stage.host_bytes,
        "host_limit_bytes": stage.host_limit_bytes if math.isfinite(stage.host_limit_bytes) else None,
        "fits": stage.fits,
        "memory": dict(stage.memory_terms_bytes),
        "stable_terms_s": {term.value: seconds for term, seconds in stage.stable_terms_s.items()},
        "delta_terms_s": {term.value: seconds for term, seconds in stage.delta_terms_s.items()},
        **({"beyond_s": beyond_s} if any(stage.beyond_s) else {}),
    }


def _one(value: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(float(value))
