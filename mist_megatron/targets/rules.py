"""What a target cannot run of a plan, from its facts: search cuts its space to them, predict and emit refuse
the rest, and each rule names its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from mist_megatron.errors import EmitError, InputError
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan, TargetName
from mist_megatron.spec.recompute import PARTIAL, RECOMPUTES
from mist_megatron.spec.schedule import ONE_F_ONE_B
from mist_megatron.spec.training import Precision, TrainingSpec
from mist_megatron.targets.facts import Capability
from mist_megatron.targets.table import TARGETS


def violations(plan: Plan) -> tuple[str, ...]:
    """Every rule of its target that a plan breaks, in words that name stage, key and reason."""
    able = TARGETS[plan.target].can(plan.training.precision, plan.execution)
    found = [*_pipeline_rules(plan, able), *_uniformity_rules(plan, able), *_bridge_rules(plan, able)]
    for index, stage in enumerate(plan.stages):
        found += _stage_rules(f"stages[{index}]", stage, plan, able)
    return tuple(found)


def runnable_on(plan: Plan) -> tuple[TargetName, ...]:
    """Targets that can execute this plan as it is."""
    made = (replace(plan, target=target) for target in TARGETS)
    return tuple(other.target for other in made if not violations(other))


def require_runnable(plan: Plan) -> None:
    """Refuse a plan that its target cannot run: the rule, and the targets that could."""
    broken = violations(plan)
    if broken:
        others = runnable_on(plan)
        hint = f"targets that can: {', '.join(others)}" if others else "no target can run it as it is"
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise EmitError(f"target {plan.target} cannot run this plan: {broken[0]}{more}; {hint}")


def job_rules(model: ModelSpec, precision: Precision, target: TargetName) -> tuple[str, ...]:
    """What of a model and its precision a target cannot run, whatever the plan."""
    able, broken = TARGETS[target].capability, []
    if model.parallel_block and not able.parallel_block:
        broken.append(f"model {model.name}: it has no parallel blocks (attention beside MLP)")
    if precision == "fp8" and not able.fp8:
        broken.append("precision fp8: it has no 8-bit products, wanted bf16 or fp16")
    return tuple(broken)


def require_job(model: ModelSpec, precision: Precision, target: TargetName) -> None:
    """Refuse a job that a target cannot run, before anything is searched."""
    for rule in job_rules(model, precision, target):
        others = ", ".join(other for other in TARGETS if not job_rules(model, precision, other))
        hint = f"; try --target with one of: {others}" if others else ""
        raise InputError(f"target {target} cannot run {rule}{hint}")


def _pipeline_rules(plan: Plan, able: Capability) -> list[str]:
    found = list(job_rules(plan.model, plan.training.precision, plan.target))
    if plan.pipeline_size > 1 and not able.pipeline:
        overlaps = ": execution.overlap_grad_reduce is on, which DeepSpeed switches off in one"
        more = overlaps if TARGETS[plan.target].capability.pipeline else ""
        found.append(
            f"{plan.pipeline_size} stages: it has no pipeline parallelism here, wanted 1 stage{more}"
        )
    if plan.schedule not in able.schedules:
        found.append(f"schedule {plan.schedule}: it runs {', '.join(able.schedules)}")
    if plan.sequence_parallel and not able.sequence_parallel:
        found.append("sequence_parallel: it has none")
    if plan.sequence_parallel and all(stage.tp == 1 for stage in plan.stages):
        found.append("sequence_parallel: needs tp above 1")
    if plan.execution.deterministic and not able.deterministic:
        found.append("execution.deterministic: it has no such switch")
    if plan.execution.decoupled_step and not able.decoupled_step:
        found.append("execution.decoupled_step: it has no such switch")
    if plan.execution.context_parallel > 1 and not able.context_parallel:
        found.append(f"context_parallel {plan.execution.context_parallel}: it has none")
    return found


_UNIFORM: tuple[tuple[str, str, Callable[[StagePlan], object]], ...] = (
    ("uneven_layers", "layers", lambda s: s.layers),
    ("per_stage_ckpt", "ckpt and recompute", lambda s: (s.ckpt, s.recompute)),
    ("per_stage_offload", "offload", lambda s: s.offload),
    ("per_stage_zero", "zero", lambda s: s.zero),
    ("per_stage_grid", "dp, tp and micro_batch", lambda s: s.grid),
)


def _uniformity_rules(plan: Plan, able: Capability) -> list[str]:
    found = []
    for field, what, value in _UNIFORM:
        if not getattr(able, field):
            odd = [k for k, stage in enumerate(plan.stages) if value(stage) != value(plan.stages[0])]
            if odd:
                found.append(f"stages[{odd[0]}]: {what} must be the same on all stages")
    return found


def bridge_job_rules(model: ModelSpec, training: TrainingSpec, execution: Execution) -> tuple[str, ...]:
    """What of a job rules out stages with different grids in megatron-core 0.19 with the patch stage_grids.

    BridgeCommunicator splits or joins the batch alone, never the sequence.
    """
    found = []
    if execution.context_parallel > 1:
        found.append(f"context_parallel {execution.context_parallel}: stages with different dp or tp need 1")
    if model.tied_embeddings:
        found.append(
            f"model {model.name}: tied embeddings cannot be summed between stages of different dp or tp"
        )
    if training.precision == "fp8":
        found.append("precision fp8: not tested on stages with different dp or tp, wanted bf16 or fp16")
    return tuple(found)


def _bridge_rules(plan: Plan, able: Capability) -> list[str]:
    """The rest: the bridge joins a number of data ranks with a multiple of it, under 1F1B."""
    if not able.bridged_grids or not plan.grids_differ:
        return []
    found = list(bridge_job_rules(plan.model, plan.training, plan.execution))
    if plan.schedule != ONE_F_ONE_B:
        found.append(f"schedule {plan.schedule}: stages with different dp or tp run {ONE_F_ONE_B} only")
    for index, (one, two) in enumerate(pairwise(plan.stages)):
        if max(one.dp, two.dp) % min(one.dp, two.dp):
            found.append(
                f"stages[{index}].dp {one.dp} and stages[{index + 1}].dp {two.dp}: "
                "one of two neighbours must divide the other"
            )
    return found


def _stage_rules(where: str, stage: StagePlan, plan: Plan, able: Capability) -> list[str]:
    found = []
    levels = able.zero_with_pipeline if plan.pipeline_size > 1 else able.zero
    if stage.zero not in levels:
        pipelined = " with a pipeline" if plan.pipeline_size > 1 else ""
        known = stage.zero in TARGETS[plan.target].capability.zero and not pipelined
        wide = f" with gradients of 4 bytes beside {plan.training.precision} weights" if known else ""
        found.append(
            f"{where}.zero {stage.zero}: it runs {', '.join(map(str, levels)) or 'none'}{pipelined}{wide}"
        )
    if stage.tp > 1 and not able.tensor_parallel:
        found.append(f"{where}.tp {stage.tp}: it has no tensor parallelism here")
    if stage.recompute not in able.recompute:
        runs = " or ".join(RECOMPUTES[kind].again for kind in able.recompute)
        found.append(f"{where}.recompute {stage.recompute}: it recomputes {runs}")
    if stage.recompute in PARTIAL and stage.ckpt:
        found.append(f"{where}: {stage.recompute} recomputation and ckpt {stage.ckpt} exclude each other")
    if not able.partial_ckpt and stage.ckpt not in (0, stage.layers):
        found.append(f"{where}.ckpt {stage.ckpt}: it recomputes no layer or all {stage.layers}")
    if stage.ckpt % plan.vpp:
        found.append(
            f"{where}.ckpt {stage.ckpt}: recomputed layers are counted per chunk, "
            f"wanted a multiple of vpp {plan.vpp}"
        )
    if plan.execution.decoupled_step and able.decoupled_step and stage.zero < able.decoupled_least_zero:
        least = able.decoupled_least_zero
        found.append(f"{where}.zero {stage.zero}: execution.decoupled_step needs zero {least} or above")
    if able.states_visit:
        found += _visit_rules(where, stage, plan)
    if able.states_by_level:
        found += _level_rules(where, stage, plan)
    return found + _offload_rules(where, stage, able)


WEIGHTS_LEAST_ZERO = 1
"""From this level on DeepSpeed's patches can keep weights on the host: layers of ZeRO 1 and 2 that visit the
GPU, shards of ZeRO 3."""


@dataclass(frozen=True, kw_only=True)
class GradientCase:
    """What decides where DeepSpeed's patches can keep gradients."""

    zero: int
    offloads: bool
    """Some of the optimizer is on the host."""
    grad_accum: int
    wide: bool
    """Gradients of 4 bytes beside 2-byte weights."""
    by_layer: bool
    """Optimizer groups are cut by layer: for decoupled steps, and below ZeRO 3 for offloaded weights."""


def gradient_range(case: GradientCase) -> tuple[float, float, str]:
    """Least and largest fraction of the gradients on the host, and why.

    ZeRO 3 adds gradients up in one buffer that can be cut anywhere. ZeRO 2 adds them up on the host, or by
    parameter on the GPU, where the optimizer is offloaded and a step has more than one micro-batch; with
    one it hands them to the optimizer at once. A rank then holds the whole of each parameter that its part of
    a group touches: of groups as large as a model hardly more than its part, of those of a layer a multiple,
    which is not priced on the GPU. Below, gradients stay in the parameters until the step.
    """
    if case.zero >= 3:
        return 0.0, 1.0, ""
    if case.zero < 2:
        return 0.0, 0.0, "below zero 2 gradients add up on the GPU, wanted 0"
    if not case.offloads:
        return 0.0, 0.0, "below zero 3 gradients leave the GPU with offload.optimizer only, wanted 0"
    if case.wide:
        return 0.0, 0.0, "below zero 3 gradients wider than the weights add up on the GPU, wanted 0"
    if case.grad_accum == 1:
        return 1.0, 1.0, "one micro-batch hands its gradients to the optimizer at once, wanted 1"
    if case.by_layer:
        return 1.0, 1.0, "groups cut by layer keep whole parameters of their gradients on each rank, wanted 1"
    return 0.0, 1.0, ""


def _level_rules(where: str, stage: StagePlan, plan: Plan) -> list[str]:
    found = []
    offload = stage.offload
    if offload.weights and stage.zero < WEIGHTS_LEAST_ZERO:
        found.append(
            f"{where}.offload.weights {offload.weights:g}: needs zero {WEIGHTS_LEAST_ZERO} or above, whose "
            "optimizers the patch knows"
        )
    least, most, reason = gradient_range(
        GradientCase(
            zero=stage.zero,
            offloads=offload.optimizer > 0.0,
            grad_accum=plan.grad_accum,
            wide=plan.execution.grad_bytes == 4,
            by_layer=bool(plan.execution.decoupled_step) or offload.weights > 0.0,
        )
    )
    if not least <= offload.grads <= most:
        found.append(f"{where}.offload.grads {offload.grads:g}: {reason}")
    return found


AWAY: Mapping[str, str] = MappingProxyType(
    {"weights": "overlap_param_gather", "grads": "overlap_grad_reduce"}
)
"""What Megatron keeps in buffers -> the switch whose collective runs while patches have it on the host."""


def _visit_rules(where: str, stage: StagePlan, plan: Plan) -> list[str]:
    return [
        f"{where}.offload.{kind}: excludes execution.{switch}, whose collective runs while they are away"
        for kind, switch in AWAY.items()
        if getattr(stage.offload, kind) and getattr(plan.execution, switch)
    ]


def _offload_rules(where: str, stage: StagePlan, able: Capability) -> list[str]:
    found = []
    offload = stage.offload
    for kind, share in offload.items():
        allowed = able.offload[kind]
        if share and allowed == "none":
            found.append(f"{where}.offload.{kind} {share:g}: it keeps {kind} on the GPU")
        elif allowed == "all_or_nothing" and share not in (0.0, 1.0):
            found.append(f"{where}.offload.{kind} {share:g}: it moves all or nothing, wanted 0 or 1")
    if offload.optimizer and stage.zero < able.offload_needs_zero:
        found.append(
            f"{where}.offload.optimizer {offload.optimizer:g}: needs zero {able.offload_needs_zero} or above"
        )
    if offload.activations and stage.ckpt == stage.layers:
        found.append(f"{where}.offload.activations: every layer is recomputed, nothing is left to offload")
    if able.grads_follow_optimizer:
        wanted = 1.0 if offload.optimizer and stage.zero >= 2 else 0.0
        if offload.grads != wanted:
            found.append(
                f"{where}.offload.grads {offload.grads:g}: gradients go with the optimizer from zero 2, "
                f"wanted {wanted:g}"
            )
        if offload.weights and stage.zero < 3:
            found.append(f"{where}.offload.weights: silently ignored below zero 3")
    return found
