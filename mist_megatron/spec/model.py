"""What is trained: the shape of a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.adapter import Adapter
from mist_megatron.spec.constants import ModelConstants
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.layer import (
    OWN_KIND,
    WIDEST,
    Activation,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Norm,
    kind_of,
)
from mist_megatron.spec.training import LONGEST_SEQUENCE

__all__ = ["Activation", "Family", "LayerGroup", "LayerKind", "LayerSpec", "ModelSpec", "Norm"]

Family = Literal["gpt", "llama", "falcon"]
Part = Literal[
    "mixtures of experts",
    "latent attention",
    "norms of query and key heads",
    "attention sinks",
    "capped attention scores",
    "capped logits",
    "attention in chunks",
    "multi-token prediction",
    "norms after attention and MLP",
    "Mamba-2 layers",
    "gated delta nets",
    "gated attention",
    "layers of half a block",
    "low-rank adapters",
]
"""What a model may have that a plain transformer has not."""

MOST_LAYERS = 10_000
"""Ten times the deepest transformer that was trained (DeepNet, arXiv:2203.00555: 1,000 layers)."""


def with_adapter(model: ModelSpec, adapter: Adapter) -> ModelSpec:
    """The model with these beside the matrices of all its layers."""
    groups = tuple(
        replace(group, pattern=tuple(replace(kind, adapter=adapter) for kind in group.pattern))
        for group in model.groups
    )
    return replace(model, adapter=adapter, groups=groups)


def _shape_words(hidden: int, tokens: int | None) -> str:
    return f"{'the sequence' if tokens is None else f'{tokens} tokens'} of width {hidden}"


@dataclass(frozen=True, kw_only=True)
class ModelSpec(LayerSpec):
    """Shape of a transformer; every cost expression is derived from these fields. The shape of a layer is
    that of all layers, unless `groups` say otherwise (`spec.layer`).

    `family` names the closest framework implementation; what is computed follows from the other
    fields alone, so that a mix (a GPT with grouped queries, say) needs no new code.
    """

    name: str
    family: Family
    layers: int
    vocab: int
    learned_positions: int = 0
    """Rows of a learned position table; 0 for none."""
    tied_embeddings: bool = False
    final_norm: bool = True
    logit_cap: float | None = None
    """Logits are kept between minus and plus this by a tanh (Gemma 2); null for as they are."""
    constants: ModelConstants = ModelConstants()
    """Rotary base, norm epsilon, dropout and other numbers that no shape tells."""
    mtp_layers: int = 0
    """Depths of multi-token prediction: each a projection, a layer like the last one, and the output layer
    once more."""
    mtp_pattern: tuple[str, ...] = ()
    """Kinds of the layers of a depth, where it is not one like the last."""
    mtp_repeated: bool = False
    """All depths have the same weights (Megatron's --mtp-use-repeated-layer)."""
    patch_elements: int = 0
    """Elements of a piece of an image that one matrix turns into a token, of a model that begins with
    images; 0 where it begins with a token table."""
    patch_bias: bool = False
    """Of that matrix."""
    head_tokens: int | None = None
    """Tokens of a sample that reach the output layer, 1 for a classifier; null for all of the last layer."""
    head_transform: bool = False
    """A square matrix, an activation and a norm before the output layer, which has a bias (BERT)."""
    groups: tuple[LayerGroup, ...] = ()
    """Layers that differ, first to last; empty where all are of the model's own shape, but for those that its
    `experts` leave dense."""

    def __post_init__(self) -> None:
        check.name("model", self.name)
        where = f"model {self.name}"
        check.at_least(where, 1, layers=self.layers, vocab=self.vocab)
        check.at_least(where, 1, layers=self.layers, vocab=self.vocab)
        self.check(where)
        check.at_least(where, 0, learned_positions=self.learned_positions, mtp_layers=self.mtp_layers)
        check.at_least(where, 0, patch_elements=self.patch_elements)
        check.at_most(where, WIDEST, "far above any known model", patch_elements=self.patch_elements)
        if self.head_tokens is not None:
            check.at_least(where, 1, head_tokens=self.head_tokens)
        if self.logit_cap is not None:
            check.positive(where, logit_cap=self.logit_cap)
        check.at_most(where, MOST_LAYERS, "ten times the deepest known model", layers=self.layers)
        check.at_most(where, WIDEST, "far above any known model", vocab=self.vocab)
        # A row per token of the longest sequence.
        rows = "a row per token of the longest sequence"
        check.at_most(where, LONGEST_SEQUENCE, rows, learned_positions=self.learned_positions)
        self._check_groups(where)
        if self.first_shape.rotary and self.learned_positions:
            raise InputError(
                f"{where}: rotary is true and learned_positions is {self.learned_positions}; "
                "a model has one kind of positions: set rotary: false or learned_positions: 0"
            )

    def _check_groups(self, where: str) -> None:
        self._check_own(where)
        experts = self.experts
        if experts is not None and not experts.layers_with(self.layers):
            raise InputError(
                f"{where}: experts.first_dense {experts.first_dense} and every {experts.every} leave none of "
                f"the {self.layers} layers with experts"
            )
        grouped = sum(group.layers for group in self.groups)
        if self.groups and grouped != self.layers:
            raise InputError(f"{where}: its groups have {grouped} layers together; layers is {self.layers}")
        known: dict[str, LayerKind] = {}
        for kind in (kind for group in self.groups for kind in group.pattern):
            if known.setdefault(kind.name, kind) != kind:
                raise InputError(f"{where}: two kinds of layers are named {kind.name}; wanted two names")
        self._check_borders(where)

    def _check_own(self, where: str) -> None:
        """One half of a block is no model, and depths are made of layers that there are."""
        if not self.groups and self.half is not None:
            raise InputError(f"{where}: half is {self.half} of all its layers; wanted it of kinds of layers")
        if self.groups:
            known = tuple(kind.name for group in self.groups for kind in group.pattern)
            for name in self.mtp_pattern:
                check.known(f"{where}: mtp_pattern", "kind of layer", name, tuple(dict.fromkeys(known)))
        elif self.mtp_pattern:
            raise InputError(f"{where}: mtp_pattern names kinds of layers; wanted kinds and groups with it")

    def _check_borders(self, where: str) -> None:
        """Each layer takes what the one before it gives."""
        kinds = [self.kinds[place] for place in self.kind_of_layer]
        if kinds[0].entry is not None or kinds[0].cross_attention is not None:
            what = "is between two groups" if kinds[0].entry else "attends to an encoder"
            raise InputError(f"{where}: its first layer, {kinds[0].name}, {what}; wanted a block before it")
        tables = [kind for kind in self.kinds if kind.entry and kind.entry.table == "own"]
        if tables and (not self.patch_elements or self.tied_embeddings):
            raise InputError(
                f"{where}: {tables[0].name} has a token table of its own; wanted patch_elements above 0, so "
                "that the model begins with images, and tied_embeddings: false"
            )
        for before, after in dict.fromkeys(pairwise(kinds)):
            if before.gives != after.takes:
                gives, takes = (_shape_words(*shape) for shape in (before.gives, after.takes))
                raise InputError(
                    f"{where}: layers of kind {before.name} give {gives} and those of kind {after.name} take "
                    f"{takes}; wanted a kind with an entry between them"
                )
            self._check_encoder(where, before, after)
        shared = [kind for kind in self.kinds if kind.entry and kind.entry.table == "shared"]
        for kind in shared:
            if self.patch_elements or kind.hidden != kinds[0].hidden:
                raise InputError(
                    f"{where}: {kind.name} shares the embedding's token table; wanted patch_elements 0 and "
                    f"layers as wide as the first ones, {kinds[0].hidden}"
                )
        trained = [kind for kind in self.kinds if not kind.frozen]
        if not trained:
            raise InputError(f"{where}: all its layers are frozen; wanted one that is trained")

    def _check_encoder(self, where: str, before: LayerKind, after: LayerKind) -> None:
        """What a decoder attends to is what its encoder gave, or what the layer before it let pass."""
        wanted = after.cross_attention
        if wanted is None:
            return
        given = (wanted.hidden, wanted.tokens)
        entered = after.entry is not None and not after.entry.projects and after.takes == given
        if not entered and before.cross_attention != wanted:
            raise InputError(
                f"{where}: layers of kind {after.name} attend to {_shape_words(*given)}, which no layer "
                "before them gives; wanted a kind with an entry (projects: false) behind the encoder, with "
                "the same cross_attention"
            )

    def check_sequence(self, where: str, seq_len: int) -> None:
        """Refuse sequences that samples of the model do not have."""
        if self.tokens is not None and seq_len != self.tokens:
            raise InputError(
                f"{where}: seq_len is {seq_len}; a sample of {self.name} has {self.tokens} tokens"
            )
        for kind in self.kinds:
            if kind.chunk is not None and seq_len > kind.chunk:
                raise InputError(
                    f"{where}: seq_len is {seq_len}; layers of {self.name} attend in chunks of {kind.chunk} "
                    "tokens, which no framework here trains beyond the first (Megatron-core 0.19 has no such "
                    f"attention); wanted {kind.chunk} or less"
                )
            entry = kind.entry
            if entry is not None and entry.table == "own" and entry.tokens is not None:
                given, room = entry.tokens // entry.merged, kind.sequence(seq_len)
                if given > room:
                    raise InputError(
                        f"{where}: layer {kind.name} of {self.name} gives {given} tokens of a sample, and "
                        f"its sequence has {room:g}; wanted seq_len {given} or more"
                    )

    def kind(self, name: str, **changes: Any) -> LayerKind:
        """A kind of layer of the model's own shape, but for these changes."""
        return replace(kind_of(self, name), **changes)

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """All layers, first to last."""
        if self.groups:
            return self.groups
        experts = self.experts
        if experts is None or experts.layers_with(self.layers) == self.layers:
            return (LayerGroup(layers=self.layers, pattern=(self.kind(OWN_KIND),)),)
        first, every = experts.first_dense, experts.every
        mixture = self.kind("moe", experts=replace(experts, first_dense=0, every=1))
        dense = self.kind("dense", experts=None)
        pattern = tuple(mixture if experts.has_experts(first + k) else dense for k in range(every))
        before = (LayerGroup(layers=first, pattern=(dense,)),) if first else ()
        return (*before, LayerGroup(layers=self.layers - first, pattern=pattern))

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different layers, in the order in which they first come."""
        groups = self.layer_groups
        by_name = {kind.name: kind for group in groups for kind in group.pattern[: group.layers]}
        return tuple(by_name.values())

    @cached_property
    def routed(self) -> ExpertSpec | None:
        """Experts of the layers that have some; no two kinds of layers have different ones here."""
        return next((kind.experts for kind in self.kinds if kind.experts is not None), None)

    @cached_property
    def kind_of_layer(self) -> tuple[int, ...]:
        """Positions in `kinds`, by layer."""
        place = {kind.name: position for position, kind in enumerate(self.kinds)}
        return tuple(place[group.kind(k).name] for group in self.layer_groups for k in range(group.layers))

    @cached_property
    def layers_of_kind(self) -> Mapping[str, int]:
        """How many layers of each kind it has."""
        return {kind.name: self.kind_of_layer.count(place) for place, kind in enumerate(self.kinds)}

    @cached_property
    def plain(self) -> bool:
        """Whether it begins with a token table, tokens of the training's sequences meet every layer of one
        width and the output layer, and its own weights are trained."""
        usual = not self.patch_elements and self.head_tokens is None and self.tokens is None
        usual = usual and self.adapter is None
        return self.alike and usual

    @cached_property
    def alike(self) -> bool:
        """Whether all its layers have one width and the same tokens, and all are trained blocks."""
        return all(
            kind.gives == self.gives
            and kind.entry is None
            and kind.cross_attention is None
            and not kind.frozen
            for kind in self.kinds
        )

    @cached_property
    def first_trained(self) -> int:
        """The first layer that is trained: those before it have no backward pass."""
        return next(k for k, place in enumerate(self.kind_of_layer) if not self.kinds[place].frozen)

    def passes_back(self, kind: LayerKind) -> bool:
        """Whether layers of a kind have a backward pass: where they are trained, or one before them is."""
        place = self.kinds.index(kind)
        last = max(k for k, other in enumerate(self.kind_of_layer) if other == place)
        return not kind.frozen or last > self.first_trained

    @property
    def first_shape(self) -> LayerKind:
        """Of the layers that the embedding belongs to."""
        return self.kinds[self.kind_of_layer[0]]

    @property
    def head_shape(self) -> LayerKind:
        """Of what the output layer works on."""
        last = self.kinds[self.kind_of_layer[-1]]
        return last if self.head_tokens is None else replace(last, tokens=self.head_tokens)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it has that a plain transformer has not, in words."""
        there: dict[Part, bool] = {
            "mixtures of experts": any(kind.experts is not None for kind in self.kinds),
            "latent attention": any(kind.latent_attention is not None for kind in self.kinds),
            "norms of query and key heads": any(kind.qk_norm for kind in self.kinds),
            "attention sinks": any(kind.sinks for kind in self.kinds),
            "capped attention scores": any(kind.score_cap is not None for kind in self.kinds),
            "capped logits": self.logit_cap is not None,
            "attention in chunks": any(kind.chunk is not None for kind in self.kinds),
            "multi-token prediction": self.mtp_layers > 0,
            "norms after attention and MLP": any(kind.post_norms for kind in self.kinds),
            "Mamba-2 layers": any(kind.mamba is not None for kind in self.kinds),
            "gated delta nets": any(kind.delta_net is not None for kind in self.kinds),
            "gated attention": any(kind.attention_gate for kind in self.kinds),
            "layers of half a block": any(kind.half is not None for kind in self.kinds),
            "low-rank adapters": self.adapter is not None,
        }
        return tuple(part for part, has in there.items() if has)

    @property
    def embedding_parameters(self) -> int:
        """Token table, or the matrix of patches, and learned positions."""
        first = self.first_shape.hidden
        rows = self.patch_elements + self.patch_bias if self.patch_elements else self.vocab
        return (rows + self.learned_positions) * first

    @property
    def entry_tables(self) -> int:
        """Elements of token tables that layers with an entry have for themselves."""
        own = [kind for kind in self.kinds if kind.entry is not None and kind.entry.table == "own"]
        return sum(self.vocab * kind.hidden * self.layers_of_kind[kind.name] for kind in own)

    @property
    def transform_parameters(self) -> int:
        """Of the matrix before the output layer, its bias and norm, and the output layer's bias."""
        last = self.head_shape
        own = last.hidden * (last.hidden + 1) + last.norm_parameters + self.vocab
        return own if self.head_transform else 0

    @property
    def head_parameters(self) -> int:
        """Final norm and output projection; a tied projection is counted with the embedding."""
        last = self.head_shape
        projection = 0 if self.tied_embeddings else self.vocab * last.hidden
        norm = last.norm_parameters if self.final_norm else 0
        return projection + norm + self.transform_parameters

    @property
    def parameters(self) -> int:
        """Trainable elements of the whole model, multi-token prediction aside, as models are named."""
        layers = sum(kind.block_parameters * self.layers_of_kind[kind.name] for kind in self.kinds)
        return self.embedding_parameters + layers + self.entry_tables + self.head_parameters

    @property
    def trained_parameters(self) -> int:
        """Of these, what is not frozen; the embedding is trained with the first layer, the head with the
        last. With adapters these alone."""
        if self.adapter is not None:
            each = ((kind, self.layers_of_kind[kind.name]) for kind in self.kinds)
            return sum(kind.adapter_parameters * layers for kind, layers in each)
        still = sum(
            kind.block_parameters * self.layers_of_kind[kind.name] for kind in self.kinds if kind.frozen
        )
        still += (
            self.embedding_parameters * self.first_shape.frozen
            + self.head_parameters * self.head_shape.frozen
        )
        return self.parameters - still

    @property
    def active_parameters(self) -> int:
        """Of these, what one token meets."""
        layers = sum(kind.active_block_parameters * self.layers_of_kind[kind.name] for kind in self.kinds)
        return self.embedding_parameters + layers + self.head_parameters

    @property
    def mtp_parameters(self) -> int:
        """Of multi-token prediction, which shares table and output layer: per depth a layer, the projection
        of two hidden states to one, two norms before it and one after the layer."""
        layers = sum(kind.block_parameters for kind in self.mtp_kinds)
        each = layers + 2 * self.hidden * self.hidden + 3 * self.norm_parameters
        return (1 if self.mtp_repeated and self.mtp_layers else self.mtp_layers) * each

    @property
    def mtp_kinds(self) -> tuple[LayerKind, ...]:
        """Layers of a depth of multi-token prediction, in their order."""
        by_name = {kind.name: kind for kind in self.kinds}
        return tuple(by_name[name] for name in self.mtp_pattern) or (self.kinds[self.kind_of_layer[-1]],)
