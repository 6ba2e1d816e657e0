"""Prices around other prices: of a run that repeats bit by bit, of products of 4 bits, of measured links."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.price.prices import (
    Array,
    Attention,
    Collective,
    Gemm,
    GroupedGemm,
    MemoryPass,
    Priced,
    Prices,
    Work,
    any_of,
)

FLASH_2_FLOPS_PER_S = 3.5e14
"""FlashAttention-2 has the matrix instructions of Ampere only: 35 % of an H100's 989 TFLOP/s in 16 bits, as
FlashAttention-3's authors report (Shah et al. 2024, abstract); nothing newer helps it on later chips."""
ORDERED_BACKWARD = 0.62
"""Of the throughput of a backward pass that adds in any order: the ordered one of FlashAttention-3 loses up
to 37.9 % on H800 (DASH, 2026, abstract), which is taken for every chip."""
FOUR_BIT_SPEED = 2.0
"""Of products of 4-bit operands over those of 8-bit ones, by the datasheets of B200 and GB200. That of GB300
says 3, of which published runs show nothing: with 2 they come out 2 % too slow in the mean. Casts take what
those to 8 bits do (a transform before rounding takes what the smaller result saves; assumed)."""


@dataclass(frozen=True)
class DeterministicPrices:
    """Other prices with what determinism adds to products and attention; that rests on no measurement.

    PyTorch's deterministic mode fills what an operator is about to overwrite
    (torch.utils.deterministic.fill_uninitialized_memory, on by default), and Transformer Engine may use no
    attention kernel that adds gradients in any order, which leaves FlashAttention-2 with an ordered backward.
    """

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


@dataclass(frozen=True)
class FourBitPrices:
    """Other prices, of which 8-bit products run with operands of 4 bits (NVFP4)."""

    usual: Prices

    def of(self, work: Work) -> Priced:
        priced = self.usual.of(work)
        if isinstance(work, Gemm | GroupedGemm) and work.eight_bit:
            return priced.times(1.0 / FOUR_BIT_SPEED)
        return priced

    def interference(self) -> Array:
        return self.usual.interference()


@dataclass(frozen=True)
class WideLayers:
    """Other prices for `FourBitPrices`, where this share of all layers keeps operands of 16 bits. Plans
    cannot ask for it; measured runs had it. Casts of those layers are counted as if they were made."""

    usual: Prices
    share: float

    def of(self, work: Work) -> Priced:
        priced = self.usual.of(work)
        if not (isinstance(work, Gemm | GroupedGemm) and work.eight_bit):
            return priced
        wide_s = FOUR_BIT_SPEED * self.usual.of(replace(work, eight_bit=False)).seconds
        mixed_s = (1.0 - self.share) * priced.seconds + self.share * wide_s
        return replace(priced, known_s=np.asarray(mixed_s), added_s=None)

    def interference(self) -> Array:
        return self.usual.interference()


@dataclass(frozen=True)
class EightBitOutput:
    """Other prices, with logits' products in 8 bits (--fp8-output-proj). Plans cannot ask for it; measured
    runs had it. What goes into them and their gradient are cast in two passes' time, as by MXFP8."""

    usual: Prices
    columns: int
    """Of the vocabulary, by which these products are known."""

    def of(self, work: Work) -> Priced:
        if not isinstance(work, Gemm) or work.eight_bit:
            return self.usual.of(work)
        m, n, k = (np.asarray(size, dtype=np.float64) for size in (work.m, work.n, work.k))
        logits = (m == self.columns) | (n == self.columns) | (k == self.columns)
        if not any_of(logits):
            return self.usual.of(work)
        cast_s = self.usual.of(MemoryPass(8.0 * m * k)).seconds * (m != self.columns)
        narrow_s = self.usual.of(replace(work, eight_bit=True)).seconds + cast_s
        priced = self.usual.of(work)
        return replace(priced, known_s=np.where(logits, narrow_s, priced.seconds), added_s=None)

    def interference(self) -> Array:
        return self.usual.interference()


@dataclass(frozen=True, kw_only=True)
class LinkedPrices:
    """As told, but for collectives and sends between nodes: each GPU has so much of a link there."""

    prices: Prices
    bytes_per_s: tuple[float, ...]
    """By the number of nodes that a group touches, from 0 on; of more nodes the last."""

    def of(self, work: Work) -> Priced:
        """What a piece of work takes with the device for itself."""
        if isinstance(work, Collective) and work.bytes_per_s is None:
            nodes = np.minimum(np.asarray(work.nodes, dtype=np.intp), len(self.bytes_per_s) - 1)
            work = replace(work, bytes_per_s=np.asarray(self.bytes_per_s)[nodes])
        return self.prices.of(work)

    def interference(self) -> Array:
        """Links change nothing of it."""
        return self.prices.interference()
