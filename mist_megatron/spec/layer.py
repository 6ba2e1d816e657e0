"""Layers of a model: their shapes, their kinds, and groups of them in the order in which tokens pass them.

A model whose layers are all alike says its shape itself: `ModelSpec` is a `LayerSpec`. Any other has
`groups`, first to last, and each has a number of layers and a pattern of kinds that its layers take in turns:

    DeepSeek-V3    (3, [dense]), (58, [moe])
    gpt-oss-120b   (36, [sliding, full])
    Gemma 3 27B    (62, [sliding] * 5 + [full])         the last turn may break off

So a kind is said once however often it comes, and a model has as many kinds as there are different layers. A
kind is a whole `LayerSpec` with a name; `ModelSpec.kind("sliding", window=128)` makes one of the model's own
shape. What the model says of its own shape besides is of the embedding and the head: width and norm. (A
mixture of experts may say itself which layers have it; its model's groups follow from that.)

A stage is a run of layers. Which ones follows from the order of groups and the layers of the stages before
it (`Plan.layers_of`), so a plan says one number a stage; what the stage costs follows from how many layers
of each kind it has, how many of them are recomputed, and which kinds stand at the ends of its runs
(`cost.grid`). Times and bytes are linear in these counts, kind by kind; where layers of two kinds are
neighbours, what one moves beside the other's compute is priced as beside its own.

Groups may differ in width and in the tokens of a sample that they work on (`tokens`): a vision tower before a
language model, the stages of a Swin transformer, the decoder of a T5. Between groups whose widths or tokens
do not meet stands a layer of its own with an `entry` (`spec.entry`), which is counted among the layers. What
a decoder attends to beside itself is its `cross_attention`. `frozen` layers are not trained.

In place of attention a layer may carry a state from token to token (`spec.recurrent`), and it may have one
`half` of a block only, as the layers of hybrid models do.

To add a property of layers: a field here (default: as before), its operators in `cost.layers.block`, its
elements in `block_parameters` below, a symbol for each of its sizes (`cost.kinds.SIZES`, `cost.symbols`), a
key in `formats.model_yaml`, and what a target cannot run of it in `targets.rules.job_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.adapter import Adapter
from mist_megatron.spec.entry import EncoderOutput, Entry
from mist_megatron.spec.experts import ExpertSpec, LatentAttention
from mist_megatron.spec.recurrent import DeltaNet, Half, Mamba, require_mixer

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "quick_gelu", "relu", "silu", "squared_relu"]
Attention = Literal["causal", "full"]

WIDEST = 10**7
"""Columns, heads or rows of a table: one square matrix of as many has 10^14 elements, a hundred times the
parameters of the largest trained models; published vocabularies end below 10^6."""
OWN_KIND = "block"
"""Name of the kind of layer of a model that has one only."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Shape of a transformer layer."""

    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
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
    attention: Attention = "causal"
    """Whether a token sees those before it only (`causal`), or all of them (`full`: BERT, ViT, encoders)."""
    window: int | None = None
    """Keys that a token sees, its own among them; null for all that its attention lets it see."""
    chunk: int | None = None
    """Tokens of a chunk: a token sees those before it in its own chunk only (Llama 4); null for one chunk.
    Only sequences of one chunk are known to run."""
    score_cap: float | None = None
    """Scores of attention are kept between minus and plus this by a tanh (Gemma 2); null for as they are."""
    experts: ExpertSpec | None = None
    """A mixture of experts in place of the MLP of `ffn_hidden`."""
    latent_attention: LatentAttention | None = None
    """In place of separate projections for queries, keys and values."""
    qk_norm: bool = False
    """A norm on each query and key head (Qwen3)."""
    qk_norm_weights: bool = True
    """That norm has weights; Llama 4's has none."""
    sinks: bool = False
    """A trained number per head in the attention's softmax (GPT-OSS)."""
    attention_gate: bool = False
    """What attention gives is multiplied by a sigmoid of as many more columns of its first projection
    (Qwen3-Next)."""
    mamba: Mamba | None = None
    """A Mamba-2 mixer in place of attention."""
    delta_net: DeltaNet | None = None
    """A gated delta net in place of attention."""
    half: Half | None = None
    """It is one half of a block; null for both."""
    post_norms: bool = False
    """Norms of what attention and MLP give, too, before each is added (Gemma 2 and 3)."""
    tokens: int | None = None
    """Tokens of a sample that it works on, the mean where samples differ; null for the training's
    sequence."""
    cross_attention: EncoderOutput | None = None
    """What it attends to after itself (T5's decoder)."""
    entry: Entry | None = None
    """It is no block, but what turns one group's output into the next one's input."""
    frozen: bool = False
    """Not trained: no weight gradients and no optimizer states."""
    adapter: Adapter | None = None
    """Low-rank matrices beside its own, which alone are trained; of all layers of a model alike."""

    def check(self, where: str) -> None:
        """Refuse a shape that no layer has."""
        sizes = {name: getattr(self, name) for name in ("hidden", "ffn_hidden", "heads", "head_dim")}
        check.at_least(where, 1, **sizes, kv_heads=self.kv_heads, parallel_norms=self.parallel_norms)
        check.at_most(where, WIDEST, "far above any known model", **sizes)
        check.divides(where, ("kv_heads", self.kv_heads), ("heads", self.heads))
        if self.parallel_norms > 2:
            raise InputError(f"{where}: parallel_norms is {self.parallel_norms}; wanted 1 or 2")
        for name in ("window", "tokens", "chunk"):
            if getattr(self, name) is not None:
                check.at_least(where, 1, **{name: getattr(self, name)})
        if self.score_cap is not None:
            check.positive(where, score_cap=self.score_cap)
        if self.entry is not None:
            self.entry.check(where)
        if self.cross_attention is not None:
            self.cross_attention.check(where)
        self._check_parts(where)

    def _check_parts(self, where: str) -> None:
        latent = self.latent_attention
        require_mixer(where, self.mamba, self.delta_net, self.half)
        if not self.attends or self.half is not None:
            self._check_mixer(where)
        odd: dict[str, object] = {
            "experts": self.experts, "latent_attention": latent, "parallel_block": self.parallel_block,
        }  # fmt: skip
        if self.adapter is not None and not self.attends:
            raise InputError(f"{where}: an adapter of a layer without attention is not modelled")
        if self.adapter is not None:
            odd |= {"entry": self.entry, "cross_attention": self.cross_attention, "frozen": self.frozen,
                    "half": self.half, "attention_gate": self.attention_gate}  # fmt: skip
        for name, what in {
            "adapter": self.adapter, "entry": self.entry, "cross_attention": self.cross_attention,
            "post_norms": self.post_norms, "frozen": self.frozen,
        }.items():  # fmt: skip
            with_it = [key for key, value in odd.items() if value]
            if what and with_it:
                raise InputError(f"{where}: {name} with {with_it[0]} is not modelled; wanted one of the two")
        if self.experts is not None and self.parallel_block:
            raise InputError(f"{where}: experts in a parallel block are not modelled; wanted one of the two")
        if latent is not None and (self.head_dim != latent.qk_head_dim or self.kv_heads != self.heads):
            raise InputError(
                f"{where}: latent attention has a key head for each query head and a head_dim of "
                f"nope_head_dim + rope_head_dim ({latent.qk_head_dim}); got kv_heads {self.kv_heads} of "
                f"{self.heads} and head_dim {self.head_dim}"
            )
        if not self.qk_norm and not self.qk_norm_weights:
            raise InputError(f"{where}: qk_norm_weights is false without qk_norm; wanted both or neither")
        if self.chunk is not None and (self.window is not None or self.attention == "full"):
            raise InputError(f"{where}: chunk is of causal attention without a window; wanted neither")
        if self.score_cap is not None and (latent is not None or self.sinks or self.cross_attention):
            raise InputError(
                f"{where}: score_cap is of plain attention; wanted no latents, sinks nor encoder"
            )
        if latent is not None and (self.linear_bias or self.qkv_bias or self.qk_norm):
            raise InputError(f"{where}: latent attention with biases or norms of its heads is not modelled")

    def _check_mixer(self, where: str) -> None:
        """What a layer without attention, or of one half, has besides."""
        odd = {
            "entry": self.entry, "cross_attention": self.cross_attention, "post_norms": self.post_norms,
            "frozen": self.frozen, "parallel_block": self.parallel_block, "linear_bias": self.linear_bias,
        }  # fmt: skip
        with_it = [key for key, value in odd.items() if value]
        if with_it:
            what = "half" if self.half else "mamba" if self.mamba else "delta_net"
            raise InputError(f"{where}: {what} with {with_it[0]} is not modelled; wanted one of the two")
        if self.half == "mixer" and self.experts is not None:
            raise InputError(f"{where}: half mixer has no MLP and so no experts; wanted half mlp or null")

    @property
    def still(self) -> bool:
        """Whether its own weights are not trained."""
        return self.frozen or self.adapter is not None

    @property
    def looks_up_shared(self) -> bool:
        """Whether it looks tokens up in the embedding's table."""
        return self.entry is not None and self.entry.table == "shared"

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.half != "mlp" and self.mamba is None and self.delta_net is None

    @property
    def has_mlp(self) -> bool:
        """Whether it has an MLP, of experts or not."""
        return self.half != "mixer"

    @property
    def norms(self) -> int:
        """Norms of the residual stream, or of what is added to it."""
        if self.half is not None:
            return 1
        return self.parallel_norms if self.parallel_block else 4 if self.post_norms else 2

    def unsplit(self, tp: int, cp: int) -> str:
        """Why so many tensor-parallel and context-parallel ranks cannot share out what stands in place of its
        attention, or nothing."""
        mixer = self.mamba or self.delta_net
        return "" if mixer is None else mixer.unsplit(tp, cp)

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
        """Trainable elements of the attention or of what stands in its place, its norms aside."""
        mixer = self.mamba or self.delta_net
        if mixer is not None:
            return mixer.parameters(self.hidden)
        if not self.attends:
            return 0
        normed = self.qk_norm and self.qk_norm_weights
        extra = (2 * self.head_dim if normed else 0) + (self.heads if self.sinks else 0)
        if self.latent_attention is not None:
            return self.latent_attention.parameters(self.hidden, self.heads) + extra
        columns = self.query_width * (2 if self.attention_gate else 1) + 2 * self.kv_width
        biases = columns if self.qkv_bias or self.linear_bias else 0
        biases += self.hidden if self.linear_bias else 0
        return self.hidden * columns + self.query_width * self.hidden + biases + extra

    @property
    def cross_parameters(self) -> int:
        """Of the attention to an encoder's output, its norm among them."""
        if self.cross_attention is None:
            return 0
        width = self.cross_attention.hidden
        biases = self.query_width + 2 * self.kv_width + self.hidden if self.linear_bias else 0
        matrices = 2 * self.hidden * self.query_width + 2 * width * self.kv_width
        return matrices + biases + self.norm_parameters

    @property
    def gives(self) -> tuple[int, int | None]:
        """Width and tokens of its output."""
        return self.hidden, self.tokens

    @property
    def takes(self) -> tuple[int, int | None]:
        """The same of its input."""
        return self.gives if self.entry is None else (self.entry.hidden, self.entry.tokens)

    def sequence(self, seq_len: float) -> float:
        """Tokens of a sample that it works on."""
        return seq_len if self.tokens is None else float(self.tokens)

    def outside(self, seq_len: float) -> float:
        """Tokens of a sample that it reads beside its own: an encoder's, or of the group before."""
        source = self.entry or self.cross_attention
        tokens = self.tokens if source is None else source.tokens
        return seq_len if tokens is None else float(tokens)

    @property
    def adapter_parameters(self) -> int:
        """Elements of its adapters."""
        if self.adapter is None:
            return 0
        queries, keys, wide, deep = self.query_width, self.kv_width, self.hidden, self.ffn_hidden
        ends = {
            "q": wide + queries, "k": wide + keys, "v": wide + keys, "o": queries + wide,
            "gate": (wide + deep) * self.gated_mlp, "up": wide + deep, "down": deep + wide,
        }  # fmt: skip
        return self.adapter.rank * sum(ends[place] for place in self.adapter.on)

    @property
    def block_parameters(self) -> int:
        """Elements of one such layer, a table that it shares aside."""
        return self._parameters_with(self.experts.count if self.experts else 0)

    @property
    def active_block_parameters(self) -> int:
        """Of these, what one token meets."""
        return self._parameters_with(self.experts.top_k if self.experts else 0)

    def _parameters_with(self, experts: int) -> int:
        """Counting so many routed experts."""
        if self.entry is not None:
            each = self.norm_parameters // self.hidden
            norm = each * self.entry.norm_width
            return norm + self.entry.matrix_elements(self.hidden) + self.entry.bias_elements(self.hidden)
        around = self.attention_parameters + self.norms * self.norm_parameters + self.cross_parameters
        if not self.has_mlp:
            return around
        if self.experts is not None:
            each = self.experts.expert_parameters(self.hidden, gated=self.gated_mlp, bias=self.linear_bias)
            others = self.experts.other_parameters(self.hidden, gated=self.gated_mlp, bias=self.linear_bias)
            return around + others + experts * each
        inputs = 2 if self.gated_mlp else 1
        biases = inputs * self.ffn_hidden + self.hidden if self.linear_bias else 0
        return around + (inputs + 1) * self.hidden * self.ffn_hidden + biases

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrices by which each token is multiplied."""
        if self.entry is not None:
            return self.entry.matrix_elements(self.hidden)
        mixer = self.mamba or self.delta_net
        attention = (3 if self.attention_gate else 2) * self.query_width + 2 * self.kv_width
        mlp = (3 if self.gated_mlp else 2) * self.ffn_hidden
        mixed = self.hidden * attention if mixer is None else mixer.matrix_elements(self.hidden)
        return (0 if self.half == "mlp" else mixed) + (self.hidden * mlp if self.has_mlp else 0)

    def pairs_share(self, seq_len: float) -> float:
        """Pairs of tokens of which one sees the other, as a share of those of causal attention."""
        causal = seq_len * (seq_len + 1.0) / 2.0
        window = seq_len if self.window is None else min(float(self.window), seq_len)
        if self.attention == "full":
            return seq_len * window / causal
        return (window * seq_len - window * (window - 1.0) / 2.0) / causal


@dataclass(frozen=True, kw_only=True)
class LayerKind(LayerSpec):
    """A layer of its own shape, by name."""

    name: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in ("embedding", "head"):
            raise InputError(
                f"kind of layer {self.name!r}: wanted a name of letters, digits and underscores, "
                "and neither embedding nor head"
            )
        self.check(f"kind of layer {self.name}")


def kind_of(shape: LayerSpec, name: str) -> LayerKind:
    """A kind of layer of that shape."""
    return LayerKind(name=name, **{field.name: getattr(shape, field.name) for field in fields(LayerSpec)})


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that follow each other."""

    layers: int
    pattern: tuple[LayerKind, ...]
    """Their kinds, in turns."""

    def __post_init__(self) -> None:
        check.at_least("group of layers", 1, layers=self.layers)
        if not self.pattern:
            raise InputError("group of layers: pattern is empty; wanted at least one kind of layer")

    def kind(self, position: int) -> LayerKind:
        """Of its layer at that position, from 0."""
        return self.pattern[position % len(self.pattern)]


MOST_TURNS = 12
"""Layers after which a pattern begins anew; twice the longest of published models (Gemma 3: 6)."""


def groups_in_turn(order: Sequence[LayerKind]) -> tuple[LayerGroup, ...]:
    """Few groups: layers that take turns, behind those of one kind at the start; else run by run."""
    runs = [(kind, len(list(run))) for kind, run in groupby(order)]
    first, start = runs[0]
    for before in (0, start):
        rest = order[before:]
        for period in range(1, min(len(rest), MOST_TURNS) + 1):
            if all(kind == rest[place % period] for place, kind in enumerate(rest)):
                last = LayerGroup(layers=len(rest), pattern=tuple(rest[:period]))
                return (LayerGroup(layers=before, pattern=(first,)), last) if before else (last,)
    return tuple(LayerGroup(layers=count, pattern=(kind,)) for kind, count in runs)
