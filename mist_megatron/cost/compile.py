"""Turns sympy expressions into a straight-line program that numpy runs over whole grids.

Why not `lambdify`: its product is Python source, which a cache on disk would have to execute. A program
here is data - a list of (operation, operand slots) from a closed set of operations - so that loading
one from a cache can at worst be refused, never run code; it pickles to worker processes; and running
it needs no sympy import at all.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sympy import Basic, Expr

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
    "and": np.logical_and,
    "or": np.logical_or,
}
"""Of any number of operands, in whatever order."""
_OPERATIONS: dict[str, tuple[int | None, Callable[[Sequence[Any]], Any]]] = {
    **{name: (None, _fold(function)) for name, function in _OF_TWO.items()},
    "not": (1, lambda v: np.logical_not(v[0])),
    "reciprocal": (1, lambda v: 1.0 / v[0]),
    "square": (1, lambda v: v[0] * v[0]),
    "pow": (2, lambda v: np.power(v[0], v[1])),
    "floor": (1, lambda v: np.floor(v[0])),
    "ceiling": (1, lambda v: np.ceil(v[0])),
    "lt": (2, lambda v: v[0] < v[1]),
    "le": (2, lambda v: v[0] <= v[1]),
    "eq": (2, lambda v: v[0] == v[1]),
    "ne": (2, lambda v: v[0] != v[1]),
    "where": (3, lambda v: np.where(v[0], v[1], v[2])),
}
"""Name -> (number of operands, None for one or more; what it does)."""


def _result(operation: str, operands: Sequence[float], slots: Mapping[int, Any] | list[Any]) -> Any:
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
        for operation, operands in self.steps:
            slots.append(_result(operation, operands, slots))
        return {name: np.asanyarray(slots[slot], dtype=np.float64) for name, slot in self.outputs}

    def bound(self, fixed: Mapping[str, float], wanted: Callable[[str], bool]) -> Program:
        """The outputs that are wanted of the program with some inputs fixed: what follows from these alone is
        computed once, what nothing needs not at all; what is left is what `run` would do, in its order."""
        known: dict[int, Any] = {
            slot: np.float64(fixed[name]) for slot, name in enumerate(self.inputs) if name in fixed
        }
        count = len(self.inputs)
        for slot, (operation, operands) in enumerate(self.steps, count):
            if operation == "const" or all(int(i) in known for i in operands):
                known[slot] = _result(operation, operands, known)
        outputs = [(name, slot) for name, slot in self.outputs if wanted(name)]
        needed = {slot for _, slot in outputs}
        for slot in range(count + len(self.steps) - 1, count - 1, -1):
            if slot in needed and slot not in known:
                needed.update(int(i) for i in self.steps[slot - count][1])
        inputs = tuple(name for slot, name in enumerate(self.inputs) if slot in needed and slot not in known)
        places = {self.inputs.index(name): place for place, name in enumerate(inputs)}
        steps: list[Step] = []
        for slot in sorted(needed - places.keys()):
            if slot in known:
                steps.append(("const", (float(known[slot]),)))
            else:
                operation, operands = self.steps[slot - count]
                steps.append((operation, tuple(places[int(i)] for i in operands)))
            places[slot] = len(inputs) + len(steps) - 1
        return Program(inputs, tuple(steps), tuple((name, places[slot]) for name, slot in outputs))


def compile_expressions(expressions: Mapping[str, Expr]) -> Program:
    """Share common subexpressions, then write every operation down once."""
    from sympy import cse

    names = list(expressions)
    shared, reduced = cse([expressions[name] for name in names], order="none")
    symbols = sorted(
        {str(s) for e in expressions.values() for s in e.free_symbols if not isinstance(s, bool)}
    )
    writer = _Writer(symbols)
    for symbol, expression in shared:
        writer.slot_of[symbol] = writer.write(expression)
    outputs = tuple((name, writer.write(e)) for name, e in zip(names, reduced, strict=True))
    return Program(tuple(symbols), tuple(writer.steps), outputs)


class _Writer:
    """Walks an expression tree, bottom up, reusing the slot of anything already written."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self.inputs = {name: index for index, name in enumerate(inputs)}
        self.steps: list[Step] = []
        self.slot_of: dict[Any, int] = {}

    def write(self, node: Basic) -> int:
        if node in self.slot_of:
            return self.slot_of[node]
        slot = self._write_new(node)
        self.slot_of[node] = slot
        return slot

    def _emit(self, operation: str, *operands: float) -> int:
        self.steps.append((operation, operands))
        return len(self.inputs) + len(self.steps) - 1

    def _write_new(self, node: Any) -> int:
        if node.is_Symbol:
            return self.inputs[str(node)]
        if node.is_number:
            return self._emit("const", float(node))
        if node.is_Pow:
            return self._write_power(node)
        name = type(node).__name__
        if name == "Piecewise":
            return self._write_piecewise(node)
        if name in ("StrictGreaterThan", "GreaterThan"):
            operation = "lt" if name == "StrictGreaterThan" else "le"
            return self._emit(operation, self.write(node.args[1]), self.write(node.args[0]))
        if name not in _SYMPY_NAMES:
            raise TypeError(f"no operation for {name} in a cost expression: {node}")
        operation = _SYMPY_NAMES[name]
        return self._emit(operation, *(self.write(argument) for argument in node.args))

    def _write_power(self, node: Any) -> int:
        power, exponent = node.as_base_exp()
        if node.exp == -1:
            return self._emit("reciprocal", self.write(node.base))
        if exponent == 2:
            return self._emit("square", self.write(power))
        return self._emit("pow", self.write(node.base), self.write(node.exp))

    def _write_piecewise(self, node: Any) -> int:
        *cases, (last, condition) = [(pair.expr, pair.cond) for pair in node.args]
        if condition != True:  # noqa: E712  (sympy's own true, not Python's)
            raise TypeError(f"a Piecewise in a cost expression needs a final otherwise: {node}")
        slot = self.write(last)
        for expression, condition in reversed(cases):
            slot = self._emit("where", self.write(condition), self.write(expression), slot)
        return slot


_SYMPY_NAMES = {
    "Add": "add",
    "Mul": "mul",
    "Max": "max",
    "Min": "min",
    "And": "and",
    "Or": "or",
    "Not": "not",
    "floor": "floor",
    "ceiling": "ceiling",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "Equality": "eq",
    "Unequality": "ne",
}


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
    if operation not in _OPERATIONS or not all(_is_slot(operand, known) for operand in operands):
        return None
    count = _OPERATIONS[operation][0]
    return (operation, operands) if count in (None, len(operands)) else None


def _is_slot(value: Any, known: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < known
