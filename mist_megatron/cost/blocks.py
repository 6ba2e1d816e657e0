"""The layers of each kind of a model as operators, in the symbols that are this kind's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from mist_megatron.cost.algebra import Expr, Symbol
from mist_megatron.cost.entries import frozen, outside_bytes
from mist_megatron.cost.kinds import own_sizes
from mist_megatron.cost.layers import LayerOptions, block, embedding, expert_parameters, parameters
from mist_megatron.cost.narrow import NarrowElements, narrow_elements
from mist_megatron.cost.operators import ZERO, Operator, Work
from mist_megatron.cost.projections import trained_parameters
from mist_megatron.cost.shapes import ACTIVATION
from mist_megatron.cost.symbols import CKPT, LAYERS, own_symbol
from mist_megatron.spec.layer import LayerKind
from mist_megatron.spec.model import ModelSpec


@dataclass(frozen=True)
class Block:
    """One kind of layer."""

    kind: LayerKind
    operators: tuple[Operator, ...]
    parameters: Expr
    """Elements of one such layer on a tensor-parallel rank, those that are trained."""
    still: Expr
    """Those that are frozen."""
    expert_parameters: Expr
    """Those of routed experts among them."""
    narrow: NarrowElements
    """Those of matrices whose products have 8 bits."""
    layers: Expr
    """Number of them that a stage has ..."""
    ckpt: Expr
    """... and how many of these are recomputed in full."""
    names: Mapping[Symbol, Symbol]
    passes_back: bool
    """It has a backward pass."""
    given: Expr
    """Bytes on one rank that leave it for the next layer, an encoder's output that passes by among them."""

    @property
    def weights(self) -> Expr:
        """Elements of one such layer, trained or not."""
        return self.parameters + self.still

    def own(self, expression: Expr) -> Expr:
        """A size of any layer as one of this kind."""
        return expression.replaced(self.names)


@lru_cache(maxsize=64)
def blocks(model: ModelSpec, options: LayerOptions) -> tuple[Block, ...]:
    """All kinds of a model's layers."""
    own = own_sizes(model)
    return tuple(_block(kind, options, own[kind.name], model.passes_back(kind)) for kind in model.kinds)


def _block(kind: LayerKind, options: LayerOptions, own: Iterable[str], passes_back: bool) -> Block:
    names = _names(own, kind.name)
    operators = _own_operators(block(kind, options), names, kind.frozen, passes_back=passes_back)
    layers, ckpt = own_symbol(LAYERS, kind.name), own_symbol(CKPT, kind.name)
    all_of_it, of_experts = parameters(operators), expert_parameters(operators)
    trained = ZERO if kind.frozen else trained_parameters(operators) if kind.adapter else all_of_it
    still = all_of_it - trained if kind.still else ZERO
    source = kind.cross_attention
    given = ACTIVATION + (ZERO if source is None else outside_bytes(source))
    given = given.replaced(names)
    narrow = narrow_elements(operators)
    return Block(kind, operators, trained, still, of_experts, narrow, layers, ckpt, names, passes_back, given)


def _names(own: Iterable[str], kind: str) -> dict[Symbol, Symbol]:
    symbols = [Symbol(name) for name in own]
    return {symbol: own_symbol(symbol, kind) for symbol in symbols}


def _own_operators(
    operators: Iterable[Operator], names: Mapping[Symbol, Symbol], still: bool, *, passes_back: bool
) -> tuple[Operator, ...]:
    own = tuple(_renamed_operator(operator, names) for operator in operators)
    return frozen(own, passes_back=passes_back) if still else own


@dataclass(frozen=True)
class Edge:
    """Embedding or head: as wide and as long as the layers beside it, and frozen with them."""

    operators: tuple[Operator, ...]
    names: Mapping[Symbol, Symbol]
    frozen: bool

    def own(self, expression: Expr) -> Expr:
        """A size of any layer as one of this edge."""
        return expression.replaced(self.names)

    @property
    def weights(self) -> Expr:
        """Elements on a tensor-parallel rank."""
        return parameters(self.operators)

    @property
    def parameters(self) -> Expr:
        """Those that are trained."""
        return ZERO if self.frozen else self.weights


@lru_cache(maxsize=64)
def first_edge(model: ModelSpec, options: LayerOptions) -> Edge:
    """The embedding."""
    return _edge(model, "embedding", embedding(model, options))


def last_edge(model: ModelSpec, operators: Iterable[Operator]) -> Edge:
    """The head, made of these."""
    return _edge(model, "head", operators)


def _edge(model: ModelSpec, name: str, operators: Iterable[Operator]) -> Edge:
    layer = model.first_shape if name == "embedding" else model.head_shape
    names = _names(own_sizes(model)[name], name)
    own = _own_operators(operators, names, layer.still, passes_back=name == "head")
    return Edge(own, names, layer.still)


def _renamed_operator(operator: Operator, names: Mapping[Symbol, Symbol]) -> Operator:
    if not names:
        return operator
    return replace(
        operator,
        forward=tuple(_renamed_work(work, names) for work in operator.forward),
        backward=tuple(_renamed_work(work, names) for work in operator.backward),
        saved=tuple(replace(kept, size_bytes=kept.size_bytes.replaced(names)) for kept in operator.saved),
        parameters=operator.parameters.replaced(names),
        expert_parameters=operator.expert_parameters.replaced(names),
    )


def _renamed_work(work: Work, names: Mapping[Symbol, Symbol]) -> Work:
    def own(sizes: tuple[Expr, ...] | None) -> tuple[Expr, ...] | None:
        return None if sizes is None else tuple(size.replaced(names) for size in sizes)

    share = work.pairs_share
    return replace(
        work,
        flops=work.flops.replaced(names),
        moved_bytes=work.moved_bytes.replaced(names),
        gemm=own(work.gemm),
        attention=own(work.attention),
        exchange=own(work.exchange),
        pairs_share=None if share is None else share.replaced(names),
    )
