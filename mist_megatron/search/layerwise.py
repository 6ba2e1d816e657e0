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
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.grid import Array

Cell = tuple[int, int]
Cells = tuple[Cell, ...]
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
    """The layers of a stage, first to last, embedding and head around them; equal ones are one object."""

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
    edges: tuple[int, int] = (0, 0)
    """How many of `layers` come before the first real one and behind the last: embedding and head."""

    def is_edge(self, at: int) -> bool:
        """Whether that one is embedding or head."""
        return at < self.edges[0] or at >= len(self.layers) - self.edges[1]


class StagePoint(NamedTuple):
    """A way to run a stage."""

    t_s: float
    d_s: float
    peak_bytes: float
    """Of the budget."""
    cells: Cells
    edges: tuple[int, int] = (0, 0)
    """How many of these are of an embedding and of a head."""

    @property
    def of_layers(self) -> Cells:
        """What layers run, ..."""
        return self.cells[self.edges[0] : len(self.cells) - self.edges[1]]

    @property
    def of_edges(self) -> Cells:
        """... and embedding and head."""
        return self.cells[: self.edges[0]] + self.cells[len(self.cells) - self.edges[1] :]

    @property
    def distinct(self) -> int:
        """Strategies of layers in use."""
        return len(set(self.of_layers))


@dataclass(frozen=True, eq=False)
class _Costs:
    """What a layer costs, by strategy that may run."""

    cost_s: Array
    taken: NDArray[np.int64]
    """Units of memory; more than there are where it may not run."""


@dataclass(frozen=True, eq=False)
class _Tables:
    """Least costs by layout and units, from which plans are read backwards."""

    cells: Cells
    """Strategies that may run, by layout ..."""
    rows: NDArray[np.intp]
    """... and the places of their layouts among those in use."""
    costs: tuple[_Costs, ...]
    """By layer."""
    before: tuple[Array, ...]
    """By layer: least costs of all layers before it, activations being in a layout (row), by units."""
    moves_s: tuple[Array, ...]
    """By layer but the first: resharding from a layout to another."""
    least: Array
    """By units."""

    @cached_property
    def starts(self) -> NDArray[np.intp]:
        """Where the strategies of each layout begin."""
        return np.flatnonzero(np.diff(self.rows, prepend=-1))

    def value(self, units: int) -> float:
        """Least cost within so many units."""
        return float(self.least[units]) if units >= 0 else np.inf

    def plan(self, units: int) -> Cells:
        """What has it."""
        place = int(self._at(len(self.costs) - 1, units).argmin())
        found = [self.cells[place]]
        for layer in reversed(range(1, len(self.costs))):
            units -= int(self.costs[layer].taken[place])
            values, row = self._at(layer - 1, units), self.rows[place]
            came = int((np.minimum.reduceat(values, self.starts) + self.moves_s[layer - 1][:, row]).argmin())
            place = int(np.where(self.rows == came, values, np.inf).argmin())
            found.append(self.cells[place])
        return tuple(reversed(found))

    def _at(self, layer: int, units: int) -> Array:
        """Least costs up to a layer, by its strategy."""
        costs = self.costs[layer]
        there = units - costs.taken
        before = self.before[layer][self.rows, np.maximum(there, 0)]
        return np.asarray(np.where(there >= 0, before + costs.cost_s, np.inf))


def _tables(problem: StageProblem, weight: float, allowed: Allowed, capacity: int) -> _Tables:
    """The dynamic program, minimising weight * t + d."""
    some = np.isfinite(allowed.layers) | (np.isfinite(allowed.edges) & any(problem.edges))
    cells = [(row, column) for row, column in np.argwhere(some).tolist()]
    in_use, rows = np.unique([row for row, _ in cells], return_inverse=True)
    index = tuple(np.transpose(cells))
    costs: dict[int, _Costs] = {}
    for at, layer in enumerate(problem.layers):
        if id(layer) not in costs:
            own = allowed.edges if problem.is_edge(at) else allowed.layers
            cost_s = weight * layer.t_s[index] + layer.d_s[index] + own[index]
            units = np.maximum(np.ceil(layer.forward_bytes[index] / problem.unit_bytes - 1e-9), 0.0)
            runs = np.isfinite(cost_s) & (units <= capacity)
            costs[id(layer)] = _Costs(cost_s, np.where(runs, units, capacity + 1.0).astype(np.int64))
    distinct = {id(moves): weight * moves[np.ix_(in_use, in_use)] for moves in problem.resharding_s}
    moves_s = tuple(distinct[id(moves)] for moves in problem.resharding_s)
    before = [np.zeros((len(in_use), capacity + 1))]
    for layer, moves in zip(problem.layers, (*moves_s, None), strict=True):
        best = np.full_like(before[0], np.inf)
        of_layer = costs[id(layer)]
        for row, cost, taken in zip(rows.tolist(), of_layer.cost_s, of_layer.taken.tolist(), strict=True):
            if taken <= capacity:
                room = best[row, taken:]
                np.minimum(room, before[-1][row, : capacity + 1 - taken] + cost, out=room)
        if moves is not None and len(in_use) > 1:
            best = (best[:, None, :] + moves[:, :, None]).min(axis=0)
        before.append(best)
    each = tuple(costs[id(layer)] for layer in problem.layers)
    return _Tables(tuple(cells), rows, each, tuple(before[:-1]), moves_s, before[-1].min(axis=0))


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
    return StagePoint(float(t_s), float(d_s), float(states + most + buffers), cells, problem.edges)


class Allowed(NamedTuple):
    """Infinity at strategies that may not run."""

    layers: Array
    edges: Array
    """Of embedding and head."""

    def but_for(self, more: Array) -> Allowed:
        """Without what is infinite there."""
        return Allowed(self.layers + more, self.edges + more)


def solve_stage(problem: StageProblem, weight: float, allowed: Allowed | None = None) -> StagePoint | None:
    """The strategies with the least weight * t + d that fit."""
    if allowed is None:
        allowed = Allowed(*[np.zeros_like(problem.buffer_bytes)] * 2)
    runs = [
        layer.t_s + (allowed.edges if problem.is_edge(at) else allowed.layers)
        for at, layer in enumerate(problem.layers)
    ]
    moments = _moments(problem) + np.where(np.isfinite(np.min(np.stack(runs), axis=0)), 0.0, np.inf)
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
        few = _tables(problem, weight, allowed.but_for(np.where(moments <= level, 0.0, np.inf)), units)
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
    # Budgets between which nothing gets faster have one plan: that of the least of them.
    values, firsts = np.unique(-tables.least[: units + 1], return_index=True)
    for value, least in zip(values[::-1], firsts[::-1].tolist(), strict=True):
        if np.isfinite(value):
            point = point_of(problem, _tidied(problem, tables.plan(least)))
            if point.peak_bytes <= problem.budget_bytes:
                return point
    return None


def few_strategies(
    problem: StageProblem, weight: float, full: StagePoint, most: int, allowed: Allowed | None = None
) -> StagePoint | None:
    """The best that was found with so many strategies: sets that share one with the best of all; embedding
    and head have one of these, or what they have in the best of all."""
    if full.distinct <= most:
        return full
    base = Allowed(*[np.zeros_like(problem.buffer_bytes)] * 2) if allowed is None else allowed
    cells = [tuple(cell) for cell in np.argwhere(np.isfinite(base.layers)).tolist()]
    used = sorted(set(full.of_layers), key=lambda cell: -full.of_layers.count(cell))
    best: StagePoint | None = None
    sets = {frozenset((one, *rest)) for one in used for rest in _others(cells, used, most - 1)}
    for some in sorted(sets, key=sorted):
        only, edges = np.full_like(base.layers, np.inf), np.full_like(base.edges, np.inf)
        for cell in some:
            only[cell] = 0.0
        for cell in (*some, *full.of_edges):
            edges[cell] = base.edges[cell]
        point = solve_stage(problem, weight, Allowed(only, edges))
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
