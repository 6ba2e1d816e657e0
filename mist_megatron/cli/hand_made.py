"""What people choose by hand: the best of it is what a tuned plan is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.spec.plan import Target
from mist_megatron.spec.target import DEEPSPEED, model_rules

if TYPE_CHECKING:
    from mist_megatron.cli.found import Found
    from mist_megatron.spec.job import Job

HAND_MADE: Mapping[Target, tuple[str, ...]] = {
    "megatron": ("megatron", "megatron-expert"),
    "deepspeed": ("deepspeed",),
}
"""Framework -> spaces of what its users choose by hand."""


def hand_made_spaces(job: Job) -> tuple[str, ...]:
    """Of the framework that a target is or patches; of target mist those of Megatron, or of DeepSpeed where
    Megatron cannot run the model: a gain over what does not run is none."""
    if job.target in DEEPSPEED:
        return HAND_MADE["deepspeed"]
    runs = [framework for framework in HAND_MADE if not model_rules(job.model, framework)]
    return HAND_MADE[runs[0]] if runs else ()


def best_by_hand(found: Found) -> dict[str, float]:
    """Seconds per step of the best plans of the hand-made spaces, on the same model of costs; nobody
    decouples steps by hand."""
    from mist_megatron.cli.evaluators import evaluator_for
    from mist_megatron.cost.predict import predict
    from mist_megatron.search.space import space_named
    from mist_megatron.search.tune import Settings, Status, plan_of, search

    if found.result.status is not Status.OPTIMAL:
        return {}
    best: dict[str, float] = {}
    job, evaluator = found.evaluator.job, found.evaluator
    if job.execution.decoupled_step:
        execution = replace(job.execution, decoupled_step=None)
        evaluator, _ = evaluator_for(replace(job, execution=execution))
    for name in hand_made_spaces(job):
        if name == found.result.space.name:
            continue
        try:
            result = search(evaluator, space_named(name), Settings())
        except (InputError, NoFeasiblePlan):
            continue
        best[name] = predict(plan_of(evaluator, result.solutions[0]), evaluator).iteration_s
    return best
