"""A progress bar for runs that take long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mist_megatron.cli.output import console

Report = Callable[[int, int], None]
"""Called with what is done and what there is in all."""


@contextmanager
def progress_bar(what: str) -> Iterator[Report]:
    """On stderr, where that is a terminal."""
    err = console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
