"""What commands print: one JSON document on stdout, or text for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mist_megatron.cli.expand import OptionGroup


def console(*, stderr: bool = False) -> Console:
    """A console that colours only terminals, honours NO_COLOR, and is 80 columns wide when piped."""
    return Console(stderr=stderr, highlight=False, emoji=False)


@dataclass(frozen=True)
class OutputOptions(OptionGroup):
    """`--json`, and where the text for people goes."""

    json: Annotated[
        bool,
        typer.Option("--json", help="One JSON document on stdout, nothing else.", rich_help_panel="Output"),
    ] = False
    people: Console = field(init=False, repr=False)
    """stdout, or stderr when stdout belongs to the JSON document."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "people", console(stderr=self.json))

    def finish(self, document: Mapping[str, Any] | Sequence[Any]) -> None:
        """Prints the document when `--json` was given; call it once per command."""
        if self.json:
            emit_json(document)

    def result(self, document: Mapping[str, Any] | Sequence[Any], table: Table) -> None:
        """Either the document or the table: for commands whose text says the same as their JSON."""
        if self.json:
            emit_json(document)
        else:
            self.people.print(table)


def emit_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Writes one JSON document to stdout. NaN and infinity are refused: they are not JSON."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """A plain table; the columns named in `right` hold numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def show_error(message: str, details: Sequence[str] = ()) -> None:
    """`error: what happened`, then the details indented; stderr."""
    out = console(stderr=True)
    out.print(Text("error: ", style="bold red").append(message, style="not bold default"), soft_wrap=True)
    for line in details:
        out.print(Text(f"  {line}"), soft_wrap=True)
