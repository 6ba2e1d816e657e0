"""Targets whose stages must all be alike: what becomes of layers that do not divide evenly."""

from __future__ import annotations

import pytest
from jobs import evaluator_of, small_job

from mist_megatron.errors import InputError
from mist_megatron.search.search import Settings, search
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import Limits, space_named

UNEVEN = ("full", "mist", "aceso")


@pytest.mark.parametrize("space", UNEVEN)
def test_every_plan_has_all_layers(space):
    """Three layers on two GPUs, whose memory asks for a pipeline."""
    evaluator = evaluator_of(small_job("megatron", gpus=2, layers=3, batch=16, limit_gib=9.0))
    for solution in search(
        evaluator, space_named(space), Settings(step=1.0, top=20, limits=Limits(fixed={"grad_accum": 16}))
    ).solutions:
        assert sum(stage.layers for stage in plan_of(evaluator, solution).stages) == 3


def test_a_split_that_does_not_divide_is_refused_where_stages_have_equally_many():
    evaluator = evaluator_of(small_job("megatron", gpus=2, layers=3))
    limits = Limits(fixed={"pp": 2})
    with pytest.raises(InputError, match="3 layers"):
        search(evaluator, space_named("megatron"), Settings(limits=limits))
    found = search(evaluator, space_named("full"), Settings(limits=limits, step=1.0)).solutions[0]
    assert sorted(stage["layers"] for stage in found.stages) == [1.0, 2.0]
