"""The vocabulary of stage times: linear terms, what one layer costs alone, and what stages have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.price.prices import Array, Prices, any_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.mesh import Mesh
from mist_megatron.spec.term import AT_STEP, IN_STEPPING_PASS, Term, When
from mist_megatron.targets.facts import MemoryFacts, TrafficFacts
from mist_megatron.targets.table import TARGETS

ZERO = np.zeros(())


@dataclass(frozen=True)
class Slope:
    """What a layer of one kind adds, and what recomputing it in full adds to that."""

    per_layer: Array = field(default_factory=lambda: ZERO)
    per_ckpt: Array = field(default_factory=lambda: ZERO)

    def __add__(self, other: Slope) -> Slope:
        return Slope(self.per_layer + other.per_layer, self.per_ckpt + other.per_ckpt)


NO_SLOPE = Slope()


@dataclass(frozen=True)
class Linear:
    """fixed + layers * per_layer + ckpt * per_ckpt, the latter two summed over the kinds of layers."""

    fixed: Array = field(default_factory=lambda: ZERO)
    per_layer: Array = field(default_factory=lambda: ZERO)
    """Of the first kind of layer, the only one of most models."""
    per_ckpt: Array = field(default_factory=lambda: ZERO)
    others: tuple[Slope, ...] = ()
    """Of the second kind and the following ones."""

    @property
    def slopes(self) -> tuple[Slope, ...]:
        """Of each kind of layer."""
        return Slope(self.per_layer, self.per_ckpt), *self.others

    def at(self, grid: StageGrid) -> Array:
        """Its value for the layers of each configuration."""
        value = self.fixed
        for count, slope in zip(grid.by_kind, self.slopes, strict=False):
            if any_of(slope.per_layer):
                value = value + count.layers * slope.per_layer
            if any_of(slope.per_ckpt):
                value = value + count.ckpt * slope.per_ckpt
        return value

    def times(self, factor: float) -> Linear:
        """All of it so many times."""
        others = tuple(Slope(factor * one.per_layer, factor * one.per_ckpt) for one in self.others)
        return Linear(factor * self.fixed, factor * self.per_layer, factor * self.per_ckpt, others)

    def __add__(self, other: Linear) -> Linear:
        pairs = zip_longest(self.others, other.others, fillvalue=NO_SLOPE)
        return Linear(
            self.fixed + other.fixed,
            self.per_layer + other.per_layer,
            self.per_ckpt + other.per_ckpt,
            tuple(one + two for one, two in pairs),
        )


def of_kind(place: int, per_layer: Array = ZERO, per_ckpt: Array = ZERO) -> Linear:
    """What layers of the kind at that place take."""
    if place == 0:
        return Linear(per_layer=per_layer, per_ckpt=per_ckpt)
    return Linear(others=(*(NO_SLOPE,) * (place - 1), Slope(per_layer, per_ckpt)))


class Again(NamedTuple):
    """What a backward pass does again of a forward pass."""

    compute_s: Array
    collective_s: Array
    exchange_s: Array
    """Of the collectives, those that take tokens to experts and back ..."""
    context_s: Array = ZERO
    """... and those of ranks that split sequences."""


NOTHING_AGAIN = Again(ZERO, ZERO, ZERO)


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
    moved_bytes: Array = field(default_factory=lambda: ZERO)
    """Of modules whose saved tensors go to host memory and back, of such a layer."""
    dropped_s: Array = field(default_factory=lambda: ZERO)
    """Compute and ..."""
    dropped_collective_s: Array = field(default_factory=lambda: ZERO)
    """... collectives of the parts of such a layer that are run again."""
    weight_grad_s: Array = field(default_factory=lambda: ZERO)
    inside_weight_grad_s: Array = field(default_factory=lambda: ZERO)
    """Of that, what is done while tokens are with their experts."""
    unneeded_s: Array = field(default_factory=lambda: ZERO)
    """Compute and ..."""
    unneeded_collective_s: Array = field(default_factory=lambda: ZERO)
    """... collectives of the forward pass that full recomputation leaves out."""

    expert_parameters: Array = field(default_factory=lambda: ZERO)
    """Of the parameters, those of routed experts."""
    narrow: Array = field(default_factory=lambda: ZERO)
    """Of all others, those that are gathered as the 8 bits that products read, ..."""
    narrow_experts: Array = field(default_factory=lambda: ZERO)
    """... and of routed experts."""
    forward_exchange_s: Array = field(default_factory=lambda: ZERO)
    """Of the collectives, those that take tokens to experts and back, forward ..."""
    backward_exchange_s: Array = field(default_factory=lambda: ZERO)
    """... and backward."""
    dropped_exchange_s: Array = field(default_factory=lambda: ZERO)
    """The same of the parts that are run again."""
    forward_context_s: Array = field(default_factory=lambda: ZERO)
    """Of the collectives, those of ranks that split sequences as far as attention does not hide them,
    forward, ..."""
    backward_context_s: Array = field(default_factory=lambda: ZERO)
    """... backward, ..."""
    dropped_context_s: Array = field(default_factory=lambda: ZERO)
    """... of the parts that are run again, ..."""
    unneeded_context_s: Array = field(default_factory=lambda: ZERO)
    """... and of what full recomputation leaves out."""
    forward_inside_s: Array = field(default_factory=lambda: ZERO)
    """Of compute, what is done while tokens are with their experts, forward ..."""
    backward_inside_s: Array = field(default_factory=lambda: ZERO)
    """... and backward, ..."""
    forward_beside_s: Array = field(default_factory=lambda: ZERO)
    """... and what runs beside their way."""
    backward_beside_s: Array = field(default_factory=lambda: ZERO)
    still: Array = field(default_factory=lambda: ZERO)
    """Elements that are not trained, which `parameters` has not."""

    @property
    def passes_back(self) -> bool:
        """Whether it has a backward pass: a frozen layer has none where nothing before it is trained."""
        return not any_of(self.still) or any_of(self.backward_s)

    @property
    def dropped(self) -> Again:
        """What is run again of a layer that is not in whole."""
        collectives = self.dropped_collective_s, self.dropped_exchange_s, self.dropped_context_s
        return Again(self.dropped_s, *collectives)

    @property
    def again(self) -> Again:
        """Full recomputation."""
        collective_s = self.forward_collective_s - self.unneeded_collective_s
        context_s = self.forward_context_s - self.unneeded_context_s
        return Again(self.forward_s - self.unneeded_s, collective_s, self.forward_exchange_s, context_s)


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
    context_inner: int = 1
    """Context-parallel ranks of one group that shares out heads."""
    expert_overlap: bool = False
    """Tokens travel beside a pass of another micro-batch ..."""
    delayed_weight_grad: bool = False
    """... and beside gradients of weights, which nothing waits for."""
    recomputes_first_layers: bool = True
    """Of a stage's layers the first are the recomputed ones; its last ones otherwise."""
    kind_of_layer: tuple[int, ...] = ()
    """The model's layers, in order, by their kinds' places."""
    agrees_on_maxima: bool = False
    """Operands of 8 bits are scaled by the largest elements so far, on which ranks agree after each pass."""
    tied_prices: tuple[Prices, ...] = ()
    """Of the nodes at both ends of a mixed cluster, where they sum the gradients of a tied embedding as
    quickly as the slower end; of three kinds or more as quickly as the slowest. Empty where all are alike."""

    def mesh(self, grid: StageGrid) -> Mesh[Array]:
        """Ranks of the stages of a grid."""
        return grid.mesh(self.context_parallel, self.context_inner)


@dataclass(frozen=True)
class BoundarySide:
    """One boundary of a stage."""

    sent_bytes: Array
    """Per rank."""
    returns: bool
    """Whether gradients come back: not to layers that have no backward pass."""


@dataclass(frozen=True)
class StageLoads:
    """The layers of a stage's role; None where the role has no such layer."""

    block: LayerLoad
    """Of the first kind of layer, the only one of most models."""
    embedding: LayerLoad | None
    head: LayerLoad | None
    boundary_bytes: Array
    """One activation at a stage boundary, per rank."""
    sides: tuple[BoundarySide, ...] = ()
    """What crosses the boundary before the stage and behind it, where a model has layers of several
    widths."""
    tied_parameters: Array | None = None
    """Elements of a token table that another stage holds too, whose gradients the two stages add."""
    others: Mapping[str, LayerLoad] = field(default_factory=dict)
    """Of the other kinds, by their names."""

    @property
    def blocks(self) -> tuple[LayerLoad, ...]:
        """Of each kind of layer."""
        return self.block, *self.others.values()


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
    kinds = max((len(term.others) for term in values), default=0)
    others = [[term.others[k] for term in values if k < len(term.others)] for k in range(kinds)]
    return Linear(
        added([term.fixed for term in values]),
        added([term.per_layer for term in values]),
        added([term.per_ckpt for term in values]),
        tuple(
            Slope(added([slope.per_layer for slope in kind]), added([slope.per_ckpt for slope in kind]))
            for kind in others
        ),
    )


def add_term(terms: dict[Term, Linear], name: Term, term: Linear) -> None:
    """Add to the term of that name, or begin it."""
    terms[name] = terms[name] + term if name in terms else term


def first_terms(facts: TrafficFacts) -> tuple[Term, ...]:
    """Terms of d for which a first forward pass stands still, and with it all later stages."""
    on_arrival = facts.step.taken == "on_arrival"
    return IN_STEPPING_PASS if on_arrival else (Term.FIRST_GATHER,)


def steps_of(delta: Mapping[Term, object], facts: TrafficFacts) -> tuple[Term, ...]:
    """Terms of d that begin when a stage may step, of a stage whose d has these terms."""
    first = first_terms(facts)
    steps = tuple(name for name in AT_STEP if name not in first)
    if facts.reduction.tied_first and Term.TIED_EMBEDDINGS in delta:
        # What both ends of the pipeline reduce when they have summed those.
        return (*steps, Term.GRADIENT_REDUCTION)
    return steps


def time_context_of(job: Job, prices: Prices, facts: MemoryFacts, without: frozenset[Term]) -> TimeContext:
    """From a job, its prices and what its target holds and overlaps."""
    execution = job.execution
    return TimeContext(
        prices=prices,
        facts=TARGETS[job.target].traffic(execution),
        interference=prices.interference(),
        weight_bytes=2.0,
        grad_bytes=float(facts.grad_bytes),
        optimizer_bytes=float(facts.optimizer_bytes),
        tensor_collectives_overlap=bool(execution.tp_comm_overlap),
        cluster_gpus=job.cluster.gpus,
        cluster_gpus_per_node=job.cluster.linked_gpus,
        context_parallel=execution.context_parallel,
        context_inner=execution.inner,
        model_layers=job.model.layers,
        without=without,
        expert_overlap=bool(execution.expert_overlap),
        delayed_weight_grad=bool(execution.delayed_weight_grad),
        recomputes_first_layers=facts.recomputes_first_layers,
        kind_of_layer=tuple(job.model.kind_of_layer),
        agrees_on_maxima=job.training.precision == "fp8" and execution.quantization in (None, "delayed"),
    )


def ending_terms(delta: Mapping[Term, object], facts: TrafficFacts) -> tuple[Term, ...]:
    """Terms of d that begin when a stage has done its last backward pass. Gradients of tied embeddings wait
    for another stage; stages that step while they wait for the next iteration end none."""
    if facts.step.taken == "while_waiting":
        return ()
    ended = tuple(term for term in Term if term.when is When.ENDED and term is not Term.TIED_EMBEDDINGS)
    return tuple(dict.fromkeys((*ended, *steps_of(delta, facts))))
