"""`simulate PLAN`: one iteration of a plan, played event by event."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from mist_megatron.cli.output import OutputOptions
from mist_megatron.cli.output_file import check_output_file
from mist_megatron.cli.progress import progress_bar
from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from mist_megatron.cost.evaluate import StageEvaluator
    from mist_megatron.events.iteration import Simulation
    from mist_megatron.price.what_if import Scales
    from mist_megatron.spec.plan import Plan

RANKS = ("representative", "all")
SCALE = (
    "What if: op=matmul:0.5 halves the time of an operator kind (matmul, attention, memory, adam, "
    "host_adam), link=inter:2 doubles a link's bandwidth (intra, inter, h2d, d2h); may be repeated."
)
TRACE = "Write a Chrome trace, for ui.perfetto.dev, to this file; compressed if it ends in .gz."


def simulate(
    plan: Annotated[Path, typer.Argument(help="plan.yaml, or its JSON form.")],
    *,
    schedule: Annotated[
        str | None,
        typer.Option(help="Play another schedule: 1f1b, gpipe, interleaved, zb-h1, zb-2p."),
    ] = None,
    vpp: Annotated[int | None, typer.Option(help="Chunks per stage, with --schedule interleaved.")] = None,
    scale: Annotated[list[str] | None, typer.Option(help=SCALE)] = None,
    trace: Annotated[Path | None, typer.Option(readable=False, help=TRACE)] = None,
    ranks: Annotated[
        str, typer.Option(help="Devices told and traced: representative (one per stage), or all.")
    ] = "representative",
    output: OutputOptions,
) -> None:
    """Plays one iteration event by event: time, bubble, who is busy, critical path, memory over time."""
    from mist_megatron.cli.simulate_report import show_simulation
    from mist_megatron.cli.simulate_trace import write_trace
    from mist_megatron.events.report import simulation_document
    from mist_megatron.formats.files import load_plan
    from mist_megatron.price.what_if import parse_scales
    from mist_megatron.targets.rules import violations

    if ranks not in RANKS:
        raise InputError(f"--ranks: unknown choice {ranks!r}; known: {', '.join(RANKS)}")
    scales = parse_scales(tuple(scale or ()))
    read = load_plan(plan)
    if trace is not None:
        check_output_file("--trace", trace, read=(plan,), example="trace.json")
    found, origin = played(read, scales, (schedule, vpp))
    changed = scales.any or schedule is not None
    before = played(read, parse_scales(()), (None, None))[0] if changed else None
    broken = list(violations(found.plan))
    if trace is not None:
        with progress_bar("writing the trace") as progress:
            write_trace(trace, found, every_rank=ranks == "all", progress=progress)
    output.finish(
        {
            **simulation_document(found, every_rank=ranks == "all"),
            "baseline": None if before is None else _baseline(before, found),
            "profile": origin,
            "violations": broken,
            "trace": None if trace is None else str(trace),
        }
    )
    if output.json:
        return
    show_simulation(output.people, found, before, origin)
    last = [f"cannot run on {found.plan.target}: {rule}" for rule in broken]
    last += [] if trace is None else [f"wrote {escape(str(trace))}, for ui.perfetto.dev"]
    for line in last:
        output.people.print(line, soft_wrap=True)


def played(plan: Plan, scales: Scales, how: tuple[str | None, int | None]) -> tuple[Simulation, str]:
    """A plan simulated, on another schedule or at other prices if wanted, and where its prices come from."""
    changed = rescheduled(plan, *how)
    evaluator, origin = scaled_evaluator(changed, scales)
    return simulated(changed, evaluator, how[0]), origin


def rescheduled(plan: Plan, schedule: str | None, vpp: int | None) -> Plan:
    """What cannot be is told of the options, which are wrong, not of the plan, which is right as it is."""
    from mist_megatron.events.iteration import with_schedule

    if schedule is None:
        if vpp is not None:
            raise InputError(f"--vpp is {vpp} without --schedule; try: --schedule interleaved --vpp {vpp}")
        return plan
    try:
        changed = with_schedule(plan, schedule, vpp if schedule == "interleaved" else None)
    except InputError as error:
        words = error.message.removeprefix("plan: ")
        if words.startswith("--"):
            raise
        asked = f"--schedule {schedule}" if vpp is None else f"--schedule {schedule} --vpp {vpp}"
        raise InputError(f"{asked}: {words}", details=error.details) from None
    if vpp is not None and schedule != "interleaved":
        raise InputError(f"--vpp is {vpp} with --schedule {schedule}; only schedule interleaved has chunks")
    return changed


def scaled_evaluator(plan: Plan, scales: Scales) -> tuple[StageEvaluator, str]:
    """The evaluator of a plan's job at scaled prices."""
    from mist_megatron.ask.evaluators import kept_programs, prices_for
    from mist_megatron.cost.evaluate import make_evaluator
    from mist_megatron.cost.predict import job_of
    from mist_megatron.price.what_if import scaled_prices

    job = job_of(plan)
    prices, origin = prices_for(job)
    return make_evaluator(job, scaled_prices(prices, scales), cache=kept_programs()), origin


def simulated(plan: Plan, evaluator: StageEvaluator, schedule: str | None = None) -> Simulation:
    """With a progress bar on a terminal; a schedule that cannot complete is told as wrong input."""
    from mist_megatron.events.engine import Deadlock
    from mist_megatron.events.iteration import simulate as play

    with progress_bar("simulating") as progress:
        try:
            return play(plan, evaluator, schedule=schedule, progress=progress)
        except Deadlock as stuck:
            raise InputError(f"schedule {schedule or plan.schedule}: {stuck}") from None


def _baseline(before: Simulation, after: Simulation) -> dict[str, Any]:
    return {
        "iteration_s": before.iteration_s,
        "closed_form_s": before.closed_form_s,
        "bubble_fraction": before.bubble_fraction,
        "speedup": before.iteration_s / after.iteration_s,
    }
