"""Prices of a run that must give the same bits every time.

PyTorch's deterministic mode fills what an operator is about to overwrite
(torch.utils.deterministic.fill_uninitialized_memory, on by default), and Transformer Engine may use no
attention kernel that adds gradients in any order, which leaves FlashAttention-2 with an ordered backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.price.prices import Array, Attention, Gemm, MemoryPass, Priced, Prices, Work

FLASH_2_FLOPS_PER_S = 3.5e14
"""FlashAttention-2 has the matrix instructions of Ampere only: 35 % of an H100's 989 TFLOP/s in 16 bits, as
FlashAttention-3's authors report (Shah et al. 2024, abstract); nothing newer helps it on later chips."""
ORDERED_BACKWARD = 0.62
"""Of the throughput of a backward pass that adds in any order: the ordered one of FlashAttention-3 loses up
to 37.9 % on H800 (DASH, 2026, abstract), which is taken for every chip."""


@dataclass(frozen=True)
class DeterministicPrices:
    """Other prices with what determinism adds to products and attention; that rests on no measurement."""

    usual: Prices

    def of(self, work: Work) -> Priced:
        priced = self.usual.of(work)
        if isinstance(work, Gemm):
            output_bytes = 2.0 * np.asarray(work.batch, dtype=np.float64) * work.m * work.n
            return replace(priced, added_s=self.usual.of(MemoryPass(output_bytes)).seconds)
        if isinstance(work, Attention):
            return replace(priced, added_s=_ordered_attention_s(work, priced.seconds) - priced.seconds)
        return priced

    def interference(self) -> Array:
        return self.usual.interference()


def _ordered_attention_s(work: Attention, usual_s: Array) -> Array:
    least_s = work.flops / FLASH_2_FLOPS_PER_S
    return np.asarray(np.maximum(usual_s, least_s) / (ORDERED_BACKWARD if work.backward else 1.0))
