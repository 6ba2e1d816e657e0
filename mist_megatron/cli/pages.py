"""Markdown on terminals: as rich shows it, with tables that lose nothing where the terminal is narrow."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, TableElement

from mist_megatron.cli.output import table


class WholeTable(TableElement):
    """A table of a page, as every other table of these commands."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heads = self.header.row.cells if self.header is not None and self.header.row is not None else []
        rows = self.body.rows if self.body is not None else []
        yield table(
            [head.content.plain for head in heads], [[cell.content.plain for cell in r.cells] for r in rows]
        )


class Page(Markdown):
    """A file of a recipe."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": WholeTable}
