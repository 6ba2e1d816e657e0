"""The sizes behind a prediction as general expressions, in the symbols of `cost/symbols.py`: operators of a
layer, what it keeps, and a stage's memory. What one plan's figures are made of is in `derivation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mist_megatron.cost import symbols
from mist_megatron.cost.algebra import Expr
from mist_megatron.cost.formula import text_of
from mist_megatron.cost.layers import backward_flops, forward_flops
from mist_megatron.cost.memory import stage_memory
from mist_megatron.cost.operators import Operator, Work, WorkKind
from mist_megatron.cost.symbolic import layer_graphs, layer_options, size_expressions
from mist_megatron.spec.job import Job
from mist_megatron.spec.layer import OWN_KIND
from mist_megatron.spec.mesh import StageRole
from mist_megatron.targets.table import TARGETS


@dataclass(frozen=True)
class Line:
    """One formula: what it is, and its text."""

    name: str
    formula: str


@dataclass(frozen=True)
class Section:
    """Formulas that belong together."""

    title: str
    lines: tuple[Line, ...]


def symbol_table() -> tuple[Line, ...]:
    """Every symbol and its meaning."""
    return tuple(Line(symbol.name, meaning) for symbol, meaning in symbols.MEANINGS.items())


def explain(job: Job, role: StageRole) -> tuple[Section, ...]:
    """All expressions of one stage of the job's model on its target."""
    graphs = layer_graphs(job)
    facts = TARGETS[job.target].memory(job.execution)
    memory = stage_memory(job.model, layer_options(job), facts, role)
    sizes = size_expressions(job)
    layers = [part for kind in job.model.kinds for part in _of_kind(kind.name, graphs[kind.name], sizes)]
    return (
        *layers,
        Section(f"memory held by a {role.value} stage, bytes", _named(memory.terms)),
        Section("moments that may be the peak, bytes", _named(memory.peaks)),
    )


def _of_kind(name: str, block: tuple[Operator, ...], sizes: dict[str, Expr]) -> tuple[Section, ...]:
    moved = sizes.get(f"{name}_moved_bytes")
    one = "one layer" if name == OWN_KIND else f"one layer of kind {name}"
    return (
        Section(f"operators of {one}, forward", _operators(block, backward=False)),
        Section(f"operators of {one}, backward", _operators(block, backward=True)),
        Section(
            f"sizes of {one}, per tensor-parallel rank",
            (
                Line("parameters", text_of(sizes[f"{name}_parameters"])),
                Line("saved bytes", text_of(sizes[f"{name}_saved_bytes"])),
                *([Line("bytes to host memory and back", text_of(moved))] if moved is not None else []),
                Line("forward FLOPs", text_of(forward_flops(block))),
                Line("backward FLOPs", text_of(backward_flops(block))),
            ),
        ),
    )


def _named(expressions: dict[str, Expr]) -> tuple[Line, ...]:
    return tuple(Line(name, text_of(expression)) for name, expression in expressions.items())


def _operators(graph: tuple[Operator, ...], *, backward: bool) -> tuple[Line, ...]:
    works = [work for operator in graph for work in (operator.backward if backward else operator.forward)]
    return tuple(Line(work.name, _work(work)) for work in works)


def _work(work: Work) -> str:
    if work.gemm is not None:
        m, n, k, batch = (text_of(size) for size in work.gemm)
        return f"T(gemm M={m}, N={n}, K={k}, batch={batch})"
    if work.attention is not None:
        b, s, a, kv, e = (text_of(size) for size in work.attention)
        share = "" if work.pairs_share is None else f", pairs share={text_of(work.pairs_share)}"
        return f"T(attention batch={b}, seq={s}, heads={a}, kv={kv}, width={e}{share})"
    kind = "memory" if work.kind is WorkKind.MEMORY else work.kind.value.replace("_", "-")
    return f"T({kind} {text_of(work.moved_bytes)} bytes)"
