"""What a target cannot run of a plan, from its facts: search cuts its space to them, predict and emit refuse
the rest, and each rule names its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from mist_megatron.errors import EmitError, InputError
from mist_megatron.spec.mesh import splits_tokens
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan, StagePlan, TargetName
from mist_megatron.spec.recompute import PARTIAL, RECOMPUTES
from mist_megatron.spec.schedule import ONE_F_ONE_B, recomputed_per_chunk
from mist_megatron.spec.training import Precision
from mist_megatron.targets.facts import Capability, GradientCase
from mist_megatron.targets.table import TARGETS

OWN_SWITCHES = tuple(
    dict.fromkeys(name for target in TARGETS.values() for name in target.capability.switches)
)
"""Keys of `execution` that are switches of one framework."""


def violations(plan: Plan) -> tuple[str, ...]:
    """Every rule of its target that a plan breaks, in words that name stage, key and reason."""
    able = TARGETS[plan.target].can(plan.training.precision, plan.execution)
    broken = [*_pipeline_rules(plan, able), *_uniformity_rules(plan, able), *_bridge_rules(plan, able)]
    broken += [] if able.further is None else able.further(plan)
    for index, stage in enumerate(plan.stages):
        broken += _stage_rules(f"stages[{index}]", stage, plan, able)
        if recomputed_per_chunk(plan.chunk_layers[index], stage.ckpt) is None:
            broken.append(
                f"stages[{index}].ckpt {stage.ckpt}: recomputed layers are counted per chunk, "
                f"wanted a multiple of vpp {plan.vpp}"
            )
    return tuple(broken)


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
    able, broken = TARGETS[target].can(precision, None), []
    if model.parallel_block and not able.parallel_block:
        inside = f" in {precision}" if TARGETS[target].capability.parallel_block else ""
        broken.append(_no_parallel_block(model, inside))
    if able.activations is not None and model.mlp_words not in able.activations:
        wanted = " or ".join(able.activations)
        broken.append(f"model {model.name}: its MLP computes {model.mlp_words}, wanted {wanted}")
    if able.always_final_norm and not model.final_norm:
        broken.append(f"model {model.name}: its models end with a norm, wanted final_norm: true")
    if not able.layer_kinds and len(model.kinds) > 1:
        kinds = ", ".join(kind.name for kind in model.kinds)
        broken.append(f"model {model.name}: it runs one kind of layers, these are of kinds {kinds}")
    if not able.full_attention and any(kind.attention == "full" for kind in model.kinds):
        broken.append(f"model {model.name}: it has no attention that is not causal")
    parts = [part for part in model.parts if part not in able.model_parts]
    if parts:
        broken.append(f"model {model.name}: it has no {' nor '.join(parts)} here")
    if not model.plain and not able.layer_widths:
        broken.append(
            f"model {model.name}: its models begin with a token table and have layers of one width and "
            "sequence, all trained"
        )
    broken += [] if able.further_of_models is None else able.further_of_models(model)
    if precision == "fp8" and not able.fp8:
        broken.append("precision fp8: it has no 8-bit products, wanted bf16 or fp16")
    return tuple(broken)


def _no_parallel_block(model: ModelSpec, inside: str) -> str:
    return f"model {model.name}: it has no parallel blocks{inside} (attention beside MLP)"


def _beside(plan: Plan) -> str:
    """What of a plan takes patches away, in words."""
    return " beside execution.cuda_graphs" * bool(TARGETS[plan.target].patched and plan.execution.cuda_graphs)


def products_overlap(model: ModelSpec) -> bool:
    """Whether tensor-parallel traffic can run beside the products of a model's layers: attention and MLP that
    stand side by side are reduced together, behind both."""
    return not model.parallel_block


def require_job(model: ModelSpec, precision: Precision, target: TargetName) -> None:
    """Refuse a job that a target cannot run, before anything is searched."""
    for rule in job_rules(model, precision, target):
        others = ", ".join(other for other in TARGETS if not job_rules(model, precision, other))
        hint = f"; try --target with one of: {others}" if others else ""
        raise InputError(f"target {target} cannot run {rule}{hint}")


def _pipeline_rules(plan: Plan, able: Capability) -> list[str]:
    broken = list(job_rules(plan.model, plan.training.precision, plan.target))
    if plan.model.parallel_block and not able.parallel_block and not broken:
        broken.append(_no_parallel_block(plan.model, _beside(plan)))
    broken += not_modelled(plan)
    if plan.pipeline_size > 1 and not able.pipeline:
        more = f": {able.no_pipeline}" if able.no_pipeline else ""
        broken.append(
            f"{plan.pipeline_size} stages: it has no pipeline parallelism here, wanted 1 stage{more}"
        )
    if plan.schedule not in able.schedules:
        broken.append(f"schedule {plan.schedule}: it runs {', '.join(able.schedules)}")
    if plan.sequence_parallel and not able.sequence_parallel:
        broken.append("sequence_parallel: it has none")
    if plan.sequence_parallel and all(stage.tp == 1 for stage in plan.stages):
        broken.append("sequence_parallel: needs tp above 1")
    if plan.execution.tp_comm_overlap and not products_overlap(plan.model):
        broken.append(
            "execution.tp_comm_overlap: attention and MLP of a layer are reduced at once, behind both"
        )
    if plan.execution.deterministic and not able.deterministic:
        broken.append("execution.deterministic: it has no such switch")
    if plan.execution.decoupled_step and not able.decoupled_step:
        broken.append(f"execution.decoupled_step: it has no such switch{_beside(plan)}")
    for name in OWN_SWITCHES:
        if getattr(plan.execution, name) and name not in TARGETS[plan.target].capability.switches:
            broken.append(f"execution.{name}: it has no such switch")
    if plan.execution.zero3 not in (None, "deepspeed"):
        broken.append(f"execution.zero3 {plan.execution.zero3}: told of measured runs only, wanted deepspeed")
    if plan.execution.scattered_boundaries:
        broken.append("execution.scattered_boundaries: told of measured runs only, wanted null")
    if plan.execution.context_parallel > 1 and not able.context_parallel:
        broken.append(f"context_parallel {plan.execution.context_parallel}: it has none")
    return broken


def not_modelled(plan: Plan) -> list[str]:
    """What has no honest price: what is not modelled of layers of several widths, or of frozen ones."""
    model, broken = plan.model, []
    if plan.sequence_parallel and not model.plain:
        broken = [
            f"stages[{index}].tp {stage.tp}: sequence_parallel shares tokens out, and a kind of layer of "
            f"{model.name} has a number of them that so many ranks do not divide"
            for index, stage in enumerate(plan.stages)
            if not splits_tokens(model, plan.training.seq_len, stage.tp)
        ]
    broken += _adapter_rules(plan)
    if model.alike:
        return broken
    there = {
        f"vpp {plan.vpp}": plan.vpp > 1,
        f"context_parallel {plan.execution.context_parallel}": plan.execution.context_parallel > 1,
        "a rank_map": plan.rank_map is not None,
        "stages of different dp, tp or micro_batch": plan.grids_differ,
    }
    kinds = ", ".join(kind.name for kind in model.kinds)
    broken += [
        f"{what}: not modelled where layers differ in width, tokens or training ({kinds})"
        for what, is_there in there.items()
        if is_there
    ]
    if any(kind.frozen for kind in model.kinds):
        broken += [
            f"stages[{index}].offload: not modelled beside frozen layers, wanted none"
            for index, stage in enumerate(plan.stages)
            if any(stage.offload.values())
        ]
    return broken


def further_rules(plan: Plan) -> tuple[str, ...]:
    """What the checks of its target's own refuse."""
    further = TARGETS[plan.target].capability.further
    return () if further is None else further(plan)


def _adapter_rules(plan: Plan) -> list[str]:
    """What is not modelled of a model whose own weights stand still beside low-rank adapters."""
    if plan.model.adapter is None:
        return []
    there = {
        f"vpp {plan.vpp}": plan.vpp > 1,
        f"context_parallel {plan.execution.context_parallel}": plan.execution.context_parallel > 1,
        f"training.precision {plan.training.precision}": plan.training.precision not in ("bf16", "fp16"),
        "tp above 1": any(stage.tp > 1 for stage in plan.stages),
        "offload": any(any(stage.offload.values()) for stage in plan.stages),
    }
    return [f"{what}: not modelled beside low-rank adapters" for what, is_there in there.items() if is_there]


_UNIFORM: tuple[tuple[str, str, Callable[[StagePlan], object]], ...] = (
    ("uneven_layers", "layers", lambda s: s.layers),
    ("per_stage_ckpt", "recompute", lambda s: s.recompute),
    ("per_stage_offload", "offload", lambda s: s.offload),
    ("per_stage_zero", "zero", lambda s: s.zero),
    ("per_stage_grid", "dp, tp and micro_batch", lambda s: s.grid),
)


def _uniformity_rules(plan: Plan, able: Capability) -> list[str]:
    if able.layer_strategies and all(stage.strategies for stage in plan.stages):
        return []
    broken = []
    if not able.per_stage_ckpt and plan.recomputed_per_chunk is None:
        first = plan.stages[0].ckpt
        other = next((k for k, stage in enumerate(plan.stages) if stage.ckpt != first), 0)
        broken.append(
            f"stages[{other}]: ckpt and recompute must be the same on all stages, or all of a smaller one"
        )
    for field, what, value in _UNIFORM:
        if not getattr(able, field):
            odd = [k for k, stage in enumerate(plan.stages) if value(stage) != value(plan.stages[0])]
            if odd:
                broken.append(f"stages[{odd[0]}]: {what} must be the same on all stages")
    return broken


def _bridge_rules(plan: Plan, able: Capability) -> list[str]:
    """The rest: the bridge joins a number of data ranks with a multiple of it, under 1F1B."""
    if able.bridge is None or not plan.grids_differ:
        return []
    broken = list(able.bridge(plan.model, plan.training, plan.execution))
    if plan.schedule != ONE_F_ONE_B:
        broken.append(f"schedule {plan.schedule}: stages with different dp or tp run {ONE_F_ONE_B} only")
    for index, (one, two) in enumerate(pairwise(plan.stages)):
        if max(one.dp, two.dp) % min(one.dp, two.dp):
            broken.append(
                f"stages[{index}].dp {one.dp} and stages[{index + 1}].dp {two.dp}: "
                "one of two neighbours must divide the other"
            )
    return broken


def _stage_rules(where: str, stage: StagePlan, plan: Plan, able: Capability) -> list[str]:
    broken = []
    levels = able.zero_with_pipeline if plan.pipeline_size > 1 else able.zero
    if stage.zero not in levels:
        pipelined = " with a pipeline" if plan.pipeline_size > 1 else ""
        known = stage.zero in TARGETS[plan.target].capability.zero and not pipelined
        wide = f" with gradients of 4 bytes beside {plan.training.precision} weights" if known else ""
        broken.append(
            f"{where}.zero {stage.zero}: it runs {', '.join(map(str, levels)) or 'none'}{pipelined}{wide}"
        )
    if stage.strategies:
        broken += _strategy_rules(where, stage, plan, able)
    if stage.tp > 1 and not able.tensor_parallel:
        broken.append(f"{where}.tp {stage.tp}: it has no tensor parallelism here")
    if stage.recompute not in able.recompute:
        runs = " or ".join(RECOMPUTES[kind].again for kind in able.recompute)
        broken.append(f"{where}.recompute {stage.recompute}: it recomputes {runs}")
    if stage.recompute in PARTIAL and stage.ckpt:
        broken.append(f"{where}: {stage.recompute} recomputation and ckpt {stage.ckpt} exclude each other")
    if not able.partial_ckpt and stage.ckpt not in (0, stage.layers):
        broken.append(f"{where}.ckpt {stage.ckpt}: it recomputes no layer or all {stage.layers}")
    if plan.execution.decoupled_step and able.decoupled_step and stage.zero < able.decoupled_least_zero:
        least = able.decoupled_least_zero
        broken.append(f"{where}.zero {stage.zero}: execution.decoupled_step needs zero {least} or above")
    if any(kind.experts for kind in plan.model.kinds) and any(stage.offload.values()):
        broken.append(f"{where}.offload: what experts keep in host memory is not modelled, wanted none")
    broken += [
        f"{where}.offload.{kind}: excludes execution.{switch}, whose collective runs while they are away"
        for kind, switch in able.away_excludes.items()
        if switch is not None and stage.offload[kind] and getattr(plan.execution, switch)
    ]
    broken += _level_rules(where, stage, plan, able)
    return broken + _offload_rules(where, stage, able, _beside(plan))


def _strategy_rules(where: str, stage: StagePlan, plan: Plan, able: Capability) -> list[str]:
    """Layers with strategies of their own, and what is not modelled beside them."""
    if not able.layer_strategies:
        return [f"{where}.strategies: its layers all run alike"]
    beside = {
        f"schedule {plan.schedule}": plan.schedule != ONE_F_ONE_B,
        "sequence_parallel": plan.sequence_parallel,
        f"context_parallel {plan.execution.context_parallel}": plan.execution.context_parallel > 1,
        f"recompute {stage.recompute}": stage.recompute in PARTIAL,
        "experts": plan.model.routed is not None,
        "multi-token prediction": plan.model.mtp_layers > 0,
        "offload": any(stage.offload.values()),
        "stages without": not all(other.strategies for other in plan.stages),
    }
    return [f"{where}.strategies: not modelled beside {what}" for what, there in beside.items() if there]


def _level_rules(where: str, stage: StagePlan, plan: Plan, able: Capability) -> list[str]:
    broken = []
    offload = stage.offload
    if offload.weights and stage.zero < able.weights_least_zero:
        broken.append(
            f"{where}.offload.weights {offload.weights:g}: needs zero {able.weights_least_zero} or above, "
            "whose optimizers the patch knows"
        )
    if able.host_gradients is None:
        return broken
    allowed = able.host_gradients(
        GradientCase(
            zero=stage.zero,
            offloads=offload.optimizer > 0.0,
            grad_accum=plan.grad_accum,
            wide=plan.execution.grad_bytes == 4,
            by_layer=bool(plan.execution.decoupled_step) or offload.weights > 0.0,
        )
    )
    if not allowed.least <= offload.grads <= allowed.most:
        broken.append(f"{where}.offload.grads {offload.grads:g}: {allowed.reason}")
    return broken


def _offload_rules(where: str, stage: StagePlan, able: Capability, beside: str) -> list[str]:
    broken = []
    offload = stage.offload
    for kind, share in offload.items():
        allowed = able.offload[kind]
        if share and allowed == "none":
            broken.append(f"{where}.offload.{kind} {share:g}: it keeps {kind} on the GPU{beside}")
        elif allowed == "all_or_nothing" and share not in (0.0, 1.0):
            broken.append(f"{where}.offload.{kind} {share:g}: it moves all or nothing, wanted 0 or 1")
    if offload.optimizer and stage.zero < able.offload_needs_zero:
        broken.append(
            f"{where}.offload.optimizer {offload.optimizer:g}: needs zero {able.offload_needs_zero} or above"
        )
    if offload.activations and stage.ckpt == stage.layers:
        broken.append(f"{where}.offload.activations: every layer is recomputed, nothing is left to offload")
    if able.grads_follow_optimizer:
        wanted = 1.0 if offload.optimizer and stage.zero >= 2 else 0.0
        if offload.grads != wanted:
            broken.append(
                f"{where}.offload.grads {offload.grads:g}: gradients go with the optimizer from zero 2, "
                f"wanted {wanted:g}"
            )
        if offload.weights and stage.zero < 3:
            broken.append(f"{where}.offload.weights: silently ignored below zero 3")
    return broken
