"""The strategies of a stage's layers: Galvatron-BMW's dynamic program (section IV-A, appendix A).

State: the layer, the memory that all layers up to it take forward (states, and what they save of all
micro-batches in flight), and the layer's strategy. Where activations lie decides what resharding costs, so
that strategies are held in rows of one layout, and a step looks for the best of each row first. Memory is
counted in equal units, every layer rounded up, so that what fits here fits; units do not depend on the
budget, so that more memory never gives a slower stage.

What a backward pass needs for a moment is not part of the state. As in the paper's algorithm 3 the program
answers for every budget of forward memory, and the largest whose plan fits by eq. 2 is taken; besides, where
a smaller budget would let only strategies that need little for a moment run, it runs on these alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.grid import Array

Cells = tuple[tuple[int, int], ...]
"""By layer: row (layout) and column (the strategies of a layout) of what it runs."""


@dataclass(frozen=True, eq=False)
class LayerChoices:
    """What a layer may run, as arrays over (layout, strategy): all infinite where it may not."""

    t_s: Array
    d_s: Array
    state_bytes: Array
    """Held throughout: states, and what other micro-batches in flight keep of the layer."""
    saved_bytes: Array
    """What the micro-batch keeps whose backward pass runs."""
    moment_bytes: Array
    """What a pass over it needs besides."""

    @property
    def forward_bytes(self) -> Array:
        """What it takes until its backward pass."""
        return self.state_bytes + self.saved_bytes


@dataclass(frozen=True, eq=False)
class StageProblem:
    """The layers of a stage, first to last; equal ones are one object."""

    layers: tuple[LayerChoices, ...]
    resharding_s: tuple[Array, ...]
    """Before each layer but the first: from a layout (row) to another (column), both ways."""
    buffer_bytes: Array
    """By strategy: buffers that a stage has once, as large as that of any of its strategies."""
    end_bytes: Array
    """By strategy of the last layer: what the loss needs for a moment, all saved; 0 where there is none."""
    budget_bytes: float
    """What layers and these may take."""
    unit_bytes: float


class StagePoint(NamedTuple):
    """A way to run a stage."""

    t_s: float
    d_s: float
    peak_bytes: float
    """Of the budget."""
    cells: Cells

    @property
    def distinct(self) -> int:
        """Strategies in use."""
        return len(set(self.cells))


@dataclass(frozen=True, eq=False)
class _Tables:
    """Least costs by (layout, strategy, units) after the last layer, and how they came."""

    least: Array
    strategy_from: list[NDArray[np.int8]]
    layout_from: list[NDArray[np.int8]]
    units: list[NDArray[np.int64]]

    def value(self, units: int) -> float:
        """Least cost within so many units."""
        return float(self.least[:, :, units].min()) if units >= 0 else np.inf

    def cells(self, units: int) -> Cells:
        """What has it."""
        flat = int(self.least[:, :, units].argmin())
        row, column = divmod(flat, self.least.shape[1])
        reached = [(row, column)]
        for strategy_from, layout_from, taken in zip(
            reversed(self.strategy_from), reversed(self.layout_from), reversed(self.units[1:]), strict=True
        ):
            units -= int(taken[row, column])
            row = int(layout_from[row, units])
            column = int(strategy_from[row, units])
            reached.append((row, column))
        return tuple(reversed(reached))


def _tables(problem: StageProblem, weight: float, allowed: Array, capacity: int) -> _Tables:
    """The dynamic program, minimising weight * t + d."""
    costs, places, units = {}, {}, []
    span = np.arange(capacity + 1)
    for layer in problem.layers:
        if id(layer) not in costs:
            cost = weight * layer.t_s + layer.d_s + allowed
            taken = np.ceil(np.where(np.isfinite(cost), layer.forward_bytes, 0.0) / problem.unit_bytes - 1e-9)
            taken = np.where(np.isfinite(cost), np.maximum(taken, 0.0), capacity + 1.0).astype(np.int64)
            costs[id(layer)] = np.where(np.isfinite(cost), cost, np.inf), taken
            place = span - taken[:, :, None]
            places[id(layer)] = np.maximum(place, 0), np.where(place >= 0, 0.0, np.inf)
    first = problem.layers[0]
    cost, taken = costs[id(first)]
    least = cost[:, :, None] + places[id(first)][1]
    units.append(taken)
    strategy_from, layout_from = [], []
    for layer, resharding in zip(problem.layers[1:], problem.resharding_s, strict=True):
        cost, taken = costs[id(layer)]
        place, beyond = places[id(layer)]
        best = least.argmin(axis=1)
        row = np.take_along_axis(least, best[:, None, :], axis=1)[:, 0]
        moved = row[:, None, :] + weight * resharding[:, :, None]
        came = moved.argmin(axis=0)
        there = np.take_along_axis(moved, came[None], axis=0)[0]
        least = np.take_along_axis(there[:, None, :], place, axis=2) + (cost[:, :, None] + beyond)
        strategy_from.append(best.astype(np.int8))
        layout_from.append(came.astype(np.int8))
        units.append(taken)
    return _Tables(least, strategy_from, layout_from, units)


def point_of(problem: StageProblem, cells: Cells) -> StagePoint:
    """What these strategies cost and hold: eq. 2."""
    t_s = d_s = states = saved = most = 0.0
    for at, (layer, cell) in enumerate(zip(problem.layers, cells, strict=True)):
        t_s, d_s = t_s + layer.t_s[cell], d_s + layer.d_s[cell]
        states, saved = states + layer.state_bytes[cell], saved + layer.saved_bytes[cell]
        most = max(most, saved + layer.moment_bytes[cell])
        if at:
            t_s += problem.resharding_s[at - 1][cells[at - 1][0], cell[0]]
    most = max(most, saved + problem.end_bytes[cells[-1]])
    buffers = max(problem.buffer_bytes[cell] for cell in cells)
    return StagePoint(float(t_s), float(d_s), float(states + most + buffers), cells)


def solve_stage(problem: StageProblem, weight: float, allowed: Array | None = None) -> StagePoint | None:
    """The strategies with the least weight * t + d that fit; `allowed` adds infinity to what may not run."""
    if allowed is None:
        allowed = np.zeros_like(problem.buffer_bytes)
    runs = np.min(np.stack([layer.t_s for layer in problem.layers]), axis=0)
    moments = _moments(problem) + np.where(np.isfinite(allowed + runs), 0.0, np.inf)
    levels = np.unique(moments[np.isfinite(moments)])
    if not levels.size:
        return None

    def capacity(moment: float) -> int:
        return int((problem.budget_bytes - moment) // problem.unit_bytes)

    most = capacity(float(levels[0]))
    if most < 0:
        return None
    tables = _tables(problem, weight, allowed, most)
    best = _largest_that_fits(problem, tables, most)
    for level in levels[:-1]:
        units = capacity(float(level))
        if units < 0 or (best and tables.value(units) >= _value(best, weight)):
            continue
        few = _tables(problem, weight, allowed + np.where(moments <= level, 0.0, np.inf), units)
        largest = _largest_that_fits(problem, few, units)
        if largest and (best is None or _value(largest, weight) < _value(best, weight)):
            best = largest
    return best


def _tidied(problem: StageProblem, cells: Cells) -> Cells:
    """Equal neighbours of one layout in an order that needs least memory: recomputed ones first."""
    runs = groupby(range(len(cells)), key=lambda at: (id(problem.layers[at]), cells[at][0]))
    return tuple(cell for _, run in runs for cell in sorted((cells[at] for at in run), reverse=True))


def _value(point: StagePoint, weight: float) -> float:
    return weight * point.t_s + point.d_s


def _moments(problem: StageProblem) -> Array:
    """By strategy: most that it needs for a moment on any layer, with its buffers."""
    each = {id(layer): layer.moment_bytes for layer in problem.layers}
    most = np.max(np.stack(list(each.values())), axis=0)
    return np.asarray(np.maximum(most, problem.end_bytes) + problem.buffer_bytes)


def _largest_that_fits(problem: StageProblem, tables: _Tables, units: int) -> StagePoint | None:
    """Of the plans for budgets of forward memory, the fastest that fits by eq. 2."""
    values = tables.least.min(axis=(0, 1))
    while units >= 0 and np.isfinite(values[units]):
        point = point_of(problem, _tidied(problem, tables.cells(units)))
        if point.peak_bytes <= problem.budget_bytes:
            return point
        units -= 1
    return None


def few_strategies(
    problem: StageProblem, weight: float, full: StagePoint, most: int, allowed: Array | None = None
) -> StagePoint | None:
    """The best that was found with so many strategies: sets that share one with the best of all."""
    if full.distinct <= most:
        return full
    base = np.zeros_like(problem.buffer_bytes) if allowed is None else allowed
    cells = [tuple(cell) for cell in np.argwhere(np.isfinite(base)).tolist()]
    used = sorted(set(full.cells), key=lambda cell: -full.cells.count(cell))
    best: StagePoint | None = None
    sets = {frozenset((one, *rest)) for one in used for rest in _others(cells, used, most - 1)}
    for some in sorted(sets, key=sorted):
        only = np.full_like(base, np.inf)
        for cell in some:
            only[cell] = 0.0
        point = solve_stage(problem, weight, only)
        if point and (best is None or _value(point, weight) < _value(best, weight)):
            best = point
    return best


def _others(
    cells: Sequence[tuple[int, ...]], used: Sequence[tuple[int, int]], count: int
) -> list[tuple[tuple[int, ...], ...]]:
    """What a strategy in use is tried with: any other one, or, of more, those in use and any other one."""
    if count == 0:
        return [()]
    return [(*used[: count - 1], cell) for cell in cells]
