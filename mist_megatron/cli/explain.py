"""`explain PLAN`: the expressions themselves, with the symbol table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from mist_megatron.cli.output import OutputOptions, table

if TYPE_CHECKING:
    from mist_megatron.spec.plan import Plan


def explain(
    plan: Annotated[Path, typer.Argument(help="plan.yaml, or its JSON form.")],
    *,
    stage: Annotated[int, typer.Option(help="Stage whose memory is written out, from 0.")] = 0,
    output: OutputOptions,
) -> None:
    """The expressions behind `predict`: operators, memory terms and times in symbols."""
    from mist_megatron.ask.plans import load_plan

    show_expressions(load_plan(plan), output, stage=stage)


def show_expressions(plan: Plan, output: OutputOptions, *, stage: int = 0) -> None:
    """Shared with `predict --symbols`."""
    from mist_megatron.ask.explain import explain as explain_plan

    explained = explain_plan(plan, stage=stage)
    output.finish(explained.to_dict())
    if output.json:
        return
    people = output.people
    people.print(table(("symbol", "here", "meaning"), explained.symbol_rows, right=("here",)))
    for section in explained.general:
        people.print(f"\n[bold]{escape(section.title)}[/bold]")
        people.print(table(("", ""), [(line.name, line.formula) for line in section.lines]))
    titles = {
        "time": f"time of stage {stage}, as computed with prices of {explained.prices}",
        "memory": f"memory of stage {stage}, as computed",
        "iteration": "iteration, from the steps of all stages",
    }
    for name, steps in explained.lines.items():
        people.print(f"\n[bold]{escape(titles[name])}[/bold]")
        for step in steps:
            if step.expression != "0":
                value = f"  ({step.value:.6g} {step.unit})".replace(" )", ")")
                people.print(f"{step.name} = {step.expression}{value}", soft_wrap=True, markup=False)
    if explained.slowdowns:
        people.print("\n[bold]what overlap(...) is stretched by, where streams run at once[/bold]")
        people.print(table(("at once", "slower by"), explained.slowdowns))
