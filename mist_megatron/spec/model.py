"""What is trained: the shape of a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check
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

MOST_LAYERS = 10_000
"""Ten times the deepest transformer that was trained (DeepNet, arXiv:2203.00555: 1,000 layers)."""


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
    constants: ModelConstants = ModelConstants()
    """Rotary base, norm epsilon, dropout and other numbers that no shape tells."""
    mtp_layers: int = 0
    """Depths of multi-token prediction: each a projection, a layer like the last one, and the output layer
    once more."""
    groups: tuple[LayerGroup, ...] = ()
    """Layers that differ, first to last; empty where all are of the model's own shape, but for those that its
    `experts` leave dense."""

    def __post_init__(self) -> None:
        check.name("model", self.name)
        where = f"model {self.name}"
        check.at_least(where, 1, layers=self.layers, vocab=self.vocab)
        self.check(where)
        check.at_least(where, 0, learned_positions=self.learned_positions, mtp_layers=self.mtp_layers)
        check.at_most(where, MOST_LAYERS, "ten times the deepest known model", layers=self.layers)
        check.at_most(where, WIDEST, "far above any known model", vocab=self.vocab)
        # A row per token of the longest sequence.
        rows = "a row per token of the longest sequence"
        check.at_most(where, LONGEST_SEQUENCE, rows, learned_positions=self.learned_positions)
        if self.rotary and self.learned_positions:
            raise InputError(
                f"{where}: rotary is true and learned_positions is {self.learned_positions}; "
                "a model has one kind of positions: set rotary: false or learned_positions: 0"
            )
        self._check_groups(where)

    def _check_groups(self, where: str) -> None:
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
            if kind.hidden != self.hidden:
                raise InputError(
                    f"{where}: layers of kind {kind.name} are {kind.hidden} wide and the model "
                    f"{self.hidden}; wanted one width, projectors between widths are not modelled"
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
        found = {kind.name: kind for group in groups for kind in group.pattern[: group.layers]}
        return tuple(found.values())

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

    @property
    def parts(self) -> tuple[str, ...]:
        """What it has that a plain transformer has not, in words."""
        there = {
            "mixtures of experts": any(kind.experts is not None for kind in self.kinds),
            "latent attention": any(kind.latent_attention is not None for kind in self.kinds),
            "norms of query and key heads": any(kind.qk_norm for kind in self.kinds),
            "attention sinks": any(kind.sinks for kind in self.kinds),
            "multi-token prediction": self.mtp_layers > 0,
        }
        return tuple(part for part, has in there.items() if has)

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
        layers = sum(kind.block_parameters * self.layers_of_kind[kind.name] for kind in self.kinds)
        return self.embedding_parameters + layers + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Of these, what one token meets."""
        layers = sum(kind.active_block_parameters * self.layers_of_kind[kind.name] for kind in self.kinds)
        return self.embedding_parameters + layers + self.head_parameters

    @property
    def mtp_parameters(self) -> int:
        """Of multi-token prediction, which shares table and output layer: per depth a layer, the projection
        of two hidden states to one, two norms before it and one after the layer."""
        layer = self.kinds[self.kind_of_layer[-1]].block_parameters
        return self.mtp_layers * (layer + 2 * self.hidden * self.hidden + 3 * self.norm_parameters)
