"""Bounds of shapes with experts: none is above what a plan of the shape takes."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from test_experts_found import SPACE, evaluator_of, random_job

from mist_megatron.cost.iteration import StageTiming, iteration_time
from mist_megatron.search.bounds import SearchProblem, shape_bounds
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.experts import cut_to_experts
from mist_megatron.search.pipelines import EqualPipeline, families, shapes
from mist_megatron.search.queue import ordered_spread
from mist_megatron.search.solve import solve
from mist_megatron.search.space import Limits, cut_to_target
from mist_megatron.search.spread import SpreadShapes, least_maximum, least_steady_s
from mist_megatron.search.spread_rows import distinct_sizes
from mist_megatron.search.ways import every


@pytest.mark.parametrize("seed", [1, 3, 11, 12])
def test_no_plan_of_a_shape_beats_its_bounds(seed: int) -> None:
    job = random_job(seed)
    choices = execution_choices(job, SPACE, Limits())
    rng = np.random.default_rng(seed)
    choice = choices[int(rng.integers(len(choices)))]
    evaluator = evaluator_of(choice.job)
    space = cut_to_experts(cut_to_target(SPACE, job.target, None, choice.job.execution), job)
    question = SearchProblem(evaluator=evaluator, space=space, step=1.0)
    found = list(families(choice.job, space, Limits()))
    floors_s = {shape: s for s, shape in SpreadShapes(question, found, every).below(math.inf)}
    bounds_s = {
        shape: bound.value_s
        for bound, shape in ordered_spread(question, found, every).queues[0].below(math.inf)
    }
    listed = list(shapes(choice.job, space, Limits()))
    for place in rng.permutation(len(listed))[:24]:
        shape = listed[place]
        bound = (
            next(b for b, s in ordered_spread(question, [_alone(shape)], every).queues[0].below(math.inf))
            if (shape in bounds_s)
            else None
        )
        if bound is None:
            continue
        solved = solve(question, shape, bound, math.inf).solution
        if solved is not None:
            assert floors_s[shape] <= bounds_s[shape] * (1 + 1e-12) <= solved.value_s * (1 + 1e-9), shape


@pytest.mark.parametrize("seed", [1, 3, 11, 12])
def test_shapes_priced_together_have_the_bounds_that_they_have_alone(seed: int) -> None:
    """Of many numbers of stages, nodes and GPUs on a node, with and without sequence parallelism: floors,
    which know of states, and bounds, which know nothing of memory."""
    job = random_job(seed)
    choice = execution_choices(job, SPACE, Limits())[0]
    space = cut_to_experts(cut_to_target(SPACE, job.target, None, choice.job.execution), job)
    question = SearchProblem(evaluator=evaluator_of(choice.job), space=space, step=1.0)
    listed = list(shapes(choice.job, space, Limits()))
    assert len({(shape.stages, shape.nodes, shape.gpus_per_node) for shape in listed}) > 1
    together = {
        shape: s for s, shape in SpreadShapes(question, [_alone(s) for s in listed], every).below(1e9)
    }
    bounds = dict(zip(listed, shape_bounds(question, listed), strict=True))
    rng = np.random.default_rng(seed)
    for place in rng.permutation(len(listed))[:24]:
        shape = listed[place]
        alone = SpreadShapes(question, [_alone(shape)], every).below(1e9)
        assert together.get(shape) == (pytest.approx(alone[0][0], rel=1e-12) if alone else None)
        (bound,) = shape_bounds(question, [shape])
        assert bound.value_s == pytest.approx(bounds[shape].value_s, rel=1e-12)


def _alone(shape: EqualPipeline) -> tuple[EqualPipeline, tuple[tuple[int, int], ...]]:
    return shape, ((shape.ep, shape.etp),)


def test_no_stages_that_differ_wait_less_than_the_least() -> None:
    """Of few micro-batches the even split is not the fastest: warm-up passes of a longer first stage fill its
    waits (three stages, three micro-batches, 9/7, 6/7 and 6/7 of the mean take 4.71 of it, even ones 5)."""
    rng, nearest = np.random.default_rng(5), math.inf
    for _ in range(3000):
        stages, grad_accum = int(rng.integers(1, 7)), int(rng.integers(1, 10))
        t_s = (
            rng.uniform(0.2, 1.0, stages)
            if rng.random() < 0.5
            else 1.0 + (np.arange(stages) == 0) * rng.random()
        )
        timings = [StageTiming(stable_s=float(t), delta_s=0.0, forward_s=float(0.5 * t)) for t in t_s]
        told_s = iteration_time(timings, grad_accum).total_s
        seconds = np.array(t_s.mean()), np.array(rng.uniform(t_s.mean(), t_s.max()))
        least_s = float(least_steady_s(stages, np.array(grad_accum - 1.0), *seconds)) + t_s.sum()
        assert least_s <= told_s * (1 + 1e-9), (t_s, grad_accum)
        nearest = min(nearest, told_s / least_s)
    assert nearest < 1 + 1e-9


def test_the_heaviest_run_is_as_light_as_can_be() -> None:
    loads = np.array([[1.0], [1.0], [3.0], [3.0], [3.0]])
    assert least_maximum(loads, np.array([0.0]), np.array([0.0]), 3) == [5.0]
    assert least_maximum(loads, np.array([4.0]), np.array([0.0]), 3) == [6.0]
    assert least_maximum(loads, np.array([0.0]), np.array([2.0]), 1) == [13.0]


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("unlike", [0, 1, 2, 5])
def test_no_split_is_lighter(stages: int, unlike: int) -> None:
    """Of layers of which all but the first few weigh the same, and of others."""
    rng = np.random.default_rng(stages)
    loads = np.tile(rng.uniform(0.1, 2.0, 40), (9, 1))
    loads[:unlike] = rng.uniform(0.1, 9.0, (unlike, 40))
    first, last = rng.choice([0.0, 0.7, 9.0], (2, 40))
    least = np.full(40, np.inf)
    for cuts in combinations(range(1, 9), stages - 1):
        runs = np.array([part.sum(axis=0) for part in np.split(loads, cuts)])
        runs[0] += first
        runs[-1] += last
        least = np.minimum(least, runs.max(axis=0))
    assert least_maximum(loads, first, last, stages) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("most", [9, 5_000_000])
def test_rows_are_told_apart_however_large(most: int) -> None:
    """Six columns of seven digits fit no number of 64 bits."""
    rng = np.random.default_rng(11)
    rows = rng.integers(0, most, (300, 6)).astype(float)
    rows = np.concatenate((rows, rows[:50], np.full((1, 6), float(most))))
    distinct, index = distinct_sizes(rows)
    assert np.array_equal(distinct[index], rows)
    assert np.array_equal(distinct, np.unique(rows, axis=0))
