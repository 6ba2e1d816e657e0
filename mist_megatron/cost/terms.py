"""The vocabulary of stage times: linear terms, what one layer costs alone, and what stages have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mist_megatron.price.prices import Array, Prices
from mist_megatron.spec.term import Term
from mist_megatron.targets.facts import TrafficFacts

ZERO = np.zeros(())


@dataclass(frozen=True)
class Linear:
    """fixed + layers * per_layer + ckpt * per_ckpt."""

    fixed: Array = field(default_factory=lambda: ZERO)
    per_layer: Array = field(default_factory=lambda: ZERO)
    per_ckpt: Array = field(default_factory=lambda: ZERO)

    def at(self, layers: Array, ckpt: Array) -> Array:
        value = self.fixed
        if self.per_layer.any():
            value = value + layers * self.per_layer
        if self.per_ckpt.any():
            value = value + ckpt * self.per_ckpt
        return value

    def __add__(self, other: Linear) -> Linear:
        return Linear(
            self.fixed + other.fixed,
            self.per_layer + other.per_layer,
            self.per_ckpt + other.per_ckpt,
        )


@dataclass(frozen=True)
class LayerLoad:
    """One layer's passes on one tensor-parallel rank, arrays over (micro-batch, tp)."""

    forward_s: Array
    backward_s: Array
    forward_collective_s: Array
    backward_collective_s: Array
    parameters: Array
    saved_bytes: Array = field(default_factory=lambda: ZERO)
    """Kept for backward by a layer that is not recomputed in full."""
    selective_s: Array = field(default_factory=lambda: ZERO)
    selective_collective_s: Array = field(default_factory=lambda: ZERO)
    weight_grad_s: Array = field(default_factory=lambda: ZERO)
    unneeded_s: Array = field(default_factory=lambda: ZERO)
    """Compute and ..."""
    unneeded_collective_s: Array = field(default_factory=lambda: ZERO)
    """... collectives of the forward pass that full recomputation leaves out."""

    @property
    def again(self) -> tuple[Array, Array]:
        """Compute and collectives of full recomputation."""
        return self.forward_s - self.unneeded_s, self.forward_collective_s - self.unneeded_collective_s


@dataclass(frozen=True, kw_only=True)
class TimeContext:
    """What one evaluator's stages have in common."""

    prices: Prices
    facts: TrafficFacts
    interference: Array
    weight_bytes: float
    grad_bytes: float
    optimizer_bytes: float
    """Bytes per parameter of master weights and moments: what a swap of optimizer states copies."""
    tensor_collectives_overlap: bool
    cluster_gpus: int
    cluster_gpus_per_node: int
    context_parallel: int
    model_layers: int
    without: frozenset[Term]
    """Terms that are left out, for comparison with models that leave them out."""
    recomputes_first_layers: bool = True
    """Of a stage's layers the first are the recomputed ones; its last ones otherwise."""


@dataclass(frozen=True)
class StageLoads:
    """The layers of a stage's role; None where the role has no such layer."""

    block: LayerLoad
    embedding: LayerLoad | None
    head: LayerLoad | None
    boundary_bytes: Array
    """One activation at a stage boundary, per rank."""
    tied_parameters: Array | None = None
    """Elements of a token table that another stage holds too, whose gradients the two stages add."""


@dataclass(frozen=True, kw_only=True)
class PassStreams:
    """One pass over one layer: seconds alone on each stream. What arrives must be there before compute
    begins and comes in during the layer before; what leaves goes out during the layer after."""

    compute_s: Array
    gather_s: Array = field(default_factory=lambda: ZERO)
    """Collectives that arrive: weights, and tensor-parallel collectives where those run beside compute."""
    copy_in_s: Array = field(default_factory=lambda: ZERO)
    reduce_s: Array = field(default_factory=lambda: ZERO)
    """Collectives that leave: gradients."""
    copy_out_s: Array = field(default_factory=lambda: ZERO)
    tensor_s: Array = field(default_factory=lambda: ZERO)
    """Tensor-parallel collectives that stop compute."""
    blocking_gather_s: Array = field(default_factory=lambda: ZERO)
    """Data-parallel collectives that do, before compute ..."""
    blocking_reduce_s: Array = field(default_factory=lambda: ZERO)
    """... and after it."""


@dataclass(frozen=True)
class LayerPasses:
    """The four passes of a kind of layer; `first` is the first forward and `last` the last backward of an
    iteration. `last` is `backward` itself where they are equal."""

    forward: PassStreams
    backward: PassStreams
    first: PassStreams
    last: PassStreams


@dataclass(frozen=True)
class StageTerms:
    """Named parts of t and d; each dictionary sums to its total."""

    stable: dict[Term, Linear]
    delta: dict[Term, Linear]


def totals(terms: Mapping[Term, Linear]) -> Linear:
    """The sum of all terms, still linear; smallest arrays first, so that only the last additions touch the
    full size of an open grid."""

    def added(parts: list[Array]) -> Array:
        total = ZERO
        for part in sorted(parts, key=np.size):
            total = total + part
        return total

    values = terms.values()
    return Linear(
        added([term.fixed for term in values]),
        added([term.per_layer for term in values]),
        added([term.per_ckpt for term in values]),
    )


def add_term(terms: dict[Term, Linear], name: Term, term: Linear) -> None:
    """Add to the term of that name, or begin it."""
    terms[name] = terms[name] + term if name in terms else term
