"""Shapes that are priced in the same calls: each has the plan that it has alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from jobs import evaluator_of, small_job

from mist_megatron.search.bounds import EqualBound, SearchProblem, shape_bounds
from mist_megatron.search.equal import beside, solve_beside
from mist_megatron.search.pipelines import EqualPipeline, shapes
from mist_megatron.search.solution import Solved
from mist_megatron.search.space import Limits, cut_to_target, space_named
from mist_megatron.search.uniform import SplitGrids
from mist_megatron.spec.presets import preset


@pytest.mark.parametrize(
    ("space", "gpus", "per_node", "limit_gib"),
    [
        ("full", 8, 8, 6.0),
        ("megatron", 8, 2, 6.0),
        # Stages share nodes, so that middle ones have borders of their own.
        ("full", 16, 8, 1000.0),
    ],
)
def test_shapes_have_the_plans_that_they_have_alone(
    space: str, gpus: int, per_node: int, limit_gib: float
) -> None:
    job = small_job("megatron", gpus=gpus, layers=8, batch=32, limit_gib=limit_gib)
    nodes = replace(job.cluster, nodes=gpus // per_node, gpus_per_node=per_node)
    evaluator = evaluator_of(replace(job, cluster=nodes))
    cut = cut_to_target(space_named(space), "megatron")
    question = SearchProblem(evaluator=evaluator, space=cut, step=0.5)
    every = list(shapes(evaluator.job, cut, Limits()))
    groups = defaultdict(list)
    for shape, bound in zip(every, shape_bounds(question, every), strict=True):
        if (common := beside(question, shape)) is not None:
            groups[common].append((shape, bound))
    several = [pairs for pairs in groups.values() if len(pairs) > 1]
    rng, found = np.random.default_rng(0), 0
    for group in rng.permutation(len(several))[:5]:
        pairs = [several[group][k] for k in sorted(rng.permutation(len(several[group]))[:3])]
        own_s = []
        for one, other in _both(question, pairs, [np.inf] * len(pairs)):
            assert one == other
            found += one.solution is not None
            own_s.append(np.inf if one.solution is None else one.solution.value_s)
        # Less is asked of some than of others.
        beats_s = [value_s * (1 + 1e-6 * (-1) ** k) for k, value_s in enumerate(own_s)]
        assert all(one == other for one, other in _both(question, pairs, beats_s))
    assert found > 2


def _both(
    question: SearchProblem, pairs: list[tuple[EqualPipeline, EqualBound]], beats_s: list[float]
) -> list[tuple[Solved, Solved]]:
    """What each is solved to alone, and with the others."""
    alone = [solve_beside(question, [pair], [beat_s])[0] for pair, beat_s in zip(pairs, beats_s, strict=True)]
    return list(zip(alone, solve_beside(question, pairs, beats_s), strict=True))


def test_more_than_a_call_takes_is_priced_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job("megatron", gpus=8, layers=8, batch=32, limit_gib=8.0)
    cut = cut_to_target(space_named("full"), "megatron")
    question = SearchProblem(evaluator=evaluator_of(job), space=cut, step=1.0)
    some = [shape for shape in shapes(job, cut, Limits()) if shape.stages == 2 and shape.tp == 2]
    mine = [shape for shape in some if beside(question, shape) == beside(question, some[0])]
    pairs = list(zip(mine, shape_bounds(question, mine), strict=True))
    at_once = solve_beside(question, pairs, [np.inf] * len(pairs))
    monkeypatch.setattr("mist_megatron.search.uniform.AT_ONCE", 1)
    assert len(SplitGrids(question, [(mine[0], (4, 4)), (mine[1], (4, 4))], "full").rows) == 1
    assert [one.solution for one in solve_beside(question, pairs, [np.inf] * len(pairs))] == [
        one.solution for one in at_once
    ]


def test_what_is_solved_otherwise_is_solved_alone() -> None:
    """Layers of two kinds, nodes of two kinds, and stages that need not be alike."""
    job = small_job("megatron", gpus=8, layers=8, batch=32)
    dense = evaluator_of(job)
    cut = cut_to_target(space_named("full"), "megatron")
    question = SearchProblem(evaluator=dense, space=cut, step=1.0)
    shape = next(one for one in shapes(job, cut, Limits()) if one.stages == 2)
    assert beside(question, shape) is not None
    assert beside(question, replace(shape, order=(1, 0))) is None
    assert beside(replace(question, space=replace(cut, per_stage=True)), shape) is None
    mixture = evaluator_of(replace(job, model=preset("deepseek-v3")))
    assert beside(replace(question, evaluator=mixture), shape) is None
