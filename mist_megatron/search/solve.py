"""One shape or mixed family: its best plan, here or in another process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache

from mist_megatron.search.bounds import EqualBound, SearchProblem
from mist_megatron.search.equal import beside, solve_beside, solve_equal
from mist_megatron.search.families import MixedFamily
from mist_megatron.search.kinds import solve_kinds
from mist_megatron.search.known import Item
from mist_megatron.search.mixed import MixedBound, solve_mixed
from mist_megatron.search.node_groups import solve_groups
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.queue import Bound, Pair
from mist_megatron.search.solution import Solved


def solve(question: SearchProblem, item: Item, bound: Bound, best_s: float) -> Solved:
    """The best plan of a shape or mixture if it beats `best_s`."""
    if isinstance(item, MixedFamily) and isinstance(bound, MixedBound):
        return solve_mixed(question, item, bound, best_s)
    assert isinstance(item, EqualPipeline) and isinstance(bound, EqualBound)
    if item.order:
        return solve_groups(question, item, best_s)
    if len(question.evaluator.job.model.kinds) > 1:
        return solve_kinds(question, item, bound, best_s)
    return solve_equal(question, item, bound, best_s)


def alike_with(question: SearchProblem, item: Item) -> Callable[[Item], bool] | None:
    """Which items `solve_besides` solves together with one; None where it has to be alone."""
    common = beside(question, item) if isinstance(item, EqualPipeline) else None
    if common is None:
        return None
    return lambda other: isinstance(other, EqualPipeline) and beside(question, other) == common


def solve_besides(question: SearchProblem, pairs: Sequence[Pair], beats_s: Sequence[float]) -> list[Solved]:
    """The same of an item, and of others that are alike."""
    if len(pairs) == 1:
        ((bound, item),) = pairs
        return [solve(question, item, bound, beats_s[0])]
    shapes = []
    for bound, item in pairs:
        assert isinstance(item, EqualPipeline) and isinstance(bound, EqualBound)
        shapes.append((item, bound))
    return solve_beside(question, shapes, beats_s)


def solve_told(told: bytes, item: Item, bound: Bound, best_s: float) -> Solved:
    """`solve` in another process, where the question is read once."""
    return solve(_question(told), item, bound, best_s)


@lru_cache(maxsize=64)
def _question(told: bytes) -> SearchProblem:
    question: SearchProblem = pickle.loads(told)
    return question
