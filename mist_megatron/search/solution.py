"""What a search finds: plans as rows of configurations, with the time that `predict` tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import predict
from mist_megatron.search.pipelines import EqualPipeline, MixedPipeline, copies_weights
from mist_megatron.search.stage_fronts import StageConfigs, Tally
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import KINDS, Offload
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan, Zero
from mist_megatron.spec.recompute import RECOMPUTE_KINDS
from mist_megatron.spec.schedule import usual_schedule
from mist_megatron.spec.strategies import LayerRun

StageChoice = dict[str, float]
"""Layers and one value per axis: what a stage of a solution runs."""


@dataclass(frozen=True)
class Solution:
    """A plan that may be the best of one shape."""

    shape: EqualPipeline | MixedPipeline
    stages: tuple[StageChoice, ...]
    value_s: float
    """What `predict` tells of it."""
    execution: Execution
    """What of the target's switches is set."""
    strategies: tuple[tuple[LayerRun, ...], ...] = ()
    """By stage, where each layer has a strategy of its own, ..."""
    edges: tuple[tuple[str | None, str | None], ...] = ()
    """... and what embedding and head run there."""


@dataclass(frozen=True)
class Solved:
    """What is known of all plans of one shape, or of one family, that beat what was asked for."""

    solution: Solution | None = None
    """The best that was found."""
    left_s: float = float("inf")
    """No other is faster."""
    tally: Tally = field(default_factory=Tally)


Place = tuple[float, tuple[float, ...], str]


def place_of(solution: Solution) -> Place:
    """The fastest plan first; of plans that differ in rounding the plainer one, whichever was found first:
    with fewer switches of its target set, then with less sharded, sent to host memory or run again, then with
    fewer stages, chunks and ranks that split layers. No two plans have one place."""
    shape, stages, execution = solution.shape, solution.stages, solution.execution
    switches = sum(
        1.0
        for part in fields(Execution)
        if getattr(solution.execution, part.name) not in (part.default, False)
    )
    kept = [sum(stage.get(name, 0.0) for stage in stages) for name in ("zero", *KINDS, "ckpt", "instances")]
    meshes = shape.meshes
    spread = [max(getattr(mesh, name) for mesh in meshes) for name in ("cp", "etp", "ep", "tp")]
    plain = (switches, *kept, float(shape.stages), float(shape.vpp), *map(float, spread))
    chosen = [sorted(stage.items()) for stage in stages]
    words = repr((shape, chosen, execution, solution.strategies, solution.edges))
    return float(f"{solution.value_s:.12g}"), plain, words


def told(
    evaluator: StageEvaluator, shape: EqualPipeline | MixedPipeline, stages: Sequence[StageChoice]
) -> Solution:
    """With the time that is told of it."""
    evaluator = evaluator.in_order(shape.order)
    solution = Solution(shape, tuple(stages), 0.0, evaluator.job.execution)
    value_s = predict(plan_of(evaluator, solution), evaluator).iteration_s
    return replace(solution, value_s=value_s)


def stage_choice(layers: int, configs: StageConfigs, index: int) -> StageChoice:
    """One row of a front."""
    return {"layers": float(layers), **{name: float(v[index]) for name, v in configs.columns.items()}}


def plan_of(evaluator: StageEvaluator, solution: Solution) -> Plan:
    """The plan that a solution stands for, of the evaluator's job in its own way of execution."""
    job, shape = evaluator.job, solution.shape
    return Plan(
        model=job.model,
        training=job.training,
        cluster=job.cluster,
        target=job.target,
        grad_accum=shape.grad_accum,
        stages=tuple(
            _stage_plan(mesh, choice, runs, edges)
            for mesh, choice, runs, edges in zip(
                shape.meshes,
                solution.stages,
                solution.strategies or ((),) * shape.stages,
                solution.edges or ((None, None),) * shape.stages,
                strict=True,
            )
        ),
        schedule=usual_schedule(shape.vpp),
        vpp=shape.vpp,
        sequence_parallel=shape.sequence_parallel,
        execution=_with_instances(job, solution, _spread(job.model, shape, solution.execution)),
    )


def _spread(model: ModelSpec, shape: EqualPipeline | MixedPipeline, execution: Execution) -> Execution:
    """With what the shape says of experts; all of it, since the defaults of frameworks differ from ours."""
    if model.routed is None or not isinstance(shape, EqualPipeline):
        return execution
    return replace(
        execution,
        expert_parallel=shape.ep,
        expert_tensor_parallel=shape.etp,
        expert_dispatcher=execution.dispatcher,
    )


def _with_instances(job: Job, solution: Solution, execution: Execution) -> Execution:
    """With the sub-groups of replicas that its stages chose together."""
    instances, mesh = int(solution.stages[0].get("instances", 1.0)), solution.shape.meshes[0]
    if copies_weights(job):
        size = mesh.dp * mesh.cp // instances if instances > 1 else None
        return execution if size == execution.hpz_size else replace(execution, hpz_size=size)
    return (
        execution if instances == execution.instances else replace(execution, optimizer_instances=instances)
    )


_LEVELS: dict[int, Zero] = {0: 0, 1: 1, 2: 2, 3: 3}


def _stage_plan(
    shape: EqualPipeline,
    choice: StageChoice,
    runs: tuple[LayerRun, ...],
    edges: tuple[str | None, str | None],
) -> StagePlan:
    return StagePlan(
        layers=int(choice["layers"]),
        nodes=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
        dp=shape.dp,
        tp=shape.tp,
        micro_batch=shape.micro_batch,
        zero=_LEVELS[int(choice["zero"])],
        ckpt=int(choice["ckpt"]),
        recompute=RECOMPUTE_KINDS[int(choice["recompute"])],
        offload=Offload(**{kind: choice[kind] for kind in KINDS}),
        strategies=runs,
        embedding=edges[0],
        head=edges[1],
    )


def looked_at_again(one: Solution, other: Solution) -> bool:
    """Whether two plans as fast come of the corners of a grid and of the whole of it, which tells the same
    whatever corners were tried."""
    return one.execution == other.execution and place_of(one)[0] == place_of(other)[0]


def is_its_own(solution: Solution) -> bool:
    """A mixture whose best has equal meshes is a shape, which was solved before."""
    return isinstance(solution.shape, EqualPipeline) or len(set(solution.shape.meshes)) > 1
