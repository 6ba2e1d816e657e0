"""What a profile learned of memory, at some sizes: one formula for what fits it and for what asks it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mist_megatron.price.prices import Array
from mist_megatron.spec.learned_memory import REACH, LearnedMemory


def learned_bytes(learned: LearnedMemory, sizes: Mapping[str, Array]) -> Array:
    """Beyond what is computed; below 0 where that is too much."""
    total: Array = np.asarray(learned.constant_bytes)
    for feature, slope in learned.slopes_bytes.items():
        low, high = learned.ranges[feature]
        doublings = np.log2(np.minimum(np.maximum(sizes[feature], low / 2**REACH), high * 2**REACH))
        total = total + slope * doublings
    return total
