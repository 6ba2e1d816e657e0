"""`emit`: the files that run a plan on its target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mist_megatron.cli.output import OutputOptions
from mist_megatron.spec.check import either
from mist_megatron.targets.table import EMITTED


def emit(
    plan: Annotated[Path, typer.Argument(help="plan.yaml to write files for.")],
    *,
    target: Annotated[
        str | None,
        typer.Option(help=f"{either(EMITTED)}; the plan's own by default."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace files in a folder that is not empty.")
    ] = False,
    output: OutputOptions,
) -> None:
    """Writes files that Megatron-core or DeepSpeed run as they are."""
    from mist_megatron.ask.emit import emit as emit_plan

    emitted = emit_plan(plan, target=target, out=out, force=force)
    output.finish(emitted.to_dict())
    what = f"{len(emitted.files)} files for {emitted.plan.target}"
    for warning in emitted.warnings:
        output.people.print(f"[yellow]{escape(warning)}[/yellow]", soft_wrap=True)
    output.people.print(f"wrote {what} to {out}: fill in env.sh, then ./train.sh")
