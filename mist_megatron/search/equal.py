"""One shape: the best assignment of layers and configurations to its stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mist_megatron.search.assign import Assignment, Pipelines, assign, improves, in_line
from mist_megatron.search.borders import ROLES, crossings_s
from mist_megatron.search.bounds import EqualBound, SearchProblem, split_bounds
from mist_megatron.search.choices import (
    Choices,
    slot_at,
)
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.solution import Solved, StageChoice, stage_choice, told
from mist_megatron.search.splits import split_rows, splits_layers
from mist_megatron.search.stage_fronts import StageConfigs, StageTimes, Tally, slot_configs
from mist_megatron.search.uniform import MOST_TOLD, SplitGrids, alike_in
from mist_megatron.spec.mesh import StageRole, role_of

SAME = 1e-9
"""Relative, of times that are sums in another order."""


def solve_equal(question: SearchProblem, shape: EqualPipeline, bound: EqualBound, best_s: float) -> Solved:
    """The best plan of a shape if it beats `best_s`."""
    space, stages = question.space, shape.stages
    if stages == 1 or (space.per_stage and not splits_layers(space, stages, shape.vpp)):
        return _solve_per_stage(question, shape, bound, best_s)
    solved = Solved()
    if space.per_stage and question.evaluator.job.model.layers % (stages * shape.vpp) == 0:
        solved = _solve_per_stage(question, shape, bound, best_s)
    (alike,) = solve_beside(question, [(shape, bound)], [min(best_s, solved.left_s)])
    alike.tally.add(solved.tally)
    return alike if alike.solution is not None else replace(solved, tally=alike.tally)


def _solve_per_stage(
    question: SearchProblem, shape: EqualPipeline, bound: EqualBound, best_s: float
) -> Solved:
    layers = question.evaluator.job.model.layers
    caps_s = {role: bound.cap_s(shape, role, best_s) for role in StageRole}
    windows = _layer_windows(question, shape, bound, caps_s)
    if not _may_beat(question, shape, bound, windows, best_s):
        return Solved()
    tally = Tally()
    choices = Choices(space=question.space, shape=shape, step=question.step)
    times = StageTimes(question.evaluator, choices, windows)
    configs: list[dict[int, StageConfigs]] = [{} for _ in range(shape.stages)]
    for role, window in windows.items():
        positions = [k for k in range(shape.stages) if role_of(k, shape.stages) is role]
        for count in window:
            question.tick()
            slots = [slot_at(shape, position, count) for position in positions]
            of_slot, more = slot_configs(times, slots, caps_s[role])
            tally.add(more)
            for position, here in zip(positions, of_slot, strict=True):
                if here is not None:
                    configs[position][count] = here
    if not all(configs):
        return Solved(tally=tally)
    crossed = crossings_s(question.evaluator, shape)
    fronts = [
        {count: c.front(shape.vpp).beside(more) for count, c in here.items()}
        for here, more in zip(configs, crossed, strict=True)
    ]
    pipelines = in_line(fronts, layers, chunks=shape.vpp)
    answer = assign_by(question, pipelines, shape.grad_accum * shape.vpp, best_s)
    if answer is None:
        return Solved(tally=tally)
    rows = zip(answer.layers, configs, answer.choice, strict=True)
    stages = [stage_choice(count, here[count], index) for count, here, index in rows]
    return Solved(told(question.evaluator, shape, stages), answer.value_s, tally)


def _may_beat(
    question: SearchProblem,
    shape: EqualPipeline,
    bound: EqualBound,
    windows: Mapping[StageRole, range],
    best_s: float,
) -> bool:
    """Whether the best split of the layers is fast enough, memory unlimited."""
    if shape.stages == 1 or shape.vpp > 1 or not question.space.uneven_layers or not np.isfinite(best_s):
        return True
    crossed = bound.crossed or ((0.0, 0.0),) * shape.stages
    kinds = [(role_of(position, shape.stages), more) for position, more in enumerate(crossed)]
    least = dict(zip(ROLES, bound.stages, strict=True))
    fronts = {
        (role, more): {count: least[role].front(count).beside(more) for count in windows.get(role, ())}
        for role, more in set(kinds)
    }
    stages = [fronts[kind] for kind in kinds]
    pipelines = in_line(stages, question.evaluator.job.model.layers)
    return improves(pipelines, shape.grad_accum, best_s, question.tick)


def assign_by(
    question: SearchProblem, pipelines: Pipelines, grad_accum: int, best_s: float
) -> Assignment | None:
    """By the solver that was asked for."""
    if question.solver == "exact":
        return assign(pipelines, grad_accum, best_s, question.tick)
    from mist_megatron.search.milp import assign_milp

    return assign_milp(pipelines, grad_accum, best_s)


def _layer_windows(
    question: SearchProblem, shape: EqualPipeline, bound: EqualBound, caps_s: Mapping[StageRole, float]
) -> dict[StageRole, range]:
    """Numbers of layers worth pricing per role: under the cap, and leaving room for the others."""
    total, stages, vpp = question.evaluator.job.model.layers, shape.stages, shape.vpp
    counts = Counter(role_of(position, stages) for position in range(stages))
    if not question.space.uneven_layers or stages == 1 or vpp > 1:
        return dict.fromkeys(counts, range(total // stages, total // stages + 1))
    most = {}
    for role in counts:
        fast = bound.stages[ROLES.index(role)].t_s[: total - (stages - 1)] <= caps_s[role]
        most[role] = int(np.flatnonzero(fast)[-1]) + 1 if fast.any() else 0
    room = sum(count * most[role] for role, count in counts.items())
    return {role: range(max(1, total - (room - most[role])), most[role] + 1) for role in counts}


def beside(question: SearchProblem, shape: EqualPipeline) -> object:
    """What shapes have in common that `solve_beside` can solve at once; None of one that is solved alone."""
    several = bool(shape.order) or len(question.evaluator.job.model.kinds) > 1
    alone = several or shape.stages == 1 or question.space.per_stage
    return None if alone else alike_in(question, shape)


def solve_beside(
    question: SearchProblem, pairs: Sequence[tuple[EqualPipeline, EqualBound]], beats_s: Sequence[float]
) -> list[Solved]:
    """The best plans of shapes whose stages have one configuration each, of each if it beats what is said for
    it: the whole grid, of the splits of the layers that may, as many at once as their grids are small."""
    best = [Solved(tally=Tally()) for _ in pairs]
    splits = [_splits_of(question, shape, bound) for shape, bound in pairs]
    left = {recompute: list(splits) for recompute in question.space.recompute}
    while any(map(any, left.values())):
        for recompute, opened in left.items():
            wanted_s = [min(beat_s, _told_s(one)) for beat_s, one in zip(beats_s, best, strict=True)]
            promising = [
                [split for least_s, split in mine if least_s < most_s]
                for mine, most_s in zip(opened, wanted_s, strict=True)
            ]
            rows = [(pairs[k][0], split) for k, mine in enumerate(promising) for split in mine]
            if not rows:
                left[recompute] = [[] for _ in pairs]
                continue
            grids = SplitGrids(question, rows, recompute)
            taken = len(grids.rows)
            for k, (shape, _) in enumerate(pairs):
                count, mine = min(taken, len(promising[k])), promising[k]
                taken -= count
                opened[k] = opened[k][count:] if mine else []
                if count:
                    least = grids.least(shape, wanted_s[k], best[k].tally)
                    best[k] = _told_best(question, shape, least, best[k], beats_s[k])
    return [
        one if one.solution is None else replace(one, left_s=min(one.left_s, _told_s(one), beat_s))
        for one, beat_s in zip(best, beats_s, strict=True)
    ]


def _splits_of(
    question: SearchProblem, shape: EqualPipeline, bound: EqualBound
) -> list[tuple[float, tuple[int, ...]]]:
    """Splits of the layers, and seconds that no plan of each beats, the least first."""
    layers, stages, vpp = question.evaluator.job.model.layers, shape.stages, shape.vpp
    if not splits_layers(question.space, stages, vpp):
        return [(0.0, (layers // stages,) * stages)]
    table = split_rows(question.space, layers, stages, vpp)
    bounds_s = split_bounds(shape, bound.stages, table, bound.crossed)
    return sorted(zip(bounds_s.tolist(), map(tuple, table.tolist()), strict=True))


def _told_s(solved: Solved) -> float:
    return math.inf if solved.solution is None else solved.solution.value_s


def _told_best(
    question: SearchProblem,
    shape: EqualPipeline,
    least: Sequence[tuple[float, list[StageChoice]]],
    best: Solved,
    best_s: float,
) -> Solved:
    """The best of these and what there was, as `predict` tells them: what it adds for passes before a slow
    border is more for some splits than for others."""
    for value_s, rows in least:
        if value_s >= best_s or value_s >= _told_s(best) * (1 - SAME):
            return best
        question.tick()
        solution = told(question.evaluator, shape, rows)
        best = replace(best, solution=solution) if solution.value_s < _told_s(best) else best
    if len(least) == MOST_TOLD:
        return replace(best, left_s=min(best.left_s, least[-1][0]))
    return best
