"""Numbers that remember how they were made: the cost model itself, run on these, says what it computes.

A `Recorded` is a numpy scalar with an expression. Every operation on one is given to it (`__array_ufunc__`,
NEP 13; `__array_function__`, NEP 18), so that the code that searches run over millions of configurations runs
on one plan unchanged. Branches follow the plan: a comparison is a plain truth value, and of a choice
(`np.where`) only what was chosen is in the expression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from mist_megatron.cost.stage import smooth_maximum
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.price.prices import Array, Priced, Prices, Work


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One step: an operation or a function of other steps, a symbol, or a number."""

    kind: str
    """`number`, `symbol`, `call`, or the operation."""
    value: float
    name: str = ""
    """Of a symbol or a function."""
    operands: tuple[Node, ...] = ()
    keywords: tuple[str, ...] = ()
    """Names of a function's operands; none where their order tells."""
    scope: int | None = None
    """The stage that a symbol belongs to; None for those of the whole plan."""


_OPERATIONS: Mapping[Any, str] = {
    np.add: "+",
    np.subtract: "-",
    np.multiply: "*",
    np.true_divide: "/",
    np.power: "^",
    np.maximum: "max",
    np.minimum: "min",
    np.negative: "neg",
    np.positive: "same",
    np.floor: "floor",
    np.ceil: "ceil",
    np.mod: "mod",
    np.square: "square",
    np.log2: "log2",
}


class Recorded(np.ndarray[Any, np.dtype[np.float64]]):
    """A number and the step that made it."""

    node: Node

    def __new__(cls, node: Node) -> Recorded:
        number = np.asarray(node.value, dtype=np.float64).view(cls)
        number.node = node
        return number

    def __array_finalize__(self, other: Any) -> None:
        if isinstance(other, Recorded):
            self.node = other.node

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        named.pop("out", None)
        value = getattr(ufunc, method)(*(np.asarray(operand) for operand in inputs), **named)
        operation = _OPERATIONS.get(ufunc) if method == "__call__" else None
        if operation is None:
            return value
        return Recorded(_simplified(operation, [node_of(operand) for operand in inputs], float(value)))

    def __array_function__(self, function: Any, types: Any, arguments: Any, named: Any) -> Any:
        if function is np.where:
            chosen = arguments[1] if bool(np.asarray(arguments[0])) else arguments[2]
            return chosen if isinstance(chosen, Recorded) else np.asarray(chosen, dtype=np.float64)
        if function is overlapped_time:
            return _overlapped(*arguments)
        if function is smooth_maximum:
            operands = tuple(node_of(argument) for argument in arguments)
            value = float(smooth_maximum(*(np.asarray(operand.value) for operand in operands)))
            return Recorded(Node("call", value, "smooth_max", operands))
        return function(*(_plain(argument) for argument in arguments), **named)

    def item(self, *_: Any) -> Any:
        """What follows goes on recording."""
        return self


def node_of(value: Any) -> Node:
    """The step that made a value; a number where nothing was recorded."""
    return value.node if isinstance(value, Recorded) else Node("number", float(value))


def symbol(name: str, value: Any, scope: int | None = None) -> Any:
    """A value by its name."""
    return Recorded(Node("symbol", float(value), name, scope=scope))


def with_symbols(facts: Any, named: Callable[[str], str] = str) -> Any:
    """A dataclass whose real numbers, also those of dataclasses in it, are symbols by their fields' names."""
    changed = {}
    for field in fields(facts):
        value = getattr(facts, field.name)
        if isinstance(value, float):
            changed[field.name] = symbol(named(field.name), value)
        elif hasattr(value, "__dataclass_fields__"):
            changed[field.name] = with_symbols(value, lambda name, of=field.name: named(f"{of}.{name}"))  # type: ignore[misc]
    return type(facts)(**{field.name: getattr(facts, field.name) for field in fields(facts)} | changed)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_plain(part) for part in value)
    return np.asarray(value) if isinstance(value, Recorded) else value


def _is(node: Node, number: float) -> bool:
    return node.kind == "number" and node.value == number


def _simplified(operation: str, operands: list[Node], value: float) -> Node:
    """Without steps that do nothing, which kinds of layers and streams that are not there leave behind."""
    if all(operand.kind == "number" for operand in operands):
        return Node("number", value)
    if operation == "same":
        return operands[0]
    if operation == "square":
        return Node("*", value, operands=(operands[0], operands[0]))
    if operation in ("+", "-", "*", "/", "max"):
        shorter = _shorter(operation, operands[0], operands[1], value)
        if shorter is not None:
            return shorter
    return Node(operation, value, operands=tuple(operands))


def _shorter(operation: str, left: Node, right: Node, value: float) -> Node | None:
    """What an operation on two operands comes to with fewer steps, or with steps that read better."""
    nothing = Node("number", 0.0)
    if operation == "+":
        for one, other in ((left, right), (right, left)):
            if _is(one, 0.0):
                return other
            if one.kind == "number" and one.value < 0.0:
                return Node("-", value, operands=(other, Node("number", -one.value)))
            if one.kind == "neg":
                return Node("-", value, operands=(other, one.operands[0]))
    elif operation == "-":
        if _is(right, 0.0):
            return left
        if _is(left, 0.0):
            return Node("neg", value, operands=(right,))
    elif operation == "max":
        # What takes time is never less than nothing.
        for one, other in ((left, right), (right, left)):
            if one is other or (_is(one, 0.0) and other.kind == "neg" and other.operands[0].kind == "call"):
                return one
    elif _is(left, 0.0) or (operation == "*" and _is(right, 0.0)):
        return nothing
    elif _is(right, 1.0):
        return left
    elif operation == "*" and _is(left, 1.0):
        return right
    elif operation == "*" and _is(left, -1.0):
        return Node("neg", value, operands=(right,))
    elif operation == "*" and left.kind == "neg":
        return Node("neg", value, operands=(Node("*", -value, operands=(left.operands[0], right)),))
    elif operation == "*":
        # x * (1 / y), as compiled programs divide.
        for one, other in ((left, right), (right, left)):
            if other.kind == "/" and _is(other.operands[0], 1.0):
                return Node("/", value, operands=(one, other.operands[1]))
    return None


class Same:
    """Finds the one step that stands for all that do the same with the same operands."""

    def __init__(self) -> None:
        self._first: dict[tuple[object, ...], Node] = {}
        self._seen: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        """That step; operands of sums and products may come in either order."""
        if node not in self._seen:
            operands = tuple(self.of(operand) for operand in node.operands)
            if node.kind == "-" and operands[0] is operands[1]:
                same = Node("number", 0.0)
            elif node.kind in _OPERATIONS.values():
                same = _simplified(node.kind, list(operands), node.value)
            else:
                same = replace(node, operands=operands)
            either = same.kind in ("+", "*", "max", "min")
            order = sorted(map(id, same.operands)) if either else map(id, same.operands)
            told = same.value if same.kind == "number" else None
            key = (same.kind, same.name, same.keywords, same.scope, told, *order)
            self._seen[node] = self._first.setdefault(key, same)
        return self._seen[node]


def _overlapped(streams: Any, factors: Array, then: Any = 0.0) -> Any:
    operands = [*(node_of(stream) for stream in streams), node_of(then)]
    value = float(overlapped_time([operand.value for operand in operands[:4]], factors, operands[4].value))
    running = [operand for operand in operands if not _is(operand, 0.0)]
    if len(running) == 1:
        return Recorded(running[0])
    names = ("compute", "gpu_gpu", "host_to_device", "device_to_host", "then")
    return Recorded(Node("call", value, "overlap", tuple(operands), names))


@dataclass(frozen=True)
class RecordingPrices:
    """Prices that answer with the question: `gemm(m=..., ...)` and its seconds."""

    prices: Prices

    def of(self, work: Work) -> Priced:
        said = {field.name: getattr(work, field.name) for field in fields(work)}
        values = {name: value for name, value in said.items() if value is not None}
        plain = type(work)(**{name: _plain(value) for name, value in values.items()})
        seconds = float(self.prices.of(plain).seconds)
        if seconds == 0.0:
            # A collective of one rank, or of no bytes, is not run.
            return Priced(np.zeros(()))
        return Priced(Recorded(Node("call", seconds, *_asked(_function_of(work, values), values))))

    def interference(self) -> Array:
        return self.prices.interference()


FUNCTIONS = {
    "Gemm": "gemm",
    "GroupedGemm": "grouped_gemm",
    "AllToAll": "all_to_all",
    "Attention": "attention",
    "MemoryPass": "memory_pass",
    "HostCopy": "host_copy",
    "DeviceAdam": "device_adam",
    "HostAdam": "host_adam",
}
"""Of a profile's prices, by the kind of work; collectives and directions of copies have their own name."""


def _function_of(work: Work, values: dict[str, Any]) -> str:
    for part in ("kind", "direction"):
        if part in values:
            kind = str(values.pop(part))
            return kind if part == "kind" else f"host_copy_{kind}"
    return FUNCTIONS[type(work).__name__]


def _asked(name: str, values: Mapping[str, Any]) -> tuple[str, tuple[Node, ...], tuple[str, ...]]:
    given = {key: value for key, value in values.items() if value is not None}
    return name, tuple(node_of(value) for value in given.values()), tuple(given)
