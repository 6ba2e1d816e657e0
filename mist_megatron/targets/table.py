"""All targets by name: a new one is a line here, in `TargetName` and in `frameworks/folder.py`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mist_megatron.spec.plan import TargetName
from mist_megatron.targets.deepspeed import DEEPSPEED, DEEPSPEED_PATCHES
from mist_megatron.targets.facts import FrameworkName, Target
from mist_megatron.targets.megatron import MEGATRON, MEGATRON_PATCHES
from mist_megatron.targets.mist import MIST
from mist_megatron.targets.torch import TORCH

_ALL = (MEGATRON, MEGATRON_PATCHES, DEEPSPEED, DEEPSPEED_PATCHES, MIST, TORCH)
TARGETS: Mapping[TargetName, Target] = MappingProxyType({target.name: target for target in _ALL})


EMITTED: tuple[TargetName, ...] = tuple(name for name, target in TARGETS.items() if target.framework)
"""Those that files can be written for; the others are models of costs."""


def targets_of(framework: FrameworkName) -> tuple[TargetName, ...]:
    """Names of the targets that a framework trains."""
    return tuple(name for name, target in TARGETS.items() if target.framework == framework)
