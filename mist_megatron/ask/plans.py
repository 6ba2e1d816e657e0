"""Plans in any form that somebody has them in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mist_megatron.errors import InputError
from mist_megatron.formats.files import load_plan as read_plan
from mist_megatron.formats.plan_yaml import plan_from_mapping
from mist_megatron.spec.plan import Plan


class HasPlan(Protocol):
    """A result that has a plan: of `tune`, `predict`, `simulate`, `convert` or `lint`."""

    @property
    def plan(self) -> Plan | None:
        """The plan itself."""


PlanLike = Plan | str | Path | Mapping[str, Any] | HasPlan


def load_plan(plan: PlanLike) -> Plan:
    """A plan from itself, the path of its file, the mapping in such a file, or a result that has one."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return read_plan(plan)
    if isinstance(plan, Mapping):
        return plan_from_mapping(plan)
    held = getattr(plan, "plan", None)
    if not isinstance(held, Plan):
        raise InputError(f"no plan in a {type(plan).__name__}; wanted a Plan, a path, a mapping or a result")
    return held
