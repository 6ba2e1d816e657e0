"""Fused attention of another age than that whose speed a profile has.

Measured runs of 2023 ran what there was: FlashAttention 1, or what was written of it in Triton. Their rows
are priced with the speed of those; plans are always priced with the profile's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from mist_megatron.price.prices import Array, Attention, Priced, Prices, Work
from mist_megatron.spec.profile import Profile, Quantity, Source

AttentionName = Literal["triton-2023", "flash-1", "eight-bit"]
FLASH_2_FORWARD, FLASH_2_BACKWARD = 0.60, 0.50
"""Of the peak of A100, as its profiles have it."""


USUAL_HEAD = 128.0
"""Width of heads of which profiles have what attention reaches."""
_HALF_HEADS = {"h100": 55.0, "h200": 55.0, "h800": 55.0,
               "b200": 110.0, "gb200": 110.0, "b300": 60.0, "gb300": 60.0}  # fmt: skip
"""Width of a head of which the exponentials take as long as the products: FlashAttention-3 on H100 reaches
497, 648 and 756 TFLOP/s with heads of 64, 128 and 256 (Shah et al. 2024; assumed, not checked against
the paper), which is as d / (d + 55). On
Blackwell in proportion to the ratio of peaks: 16 exponentials a cycle and multiprocessor (CUDA C++
Programming Guide, arithmetic instructions), twice as many on Blackwell Ultra. Before Hopper products hide
them: with heads of 64 FlashAttention-2 on A100 reaches over nine tenths of that with 128 (Dao 2023)."""


def with_exponentials(gpu: str, head_dim: Array | float) -> Array:
    """How many times as long as its products a score takes."""
    return np.asarray(1.0 + _HALF_HEADS.get(gpu.split("-")[0], 0.0) / np.asarray(head_dim))


def narrow_heads(gpu: str, head_dim: Array) -> Array:
    """The same, against heads of the usual width. Wider ones gain nothing: those of latent attention, of 192
    and 128 columns, are no faster than of 128 in SimuMax's tables of A100 and B200."""
    usual = with_exponentials(gpu, USUAL_HEAD)
    return np.asarray(np.maximum(with_exponentials(gpu, head_dim) / usual, 1.0))


def capped_scores(gpu: str, head_dim: Array) -> Array:
    """How many times as long a core takes whose scores pass a tanh: one more instruction of the units that
    make exponentials, for each score (tanh.approx, as FlashAttention-2.6 has it; assumed of others). Before
    Hopper products hide it like these."""
    twice = 2.0 * with_exponentials(gpu, head_dim) - 1.0
    return np.asarray(
        np.maximum(twice / with_exponentials(gpu, USUAL_HEAD), 1.0) / narrow_heads(gpu, head_dim)
    )


EIGHT_BIT_SPEED = 1.5
"""Attention with operands of 8 bits over that of 16: cuDNN 9 is up to three times as fast as eager PyTorch
in FP8 where it is twice in bf16 (NVIDIA, Accelerating Transformers with cuDNN 9, 2024); FlashAttention-3's
forward pass 1.6 times (Shah et al. 2024). Assumed: neither was at hand."""


@dataclass(frozen=True)
class EightBitAttention:
    """Other prices, with attention in 8 bits. Plans cannot ask for it; measured runs say that they had it."""

    usual: Prices

    def of(self, work: Work) -> Priced:
        priced = self.usual.of(work)
        return priced.times(1.0 / EIGHT_BIT_SPEED) if isinstance(work, Attention) else priced

    def interference(self) -> Array:
        return self.usual.interference()


class Slower(NamedTuple):
    """How many times as long as FlashAttention-2 kernels take."""

    forward: float
    backward: float
    source: str


SLOWER: Mapping[str, Slower] = {
    "triton-2023": Slower(
        1.4,
        2.0,
        "FlashAttention-2 (Dao 2023): 1.3 to 1.5 times as fast as FlashAttention in Triton forward, about "
        "twice backward",
    ),
    "flash-1": Slower(2.0, 2.0, "FlashAttention-2 (Dao 2023): around twice as fast as FlashAttention"),
}
HALF_SEQ = 512.0
HOPPER = ("h100", "h200", "h800")
"""How the names of GPUs begin whose tensor cores give their peak to instructions alone that those kernels do
not have."""
WITHOUT_WGMMA = 0.629
_ON_HOPPER = "; on Hopper mma instructions reach 0.629 of the peak (Luo et al. 2024)"


def with_attention(profile: Profile, name: AttentionName | None) -> Profile:
    """A profile with the speed of these kernels instead of its own; itself where none are named. Where it has
    a table of attention that stays."""
    if name is None or name not in SLOWER:
        return profile
    slower = SLOWER[name]
    share = WITHOUT_WGMMA if profile.gpu.startswith(HOPPER) else 1.0
    kernels = replace(
        profile.kernels,
        attention_forward_fraction=Quantity(value=share * FLASH_2_FORWARD / slower.forward, source=name),
        attention_backward_fraction=Quantity(value=share * FLASH_2_BACKWARD / slower.backward, source=name),
        attention_half_seq=Quantity(value=HALF_SEQ, source=name),
    )
    text = slower.source + _ON_HOPPER + "; assumed, not checked against them"
    known = Source(origin="assumed", text=text, uncertainty=0.15)
    return replace(profile, kernels=kernels, sources={**profile.sources, name: known})
