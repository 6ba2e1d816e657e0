"""`tune`: the best plan of a space for a job, with its proof."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.markup import escape

from mist_megatron.cli.expand import OptionGroup
from mist_megatron.cli.options import JobOptions
from mist_megatron.cli.output import OutputOptions
from mist_megatron.cli.output_file import check_output_file
from mist_megatron.cli.progress import search_watch
from mist_megatron.errors import INTERRUPTED

if TYPE_CHECKING:
    from mist_megatron.ask.tune_words import TuneWords

PANEL = "Search"


@dataclass(frozen=True)
class SearchOptions(OptionGroup):
    """What is searched, how, and what is done with the answer."""

    space: Annotated[str, typer.Option(help="Named space, see `spaces`.", rich_help_panel=PANEL)] = "full"
    grid: Annotated[float, typer.Option(help="Step of the offload fractions.", rich_help_panel=PANEL)] = 0.125
    fix: Annotated[
        list[str] | None,
        typer.Option(
            help="Fix a size or fraction, such as tp=2 or offload.optimizer=0.5.", rich_help_panel=PANEL
        ),
    ] = None
    forbid: Annotated[
        list[str] | None,
        typer.Option(help="Forbid a choice, such as offload.weights.", rich_help_panel=PANEL),
    ] = None
    max: Annotated[
        list[str] | None, typer.Option(help="Bound a size, such as pp=8.", rich_help_panel=PANEL)
    ] = None
    top: Annotated[int, typer.Option(help="Distinct plans to report.", rich_help_panel=PANEL)] = 2
    workers: Annotated[int, typer.Option(help="Processes.", rich_help_panel=PANEL)] = 1
    solver: Annotated[str, typer.Option(help="exact, or milp (PuLP with HiGHS).", rich_help_panel=PANEL)] = (
        "exact"
    )
    strategies_per_stage: Annotated[
        str,
        typer.Option(
            help="Of spaces with a strategy per layer: how many a stage may have, or full.",
            rich_help_panel=PANEL,
        ),
    ] = "2"
    balance: Annotated[
        str,
        typer.Option(
            help="Of such spaces, how layers move between stages: heuristic, or exact.", rich_help_panel=PANEL
        ),
    ] = "heuristic"
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds; the best so far after that.", rich_help_panel=PANEL)
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for plan.yaml and the target's files; nothing is written without.",
            rich_help_panel=PANEL,
        ),
    ] = None
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace files in a folder that is not empty.", rich_help_panel=PANEL),
    ] = False
    verify: Annotated[
        str | None,
        typer.Option(help="simulate: rank the best plans anew, by events.", rich_help_panel=PANEL),
    ] = None
    deadline: Annotated[
        str | None,
        typer.Option(
            help="With --tokens: the fewest GPUs that train in this time, such as 30d.", rich_help_panel=PANEL
        ),
    ] = None
    tokens: Annotated[
        str | None, typer.Option(help="Tokens to train until --deadline, such as 1T.", rich_help_panel=PANEL)
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            help="Write a page about the answer here: one HTML file, such as report.html.",
            rich_help_panel=PANEL,
        ),
    ] = None
    links: Annotated[
        Path | None,
        typer.Option(help="links.yaml: choose nodes and their order, too.", rich_help_panel=PANEL),
    ] = None
    avoid: Annotated[
        list[str] | None, typer.Option(help="Leave a node of --links out.", rich_help_panel=PANEL)
    ] = None
    spare: Annotated[
        int | None,
        typer.Option(min=0, help="Choose among so many more nodes; all by default.", rich_help_panel=PANEL),
    ] = None

    def words(self, job: JobOptions) -> TuneWords:
        """The same, and those of a job, as the arguments of Python."""
        from mist_megatron.ask.ranges import most_of_any

        most = most_of_any("--gpus", job.gpus)
        said = job.words() if most is None else {**replace(job, gpus=None).words(), "any_gpus": most}
        return cast("TuneWords", {**said, **vars(self)})


def tune(job: JobOptions, *, search: SearchOptions, output: OutputOptions) -> None:
    """Finds the fastest plan that fits, proves it, and with --out writes the files that run it."""
    from mist_megatron.ask.tune_words import tune as tune_job
    from mist_megatron.cli.tune_report import show_result, show_verified

    if search.report is not None:
        check_output_file("--report", search.report, read=(), example="report.html")
    with search_watch() as watch:
        tuned = tune_job(watch=watch, **search.words(job))
    output.finish(tuned.to_dict())
    if not output.json:
        show_result(output.people, tuned)
        if tuned.verification is not None:
            show_verified(output.people, tuned.verification)
    if search.report is not None:
        output.people.print(f"wrote {escape(str(search.report))}, for a browser", soft_wrap=True)
    if tuned.interrupted:
        raise typer.Exit(INTERRUPTED)  # with what it had
