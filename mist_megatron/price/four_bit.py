"""Prices where products have operands of 4 bits (NVFP4)."""

from __future__ import annotations

from dataclasses import dataclass

from mist_megatron.price.prices import Array, Gemm, GroupedGemm, Priced, Prices, Work

FOUR_BIT_SPEED = 2.0
"""Of products of 4-bit operands over those of 8-bit ones, by the datasheets of B200 and GB200. That of GB300
says 3, of which published runs show nothing: with 2 they come out 2 % too slow in the mean. Casts take what
those to 8 bits do (a transform before rounding takes what the smaller result saves; assumed)."""


@dataclass(frozen=True)
class FourBitPrices:
    """Other prices, of which 8-bit products run with operands of 4 bits."""

    usual: Prices

    def of(self, work: Work) -> Priced:
        priced = self.usual.of(work)
        if isinstance(work, Gemm | GroupedGemm) and work.eight_bit:
            return priced.times(1.0 / FOUR_BIT_SPEED)
        return priced

    def interference(self) -> Array:
        return self.usual.interference()
