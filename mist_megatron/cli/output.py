"""What commands print: one JSON document on stdout, or text for people."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from mist_megatron.cli.expand import OptionGroup
from mist_megatron.errors import visible

MOST_FOLDED = 44
"""A longer word (a path, say) may be cut by a column; of shorter ones a table keeps every word whole."""

PIPED = 80
"""Columns where nobody says how many there are."""

SENTENCE = 20
"""Least width of a column that wraps its cells: below it a block reads better than a ladder of words."""

HANGING = "    "
"""Before the rest of a line that had to be broken."""


class WholeWords(Console):
    """A console that wraps between words only: a path that was cut in two cannot be copied. What commands a
    terminal is written as escapes, whichever file it came from: colours are this program's alone."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(_tame(text), style)

    def print(self, *objects: Any, **settings: Any) -> None:
        if len(objects) != 1 or not isinstance(objects[0], (str, Text)) or self._left_whole(settings):
            super().print(*objects, **{"crop": False, **settings})
            return
        markup = settings.pop("markup", None)
        (said,) = objects
        text = self.render_str(said, markup=markup) if isinstance(said, str) else said
        for line in text.split(allow_blank=True):
            for part in line.divide(_wrapped_at(line.plain, self.width)):
                part.rstrip()
                super().print(part, **{**settings, "soft_wrap": True})

    def on_broken_pipe(self) -> None:
        """Nobody waits for the rest of an answer; what is told beside it goes unheard, the work goes on."""
        if not self.stderr:
            super().on_broken_pipe()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def _left_whole(self, settings: Mapping[str, Any]) -> bool:
        """Sentences that pipes get in one line, for other programs; no terminal wraps between words."""
        return bool(settings.get("soft_wrap")) and not self.is_terminal and self.width >= PIPED


def _tame(text: str) -> str:
    return "\n".join(map(visible, text.split("\n")))


def _wrapped_at(text: str, width: int) -> list[int]:
    """Where to begin new lines: before the first word that does not fit; a longer word than a line stays."""
    places: list[int] = []
    used = 0
    for word in re.finditer(r"\S+\s*|^\s+", text):
        needed = cell_len(word.group().rstrip())
        if used and needed and used + needed > width:
            places.append(word.start())
            used = 0
        used += cell_len(word.group())
    return places


class PlainTable(Table):
    """A table that becomes one block per row where the terminal is too narrow for its words."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [[str(cell) for cell in column.cells] for column in self.columns]
        heads = [str(column.header) for column in self.columns]
        least = [
            _least_width((head, *texts), whole=column.no_wrap)
            for column, head, texts in zip(self.columns, heads, cells, strict=True)
        ]
        room = options.max_width - (2 * len(least) - 1)
        if sum(least) <= room:
            most = [_line_width((head, *texts)) for head, texts in zip(heads, cells, strict=True)]
            for column, width in zip(self.columns, _widths(least, most, room), strict=True):
                column.width = width
            yield from super().__rich_console__(console, options)
            return
        for row in zip(*cells, strict=True):
            yield from _block(heads, row, options.max_width)


def _least_width(texts: Sequence[str], *, whole: bool) -> int:
    """Of a column that cuts no word, or where cells stand whole, no cell; sentences get room for some."""
    if whole:
        return max(map(cell_len, texts))
    longest = max((cell_len(word) for text in texts for word in text.split()), default=0)
    return max(min(longest, MOST_FOLDED), min(_line_width(texts), SENTENCE))


def _line_width(texts: Sequence[str]) -> int:
    """Of a column that wraps nothing."""
    return max(max(map(cell_len, text.split("\n"))) for text in texts)


def _widths(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Columns that need little more get all of it; the others share what is left."""
    widths, left = list(least), room - sum(least)
    wanting = sorted(range(len(least)), key=lambda index: most[index] - least[index])
    for position, index in enumerate(wanting):
        more = min(max(most[index] - least[index], 0), left // (len(wanting) - position))
        widths[index] += more
        left -= more
    return widths


def _block(heads: Sequence[str], row: Sequence[str], width: int) -> RenderResult:
    """One row as `head: cell` pairs, filled into lines; whatever is longer than a line begins its own."""
    lines: list[str] = []
    for head, cell in zip(heads, row, strict=True):
        text = " ".join(cell.split())
        if not text:
            continue
        pair = f"{head}: {text}" if head else text
        if lines and cell_len(lines[-1]) + 2 + cell_len(pair) <= width:
            lines[-1] += f"  {pair}"
        else:
            lines.append(f"  {pair}" if lines else pair)
    for line in lines:
        cuts = (
            [0, *_wrapped_at(line, width - len(HANGING)), len(line)] if cell_len(line) > width else [0, None]
        )
        for start, end in pairwise(cuts):
            hung = HANGING if start else ""
            yield Text(hung + line[start:end].rstrip(), no_wrap=True, overflow="ignore")


def console(*, stderr: bool = False) -> Console:
    """A console that colours only terminals, honours NO_COLOR, and is 80 columns wide when piped."""
    return WholeWords(stderr=stderr, highlight=False, emoji=False)


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
    made = PlainTable(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(_tame(cell)) for cell in row))
    return made


def show_error(message: str, details: Sequence[str] = ()) -> None:
    """`error: what happened`, then the details indented; stderr."""
    out = console(stderr=True)
    out.print(Text("error: ", style="bold red").append(message, style="not bold default"), soft_wrap=True)
    for line in details:
        out.print(Text(f"  {line}"), soft_wrap=True)
