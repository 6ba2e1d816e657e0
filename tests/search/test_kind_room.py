"""Which shapes of models whose layers differ may fit, against what is found when they are solved."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from short_form import one_of
from test_kinds import LAYERS, job_with, widths_job

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.kind_bounds import bounds_of_kinds
from mist_megatron.search.kind_room import may_fit
from mist_megatron.search.kinds import cut_to_kinds, solve_kinds
from mist_megatron.search.pipelines import EqualPipeline, families, shapes
from mist_megatron.search.space import Limits, cut_to_target, space_named
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import STAYS
from mist_megatron.spec.model import LayerGroup
from mist_megatron.spec.presets import preset

NEAR = 5e-3
"""Relative, of bytes."""


def mixture() -> Job:
    """Two dense layers, then such with experts."""
    model = preset("deepseek-v2-lite")
    groups = [LayerGroup(layers=n, pattern=(kind,)) for n, kind in zip((2, 4), model.kinds, strict=True)]
    return replace(job_with(60.0), model=replace(model, layers=LAYERS, vocab=8192, groups=tuple(groups)))


def some_shapes(job: Job, question: SearchProblem) -> list[EqualPipeline]:
    """One of each number of stages and chunks."""
    if job.model.routed is None:
        every = list(shapes(job, question.space, Limits()))
    else:
        spread = families(job, question.space, Limits())
        every = [varied(shape, ep=ep, etp=etp) for shape, spreads in spread for ep, etp in spreads]
    alike: dict[tuple[int, int], list[EqualPipeline]] = {}
    for shape in every:
        alike.setdefault((shape.stages, shape.vpp), []).append(shape)
    rng = random.Random(len(every))
    return [rng.choice(some) for some in alike.values()]


def least_limit(question: SearchProblem, shape: EqualPipeline) -> float:
    """With less than so many bytes a shape is told not to fit."""
    low, high = 2.0**30, 2.0**37
    while high > low * (1.0 + NEAR):
        question.evaluator.limit_bytes = middle = math.sqrt(low * high)
        low, high = (low, middle) if may_fit(question, [shape])[0] else (middle, high)
    return high


JOBS = {"dense": job_with(60.0), "widths": widths_job(60.0), "experts": mixture()}


@pytest.mark.parametrize("job", one_of(2, JOBS))
def test_what_is_told_not_to_fit_has_no_plan(job: str) -> None:
    """With a little less than the least limit with which a shape may fit none is found, and with a little
    more one of most; of many shapes at once the same is told."""
    evaluator, _ = evaluator_for(JOBS[job])
    full = space_named("full")
    space = replace(cut_to_kinds(cut_to_target(full, JOBS[job].target), full, JOBS[job]), offload=STAYS)
    question = SearchProblem(evaluator=evaluator, space=space, step=1.0)
    some = some_shapes(JOBS[job], question)
    limits = [least_limit(question, shape) for shape in some]
    found = []
    bounds = bounds_of_kinds(question, some)
    for shape, bound, limit in zip(some, bounds, limits, strict=True):
        evaluator.limit_bytes = limit * (1.0 - NEAR)
        assert solve_kinds(question, shape, bound, math.inf).solution is None, shape
        evaluator.limit_bytes = limit * (1.0 + NEAR)
        found.append(solve_kinds(question, shape, bound, math.inf).solution is not None)
    evaluator.limit_bytes = max(limits) * (1.0 - NEAR)
    assert may_fit(question, some).tolist() == [evaluator.limit_bytes >= least for least in limits]
    assert sum(found) > 0.5 * len(found)
