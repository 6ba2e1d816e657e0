"""Prices of a run that must give the same bits every time.

PyTorch's deterministic mode fills what an operator is about to overwrite
(torch.utils.deterministic.fill_uninitialized_memory, on by default), and Transformer Engine may use no
attention kernel that adds gradients in any order, which leaves FlashAttention-2 with an ordered backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mist_megatron.price.prices import Array, Collective, Priced, Prices

FLASH_2_FLOPS_PER_S = 3.5e14
"""FlashAttention-2 has the matrix instructions of Ampere only: 35 % of an H100's 989 TFLOP/s in 16 bits, as
FlashAttention-3's authors report (Shah et al. 2024, abstract); nothing newer helps it on later chips."""
ORDERED_BACKWARD = 0.62
"""Of the throughput of a backward pass that adds in any order: the ordered one of FlashAttention-3 loses up
to 37.9 % on H800 (DASH, 2026, abstract), which is taken for every chip."""


@dataclass(frozen=True)
class DeterministicPrices:
    """Implements `cost.pricing.Prices` on top of others."""

    of: Prices

    def gemm(self, m: Array, n: Array, k: Array, batch: Array, *, kernels: int = 1) -> Priced:
        filled = self.of.memory_bound(2.0 * np.asarray(batch, dtype=np.float64) * m * n).seconds
        return _longer(self.of.gemm(m, n, k, batch, kernels=kernels), filled)

    def attention(
        self, batch: Array, seq: Array, heads: Array, kv_heads: Array, head_dim: Array, *, backward: bool
    ) -> Priced:
        usual = self.of.attention(batch, seq, heads, kv_heads, head_dim, backward=backward)
        flops = 2.0 * np.asarray(batch, dtype=np.float64) * heads * seq * seq * head_dim
        least = flops * (2.5 if backward else 1.0) / FLASH_2_FLOPS_PER_S
        seconds = np.maximum(usual.seconds, least) / (ORDERED_BACKWARD if backward else 1.0)
        return _longer(usual, seconds - usual.seconds)

    def memory_bound(self, moved_bytes: Array, *, kernels: int = 1) -> Priced:
        return self.of.memory_bound(moved_bytes, kernels=kernels)

    def collective(
        self,
        kind: Collective,
        message_bytes: Array,
        ranks: Array,
        nodes: Array,
        *,
        strided: bool | NDArray[np.bool_] = False,
    ) -> Priced:
        return self.of.collective(kind, message_bytes, ranks, nodes, strided=strided)

    def host_copy(self, copied_bytes: Array, direction: Literal["h2d", "d2h"]) -> Priced:
        return self.of.host_copy(copied_bytes, direction)

    def host_adam(self, parameters: Array) -> Priced:
        return self.of.host_adam(parameters)

    def device_adam(self, parameters: Array) -> Priced:
        return self.of.device_adam(parameters)

    def interference(self) -> Array:
        return self.of.interference()


def _longer(priced: Priced, more: Array) -> Priced:
    """What is added rests on no measurement."""
    return Priced(priced.seconds + more, priced.exact_s, priced.interpolated_s, priced.extrapolated_s + more)
