"""The layers of each kind of a model as operators, in the symbols that are this kind's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sympy import Expr, Max, Symbol

from mist_megatron.cost.kinds import own_sizes
from mist_megatron.cost.layers import LayerOptions, block, expert_parameters, parameters
from mist_megatron.cost.operators import Operator, Work
from mist_megatron.cost.symbols import CKPT, LAYERS, own_symbol
from mist_megatron.spec.layer import LayerKind
from mist_megatron.spec.model import ModelSpec


@dataclass(frozen=True)
class Block:
    """One kind of layer."""

    kind: LayerKind
    operators: tuple[Operator, ...]
    parameters: Expr
    """Elements of one such layer on a tensor-parallel rank."""
    expert_parameters: Expr
    """Those of routed experts among them."""
    layers: Expr
    """Number of them that a stage has ..."""
    ckpt: Expr
    """... and how many of these are recomputed in full."""
    names: Mapping[Symbol, Symbol]

    def own(self, expression: Expr) -> Expr:
        """A size of any layer as one of this kind."""
        return renamed(expression, self.names)


def blocks(model: ModelSpec, options: LayerOptions) -> tuple[Block, ...]:
    """All kinds of a model's layers."""
    own = own_sizes(model)
    return tuple(_block(kind, options, own[kind.name]) for kind in model.kinds)


def _block(kind: LayerKind, options: LayerOptions, own: Iterable[str]) -> Block:
    symbols = [Symbol(name, nonnegative=True) for name in own]
    names = {symbol: own_symbol(symbol, kind.name) for symbol in symbols}
    operators = tuple(_renamed_operator(operator, names) for operator in block(kind, options))
    layers, ckpt = own_symbol(LAYERS, kind.name), own_symbol(CKPT, kind.name)
    of_experts = expert_parameters(operators)
    return Block(kind, operators, parameters(operators), of_experts, layers, ckpt, names)


def renamed(expression: Expr, names: Mapping[Symbol, Symbol]) -> Expr:
    """With other symbols; maxima stay unevaluated, which `xreplace` would try to order."""
    if expression in names:
        return names[expression]
    operands = tuple(renamed(operand, names) for operand in expression.args)
    if operands == expression.args:
        return expression
    if isinstance(expression, Max):
        return Max(*operands, evaluate=False)
    return expression.func(*operands)


def _renamed_operator(operator: Operator, names: Mapping[Symbol, Symbol]) -> Operator:
    if not names:
        return operator
    return replace(
        operator,
        forward=tuple(_renamed_work(work, names) for work in operator.forward),
        backward=tuple(_renamed_work(work, names) for work in operator.backward),
        saved=tuple(replace(kept, size_bytes=renamed(kept.size_bytes, names)) for kept in operator.saved),
        parameters=renamed(operator.parameters, names),
        expert_parameters=renamed(operator.expert_parameters, names),
    )


def _renamed_work(work: Work, names: Mapping[Symbol, Symbol]) -> Work:
    m_n_k, core, share, sent = work.gemm, work.attention, work.pairs_share, work.exchange
    return replace(
        work,
        flops=renamed(work.flops, names),
        moved_bytes=renamed(work.moved_bytes, names),
        gemm=None if m_n_k is None else tuple(renamed(size, names) for size in m_n_k),
        attention=None if core is None else tuple(renamed(size, names) for size in core),
        exchange=None if sent is None else tuple(renamed(size, names) for size in sent),
        pairs_share=None if share is None else renamed(share, names),
    )
