"""One shape: the best assignment of layers and configurations to its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from mist_megatron.search.assign import Assignment, Pipelines, assign, improves, in_line
from mist_megatron.search.borders import ROLES
from mist_megatron.search.bounds import EqualBound, SearchProblem
from mist_megatron.search.choices import AXES, Choices, slot_at, stage_grid
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.points import Ends, steady_s
from mist_megatron.search.solution import Solved, stage_choice, told
from mist_megatron.search.stage_fronts import StageConfigs, StageTimes, Tally, slot_configs
from mist_megatron.search.stage_prices import Times, beyond_linear
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import RECOMPUTE_KINDS, Recompute


def solve_equal(question: SearchProblem, shape: EqualPipeline, bound: EqualBound, best_s: float) -> Solved:
    """The best plan of a shape if it beats `best_s`."""
    if not question.space.per_stage and shape.stages > 1:
        return _solve_uniform(question, shape, best_s)
    return _solve_per_stage(question, shape, bound, best_s)


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
            found, more = slot_configs(times, slots, caps_s[role])
            tally.add(more)
            for position, here in zip(positions, found, strict=True):
                if here is not None:
                    configs[position][count] = here
    if not all(configs):
        return Solved(tally=tally)
    fronts = [{count: c.front(shape.vpp) for count, c in here.items()} for here in configs]
    pipelines = in_line(fronts, layers, chunked=shape.vpp > 1)
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
    fronts = {
        role: {count: least.front(count) for count in windows.get(role, ())}
        for role, least in zip(ROLES, bound.stages, strict=True)
    }
    stages = [fronts[role_of(position, shape.stages)] for position in range(shape.stages)]
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


def _solve_uniform(question: SearchProblem, shape: EqualPipeline, best_s: float) -> Solved:
    """All stages with one configuration: the whole grid at once."""
    evaluator, space = question.evaluator, question.space
    layers = evaluator.job.model.layers // shape.stages
    tally = Tally()
    best: Solved = Solved(tally=tally)
    for recompute in space.recompute:
        value, first = _uniform_values(question, shape, layers, recompute, tally)
        index = np.unravel_index(int(np.argmin(value)), value.shape)
        if float(value[index]) < min(best_s, best.left_s):
            choice = {name: float(first[name].reshape(-1)[k]) for name, k in zip(AXES, index, strict=True)}
            stage = {"layers": float(layers), **choice, "recompute": float(RECOMPUTE_KINDS.index(recompute))}
            best = Solved(told(evaluator, shape, [stage] * shape.stages), float(value[index]), tally)
    return best


def _uniform_values(
    question: SearchProblem, shape: EqualPipeline, layers: int, recompute: Recompute, tally: Tally
) -> tuple[
    np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]],
]:
    evaluator, vpp = question.evaluator, shape.vpp
    choices = Choices(space=question.space, shape=shape, step=question.step)
    axes = choices.axes(choices.counts(layers, recompute=recompute))
    behind = step = np.zeros(())
    steady = second = np.full((), -np.inf)
    fits = np.ones((), dtype=bool)
    prices = {}
    for position in reversed(range(shape.stages)):
        question.tick()
        slot = slot_at(shape, position, layers)
        grid = stage_grid(shape, slot, axes, recompute=recompute)
        if slot.role not in prices:
            priced = Times.of(evaluator, grid)
            beyond_t, beyond_d = beyond_linear(evaluator, grid)
            prices[slot.role] = (
                (priced.stable.at(grid) - priced.in_turn_s + beyond_t) / vpp,
                priced.delta.at(grid) + beyond_d,
                priced.step.at(grid),
                priced.in_turn_s,
            )
        t_s, d_s, step_s, in_turn_s = prices[slot.role]
        ends = Ends(shape.grad_accum * vpp, 0 if vpp > 1 else shape.stages - 1 - position)
        backward_s = layers * evaluator.loads(grid).block.backward_s
        steady = np.maximum(steady, steady_s(t_s, np.maximum(0.5 * t_s, backward_s), in_turn_s, ends, behind))
        behind = behind + t_s
        second = np.maximum(second, d_s + behind)
        step = np.maximum(step, step_s)
        fits = fits & evaluator.fits(grid)
    value = steady + second + step
    size = tuple(axes[name].size for name in AXES)
    valid = np.broadcast_to(choices.valid(layers, axes), size)
    tally.priced += int(valid.sum())
    tally.over_memory += int((valid & ~np.broadcast_to(fits, size)).sum())
    return np.where(valid & fits, np.broadcast_to(value, size), np.inf), axes
