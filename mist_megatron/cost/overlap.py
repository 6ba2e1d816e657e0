"""How long four streams take when they run at once and slow each other down.

Streams are compute, GPU-GPU traffic, host-to-device and device-to-host copies. A slowdown table gives,
for every set of streams that are active together, the factor by which each of them is stretched. While a
set is active all its streams progress at their stretched pace; when the first of them is done the set
shrinks and the rest goes on with the factors of the smaller set (Mist, EuroSys 2025, Algorithm 1).

The table has 16 rows (bit set of active streams: 1 compute, 2 GPU-GPU, 4 host-to-device,
8 device-to-host) and 4 columns (the stream); rows of one stream are 1 whatever the table says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STREAMS = ("compute", "gpu_gpu", "host_to_device", "device_to_host")
_CHUNK = 8192
"""Rows worked on at a time: the dozen temporaries of a chunk stay in a second-level cache."""


def no_interference() -> Array:
    """The table of streams that do not disturb each other: overlap is then a plain maximum."""
    return np.ones((16, 4))


def overlapped_time(streams: Sequence[Array | float], factors: Array) -> Array:
    """Seconds until all four streams are done, batched over any (broadcast) shape.

    Streams that are zero everywhere cost nothing: their sets cannot occur and are skipped, which
    on the configurations of a search without offload is nearly all of the work.
    """
    arrays = [np.asarray(stream, dtype=np.float64) for stream in streams]
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    active = [index for index, array in enumerate(arrays) if bool(np.any(array > 0.0))]
    if not active:
        return np.zeros(shape)
    if len(active) == 1:
        return np.array(np.broadcast_to(arrays[active[0]], shape))
    if len(active) == 2:
        return _two_streams(arrays, active, factors, shape)
    return _many_streams(arrays, active, factors, shape)


def _two_streams(
    arrays: list[Array], active: list[int], factors: Array, shape: tuple[int, ...]
) -> Array:
    """Closed form: together until the shorter (stretched) one ends, then the rest alone."""
    first, second = active
    row = (1 << first) | (1 << second)
    slow_first, slow_second = float(factors[row, first]), float(factors[row, second])
    stretched_first = arrays[first] * slow_first
    stretched_second = arrays[second] * slow_second
    together = np.minimum(stretched_first, stretched_second)
    alone_first = (stretched_first - together) / slow_first
    alone_second = (stretched_second - together) / slow_second
    return np.array(np.broadcast_to(together + alone_first + alone_second, shape))


def _many_streams(
    arrays: list[Array], active: list[int], factors: Array, shape: tuple[int, ...]
) -> Array:
    flat = [np.broadcast_to(arrays[index], shape).reshape(-1) for index in active]
    table = _subset_table(factors, active)
    total = np.empty(flat[0].size)
    for start in range(0, total.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        total[part] = _march([column[part] for column in flat], table)
    return total.reshape(shape)


def _subset_table(factors: Array, active: list[int]) -> Array:
    """Factors over the bit sets of the active streams only; an idle stream never ends first."""
    count = len(active)
    table = np.full((1 << count, count), np.inf)
    for subset in range(1 << count):
        members = [position for position in range(count) if subset >> position & 1]
        row = sum(1 << active[position] for position in members)
        for position in members:
            table[subset, position] = factors[row, active[position]] if len(members) > 1 else 1.0
    return table


def _march(columns: list[Array], table: Array) -> Array:
    """Every turn ends at least one stream of every row, so as many turns as streams suffice."""
    rest = [np.maximum(column, 0.0) for column in columns]
    total = np.zeros(rest[0].shape)
    for _ in columns:
        code = np.zeros(total.shape, dtype=np.intp)
        for position, remaining in enumerate(rest):
            code += (remaining > 0.0).astype(np.intp) << position
        slow = [table[:, position].take(code) for position in range(len(rest))]
        # A finished stream is 0 * inf = nan here; fmin ignores it.
        with np.errstate(invalid="ignore"):
            stretched = [remaining * factor for remaining, factor in zip(rest, slow, strict=True)]
            step = stretched[0]
            for other in stretched[1:]:
                step = np.fmin(step, other)
            step = np.where(code > 0, step, 0.0)
            rest = [
                np.where(remaining > 0.0, (after - step) / factor, 0.0)
                for remaining, after, factor in zip(rest, stretched, slow, strict=True)
            ]
        total += step
    return total


def overlapped_time_of_row(streams: Sequence[float], factors: Array) -> float:
    """The same for one row in plain Python, written as the algorithm reads: for tests and learners."""
    rest = {index: value for index, value in enumerate(streams) if value > 0.0}
    total = 0.0
    while len(rest) > 1:
        row = sum(1 << index for index in rest)
        step = min(value * float(factors[row, index]) for index, value in rest.items())
        total += step
        rest = {
            index: (value * float(factors[row, index]) - step) / float(factors[row, index])
            for index, value in rest.items()
        }
        rest = {index: value for index, value in rest.items() if value > 0.0}
    return total + sum(rest.values())
