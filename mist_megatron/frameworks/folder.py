"""Plan -> the folder of files that starts it: path -> text, pure. formats/files.py puts them on disk."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mist_megatron.errors import InputError
from mist_megatron.frameworks.deepspeed.files import DEEPSPEED
from mist_megatron.frameworks.framework import Framework
from mist_megatron.frameworks.launch import LaunchSources
from mist_megatron.frameworks.megatron.files import MEGATRON
from mist_megatron.frameworks.torch.files import TORCH
from mist_megatron.spec.check import either
from mist_megatron.spec.plan import Plan, TargetName
from mist_megatron.targets.facts import FrameworkName
from mist_megatron.targets.table import EMITTED, TARGETS

FRAMEWORKS: Mapping[FrameworkName, Framework] = MappingProxyType(
    {"megatron": MEGATRON, "deepspeed": DEEPSPEED, "torch": TORCH}
)


def framework_of(target: TargetName) -> Framework:
    """Who runs a target; refuses one that nothing can be written for."""
    name = TARGETS[target].framework
    if name is None:
        raise InputError(
            f"target {target} is a model of costs, no framework: nothing can be written for it",
            details=(f"try: --target {either(EMITTED)}",),
        )
    return FRAMEWORKS[name]


def artifacts(plan: Plan, sources: LaunchSources) -> dict[str, str]:
    """Everything needed to start the plan on its target; refuses what the target cannot run."""
    return dict(framework_of(plan.target).files(plan, sources))
