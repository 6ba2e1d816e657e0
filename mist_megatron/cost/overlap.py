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
    active = [index for index, array in enumerate(arrays) if (array > 0.0).any()]
    if not active:
        return np.zeros(shape)
    if len(active) == 1:
        return np.array(np.broadcast_to(arrays[active[0]], shape))
    if len(active) == 2:
        pair = [arrays[index] for index in active]
        return np.array(np.broadcast_to(_two_streams(pair, active, factors), shape))
    flat = [np.broadcast_to(arrays[index], shape).reshape(-1) for index in active]
    total = np.empty(flat[0].size)
    for start in range(0, total.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        total[part] = _together([column[part] for column in flat], active, factors)
    return total.reshape(shape)


def _two_streams(times: list[Array], active: list[int], factors: Array) -> Array:
    """Together until the first (stretched) one ends after m, then what m left of the other, alone:
    m + (x - m / f) + (y - m / g)."""
    row = (1 << active[0]) | (1 << active[1])
    slow_first, slow_second = float(factors[row, active[0]]), float(factors[row, active[1]])
    together = np.minimum(times[0] * slow_first, times[1] * slow_second)
    return times[0] + times[1] + together * (1.0 - 1.0 / slow_first - 1.0 / slow_second)


def _together(times: list[Array], active: list[int], factors: Array) -> Array:
    """All rows have the same streams: run until the first of each row ends, then split the rows by
    which one that was. A stream that is zero in some rows ends there after no time, so that rows of
    any pattern pass through, and only sets that occur are visited."""
    if len(active) == 2:
        return _two_streams(times, active, factors)
    row = sum(1 << stream for stream in active)
    slow = [float(factors[row, stream]) for stream in active]
    stretched = [time * factor for time, factor in zip(times, slow, strict=True)]
    total = stretched[0]
    for other in stretched[1:]:
        total = np.minimum(total, other)
    rest = [(time - total) / factor for time, factor in zip(stretched, slow, strict=True)]
    undecided = np.ones(total.shape, dtype=bool)
    step, total = total, total.copy()
    for position in range(len(active)):
        rows = np.flatnonzero(undecided & (stretched[position] == step))
        if rows.size == 0:
            continue
        undecided[rows] = False
        others = [index for index in range(len(active)) if index != position]
        left = [rest[index][rows] for index in others]
        total[rows] += _together(left, [active[index] for index in others], factors)
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
