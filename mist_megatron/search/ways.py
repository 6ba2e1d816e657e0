"""Ways of execution as a search takes them: prices, limits, and what is asked of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.errors import InputError
from mist_megatron.search.bounds import SearchProblem, Solver
from mist_megatron.search.choices import fractions
from mist_megatron.search.execution import ExecutionChoice
from mist_megatron.search.experts import cut_to_experts
from mist_megatron.search.kinds import cut_to_kinds
from mist_megatron.search.node_groups import cut_to_groups
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.space import Limits, Space, apply_limits, cut_to_target
from mist_megatron.search.splits import slow_borders
from mist_megatron.search.spread import Rival
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.plan import Execution


def every(shape: EqualPipeline) -> bool:
    """No shape is left out."""
    return True


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of execution: prices, and what is searched of it."""

    evaluator: StageEvaluator
    limits: Limits = field(default_factory=Limits)
    keeps: Callable[[EqualPipeline], bool] = every
    """Whether a shape is searched in this way."""
    mixes: bool = True
    """Whether stages of different meshes are."""
    after: Callable[[], Sequence[Way]] = tuple
    """Ways that take longer and hold less, made when a shape does not fit in this one."""
    least: Way | None = None
    """What of these, and of those after them, holds least."""


def ways_of(
    choices: Sequence[ExecutionChoice], evaluator_of: Callable[[ExecutionChoice], StageEvaluator]
) -> list[Way]:
    """Choices with their prices; those of what comes after others are made when they are asked for."""

    def way(choice: ExecutionChoice) -> Way:
        after: Callable[[], Sequence[Way]] = tuple
        if choice.after:
            after = partial(ways_of, choice.after, evaluator_of)
        return Way(
            evaluator=evaluator_of(choice),
            limits=choice.limits,
            keeps=choice.keeps,
            mixes=choice.mixes,
            after=after,
            least=None if choice.least is None else way(choice.least),
        )

    return [way(choice) for choice in choices]


def by_execution(ways: Sequence[Way]) -> dict[Execution, Way]:
    """The first of each."""
    return {way.evaluator.job.execution: way for way in reversed(ways)}


def rivals_of(way: Way, ways: Mapping[Execution, Way]) -> list[Rival]:
    """The same with tokens sent once to each rank that has experts of theirs, where that is a way too; and of
    what holds least of both. `ways` are `by_execution`."""
    execution = way.evaluator.job.execution
    if execution.expert_dispatcher == "flex":
        return []
    other = ways.get(varied(execution, expert_dispatcher="flex"))
    if other is None:
        return []
    pairs = [(way, other)]
    pairs += [(way.least, other.least)] if way.least is not None and other.least is not None else []
    return [(one.evaluator, two.evaluator) for one, two in pairs]


def questions_of(
    ways: Sequence[Way], space: Space, step: float, solver: Solver
) -> tuple[list[Way], list[SearchProblem]]:
    """What is asked of each way for which the limits leave something."""
    questions: list[tuple[Way, SearchProblem]] = []
    refused: list[InputError] = []
    for way in ways:
        job = way.evaluator.job
        try:
            runnable = cut_to_target(space, job.target, job.training.precision, job.execution)
            runnable = cut_to_groups(cut_to_kinds(cut_to_experts(runnable, job), space, job), job)
            runnable = replace(runnable, long_ends=runnable.near_even and slow_borders(job))
            cut = apply_limits(runnable, way.limits)
        except InputError as error:
            refused.append(error)
            continue
        question = SearchProblem(evaluator=way.evaluator, space=cut, step=step, solver=solver)
        questions.append((way, question))
    if not questions:
        raise refused[0]
    return [way for way, _ in questions], [question for _, question in questions]


FEW_POINTS = 128
"""Below this many offload fractions per stage the whole grid costs hardly more than its corners: two kinds at
the step of 1/8 are 81 points, and pricing a shape is then mostly the cost of the calls."""


def offload_points(questions: Sequence[SearchProblem]) -> int:
    """Of one stage, where most of them are left."""
    return max(
        math.prod(len(fractions(allowed, question.step)) for allowed in question.space.offload.values())
        for question in questions
    )
