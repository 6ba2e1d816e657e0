"""A model written as a mapping (YAML or JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from mist_megatron.errors import InputError
from mist_megatron.formats.document import build, schema_of
from mist_megatron.spec import check
from mist_megatron.spec.adapter import Adapter
from mist_megatron.spec.constants import ModelConstants
from mist_megatron.spec.entry import EncoderOutput, Entry
from mist_megatron.spec.experts import ExpertSpec, LatentAttention
from mist_megatron.spec.layer import OWN_KIND, Attention, LayerGroup, LayerKind, LayerSpec, kind_of
from mist_megatron.spec.model import Activation, Family, ModelSpec, Norm
from mist_megatron.spec.recurrent import DeltaNet, Half, Mamba

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GroupDocument:
    """Layers that follow each other."""

    layers: int
    """How many."""
    pattern: tuple[str, ...]
    """Names of their kinds, in turns."""


@dataclass(frozen=True, kw_only=True)
class ModelDocument:
    """Keys of a model mapping; what may be left out follows from the family, as in that family's models."""

    family: Family
    """Closest framework implementation; gives the defaults below."""
    layers: int
    """Transformer layers."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    vocab: int
    """Rows of the token table, padding included."""
    name: str = "custom"
    """What it is called in messages and files."""
    ffn_hidden: int | None = None
    """Default: 4 * hidden."""
    kv_heads: int | None = None
    """Default: heads."""
    head_dim: int | None = None
    """Default: hidden / heads, which must then be whole."""
    gated_mlp: bool | None = None
    """Two input projections multiplied together (SwiGLU). Default: llama."""
    activation: Activation | None = None
    """Default: silu if gated, else gelu."""
    norm: Norm | None = None
    """Default: rmsnorm for llama, else layernorm."""
    norm_bias: bool = True
    """LayerNorm has a bias; RMSNorm never has one."""
    parallel_block: bool | None = None
    """Attention and MLP read the same input and are added once. Default: falcon."""
    parallel_norms: int = 1
    """Norms before a parallel block, 1 or 2."""
    linear_bias: bool | None = None
    """Biases on all linear layers of a block. Default: gpt."""
    qkv_bias: bool = False
    """A bias on query, key and value alone."""
    rotary: bool | None = None
    """Rotary positions. Default: not gpt."""
    learned_positions: int = 0
    """Rows of a learned position table."""
    tied_embeddings: bool | None = None
    """Token table and output projection are one. Default: gpt."""
    final_norm: bool = True
    """A norm before the output projection."""
    constants: ModelConstants = ModelConstants()
    """What no shape tells, below."""
    experts: ExpertSpec | None = None
    """Mixture of experts in place of the MLP."""
    latent_attention: LatentAttention | None = None
    """Multi-head latent attention; give kv_heads = heads and head_dim = nope + rope columns."""
    qk_norm: bool = False
    """A norm on each query and key head."""
    qk_norm_weights: bool = True
    """That norm has weights."""
    sinks: bool = False
    """A trained number per head in the attention's softmax."""
    mtp_layers: int = 0
    """Depths of multi-token prediction."""
    mtp_pattern: tuple[str, ...] = ()
    """Kinds of the layers of a depth, where it is not one like the last."""
    mtp_repeated: bool = False
    """All depths have the same weights."""
    attention: Attention = "causal"
    """Whether a token sees those before it only, or, `full`, all of them."""
    window: int | None = None
    """Keys that a token sees, its own among them; null for all that its attention lets it see."""
    chunk: int | None = None
    """Tokens of a chunk, of which a token sees those before it only; null for one chunk."""
    score_cap: float | None = None
    """Scores of attention are kept between minus and plus this by a tanh."""
    logit_cap: float | None = None
    """The same of logits."""
    post_norms: bool = False
    """Norms of what attention and MLP give, too."""
    attention_gate: bool = False
    """What attention gives is multiplied by a sigmoid of as many more columns of its first projection."""
    mamba: Mamba | None = None
    """A Mamba-2 mixer in place of attention."""
    delta_net: DeltaNet | None = None
    """A gated delta net in place of attention."""
    half: Half | None = None
    """Of a kind: it is one half of a block, `mixer` (attention or what stands for it) or `mlp`."""
    tokens: int | None = None
    """Tokens of a sample that layers work on, the mean where samples differ; null for the training's
    sequence."""
    cross_attention: EncoderOutput | None = None
    """Width and tokens of an encoder's output that layers attend to after themselves."""
    entry: Entry | None = None
    """Of a kind: it is no block, but stands between groups of other widths or tokens."""
    frozen: bool = False
    """Of a kind: it is not trained."""
    adapter: Adapter | None = None
    """Low-rank matrices beside a layer's own, which alone are trained (LoRA): `{rank: 16}`."""
    patch_elements: int = 0
    """Elements of a piece of an image that one matrix turns into a token; 0 for a token table."""
    patch_bias: bool = False
    """Of that matrix."""
    head_tokens: int | None = None
    """Tokens of a sample that reach the output layer; null for all."""
    head_transform: bool = False
    """A matrix, an activation and a norm before the output layer, which has a bias (BERT)."""
    kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Layers that differ, by name: the keys above in which they are not as the rest of the model says."""
    groups: tuple[GroupDocument, ...] = ()
    """Their order, first to last; `layers` is the sum of theirs. Without it all layers are alike."""


def json_schema() -> dict[str, Any]:
    """Of a model's file, for editors and other programs."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mist-megatron model"}
    return {**schema_of(ModelDocument), **about}


PARTS = (
    "experts", "latent_attention", "qk_norm", "qk_norm_weights", "chunk", "score_cap", "logit_cap",
    "sinks", "mtp_layers", "attention", "window", "post_norms", "tokens", "cross_attention", "entry",
    "frozen", "patch_elements", "patch_bias", "head_tokens", "head_transform", "adapter",
    "attention_gate", "mamba", "delta_net", "half", "mtp_pattern", "mtp_repeated",
)  # fmt: skip
"""Keys that few models have; written only where they say something."""


def model_to_mapping(model: ModelSpec) -> dict[str, object]:
    """All keys of a model but the parts that it does not have."""
    defaults = {part.name: part.default for part in fields(ModelSpec) if part.name in PARTS}
    written: dict[str, object] = {
        key: value
        for key, value in asdict(model).items()
        if key != "groups" and (key not in PARTS or value != defaults[key])
    }
    usual = asdict(ModelConstants())
    written["constants"] = {
        key: value for key, value in asdict(model.constants).items() if value != usual[key]
    }
    if model.groups:
        written["kinds"] = {kind.name: _changes(kind, model) for kind in model.kinds}
        written["groups"] = [
            {"layers": group.layers, "pattern": [kind.name for kind in group.pattern]}
            for group in model.groups
        ]
    return written


def _changes(kind: LayerKind, model: ModelSpec) -> dict[str, object]:
    """Keys of a kind of layer that are not the model's own."""
    own, changed = asdict(kind_of(model, kind.name)), asdict(kind)
    return {key: value for key, value in changed.items() if value != own[key]}


def _groups(document: ModelDocument, model: LayerSpec, where: str) -> tuple[LayerGroup, ...]:
    if bool(document.kinds) != bool(document.groups):
        raise InputError(f"{where}: kinds and groups go together; wanted both or neither")
    own = asdict(kind_of(model, OWN_KIND))
    for kind, changes in document.kinds.items():
        if "name" in changes:
            raise InputError(f"{where}: kinds.{kind}: unknown key name; its name is {kind}")
    kinds = {
        name: build(LayerKind, {**own, **changes, "name": name}, f"{where}: kinds.{name}")
        for name, changes in document.kinds.items()
    }
    for group in document.groups:
        for name in group.pattern:
            check.known(f"{where}: groups", "kind of layer", name, tuple(kinds))
    groups = tuple(
        LayerGroup(layers=group.layers, pattern=tuple(kinds[name] for name in group.pattern))
        for group in document.groups
    )
    used = {name for group in document.groups for name in group.pattern[: group.layers]}
    unused = [name for name in kinds if name not in used]
    if unused:
        raise InputError(
            f"{where}: kinds.{unused[0]} has no layer: wanted its name in a pattern of groups, where a layer "
            "takes its turn"
        )
    return groups


def model_from_mapping(value: Mapping[str, object], where: str) -> ModelSpec:
    """A model from DESIGN's keys: family, layers, hidden, ffn_hidden, heads, kv_heads, vocab and options."""
    try:
        document = build(ModelDocument, dict(value), where)
    except InputError as error:
        told = ("try: mist-megatron reference model, which has an example and every key",)
        raise InputError(error.message, details=(*error.details, *told)) from None
    llama, gpt = document.family == "llama", document.family == "gpt"
    head_dim = document.head_dim
    if head_dim is None:
        if document.heads < 1 or document.hidden % document.heads:
            raise InputError(
                f"{where}: heads ({document.heads}) must divide hidden ({document.hidden}), or give head_dim"
            )
        head_dim = document.hidden // document.heads
    gated = _or(document.gated_mlp, llama)
    said: dict[str, Any] = dict(
        name=document.name,
        family=document.family,
        layers=document.layers,
        hidden=document.hidden,
        ffn_hidden=_or(document.ffn_hidden, 4 * document.hidden),
        heads=document.heads,
        kv_heads=_or(document.kv_heads, document.heads),
        vocab=document.vocab,
        head_dim=head_dim,
        gated_mlp=gated,
        activation=document.activation or ("silu" if gated else "gelu"),
        norm=document.norm or ("rmsnorm" if llama else "layernorm"),
        norm_bias=document.norm_bias,
        parallel_block=_or(document.parallel_block, document.family == "falcon"),
        parallel_norms=document.parallel_norms,
        linear_bias=_or(document.linear_bias, gpt),
        qkv_bias=document.qkv_bias,
        rotary=_or(document.rotary, not gpt and not document.learned_positions),
        learned_positions=document.learned_positions,
        tied_embeddings=_or(document.tied_embeddings, gpt),
        final_norm=document.final_norm,
        constants=document.constants,
        **{key: getattr(document, key) for key in PARTS},
    )
    own = LayerSpec(**{key.name: said[key.name] for key in fields(LayerSpec)})
    return ModelSpec(**said, groups=_groups(document, own, where))


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
