"""`--help` on terminals that are too narrow for boxes: rich cuts option names there, these pages cut none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

BOXED_FROM = 120
"""Columns from which no command's boxes cut a name (measured: `convert` still cuts one at 100)."""
WIDEST, NARROWEST = 100, 20


def columns() -> int:
    """Of the terminal, or what COLUMNS says."""
    return shutil.get_terminal_size().columns


def write_page(command: Any, ctx: Any, formatter: Any) -> None:
    """Usage, summary, and one section per panel, wrapped between words."""
    formatter.width = max(min(columns(), WIDEST) - 1, NARROWEST)
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    sections: dict[str, list[tuple[str, str]]] = {}
    for panel, name, text in (*_options(command, ctx), *_commands(command, ctx)):
        sections.setdefault(panel, []).append((name, text))
    for panel, rows in sections.items():
        with formatter.section(panel):
            formatter.write_dl(rows, col_max=max(formatter.width // 3, 8))


def _options(command: Any, ctx: Any) -> Iterator[tuple[str, str, str]]:
    for option in command.get_params(ctx):
        record = option.get_help_record(ctx)
        if record is not None:
            default = "Arguments" if option.param_type_name == "argument" else "Options"
            yield (getattr(option, "rich_help_panel", None) or default, *record)


def _commands(command: Any, ctx: Any) -> Iterator[tuple[str, str, str]]:
    if not isinstance(command, TyperGroup):
        return
    for name in command.list_commands(ctx):
        sub = command.get_command(ctx, name)
        if sub is not None and not sub.hidden:
            panel = getattr(sub, "rich_help_panel", None) or "Commands"
            yield panel, name, sub.get_short_help_str(limit=200)


class _Paged:
    """What is added to a command or group of typer: help that fits its terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if columns() < BOXED_FROM:
            write_page(self, ctx, formatter)
        else:
            super().format_help(ctx, formatter)  # type: ignore[misc]


class PagedCommand(_Paged, TyperCommand):
    """A command whose help fits its terminal."""


class PagedGroup(_Paged, TyperGroup):
    """The same for commands that have subcommands."""
