"""`compare`: the same job under each named search space, or for each framework, as a speed-up table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mist_megatron.cli.options import JobOptions, show_taken
from mist_megatron.cli.output import OutputOptions
from mist_megatron.cli.output import table as rich_table
from mist_megatron.cli.progress import search_watch
from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from mist_megatron.ask.compare import Compared

BAR = 12


def compare(
    job: JobOptions,
    *,
    spaces: Annotated[
        list[str] | None,
        typer.Option("--space", help="Spaces to compare; by default the hand-made ones and full."),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(help="Compare frameworks instead, each at its best: megatron,deepspeed."),
    ] = None,
    table: Annotated[
        bool,
        typer.Option("--table", help="Layer-wise spaces: samples/s by model and memory, at the best batch."),
    ] = False,
    models: Annotated[
        list[str] | None, typer.Option(help="With --table: models, in the place of --model.")
    ] = None,
    budgets: Annotated[
        list[str] | None, typer.Option(help="With --table: memory per GPU, such as 8GiB,16GiB.")
    ] = None,
    grid: Annotated[float, typer.Option(help="Step of the offload fractions.")] = 0.125,
    output: OutputOptions,
) -> None:
    """Finds the best plan of each space, or of each framework: what the freedom of each is worth."""
    from mist_megatron.ask.compare import compare as compare_spaces

    if table:
        _paper_table(job, spaces or targets, {"models": models or (), "budgets": budgets or ()}, output)
        return
    if models or budgets:
        raise InputError("--models and --budgets are of --table")
    with search_watch() as watch:
        compared = compare_spaces(space=spaces, targets=targets, grid=grid, watch=watch, **job.words())
    output.finish(compared.to_dict())
    if not output.json:
        show_taken(output.people, compared.defaults)
        output.people.print(_table(compared))
        for name, best in compared.spaces.items():
            if best.why:
                output.people.print(f"{name} {best.why}: {best.reason}", markup=False)


def _paper_table(
    job: JobOptions, other: list[str] | None, lists: dict[str, list[str] | tuple[()]], output: OutputOptions
) -> None:
    """Models by memory budgets."""
    from mist_megatron.ask.paper_table import paper_table

    if other:
        raise InputError("--table shows all layer-wise spaces; wanted neither --space nor --targets")
    with search_watch() as watch:
        made = paper_table(watch=watch, **lists, **job.words())
    output.finish(made.to_dict())
    if not output.json:
        head, rows = made.rows()
        output.people.print(rich_table(head, [list(row) for row in rows], right=head[2:]))


def _table(compared: Compared) -> Table:
    speedups = {name: compared.speedup(name) for name in compared.spaces}
    most = max(speedup for speedup in speedups.values() if speedup is not None)
    rows = []
    for name, best in compared.spaces.items():
        speedup = speedups[name]
        if speedup is None:
            rows.append([name, "-", "-", "", best.why])
            continue
        length = round(BAR * speedup / most)
        rows.append([name, f"{best.iteration_s:.4g}", f"{speedup:.2f}x", "█" * length, best.shape])
    return rich_table((compared.by, "s/step", "speed-up", "", "plan"), rows, right=("s/step", "speed-up"))
