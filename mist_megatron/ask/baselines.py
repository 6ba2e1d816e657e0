"""What people choose by hand: the best of it is what a tuned plan is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.spec.plan import TargetName
from mist_megatron.targets.rules import model_rules
from mist_megatron.targets.table import TARGETS

if TYPE_CHECKING:
    from mist_megatron.ask.found import Found
    from mist_megatron.search.known import Known
    from mist_megatron.search.space import Space
    from mist_megatron.spec.job import Job

HAND_MADE: Mapping[TargetName, tuple[str, ...]] = {
    "megatron": ("megatron", "megatron-expert"),
    "deepspeed": ("deepspeed",),
}
"""Framework -> spaces of what its users choose by hand."""


def hand_made_spaces(job: Job) -> tuple[str, ...]:
    """Of the framework that a target is or patches; of target mist those of Megatron, or of DeepSpeed where
    Megatron cannot run the model: a gain over what does not run is none."""
    if TARGETS[job.target].framework == "deepspeed":
        return HAND_MADE["deepspeed"]
    runs = [framework for framework in HAND_MADE if not model_rules(job.model, framework)]
    return HAND_MADE[runs[0]] if runs else ()


def best_by_hand(found: Found, asked: Job) -> dict[str, float]:
    """Seconds per step of the best plans of the hand-made spaces, on the same model of costs; nobody
    decouples steps by hand, and whoever trains with Megatron overlaps what it can overlap."""
    from mist_megatron.search.search import Status
    from mist_megatron.search.space import space_named

    if found.result.status is not Status.OPTIMAL:
        return {}
    job = replace(asked, execution=replace(asked.execution, decoupled_step=None))
    best: dict[str, float] = {}
    known = found.result.known
    for name in hand_made_spaces(job):
        if name != found.result.space.name:
            seconds, more = _best_of_ways(job, space_named(name), known)
            known = (*known, *more)
            if seconds:
                best[name] = min(seconds)
    return best


def _best_of_ways(job: Job, space: Space, known: tuple[Known, ...]) -> tuple[list[float], tuple[Known, ...]]:
    """The best of a space under each way of execution, nothing where there is none; and what was learnt."""
    from mist_megatron.ask.evaluators import evaluator_for
    from mist_megatron.cost.predict import predict
    from mist_megatron.search.execution import execution_choices
    from mist_megatron.search.search import Settings, plan_of, search
    from mist_megatron.search.space import Limits

    seconds: list[float] = []
    learnt: tuple[Known, ...] = ()
    for way in execution_choices(job, space, Limits()):
        evaluator, _ = evaluator_for(way.job)
        try:
            result = search(evaluator, space, Settings(limits=way.limits, known=(*known, *learnt)))
        except (InputError, NoFeasiblePlan):
            continue
        learnt = (*learnt, *result.known)
        seconds.append(predict(plan_of(evaluator, result.solutions[0]), evaluator).iteration_s)
    return seconds, learnt
