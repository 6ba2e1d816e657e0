"""How long four streams take when they run at once and slow each other down.

Streams are compute, GPU-GPU traffic, host-to-device and device-to-host copies. A slowdown table gives,
for every set of streams that are active together, the factor by which each of them is stretched. While a
set is active all its streams progress at their stretched pace; when the first of them is done the set
shrinks and the rest goes on with the factors of the smaller set (Mist, EuroSys 2025, Algorithm 1).

A layer's pass also has collectives that wait for its compute and that the next layer waits for (`then`):
once compute and the GPU-GPU traffic beside it are done these follow on the GPU-GPU stream, while copies to
and from the host go on.

The table has 16 rows (bit set of active streams: 1 compute, 2 GPU-GPU, 4 host-to-device,
8 device-to-host) and 4 columns (the stream); rows of one stream are 1 whatever the table says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

import numpy as np

from mist_megatron.price.prices import Array, any_of

STREAMS = ("compute", "gpu_gpu", "host_to_device", "device_to_host")
COMPUTE, GPU_GPU, HOST_TO_DEVICE, DEVICE_TO_HOST = range(4)
_COPIES = (HOST_TO_DEVICE, DEVICE_TO_HOST)
_CHUNK = 8192
"""Rows worked on at a time: the dozen temporaries of a chunk stay in a second-level cache."""


Asked = ParamSpec("Asked")


def one_step(function: Callable[Asked, Array]) -> Callable[Asked, Array]:
    """Arrays that record how they are made (`cost.recorded`) record a call of this function as one step, as
    they do for numpy's own functions (NEP 18)."""

    @wraps(function)
    def called(*arguments: Asked.args, **named: Asked.kwargs) -> Array:
        for argument in arguments:
            for part in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(part, np.ndarray) and type(part) is not np.ndarray:
                    step: Array = part.__array_function__(called, (type(part),), arguments, named)
                    return step
        return function(*arguments, **named)

    return called


@one_step
def overlapped_time(streams: Sequence[Array | float], factors: Array, then: Array | float = 0.0) -> Array:
    """Seconds until all four streams are done, batched over any (broadcast) shape; `then` follows on the
    GPU-GPU stream when that and compute are done.

    Streams that are zero everywhere cost nothing: their sets cannot occur and are skipped, which
    on the configurations of a search without offload is nearly all of the work.
    """
    arrays = [np.asarray(stream, dtype=np.float64) for stream in streams]
    after = np.asarray(then, dtype=np.float64)
    shape = np.broadcast(after, *arrays).shape
    active = [index for index, array in enumerate(arrays) if any_of(array > 0.0)]
    if not any_of(after):
        return _until_done(arrays, active, shape, factors)
    if not any(index in _COPIES for index in active):
        # Nothing runs beside what follows.
        return _until_done(arrays, active, shape, factors) + after
    if len(active) == 1:
        pair, both = [after, arrays[active[0]]], [GPU_GPU, active[0]]
        return _spread(_two_streams(pair, both, factors), shape)
    if len(active) == 2 and active[0] not in _COPIES:
        return _spread(_two_and_then([arrays[index] for index in active], active, factors, after), shape)
    return _in_chunks([arrays[index] for index in active], active, shape, factors, after)


def _until_done(arrays: list[Array], active: list[int], shape: tuple[int, ...], factors: Array) -> Array:
    if not active:
        return np.zeros(shape)
    if len(active) == 1:
        return _spread(arrays[active[0]], shape)
    if len(active) == 2:
        return _spread(_two_streams([arrays[index] for index in active], active, factors), shape)
    return _in_chunks([arrays[index] for index in active], active, shape, factors, None)


def _spread(some: Array, shape: tuple[int, ...]) -> Array:
    return np.array(some if some.shape == shape else np.broadcast_to(some, shape))


def _in_chunks(
    times: list[Array], active: list[int], shape: tuple[int, ...], factors: Array, then: Array | None
) -> Array:
    flat = [np.broadcast_to(time, shape).reshape(-1) for time in times]
    after = None if then is None else np.broadcast_to(then, shape).reshape(-1)
    total = np.empty(flat[0].size)
    for start in range(0, total.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        rest = None if after is None else after[part]
        total[part] = _together([column[part] for column in flat], active, factors, rest)
    return total.reshape(shape)


def _two_streams(times: list[Array], active: list[int], factors: Array) -> Array:
    """Together until the first (stretched) one ends after m, then what m left of the other, alone:
    m + (x - m / f) + (y - m / g)."""
    row = (1 << active[0]) | (1 << active[1])
    slow_first, slow_second = float(factors[row, active[0]]), float(factors[row, active[1]])
    together = np.minimum(times[0] * slow_first, times[1] * slow_second)
    return times[0] + times[1] + together * (1.0 - 1.0 / slow_first - 1.0 / slow_second)


def _two_and_then(times: list[Array], active: list[int], factors: Array, then: Array) -> Array:
    """The same of two streams and what follows the first of them, where one is a copy; beside two copies it
    runs at once."""
    if active[0] in _COPIES:
        return _together([then, *times], [GPU_GPU, *active], factors, None)
    if active[1] not in _COPIES:
        return _two_streams(times, active, factors) + then
    row = (1 << active[0]) | (1 << active[1])
    slow_first, slow_copy = float(factors[row, active[0]]), float(factors[row, active[1]])
    together = np.minimum(times[0] * slow_first, times[1] * slow_copy)
    first_left, copy_left = times[0] - together / slow_first, times[1] - together / slow_copy
    # One of the two is done; where the copy is, what follows has the device for itself.
    return together + first_left + _two_streams([then, copy_left], [GPU_GPU, active[1]], factors)


def _together(times: list[Array], active: list[int], factors: Array, then: Array | None) -> Array:
    """All rows have the same streams: run until the first of each row ends, then split the rows by
    which one that was. A stream that is zero in some rows ends there after no time, so that rows of
    any pattern pass through, and only sets that occur are visited."""
    if len(active) == 2:
        if then is None:
            return _two_streams(times, active, factors)
        return _two_and_then(times, active, factors, then)
    row = sum(1 << stream for stream in active)
    slow = [float(factors[row, stream]) for stream in active]
    stretched = [time * factor for time, factor in zip(times, slow, strict=True)]
    total = stretched[0]
    for other in stretched[1:]:
        total = np.minimum(total, other)
    rest = [(time - total) / factor for time, factor in zip(stretched, slow, strict=True)]
    if len(active) == 3 and then is None:
        return total + _two_left(rest, active, factors)
    undecided = np.ones(total.shape, dtype=bool)
    step, total = total, total.copy()
    for position in range(len(active)):
        rows = np.flatnonzero(undecided & (stretched[position] == step))
        if rows.size == 0:
            continue
        undecided[rows] = False
        others = [index for index in range(len(active)) if index != position]
        left = [rest[index][rows] for index in others]
        after = None if then is None else then[rows]
        total[rows] += _together(left, [active[index] for index in others], factors, after)
    return total


def _two_left(rest: list[Array], active: list[int], factors: Array) -> Array:
    """Of three streams of which one is done, whichever it is in each row: of pairs with that one, of which
    nothing is left, neither slows the other down."""
    total = rest[0] + rest[1] + rest[2]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        row = (1 << active[one]) | (1 << active[two])
        slow_one, slow_two = float(factors[row, active[one]]), float(factors[row, active[two]])
        together = np.minimum(rest[one] * slow_one, rest[two] * slow_two)
        total += together * (1.0 - 1.0 / slow_one - 1.0 / slow_two)
    return total


def until_done(
    stream: int, work_s: Array, copies: tuple[Array, Array], factors: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Seconds until compute or GPU-GPU traffic is done, however long the copies in and out beside it go on;
    and what is left of these."""
    copy_in, copy_out = copies
    in_s, out_s = any_of(copy_in), any_of(copy_out)
    if not any_of(work_s) or not (in_s or out_s):
        return work_s, copies
    if not out_s:
        spent, left = until_first(stream, work_s, HOST_TO_DEVICE, copy_in, factors)
        return spent, (left, copy_out)
    if not in_s:
        spent, left = until_first(stream, work_s, DEVICE_TO_HOST, copy_out, factors)
        return spent, (copy_in, left)
    row = (1 << stream) | 0b1100
    slow, slow_in, slow_out = (float(factors[row, index]) for index in (stream, 2, 3))
    together = np.minimum(work_s * slow, np.minimum(copy_in * slow_in, copy_out * slow_out))
    work_left = np.maximum(work_s - together / slow, 0.0)
    in_left, out_left = copy_in - together / slow_in, copy_out - together / slow_out
    # At most one copy is left beside what is left of the stream.
    beside_in, in_left = until_first(stream, work_left, HOST_TO_DEVICE, in_left, factors)
    beside_out, out_left = until_first(stream, work_left, DEVICE_TO_HOST, out_left, factors)
    return together + beside_in + beside_out - work_left, (in_left, out_left)


def until_first(stream: int, work_s: Array, other: int, copy_s: Array, factors: Array) -> tuple[Array, Array]:
    """Seconds until the first of two streams is done, and what is left of the other."""
    row = (1 << stream) | (1 << other)
    slow, slow_copy = float(factors[row, stream]), float(factors[row, other])
    together = np.minimum(work_s * slow, copy_s * slow_copy)
    return work_s + together * (1.0 - 1.0 / slow), np.maximum(copy_s - together / slow_copy, 0.0)
