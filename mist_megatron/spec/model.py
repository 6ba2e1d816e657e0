"""What is trained: the shape of a decoder-only transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.constants import ModelConstants
from mist_megatron.spec.experts import ExpertSpec, LatentAttention
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
    constants: ModelConstants = ModelConstants()
    """Rotary base, norm epsilon, dropout and other numbers that no shape tells."""
    experts: ExpertSpec | None = None
    """Layers whose MLP is a mixture of experts; `ffn_hidden` is that of the other layers."""
    latent_attention: LatentAttention | None = None
    """In place of separate projections for queries, keys and values."""
    qk_norm: bool = False
    """A norm on each query and key head (Qwen3)."""
    sinks: bool = False
    """A trained number per head in the attention's softmax (GPT-OSS)."""
    mtp_layers: int = 0
    """Depths of multi-token prediction: each a projection, a layer like the last one, and the output layer
    once more."""

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
        check.at_least(where, 0, learned_positions=self.learned_positions, mtp_layers=self.mtp_layers)
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
        self._check_parts(where)
        if self.rotary and self.learned_positions:
            raise InputError(
                f"{where}: rotary is true and learned_positions is {self.learned_positions}; "
                "a model has one kind of positions: set rotary: false or learned_positions: 0"
            )

    @property
    def mlp_words(self) -> str:
        """What the MLP computes between its products."""
        return f"{'gated ' * self.gated_mlp}{self.activation}"

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
    def attention_parameters(self) -> int:
        """Trainable elements of one layer's attention, its norms aside."""
        extra = (2 * self.head_dim if self.qk_norm else 0) + (self.heads if self.sinks else 0)
        if self.latent_attention is not None:
            return self.latent_attention.parameters(self.hidden, self.heads) + extra
        columns = self.query_width + 2 * self.kv_width
        biases = columns if self.qkv_bias or self.linear_bias else 0
        biases += self.hidden if self.linear_bias else 0
        return self.hidden * columns + self.query_width * self.hidden + biases + extra

    @property
    def block_parameters(self) -> int:
        """Trainable elements of one transformer layer with a plain MLP."""
        inputs = 2 if self.gated_mlp else 1
        mlp = (inputs + 1) * self.hidden * self.ffn_hidden
        if self.linear_bias:
            mlp += inputs * self.ffn_hidden + self.hidden
        return self._around_mlp + mlp

    @property
    def _around_mlp(self) -> int:
        norms = self.parallel_norms if self.parallel_block else 2
        return self.attention_parameters + norms * self.norm_parameters

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return 0 if self.experts is None else self.experts.layers_with(self.layers)

    def _expert_block_parameters(self, experts: int) -> int:
        """Of a layer with a mixture, counting so many of its routed experts."""
        if self.experts is None:
            return self.block_parameters
        each = self.experts.expert_parameters(self.hidden, gated=self.gated_mlp, bias=self.linear_bias)
        others = self.experts.other_parameters(self.hidden, gated=self.gated_mlp, bias=self.linear_bias)
        return self._around_mlp + others + experts * each

    def _all_parameters(self, experts: int) -> int:
        mixtures = self.expert_layers
        layers = mixtures * self._expert_block_parameters(experts)
        layers += (self.layers - mixtures) * self.block_parameters
        return self.embedding_parameters + layers + self.head_parameters

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
        """Trainable elements of the whole model, multi-token prediction aside, as models are named."""
        return self._all_parameters(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """Of these, what one token meets."""
        return self._all_parameters(self.experts.top_k if self.experts else 0)

    @property
    def mtp_parameters(self) -> int:
        """Of multi-token prediction, which shares table and output layer: per depth a layer, the projection
        of two hidden states to one, two norms before it and one after the layer."""
        layer = self._expert_block_parameters(self.experts.count if self.experts else 0)
        return self.mtp_layers * (layer + 2 * self.hidden * self.hidden + 3 * self.norm_parameters)

    def _check_parts(self, where: str) -> None:
        experts, latent = self.experts, self.latent_attention
        if experts is not None and self.parallel_block:
            raise InputError(f"{where}: experts in a parallel block are not modelled; wanted one of the two")
        if experts is not None and not self.expert_layers:
            raise InputError(
                f"{where}: experts.first_dense {experts.first_dense} and every {experts.every} leave none of "
                f"the {self.layers} layers with experts"
            )
        if latent is not None and (self.head_dim != latent.qk_head_dim or self.kv_heads != self.heads):
            raise InputError(
                f"{where}: latent attention has a key head for each query head and a head_dim of "
                f"nope_head_dim + rope_head_dim ({latent.qk_head_dim}); got kv_heads {self.kv_heads} of "
                f"{self.heads} and head_dim {self.head_dim}"
            )
        if latent is not None and (self.linear_bias or self.qkv_bias or self.qk_norm):
            raise InputError(f"{where}: latent attention with biases or norms of its heads is not modelled")
