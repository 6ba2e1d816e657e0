"""Turns expressions into a straight-line program that numpy runs over whole grids.

A program is data - a list of (operation, operand slots) from a closed set of operations - and no Python
source, which a cache on disk would have to execute: loading one can at worst be refused, never run code, and
it pickles to worker processes.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.algebra import Expr, Maximum, Minimum, Number, Power, Product, Sum, Symbol

Array = NDArray[np.float64]
_SIZE = operator.attrgetter("size")
Step = tuple[str, tuple[float, ...]]
"""Operation and operands: slots of earlier results, except `const`, whose operand is the number."""


def _fold(function: Callable[[Array, Array], Array]) -> Callable[[Sequence[Array]], Array]:
    """Smallest operands first: on an open grid only the last operations touch the full size."""

    def folded(values: Sequence[Array]) -> Array:
        ordered = sorted(values, key=_SIZE)
        result = ordered[0]
        for value in ordered[1:]:
            result = function(result, value)
        return result

    return folded


_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "max": np.maximum,
    "min": np.minimum,
}
"""Of any number of operands, in whatever order."""
_OPERATIONS: dict[str, tuple[int | None, Callable[[Sequence[Any]], Any]]] = {
    **{name: (None, _fold(function)) for name, function in _OF_TWO.items()},
    "reciprocal": (1, lambda v: 1.0 / v[0]),
    "square": (1, lambda v: v[0] * v[0]),
    "pow": (2, lambda v: np.power(v[0], v[1])),
}
"""Name -> (number of operands, None for one or more; what it does)."""


def _result(operation: str, operands: Sequence[float], slots: Mapping[float, Any] | list[Any]) -> Any:
    """Of one step, given the slots before it."""
    if operation == "const":
        return np.float64(operands[0])
    if len(operands) == 2 and operation in _OF_TWO:
        return _OF_TWO[operation](slots[int(operands[0])], slots[int(operands[1])])
    return _OPERATIONS[operation][1]([slots[int(i)] for i in operands])


@dataclass(frozen=True)
class Program:
    """Named inputs -> named outputs. Slot i < len(inputs) is an input, then one slot per step."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[tuple[str, int], ...]

    def run(self, values: Mapping[str, Array | float]) -> dict[str, Array]:
        """Evaluate over arrays that broadcast together; results keep only the axes they depend on."""
        slots: list[Any] = [np.asanyarray(values[name], dtype=np.float64) for name in self.inputs]
        for made, one, two, every in self._made:
            if two >= 0:
                slots.append(made(slots[one], slots[two]))
            else:
                slots.append(made if every is None else made([slots[slot] for slot in every]))
        return {name: np.asanyarray(slots[slot], dtype=np.float64) for name, slot in self.outputs}

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which makes what follows from the rest."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def _made(self) -> list[tuple[Any, int, int, tuple[int, ...] | None]]:
        """By step: what makes its result, and of which slots: of two, with -1 of any number of them, or the
        number that it is. Programs run often, and looking this up took a third of their time."""
        made: list[tuple[Any, int, int, tuple[int, ...] | None]] = []
        for operation, operands in self.steps:
            if operation == "const":
                made.append((np.float64(operands[0]), -1, -1, None))
                continue
            slots = tuple(map(int, operands))
            if len(slots) == 2 and operation in _OF_TWO:
                made.append((_OF_TWO[operation], *slots, None))
            else:
                made.append((_OPERATIONS[operation][1], -1, -1, slots))
        return made

    def bound(self, fixed: Mapping[str, float], wanted: Callable[[str], bool]) -> Program:
        """The outputs that are wanted of the program with some inputs fixed: what follows from these alone is
        computed once, what nothing needs not at all; what is left is what `run` would do, in its order."""
        known: dict[float, Any] = {
            slot: np.float64(fixed[name]) for slot, name in enumerate(self.inputs) if name in fixed
        }
        count = len(self.inputs)
        for slot, (operation, operands) in enumerate(self.steps, count):
            if operation == "const" or all(map(known.__contains__, operands)):
                known[slot] = _result(operation, operands, known)
        outputs = [(name, slot) for name, slot in self.outputs if wanted(name)]
        needed: set[float] = {slot for _, slot in outputs}
        for slot in range(count + len(self.steps) - 1, count - 1, -1):
            if slot in needed and slot not in known:
                needed.update(self.steps[slot - count][1])
        inputs = tuple(name for slot, name in enumerate(self.inputs) if slot in needed and slot not in known)
        places: dict[float, int] = {self.inputs.index(name): place for place, name in enumerate(inputs)}
        steps: list[Step] = []
        for slot in range(count + len(self.steps)):
            if slot not in needed or slot in places:
                continue
            if slot in known:
                steps.append(("const", (float(known[slot]),)))
            else:
                operation, operands = self.steps[slot - count]
                steps.append((operation, tuple([places[i] for i in operands])))
            places[slot] = len(inputs) + len(steps) - 1
        return Program(inputs, tuple(steps), tuple((name, places[slot]) for name, slot in outputs))


def compile_expressions(expressions: Mapping[str, Expr]) -> Program:
    """Share what several expressions have in common, then write every operation down once."""
    return _compiled(tuple(expressions.items()))


@lru_cache(maxsize=256)
def _compiled(expressions: tuple[tuple[str, Expr], ...]) -> Program:
    """Kept, because many ways of execution do or hold the same: of a mixture's fewer than half differ."""
    nodes: dict[Expr, None] = {}
    for _, expression in expressions:
        _collect(expression, nodes)
    symbols = sorted(node.name for node in nodes if isinstance(node, Symbol))
    writer = _Writer(symbols, {**_shared(nodes, Sum), **_shared(nodes, Product)})
    outputs = tuple((name, writer.write(each)) for name, each in expressions)
    return Program(tuple(symbols), tuple(writer.steps), outputs)


def _collect(node: Expr, nodes: dict[Expr, None]) -> None:
    """All that an expression is made of."""
    if node not in nodes:
        for arg in node.args:
            _collect(arg, nodes)
        nodes[node] = None


def _shared(nodes: Iterable[Expr], kind: type[Expr]) -> dict[Expr, tuple[Expr, ...]]:
    """Operands of each sum, or product, where the two that meet in most of them are an operand of their own,
    again and again until no two meet twice."""
    groups = {node: dict.fromkeys(node.args) for node in nodes if type(node) is kind}
    meet = Counter(pair for group in groups.values() for pair in combinations(group, 2))
    made: dict[Expr, tuple[Expr, ...]] = {}
    while meet:
        pair, times = max(meet.items(), key=lambda item: item[1])
        if times < 2:
            break
        both = kind("", pair)
        made[both] = pair
        for node, group in groups.items():
            if pair[0] in group and pair[1] in group:
                meet.subtract(combinations(group, 2))
                groups[node] = group = dict.fromkeys(
                    sorted((both, *(each for each in group if each not in pair)), key=lambda each: each.place)
                )
                meet.update(combinations(group, 2))
        del meet[pair]
    return {**{node: tuple(group) for node, group in groups.items()}, **made}


class _Writer:
    """Walks an expression, bottom up, reusing the slot of anything already written."""

    def __init__(self, inputs: Sequence[str], operands: Mapping[Expr, tuple[Expr, ...]]) -> None:
        self.inputs = {name: index for index, name in enumerate(inputs)}
        self.operands = operands
        self.steps: list[Step] = []
        self.slot_of: dict[Expr, int] = {}

    def write(self, node: Expr) -> int:
        if node not in self.slot_of:
            self.slot_of[node] = self._write_new(node)
        return self.slot_of[node]

    def _emit(self, operation: str, *operands: float) -> int:
        self.steps.append((operation, operands))
        return len(self.inputs) + len(self.steps) - 1

    def _write_new(self, node: Expr) -> int:
        if isinstance(node, Symbol):
            return self.inputs[node.name]
        if isinstance(node, Number):
            return self._emit("const", float(node.value))
        if isinstance(node, Power):
            base = self.write(node.args[0])
            if node.exponent in _POWERS:
                return self._emit(_POWERS[node.exponent], base)
            return self._emit("pow", base, self._emit("const", float(node.exponent)))
        operands = self.operands.get(node, node.args)
        return self._emit(_NAMES[type(node)], *(self.write(each) for each in operands))


_POWERS = {-1: "reciprocal", 2: "square"}
_NAMES: dict[type[Expr], str] = {Sum: "add", Product: "mul", Maximum: "max", Minimum: "min"}


def program_to_document(program: Program) -> dict[str, Any]:
    """Plain lists and numbers, for JSON."""
    return {
        "inputs": list(program.inputs),
        "steps": [[operation, *operands] for operation, operands in program.steps],
        "outputs": [list(output) for output in program.outputs],
    }


def program_from_document(document: Any) -> Program | None:
    """Read a program back, or None when anything in it is not what this module writes."""
    try:
        inputs = tuple(document["inputs"])
        raw_steps, raw_outputs = list(document["steps"]), list(document["outputs"])
    except (TypeError, KeyError):
        return None
    if not all(isinstance(name, str) for name in inputs):
        return None
    steps: list[Step] = []
    for raw in raw_steps:
        step = _checked_step(raw, len(inputs) + len(steps))
        if step is None:
            return None
        steps.append(step)
    outputs: list[tuple[str, int]] = []
    for raw in raw_outputs:
        if not (isinstance(raw, list) and len(raw) == 2 and isinstance(raw[0], str)):
            return None
        if not _is_slot(raw[1], len(inputs) + len(steps)):
            return None
        outputs.append((raw[0], raw[1]))
    return Program(inputs, tuple(steps), tuple(outputs))


def _checked_step(raw: Any, known: int) -> Step | None:
    if not (isinstance(raw, list) and len(raw) >= 2 and isinstance(raw[0], str)):
        return None
    operation, operands = raw[0], tuple(raw[1:])
    if operation == "const":
        value = operands[0]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return (operation, (float(value),)) if number and math.isfinite(value) else None
    if operation not in _OPERATIONS:
        return None
    for operand in operands:  # no call for each: a search reads a hundred programs
        if type(operand) is not int or not 0 <= operand < known:
            return None
    count = _OPERATIONS[operation][0]
    return (operation, operands) if count in (None, len(operands)) else None


def _is_slot(value: Any, known: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < known
