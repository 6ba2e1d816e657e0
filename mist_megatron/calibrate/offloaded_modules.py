"""What Megatron's fine-grained offload takes of saved activations, by the modules that a run names
(--offload-modules), as a share of all of them: tensors counted in elements per token, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.model import ModelSpec

KNOWN = (
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act",
    "fused_group_mlp",
)  # fmt: skip
"""Modules of megatron-core 0.19 (transformer_config.py:1237)."""


def offloaded_share(model: ModelSpec, modules: Sequence[str]) -> float:
    """Of what layers save for their backward pass."""
    gone = kept = 0.0
    for kind in model.kinds:
        parts = _elements(kind)
        layers = model.layers_of_kind[kind.name]
        kept += layers * sum(size for name, size in parts.items() if name != "fused_group_mlp")
        gone += layers * sum(parts.get(name, 0.0) for name in modules)
    return min(gone / kept, 1.0)


def _elements(kind: LayerSpec) -> dict[str, float]:
    """Of a token: inputs of the modules that can be offloaded, and all else."""
    gates = 2 if kind.gated_mlp else 1
    elements: dict[str, float] = {"rest": 0.0}
    if kind.attends:
        keys = kind.kv_width
        elements |= {
            "attn_norm": kind.hidden,
            "qkv_linear": kind.hidden,
            "core_attn": kind.query_width + 2 * keys,
            "attn_proj": kind.query_width,
        }
    mixer = kind.mamba or kind.delta_net
    if mixer is not None:
        elements["rest"] += (
            2 * kind.hidden + mixer.projected + 3 * (mixer.matrix_elements(1) - mixer.projected)
        )
    experts = kind.experts
    if kind.has_mlp:
        elements |= {"mlp_norm": kind.hidden}
        elements["rest"] += kind.hidden
    if experts is not None:
        width, inner = experts.latent or kind.hidden, experts.ffn_hidden
        fc1, act = experts.top_k * width, experts.top_k * gates * inner
        elements |= {"expert_fc1": fc1, "moe_act": act, "fused_group_mlp": fc1 + act}
        elements["rest"] += experts.top_k * inner + (gates + 1) * experts.shared_ffn_hidden
    elif kind.has_mlp:
        elements["rest"] += (gates + 1) * kind.ffn_hidden
    return elements
