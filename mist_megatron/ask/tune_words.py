"""How plain words become a search: one place for the options of `tune` and the arguments of Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Unpack, get_args

from mist_megatron.ask.fewer_gpus import on_as_many
from mist_megatron.ask.gpu_counts import NumberWords, on_best_number, wanted_number
from mist_megatron.ask.job_words import AskedJob, asked_job
from mist_megatron.ask.links import load_links
from mist_megatron.ask.place import nodes_to_choose
from mist_megatron.ask.tune import SILENT, Means, Tuned
from mist_megatron.ask.tune import tune as search_ways
from mist_megatron.ask.tune_links import Asked, tune_on
from mist_megatron.ask.verify import VERIFIERS
from mist_megatron.ask.words import Texts, texts, with_words
from mist_megatron.ask.workers import check_workers, within, worker_pool
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.bounds import Solver
from mist_megatron.search.layer_rules import Balance, PerLayer
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.search import Settings, StoppedEmpty, Watch
from mist_megatron.search.space import Space, space_named
from mist_megatron.spec import check
from mist_megatron.spec.job import Job
from mist_megatron.spec.links import LinkMatrix

SOLVERS: Mapping[str, Solver] = {"exact": "exact", "milp": "milp"}
PLANS_OF_A_PAGE = 12
"""Plans of which a page shows time against memory."""
AT_ONCE = 8
"""Shapes that an executor of unknown size is given together."""


class TuneWords(NumberWords, total=False):
    """A search by the names of the options of `tune`; what is left out is as it is there."""

    space: str | Space
    """Named space, see `mist-megatron spaces`, or a Space."""
    grid: float
    """Step of the offload fractions."""
    fix: Texts
    """Sizes to fix: tp=2, several of these, or {"tp": 2}."""
    forbid: str | Sequence[str] | None
    """Choices to forbid, such as offload.weights."""
    max: Texts
    """Bounds of sizes: pp=8, several of these, or {"pp": 8}."""
    top: int
    """Distinct plans to report."""
    workers: int
    """Processes; more than 1 needs a script that guards its start by `if __name__ == "__main__"`."""
    solver: str
    """exact, or milp (PuLP with HiGHS)."""
    strategies_per_stage: str
    """Of spaces with a strategy per layer: how many a stage may have; full for any number."""
    balance: str
    """Of such spaces, how layers move between stages: heuristic, or exact."""
    time_limit: float | None
    """Seconds; the best so far after that."""
    out: str | Path | None
    """Folder for plan.yaml and the target's files; nothing is written without."""
    force: bool
    """Replace files in a folder that is not empty."""
    verify: str | None
    """simulate: rank the best plans anew, by events."""
    report: str | Path | None
    """Write a page about the answer here: one HTML file."""
    links: str | Path | None
    """links.yaml of the cluster: choose the nodes and their order together with the plan."""
    avoid: str | Sequence[str] | None
    """Nodes of it that are left out."""
    spare: int | None
    """Choose among so many nodes more than the job has; all that were measured by default."""


AS_USUAL: TuneWords = {
    "space": "full",
    "grid": 0.125,
    "top": 2,
    "workers": 1,
    "solver": "exact",
    "strategies_per_stage": "2",
    "balance": "heuristic",
    "force": False,
}
"""What is left out; the command line has the same."""


@with_words
def tune(
    job: Job | None = None,
    *,
    watch: Watch | None = None,
    executor: Executor | None = None,
    **words: Unpack[TuneWords],
) -> Tuned:
    """The fastest plan that fits, proved; with `out` also the files that run it.

    `tune(model="gpt3-7b", gpus=32)`, or `tune(job)`. A `watch` hears of progress and may end the search,
    which keeps the best so far; `executor` is where shapes are solved, in place of `workers`.
    """
    words = {**AS_USUAL, **words}
    number = wanted_number(words) if job is None else None
    asked = asked_job(job, words) if number is None else None
    nodes = None if asked is None else _nodes(asked.job, words)
    if number is not None and words.get("links") is not None:
        raise InputError("--links is of one number of GPUs; wanted --gpus N beside it")
    space, workers, limit_s = space_of(words["space"]), words["workers"], words.get("time_limit")
    settings, out, verify = _settings(words), _checked_out(words), words.get("verify")
    if verify is not None and verify not in VERIFIERS:
        raise InputError(f"--verify: unknown way {verify!r}; known: {', '.join(VERIFIERS)}")
    watch = watch or SILENT
    report, top, ends = words.get("report"), settings.top, within(watch, limit_s)
    if report is not None:
        settings = replace(settings, top=max(top, PLANS_OF_A_PAGE))

    def search(one: AskedJob, settings: Settings) -> Tuned:
        means = Means(ends, pool, AT_ONCE if executor else workers)
        return replace(_tuned(one.job, space, settings, means, nodes), defaults=one.defaults)

    try:
        with worker_pool(workers) if executor is None else nullcontext(executor) as pool:
            if asked is not None:
                searched = search(asked, settings) if nodes else on_as_many(asked, space, settings, search)
            elif number is not None:
                searched = on_best_number(number, words, settings, search)
    except StoppedEmpty:
        limit = "the time given" if limit_s is None else f"--time-limit {limit_s:g} s"
        raise NoFeasiblePlan(
            f"no plan found within {limit}", details=("try: a longer --time-limit",)
        ) from None
    tuned = searched.first(top)
    tuned = tuned.played() if verify is None else tuned.verified(watch)
    if out is not None:
        tuned = tuned.written(out, force=words["force"])
    if report is not None:
        from mist_megatron.ask.report import report_search

        report_search(tuned, searched, Path(report), within(watch, limit_s))
    return tuned


Nodes = tuple[LinkMatrix, list[str]]
"""That may be chosen, and what to tell of them."""


def _nodes(job: Job, words: TuneWords) -> Nodes | None:
    links = words.get("links")
    if links is None:
        said = next((name for name in ("avoid", "spare") if words.get(name)), None)
        if said is not None:
            raise InputError(f"--{said} is of nodes that --links names; wanted --links FILE beside it")
        return None
    return nodes_to_choose(
        job.cluster, load_links(links), {"avoid": words.get("avoid") or (), "spare": words.get("spare")}
    )


def _tuned(job: Job, space: Space, settings: Settings, means: Means, nodes: Nodes | None) -> Tuned:
    if nodes is not None:
        matrix, notes = nodes
        return tune_on(Asked(job, space, settings), matrix, means, notes)
    watch, executor, at_once = means.watch, means.executor, means.at_once
    return search_ways(
        job, space=space, settings=settings, watch=watch, executor=executor, at_once=at_once
    )  # fmt: skip


def _settings(words: TuneWords) -> Settings:
    limits = parse_limits(texts(words.get("fix")), texts(words.get("forbid")), texts(words.get("max")))
    check_numbers(words["grid"], words["top"], words["workers"], words.get("time_limit"))
    if words["solver"] not in SOLVERS:
        raise InputError(f"--solver: unknown solver {words['solver']!r}; known: {', '.join(SOLVERS)}")
    if words["solver"] == "milp" and find_spec("pulp") is None:
        raise InputError(
            "--solver milp: PuLP is not installed, an extra of this package",
            details=("try: pip install 'mist-megatron[milp]', or --solver exact, which proves the same",),
        )
    return Settings(
        step=words["grid"],
        top=words["top"],
        solver=SOLVERS[words["solver"]],
        limits=limits,
        per_layer=per_layer_of(words["strategies_per_stage"], words["balance"], words["space"]),
    )


def per_layer_of(most: str, balance: str, space: str | Space) -> PerLayer:
    """How strategies per layer are searched."""
    if str(most) != "full" and not (str(most).isascii() and str(most).isdecimal() and int(most) > 0):
        raise InputError(f"--strategies-per-stage is {most}; wanted a number from 1 on, or full")
    check.known("--balance", "way", balance, get_args(Balance))
    if space_of(space).layerwise is None:
        said = {"--strategies-per-stage": str(most) != "2", "--balance exact": balance == "exact"}
        for option in (option for option, asked in said.items() if asked):
            raise InputError(f"{option} is of spaces with a strategy per layer, such as galvatron-bmw")
    way: Balance = "exact" if balance == "exact" else "heuristic"
    return PerLayer(most=None if str(most) == "full" else int(most), balance=way)


def space_of(named: str | Space) -> Space:
    """A space by name, or itself."""
    return named if isinstance(named, Space) else space_named(named)


def check_numbers(grid: float, top: int, workers: int, time_limit: float | None) -> None:
    """What a search is told in figures."""
    if not 0.0 < grid <= 1.0 or abs(1.0 / grid - round(1.0 / grid)) > 1e-9:
        raise InputError(f"--grid is {grid:g}; wanted 1 divided by a whole number, such as 0.125")
    if top < 1:
        raise InputError(f"--top is {top}; wanted at least 1")
    check_workers(workers)
    if time_limit is not None and not 0.0 < time_limit < float("inf"):
        raise InputError(f"--time-limit is {time_limit:g}; wanted more than 0 seconds")


def _checked_out(words: TuneWords) -> Path | None:
    """Before the search, not after it: a full folder is known now."""
    named = words.get("out")
    if named is None:
        return None
    out = Path(named)
    try:
        is_file, is_full = out.exists() and not out.is_dir(), out.is_dir() and any(out.iterdir())
        whole = out.absolute()  # the working folder may have been deleted
    except OSError as error:
        raise InputError(f"--out {out} cannot be used: {error.strerror or error}") from None
    if is_file:
        raise InputError(f"--out {out} is a file; wanted a folder")
    if is_full and not words["force"]:
        raise InputError(f"output folder {out} is not empty", details=("try: --force, or another --out",))
    there = next(folder for folder in (whole, *whole.parents) if folder.exists())
    if not there.is_dir():
        raise InputError(f"--out {out} cannot be made: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--out {out} cannot be written: no permission in {there}")
    return out
