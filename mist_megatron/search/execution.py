"""Ways of execution that a job leaves open, each searched on its own: what a target does beside what.

A search prices one way. What a way excludes (patches keep gradients on the host, or collectives run while
they are made) and where it is worth its search is said here, for `tune` and for what it is held against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mist_megatron.search.space import Limits, Space, apply_limits, cut_to_target
from mist_megatron.spec.job import Job
from mist_megatron.targets.rules import AWAY
from mist_megatron.targets.table import TARGETS


@dataclass(frozen=True)
class ExecutionChoice:
    """A job with its switches set, and the shapes that are searched with them."""

    job: Job
    limits: Limits


def execution_choices(job: Job, space: Space, limits: Limits) -> list[ExecutionChoice]:
    """The job under each way of execution to be searched, the usual one first."""
    if TARGETS[job.target].framework == "megatron":
        return _of_megatron(job, space, limits)
    able = TARGETS[job.target].capability
    open_ = space.decoupled_step and able.decoupled_step and job.execution.decoupled_step is None
    if not open_ or "decoupled_step" in limits.forbidden:
        return [ExecutionChoice(job, limits)]
    decoupled = _switched(job, decoupled_step=True)
    if able.pipeline:
        # In a pipeline of DeepSpeed each stage would step when its first micro-batch has come, one after the
        # other, what they else do all at once.
        if not limits.allows("pp", 1):
            return [ExecutionChoice(job, limits)]
        return [
            ExecutionChoice(job, limits),
            ExecutionChoice(decoupled, replace(limits, fixed={**limits.fixed, "pp": 1})),
        ]
    return [ExecutionChoice(job, limits), ExecutionChoice(decoupled, limits)]


def _of_megatron(job: Job, space: Space, limits: Limits) -> list[ExecutionChoice]:
    """Gradients are reduced beside the last backward pass, but where patches may keep them on the host, which
    excludes that, also after it.

    Weights are gathered beside the first forward pass where there is no pipeline. In one, each stage would
    gather when its first micro-batch comes, one after the other (but for the few layers of the first stage),
    what they else do all at once. Steps are decoupled when asked for by hand only: with states on the host
    they are slower than Megatron's own step, whose copies hide behind the updates; without, what they gain
    is the gather of weights."""
    open_ = {switch: getattr(job.execution, switch) is None for switch in AWAY.values()}
    reducing = _switched(job, overlap_grad_reduce=True) if open_["overlap_grad_reduce"] else job
    found = [ExecutionChoice(reducing, limits)]
    gathers = reducing.execution.overlap_grad_reduce and not job.execution.decoupled_step
    if open_["overlap_param_gather"] and gathers and limits.allows("pp", 1):
        alone = replace(limits, fixed={**limits.fixed, "pp": 1})
        found.append(ExecutionChoice(_switched(reducing, overlap_param_gather=True), alone))
    if reducing is not job:
        cut = apply_limits(cut_to_target(space, job.target), limits)
        if cut.offload.grads != "none":
            found.append(ExecutionChoice(job, limits))
    return found


def _switched(job: Job, **switches: bool) -> Job:
    return replace(job, execution=replace(job.execution, **switches))
