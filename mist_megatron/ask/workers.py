"""Where and how long a search works: processes beside this one, and a limit of time."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import active_children, get_context

from mist_megatron.errors import InputError
from mist_megatron.search.search import Status, Watch

MOST_WORKERS = 256
"""Each holds 0.1 GB and more; no machine gains by as many."""

QUIET = "ignore:resource_tracker:UserWarning"
"""Semaphores that an interrupt leaves are cleared by their tracker, which would tell users of it."""


def check_workers(workers: int) -> None:
    """Before any of them begins."""
    if not 1 <= workers <= MOST_WORKERS:
        raise InputError(f"--workers is {workers}; wanted 1 to {MOST_WORKERS}")


@contextmanager
def worker_pool(workers: int) -> Iterator[Executor | None]:
    """So many processes; None for one, which is this one."""
    if workers == 1:
        yield None
        return
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


def within(watch: Watch, limit_s: float | None) -> Watch:
    """The same watch, which also ends what takes longer than this from now on."""
    if limit_s is None:
        return watch
    until = time.monotonic() + limit_s

    def stop() -> Status | None:
        return watch.stop() or (Status.TIME_LIMIT if time.monotonic() > until else None)

    return replace(watch, stop=stop)
