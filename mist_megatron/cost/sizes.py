"""Sizes that follow from a target or a GPU alone: rows of the token table, bytes that a plan may use."""

from __future__ import annotations

import numpy as np

from mist_megatron.price.prices import Array
from mist_megatron.targets.facts import MIB, MemoryFacts


def padded_vocabulary(vocab: int, tensor_parallel: Array, facts: MemoryFacts) -> Array:
    """Rows of the token table over all tensor-parallel ranks."""
    multiple = facts.vocabulary_multiple * np.asarray(tensor_parallel, dtype=np.float64)
    return np.ceil(vocab / multiple) * multiple


CONTEXT_BYTES = 1.0 * 1024 * MIB
"""Not the allocator's: CUDA context with its kernels (0.4-0.6 GiB on A100 and H100) and NCCL's buffers
(some 0.1 GiB per communicator of a training process)."""
USABLE_FRACTION = 0.94
"""Of what is left, for live tensors: reserved over allocated memory was measured at 1.06 at best in the Mist
artifact's runs (1.06-1.23), and a plan that needs the last 6 % fails by fragmentation."""


def limit_of(memory_bytes: float) -> float:
    """Live bytes that a plan may use on a GPU that reports this much memory."""
    return (memory_bytes - CONTEXT_BYTES) * USABLE_FRACTION
