"""`tune`: the best plan of a space for a job, with its proof."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mist_megatron.ask.baselines import best_by_hand
from mist_megatron.cli.options import JobOptions, TakenJob, read_job
from mist_megatron.cli.output import OutputOptions
from mist_megatron.cli.run_search import check_numbers, run_search
from mist_megatron.errors import INTERRUPTED, InputError
from mist_megatron.targets.table import TARGETS

if TYPE_CHECKING:
    from mist_megatron.ask.found import Found
    from mist_megatron.spec.plan import Plan

PANEL = "Search"


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
    from mist_megatron.search.search import Settings
    from mist_megatron.search.space import parse_limits, space_named

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
        raise typer.Exit(INTERRUPTED)  # with what it had


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
    others = best_by_hand(found, taken.job)
    best_s = found.predictions[0].iteration_s
    gain = {name: {"iteration_s": time_s, "speedup": time_s / best_s} for name, time_s in others.items()}
    output.finish({**document, **told, "gain": gain, "defaults": dict(taken.defaults), "files": files})
    if not output.json:
        show_result(output.people, found, taken.lines(), (out, files), others)
        if checked is not None:
            show_verified(output.people, checked)


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
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise InputError(f"--out {out} cannot be made: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--out {out} cannot be written: no permission in {there}")


def _write(plan: Plan, out: Path | None, force: bool) -> list[str]:
    """plan.yaml and, where the target has files, those; all or nothing."""
    if out is None:
        return []
    from mist_megatron.formats.files import write_artifacts
    from mist_megatron.formats.plan_yaml import plan_to_yaml

    texts = {"plan.yaml": plan_to_yaml(plan)}
    if plan.target != "mist":
        from mist_megatron.cli.emit import launch_sources
        from mist_megatron.frameworks.folder import artifacts

        probe = TARGETS[plan.target].framework == "deepspeed"
        texts = {**artifacts(plan, launch_sources(probe=probe)), **texts}
    write_artifacts(out, texts, force=force)
    return sorted(texts)
