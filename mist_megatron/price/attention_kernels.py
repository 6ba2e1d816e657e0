"""Fused attention of another age than that whose speed a profile has.

Measured runs of 2023 ran what there was: FlashAttention 1, or what was written of it in Triton. Their rows
are priced with the speed of those; plans are always priced with the profile's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from mist_megatron.spec.profile import Profile, Quantity, Source

AttentionName = Literal["triton-2023", "flash-1"]
FLASH_2_FORWARD, FLASH_2_BACKWARD = 0.60, 0.50
"""Of the peak of A100, as its profiles have it."""


class Slower(NamedTuple):
    """How many times as long as FlashAttention-2 kernels take."""

    forward: float
    backward: float
    source: str


SLOWER: Mapping[AttentionName, Slower] = {
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
    if name is None:
        return profile
    slower = SLOWER[name]
    share = WITHOUT_WGMMA if profile.gpu.startswith(HOPPER) else 1.0
    kernels = replace(
        profile.kernels,
        attention_forward_fraction=Quantity(value=share * FLASH_2_FORWARD / slower.forward, source=name),
        attention_backward_fraction=Quantity(value=share * FLASH_2_BACKWARD / slower.backward, source=name),
        attention_half_seq=Quantity(value=HALF_SEQ, source=name),
    )
    known = Source(origin="published", text=slower.source + _ON_HOPPER, uncertainty=0.15)
    return replace(profile, kernels=kernels, sources={**profile.sources, name: known})
