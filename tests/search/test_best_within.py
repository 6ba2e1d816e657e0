"""The best plan of a space within one that was searched is what a search of its own finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import small_job

from mist_megatron.ask.tune import tune
from mist_megatron.errors import InputError
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.search import Settings
from mist_megatron.search.space import Limits, space_named
from mist_megatron.search.within import best_within
from mist_megatron.spec.experts import ExpertSpec


def mixture():
    """Eight experts on four GPUs with room for all of them."""
    job = small_job("megatron", layers=4, batch=8)
    model = replace(job.model, experts=ExpertSpec(count=8, top_k=2, ffn_hidden=1024))
    return replace(job, model=model)


@pytest.mark.parametrize("limit_gib", [None, 8.0])
def test_nothing_is_searched_where_the_best_of_both_is_known(limit_gib: float | None) -> None:
    job = small_job("megatron", limit_gib=limit_gib)
    found = tune(job)
    told = 0
    for name in ("megatron", "megatron-expert"):
        space = space_named(name)
        choices = execution_choices(job, space, Limits())
        within_s = best_within(found.result, found.evaluators[0], choices, space)
        own_s = tune(job, space=space).result.objective_s
        assert found.baselines().get(name, own_s) == pytest.approx(own_s, rel=1e-12)
        if own_s > found.iteration_s * (1 + 1e-9):
            assert within_s is None
        if within_s is not None:
            assert within_s == pytest.approx(own_s, rel=1e-12)
            told += 1
    assert told, "no space held the best plan"


def test_limits_of_the_wider_search_are_not_those_of_spaces_by_hand() -> None:
    """Where tp is fixed the best of what was searched proves nothing of what was not."""
    job = small_job("megatron")
    fixed = tune(job, settings=Settings(limits=parse_limits(("tp=4",), (), ())))
    free_s = tune(job, space=space_named("megatron-expert")).iteration_s
    assert free_s < fixed.iteration_s
    assert fixed.baselines()["megatron-expert"] == pytest.approx(free_s, rel=1e-12)


@pytest.mark.parametrize("name", ["megatron", "3d"])
def test_experts_with_tensor_parallelism_have_sequence_parallelism_in_every_space(name: str) -> None:
    job = mixture()
    limits = parse_limits(("tp=2",), (), ())
    found = tune(job, space=space_named(name), settings=Settings(limits=limits))
    assert found.plan.sequence_parallel and found.plan.stages[0].tp == 2
    banned = parse_limits(("tp=2",), ("sequence_parallel",), ())
    with pytest.raises(InputError, match="tp is 2 without sequence_parallel"):
        tune(job, space=space_named(name), settings=Settings(limits=banned))
