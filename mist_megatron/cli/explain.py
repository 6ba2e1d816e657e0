"""`explain PLAN`: the expressions themselves, with the symbol table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.cost.grid import recompute_values

if TYPE_CHECKING:
    from mist_megatron.spec.plan import Plan


def explain(
    plan: Annotated[Path, typer.Argument(help="plan.yaml, or its JSON form.")],
    *,
    stage: Annotated[int, typer.Option(help="Stage whose memory is written out, from 0.")] = 0,
    output: OutputOptions,
) -> None:
    """The expressions behind `predict`: operators, memory terms and times in symbols."""
    from mist_megatron.formats.files import load_plan

    show_expressions(load_plan(plan), output, stage=stage)


def show_expressions(plan: Plan, output: OutputOptions, *, stage: int = 0) -> None:
    """Shared with `predict --symbols`."""
    from mist_megatron.cost import explain as expressions
    from mist_megatron.cost.grid import role_of
    from mist_megatron.cost.predict import job_of
    from mist_megatron.errors import InputError

    if not 0 <= stage < len(plan.stages):
        raise InputError(f"--stage is {stage}; the plan has stages 0 to {len(plan.stages) - 1}")
    sections = expressions.explain(job_of(plan), role_of(stage, len(plan.stages)))
    symbols = expressions.symbol_table()
    document: dict[str, Any] = {
        "symbols": {line.name: line.formula for line in symbols},
        "values": _values(plan, stage),
        "sections": {s.title: [{"name": e.name, "formula": e.formula} for e in s.lines] for s in sections},
    }
    output.finish(document)
    if output.json:
        return
    values = _values(plan, stage)
    rows = [(line.name, _shown(values.get(line.name)), line.formula) for line in symbols]
    output.people.print(table(("symbol", "here", "meaning"), rows, right=("here",)))
    for section in sections:
        output.people.print(f"\n[bold]{escape(section.title)}[/bold]")
        output.people.print(table(("", ""), [(line.name, line.formula) for line in section.lines]))


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _values(plan: Plan, position: int) -> dict[str, float]:
    """What the symbols stand for in this stage."""
    from mist_megatron.cost.grid import OFFLOAD_SYMBOLS
    from mist_megatron.spec.schedule import in_flight

    stage, model = plan.stages[position], plan.model
    held = in_flight(plan.schedule, position, len(plan.stages), plan.grad_accum, plan.vpp)
    return {
        "b": stage.micro_batch,
        "s": plan.training.seq_len,
        "tp": stage.tp,
        "dp": stage.dp,
        "cp": plan.execution.context_parallel,
        "sp": float(plan.sequence_parallel),
        **recompute_values(stage.recompute),
        "l": stage.layers,
        "c": stage.ckpt,
        "p": held,
        "G": plan.grad_accum,
        "z1": float(stage.zero >= 1),
        "z2": float(stage.zero >= 2),
        "z3": float(stage.zero >= 3),
        **{OFFLOAD_SYMBOLS[kind]: fraction for kind, fraction in stage.offload.items()},
        "h": model.hidden,
        "f": model.ffn_hidden,
        "a": model.heads,
        "k": model.kv_heads,
        "e": model.head_dim,
        "v": model.vocab,
    }
