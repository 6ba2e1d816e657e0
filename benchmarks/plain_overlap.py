"""Overlap of streams as the algorithm reads, one row at a time in plain Python: what the vectorised
`price.overlap` is compared with by tests and by `evaluator_speed.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mist_megatron.price.overlap import COMPUTE, GPU_GPU, Array


def no_interference() -> Array:
    """The table of streams that do not disturb each other: overlap is then a plain maximum."""
    return np.ones((16, 4))


def overlapped_time_of_row(streams: Sequence[float], factors: Array, then: float = 0.0) -> float:
    """Seconds until all four streams of one row are done, and what follows on the GPU-GPU stream."""
    rest = {index: value for index, value in enumerate(streams) if value > 0.0}
    total = 0.0
    while rest or then > 0.0:
        if then > 0.0 and COMPUTE not in rest and GPU_GPU not in rest:
            rest, then = {**rest, GPU_GPU: then}, 0.0
        row = sum(1 << index for index in rest)
        slow = {index: float(factors[row, index]) if len(rest) > 1 else 1.0 for index in rest}
        step = min(value * slow[index] for index, value in rest.items())
        total += step
        rest = {index: value - step / slow[index] for index, value in rest.items()}
        rest = {index: value for index, value in rest.items() if value > 0.0}
    return total
