"""The patches of Megatron-core, by name: which carries out what of a plan. No other file has these names."""

from __future__ import annotations

from enum import StrEnum

from mist_megatron.spec.kinds import PerKind
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.table import TARGETS


class Patch(StrEnum):
    """By its name in stages.json, in the order in which they are applied."""

    STAGE_GRIDS = "stage_grids"
    PARALLEL_BLOCK = "parallel_block"
    DECOUPLED_STEPS = "decoupled_steps"
    OPTIMIZER_FRACTION = "exact_optimizer_fraction"
    ACTIVATION_OFFLOAD = "activation_offload"
    STATE_OFFLOAD = "state_offload"


PATCH_OF: PerKind[Patch] = PerKind(
    weights=Patch.STATE_OFFLOAD,
    grads=Patch.STATE_OFFLOAD,
    optimizer=Patch.OPTIMIZER_FRACTION,
    activations=Patch.ACTIVATION_OFFLOAD,
)
"""What keeps exactly the plan's fraction of these bytes on the host."""


def patches(plan: Plan) -> tuple[Patch, ...]:
    """Names for mist_patches.apply: only what this plan needs."""
    if not TARGETS[plan.target].patched:
        return ()
    asked = {PATCH_OF[kind] for stage in plan.stages for kind, share in stage.offload.items() if share > 0}
    if plan.grids_differ:
        asked.add(Patch.STAGE_GRIDS)
    if plan.model.parallel_block:
        asked.add(Patch.PARALLEL_BLOCK)
    if plan.execution.decoupled_step:
        asked.add(Patch.DECOUPLED_STEPS)
    return tuple(name for name in Patch if name in asked)
