"""One search of a command: progress on a terminal, a time limit, worker processes, interrupts."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mist_megatron.cli.found import Found
from mist_megatron.cli.options import TakenJob
from mist_megatron.cli.output import console
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.spec.target import MEGATRON, capability

if TYPE_CHECKING:
    from mist_megatron.search.space import Space
    from mist_megatron.search.tune import Settings, Status, Watch
    from mist_megatron.spec.job import Job


def check_numbers(grid: float, top: int, workers: int, time_limit: float | None) -> None:
    if not 0.0 < grid <= 1.0 or abs(1.0 / grid - round(1.0 / grid)) > 1e-9:
        raise InputError(f"--grid is {grid:g}; wanted 1 divided by a whole number, such as 0.125")
    if top < 1 or workers < 1:
        raise InputError(f"--top is {top} and --workers is {workers}; wanted at least 1 of each")
    if time_limit is not None and not 0.0 < time_limit < float("inf"):
        raise InputError(f"--time-limit is {time_limit:g}; wanted more than 0 seconds")


def run_search(taken: TakenJob, space: Space, settings: Settings, how: tuple[int, float | None]) -> Found:
    """Search with progress on a terminal, a time limit, and an interrupt that keeps the best so far; where
    steps may be decoupled, with and without."""
    workers, time_limit = how
    started = time.monotonic()
    found: list[Found] = []
    refused: list[NoFeasiblePlan] = []
    for job in _with_steps(taken.job, space, settings):
        left_s = None if time_limit is None else max(time_limit - (time.monotonic() - started), 0.0)
        try:
            found.append(_searched(replace(taken, job=job), space, settings, (workers, left_s)))
        except NoFeasiblePlan as error:
            refused.append(error)
        except InputError:
            if job is taken.job:
                raise  # else limits leave nothing that can be decoupled
        if found and found[-1].interrupted:
            break
    if not found:
        if isinstance(refused[0], _OutOfTime):
            raise NoFeasiblePlan(
                f"no plan found within --time-limit {time_limit:g} s", details=("try: a longer --time-limit",)
            )
        raise refused[0]
    return _best_of(found, stopped=bool(refused) and time_limit is not None)


class _OutOfTime(NoFeasiblePlan):
    """One of the searches of a command ended without a plan; what was asked is the command's to say."""


def _with_steps(job: Job, space: Space, settings: Settings) -> list[Job]:
    """The job as it is, and with decoupled steps where the space leaves them open and the target's patches
    are meant to be searched with them."""
    able = capability(job.target)
    open_ = space.decoupled_step and able.decoupled_step and job.execution.decoupled_step is None
    if not open_ or job.target in MEGATRON or "decoupled_step" in settings.limits.forbidden:
        # A plan for Megatron asks for them by hand. With states on the host they are slower than Megatron's
        # own step, whose copies hide behind the updates; without, what they gain is the gather of weights,
        # which --overlap-param-gather hides without a patch.
        return [job]
    return [job, replace(job, execution=replace(job.execution, decoupled_step=True))]


def _best_of(found: list[Found], *, stopped: bool) -> Found:
    """The fastest, which is proved as far as the least proved of them."""
    from mist_megatron.search.frontier import Tally
    from mist_megatron.search.tune import Status

    if len(found) == 1 and not stopped:
        return found[0]
    best = min(found, key=lambda each: each.predictions[0].iteration_s)
    results, tally = [each.result for each in found], Tally()
    for result in results:
        tally.add(result.tally)
    open_ = [result.status for result in results if result.status is not Status.OPTIMAL]
    result = replace(
        best.result,
        status=open_[-1] if open_ else Status.TIME_LIMIT if stopped else Status.OPTIMAL,
        objective_s=min(result.objective_s for result in results),
        bound_s=min(result.bound_s for result in results),
        shapes=sum(result.shapes for result in results),
        shapes_solved=sum(result.shapes_solved for result in results),
        tally=tally,
    )
    return Found(best.evaluator, result, best.about, sum(each.seconds for each in found))


def _searched(taken: TakenJob, space: Space, settings: Settings, how: tuple[int, float | None]) -> Found:
    import mist_megatron
    from mist_megatron.cli.evaluators import evaluator_for, profile_hash
    from mist_megatron.search.tune import Status, StoppedEmpty, search

    workers, time_limit = how
    evaluator, origin = evaluator_for(taken.job)
    started = time.monotonic()
    with _watch(started, time_limit) as watch, _pool(workers) as executor:
        try:
            result = search(evaluator, space, settings, watch, executor, at_once=workers)
        except StoppedEmpty as stopped:
            if stopped.status is Status.INTERRUPTED:
                raise KeyboardInterrupt from None
            raise _OutOfTime("the time limit came before any plan") from None
    about = {
        "version": mist_megatron.__version__,
        "profile": origin,
        "profile_hash": profile_hash(taken.job),
        "space": space.name,
        "grid": settings.step,
        "solver": settings.solver,
    }
    return Found(evaluator, result, about, time.monotonic() - started)


@contextmanager
def _pool(workers: int) -> Iterator[Any]:
    if workers == 1:
        yield None
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import active_children, get_context

    # A terminal's interrupt reaches workers too: what ends the search is for this process to say.
    context = get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    )
    before = active_children()
    try:
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
    from mist_megatron.search.tune import Status, Watch

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
