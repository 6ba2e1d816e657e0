"""One shape: the best assignment of layers and configurations to its stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mist_megatron.cost.grid import role_of
from mist_megatron.search.assign import Assignment, Front, StageFronts, assign
from mist_megatron.search.bounds import Question, ShapeBound
from mist_megatron.search.frontier import (
    AXES,
    Slot,
    StageConfigs,
    StageTimes,
    Tally,
    _block,
    slot_configs,
)
from mist_megatron.search.shapes import Shape

StageChoice = dict[str, float]
"""Layers and one value per axis: what a stage of a solution runs."""


@dataclass(frozen=True)
class Solution:
    """The best of one shape."""

    shape: Shape
    stages: tuple[StageChoice, ...]
    value_s: float


def solve_shape(
    question: Question, shape: Shape, bound: ShapeBound, best_s: float
) -> tuple[Solution | None, Tally]:
    """The best plan of a shape if it beats `best_s`."""
    if not question.space.per_stage and shape.stages > 1:
        return _solve_uniform(question, shape, best_s)
    return _solve_per_stage(question, shape, bound, best_s)


def _solve_per_stage(
    question: Question, shape: Shape, bound: ShapeBound, best_s: float
) -> tuple[Solution | None, Tally]:
    layers = question.evaluator.job.model.layers
    tally = Tally()
    weight = shape.grad_accum * shape.vpp - 1
    cap_s = np.inf
    if np.isfinite(best_s) and weight > 0:
        # t of the slowest stage, were all other terms at their least.
        cap_s = (best_s - bound.sum_s - bound.least_d_s) / weight * shape.vpp * (1 + 1e-9)
    counts = _layer_window(question, shape, bound, cap_s)
    windows = {role_of(k, shape.stages): window for k, window in enumerate(counts)}
    times = StageTimes(question.evaluator, question.space, shape, question.step, windows)
    configs: list[dict[int, StageConfigs]] = []
    for position in range(shape.stages):
        here: dict[int, StageConfigs] = {}
        for count in counts[position]:
            slot = Slot(position=position, layers=count)
            found, more = slot_configs(times, slot, cap_s)
            tally.add(more)
            if found is not None:
                here[count] = found
        if not here:
            return None, tally
        configs.append(here)
    fronts = [{count: Front(c.t_s / shape.vpp, c.d_s) for count, c in here.items()} for here in configs]
    answer = _assign(question, fronts, layers, weight + 1, best_s)
    if answer is None:
        return None, tally
    picked = zip(answer.layers, answer.choice, configs, strict=True)
    stages = tuple(_choice(count, here[count], index) for count, index, here in picked)
    return Solution(shape, stages, answer.value_s), tally


def _assign(
    question: Question, fronts: list[StageFronts], layers: int, grad_accum: int, best_s: float
) -> Assignment | None:
    if question.solver == "exact":
        return assign(fronts, layers, grad_accum, best_s)
    from mist_megatron.search.milp import assign_milp

    return assign_milp(fronts, layers, grad_accum, best_s)


def _choice(layers: int, configs: StageConfigs, index: int) -> StageChoice:
    return {"layers": float(layers), **{name: float(v[index]) for name, v in configs.columns.items()}}


def _layer_window(question: Question, shape: Shape, bound: ShapeBound, cap_s: float) -> list[range]:
    """Numbers of layers worth pricing per position: under the cap, and leaving room for the others."""
    total, stages, vpp = question.evaluator.job.model.layers, shape.stages, shape.vpp
    if not question.space.uneven_layers or stages == 1 or vpp > 1:
        return [range(total // stages, total // stages + 1)] * stages
    most = []
    for position in range(stages):
        one, two = bound.times_s[0 if position == 0 else 2 if position == stages - 1 else 1]
        highest = total - (stages - 1)
        if np.isfinite(cap_s) and two > one:
            highest = min(highest, int((cap_s - one) / (two - one) * (1 + 1e-9)) + 1 if cap_s >= one else 0)
        most.append(max(highest, 0))
    windows = []
    for highest in most:
        others = sum(most) - highest
        windows.append(range(max(1, total - others), highest + 1))
    return windows


def _solve_uniform(question: Question, shape: Shape, best_s: float) -> tuple[Solution | None, Tally]:
    """All stages with one configuration: eq. 1 over the whole grid at once."""
    evaluator, space = question.evaluator, question.space
    layers = evaluator.job.model.layers // shape.stages
    tally = Tally()
    best: Solution | None = None
    for selective in (False, True) if space.selective else (False,):
        value, first = _uniform_values(question, shape, layers, selective, tally)
        index = np.unravel_index(int(np.argmin(value)), value.shape)
        if float(value[index]) < best_s:
            best_s = float(value[index])
            choice = {name: float(first[name].reshape(-1)[k]) for name, k in zip(AXES, index, strict=True)}
            stage = {"layers": float(layers), **choice, "selective": float(selective)}
            best = Solution(shape, (stage,) * shape.stages, best_s)
    return best, tally


def _uniform_values(
    question: Question, shape: Shape, layers: int, selective: bool, tally: Tally
) -> tuple[
    np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]],
]:
    evaluator = question.evaluator
    t_max = suffix = np.zeros(())
    second = np.full((), -np.inf)
    fits = np.ones((), dtype=bool)
    times = {}
    for position in reversed(range(shape.stages)):
        slot = Slot(position=position, layers=layers)
        block = _block(question.space, shape, slot, question.step, selective=selective)
        role = role_of(position, shape.stages)
        if role not in times:
            factors = evaluator.factors(block.grid)
            times[role] = (
                factors.stable.at(block.grid.layers, block.grid.ckpt) / shape.vpp,
                factors.delta.at(block.grid.layers, block.grid.ckpt),
            )
        t_s, d_s = times[role]
        suffix = suffix + t_s
        second = np.maximum(second, d_s + suffix)
        t_max = np.maximum(t_max, t_s)
        peak = evaluator.peak_bytes(block.grid)
        fits = fits & (peak <= evaluator.limit_bytes)
        if not np.any(fits & block.valid):
            tally.nearest_bytes = min(tally.nearest_bytes, float(np.min(peak)))
    value = (shape.grad_accum * shape.vpp - 1) * t_max + second
    tally.priced += int(block.valid.sum())
    allowed = block.valid & fits
    tally.over_memory += int((block.valid & ~np.broadcast_to(fits, block.valid.shape)).sum())
    return np.where(allowed, np.broadcast_to(value, block.valid.shape), np.inf), block.axes
