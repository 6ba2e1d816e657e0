"""`tune`: the best plan of a space for a job, with its proof."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mist_megatron.cli.options import JobOptions, TakenJob, read_job
from mist_megatron.cli.output import OutputOptions, console
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.spec.plan import Target
from mist_megatron.spec.target import DEEPSPEED, MEGATRON, capability, model_rules

if TYPE_CHECKING:
    from mist_megatron.cost.evaluate import StageEvaluator
    from mist_megatron.search.space import Space
    from mist_megatron.search.tune import SearchResult, Settings, Status, Watch
    from mist_megatron.spec.job import Job
    from mist_megatron.spec.plan import Plan

PANEL = "Search"
INTERRUPTED = 130
"""Exit code of a search that was interrupted, with what it had: 128 + SIGINT, as shells expect."""


def tune(
    job: JobOptions,
    *,
    space: Annotated[str, typer.Option(help="Named space, see `spaces`.", rich_help_panel=PANEL)] = "full",
    grid: Annotated[
        float, typer.Option(help="Step of the offload fractions.", rich_help_panel=PANEL)
    ] = 0.125,
    fix: Annotated[
        list[str] | None, typer.Option(help="Fix a size, such as tp=2.", rich_help_panel=PANEL)
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(help="Forbid a choice, such as offload.weights.", rich_help_panel=PANEL),
    ] = None,
    most: Annotated[
        list[str] | None, typer.Option("--max", help="Bound a size, such as pp=8.", rich_help_panel=PANEL)
    ] = None,
    top: Annotated[int, typer.Option(help="Distinct plans to report.", rich_help_panel=PANEL)] = 2,
    workers: Annotated[int, typer.Option(help="Processes.", rich_help_panel=PANEL)] = 1,
    solver: Annotated[
        str, typer.Option(help="exact, or milp (PuLP with HiGHS).", rich_help_panel=PANEL)
    ] = "exact",
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds; the best so far after that.", rich_help_panel=PANEL)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for plan.yaml and the target's files; nothing is written without.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace files in a folder that is not empty.", rich_help_panel=PANEL),
    ] = False,
    verify: Annotated[
        str | None,
        typer.Option(help="simulate: rank the best plans anew, by events.", rich_help_panel=PANEL),
    ] = None,
    output: OutputOptions,
) -> None:
    """Finds the fastest plan that fits, proves it, and with --out writes the files that run it."""
    from mist_megatron.cli.tune_verify import check_verify
    from mist_megatron.search.space import parse_limits, space_named
    from mist_megatron.search.tune import Settings

    taken = read_job(job)
    chosen = space_named(space)
    limits = parse_limits(tuple(fix or ()), tuple(forbid or ()), tuple(most or ()))
    check_numbers(grid, top, workers, time_limit)
    if solver not in ("exact", "milp"):
        raise InputError(f"--solver: unknown solver {solver!r}; known: exact, milp")
    _check_out(out, force)
    check_verify(verify)
    settings = Settings(step=grid, top=top, solver="milp" if solver == "milp" else "exact", limits=limits)
    found = run_search(taken, chosen, settings, (workers, time_limit))
    _report(found, taken, (verify, out, force), output)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _report(
    found: Found, taken: TakenJob, how: tuple[str | None, Path | None, bool], output: OutputOptions
) -> None:
    """Verify, write and show what a search answered."""
    from mist_megatron.cli.tune_report import show_result
    from mist_megatron.cli.tune_verify import show_verified, verified

    verify, out, force = how
    checked = None if verify is None else verified(found)
    document = found.document()
    files = _write(found.plans[0], out, force)
    told = {} if checked is None else {"verify": checked.document()}
    others = hand_made(found)
    best_s = found.predictions[0].iteration_s
    gain = {name: {"iteration_s": time_s, "speedup": time_s / best_s} for name, time_s in others.items()}
    output.finish({**document, **told, "gain": gain, "defaults": dict(taken.defaults), "files": files})
    if not output.json:
        show_result(output.people, found, taken.lines(), (out, files), others)
        if checked is not None:
            show_verified(output.people, checked)


HAND_MADE: Mapping[Target, tuple[str, ...]] = {
    "megatron": ("megatron", "megatron-expert"),
    "deepspeed": ("deepspeed",),
}
"""Framework -> spaces of what its users choose by hand."""


def hand_made_spaces(job: Job) -> tuple[str, ...]:
    """Of the framework that a target is or patches; of target mist those of Megatron, or of DeepSpeed where
    Megatron cannot run the model: a gain over what does not run is none."""
    if job.target in DEEPSPEED:
        return HAND_MADE["deepspeed"]
    runs = [framework for framework in HAND_MADE if not model_rules(job.model, framework)]
    return HAND_MADE[runs[0]] if runs else ()


def hand_made(found: Found) -> dict[str, float]:
    """Seconds per step of the best plans of the hand-made spaces, on the same model of costs; nobody
    decouples steps by hand."""
    from mist_megatron.cli.evaluators import evaluator_for
    from mist_megatron.cost.predict import predict
    from mist_megatron.search.space import space_named
    from mist_megatron.search.tune import Settings, Status, plan_of, search

    if found.result.status is not Status.OPTIMAL:
        return {}
    best: dict[str, float] = {}
    job, evaluator = found.evaluator.job, found.evaluator
    if job.execution.decoupled_step:
        execution = replace(job.execution, decoupled_step=None)
        evaluator, _ = evaluator_for(replace(job, execution=execution))
    for name in hand_made_spaces(job):
        if name == found.result.space.name:
            continue
        try:
            result = search(evaluator, space_named(name), Settings())
        except (InputError, NoFeasiblePlan):
            continue
        best[name] = predict(plan_of(evaluator, result.solutions[0]), evaluator).iteration_s
    return best


def check_numbers(grid: float, top: int, workers: int, time_limit: float | None) -> None:
    if not 0.0 < grid <= 1.0 or abs(1.0 / grid - round(1.0 / grid)) > 1e-9:
        raise InputError(f"--grid is {grid:g}; wanted 1 divided by a whole number, such as 0.125")
    if top < 1 or workers < 1:
        raise InputError(f"--top is {top} and --workers is {workers}; wanted at least 1 of each")
    if time_limit is not None and not 0.0 < time_limit < float("inf"):
        raise InputError(f"--time-limit is {time_limit:g}; wanted more than 0 seconds")


def _check_out(out: Path | None, force: bool) -> None:
    """Before the search, not after it: a full folder is known now."""
    if out is None:
        return
    try:
        is_file, is_full = out.exists() and not out.is_dir(), out.is_dir() and any(out.iterdir())
    except OSError as error:
        raise InputError(f"--out {out} cannot be used: {error.strerror or error}") from None
    if is_file:
        raise InputError(f"--out {out} is a file; wanted a folder")
    if is_full and not force:
        raise InputError(f"output folder {out} is not empty", details=("try: --force, or another --out",))


class Found:
    """What a search answered: plans with prediction and provenance, best first."""

    def __init__(
        self, evaluator: StageEvaluator, result: SearchResult, about: dict[str, Any], seconds: float
    ) -> None:
        from mist_megatron.cost.predict import predict
        from mist_megatron.search.tune import plan_of

        self.evaluator = evaluator
        self.result = result
        self.seconds = seconds
        self.about = about
        bare = [plan_of(evaluator, solution) for solution in result.solutions]
        self.predictions = [predict(plan, evaluator) for plan in bare]
        self.plans = [self._told(plan, k) for k, plan in enumerate(bare)]

    def _told(self, plan: Plan, index: int) -> Plan:
        from mist_megatron.cost.predict import prediction_document

        provenance = {**self.about, "rank": index + 1, **self.search_document()}
        return replace(plan, prediction=prediction_document(self.predictions[index]), provenance=provenance)

    @property
    def interrupted(self) -> bool:
        return self.result.status.value == "interrupted"

    def search_document(self) -> dict[str, Any]:
        result = self.result
        return {
            "status": result.status.value,
            "gap": result.gap if result.status.value != "optimal" else 0.0,
            # Eq. 1 of the plan that is best by it: what bound_s bounds. The plan told is the fastest by
            # predict, which is at or a little below eq. 1, so that another may be best by eq. 1.
            "objective_s": result.objective_s,
            "plan_objective_s": result.solutions[0].value_s,
            "bound_s": result.bound_s,
            "configs": result.tally.priced,
            "over_memory": result.tally.over_memory,
            "shapes": result.shapes,
            "milp_solved": result.shapes_solved,
            "seconds": self.seconds,
        }

    def document(self) -> dict[str, Any]:
        from mist_megatron.spec.plan_document import plan_to_mapping

        others = [plan_to_mapping(plan) for plan in self.plans[1:]]
        return {**plan_to_mapping(self.plans[0]), "search": self.search_document(), "others": others}


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


def _write(plan: Plan, out: Path | None, force: bool) -> list[str]:
    """plan.yaml and, where the target has files, those; all or nothing."""
    if out is None:
        return []
    from mist_megatron.emit.write import write_artifacts
    from mist_megatron.spec.plan_document import plan_to_yaml

    texts = {"plan.yaml": plan_to_yaml(plan)}
    if plan.target != "mist":
        from mist_megatron.cli.emit import launch_sources
        from mist_megatron.emit.artifacts import artifacts

        texts = {**artifacts(plan, launch_sources(probe=plan.target in DEEPSPEED)), **texts}
    write_artifacts(out, texts, force=force)
    return sorted(texts)
