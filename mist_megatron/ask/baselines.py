"""What people choose by hand: the best of it is what a tuned plan is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mist_megatron.ask.evaluators import Sharing
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.search import SearchResult, Settings, Status, search_ways
from mist_megatron.search.space import Limits, space_named
from mist_megatron.search.ways import ways_of
from mist_megatron.search.within import best_within
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import TargetName
from mist_megatron.targets.rules import job_rules
from mist_megatron.targets.table import TARGETS

HAND_MADE: Mapping[TargetName, tuple[str, ...]] = {
    name: target.hand_made for name, target in TARGETS.items() if target.hand_made and not target.patched
}
"""Framework as it is -> spaces of what its users choose by hand."""


def hand_made_spaces(job: Job) -> tuple[str, ...]:
    """Of the framework that a target is or patches; of target mist those of Megatron, or of DeepSpeed where
    Megatron cannot run the model: a gain over what does not run is none."""
    runs = [
        spaces
        for framework, spaces in HAND_MADE.items()
        if not job_rules(job.model, job.training.precision, framework)
    ]
    return TARGETS[job.target].hand_made or next(iter(runs), ())


def best_by_hand(asked: Job, searched: SearchResult, whole: StageEvaluator | None = None) -> dict[str, float]:
    """Seconds per step of the best plans of the hand-made spaces, on the same model of costs; nobody
    decouples steps by hand, and whoever trains with Megatron overlaps what it can overlap. `whole` prices the
    best plan that was found, where all that these spaces have was searched."""
    if searched.status is not Status.OPTIMAL:
        return {}
    job = replace(asked, execution=replace(asked.execution, decoupled_step=None))
    best: dict[str, float] = {}
    known, sharing = searched.known, Sharing()
    for name in hand_made_spaces(job):
        if name == searched.space.name:
            continue
        space = space_named(name)
        try:
            choices = execution_choices(job, space, Limits())
            within_s = None if whole is None else best_within(searched, whole, choices, space)
            if within_s is not None:
                best[name] = within_s
                continue
            ways = ways_of(choices, lambda choice: sharing.of(choice.job))
            result = search_ways(ways, space, Settings(known=known))
        except (InputError, NoFeasiblePlan):
            continue
        known = (*known, *result.known)
        best[name] = result.objective_s
    return best
