"""The exact assignment between stages: which (layers, configuration) each stage gets.

Minimises eq. 1 in the form  (G - 1) max_i t_i + max_i (d_i + sum_{j >= i} t_j)  with sum of layers = L.
For a cap tau on every t and a cap C on the second maximum, the least suffix time over (stage from the end,
layers left) is a plain one-label dynamic program: a smaller suffix loosens both caps for all before it.
Walking tau upwards with C = best - (G - 1) tau meets every optimum; the walk ends when (G - 1) tau plus a
lower bound of the second maximum reaches the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Front:
    """Non-dominated (t, d) of one stage with one number of layers, t ascending and d descending."""

    t_s: Array
    d_s: Array


StageFronts = dict[int, Front]
"""Number of layers -> front; absent where nothing fits."""


@dataclass(frozen=True)
class Assignment:
    """One choice per stage, and its value of eq. 1."""

    layers: tuple[int, ...]
    choice: tuple[int, ...]
    """Position in the front of (stage, layers)."""
    value_s: float


@dataclass(frozen=True)
class _Prepared:
    layers: int
    t_s: Array
    least_sum: Array
    """Least d + t over this and all faster configurations: descending, for bisection."""
    least_d: float


def pareto(t_s: Array, d_s: Array) -> NDArray[np.intp]:
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
    stages: Sequence[StageFronts], layers: int, grad_accum: int, best_s: float = np.inf
) -> Assignment | None:
    """The optimal assignment if it is better than `best_s`, else None."""
    prepared = [
        [_prepare(count, front) for count, front in sorted(fronts.items()) if len(front.t_s)]
        for fronts in stages
    ]
    if any(not options for options in prepared):
        return None
    caps = np.unique(np.concatenate([option.t_s for options in prepared for option in options]))
    first = _least_cap(prepared, layers, caps)
    if first is None:
        return None
    found: Assignment | None = None
    weight = grad_accum - 1
    # d of the first stage counts in full; with no cap the suffix alone bounds the second maximum.
    least_d = min(float(option.least_d) for option in prepared[0])
    floor_s = least_d + _least_total(prepared, layers, np.inf)
    for tau in map(float, caps[first:]):
        if weight * tau + floor_s >= best_s:
            break
        if weight * tau + least_d + _least_total(prepared, layers, tau) >= best_s:
            continue
        while True:
            # Strictly better by a relative 1e-12: rounding must not make the walk go on forever.
            cap = (best_s - weight * tau) * (1 - 1e-12) if np.isfinite(best_s) else np.inf
            picked = _suffix(prepared, layers, tau, cap)
            if picked is None:
                break
            candidate = _assignment(stages, picked, grad_accum)
            if candidate.value_s >= best_s:
                break
            best_s, found = candidate.value_s, candidate
    return found


def _prepare(layers: int, front: Front) -> _Prepared:
    least_sum = np.minimum.accumulate(front.t_s + front.d_s)
    return _Prepared(layers, front.t_s, least_sum, float(front.d_s.min()))


def _least_total(prepared: Sequence[Sequence[_Prepared]], layers: int, tau: float) -> float:
    """Least sum of t over all stages with every t under the cap: a bound of the second maximum."""
    least = np.full(layers + 1, np.inf)
    least[0] = 0.0
    for options in reversed(prepared):
        now = np.full(layers + 1, np.inf)
        for option in options:
            if option.layers <= layers and option.t_s[0] <= tau:
                reached = least[: layers + 1 - option.layers] + option.t_s[0]
                np.minimum(now[option.layers :], reached, out=now[option.layers :])
        least = now
    return float(least[layers])


def _least_cap(prepared: Sequence[Sequence[_Prepared]], layers: int, caps: Array) -> int | None:
    """Position of the smallest cap under which all layers find a place."""
    low, high = 0, len(caps) - 1
    if not np.isfinite(_least_total(prepared, layers, np.inf)):
        return None
    while low < high:
        middle = (low + high) // 2
        if not np.isfinite(_least_total(prepared, layers, float(caps[middle]))):
            low = middle + 1
        else:
            high = middle
    return low


def _suffix(
    prepared: Sequence[Sequence[_Prepared]], layers: int, tau: float, cap: float
) -> list[tuple[int, int]] | None:
    """(layers, choice) of every stage with the least suffix times under both caps, or None."""
    least = np.full(layers + 1, np.inf)
    least[0] = 0.0
    records: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    for options in reversed(prepared):
        now = np.full(layers + 1, np.inf)
        which = np.full(layers + 1, -1, dtype=np.intp)
        choice = np.full(layers + 1, -1, dtype=np.intp)
        for position, option in enumerate(options):
            count = option.layers
            if count > layers or option.t_s[0] > tau:
                continue
            before = least[: layers + 1 - count]
            # First configuration whose d + t fits under the cap; it is the fastest that does.
            room = np.where(np.isfinite(before), cap - np.where(np.isfinite(before), before, 0.0), -np.inf)
            index = np.searchsorted(-option.least_sum, -room, side="left")
            allowed = index < len(option.t_s)
            time = option.t_s[np.minimum(index, len(option.t_s) - 1)]
            total = np.where(allowed & (time <= tau), before + time, np.inf)
            better = total < now[count:]
            now[count:][better] = total[better]
            which[count:][better] = position
            choice[count:][better] = index[better]
        records.append((which, choice))
        least = now
    if not np.isfinite(least[layers]):
        return None
    picked = []
    left = layers
    for options, (which, choice) in zip(prepared, reversed(records), strict=True):
        option = options[int(which[left])]
        picked.append((option.layers, int(choice[left])))
        left -= option.layers
    return picked


def _assignment(stages: Sequence[StageFronts], picked: list[tuple[int, int]], grad_accum: int) -> Assignment:
    fronts = [stages[k][count] for k, (count, _) in enumerate(picked)]
    t_s = [float(front.t_s[index]) for front, (_, index) in zip(fronts, picked, strict=True)]
    d_s = [float(front.d_s[index]) for front, (_, index) in zip(fronts, picked, strict=True)]
    return Assignment(
        layers=tuple(count for count, _ in picked),
        choice=tuple(index for _, index in picked),
        value_s=value_of(t_s, d_s, grad_accum),
    )
