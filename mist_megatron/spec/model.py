"""What is trained: the shape of a decoder-only transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.training import LONGEST_SEQUENCE

Family = Literal["gpt", "llama", "falcon"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "relu", "silu"]

MOST_LAYERS = 10_000
"""Ten times the deepest transformer that was trained (DeepNet, arXiv:2203.00555: 1,000 layers)."""
WIDEST = 10**7
"""Columns, heads or rows of a table: one square matrix of as many has 10^14 elements, a hundred times the
parameters of the largest trained models; published vocabularies end below 10^6."""


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

    def __post_init__(self) -> None:
        check.name("model", self.name)
        where = f"model {self.name}"
        check.at_least(
            where,
            1,
            layers=self.layers,
            hidden=self.hidden,
            ffn_hidden=self.ffn_hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            vocab=self.vocab,
            head_dim=self.head_dim,
            parallel_norms=self.parallel_norms,
        )
        check.at_least(where, 0, learned_positions=self.learned_positions)
        check.at_most(where, MOST_LAYERS, "ten times the deepest known model", layers=self.layers)
        check.at_most(
            where,
            WIDEST,
            "far above any known model",
            hidden=self.hidden,
            ffn_hidden=self.ffn_hidden,
            heads=self.heads,
            vocab=self.vocab,
            head_dim=self.head_dim,
        )
        # A row per token of the longest sequence.
        rows = "a row per token of the longest sequence"
        check.at_most(where, LONGEST_SEQUENCE, rows, learned_positions=self.learned_positions)
        check.divides(where, ("kv_heads", self.kv_heads), ("heads", self.heads))
        if self.parallel_norms > 2:
            raise InputError(f"{where}: parallel_norms is {self.parallel_norms}; wanted 1 or 2")
        if self.rotary and self.learned_positions:
            raise InputError(
                f"{where}: rotary is true and learned_positions is {self.learned_positions}; "
                "a model has one kind of positions: set rotary: false or learned_positions: 0"
            )

    @property
    def query_width(self) -> int:
        """Columns of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of all key heads together (the values have as many)."""
        return self.kv_heads * self.head_dim

    @property
    def norm_parameters(self) -> int:
        """Of one norm: a weight per channel, and a bias for LayerNorm with bias."""
        return self.hidden * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    @property
    def block_parameters(self) -> int:
        """Trainable elements of one transformer layer."""
        columns = self.query_width + 2 * self.kv_width
        attention = self.hidden * columns + self.query_width * self.hidden
        inputs = 2 if self.gated_mlp else 1
        mlp = (inputs + 1) * self.hidden * self.ffn_hidden
        biases = columns if self.qkv_bias or self.linear_bias else 0
        if self.linear_bias:
            biases += self.hidden + inputs * self.ffn_hidden + self.hidden
        norms = self.parallel_norms if self.parallel_block else 2
        return attention + mlp + biases + norms * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """Token table and learned positions."""
        return (self.vocab + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Final norm and output projection; a tied projection is counted with the embedding."""
        projection = 0 if self.tied_embeddings else self.vocab * self.hidden
        return projection + (self.norm_parameters if self.final_norm else 0)

    @property
    def parameters(self) -> int:
        """Trainable elements of the whole model."""
        return self.embedding_parameters + self.layers * self.block_parameters + self.head_parameters
