"""What `--recompute-modules` of megatron-core drops of a layer and runs again, module by module.

Modules named so in Megatron: `layernorm`, `moe_act` and `mla_up_proj` keep their input and throw their output
away; the others are checkpoints. As its layers of Transformer Engine are built, a norm before QKV or before a
plain MLP is part of that product, so `layernorm` finds only the norm before a mixture, and before latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mist_megatron.cost.operators import Operator
from mist_megatron.spec.recompute import Module


@dataclass(frozen=True)
class _Again:
    """Operators of a layer that a module runs again, by how their names begin, and the tensors that go."""

    runs: tuple[str, ...]
    drops: tuple[str, ...]


_OF_SHARED = ("shared_hidden", "shared_activated", "shared_output", "shared_gate")
_MODULES: Mapping[Module, _Again] = MappingProxyType(
    {
        "moe_act": _Again(("expert_activation",), ("expert_activated",)),
        "mla_up_proj": _Again(
            ("q_norm", "q_gather", "q_up", "kv_norm", "kv_gather", "kv_up", "latent_rotary"),
            ("query", "key", "value", "q_latent_normed", "kv_latent_normed"),
        ),
        "shared_experts": _Again(("shared_",), _OF_SHARED),
        "moe": _Again(
            (
                "router", "shared_", "latent_in", "permute", "dispatch", "expert_", "combine", "unpermute",
                "latent_out",
            ),
            (
                *_OF_SHARED, "router_scores", "row_map", "expert_input", "expert_hidden", "expert_weights",
                "expert_activated", "latent_output",
            ),
        ),
        "gdn_norm_out": _Again(("mixer_norm", "mixer_heads_together"), ("mixer_normed", "mixer_norm_output")),
        "mlp": _Again(("norm2", "mlp_in", "activation", "mlp_out"), ("normed2", "mlp_hidden", "activated")),
    }
)  # fmt: skip


def chosen(operators: Sequence[Operator], modules: Sequence[Module]) -> tuple[Operator, ...]:
    """The operators of a layer, with what these modules drop marked as such."""
    names = {operator.name for operator in operators}
    mixed, latent = "router" in names, "kv_down" in names
    runs: set[str] = set()
    drops: set[str] = set()
    for module in modules:
        if module == "layernorm":
            runs |= ({"norm2"} if mixed else set()) | ({"norm1"} if latent else set())
            drops |= ({"normed2"} if mixed else set()) | ({"normed1"} if latent else set())
        elif module == "mlp" and mixed:
            continue
        elif module != "core_attn":
            runs |= {name for name in names if name.startswith(_MODULES[module].runs)}
            drops |= set(_MODULES[module].drops)
    return tuple(_marked(operator, runs, drops, core="core_attn" in modules) for operator in operators)


def _marked(operator: Operator, runs: set[str], drops: set[str], *, core: bool) -> Operator:
    saved = tuple(replace(kept, chosen=kept.key in drops) for kept in operator.saved)
    part = operator.part if core or operator.part != "attention_core" else None
    return replace(operator, saved=saved, part="chosen" if operator.name in runs else part)
