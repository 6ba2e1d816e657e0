"""Modules of a layer whose saved activations Megatron's fine-grained offload can send to host memory."""

from __future__ import annotations

from typing import Literal, get_args

OffloadModule = Literal[
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
]
"""What of each layer leaves, by Megatron's names (--offload-modules): what the module saves."""
OFFLOAD_MODULES: tuple[OffloadModule, ...] = get_args(OffloadModule)
