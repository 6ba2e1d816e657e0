"""`simulate PLAN`: one iteration of a plan, played event by event."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mist_megatron.cli.output import OutputOptions
from mist_megatron.cli.output_file import check_output_file
from mist_megatron.cli.progress import progress_bar
from mist_megatron.spec.schedule import SCHEDULES

SCALE = (
    "What if: op=matmul:0.5 halves the time of an operator kind (matmul, attention, memory, adam, "
    "host_adam), link=inter:2 doubles a link's bandwidth (intra, inter, h2d, d2h); may be repeated."
)
TRACE = "Write a Chrome trace, for ui.perfetto.dev, to this file; compressed if it ends in .gz."


def simulate(
    plan: Annotated[Path, typer.Argument(help="plan.yaml, or its JSON form.")],
    *,
    schedule: Annotated[
        str | None,
        typer.Option(help=f"Play another schedule: {', '.join(SCHEDULES)}."),
    ] = None,
    vpp: Annotated[int | None, typer.Option(help="Chunks per stage, with --schedule interleaved.")] = None,
    scale: Annotated[list[str] | None, typer.Option(help=SCALE)] = None,
    trace: Annotated[Path | None, typer.Option(readable=False, help=TRACE)] = None,
    ranks: Annotated[
        str, typer.Option(help="Devices told and traced: representative (one per stage), or all.")
    ] = "representative",
    output: OutputOptions,
) -> None:
    """Plays one iteration event by event: time, bubble, who is busy, critical path, memory over time."""
    from mist_megatron.ask.simulate import simulate as simulate_plan
    from mist_megatron.cli.simulate_report import show_simulation

    if trace is not None:
        check_output_file("--trace", trace, read=(plan,), example="trace.json")
    with progress_bar("simulating") as progress:
        played = simulate_plan(plan, progress=progress, schedule=schedule, vpp=vpp, scale=scale, ranks=ranks)
    if trace is not None:
        with progress_bar("writing the trace") as progress:
            played = played.with_trace(trace, progress)
    output.finish(played.to_dict())
    if output.json:
        return
    show_simulation(output.people, played)
    last = [f"cannot run on {played.plan.target}: {rule}" for rule in played.violations]
    last += [] if trace is None else [f"wrote {escape(str(trace))}, for ui.perfetto.dev"]
    for line in last:
        output.people.print(line, soft_wrap=True)
