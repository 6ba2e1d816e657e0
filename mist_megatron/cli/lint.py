"""`lint`: what a Megatron command line or a DeepSpeed JSON would do, before it waits an hour in the queue."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from mist_megatron.cli.options import JobOptions, show_taken
from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.errors import InputError

FILES = (
    "Script or list of Megatron arguments, a DeepSpeed JSON, YAML of NeMo, Megatron-Bridge, Accelerate, "
    "LLaMA-Factory or axolotl, or a folder that emit wrote."
)


def lint(
    file: Annotated[Path, typer.Argument(help=FILES)],
    *,
    checkpointing: Annotated[
        bool,
        typer.Option("--checkpointing/--no-checkpointing", help="DeepSpeed: whether the script recomputes."),
    ] = False,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A variable that a launch script leaves open."),
    ] = None,
    job: JobOptions,
    output: OutputOptions,
) -> None:
    """Says what would be rejected, what silently ignored, whether it fits, and what it would cost.

    Exit code 2 when something would be rejected.
    """
    from mist_megatron.ask.lint import lint as lint_file

    values = _values(given or [])
    linted = lint_file(file, checkpointing=checkpointing, given=values, **job.words())
    output.finish(linted.to_dict())
    if not output.json:
        rows = [(f.level, f.key, f.message) for f in linted.findings]
        output.people.print(table(("", "key", "what"), rows) if rows else linted.nothing_words())
        show_taken(output.people, linted.defaults)
        output.people.print(linted.price_words())
        for line in linted.memory_words():
            output.people.print(line)
    if linted.rejected:
        raise typer.Exit(InputError.exit_code)


def _values(words: list[str]) -> dict[str, str]:
    """NAME=VALUE -> name and value."""
    for word in words:
        if not re.fullmatch(r"\w+=.*", word, re.S):
            raise InputError(f"--set is {word!r}; wanted NAME=VALUE", details=("try: --set TP=8",))
    return dict(word.split("=", 1) for word in words)
