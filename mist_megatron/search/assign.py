"""The exact assignment between stages: which (layers, GPUs, configuration) each stage gets.

Minimises what a step takes at least (`cost/iteration.py`), which is what `predict` tells of nearly all plans:

    U + max_i (d_i + sum_{j >= i} t_j),    U = max_b u_b,
    u_b = (G - 1) t_b + max(D_b - w_b t_b, -w_b g_b),    D_b = sum_{j > b} t_j,    w_b stages after b

with sum of layers = L and sum of GPUs = N. For a cap on U and one on the second maximum, the least suffix
time over (stage from the end, layers, GPUs) is a plain one-label dynamic program: of the configurations that
keep the cap on d + suffix the fastest has the least suffix time and the least u, and a smaller suffix loosens
both caps for all stages before it. What a stage holds depends on how many stages follow it, not on how many
there are, so that one pass from the end prices pipelines of every length.

Optima are found by splitting intervals [a, b] of U: no plan of an interval beats the best so far when none
has U <= b and its second maximum <= best - a. An interval is split at the U of a plan that is the best so
far, which then is in neither part, or else in the middle.

Where all stages wait for each other before they step, the step of none hides behind the drain of those before
it, and max_i step_i is added: intervals of caps on steps are halved along with those of U.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mist_megatron.search.points import (
    Array,
    Ends,
    Flags,
    Front,
    Ints,
    Point,
    parts_of,
    steady_s,
)

Size = tuple[int, int, int]
"""Layers, GPUs and kind of a stage. GPUs are 0 where they are not counted: all stages have the same. The kind
decides what may stand beside it."""


StageFronts = Mapping[Size, Front]
"""Size -> front; absent where nothing fits."""


class Between(Protocol):
    """What a stage takes beyond its front, by what stands beside it."""

    def beyond_s(self, kind: Ints, gpus: Ints, next_kind: Ints, behind: Ints) -> Array:
        """Of stages of these kinds and GPUs before stages of other kinds, with so many GPUs behind."""

    def least_s(self, kind: Ints, gpus: Ints) -> Array:
        """Never less than that."""


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
    chunks: int = 1
    """Of each stage, which take turns; all pipelines have one length then."""
    between: Between | None = None
    """What stages take beyond their fronts, by their neighbours."""


@dataclass(frozen=True)
class Assignment:
    """One choice per stage, first to last, and the least time of a step."""

    sizes: tuple[Size, ...]
    choice: tuple[int, ...]
    """Position in the front of (stage, size)."""
    value_s: float

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layers for layers, *_ in self.sizes)


def in_line(stages: Sequence[Mapping[int, Front]], layers: int, *, chunks: int = 1) -> Pipelines:
    """A pipeline of known length and equal meshes; `stages` from first to last, by number of layers."""
    alike = {id(fronts): {(count, 0, 0): front for count, front in fronts.items()} for fronts in stages}
    sized = [alike[id(fronts)] for fronts in stages]
    return Pipelines(inner=sized[:0:-1], first={len(stages) - 1: sized[0]}, layers=layers, chunks=chunks)


def assign(
    pipelines: Pipelines,
    grad_accum: int,
    best_s: float = np.inf,
    tick: Callable[[], None] = lambda: None,
) -> Assignment | None:
    """The optimal assignment if it is better than `best_s`, else None. `tick` is called before each pass:
    what it raises ends the search."""
    best: Assignment | None = None
    for better in _ever_better(pipelines, grad_accum, best_s, tick):
        best = better
    return best


def improves(
    pipelines: Pipelines, grad_accum: int, best_s: float, tick: Callable[[], None] = lambda: None
) -> bool:
    """Whether some assignment is better than `best_s`."""
    return next(_ever_better(pipelines, grad_accum, best_s, tick), None) is not None


def _ever_better(
    pipelines: Pipelines, grad_accum: int, best_s: float, tick: Callable[[], None]
) -> Iterator[Assignment]:
    """Assignments that each beat the last; the end of them is the proof of the last."""
    ladder = _Ladder(pipelines, grad_accum)
    last = len(ladder.steps) - 1
    open_boxes = [_Box(0.0, LARGEST_S, 0, last)]
    while open_boxes:
        box = open_boxes.pop()
        tick()
        least = box.low_s + float(ladder.steps[box.early])
        # Strictly better by a relative 1e-12: rounding must not make the search go on forever.
        room_s = (best_s - least) * (1 - 1e-12) if np.isfinite(best_s) else np.inf
        high_s = min(box.high_s, 2.0 * best_s)
        caps = _Caps(high_s, float(ladder.steps[box.late]), room_s)
        candidate = ladder.quickest(caps)
        if candidate is None:
            continue
        assignment, steady = candidate
        better = assignment.value_s < best_s
        if better:
            best_s = assignment.value_s
            yield assignment
        high_s = min(high_s, 2.0 * best_s)
        wide = high_s - box.low_s
        later = float(ladder.steps[box.late] - ladder.steps[box.early])
        if wide > max(later, NARROW * best_s):
            at_s = steady if better and steady > box.low_s else 0.5 * (box.low_s + high_s)
            below_s = at_s * (1 - 1e-12) if better else at_s
            open_boxes += [box._replace(low_s=at_s), box._replace(high_s=below_s)]
        elif box.early < box.late:
            open_boxes += box.halves()
        elif better:
            open_boxes.append(box)


NARROW = 1e-10
"""Width of an interval of U, of the best value, in which nothing else is looked for: what rounding takes."""


class _Box(NamedTuple):
    """Of U, and positions, from and to, of caps on steps."""

    low_s: float
    high_s: float
    early: int
    late: int

    def halves(self) -> list[_Box]:
        """Of the steps; the one to look at first last."""
        middle = (self.early + self.late) // 2
        return [self._replace(early=middle + 1), self._replace(late=middle)]


class _Caps(NamedTuple):
    """What the stages of an assignment must keep."""

    steady_s: float
    """On U."""
    step_s: float
    """On each step that waits for all stages."""
    total_s: float
    """On the second maximum."""


LARGEST_S = 1e300
"""More than any time, and less than the infinite one of what is ruled out."""


class _Options:
    """The sizes that one stage may have, as arrays; each has its front."""

    def __init__(self, fronts: StageFronts, between: Between | None) -> None:
        self.sizes = [size for size, front in sorted(fronts.items()) if len(front.t_s)]
        self.fronts = [fronts[size] for size in self.sizes]
        self.layers, self.gpus, self.kind = np.array(self.sizes, dtype=np.intp).reshape(-1, 3).T
        self.least_t = np.array([front.t_s[0] for front in self.fronts])
        if between is not None:
            self.least_t = self.least_t + between.least_s(self.kind, self.gpus)
        self.in_turn_s = np.array([front.in_turn_s for front in self.fronts])
        self.backward_s = np.array([front.backward_s for front in self.fronts])
        self.steps = [np.zeros(len(f.t_s)) if f.step_s is None else f.step_s for f in self.fronts]
        self._room: tuple[float, list[Array]] = (np.nan, [])
        self._least: dict[Ends, Array] = {}
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

    def least_steady_s(self, ends: Ends) -> Array:
        """u of each size at its fastest, with nothing behind."""
        if ends not in self._least:
            self._least[ends] = self.steady_s(slice(None), self.least_t, ends, 0.0)
        return self._least[ends]

    def may(self, ends: Ends, caps: _Caps) -> Flags:
        """Which sizes are fast enough."""
        return np.asarray(self.least_steady_s(ends) <= caps.steady_s, dtype=bool)

    def steady_s(self, rows: Ints | slice, t_s: Array, ends: Ends, behind_s: Array | float) -> Array:
        """u of stages of these rows with these t."""
        longer_s = np.maximum(0.5 * t_s, self.backward_s[rows])
        return steady_s(t_s, longer_s, self.in_turn_s[rows], ends, behind_s)

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

    def __init__(self, pipelines: Pipelines, grad_accum: int) -> None:
        self.problem, self.grad_accum = pipelines, grad_accum
        each = {id(fronts): fronts for fronts in (*pipelines.inner, *pipelines.first.values())}
        options = {key: _Options(fronts, pipelines.between) for key, fronts in each.items()}
        self.inner = [options[id(fronts)] for fronts in pipelines.inner]
        self.first = {k: options[id(fronts)] for k, fronts in pipelines.first.items()}
        every = list(options.values())
        # One kind more, that of no stage at all, which any may be the last before.
        self.neighbours = np.pad(pipelines.neighbours, ((0, 0), (0, 1)), constant_values=True)
        steps = [steps for o in every for steps in o.steps]
        self.steps: Array = np.unique(np.concatenate(steps)) if steps else np.zeros(1)

    def _ends(self, following: int) -> Ends:
        # With one chunk it is the same however many stages there are.
        stages = 1 + max(self.problem.first)
        return Ends.of(self.grad_accum, following, stages, self.problem.chunks)

    def quickest(self, caps: _Caps) -> tuple[Assignment, float] | None:
        """Of the assignments with the least suffix times under the caps, one per length, the best, and U."""
        rest = self._most_layers(caps.steady_s)
        if not rest or rest[0][self.problem.gpus] < self.problem.layers:
            return None
        zero = np.zeros(1, dtype=np.intp)
        nothing = np.full(1, len(self.neighbours), dtype=np.intp)
        levels = [_Level(zero, zero, nothing, np.zeros(1), zero, zero, zero)]
        best: tuple[Assignment, float] | None = None
        for after in range(len(rest)):
            if after in self.first:
                ended = self._ended(levels, self.first[after], caps)
                if ended is not None and (best is None or ended[0].value_s < best[0].value_s):
                    best = ended
            if after + 1 >= len(rest) or after >= len(self.inner):
                break
            level = self._next(levels, self.inner[after], rest[after + 1], caps)
            if level is None:
                break
            levels.append(level)
        return best

    def _most_layers(self, most_s: float) -> list[NDArray[np.float64]]:
        """By number of stages behind and GPUs left: the most layers that the stages ahead can take with u
        under the cap, memory of each at its best and the stages behind at no time."""
        gpus = self.problem.gpus
        count = max(self.first, default=-1) + 1
        none = np.full(gpus + 1, -np.inf)
        rest = [none] * (count + 1)
        for after in reversed(range(count)):
            here = none.copy()
            ends = self._ends(after)
            for left, most in _most_by_gpus(self.first.get(after), ends, most_s):
                if left <= gpus:
                    here[left] = max(here[left], most)
            if after < len(self.inner):
                for left, most in _most_by_gpus(self.inner[after], ends, most_s):
                    if left <= gpus:
                        np.maximum(here[left:], rest[after + 1][: gpus + 1 - left] + most, out=here[left:])
            rest[after] = here
        return rest[:count]

    def _next(self, levels: list[_Level], options: _Options, ahead: Array, caps: _Caps) -> _Level | None:
        """All states with one stage more."""
        problem, level, ends = self.problem, levels[-1], self._ends(len(levels) - 1)
        layers = options.layers[:, None] + level.layers
        gpus = options.gpus[:, None] + level.gpus
        possible = (gpus <= problem.gpus) & options.may(ends, caps)[:, None]
        left = problem.layers - layers
        # A stage ahead has a layer at least, and all of them together no more than they can take.
        possible &= (left >= 1) & (left <= ahead[problem.gpus - np.minimum(gpus, problem.gpus)])
        possible &= self._inside_a_node(options.gpus[:, None], gpus)
        possible &= self.neighbours[options.kind[:, None], level.kind]
        row, state = np.nonzero(possible)
        if not len(row):
            return None
        before = level.suffix_s[state]
        beyond_s = self._beyond_s(options, row, level, state)
        choice, suffix_s = self._joined(options, row, (before, beyond_s), ends, caps)
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

    def _beyond_s(self, options: _Options, row: Ints, level: _Level, state: Ints) -> Array:
        """What these stages take beyond their fronts before those states."""
        if self.problem.between is None:
            return np.zeros(len(row))
        kinds = options.kind[row], options.gpus[row], level.kind[state], level.gpus[state]
        return self.problem.between.beyond_s(*kinds)

    def _joined(
        self, options: _Options, row: Ints, behind: tuple[Array, Array], ends: Ends, caps: _Caps
    ) -> tuple[Ints, Array]:
        """Of each row the fastest configuration under the caps that may go before stages of so much time, and
        takes so much beyond its front; and the time with it, infinite where none may."""
        before, beyond_s = behind
        choice, t_s = options.fastest(row, caps.total_s - before - beyond_s, caps.step_s)
        t_s = t_s + beyond_s
        finite = np.where(np.isfinite(t_s), t_s, 0.0)
        kept = np.isfinite(t_s) & (options.steady_s(row, finite, ends, before) <= caps.steady_s)
        return choice, np.where(kept, before + t_s, np.inf)

    def _inside_a_node(self, stage: Ints, end: Ints) -> Flags:
        """Whether a stage that ends the first `end` GPUs, counted from the last, keeps to whole nodes or
        inside one."""
        per_node = self.problem.gpus_per_node
        if not per_node:
            return np.ones(np.broadcast_shapes(stage.shape, end.shape), dtype=bool)
        inside = (end - 1) // per_node == (end - stage) // per_node
        return np.asarray(np.where(stage < per_node, inside, end % per_node == 0), dtype=bool)

    def _ended(self, levels: list[_Level], options: _Options, caps: _Caps) -> tuple[Assignment, float] | None:
        """The pipeline whose first stage joins all stages so far, and its U."""
        problem, level, ends = self.problem, levels[-1], self._ends(len(levels) - 1)
        possible = options.layers[:, None] + level.layers == problem.layers
        possible &= options.gpus[:, None] + level.gpus == problem.gpus
        possible &= options.may(ends, caps)[:, None]
        possible &= self._inside_a_node(options.gpus, np.full_like(options.gpus, problem.gpus))[:, None]
        possible &= self.neighbours[options.kind[:, None], level.kind]
        row, state = np.nonzero(possible)
        if not len(row):
            return None
        behind = level.suffix_s[state], self._beyond_s(options, row, level, state)
        choice, total = self._joined(options, row, behind, ends, caps)
        least = int(np.argmin(total))
        if not np.isfinite(total[least]):
            return None
        picked = [(options, int(row[least]), int(choice[least]))]
        picked += self._trace(levels, int(state[least]))
        sizes, choices = tuple(o.sizes[k] for o, k, _ in picked), tuple(c for _, _, c in picked)
        points = [
            Point.of(o.fronts[k], c, more)
            for (o, k, c), more in zip(picked, self._between(sizes), strict=True)
        ]
        parts = parts_of(points, self.grad_accum, chunks=problem.chunks)
        return Assignment(sizes, choices, sum(parts)), parts[0]

    def _between(self, sizes: Sequence[Size]) -> list[float]:
        """Per stage what it takes beyond its front."""
        between = self.problem.between
        if between is None:
            return [0.0] * len(sizes)
        behind = list(itertools.accumulate((gpus for _, gpus, _ in reversed(sizes[1:])), initial=0))[::-1]
        kinds = [kind for *_, kind in sizes]
        table = kinds, [gpus for _, gpus, _ in sizes], [*kinds[1:], len(self.neighbours)], behind
        return [
            float(more) for more in between.beyond_s(*(np.array(column, dtype=np.intp) for column in table))
        ]

    def _trace(self, levels: list[_Level], state: int) -> Iterator[tuple[_Options, int, int]]:
        for after in reversed(range(len(levels) - 1)):
            level = levels[after + 1]
            yield self.inner[after], int(level.row[state]), int(level.choice[state])
            state = int(level.before[state])


def _most_by_gpus(options: _Options | None, ends: Ends, most_s: float) -> list[tuple[int, int]]:
    """(GPUs, most layers under the cap) for each number of GPUs."""
    if options is None or not options.sizes:
        return []
    fast = options.least_steady_s(ends) <= most_s
    # Layers ascend: the last of a number of GPUs is the most.
    return list(dict(zip(options.gpus[fast].tolist(), options.layers[fast].tolist(), strict=True)).items())
