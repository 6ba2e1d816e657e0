"""One shape: the best assignment of layers and configurations to its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mist_megatron.cost.grid import StageRole, role_of
from mist_megatron.search.assign import Assignment, Front, Pipelines, assign, improves, in_line
from mist_megatron.search.bounds import EqualBound, SearchProblem
from mist_megatron.search.finer import Pick, Stages, finer
from mist_megatron.search.pipelines import EqualPipeline, MixedPipeline
from mist_megatron.search.stage_fronts import StageConfigs, StageTimes, Tally, slot_configs
from mist_megatron.search.stage_prices import AXES, Choices, Times, slot_at, stage_grid
from mist_megatron.spec.recompute import RECOMPUTE_KINDS, Recompute

ROLES = (StageRole.FIRST, StageRole.MIDDLE, StageRole.LAST)
StageChoice = dict[str, float]
"""Layers and one value per axis: what a stage of a solution runs."""


@dataclass(frozen=True)
class Solution:
    """The best of one shape."""

    shape: EqualPipeline | MixedPipeline
    stages: tuple[StageChoice, ...]
    value_s: float


def solve_equal(
    question: SearchProblem, shape: EqualPipeline, bound: EqualBound, best_s: float
) -> tuple[Solution | None, Tally]:
    """The best plan of a shape if it beats `best_s`."""
    if not question.space.per_stage and shape.stages > 1:
        return _solve_uniform(question, shape, best_s)
    return _solve_per_stage(question, shape, bound, best_s)


def _solve_per_stage(
    question: SearchProblem, shape: EqualPipeline, bound: EqualBound, best_s: float
) -> tuple[Solution | None, Tally]:
    layers = question.evaluator.job.model.layers
    tally = Tally()
    cap_s = np.inf
    if np.isfinite(best_s) and shape.grad_accum > 1:
        # t of the slowest stage, were all other terms at their least.
        cap_s = (best_s - bound.rest_s) / (shape.grad_accum - 1) * (1 + 1e-9)
    windows = _layer_windows(question, shape, bound, cap_s)
    if question.climb:
        # What is ahead by the closed form may be far behind by eq. 1: its own micro-batches are what counts.
        wide = _layer_windows(question, shape, bound, best_s / shape.grad_accum)
        if _size(question, shape, wide) <= MOST_CLIMBED:
            windows, cap_s = wide, best_s / shape.grad_accum
        elif _size(question, shape, windows) > MOST_CLIMBED:
            return None, tally
    if not _may_beat(question, shape, bound, windows, best_s):
        return None, tally
    choices = Choices(space=question.space, shape=shape, step=question.step)
    times = StageTimes(question.evaluator, choices, windows)
    configs: list[dict[int, StageConfigs]] = [{} for _ in range(shape.stages)]
    for role, window in windows.items():
        positions = [k for k in range(shape.stages) if role_of(k, shape.stages) is role]
        for count in window:
            question.tick()
            slots = [slot_at(shape, position, count) for position in positions]
            found, more = slot_configs(times, slots, cap_s)
            tally.add(more)
            for position, here in zip(positions, found, strict=True):
                if here is not None:
                    configs[position][count] = here
    if not all(configs):
        return None, tally
    fronts = [
        {count: Front(c.t_s / shape.vpp, c.d_s, c.step_s) for count, c in here.items()} for here in configs
    ]
    pipelines = in_line(fronts, layers)
    answer = assign_by(question, pipelines, shape.grad_accum * shape.vpp, best_s)
    if answer is None:
        return None, tally
    sized = [{(count, 0, 0): found for count, found in here.items()} for here in configs]
    near = Stages(
        evaluator=question.evaluator,
        grad_accum=shape.grad_accum,
        configs=sized,
        meshes=[shape],
        pipelines=pipelines,
    )
    picks, value_s = picked(question, near, answer)
    stages = tuple(
        stage_choice(size[0], here[size], index) for (size, index), here in zip(picks, sized, strict=True)
    )
    return Solution(shape, stages, value_s), tally


MOST_CLIMBED = 4_000_000
"""Configurations, but for fractions of the optimizer, that a climb may price: some 0.3 s."""


def _size(question: SearchProblem, shape: EqualPipeline, windows: Mapping[StageRole, range]) -> int:
    """Configurations of all slots of a shape."""
    choices = Choices(space=question.space, shape=shape, step=question.step)
    roles = [role_of(position, shape.stages) for position in range(shape.stages)]
    return sum(choices.size(count, recompute="full") for role in roles for count in windows[role])


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


def picked(question: SearchProblem, stages: Stages, answer: Assignment) -> tuple[tuple[Pick, ...], float]:
    """What the stages of an assignment run and its eq. 1, or those of a plan near it that is faster by the
    closed form."""
    if not question.climb:
        return tuple(zip(answer.sizes, answer.choice, strict=True)), answer.value_s
    return finer(stages, answer, question.tick)


def stage_choice(layers: int, configs: StageConfigs, index: int) -> StageChoice:
    return {"layers": float(layers), **{name: float(v[index]) for name, v in configs.columns.items()}}


def _layer_windows(
    question: SearchProblem, shape: EqualPipeline, bound: EqualBound, cap_s: float
) -> dict[StageRole, range]:
    """Numbers of layers worth pricing per role: under the cap, and leaving room for the others."""
    total, stages, vpp = question.evaluator.job.model.layers, shape.stages, shape.vpp
    counts = Counter(role_of(position, stages) for position in range(stages))
    if not question.space.uneven_layers or stages == 1 or vpp > 1:
        return dict.fromkeys(counts, range(total // stages, total // stages + 1))
    most = {}
    for role in counts:
        fast = bound.stages[ROLES.index(role)].t_s[: total - (stages - 1)] <= cap_s
        most[role] = int(np.flatnonzero(fast)[-1]) + 1 if fast.any() else 0
    room = sum(count * most[role] for role, count in counts.items())
    return {role: range(max(1, total - (room - most[role])), most[role] + 1) for role in counts}


def _solve_uniform(
    question: SearchProblem, shape: EqualPipeline, best_s: float
) -> tuple[Solution | None, Tally]:
    """All stages with one configuration: eq. 1 over the whole grid at once."""
    evaluator, space = question.evaluator, question.space
    layers = evaluator.job.model.layers // shape.stages
    tally = Tally()
    best: Solution | None = None
    for recompute in space.recompute:
        value, first = _uniform_values(question, shape, layers, recompute, tally)
        index = np.unravel_index(int(np.argmin(value)), value.shape)
        if float(value[index]) < best_s:
            best_s = float(value[index])
            choice = {name: float(first[name].reshape(-1)[k]) for name, k in zip(AXES, index, strict=True)}
            stage = {"layers": float(layers), **choice, "recompute": float(RECOMPUTE_KINDS.index(recompute))}
            best = Solution(shape, (stage,) * shape.stages, best_s)
    return best, tally


def _uniform_values(
    question: SearchProblem, shape: EqualPipeline, layers: int, recompute: Recompute, tally: Tally
) -> tuple[
    np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]],
]:
    evaluator = question.evaluator
    choices = Choices(space=question.space, shape=shape, step=question.step)
    axes = choices.axes(choices.counts(layers, recompute=recompute))
    t_max = suffix = step = np.zeros(())
    second = np.full((), -np.inf)
    fits = np.ones((), dtype=bool)
    times = {}
    for position in reversed(range(shape.stages)):
        question.tick()
        slot = slot_at(shape, position, layers)
        grid = stage_grid(shape, slot, axes, recompute=recompute)
        if slot.role not in times:
            priced = Times.of(evaluator, grid)
            times[slot.role] = (
                priced.stable.at(grid.layers, grid.ckpt) / shape.vpp,
                priced.delta.at(grid.layers, grid.ckpt),
                priced.step.at(grid.layers, grid.ckpt),
            )
        t_s, d_s, step_s = times[slot.role]
        suffix = suffix + t_s
        second = np.maximum(second, d_s + suffix)
        step = np.maximum(step, step_s)
        t_max = np.maximum(t_max, t_s)
        fits = fits & (evaluator.peak_bytes(grid) <= evaluator.limit_bytes)
    value = (shape.grad_accum * shape.vpp - 1) * t_max + second + step
    size = tuple(axes[name].size for name in AXES)
    valid = np.broadcast_to(choices.valid(layers, axes), size)
    tally.priced += int(valid.sum())
    tally.over_memory += int((valid & ~np.broadcast_to(fits, size)).sum())
    return np.where(valid & fits, np.broadcast_to(value, size), np.inf), axes
