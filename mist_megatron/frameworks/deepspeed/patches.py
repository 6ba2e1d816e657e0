"""The patches of DeepSpeed, by name: which carries out what of a plan. No other file has these names."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from mist_megatron.spec.kinds import PerKind
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.targets.table import TARGETS


class Patch(StrEnum):
    """By its name in stages.json, in the order in which they are applied."""

    PIPELINE_STAGES = "pipeline_stages"
    OPTIMIZER_FRACTION = "optimizer_fraction"
    WEIGHT_FRACTION = "weight_fraction"
    GRADIENT_FRACTION = "gradient_fraction"
    LAYER_ACTIVATIONS = "layer_activations"
    DECOUPLED_STEPS = "decoupled_steps"
    FORGET_OVERFLOW = "forget_overflow"


PATCH_OF: PerKind[Patch] = PerKind(
    weights=Patch.WEIGHT_FRACTION,
    grads=Patch.GRADIENT_FRACTION,
    optimizer=Patch.OPTIMIZER_FRACTION,
    activations=Patch.LAYER_ACTIVATIONS,
)
"""What keeps a fraction of these bytes on the host."""
OF_TARGET = frozenset({*PATCH_OF.values(), Patch.DECOUPLED_STEPS})
"""Those that one model in one piece has under target deepspeed+patches only."""


def patches(plan: Plan) -> tuple[Patch, ...]:
    """Names for mist_patches.apply: what of the plan DeepSpeed's JSON cannot say on any stage, and
    forget_overflow, without which DeepSpeed 0.19.8 skips every step after the first overflow."""
    asked = {name for stage in plan.stages for name in _stage_patches(plan, stage)}
    if plan.pipeline_size > 1:
        asked.add(Patch.PIPELINE_STAGES)
    return tuple(name for name in Patch if name in asked)


def _stage_patches(plan: Plan, stage: StagePlan) -> Iterator[Patch]:
    offload = stage.offload
    wide = plan.execution.grad_bytes == 4 and stage.zero in {1, 2}
    # Where DeepSpeed itself would put gradients that are wholly on one side.
    own_grads = float(offload.optimizer > 0.0 and stage.zero >= 2 and not wide)
    asked = {
        Patch.OPTIMIZER_FRACTION: 0.0 < offload.optimizer < 1.0,
        Patch.WEIGHT_FRACTION: offload.weights not in ((0.0, 1.0) if stage.zero == 3 else (0.0,)),
        Patch.GRADIENT_FRACTION: offload.grads != own_grads,
        # In a pipeline pipeline_stages recomputes.
        Patch.LAYER_ACTIVATIONS: (stage.ckpt > 0 and plan.pipeline_size == 1) or offload.activations > 0.0,
        Patch.DECOUPLED_STEPS: bool(plan.execution.decoupled_step),
    }
    if TARGETS[plan.target].patched:
        yield from (name for name, wanted in asked.items() if wanted)
    if wide and offload.optimizer:
        yield Patch.FORGET_OVERFLOW
