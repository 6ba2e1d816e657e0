"""Ways of execution that a job leaves open, each searched on its own: what a target does beside what.

A search prices one way. Which ways a target has, and when one is worth a search, its facts say; here they
are cut to what the space and the limits of a search leave open, for `tune` and for what it is held against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mist_megatron.search.space import Limits, Space, apply_limits, cut_to_target
from mist_megatron.spec.job import Job
from mist_megatron.targets.facts import ExecutionVariant
from mist_megatron.targets.table import TARGETS


@dataclass(frozen=True)
class ExecutionChoice:
    """A job with its switches set, and the shapes that are searched with them."""

    job: Job
    limits: Limits
    must_win: bool = True
    """Searched only for what is faster than the choices before it."""


def execution_choices(job: Job, space: Space, limits: Limits) -> list[ExecutionChoice]:
    """The job under each way of execution to be searched, the usual one first."""
    alone = replace(limits, fixed={**limits.fixed, "pp": 1})
    return [
        ExecutionChoice(
            job if variant.execution == job.execution else replace(job, execution=variant.execution),
            alone if variant.one_stage else limits,
            variant.must_win,
        )
        for variant in TARGETS[job.target].executions(job.execution)
        if _is_open(variant, job, space, limits)
    ]


def _is_open(variant: ExecutionVariant, job: Job, space: Space, limits: Limits) -> bool:
    if variant.one_stage and not limits.allows("pp", 1):
        return False
    if variant.execution.decoupled_step and not job.execution.decoupled_step:
        return space.decoupled_step and "decoupled_step" not in limits.forbidden
    if variant.for_host_gradients:
        return apply_limits(cut_to_target(space, job.target), limits).offload.grads != "none"
    return True
