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
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DIGITS = 4
"""Of a factor in a profile."""
SLACK = 1e-9
"""What rounding in a sum of speeds may make of an equality."""
_LARGE_SETS = tuple(sorted((bits for bits in range(16) if bits.bit_count() > 2), key=int.bit_count))


def excess(table: Array) -> Array:
    """Left side minus right side of (*) for the sets of three and four streams, in a fixed order: above 0
    where more work would end sooner. Pairs fulfil it when their factors are at least 1."""
    slopes = _slopes(table)
    return np.concatenate([_sums(table, bits, slopes) - 1.0 for bits in _LARGE_SETS])


def broken_sets(table: Array) -> tuple[int, ...]:
    """Bit sets of streams in which a stream's work can be outweighed by what it speeds up; by more than a
    profile's digits."""
    slopes = _slopes(table)
    return tuple(b for b in _LARGE_SETS if _sums(table, b, slopes).max() > 1.0 + 10.0**-DIGITS)


def monotone(table: Array) -> Array:
    """The nearest table, in this sense, that fulfils (*), with factors of a profile's digits: small sets
    first, each set moves towards factors no less than its subsets' as far as it must. A stream that is
    not faster than in some smaller set keeps its factor."""
    found = np.ones((16, 4))
    slopes: dict[int, Array] = {}
    for bits in sorted(range(1, 16), key=int.bit_count):
        members = _members(bits)
        if len(members) > 1:
            speeds = 1.0 / _rounded(table[bits], up=False)
            if len(members) > 2:
                floor = np.maximum(table[bits], _largest_below(found, bits))
                speeds = _moved(speeds, np.minimum(speeds, 1.0 / floor), _beside(bits, slopes))
            found[bits, members] = _rounded(1.0 / speeds[members], up=len(members) > 2)
        slopes[bits] = _slopes_of(found, bits, slopes)
    return found


def _moved(speeds: Array, slow: Array, beside: Array) -> Array:
    """As little as is needed of the way from `speeds` to `slow`, which fulfils (*)."""
    over = beside @ speeds - 1.0
    way = beside @ (speeds - slow)
    needed = over > SLACK
    share = float(np.max(over[needed] / np.maximum(way[needed], over[needed]))) if needed.any() else 0.0
    return np.asarray(speeds + share * (slow - speeds))


def _rounded(factors: Array, *, up: bool) -> Array:
    """To the digits that a profile holds; upwards where a smaller factor could break (*)."""
    places = DIGITS - 1 - np.floor(np.log10(factors))
    scale = 10.0**places
    # What is such a number already must not be raised by the last bit of its own division.
    scaled = np.ceil(factors * scale - 1e-6) if up else np.round(factors * scale)
    return np.array([float(f"{value:.{DIGITS}g}") for value in scaled / scale])


def _largest_below(table: Array, bits: int) -> Array:
    return np.max([table[bits & ~(1 << k)] for k in _members(bits)], axis=0)  # type: ignore[no-any-return]


def _slopes(table: Array) -> dict[int, Array]:
    """Slopes of the time of every set, one row for each order of ends."""
    found: dict[int, Array] = {}
    for bits in sorted(range(1, 16), key=int.bit_count):
        found[bits] = _slopes_of(table, bits, found)
    return found


def _slopes_of(table: Array, bits: int, smaller: dict[int, Array]) -> Array:
    if bits.bit_count() == 1:
        return np.eye(4)[_members(bits)]
    rows = []
    for first in _members(bits):
        rest = smaller[bits & ~(1 << first)].copy()
        rest[:, first] = (1.0 - rest @ (1.0 / table[bits])) * table[bits, first]
        rows.append(rest)
    return np.concatenate(rows)


def _beside(bits: int, slopes: dict[int, Array]) -> Array:
    return np.concatenate([slopes[bits & ~(1 << k)] for k in _members(bits)])


def _sums(table: Array, bits: int, slopes: dict[int, Array]) -> Array:
    return np.asarray(_beside(bits, slopes) @ (1.0 / table[bits]))


def _members(bits: int) -> list[int]:
    return [stream for stream in range(4) if bits >> stream & 1]
