"""A space that lies within another one, of which the best plan is proved: where that plan is of both spaces,
nothing of the narrower one need be searched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.errors import InputError
from mist_megatron.search.execution import ExecutionChoice
from mist_megatron.search.known import KnownBounds
from mist_megatron.search.layer_floors import LayerFloors
from mist_megatron.search.pipelines import EqualPipeline, shapes
from mist_megatron.search.queue import ordered
from mist_megatron.search.search import ROUNDING, SearchResult, Settings, Status
from mist_megatron.search.solve import solve
from mist_megatron.search.space import Space
from mist_megatron.search.ways import questions_of, ways_of


def best_within(
    found: SearchResult, evaluator: StageEvaluator, choices: Sequence[ExecutionChoice], space: Space
) -> float | None:
    """Seconds of the best plan of a space that lies within the one that was searched, with those choices of
    execution, where the best of the wider one is its best, too; else None, and it has to be searched. The
    evaluator is that of the best plan."""
    best = found.solutions[0]
    shape = best.shape
    if found.status is not Status.OPTIMAL or found.gap or not isinstance(shape, EqualPipeline):
        return None
    for choice in _every(choices):
        if choice.job != evaluator.job or not choice.keeps(shape):
            continue
        value_s = _solved(choice, evaluator, space, shape)
        if value_s <= found.objective_s * (1.0 + ROUNDING):
            return value_s
    return None


def _every(choices: Sequence[ExecutionChoice]) -> Iterator[ExecutionChoice]:
    """With all that come after others."""
    for choice in choices:
        yield choice
        yield from _every(choice.after)


def _solved(choice: ExecutionChoice, evaluator: StageEvaluator, space: Space, shape: EqualPipeline) -> float:
    """Seconds of the best plan of one shape, if the space has it."""
    settings = Settings()
    try:
        _, questions = questions_of(
            ways_of([choice], lambda _: evaluator), space, settings.step, settings.solver
        )
    except InputError:
        return math.inf
    question, limits = questions[0], choice.limits
    sizes = {"pp": shape.stages, "tp": shape.tp, "dp": shape.dp, "micro_batch": shape.micro_batch}
    if any(not limits.allows(name, size) for name, size in sizes.items()):
        return math.inf
    fixed = replace(limits, fixed={**limits.fixed, **sizes})
    alike = [one for one in shapes(choice.job, question.space, fixed) if _covers(one, shape)]
    pair = ordered(question, alike[:1], [], KnownBounds(), LayerFloors()).queues[0].next(math.inf)
    if pair is None:
        return math.inf
    solution = solve(question, pair[1], pair[0], math.inf).solution
    return math.inf if solution is None else solution.value_s


def _covers(one: EqualPipeline, shape: EqualPipeline) -> bool:
    """Whether two shapes differ in nothing but the levels of ZeRO and the numbers of sub-groups that they may
    choose from."""
    return replace(one, zero=shape.zero, instances=shape.instances) == shape
