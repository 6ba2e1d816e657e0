"""`convert`: a hand-written DeepSpeed configuration -> a tuned one that takes its place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mist_megatron.cli.options import JobOptions, show_taken
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
        out=out,
        force=force,
        **job.words(),
    )
    output.finish(made.to_dict())
    if not output.json:
        _show(made, output, out)


def _show(made: Converted, output: OutputOptions, out: Path | None) -> None:
    from mist_megatron.ask.convert import gain_words, summary, value_words
    from mist_megatron.frameworks.deepspeed.convert import WRITTEN_OUT

    people = output.people
    show_taken(people, made.defaults)
    rows = [(f.level, f.key, f.message) for f in made.reading.findings]
    if rows:
        people.print(table(("what the file says", "key", ""), rows))
        people.print()
    spelled = [c for c in made.changes if c.reason == WRITTEN_OUT]
    changed = [
        (
            c.key.removeprefix("zero_optimization."),
            value_words(c.old),
            value_words(c.new),
            gain_words(c),
            c.reason,
        )
        for c in made.changes
        if c not in spelled
    ]
    if changed:
        people.print(table(("key", "before", "after", "saves", "reason"), changed, right=("saves",)))
    if spelled:
        keys = ", ".join(f"{c.key.removeprefix('zero_optimization.')} {value_words(c.new)}" for c in spelled)
        people.print(f"{WRITTEN_OUT}: {keys}", markup=False)
    if not made.changes:
        people.print("nothing to change in the file")
    people.print()
    for line in summary(made):
        people.print(line)
    more = ", and what starts it under its patches" if made.patches else ""
    if out is None:
        people.print(
            f"next: the same command with --out DIR writes ds_config.json, the diff and the reasons{more}"
        )
    else:
        people.print(f"wrote ds_config.json, ds_config.diff and CHANGES.md{more} to {out}", markup=False)
        people.print(f"next: your training with {out}/ds_config.json in the old file's place", markup=False)
