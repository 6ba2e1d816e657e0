"""How plain words become a search: one place for the options of `tune` and the arguments of Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from mist_megatron.ask.job_words import AskedJob, JobWords, texts
from mist_megatron.ask.tune import SILENT, Tuned, tune
from mist_megatron.ask.verify import VERIFIERS
from mist_megatron.ask.workers import within, worker_pool
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.events.engine import Progress
from mist_megatron.search.bounds import Solver
from mist_megatron.search.search import Settings, StoppedEmpty, Watch
from mist_megatron.search.space import Space, parse_limits, space_named

SOLVERS: Mapping[str, Solver] = {"exact": "exact", "milp": "milp"}
Sizes = str | Sequence[str] | Mapping[str, str | float] | None


class TuneWords(JobWords, total=False):
    """A search by the names of the options of `tune`; what is left out is as it is there."""

    space: str | Space
    """Named space, see `mist-megatron spaces`, or a Space."""
    grid: float
    """Step of the offload fractions."""
    fix: Sizes
    """Sizes to fix: tp=2, several of these, or {"tp": 2}."""
    forbid: str | Sequence[str] | None
    """Choices to forbid, such as offload.weights."""
    max: Sizes
    """Bounds of sizes: pp=8, several of these, or {"pp": 8}."""
    top: int
    """Distinct plans to report."""
    workers: int
    """Processes; more than 1 needs a script that guards its start by `if __name__ == "__main__"`."""
    solver: str
    """exact, or milp (PuLP with HiGHS)."""
    time_limit: float | None
    """Seconds; the best so far after that."""
    out: str | Path | None
    """Folder for plan.yaml and the target's files; nothing is written without."""
    force: bool
    """Replace files in a folder that is not empty."""
    verify: str | None
    """simulate: rank the best plans anew, by events."""


AS_USUAL: TuneWords = {
    "space": "full",
    "grid": 0.125,
    "top": 2,
    "workers": 1,
    "solver": "exact",
    "force": False,
}
"""What is left out; the command line has the same."""


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """A search, checked before it begins."""

    asked: AskedJob
    space: Space
    settings: Settings
    workers: int
    time_limit: float | None
    out: Path | None
    force: bool
    verify: bool

    def search(self, watch: Watch = SILENT, executor: Executor | None = None) -> Tuned:
        """The search itself; an interrupt that the watch tells keeps the best so far."""
        limited = within(watch, self.time_limit)
        try:
            with worker_pool(self.workers) if executor is None else nullcontext(executor) as pool:
                at_once = self.workers if executor is None else 8
                tuned = tune(
                    self.asked.job,
                    space=self.space,
                    settings=self.settings,
                    watch=limited,
                    executor=pool,
                    at_once=at_once,
                )
        except StoppedEmpty:
            limit = f"--time-limit {self.time_limit:g} s" if self.time_limit is not None else "the time given"
            raise NoFeasiblePlan(
                f"no plan found within {limit}", details=("try: a longer --time-limit",)
            ) from None
        return replace(tuned, defaults=self.asked.defaults)

    def finish(self, tuned: Tuned, progress: Progress | None = None) -> Tuned:
        """Verified and written, where that was asked for."""
        if self.verify:
            tuned = tuned.verified(progress)
        return tuned if self.out is None else tuned.written(self.out, force=self.force)


def tune_request(asked: AskedJob, words: TuneWords) -> TuneRequest:
    """What the words ask for; every one that is wrong is told before anything is searched."""
    words = {**AS_USUAL, **words}
    space = space_of(words["space"])
    limits = parse_limits(texts(words.get("fix")), texts(words.get("forbid")), texts(words.get("max")))
    grid, top, workers, solver = words["grid"], words["top"], words["workers"], words["solver"]
    time_limit = words.get("time_limit")
    check_numbers(grid, top, workers, time_limit)
    if solver not in SOLVERS:
        raise InputError(f"--solver: unknown solver {solver!r}; known: {', '.join(SOLVERS)}")
    named, force, verify = words.get("out"), words["force"], words.get("verify")
    out = None if named is None else Path(named)
    if out is not None:
        _check_out(out, force=force)
    if verify is not None and verify not in VERIFIERS:
        raise InputError(f"--verify: unknown way {verify!r}; known: {', '.join(VERIFIERS)}")
    return TuneRequest(
        asked=asked,
        space=space,
        settings=Settings(step=grid, top=top, solver=SOLVERS[solver], limits=limits),
        workers=workers,
        time_limit=time_limit,
        out=out,
        force=force,
        verify=verify is not None,
    )


def space_of(named: str | Space) -> Space:
    """A space by name, or itself."""
    return named if isinstance(named, Space) else space_named(named)


def check_numbers(grid: float, top: int, workers: int, time_limit: float | None) -> None:
    """What a search is told in figures."""
    if not 0.0 < grid <= 1.0 or abs(1.0 / grid - round(1.0 / grid)) > 1e-9:
        raise InputError(f"--grid is {grid:g}; wanted 1 divided by a whole number, such as 0.125")
    if top < 1 or workers < 1:
        raise InputError(f"--top is {top} and --workers is {workers}; wanted at least 1 of each")
    if time_limit is not None and not 0.0 < time_limit < float("inf"):
        raise InputError(f"--time-limit is {time_limit:g}; wanted more than 0 seconds")


def _check_out(out: Path, *, force: bool) -> None:
    """Before the search, not after it: a full folder is known now."""
    try:
        is_file, is_full = out.exists() and not out.is_dir(), out.is_dir() and any(out.iterdir())
    except OSError as error:
        raise InputError(f"--out {out} cannot be used: {error.strerror or error}") from None
    if is_file:
        raise InputError(f"--out {out} is a file; wanted a folder")
    if is_full and not force:
        raise InputError(f"output folder {out} is not empty", details=("try: --force, or another --out",))
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise InputError(f"--out {out} cannot be made: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--out {out} cannot be written: no permission in {there}")
