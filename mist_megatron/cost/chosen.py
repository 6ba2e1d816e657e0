"""What Megatron's switches choose of a layer by module: what is run again, what graphs replay.

`--recompute-modules`: `layernorm`, `moe_act` and `mla_up_proj` keep their input and throw their output away;
the others are checkpoints. As its layers of Transformer Engine are built, a norm before QKV or before a plain
MLP is part of that product, so `layernorm` finds only the norm before a mixture, and before latents.
`--cuda-graph-modules`: `moe_router` has the norm before it and shared experts that do not compute beside the
dispatch, `moe_preprocess` what sorts tokens before they leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mist_megatron.cost.operators import Operator, Work, WorkKind
from mist_megatron.cost.recurrent import is_scan
from mist_megatron.spec.kinds import GraphModule, Place
from mist_megatron.spec.recompute import Module


@dataclass(frozen=True)
class _Again:
    """Operators of a layer that a module runs again, by how their names begin, and the tensors that go."""

    runs: tuple[str, ...]
    drops: tuple[str, ...]


_OF_SHARED = ("shared_hidden", "shared_activated", "shared_output", "shared_gate")
_MODULES: Mapping[Module, _Again] = MappingProxyType(
    {
        "moe_act": _Again(("expert_activation",), ("expert_activated", "expert_clamped")),
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
                "expert_clamped", "expert_activated", "latent_output",
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


WHOLE: tuple[GraphModule, ...] = ("layer", "full_iteration")


def captured(
    operators: Sequence[Operator], modules: Sequence[GraphModule], *, shared_apart: bool = False
) -> tuple[Operator, ...]:
    """The operators of a layer, marked. `shared_apart`: shared experts have a stream of their own."""
    names = [operator.name for operator in operators]
    replayed = _replayed(names, modules, shared_apart=shared_apart)
    return tuple(
        replace(
            operator,
            captured=operator.name in replayed,
            place=_place(operator.name, shared_apart=shared_apart),
        )
        for operator in operators
    )


def without_gaps(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """The same in a graph of the whole step, of which passes over memory begin right behind other kernels."""

    def closed(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(replace(work, kernels=0) if work.kind is WorkKind.MEMORY else work for work in works)

    return tuple(
        replace(operator, forward=closed(operator.forward), backward=closed(operator.backward))
        for operator in operators
    )


def _place(name: str, *, shared_apart: bool) -> Place:
    if name.startswith("shared_"):
        return "beside" if shared_apart else "inside"
    return "inside" if name.startswith("expert_") else ""


def _replayed(names: list[str], modules: Sequence[GraphModule], *, shared_apart: bool) -> set[str]:
    if any(module in WHOLE for module in modules):
        return set(names)
    mixed, scans = "router" in names, is_scan(names)
    # What comes before the MLP: all of a parallel block, nothing where a layer is an MLP alone.
    half = names.index("residual1") + 1 if "residual1" in names else len(names) * ("norm1" in names)
    replayed: set[str] = set()
    if ("mamba" if scans else "attn") in modules:
        replayed |= set(names[:half])
    if ("moe" if mixed else "mlp") in modules:
        replayed |= set(names[half:])
    if mixed and "moe_router" in modules:
        replayed |= {"norm2", "router"}
        replayed |= set() if shared_apart else {name for name in names if name.startswith("shared_")}
    if mixed and "moe_preprocess" in modules:
        replayed.add("permute")
    return replayed
