"""The exact assignment between stages: which (layers, GPUs, configuration) each stage gets.

Minimises eq. 1 in the form  (G - 1) max_i t_i + max_i (d_i + sum_{j >= i} t_j)  with sum of layers = L and
sum of GPUs = N. For a cap tau on every t and a cap C on the second maximum, the least suffix time over (stage
from the end, layers, GPUs) is a plain one-label dynamic program: a smaller suffix loosens both caps for all
stages before it. What a stage holds depends on how many stages follow it, not on how many there are, so that
one pass from the end prices pipelines of every length.

Optima are found by halving intervals [a, b] of tau: no plan of an interval beats the best so far when none
has all t <= b and its second maximum <= best - (G - 1) a.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]

Size = tuple[int, int, int]
"""Layers, GPUs and kind of a stage. GPUs are 0 where they are not counted: all stages have the same. The kind
decides what may stand beside it."""


@dataclass(frozen=True)
class Front:
    """Non-dominated (t, d) of one stage of one size, t ascending and d descending."""

    t_s: Array
    d_s: Array


StageFronts = Mapping[Size, Front]
"""Size -> front; absent where nothing fits."""


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """Pipelines of one or several lengths that share their ends."""

    inner: Sequence[StageFronts]
    """By number of stages that follow: what a stage that is not the first may be."""
    first: Mapping[int, StageFronts]
    """Number of stages that follow -> what the first stage of such a pipeline may be."""
    layers: int
    gpus: int = 0
    gpus_per_node: int = 0
    """Stages take consecutive GPUs, one of less than a node inside one node; 0 asks for no such thing."""
    neighbours: Flags = field(default_factory=lambda: np.ones((1, 1), dtype=bool))
    """(kind, kind): which may stand beside each other."""


@dataclass(frozen=True)
class Assignment:
    """One choice per stage, first to last, and its value of eq. 1."""

    sizes: tuple[Size, ...]
    choice: tuple[int, ...]
    """Position in the front of (stage, size)."""
    value_s: float

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layers for layers, *_ in self.sizes)


def in_line(stages: Sequence[Mapping[int, Front]], layers: int) -> Pipelines:
    """A pipeline of known length and equal meshes; `stages` from first to last, by number of layers."""
    sized = [{(count, 0, 0): front for count, front in fronts.items()} for fronts in stages]
    return Pipelines(inner=sized[:0:-1], first={len(stages) - 1: sized[0]}, layers=layers)


def pareto(t_s: Array, d_s: Array) -> Ints:
    """Indices of the non-dominated points, t ascending; of equal points one is kept."""
    if not len(t_s):
        return np.zeros(0, dtype=np.intp)
    order = np.lexsort((d_s, t_s))
    d = d_s[order]
    keep = np.ones(len(d), dtype=bool)
    keep[1:] = d[1:] < np.minimum.accumulate(d)[:-1]
    return order[keep]


def value_of(t_s: Sequence[float], d_s: Sequence[float], grad_accum: int) -> float:
    """Eq. 1."""
    suffix, second = 0.0, -np.inf
    for t, d in zip(reversed(t_s), reversed(d_s), strict=True):
        suffix += t
        second = max(second, d + suffix)
    return float((grad_accum - 1) * max(t_s) + second)


def assign(
    pipelines: Pipelines,
    grad_accum: int,
    best_s: float = np.inf,
    tick: Callable[[], None] = lambda: None,
) -> Assignment | None:
    """The optimal assignment if it is better than `best_s`, else None. `tick` is called before each pass:
    what it raises ends the search."""
    found: Assignment | None = None
    for better in _ever_better(pipelines, grad_accum, best_s, tick):
        found = better
    return found


def improves(
    pipelines: Pipelines, grad_accum: int, best_s: float, tick: Callable[[], None] = lambda: None
) -> bool:
    """Whether some assignment is better than `best_s`."""
    return next(_ever_better(pipelines, grad_accum, best_s, tick), None) is not None


def _ever_better(
    pipelines: Pipelines, grad_accum: int, best_s: float, tick: Callable[[], None]
) -> Iterator[Assignment]:
    """Assignments that each beat the last; the end of them is the proof of the last."""
    weight = grad_accum - 1
    ladder = _Ladder(pipelines)
    caps = ladder.caps[-1:] if weight == 0 else ladder.caps
    open_intervals = [(0, len(caps) - 1)] if len(caps) else []
    while open_intervals:
        low, high = open_intervals.pop()
        tick()
        # Strictly better by a relative 1e-12: rounding must not make the search go on forever.
        cap = (best_s - weight * float(caps[low])) * (1 - 1e-12) if np.isfinite(best_s) else np.inf
        candidate = ladder.quickest(float(caps[high]), cap, grad_accum)
        if candidate is None:
            continue
        better = candidate.value_s < best_s
        if better:
            best_s = candidate.value_s
            yield candidate
        if low < high:
            middle = (low + high) // 2
            open_intervals += [(middle + 1, high), (low, middle)]
        elif better:
            open_intervals.append((low, high))


class _Options:
    """The sizes that one stage may have, as arrays; each has its front."""

    def __init__(self, fronts: StageFronts) -> None:
        self.sizes = [size for size, front in sorted(fronts.items()) if len(front.t_s)]
        self.fronts = [fronts[size] for size in self.sizes]
        self.layers, self.gpus, self.kind = np.array(self.sizes, dtype=np.intp).reshape(-1, 3).T
        self.least_t = np.array([front.t_s[0] for front in self.fronts])
        # Least d + t over a configuration and all faster ones: descending, so negated for bisection.
        self.minus_sums = [-np.minimum.accumulate(front.t_s + front.d_s) for front in self.fronts]
        self.lengths = np.array([len(front.t_s) for front in self.fronts], dtype=np.intp)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]]) if self.sizes else self.lengths
        self.t_s = np.concatenate([f.t_s for f in self.fronts]) if self.fronts else np.zeros(0)

    def fastest(self, rows: Ints, room: Array) -> tuple[Ints, Array]:
        """Of each row's front the first configuration with d + t within the room - the fastest that is - and
        its t; infinite where none is. Rows ascend."""
        choice = np.empty(len(rows), dtype=np.intp)
        borders = np.searchsorted(rows, np.arange(len(self.sizes) + 1))
        for row, (begin, end) in enumerate(itertools.pairwise(borders)):
            if begin < end:
                choice[begin:end] = np.searchsorted(self.minus_sums[row], -room[begin:end], side="left")
        outside = choice >= self.lengths[rows]
        t_s = self.t_s[np.where(outside, 0, choice + self.starts[rows])]
        return choice, np.where(outside, np.inf, t_s)


@dataclass(frozen=True)
class _Level:
    """Reached (layers, GPUs) of the stages so far from the end and the kind of their first, with the least
    time of each."""

    layers: Ints
    gpus: Ints
    kind: Ints
    suffix_s: Array
    row: Ints
    choice: Ints
    before: Ints
    """Position of the state of the level below."""


class _Ladder:
    """The dynamic program over stages from the end."""

    def __init__(self, pipelines: Pipelines) -> None:
        self.problem = pipelines
        self.inner = [_Options(fronts) for fronts in pipelines.inner]
        self.first = {k: _Options(fronts) for k, fronts in pipelines.first.items()}
        every = [*self.inner, *self.first.values()]
        # One kind more, that of no stage at all, which any may be the last before.
        self.neighbours = np.pad(pipelines.neighbours, ((0, 0), (0, 1)), constant_values=True)
        self.caps: Array = np.unique(np.concatenate([o.t_s for o in every])) if every else np.zeros(0)

    def quickest(self, tau: float, cap: float, grad_accum: int) -> Assignment | None:
        """Of the assignments with the least suffix times under both caps, one per length, the best."""
        rest = self._most_layers(tau)
        if rest[0][self.problem.gpus] < self.problem.layers:
            return None
        zero = np.zeros(1, dtype=np.intp)
        nothing = np.full(1, len(self.neighbours), dtype=np.intp)
        levels = [_Level(zero, zero, nothing, np.zeros(1), zero, zero, zero)]
        best: Assignment | None = None
        for after in range(len(rest)):
            if after in self.first:
                ended = self._ended(levels, self.first[after], tau, cap, grad_accum)
                if ended is not None and (best is None or ended.value_s < best.value_s):
                    best = ended
            if after + 1 >= len(rest) or after >= len(self.inner):
                break
            level = self._next(levels[-1], self.inner[after], rest[after + 1], tau, cap)
            if level is None:
                break
            levels.append(level)
        return best

    def _most_layers(self, tau: float) -> list[NDArray[np.float64]]:
        """By number of stages behind and GPUs left: the most layers that the stages ahead can take with t
        under the cap, memory of each at its best."""
        gpus = self.problem.gpus
        count = max(self.first, default=-1) + 1
        none = np.full(gpus + 1, -np.inf)
        rest = [none] * (count + 1)
        for after in reversed(range(count)):
            here = none.copy()
            for left, most in _most_by_gpus(self.first.get(after), tau):
                if left <= gpus:
                    here[left] = max(here[left], most)
            if after < len(self.inner):
                for left, most in _most_by_gpus(self.inner[after], tau):
                    if left <= gpus:
                        np.maximum(here[left:], rest[after + 1][: gpus + 1 - left] + most, out=here[left:])
            rest[after] = here
        return rest[:count]

    def _next(self, level: _Level, options: _Options, ahead: Array, tau: float, cap: float) -> _Level | None:
        """All states with one stage more."""
        problem = self.problem
        layers = options.layers[:, None] + level.layers
        gpus = options.gpus[:, None] + level.gpus
        possible = (gpus <= problem.gpus) & (options.least_t <= tau)[:, None]
        left = problem.layers - layers
        # A stage ahead has a layer at least, and all of them together no more than they can take.
        possible &= (left >= 1) & (left <= ahead[problem.gpus - np.minimum(gpus, problem.gpus)])
        possible &= self._inside_a_node(options.gpus[:, None], gpus)
        possible &= self.neighbours[options.kind[:, None], level.kind]
        row, state = np.nonzero(possible)
        if not len(row):
            return None
        before = level.suffix_s[state]
        choice, t_s = options.fastest(row, cap - before)
        suffix_s = np.where(t_s <= tau, before + t_s, np.inf)
        key = layers[row, state] * (problem.gpus + 1) + gpus[row, state]
        key = key * len(self.neighbours) + options.kind[row]
        order = np.lexsort((suffix_s, key))
        first = np.ones(len(order), dtype=bool)
        first[1:] = np.diff(key[order]) != 0
        kept = order[first]
        kept = kept[np.isfinite(suffix_s[kept])]
        if not len(kept):
            return None
        row, state = row[kept], state[kept]
        return _Level(
            layers[row, state],
            gpus[row, state],
            options.kind[row],
            suffix_s[kept],
            row,
            choice[kept],
            state,
        )

    def _inside_a_node(self, stage: Ints, end: Ints) -> Flags:
        """Whether a stage that ends the first `end` GPUs, counted from the last, keeps to whole nodes or
        inside one."""
        per_node = self.problem.gpus_per_node
        if not per_node:
            return np.ones(np.broadcast_shapes(stage.shape, end.shape), dtype=bool)
        inside = (end - 1) // per_node == (end - stage) // per_node
        return np.asarray(np.where(stage < per_node, inside, end % per_node == 0), dtype=bool)

    def _ended(
        self, levels: list[_Level], options: _Options, tau: float, cap: float, grad_accum: int
    ) -> Assignment | None:
        """The pipeline whose first stage joins all stages so far."""
        problem, level = self.problem, levels[-1]
        possible = options.layers[:, None] + level.layers == problem.layers
        possible &= options.gpus[:, None] + level.gpus == problem.gpus
        possible &= (options.least_t <= tau)[:, None]
        possible &= self._inside_a_node(options.gpus, np.full_like(options.gpus, problem.gpus))[:, None]
        possible &= self.neighbours[options.kind[:, None], level.kind]
        row, state = np.nonzero(possible)
        if not len(row):
            return None
        choice, t_s = options.fastest(row, cap - level.suffix_s[state])
        total = np.where(t_s <= tau, level.suffix_s[state] + t_s, np.inf)
        least = int(np.argmin(total))
        if not np.isfinite(total[least]):
            return None
        picked = [(options, int(row[least]), int(choice[least]))]
        picked += self._trace(levels, int(state[least]))
        points = [(o.fronts[k].t_s[c], o.fronts[k].d_s[c]) for o, k, c in picked]
        value_s = value_of([float(t) for t, _ in points], [float(d) for _, d in points], grad_accum)
        return Assignment(tuple(o.sizes[k] for o, k, _ in picked), tuple(c for _, _, c in picked), value_s)

    def _trace(self, levels: list[_Level], state: int) -> Iterator[tuple[_Options, int, int]]:
        for after in reversed(range(len(levels) - 1)):
            level = levels[after + 1]
            yield self.inner[after], int(level.row[state]), int(level.choice[state])
            state = int(level.before[state])


def _most_by_gpus(options: _Options | None, tau: float) -> list[tuple[int, int]]:
    """(GPUs, most layers under the cap) for each number of GPUs."""
    if options is None or not options.sizes:
        return []
    most: dict[int, int] = {}
    for (layers, gpus, _), t_s in zip(options.sizes, options.least_t, strict=True):
        if t_s <= tau and layers > most.get(gpus, 0):
            most[gpus] = layers
    return list(most.items())
