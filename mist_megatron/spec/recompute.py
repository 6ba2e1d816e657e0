"""Kinds of recomputation and what each drops in the forward pass and runs again in the backward pass.

A new kind is a name and its facts here, the part of a layer in `cost/layers.py`, and the flag of a framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

Recompute = Literal["none", "selective", "full"]
"""What `recompute` of a stage can be."""
Module = Literal[
    "core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts", "gdn_norm_out"
]
"""What `selective` can run again of a layer, by Megatron's names (--recompute-modules)."""
MODULES: tuple[Module, ...] = get_args(Module)
USUAL_MODULES: tuple[Module, ...] = ("core_attn",)
"""What it runs again where nothing is said."""
Part = Literal["attention_core", "chosen"]
"""Parts of a layer that can be dropped and run again without the rest of it: the attention core, and other
modules that were chosen."""


@dataclass(frozen=True, kw_only=True)
class RecomputeFacts:
    """What one kind means for the layers of a stage."""

    again: str
    """What runs again, for people."""
    whole_layers: bool = False
    """As many whole layers of a stage as its `ckpt` says."""
    drops: frozenset[Part] = frozenset()
    """Parts of every other layer."""


RECOMPUTES: Mapping[Recompute, RecomputeFacts] = MappingProxyType(
    {
        "full": RecomputeFacts(again="whole layers", whole_layers=True),
        "selective": RecomputeFacts(again="attention", drops=frozenset({"attention_core", "chosen"})),
        "none": RecomputeFacts(again="nothing"),
    }
)
RECOMPUTE_KINDS: tuple[Recompute, ...] = tuple(RECOMPUTES)
WHOLE: tuple[Recompute, ...] = tuple(kind for kind in RECOMPUTE_KINDS if not RECOMPUTES[kind].drops)
"""Kinds that leave the other layers as they are."""
PARTIAL: tuple[Recompute, ...] = tuple(kind for kind in RECOMPUTE_KINDS if RECOMPUTES[kind].drops)
SEARCHED: tuple[Recompute, ...] = tuple(kind for kind in RECOMPUTE_KINDS if kind != "none")
"""Kinds that a search tries; whole layers include none of them."""


def parts_in_words(kind: Recompute) -> str:
    """What of each layer a kind drops."""
    return " and ".join(
        sorted(part.replace("_", " ").replace("chosen", "chosen modules") for part in RECOMPUTES[kind].drops)
    )


def kinds_that_drop(part: Part | None) -> tuple[Recompute, ...]:
    """Kinds that run a part of a layer again on its own."""
    return tuple(kind for kind in PARTIAL if part in RECOMPUTES[kind].drops)
