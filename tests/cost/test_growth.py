"""How amounts of a layer grow with its sizes: tensors are boxes, whose sides are sizes that occur once.

So no tensor, no pass over memory and no product can more than double where one size does (but pairs of
tokens, which have two sides of the sequence), shrink where a layer gets larger, or grow where more ranks
share it out. A factor that is divided by, counted twice or taken away breaks one of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mist_megatron.cost import symbols
from mist_megatron.cost.algebra import Expr, Maximum, Minimum, Number, Power, Product, Sum, Symbol
from mist_megatron.cost.kinds import SIZES as SHAPES
from mist_megatron.cost.kinds import expert_values
from mist_megatron.cost.layers import LayerOptions, block, embedding, head, parameters
from mist_megatron.cost.operators import Operator, WorkKind
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.plan import Execution
from mist_megatron.spec.presets import preset

SIZES = {
    "b": 2, "s": 4096, "sx": 4096, "tp": 4, "cp": 2, "cpi": 2, "sp": 1, "dp": 8, "h": 4096, "f": 8192,
    "a": 64, "k": 16,
    "e": 128, "v": 65536, "w": 1024, "E": 64, "K": 4, "fe": 1024, "he": 512, "fs": 2048, "ep": 8, "etp": 2,
    "im": 1, "lq": 512, "lk": 256, "en": 64, "er": 32, "ev": 128,
}  # fmt: skip
RANKS, EXPERT_RANKS, SEQUENCE = {"tp", "cp", "cpi"}, {"ep", "etp"}, {"s", "sx"}
DOUBLED = [name for name in SIZES if name != "sp"]
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "plain": {"flash_attention": False, "dropout": True, "dispatcher": "allgather"},
    "eight bits": {
        "eight_bit": True, "quantization": "mxfp8", "dispatcher": "flex", "fused_experts": True,
        "fused_rotary": False, "context_exchange": "a2a+p2p",
    },
}  # fmt: skip
MODELS = (
    "gpt3-7b", "falcon-7b", "gpt-oss-20b", "deepseek-v3", "qwen3-next-80b-a3b", "nemotron-3-super-120b-a12b",
    "t5-large-32", "qwen2.5-vl-7b", "glm-4.5",
)  # fmt: skip


def numbers(sequence_parallel: int) -> dict[Symbol, Any]:
    """Each symbol's sizes: as they are, then with one of `DOUBLED` doubled in turn."""
    sizes = SIZES | {"sp": sequence_parallel}
    names = [value.name for value in vars(symbols).values() if isinstance(value, Symbol)]
    return {
        Symbol(name): np.array([1.0, *(1.0 + (name == one) for one in DOUBLED)]) * sizes[name]
        for name in names
        if name in sizes
    }


def value(expression: Expr, sizes: dict[Symbol, Any]) -> Any:
    if isinstance(expression, Symbol):
        return sizes[expression]
    if isinstance(expression, Number):
        return float(expression.value)
    values = [value(arg, sizes) for arg in expression.args]
    if isinstance(expression, Power):
        return values[0] ** float(expression.exponent)
    if isinstance(expression, Sum | Product):
        return sum(values) if isinstance(expression, Sum) else math.prod(values)
    assert isinstance(expression, Maximum | Minimum)
    return (np.maximum if isinstance(expression, Maximum) else np.minimum).reduce(
        np.broadcast_arrays(*values)
    )


def amounts(operators: tuple[Operator, ...]) -> Iterator[tuple[str, Expr]]:
    for operator in operators:
        yield f"parameters of {operator.name}", operator.parameters
        yield from ((f"{kept.key} of {operator.name}", kept.size_bytes) for kept in operator.saved)
        for work in (*operator.forward, *operator.backward):
            yield f"bytes of {work.name}", work.moved_bytes
            yield f"flops of {work.name}", work.flops


def allowed(size: str) -> tuple[float, float]:
    if size in RANKS:
        return 0.5, 1.0
    if size in EXPERT_RANKS:
        return 0.5, 2.0  # parts of an expert have the tokens of all their ranks
    return (1.0, 4.0) if size in SEQUENCE else (1.0, 2.0)


@pytest.mark.parametrize("sequence_parallel", [0, 1])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_amounts_grow_as_boxes_do(model: str, options: str, sequence_parallel: int) -> None:
    spec, words, sizes = preset(model), LayerOptions(**OPTIONS[options]), numbers(sequence_parallel)
    operators = [*embedding(spec, words), *head(spec, words)]
    for kind in spec.kinds:
        operators += block(kind, words)
    wrong = []
    for what, amount in amounts(tuple(operators)):
        told = np.broadcast_to(value(amount, sizes), len(DOUBLED) + 1)
        assert told[0] >= 0.0, what
        for size, doubled in zip(DOUBLED, told[1:], strict=True):
            least, most = allowed(size)
            if not least * told[0] * (1 - 1e-9) <= doubled <= most * told[0] * (1 + 1e-9):
                wrong.append((what, size, doubled / told[0]))
    assert not wrong


@pytest.mark.parametrize("sequence_parallel", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_messages_are_gathered_or_summed(model: str, sequence_parallel: int) -> None:
    """Beside sequence parallelism ranks of a tensor hold parts of the tokens, which are gathered and
    scattered; without it they hold all, which are summed."""
    sizes = {symbol: told[:1] for symbol, told in numbers(sequence_parallel).items()}
    none = (WorkKind.ALL_REDUCE,) if sequence_parallel else (WorkKind.ALL_GATHER, WorkKind.REDUCE_SCATTER)
    for kind in preset(model).kinds:
        for operator in block(kind, LayerOptions()):
            for work in (*operator.forward, *operator.backward):
                if work.kind in none and work.group is Group.TENSOR:
                    assert value(work.moved_bytes, sizes) == 0.0, work.name


@pytest.mark.parametrize("options", ["usual", "plain"])
@pytest.mark.parametrize("model", MODELS)
def test_backward_products_are_twice_the_forward_ones(model: str, options: str) -> None:
    """One for the gradient of what was read, one for that of the other factor, each with as many products."""
    sizes = {symbol: told[:1] for symbol, told in numbers(1).items()}
    products = (WorkKind.GEMM, WorkKind.GROUPED, WorkKind.GROUPED_WEIGHT)
    for kind in preset(model).kinds:
        for operator in block(kind, LayerOptions(**OPTIONS[options])):
            told = [
                sum(float(np.sum(value(work.flops, sizes))) for work in way if work.kind in products)
                for way in (operator.forward, operator.backward)
            ]
            if operator.name == "mixer_scan":  # what is inside a chunk is made again before its gradients
                assert told[1] > 2 * told[0] > 0
            else:
                assert told[1] == pytest.approx(2 * told[0]), (operator.name, told)


@pytest.mark.parametrize("model", MODELS)
def test_operators_have_the_parameters_that_were_published(model: str) -> None:
    """Those of a kind of layer add up to what tests/spec holds against published counts of whole models."""
    spec = preset(model)
    alone = dict.fromkeys(("b", "tp", "cp", "cpi", "sp", "ep", "etp"), 1.0)
    for kind in spec.kinds:
        own = {name: of(kind, 4096) for name, of in SHAPES.items()}
        told = alone | {"v": float(spec.vocab)} | own | expert_values(spec, Execution())
        amount = parameters(block(kind, LayerOptions()))
        sizes = {Symbol(name): np.array(size) for name, size in told.items()}
        table = kind.hidden * spec.vocab if kind.entry is not None and kind.entry.table == "own" else 0
        assert float(value(amount, sizes)) == kind.block_parameters + table, kind.name
