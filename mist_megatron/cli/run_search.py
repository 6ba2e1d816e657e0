"""One search of a command: progress on a terminal, a time limit, worker processes, interrupts."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mist_megatron.ask.found import Found
from mist_megatron.cli.options import TakenJob
from mist_megatron.cli.output import console
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.targets.table import TARGETS

if TYPE_CHECKING:
    from mist_megatron.search.search import NoneFaster, SearchResult, Settings, Status, Watch
    from mist_megatron.search.space import Space
    from mist_megatron.spec.job import Job


def check_numbers(grid: float, top: int, workers: int, time_limit: float | None) -> None:
    if not 0.0 < grid <= 1.0 or abs(1.0 / grid - round(1.0 / grid)) > 1e-9:
        raise InputError(f"--grid is {grid:g}; wanted 1 divided by a whole number, such as 0.125")
    if top < 1 or workers < 1:
        raise InputError(f"--top is {top} and --workers is {workers}; wanted at least 1 of each")
    if time_limit is not None and not 0.0 < time_limit < float("inf"):
        raise InputError(f"--time-limit is {time_limit:g}; wanted more than 0 seconds")


def run_search(taken: TakenJob, space: Space, settings: Settings, how: tuple[int, float | None]) -> Found:
    """Search with progress on a terminal, a time limit, and an interrupt that keeps the best so far, under
    each way of execution that the job leaves open."""
    from mist_megatron.search.execution import execution_choices
    from mist_megatron.search.search import NoneFaster

    workers, time_limit = how
    started = time.monotonic()
    found: list[Found] = []
    none_faster: list[NoneFaster] = []
    refused: list[NoFeasiblePlan] = []
    ways = execution_choices(taken.job, space, settings.limits)

    def how_long() -> tuple[int, float | None]:
        left_s = None if time_limit is None else max(time_limit - (time.monotonic() - started), 0.0)
        return workers, left_s

    for way in ways:
        known = tuple(known for each in found for known in each.result.known)
        below_s = _to_beat(found, settings, way.job, taken.job)
        wanted = replace(settings, limits=way.limits, below_s=below_s, known=known)
        try:
            found.append(_searched(replace(taken, job=way.job), space, wanted, how_long()))
        except NoneFaster as none:
            none_faster.append(none)
        except NoFeasiblePlan as error:
            refused.append(error)
        except InputError:
            if way is ways[0]:
                raise  # else limits leave nothing for this way
        if _interrupted(found, refused):
            break
    stopped = [error.status for error in refused if isinstance(error, _Stopped)]
    if not found:
        if _interrupted(found, refused):
            raise KeyboardInterrupt
        if stopped:
            raise NoFeasiblePlan(
                f"no plan found within --time-limit {time_limit:g} s", details=("try: a longer --time-limit",)
            )
        # What is said where nothing fits is said of the way that keeps most on the host.
        raise refused[-1] if ways[-1].job is taken.job else refused[0]
    return _best_of(found, none_faster, time.monotonic() - started, stopped)


def _interrupted(found: list[Found], refused: list[NoFeasiblePlan]) -> bool:
    """Whether the last search ended by an interrupt, with a plan or without."""
    empty = refused and isinstance(refused[-1], _Stopped) and refused[-1].status.value == "interrupted"
    return bool(empty) or bool(found and found[-1].interrupted)


def _to_beat(found: list[Found], settings: Settings, job: Job, asked: Job) -> float:
    """What other ways have to beat by eq. 1. Where several plans are asked for, they are of one way: the last
    one, which overlaps nothing, is left out where `predict` cannot put its best first either."""
    from mist_megatron.search.near import NEAR

    best_s = min((each.result.objective_s for each in found), default=math.inf)
    if TARGETS[job.target].framework != "megatron" or (settings.top > 1 and job is not asked):
        return math.inf
    return best_s if settings.top == 1 else best_s * (1.0 + NEAR)


class _Stopped(NoFeasiblePlan):
    """One of the searches of a command ended without a plan; what was asked is the command's to say."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"stopped by {status.value}")
        self.status = status


def _best_of(
    found: list[Found], none_faster: list[NoneFaster], seconds: float, stopped: list[Status]
) -> Found:
    """The fastest, which is proved as far as the least proved of them."""
    from mist_megatron.search.search import Status
    from mist_megatron.search.stage_fronts import Tally

    if len(found) == 1 and not none_faster and not stopped:
        return found[0]
    best = min(found, key=lambda each: each.predictions[0].iteration_s)
    results, tally = [each.result for each in found], Tally()
    searches: list[SearchResult | NoneFaster] = [*results, *none_faster]
    for one in searches:
        tally.add(one.tally)
    open_ = [result.status for result in results if result.status is not Status.OPTIMAL] + stopped
    result = replace(
        best.result,
        status=open_[-1] if open_ else Status.OPTIMAL,
        objective_s=min(result.objective_s for result in results),
        bound_s=min(result.bound_s for result in results),
        shapes=sum(one.shapes for one in searches),
        shapes_solved=sum(one.shapes_solved for one in searches),
        tally=tally,
        known=tuple(known for result in results for known in result.known),
    )
    return Found(best.evaluator, result, best.about, seconds)


def _searched(taken: TakenJob, space: Space, settings: Settings, how: tuple[int, float | None]) -> Found:
    import mist_megatron
    from mist_megatron.ask.evaluators import evaluator_for, profile_hash
    from mist_megatron.search.search import StoppedEmpty, search

    workers, time_limit = how
    evaluator, origin = evaluator_for(taken.job)
    started = time.monotonic()
    with _watch(started, time_limit) as watch, _pool(workers) as executor:
        try:
            result = search(evaluator, space, settings, watch, executor, at_once=workers)
        except StoppedEmpty as stopped:
            raise _Stopped(stopped.status) from None
    about = {
        "version": mist_megatron.__version__,
        "profile": origin,
        "profile_hash": profile_hash(taken.job),
        "space": space.name,
        "grid": settings.step,
        "solver": settings.solver,
    }
    return Found(evaluator, result, about, time.monotonic() - started)


QUIET = "ignore:resource_tracker:UserWarning"
"""Semaphores that an interrupt leaves are cleared by their tracker, which would tell users of it."""


@contextmanager
def _pool(workers: int) -> Iterator[Any]:
    if workers == 1:
        yield None
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import active_children, get_context

    if QUIET not in sys.warnoptions:  # what the tracker's process inherits
        sys.warnoptions.append(QUIET)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    before = active_children()
    try:
        # A terminal's interrupt reaches workers too: what ends the search is for this process to say. They
        # inherit the mask, which holds from before their first import on. A task begins a worker each.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(workers):
                pool.submit(int)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # Whoever still solves a shape solves it for nobody.
        for process in active_children():
            if process not in before:
                process.terminate()


@contextmanager
def _watch(started: float, time_limit: float | None) -> Iterator[Watch]:
    """Progress bar on a terminal; the first interrupt ends the search politely, the second at once."""
    from mist_megatron.search.search import Status, Watch

    interrupted: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        interrupted.append(number)
        if len(interrupted) > 1:
            raise KeyboardInterrupt

    def stop() -> Status | None:
        if interrupted:
            return Status.INTERRUPTED
        over = time_limit is not None and time.monotonic() - started > time_limit
        return Status.TIME_LIMIT if over else None

    err = console(stderr=True)
    columns = (TextColumn("searching"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with Progress(
            *columns, TimeElapsedColumn(), console=err, transient=True, disable=not err.is_terminal
        ) as bar:
            task = bar.add_task("", total=None)

            def progress(done: int, total: int, best_s: float) -> None:
                best = f"best {best_s:.4g} s" if best_s < float("inf") else ""
                bar.update(task, completed=done, total=total, description=best)

            yield Watch(progress=progress, stop=stop)
    finally:
        signal.signal(signal.SIGINT, before)
