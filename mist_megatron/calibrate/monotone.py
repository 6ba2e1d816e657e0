"""When does more work on a stream never make all streams end sooner?

While a set S of streams runs, stream i moves at the speed r_S(i) = 1 / factor, alone at 1. If k is the first
of S to end, the time until all have ended is T_S(x) = t + T_{S-k}(x_i - r_S(i) t) with t = x_k / r_S(k).
Within one order of ends it is linear in the works x; with g the slopes of T_{S-k}, its own are

    dT/dx_i = g_i                                     of those that go on, and
    dT/dx_k = (1 - sum_i g_i r_S(i)) / r_S(k)         of the one that ends first.

T is continuous, so it is monotone in every stream, and in adding a stream (its work from 0 up), exactly when
no slope of any order is negative:

    sum_i g_i r_S(i) <= 1    for each S, each k in S and the slopes g of each order in which S-k may end  (*)

In words: beside k the others get no more done than without k, since sum_i g_i r_{S-k}(i) = 1 (time passes).
Every order of S-k is met from S (start at y_i + r_S(i) t), so (*) is needed too. Factors that never shrink
with the set (r_S <= r_{S-k}) fulfil it by induction: slopes of smaller sets are at least 0, so that the sum
is at most the one that is 1. They are not needed: where GPU-GPU traffic nearly stops beside a host copy, its
compute may well run faster than beside GPU-GPU traffic alone, as long as the two together get no more done.

Collectives that wait until compute and GPU-GPU traffic are done add one step: the last k of these two is
followed not by S-k but by S-k with GPU-GPU traffic, whose slopes then stand in (*); while they wait their
speed is 0. It asks that copies beside compute are no further ahead than beside the collectives that compute
holds up. Streams that together take longer than one after the other can break this rightly: then more
compute, which keeps them apart, does end sooner. So it is a condition on request (`waiting`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Slopes = dict[tuple[int, bool], Array]
"""Of a set of streams, without and with collectives that wait: one row for each order of ends, with a column
for each stream and one for what waits."""

DIGITS = 4
"""Of a factor in a profile."""
SLACK = 1e-9
"""What rounding in a sum of speeds may make of an equality."""
_COMPUTE, _GPU_GPU = 1, 2
_BLOCKING = _COMPUTE | _GPU_GPU
_SETS = tuple(sorted(range(1, 16), key=lambda bits: (bits.bit_count(), bits & _COMPUTE)))
"""Each after those that its condition looks at: smaller ones, and that with GPU-GPU traffic for compute."""


def excess(table: Array, *, waiting: bool) -> Array:
    """Left side minus right side of (*), in a fixed order: above 0 where more work would end sooner. Of
    several tables at once, too: all but the last two axes are tables."""
    slopes = _slopes_of_nothing(table)
    parts = []
    for bits in _SETS:
        _add_slopes(slopes, table, bits, waiting=waiting)
        parts.append(_done(_beside(bits, slopes, waiting=waiting), _speeds(table, bits)) - 1.0)
    return np.concatenate(parts, axis=-1)


def broken_sets(table: Array, *, waiting: bool) -> tuple[int, ...]:
    """The bit sets of streams that break (*), by more than a profile's digits."""
    slopes = _slopes_of_nothing(table)
    broken = []
    for bits in _SETS:
        _add_slopes(slopes, table, bits, waiting=waiting)
        most = (_beside(bits, slopes, waiting=waiting) @ _speeds(table, bits)).max()
        if most > 1.0 + 10.0**-DIGITS:
            broken.append(bits)
    return tuple(broken)


def monotone(table: Array, *, waiting: bool) -> Array:
    """A table that fulfils (*) near this one, with factors of a profile's digits: small sets first, each set
    moves towards factors no less than those of its subsets as far as it must. A stream that is not faster
    than in some smaller set keeps its factor."""
    factors = np.ones((16, 4))
    slopes = _slopes_of_nothing(table)
    for bits in _SETS:
        members = _members(bits)
        if len(members) > 1:
            compared = [factors[bits & ~(1 << k)] for k in members]
            if waiting and bits & _BLOCKING == _COMPUTE:
                compared.append(factors[bits ^ _BLOCKING])
            slow = 1.0 / np.max([table[bits], *compared], axis=0)
            moved = _moved(1.0 / table[bits], slow, _beside(bits, slopes, waiting=waiting)[:, :4])
            factors[bits, members] = _raised(1.0 / moved[members])
        _add_slopes(slopes, factors, bits, waiting=waiting)
    return factors


def _moved(speeds: Array, slow: Array, beside: Array) -> Array:
    """As little as is needed of the way from `speeds` to `slow`, which fulfils (*)."""
    over = beside @ speeds - 1.0
    way = beside @ (speeds - slow)
    needed = over > SLACK
    share = float(np.max(over[needed] / np.maximum(way[needed], over[needed]))) if needed.any() else 0.0
    return np.asarray(speeds + share * (slow - speeds))


def _raised(factors: Array) -> Array:
    """To the digits that a profile holds, upwards: a smaller factor could break (*). What is such a number
    already is not raised by the last bit of its own division."""
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(factors)))
    return np.array([float(f"{value:.{DIGITS}g}") for value in np.ceil(factors * scale - 1e-6) / scale])


def _slopes_of_nothing(table: Array) -> Slopes:
    none = np.zeros((*table.shape[:-2], 1, 5))
    return {(0, False): none, (0, True): none}


def _add_slopes(slopes: Slopes, table: Array, bits: int, *, waiting: bool) -> None:
    for waits in (False, True) if waiting and bits & _BLOCKING else (False,):
        rows = []
        for first in _members(bits):
            own = _after(bits, first, slopes, waits=waits).copy()
            lost = 1.0 - _done(own, _speeds(table, bits))
            own[..., first] = lost * table[..., bits, first, None]
            rows.append(own)
        slopes[bits, waits] = np.concatenate(rows, axis=-2)


def _after(bits: int, first: int, slopes: Slopes, *, waits: bool) -> Array:
    """Slopes of what goes on when `first` has ended."""
    rest = bits & ~(1 << first)
    if waits and not rest & _BLOCKING:
        return slopes[rest | _GPU_GPU, False][..., [0, 4, 2, 3, 1]]
    return slopes[rest, waits]


def _beside(bits: int, slopes: Slopes, *, waiting: bool) -> Array:
    """Slopes that the speeds of this set must not use up: of all that can go on without one of it."""
    rows = [_after(bits, first, slopes, waits=False) for first in _members(bits)]
    if waiting and bits & _BLOCKING:
        # What goes on after GPU-GPU traffic without compute is this set again: its speeds use up at most 1.
        again = bits & ~_GPU_GPU
        rows += [
            _after(bits, first, slopes, waits=True)
            for first in _members(bits)
            if again & _BLOCKING or bits & ~(1 << first) != again
        ]
    return np.concatenate(rows, axis=-2)


def _done(slopes: Array, speeds: Array) -> Array:
    return np.asarray((slopes @ speeds[..., None])[..., 0])


def _speeds(table: Array, bits: int) -> Array:
    """Of the four streams, and of what waits; those outside the set have no slope."""
    speeds = np.zeros((*table.shape[:-2], 5))
    speeds[..., :4] = 1.0 if bits.bit_count() == 1 else 1.0 / table[..., bits, :]
    return speeds


def _members(bits: int) -> list[int]:
    return [stream for stream in range(4) if bits >> stream & 1]
