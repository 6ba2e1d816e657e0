"""`convert`: a hand-written DeepSpeed configuration -> a tuned one that takes its place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mist_megatron.cli.options import JobOptions, assumed
from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.cli.progress import search_watch

if TYPE_CHECKING:
    from mist_megatron.ask.convert import Converted


def convert(
    ds_config: Annotated[Path, typer.Argument(help="DeepSpeed JSON, as hand-written as it is.")],
    *,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Key to leave as it is, such as zero_optimization.reduce_bucket_size; may be repeated."
        ),
    ] = None,
    checkpointing: Annotated[
        bool,
        typer.Option(
            "--checkpointing/--no-checkpointing", help="Whether your script recomputes activations now."
        ),
    ] = False,
    fix_checkpointing: Annotated[
        bool, typer.Option("--fix-checkpointing", help="Do not propose to switch recomputation.")
    ] = False,
    micro_batch: Annotated[
        int | None,
        typer.Option(help='Sequences per GPU and pass that your trainer puts in the place of "auto".', min=1),
    ] = None,
    grad_accum: Annotated[
        int | None, typer.Option(help="The same for accumulation steps; --global-batch for both.", min=1)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the new file, the diff and the reasons.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files in a folder that is not empty.")
    ] = False,
    job: JobOptions,
    output: OutputOptions,
) -> None:
    """Explains a DeepSpeed configuration, tunes it, and gives a reason for every change."""
    from mist_megatron.ask.convert import convert as convert_file

    made = convert_file(
        ds_config,
        watching=search_watch,
        keep=keep,
        checkpointing=checkpointing,
        fix_checkpointing=fix_checkpointing,
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        out=out,
        force=force,
        **job.words(),
    )
    output.finish(made.to_dict())
    if not output.json:
        _show(made, output, out)


def _show(made: Converted, output: OutputOptions, out: Path | None) -> None:
    from mist_megatron.ask.convert import gain_words, summary, value_words

    people = output.people
    for line in assumed(made.defaults):
        people.print(f"assumed: {line}")
    rows = [(f.level, f.key, f.message) for f in made.reading.findings]
    if rows:
        people.print(table(("what the file says", "key", ""), rows))
        people.print()
    changed = [(c.key, value_words(c.old), value_words(c.new), gain_words(c), c.reason) for c in made.changes]
    if changed:
        people.print(table(("key", "before", "after", "saves", "reason"), changed, right=("saves",)))
    else:
        people.print("nothing to change in the file")
    people.print()
    for line in summary(made):
        people.print(line)
    if out is None:
        people.print(
            "nothing was written; --out FOLDER writes ds_config.json, the diff and the reasons"
            f"{', and what starts it under its patches' if made.patches else ''}",
        )
    else:
        more = ", and what starts it under its patches," if made.patches else ""
        people.print(f"wrote ds_config.json, ds_config.diff and CHANGES.md{more} to {out}")
