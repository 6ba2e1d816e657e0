"""Progress bars for what takes long, and an interrupt that ends a search politely."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from mist_megatron.cli.output import console

if TYPE_CHECKING:
    from mist_megatron.search.search import Status, Watch

Report = Callable[[int, int], None]
"""Called with what is done and what there is in all."""


@contextmanager
def progress_bar(what: str) -> Iterator[Report]:
    """On stderr, where that is a terminal."""
    with _bar(what, MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """The same where nobody knows how much there is to do."""
    with _bar(what, TimeElapsedColumn()) as bar:
        bar.add_task("", total=None)
        yield


@contextmanager
def search_watch() -> Iterator[Watch]:
    """Progress bar on a terminal; the first interrupt ends the search politely, the second at once."""
    from mist_megatron.search.search import Status, Watch

    interrupted: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        interrupted.append(number)
        if len(interrupted) > 1:
            raise KeyboardInterrupt

    def stop() -> Status | None:
        return Status.INTERRUPTED if interrupted else None

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with _bar(
            "searching", MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        ) as bar:
            task = bar.add_task("", total=None)

            def progress(done: int, total: int, best_s: float) -> None:
                best = f"best {best_s:.4g} s" if best_s < float("inf") else ""
                bar.update(task, completed=done, total=total, description=best)

            told: set[str] = set()

            def tell(words: str) -> None:
                """Once, however many searches say it."""
                if words not in told:
                    bar.console.print(f"note: {words}", markup=False)
                told.add(words)

            yield Watch(progress=progress, stop=stop, tell=tell)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(what: str, *more: ProgressColumn) -> Iterator[Progress]:
    """One that is not shown is not started: rich before 15 ends it with an empty line even then."""
    err = console(stderr=True)
    columns = (TextColumn(what), BarColumn(), *more)
    bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    if not err.is_terminal:
        yield bar
        return
    with bar:
        yield bar
