"""One shape or mixed family: its best plan, here or in another process."""

from __future__ import annotations

import pickle
from functools import lru_cache

from mist_megatron.search.bounds import EqualBound, SearchProblem
from mist_megatron.search.equal import solve_equal
from mist_megatron.search.families import MixedFamily
from mist_megatron.search.kinds import solve_kinds
from mist_megatron.search.known import Item
from mist_megatron.search.mixed import MixedBound, solve_mixed
from mist_megatron.search.node_groups import solve_groups
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.queue import Bound
from mist_megatron.search.solution import Solved


def solve(question: SearchProblem, item: Item, bound: Bound, best_s: float) -> Solved:
    """The best plan of a shape or mixture if it beats `best_s`."""
    if isinstance(item, MixedFamily) and isinstance(bound, MixedBound):
        return solve_mixed(question, item, bound, best_s)
    assert isinstance(item, EqualPipeline) and isinstance(bound, EqualBound)
    if item.order or len(question.evaluator.job.model.kinds) > 1:
        return (solve_groups if item.order else solve_kinds)(question, item, best_s)
    return solve_equal(question, item, bound, best_s)


def solve_told(told: bytes, item: Item, bound: Bound, best_s: float) -> Solved:
    """`solve` in another process, where the question is read once."""
    return solve(_question(told), item, bound, best_s)


@lru_cache(maxsize=64)
def _question(told: bytes) -> SearchProblem:
    question: SearchProblem = pickle.loads(told)
    return question
