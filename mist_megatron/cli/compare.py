"""`compare`: the same job under each named search space, or for each framework, as a speed-up table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mist_megatron.cli.options import JobOptions
from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.cli.progress import search_watch

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
    grid: Annotated[float, typer.Option(help="Step of the offload fractions.")] = 0.125,
    output: OutputOptions,
) -> None:
    """Finds the best plan of each space, or of each framework: what the freedom of each is worth."""
    from mist_megatron.ask.compare import compare as compare_spaces

    with search_watch() as watch:
        compared = compare_spaces(space=spaces, targets=targets, grid=grid, watch=watch, **job.words())
    output.finish(compared.to_dict())
    if not output.json:
        output.people.print(_table(compared))
        for name, best in compared.spaces.items():
            if best.why:
                output.people.print(f"{name} {best.why}: {best.reason}", markup=False)


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
    return table((compared.by, "s/step", "speed-up", "", "plan"), rows, right=("s/step", "speed-up"))
