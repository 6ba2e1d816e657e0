"""Fused attention of another age than that whose speed a profile has.

Measured runs of 2023 ran what there was: the first FlashAttention written in Triton. Their rows are priced
with its speed; plans are always priced with the profile's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mist_megatron.spec.profile import Profile, Quantity, Source

AttentionName = Literal["triton-2023"]
SOURCE = "triton-2023"
_TEXT = (
    "FlashAttention-2 (Dao 2023): 1.3 to 1.5 times as fast as FlashAttention in Triton forward, about twice "
    "backward; on Hopper mma instructions reach 0.629 of the peak (Luo et al. 2024)"
)
FORWARD_FRACTION = 0.60 / 1.4
"""Of the peak: FlashAttention-2's on A100, as profiles have it, over what Triton's kernels take longer."""
BACKWARD_FRACTION = 0.50 / 2.0
HALF_SEQ = 512.0
HOPPER = ("h100", "h200", "h800")
"""How the names of GPUs begin whose tensor cores give their peak to instructions alone that those kernels do
not have."""
WITHOUT_WGMMA = 0.629


def with_attention(profile: Profile, name: AttentionName | None) -> Profile:
    """A profile with the speed of these kernels instead of its own; itself where none are named. Where it has
    a table of attention that stays."""
    if name is None:
        return profile
    share = WITHOUT_WGMMA if profile.gpu.startswith(HOPPER) else 1.0
    kernels = replace(
        profile.kernels,
        attention_forward_fraction=Quantity(value=share * FORWARD_FRACTION, source=SOURCE),
        attention_backward_fraction=Quantity(value=share * BACKWARD_FRACTION, source=SOURCE),
        attention_half_seq=Quantity(value=HALF_SEQ, source=SOURCE),
    )
    known = Source(origin="published", text=_TEXT, uncertainty=0.15)
    return replace(profile, kernels=kernels, sources={**profile.sources, SOURCE: known})
