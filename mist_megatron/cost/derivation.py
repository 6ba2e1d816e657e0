"""Where a plan's figures come from, line by line: what the cost model did for it, recorded and named.

`predict` is run on recorded numbers (`recorded`). Whatever it holds on the way in fields with a name is a
line here, down to symbols of the plan and to prices of pieces of work, which are what a profile is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import OFFLOAD_SYMBOLS, LayerCount, LayerSizes, StageGrid
from mist_megatron.cost.predict import StagePrediction, grids_of, iteration_of, priced_stages
from mist_megatron.cost.priced_pairs import PricedPairs
from mist_megatron.cost.recorded import Node, Recorded, RecordingPrices, Same, node_of, symbol, with_symbols
from mist_megatron.cost.terms import StageLoads
from mist_megatron.cost.work import StageWork
from mist_megatron.price.prices import Array, any_of
from mist_megatron.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class Step:
    """A named quantity, how it is made of others, and what it comes to."""

    name: str
    expression: str
    value: float
    unit: str


@dataclass(frozen=True)
class StageDerivation:
    """One stage: its symbols, then steps of which each needs those before it only."""

    symbols: Mapping[str, float]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Derivation:
    """A plan's stages, and the steps that put them together; these name a stage's steps `stage0.NAME`."""

    stages: tuple[StageDerivation, ...]
    symbols: Mapping[str, float]
    """Of the whole plan."""
    steps: tuple[Step, ...]
    interference: Array
    """Slowdown factors that every `overlap` uses."""


class _Recorder(StageEvaluator):
    """The evaluator, asked about one plan's stages on recorded numbers; each answer is made once."""

    def __init__(self, evaluator: StageEvaluator) -> None:
        context = evaluator.time_context
        prices = RecordingPrices(evaluator.prices)
        super().__init__(
            evaluator.job, prices, evaluator.stage, without=context.without, learned=evaluator.learned
        )
        facts = with_symbols(context.facts)
        self._context = replace(with_symbols(self._context), facts=facts, interference=context.interference)
        self._fixed = {name: symbol(name, value) for name, value in self._fixed.items()}
        self._answers: dict[tuple[str, int], tuple[StageGrid, Any]] = {}
        """With the grids that were asked about: no other one gets their number."""

    def _once(self, name: str, grid: StageGrid, ask: Callable[[StageGrid], Any]) -> Any:
        if (name, id(grid)) not in self._answers:
            self._answers[name, id(grid)] = grid, ask(grid)
        return self._answers[name, id(grid)][1]

    def loads(self, grid: StageGrid) -> StageLoads:
        loads: StageLoads = self._once("loads", grid, super().loads)
        return loads

    def work(self, grid: StageGrid) -> StageWork:
        work: StageWork = self._once("work", grid, super().work)
        return work

    def _computed(self, grid: StageGrid, wanted: tuple[str, ...]) -> dict[str, Array]:
        sizes: dict[str, Array] = self._once("_computed", grid, self._all_sizes)
        return sizes

    def _all_sizes(self, grid: StageGrid) -> dict[str, Array]:
        """All of it, and nothing fixed: what is told is made of the symbols."""
        if grid.parts:
            return super()._computed(grid, ("",))
        return self.stage.memory[grid.role.value].run(self.memory_values(grid))

    def layer_values(self, grid: StageGrid, sizes: LayerSizes) -> dict[str, Array | float]:
        return _symbols(super().layer_values(grid, sizes), grid)

    def memory_values(self, grid: StageGrid) -> dict[str, Array | float]:
        return _symbols(super().memory_values(grid), grid)

    def _priced(self, grid: StageGrid, *, marked: bool = False) -> PricedPairs:
        pairs = self._pairs(LayerSizes.of(grid), grid, marked=marked)
        return PricedPairs(pairs, np.zeros(0, dtype=np.intp), ())


def _symbols(values: Mapping[str, Any], grid: StageGrid) -> dict[str, Any]:
    """Values by their names, in a run of layers with a strategy of its own by its number besides; what such a
    run has none of is nothing there."""
    assert isinstance(grid.micro_batch, Recorded)
    node = grid.micro_batch.node
    run = node.name.removeprefix(MICRO_BATCH)
    return {
        name: value
        if isinstance(value, Recorded) or (run and not value)
        else symbol(name + run, value, node.scope)
        for name, value in values.items()
    }


MICRO_BATCH = "b"
"""The symbol that all sizes of a stage, or of a run of its layers, go by."""


def _recorded_grid(plan: Plan, position: int) -> StageGrid:
    """A stage's configuration in symbols."""
    grid = grids_of(plan)[position]
    names = {"layers": "l", "ckpt": "c", "in_flight": "p", "micro_batch": MICRO_BATCH, "dp": "dp", "tp": "tp"}
    if any(kind.experts is not None for kind in plan.model.kinds):
        names |= {"ep": "ep", "etp": "etp"}
    if any_of(grid.instances > 1.0):
        names |= {"instances": "inst"}
    values = {field: symbol(name, getattr(grid, field), position) for field, name in names.items()}
    offload = {kind: symbol(OFFLOAD_SYMBOLS[kind], value, position) for kind, value in grid.offload.items()}
    named = replace(grid, **values, offload=type(grid.offload)(**offload))
    return _with_runs(named, position) if grid.parts else named


def _with_runs(grid: StageGrid, position: int) -> StageGrid:
    """The same with runs of layers by number: l_0, b_0, dp_0 and tp_0 are of the first."""
    names = {"layers": "l", "micro_batch": MICRO_BATCH, "dp": "dp", "tp": "tp"}
    parts = tuple(
        replace(part, **{key: symbol(f"{name}_{run}", getattr(part, key), position)
                         for key, name in names.items()})
        for run, part in enumerate(grid.parts)
    )  # fmt: skip
    begin, end = (
        None if part is None else replace(part, **{key: symbol(f"{name}_{edge}", getattr(part, key), position)
                                                   for key, name in names.items() if key != "layers"})
        for part, edge in zip(grid.edges, ("embedding", "head"), strict=True)
    )  # fmt: skip
    first, none = parts[0], np.zeros(())
    sizes = {key: getattr(first, key) for key in ("micro_batch", "dp", "tp")}
    counts = tuple(LayerCount(part.layers, none) for part in parts)
    return replace(grid, **sizes, ckpt=none, parts=parts, edges=(begin, end), counts=counts)


def derive(plan: Plan, evaluator: StageEvaluator) -> Derivation:
    """Everything behind `predict` of a plan; `evaluator` is of `job_of(plan)`."""
    recorder = _Recorder(evaluator)
    grids = [_recorded_grid(plan, position) for position in range(len(plan.stages))]
    predicted = priced_stages(plan, grids, recorder)
    grad_accum = symbol("G", plan.grad_accum)
    time = iteration_of(plan, grids, predicted, recorder, grad_accum)
    same = Same()
    writers, stages = [], []
    for position, (grid, stage) in enumerate(zip(grids, predicted, strict=True)):
        writer = _Writer(position, same)
        results = _results_of(stage)
        work = recorder.work(grid)
        loads = work.loads if grid.parts else recorder.loads(grid)
        on_the_way = (loads, recorder.memory_moments(grid), work)
        steps = writer.steps(results, [part for value in on_the_way for part in _named_parts("", value)])
        writers.append(writer)
        stages.append(StageDerivation(writer.symbols, steps))
    whole = _Writer(None, same)
    for writer in writers:
        whole.known.update({key: f"stage{writer.scope}.{name}" for key, name in writer.known.items()})
    parts = {"steady_s": time.steady_s, "ramp_s": time.ramp_s, "first_and_last_s": time.first_and_last_s}
    steps = whole.steps({**parts, "iteration_s": time.total_s})
    return Derivation(tuple(stages), whole.symbols, steps, evaluator.time_context.interference)


def _results_of(stage: StagePrediction) -> dict[str, Any]:
    """What a prediction tells of a stage and what the iteration needs of it, by name."""
    return {
        **{f"t.{term}": seconds for term, seconds in stage.stable_terms_s.items()},
        "t": stage.stable_s,
        **{f"d.{term}": seconds for term, seconds in stage.delta_terms_s.items()},
        "d": stage.delta_s,
        **{f"memory.{name}": size for name, size in stage.memory_terms_bytes.items()},
        "peak_bytes": stage.peak_memory_bytes,
        "forward_s": stage.forward_s,
        "forward_traffic_s": stage.forward_traffic_s,
        "weight_grad_s": stage.weight_grad_s,
        "first_s": stage.first_s,
        "step_s": stage.step_s,
        "in_turn_s": stage.in_turn_s,
        "beyond_t": stage.beyond_s[0],
        "beyond_d": stage.beyond_s[1],
    }


ALREADY_NAMED = frozenset({"grid", "loads", "context", "load"})
"""Fields of a stage's work that hold what is named elsewhere."""


def _named_parts(path: str, value: Any) -> Iterator[tuple[str, Node]]:
    """Recorded numbers in the fields of dataclasses, by their path."""
    if isinstance(value, Recorded):
        yield path, value.node
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named_parts(f"{path}.{key}" if path else str(key), part)
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in ALREADY_NAMED:
                inner = f"{path}.{field.name}" if path else field.name
                yield from _named_parts(inner, getattr(value, field.name))


def _unit_of(name: str) -> str:
    last = name.rsplit(".", 1)[-1]
    if last.endswith("_bytes") or name.startswith("memory."):
        return "bytes"
    if last.endswith("parameters"):
        return "elements"
    return (
        "s" if last.endswith("_s") or name[:2] in ("t", "d", "t.", "d.") or name.startswith("beyond_") else ""
    )


_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 3, "^": 4}
"""How tightly operations bind; functions and names bind most."""


class _Writer:
    """Writes steps of one scope: a stage, or the plan (None)."""

    def __init__(self, scope: int | None, same: Same) -> None:
        self.scope, self._same = scope, same
        self.known: dict[Node, str] = {}
        """Steps that other lines tell."""
        self.symbols: dict[str, float] = {}
        self._names: dict[Node, str] = {}
        self._lines: list[Step] = []
        self._counts: dict[str, int] = {}
        self._sizes: dict[Node, int] = {}

    def steps(
        self, results: Mapping[str, Any], on_the_way: Sequence[tuple[str, Node]] = ()
    ) -> tuple[Step, ...]:
        """All lines that lead to these results, those on the way by their names."""
        roots = {name: self._same.of(node_of(value)) for name, value in results.items()}
        parts = ((name, self._same.of(node)) for name, node in on_the_way)
        for name, node in (*roots.items(), *parts):
            if node.operands and node not in self.known:
                self._names.setdefault(node, name)
        uses: dict[Node, int] = {}
        for node in roots.values():
            self._count(node, uses)
        for node in roots.values():
            self._name_shared(node, uses)
        for name, node in roots.items():
            self._tell(node)
            if node in self.known and self.known[node] != name:
                self._lines.append(Step(name, self.known[node], node.value, _unit_of(name)))
            elif node not in self.known:
                self._lines.append(Step(name, self._text(node), node.value, _unit_of(name)))
        return tuple(self._lines)

    def _count(self, node: Node, uses: dict[Node, int]) -> None:
        uses[node] = uses.get(node, 0) + 1
        if uses[node] == 1 and node not in self.known:
            for operand in node.operands:
                self._count(operand, uses)

    def _name_shared(self, node: Node, uses: Mapping[Node, int]) -> int:
        """Name prices, and what is long and used more than once; returns how long the text of a step is."""
        if node in self._sizes:
            return self._sizes[node]
        size = 1
        if node not in self.known and node.operands:
            size = sum(self._name_shared(operand, uses) for operand in node.operands) + 1
            priced = node.kind == "call" and node.name not in STREAMS
            shared = uses[node] > 1 and (size >= SHARED_FROM or node.kind == "call")
            if node not in self._names and (priced or shared):
                kind = node.name or "x"
                self._counts[kind] = self._counts.get(kind, 0) + 1
                self._names[node] = f"{kind}_{self._counts[kind]}"
            if node in self._names:
                size = 1
        self._sizes[node] = size
        return size

    def _tell(self, node: Node) -> None:
        """The lines that a step needs, and its own if it has one."""
        if node in self.known:
            return
        for operand in node.operands:
            self._tell(operand)
        if node in self._names:
            name, unit = self._names[node], _unit_of(self._names[node])
            self._lines.append(
                Step(name, self._text(node), node.value, unit or ("s" if node.kind == "call" else ""))
            )
            self.known[node] = name

    def _operand(self, node: Node, least: int = 0) -> str:
        if node in self.known:
            return self.known[node]
        text = self._text(node)
        weak = _STRENGTH.get(node.kind, 5) < least or (node.kind == "number" and node.value < 0.0 < least)
        return f"({text})" if weak else text

    def _text(self, node: Node) -> str:
        """A step in terms of those that have been told."""
        operands = node.operands
        if node.kind == "number":
            return _number(node.value)
        if node.kind == "symbol":
            own = node.scope is None or node.scope == self.scope
            name = node.name if own else f"stage{node.scope}.{node.name}"
            self.symbols[name] = node.value
            return name
        if node.kind == "call" and node.keywords:
            parts = zip(node.keywords, operands, strict=True)
            given = [f"{key}={self._operand(part)}" for key, part in parts if not _is_default(key, part)]
            return f"{node.name}({', '.join(given)})"
        if node.kind == "neg":
            return f"-{self._operand(operands[0], 3)}"
        if node.kind in _STRENGTH:
            strength = _STRENGTH[node.kind]
            left = self._operand(operands[0], strength + (node.kind == "^"))
            right = self._operand(operands[1], strength + (node.kind in "-/^"))
            return f"{left} {node.kind} {right}"
        return f"{node.name or node.kind}({', '.join(self._of_function(node))})"

    def _of_function(self, node: Node) -> Iterator[str]:
        """Operands; a maximum of maxima is one of all of them."""
        for operand in node.operands:
            if operand.kind == node.kind and node.kind in ("max", "min") and operand not in self.known:
                yield from self._of_function(operand)
            else:
                yield self._operand(operand)


SHARED_FROM = 8
"""Steps in an expression from which on it gets a line of its own where it is used more than once."""
STREAMS = ("overlap", "smooth_max")
"""Functions that are no prices."""
DEFAULTS = {"kernels": 1.0}
"""Operands of prices that are left out where they have this value, others where they are 0."""


def _is_default(keyword: str, node: Node) -> bool:
    return node.kind == "number" and node.value == DEFAULTS.get(keyword, 0.0)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
