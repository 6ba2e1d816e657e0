"""The exact assignment between stages: which (layers, GPUs, configuration) each stage gets.

Minimises eq. 1 in the form  (G - 1) max_i t_i + max_i (d_i + sum_{j >= i} t_j)  with sum of layers = L and
sum of GPUs = N. For a cap tau on every t and a cap C on the second maximum, the least suffix time over (stage
from the end, layers, GPUs) is a plain one-label dynamic program: a smaller suffix loosens both caps for all
stages before it. What a stage holds depends on how many stages follow it, not on how many there are, so that
one pass from the end prices pipelines of every length.

Optima are found by halving intervals [a, b] of tau: no plan of an interval beats the best so far when none
has all t <= b and its second maximum <= best - (G - 1) a.

Where all stages wait for each other before they step, the step of none hides behind the drain of those before
it, and max_i step_i is added: intervals of caps on steps are halved along with those of tau.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    """Non-dominated (t, d) of one stage of one size, t ascending; with steps that wait for all stages (t, d,
    step), d without the step."""

    t_s: Array
    d_s: Array
    step_s: Array | None = None


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


def may_stand(pipelines: Pipelines, sizes: Sequence[Size]) -> bool:
    """Whether stages of these sizes keep to nodes and to what may stand beside what."""
    for (_, _, one), (_, _, other) in itertools.pairwise(sizes):
        if not pipelines.neighbours[one, other]:
            return False
    end, per_node = 0, pipelines.gpus_per_node
    for _, gpus, _ in reversed(sizes) if per_node else ():
        end += gpus
        inside = (end - 1) // per_node == (end - gpus) // per_node
        if not (inside if gpus < per_node else end % per_node == 0):
            return False
    return True


def in_line(stages: Sequence[Mapping[int, Front]], layers: int) -> Pipelines:
    """A pipeline of known length and equal meshes; `stages` from first to last, by number of layers."""
    alike = {id(fronts): {(count, 0, 0): front for count, front in fronts.items()} for fronts in stages}
    sized = [alike[id(fronts)] for fronts in stages]
    return Pipelines(inner=sized[:0:-1], first={len(stages) - 1: sized[0]}, layers=layers)


def pareto(t_s: Array, d_s: Array, step_s: Array | None = None) -> Ints:
    """Indices of the non-dominated points, t ascending; of equal points one is kept."""
    if step_s is not None and len(t_s) and np.any(step_s != step_s[0]):
        return _pareto_of_three(t_s, d_s, step_s)
    if not len(t_s):
        return np.zeros(0, dtype=np.intp)
    order = np.lexsort((d_s, t_s))
    d = d_s[order]
    keep = np.ones(len(d), dtype=bool)
    keep[1:] = d[1:] < np.minimum.accumulate(d)[:-1]
    return order[keep]


def _pareto_of_three(t_s: Array, d_s: Array, step_s: Array) -> Ints:
    """Steps have few values: of each the front, less what a front of smaller steps dominates."""
    kept: list[Ints] = []
    t_kept = d_kept = np.zeros(0)
    for step in np.unique(step_s):
        rows = np.flatnonzero(step_s == step)
        rows = rows[pareto(t_s[rows], d_s[rows])]
        if len(t_kept):
            # The least d among smaller steps that are as fast.
            before = np.searchsorted(t_kept, t_s[rows], side="right")
            beaten = np.concatenate([[np.inf], d_kept])[before] <= d_s[rows]
            rows = rows[~beaten]
        kept.append(rows)
        found = np.concatenate(kept)
        found = found[pareto(t_s[found], d_s[found])]
        t_kept, d_kept = t_s[found], d_s[found]
    every = np.concatenate(kept)
    return every[np.lexsort((step_s[every], d_s[every], t_s[every]))]


def value_of(
    t_s: Sequence[float], d_s: Sequence[float], grad_accum: int, step_s: Sequence[float] = (0.0,)
) -> float:
    """Eq. 1, and the longest step that hides behind nothing."""
    suffix, second = 0.0, -np.inf
    for t, d in zip(reversed(t_s), reversed(d_s), strict=True):
        suffix += t
        second = max(second, d + suffix)
    return float((grad_accum - 1) * max(t_s) + second + max(step_s))


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
    times = ladder.times[-1:] if weight == 0 else ladder.times
    open_boxes = [_Box(0, len(times) - 1, 0, len(ladder.steps) - 1)] if len(times) else []
    while open_boxes:
        box = open_boxes.pop()
        tick()
        least = weight * float(times[box.fast]) + float(ladder.steps[box.early])
        # Strictly better by a relative 1e-12: rounding must not make the search go on forever.
        cap = (best_s - least) * (1 - 1e-12) if np.isfinite(best_s) else np.inf
        caps = _Caps(float(times[box.slow]), float(ladder.steps[box.late]), cap)
        candidate = ladder.quickest(caps, grad_accum)
        if candidate is None:
            continue
        better = candidate.value_s < best_s
        if better:
            best_s = candidate.value_s
            yield candidate
        if box.fast < box.slow or box.early < box.late:
            by_time = box.early == box.late
            if not by_time and box.fast < box.slow:
                wide = weight * float(times[box.slow] - times[box.fast])
                by_time = wide >= float(ladder.steps[box.late] - ladder.steps[box.early])
            open_boxes += box.halves(by_time=by_time)
        elif better:
            open_boxes.append(box)


class _Box(NamedTuple):
    """Positions, from and to, of caps on t and on steps."""

    fast: int
    slow: int
    early: int
    late: int

    def halves(self, *, by_time: bool) -> list[_Box]:
        """The one to look at first last."""
        if by_time:
            middle = (self.fast + self.slow) // 2
            return [self._replace(fast=middle + 1), self._replace(slow=middle)]
        middle = (self.early + self.late) // 2
        return [self._replace(early=middle + 1), self._replace(late=middle)]


class _Caps(NamedTuple):
    """What the stages of an assignment must keep."""

    time_s: float
    """On each t."""
    step_s: float
    """On each step that waits for all stages."""
    total_s: float
    """On the second maximum."""


LARGEST_S = 1e300
"""More than any time, and less than the infinite one of what is ruled out."""


class _Options:
    """The sizes that one stage may have, as arrays; each has its front."""

    def __init__(self, fronts: StageFronts) -> None:
        self.sizes = [size for size, front in sorted(fronts.items()) if len(front.t_s)]
        self.fronts = [fronts[size] for size in self.sizes]
        self.layers, self.gpus, self.kind = np.array(self.sizes, dtype=np.intp).reshape(-1, 3).T
        self.least_t = np.array([front.t_s[0] for front in self.fronts])
        self.steps = [np.zeros(len(f.t_s)) if f.step_s is None else f.step_s for f in self.fronts]
        self._room: tuple[float, list[Array]] = (np.nan, [])
        self.lengths = np.array([len(front.t_s) for front in self.fronts], dtype=np.intp)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]]) if self.sizes else self.lengths
        self.t_s = np.concatenate([f.t_s for f in self.fronts]) if self.fronts else np.zeros(0)

    def minus_room(self, step_s: float) -> list[Array]:
        """Of each front the least d + t over a configuration and all faster ones with steps under the cap:
        descending, so negated for bisection."""
        if self._room[0] != step_s:
            sums = [
                np.where(steps <= step_s, front.t_s + front.d_s, np.inf)
                for front, steps in zip(self.fronts, self.steps, strict=True)
            ]
            self._room = step_s, [-np.minimum.accumulate(sum_s) for sum_s in sums]
        return self._room[1]

    def fastest(self, rows: Ints, room: Array, step_s: float) -> tuple[Ints, Array]:
        """Of each row's front the first configuration with d + t within the room and its step under the cap -
        the fastest that is - and its t; infinite where none is. Rows ascend."""
        minus_room, wanted = self.minus_room(step_s), -np.minimum(room, LARGEST_S)
        choice = np.empty(len(rows), dtype=np.intp)
        borders = np.searchsorted(rows, np.arange(len(self.sizes) + 1))
        for row, (begin, end) in enumerate(itertools.pairwise(borders)):
            if begin < end:
                choice[begin:end] = np.searchsorted(minus_room[row], wanted[begin:end], side="left")
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
        each = {id(fronts): fronts for fronts in (*pipelines.inner, *pipelines.first.values())}
        options = {key: _Options(fronts) for key, fronts in each.items()}
        self.inner = [options[id(fronts)] for fronts in pipelines.inner]
        self.first = {k: options[id(fronts)] for k, fronts in pipelines.first.items()}
        every = list(options.values())
        # One kind more, that of no stage at all, which any may be the last before.
        self.neighbours = np.pad(pipelines.neighbours, ((0, 0), (0, 1)), constant_values=True)
        self.times: Array = np.unique(np.concatenate([o.t_s for o in every])) if every else np.zeros(0)
        steps = [steps for o in every for steps in o.steps]
        self.steps: Array = np.unique(np.concatenate(steps)) if steps else np.zeros(1)

    def quickest(self, caps: _Caps, grad_accum: int) -> Assignment | None:
        """Of the assignments with the least suffix times under the caps, one per length, the best."""
        rest = self._most_layers(caps.time_s)
        if rest[0][self.problem.gpus] < self.problem.layers:
            return None
        zero = np.zeros(1, dtype=np.intp)
        nothing = np.full(1, len(self.neighbours), dtype=np.intp)
        levels = [_Level(zero, zero, nothing, np.zeros(1), zero, zero, zero)]
        best: Assignment | None = None
        for after in range(len(rest)):
            if after in self.first:
                ended = self._ended(levels, self.first[after], caps, grad_accum)
                if ended is not None and (best is None or ended.value_s < best.value_s):
                    best = ended
            if after + 1 >= len(rest) or after >= len(self.inner):
                break
            level = self._next(levels[-1], self.inner[after], rest[after + 1], caps)
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

    def _next(self, level: _Level, options: _Options, ahead: Array, caps: _Caps) -> _Level | None:
        """All states with one stage more."""
        problem = self.problem
        layers = options.layers[:, None] + level.layers
        gpus = options.gpus[:, None] + level.gpus
        possible = (gpus <= problem.gpus) & (options.least_t <= caps.time_s)[:, None]
        left = problem.layers - layers
        # A stage ahead has a layer at least, and all of them together no more than they can take.
        possible &= (left >= 1) & (left <= ahead[problem.gpus - np.minimum(gpus, problem.gpus)])
        possible &= self._inside_a_node(options.gpus[:, None], gpus)
        possible &= self.neighbours[options.kind[:, None], level.kind]
        row, state = np.nonzero(possible)
        if not len(row):
            return None
        before = level.suffix_s[state]
        choice, suffix_s = self._joined(options, row, before, caps)
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

    def _joined(self, options: _Options, row: Ints, before: Array, caps: _Caps) -> tuple[Ints, Array]:
        """Of each row the fastest configuration under the caps that may go before stages of so much time, and
        the time with it; infinite where none may."""
        choice, t_s = options.fastest(row, caps.total_s - before, caps.step_s)
        return choice, np.where(t_s <= caps.time_s, before + t_s, np.inf)

    def _inside_a_node(self, stage: Ints, end: Ints) -> Flags:
        """Whether a stage that ends the first `end` GPUs, counted from the last, keeps to whole nodes or
        inside one."""
        per_node = self.problem.gpus_per_node
        if not per_node:
            return np.ones(np.broadcast_shapes(stage.shape, end.shape), dtype=bool)
        inside = (end - 1) // per_node == (end - stage) // per_node
        return np.asarray(np.where(stage < per_node, inside, end % per_node == 0), dtype=bool)

    def _ended(
        self, levels: list[_Level], options: _Options, caps: _Caps, grad_accum: int
    ) -> Assignment | None:
        """The pipeline whose first stage joins all stages so far."""
        problem, level = self.problem, levels[-1]
        possible = options.layers[:, None] + level.layers == problem.layers
        possible &= options.gpus[:, None] + level.gpus == problem.gpus
        possible &= (options.least_t <= caps.time_s)[:, None]
        possible &= self._inside_a_node(options.gpus, np.full_like(options.gpus, problem.gpus))[:, None]
        possible &= self.neighbours[options.kind[:, None], level.kind]
        row, state = np.nonzero(possible)
        if not len(row):
            return None
        choice, total = self._joined(options, row, level.suffix_s[state], caps)
        least = int(np.argmin(total))
        if not np.isfinite(total[least]):
            return None
        picked = [(options, int(row[least]), int(choice[least]))]
        picked += self._trace(levels, int(state[least]))
        points = [(o.fronts[k].t_s[c], o.fronts[k].d_s[c], o.steps[k][c]) for o, k, c in picked]
        t_s, d_s, step_s = ([float(value) for value in column] for column in zip(*points, strict=True))
        value_s = value_of(t_s, d_s, grad_accum, step_s)
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
