"""`report PLAN...`: plans as a page that a browser shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mist_megatron.cli.output import OutputOptions
from mist_megatron.cli.output_file import check_output_file
from mist_megatron.cli.progress import progress_bar


def report(
    plans: Annotated[
        list[Path], typer.Argument(help="plan.yaml; several stand side by side.", show_default=False)
    ],
    *,
    out: Annotated[Path, typer.Option(readable=False, help="Write the page here.")] = Path("report.html"),
    output: OutputOptions,
) -> None:
    """Shows plans in one HTML file: the cluster, memory, time, a timeline, what if, and how sure it is."""
    from mist_megatron.ask.report import report as report_plans

    check_output_file("--out", out, read=plans, example="report.html")
    with progress_bar("playing the plans") as progress:
        reported = report_plans(tuple(plans), out=out, progress=progress)
    output.finish(reported.to_dict())
    if not output.json:
        for plan in reported.page.plans:
            output.people.print(f"{plan.title}: {plan.facts[0].words}", markup=False)
    output.people.print(f"wrote {escape(str(out))}, for a browser", soft_wrap=True)
