"""Plans that take exactly as long: which is told follows from the plans alone, not from what was looked at
first, how many were wanted, or who was done first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from jobs import evaluator_of, small_job
from short_form import one_of
from test_told_is_proved import ONE_CHUNK, random_job

from mist_megatron.errors import NoFeasiblePlan
from mist_megatron.search.search import SearchResult, Settings, search, search_ways
from mist_megatron.search.solution import Solution, place_of
from mist_megatron.search.space import space_named
from mist_megatron.search.ways import Way
from mist_megatron.spec.plan import Execution

ONE_WAY = (
    Execution(overlap_grad_reduce=True),
    Execution(overlap_grad_reduce=True, deterministic=False),
    Execution(overlap_grad_reduce=True, expert_imbalance=1.0),
)
"""Of a model without experts, by three names."""


def plans(result: SearchResult) -> list[tuple[Any, ...]]:
    return [(one.shape, one.stages, one.execution) for one in result.solutions]


def of_ways(order: tuple[int, ...], workers: int = 0, **settings: int) -> list[tuple[Any, ...]]:
    job = small_job("megatron", gpus=4, layers=4, batch=16)
    jobs = [replace(job, execution=ONE_WAY[place]) for place in order]
    ways = [Way(evaluator=evaluator_of(one)) for one in jobs]
    asked = ways, space_named("megatron"), Settings(**settings), None
    if not workers:
        return plans(search_ways(*asked))
    with ThreadPoolExecutor(workers) as pool:
        return plans(search_ways(*asked, pool, workers))


def test_the_plainest_of_equal_ways_is_told() -> None:
    plain = {top: of_ways((0,), top=top) for top in (1, 4)}
    for order in ((0, 2), (2, 0)):
        assert all(of_ways(order, top=top) == told for top, told in plain.items())
    told = {order: of_ways(order, top=4) for order in permutations(range(3))}
    assert all(one == told[0, 1, 2] for one in told.values())
    assert [one[:2] for one in told[0, 1, 2]] == [one[:2] for one in plain[4]]


def test_who_is_done_first_changes_nothing() -> None:
    alone = of_ways((2, 1, 0), top=4)
    assert all(of_ways((2, 1, 0), workers, top=4) == alone for workers in (2, 5))


@pytest.mark.parametrize("seed", one_of(5, range(100, 108)))
def test_fewer_plans_are_the_first_of_more(seed: int) -> None:
    """On one replica ZeRO levels are alike, and where nothing is exposed other choices are."""
    job, space = random_job(seed)
    evaluator = evaluator_of(job)

    def first(top: int) -> list[Solution]:
        try:
            settings = Settings(step=1.0, limits=ONE_CHUNK, top=top)
            return list(search(evaluator, space, settings).solutions)
        except NoFeasiblePlan:
            return []

    more = first(6)
    assert more == sorted(more, key=place_of)
    assert len({place_of(one) for one in more}) == len(more)
    for top in (1, 2, 4):
        assert first(top) == more[:top]
