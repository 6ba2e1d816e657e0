"""What a stage may take, as rows of a front, and what a step of a pipeline of such rows takes at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


Ints = NDArray[np.intp]


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Front:
    """Non-dominated (t, d) of one stage of one size, t ascending; with steps that wait for all stages (t, d,
    step), d without the step."""

    t_s: Array
    """Without transfers that are not there while a pipeline fills and drains."""
    d_s: Array
    step_s: Array | None = None
    in_turn_s: float = 0.0
    """Such transfers, per micro-batch."""
    backward_s: float = 0.0
    """The longer pass of no configuration takes less."""

    def beside(self, crossed: tuple[float, float]) -> Front:
        """With so much more of t, and of what is in turn."""
        more_s, in_turn_s = crossed
        if not more_s:
            return self
        return replace(self, t_s=self.t_s + more_s, in_turn_s=self.in_turn_s + in_turn_s)

    def longer_pass_s(self) -> Array:
        """The longer of forward and backward pass takes that or more, and half of t."""
        return np.maximum(0.5 * self.t_s, self.backward_s)


def pareto(t_s: Array, d_s: Array, step_s: Array | None = None) -> Ints:
    """Indices of the non-dominated points, t ascending; of equal points one is kept."""
    if step_s is not None and len(t_s) and np.any(step_s != step_s[0]):
        return _pareto_of_three(t_s, d_s, step_s)
    if not len(t_s):
        return np.zeros(0, dtype=np.intp)
    rows = _worth_sorting(t_s, d_s)
    order = rows[np.lexsort((d_s[rows], t_s[rows]))]
    d = d_s[order]
    keep = np.ones(len(d), dtype=bool)
    keep[1:] = d[1:] < np.minimum.accumulate(d)[:-1]
    return order[keep]


def _worth_sorting(t_s: Array, d_s: Array) -> Ints:
    """Of many points few are left by the front of one in 16."""
    if len(t_s) < 256:
        return np.arange(len(t_s), dtype=np.intp)
    some = pareto(t_s[::16], d_s[::16])
    before = np.searchsorted(t_s[::16][some], t_s, side="right")
    return np.flatnonzero(d_s <= np.concatenate([[np.inf], d_s[::16][some]])[before])


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
        front = np.concatenate(kept)
        front = front[pareto(t_s[front], d_s[front])]
        t_kept, d_kept = t_s[front], d_s[front]
    every = np.concatenate(kept)
    return every[np.lexsort((step_s[every], d_s[every], t_s[every]))]


def steady_s(
    front_t_s: Array | float,
    longer_s: Array | float,
    in_turn_s: Array | float,
    ends: Ends,
    behind_s: Array | float,
) -> Array:
    """u of stages: all passes but one, and what warm-up passes leave of the waits for the stages behind, less
    these stages' times, which others count. Of one that sends in turn all that crosses its borders is its
    own, and not its neighbours' besides."""
    waits_s = -ends.filling * (front_t_s - longer_s)
    if ends.waits_twice:
        waits_s = np.maximum(waits_s, behind_s - 0.5 * in_turn_s - ends.filling * front_t_s)
    return np.asarray((ends.passes - 1) * (front_t_s + in_turn_s) + waits_s)


def path_s(t_s: Array, longer_s: Array, ends: Ends, later_s: Array | float) -> Array:
    """All passes of a stage whose chunks take turns, and its waits at least: for the last chunks of the
    stages behind, which take so long."""
    waits_s = np.maximum(later_s - ends.filling * (t_s - longer_s), 0.0)
    if ends.waits_twice:
        waits_s = np.maximum(waits_s, 2.0 * later_s - ends.filling * t_s)
    return np.asarray(ends.passes * t_s + waits_s)


class Ends(NamedTuple):
    """What of a pipeline says how much of a stage's waits its warm-up passes fill."""

    passes: int | Array
    """Micro-batches, or chunks of them where these take turns."""
    filling: int | Array
    """Warm-up passes that fill a wait, ..."""
    waits_twice: bool
    """... of which there are two, if there are stages behind and passes of both kinds in between."""

    @staticmethod
    def of(passes: int, following: int, stages: int, chunks: int = 1) -> Ends:
        """Of a stage before so many others, of so many stages in all."""
        if chunks == 1:
            room, filling = passes - 1, following
        else:
            # Passes of the chunks before the last fill none (`spec.interleaved`).
            room, filling = max(passes - 1 - (chunks - 1) * stages, 0), 2 * following
        return Ends(passes, min(filling, room), 0 < filling < room)


class Point(NamedTuple):
    """A stage's configuration."""

    t_s: float
    longer_s: float
    in_turn_s: float
    d_s: float
    step_s: float

    @staticmethod
    def of(front: Front, row: int, beyond_s: float = 0.0) -> Point:
        """A row of a front, with what its neighbours add."""
        t_s, step_s = (
            float(front.t_s[row]) + beyond_s,
            0.0 if front.step_s is None else float(front.step_s[row]),
        )
        longer_s = max(0.5 * t_s, front.backward_s)
        return Point(t_s, longer_s, front.in_turn_s, float(front.d_s[row]), step_s)


def value_of(points: Sequence[Point], passes: int, *, chunks: int = 1) -> float:
    """The least time of a step with these configurations, first to last."""
    return sum(parts_of(points, passes, chunks=chunks))


def parts_of(points: Sequence[Point], passes: int, *, chunks: int = 1) -> tuple[float, float, float]:
    """U, the second maximum, and the longest step that hides behind nothing."""
    behind, second, steady = 0.0, -np.inf, -np.inf
    for following, point in enumerate(reversed(points)):
        ends = Ends.of(passes, following, len(points), chunks)
        steady = max(steady, float(steady_s(point.t_s, point.longer_s, point.in_turn_s, ends, behind)))
        behind += point.t_s
        second = max(second, point.d_s + behind)
    return steady, second, max(point.step_s for point in points)
