"""What `assign` minimises as a mixed-integer program in PuLP: the second opinion.

Binaries choose one (layers, GPUs, front point) per stage; epigraph variables carry the maxima.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pulp

from mist_megatron.errors import InputError
from mist_megatron.search.assign import Assignment, Pipelines, Size, StageFronts
from mist_megatron.search.points import Ends, Front, Point, steady_s, value_of

MilpSolver = Literal["highs", "cbc"]
Option = tuple[Size, int]
"""A size of a stage, and a position in its front."""


def assign_milp(
    pipelines: Pipelines, grad_accum: int, best_s: float = np.inf, solver: MilpSolver = "highs"
) -> Assignment | None:
    """The optimal assignment if it is better than `best_s`, else None: one program per length."""
    best: Assignment | None = None
    with warnings.catch_warnings():
        # PuLP 3 announces the interface of PuLP 4, which needs Python 3.12; we pin 3.
        warnings.simplefilter("ignore", DeprecationWarning)
        for after, first in sorted(pipelines.first.items()):
            if after > len(pipelines.inner):
                break
            stages = [first, *reversed(pipelines.inner[:after])]
            answer = _assign_milp(pipelines, stages, grad_accum, best_s, solver)
            if answer is not None:
                best, best_s = answer, answer.value_s
    return best


def _assign_milp(
    pipelines: Pipelines,
    stages: Sequence[StageFronts],
    grad_accum: int,
    best_s: float,
    solver: MilpSolver,
) -> Assignment | None:
    options = [
        [(size, k) for size, front in sorted(fronts.items()) for k in range(len(front.t_s))]
        for fronts in stages
    ]
    if any(not choices for choices in options):
        return None
    # Times are scaled to about 1, so that the solver's absolute tolerances mean something.
    scale = float(np.mean([front.t_s.mean() for fronts in stages for front in fronts.values()])) or 1.0
    problem = pulp.LpProblem("assignment", pulp.LpMinimize)
    picks = _picks(problem, options)
    times, extras, steps = _times(stages, options, picks, scale)
    steady = pulp.LpVariable("steady", lowBound=0)
    second = pulp.LpVariable("second")
    step = pulp.LpVariable("step", lowBound=0)
    total = steady + second + step
    problem += total
    _add_sizes(problem, pipelines, options, picks)
    for index, (time, extra, last) in enumerate(zip(times, extras, steps, strict=True)):
        ends = Ends.of(grad_accum, len(stages) - 1 - index, len(stages), pipelines.chunks)
        problem += steady >= _without_behind(stages[index], options[index], picks[index], ends) / scale
        if ends.waits_twice:
            in_turn = _in_turn(stages[index], options[index], picks[index]) * (grad_accum - 1.5) / scale
            behind = pulp.lpSum(times[index + 1 :])
            problem += steady >= (grad_accum - 1 - ends.filling) * time + in_turn + behind
        problem += step >= last
        problem += second >= extra + pulp.lpSum(times[index:])
    if np.isfinite(best_s):
        problem += total <= best_s / scale
    problem.solve(_solver(solver))
    if problem.status == pulp.LpStatusNotSolved and solver == "highs":
        # HiGHS 1.16.0 ends with an error in some problems that its presolve has made smaller.
        problem.solve(_solver(solver, presolve="off"))
    # `status` says Optimal for any incumbent; `sol_status` tells a proved one from the rest.
    if problem.sol_status != pulp.LpSolutionOptimal:
        if problem.status == pulp.LpStatusInfeasible:
            return None
        raise RuntimeError(f"{solver} ended without a proof: {pulp.LpSolution[problem.sol_status]}")
    chosen = [choices[_picked(row)] for choices, row in zip(options, picks, strict=True)]
    points = [Point.of(stages[k][size], index) for k, (size, index) in enumerate(chosen)]
    value_s = value_of(points, grad_accum, chunks=pipelines.chunks)
    if value_s >= best_s:
        return None
    return Assignment(tuple(size for size, _ in chosen), tuple(index for _, index in chosen), value_s)


def _add_sizes(
    problem: Any, pipelines: Pipelines, options: list[list[Option]], picks: list[list[Any]]
) -> None:
    """All layers and all GPUs are taken, and no stage straddles nodes: stage i begins at GPU o_i, on node
    n_i, and ends before the last of the c_i nodes that it takes does."""

    def total(row: Sequence[Any], choices: list[Option], size: Callable[[Size], int]) -> Any:
        return pulp.lpSum(size(which) * pick for (which, _), pick in zip(choices, row, strict=True))

    stages = list(zip(picks, options, strict=True))
    problem += pulp.lpSum(total(row, o, lambda size: size[0]) for row, o in stages) == pipelines.layers
    for one, two in pairwise(stages):
        for left, right in np.argwhere(~pipelines.neighbours):
            problem += total(*one, _is_kind(int(left))) + total(*two, _is_kind(int(right))) <= 1
    if not pipelines.gpus:
        return
    gpus = [total(row, choices, lambda size: size[1]) for row, choices in stages]
    problem += pulp.lpSum(gpus) == pipelines.gpus
    per_node = pipelines.gpus_per_node
    for index, (row, choices) in enumerate(stages) if per_node else ():
        begin = pulp.lpSum(gpus[:index])
        node = pulp.LpVariable(f"node_{index}", lowBound=0, cat="Integer")
        nodes = total(row, choices, lambda size: -(-size[1] // per_node))
        problem += begin >= per_node * node
        problem += begin + gpus[index] <= per_node * (node + nodes)


def _is_kind(kind: int) -> Callable[[Size], int]:
    return lambda size: int(size[2] == kind)


def _picks(problem: Any, options: list[list[Option]]) -> list[list[Any]]:
    """One binary per stage and option, exactly one of them set per stage."""
    rows = []
    for stage, choices in enumerate(options):
        row = [pulp.LpVariable(f"z_{stage}_{k}", cat="Binary") for k in range(len(choices))]
        problem += pulp.lpSum(row) == 1
        rows.append(row)
    return rows


def _times(
    stages: Sequence[StageFronts],
    options: list[list[Option]],
    picks: list[list[Any]],
    scale: float,
) -> tuple[list[Any], list[Any], list[Any]]:
    """t, d and step of every stage as linear expressions of the picks."""
    times: list[Any] = []
    extras: list[Any] = []
    steps: list[Any] = []
    for fronts, choices, row in zip(stages, options, picks, strict=True):
        cost = [(fronts[size].t_s[k], fronts[size].d_s[k], _step(fronts[size], k)) for size, k in choices]
        for column, coefficients in enumerate((times, extras, steps)):
            each = zip(cost, row, strict=True)
            coefficients.append(pulp.lpSum(float(point[column]) / scale * pick for point, pick in each))
    return times, extras, steps


def _without_behind(fronts: StageFronts, choices: list[Option], row: Sequence[Any], ends: Ends) -> Any:
    """u of a stage with nothing behind it."""
    each = {
        size: steady_s(f.t_s, f.longer_pass_s(), f.in_turn_s, ends, -np.inf) for size, f in fronts.items()
    }
    return pulp.lpSum(float(each[size][k]) * pick for (size, k), pick in zip(choices, row, strict=True))


def _in_turn(fronts: StageFronts, choices: list[Option], row: Sequence[Any]) -> Any:
    return pulp.lpSum(fronts[size].in_turn_s * pick for (size, _), pick in zip(choices, row, strict=True))


def _step(front: Front, index: int) -> float:
    return 0.0 if front.step_s is None else float(front.step_s[index])


def _solver(name: MilpSolver, **words: str) -> Any:
    if name == "cbc":
        return pulp.PULP_CBC_CMD(msg=False, gapRel=1e-9)
    highs = pulp.HiGHS(msg=False, gapRel=1e-9, **words)
    if not highs.available():
        raise InputError("--solver milp: HiGHS is not installed; pip install 'mist-megatron[milp]'")
    return highs


def _picked(row: list[Any]) -> int:
    return next(k for k, pick in enumerate(row) if pick.value() is not None and pick.value() > 0.5)


def usable_solvers() -> Mapping[str, bool]:
    """Solver -> whether it answers. The exact search needs none of them; `--solver milp` needs one."""
    with warnings.catch_warnings():
        # PuLP 3 announces the interface of PuLP 4, which needs Python 3.12; we pin 3.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            "highs": bool(pulp.HiGHS(msg=False).available()),
            "cbc": bool(pulp.PULP_CBC_CMD(msg=False).available() or pulp.COIN_CMD(msg=False).available()),
        }
