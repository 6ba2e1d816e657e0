"""What is trained: the shape of a decoder-only transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["gpt", "llama", "falcon"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "relu", "silu"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of a decoder-only transformer; every cost expression is derived from these fields.

    `family` names the closest framework implementation; what is computed follows from the other
    fields alone, so that a mix (a GPT with grouped queries, say) needs no new code.
    """

    name: str
    family: Family
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int
    """Width of one attention head; hidden / heads unless a model says otherwise."""
    gated_mlp: bool = False
    """Two input projections multiplied together (SwiGLU, GeGLU)."""
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    norm_bias: bool = True
    """LayerNorm has a bias; RMSNorm never has one, whatever this says."""
    parallel_block: bool = False
    """Attention and MLP read the same input and are added once (Falcon, GPT-NeoX)."""
    parallel_norms: int = 1
    """Norms before a parallel block: 1 shared (Falcon-7B) or 2 (Falcon-40B, GPT-NeoX)."""
    linear_bias: bool = False
    """Biases on all linear layers of a block."""
    qkv_bias: bool = False
    """A bias on the QKV projection alone (Qwen2); implied by linear_bias."""
    rotary: bool = True
    learned_positions: int = 0
    """Rows of a learned position table; 0 for none."""
    tied_embeddings: bool = False
    final_norm: bool = True
