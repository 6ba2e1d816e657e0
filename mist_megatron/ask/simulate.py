"""One iteration of a plan, played event by event, as it is and as it would be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from mist_megatron.ask.evaluators import SourcedEvaluator, by_kind, kept_programs, learned_of, prices_for
from mist_megatron.ask.plan_words import closed_form_words, lines_repr, title_words
from mist_megatron.ask.plans import PlanLike, load_plan
from mist_megatron.ask.words import texts, with_words
from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.predict import job_of
from mist_megatron.errors import InputError
from mist_megatron.events.chrome_trace import EVENTS_PER_PIECE
from mist_megatron.events.engine import Deadlock, Progress
from mist_megatron.events.iteration import Simulation, with_schedule
from mist_megatron.events.iteration import simulate as play_events
from mist_megatron.events.report import simulation_document
from mist_megatron.events.trace import processes, slice_count, trace_pieces
from mist_megatron.formats.files import write_pieces
from mist_megatron.price.what_if import Scales, parse_scales, scaled_prices
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.schedule import INTERLEAVED, SCHEDULES
from mist_megatron.targets.rules import violations

AS_PRICED = parse_scales(())
RANKS = ("representative", "all")
"""Devices that are told and traced: one per stage, or each."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Simulated:
    """What the events of one iteration say."""

    simulation: Simulation
    """Events, who is busy, memory over time, critical path."""
    before: Simulation | None
    """The plan as it is, where another schedule or other prices were asked for."""
    prices: str
    """Which profile or datasheet the prices are of."""
    violations: tuple[str, ...]
    """Why its target cannot run the plan; empty where it can."""
    every_rank: bool = False
    """Whether `to_dict` and the trace tell each GPU, not one per stage."""
    trace: Path | None = None
    """The Chrome trace, where one was written."""

    @property
    def plan(self) -> Plan:
        """What was played."""
        return self.simulation.plan

    @property
    def iteration_s(self) -> float:
        """Seconds per step."""
        return self.simulation.iteration_s

    def with_trace(self, path: Path, progress: Progress | None = None) -> Simulated:
        """Writes a Chrome trace, one process per stage, or per GPU: all of it or none."""
        played, every_rank = self.simulation, self.every_rank
        total = slice_count(played, processes(played, every_rank=every_rank))

        def reported() -> Iterator[str]:
            for number, piece in enumerate(trace_pieces(played, every_rank=every_rank)):
                if progress is not None:
                    progress(min(number * EVENTS_PER_PIECE, total), total)
                yield piece

        write_pieces(path, reported())
        return replace(self, trace=path)

    def to_dict(self) -> dict[str, Any]:
        """What `simulate --json` prints."""
        return {
            **simulation_document(self.simulation, every_rank=self.every_rank),
            "baseline": self._baseline(),
            "profile": self.prices,
            "violations": list(self.violations),
            "trace": None if self.trace is None else str(self.trace),
        }

    def _baseline(self) -> dict[str, Any] | None:
        before = self.before
        if before is None:
            return None
        return {
            "iteration_s": before.iteration_s,
            "closed_form_s": before.closed_form_s,
            "bubble_fraction": before.bubble_fraction,
            "speedup": before.iteration_s / self.simulation.iteration_s,
        }

    def __repr__(self) -> str:
        played = self.simulation
        lines = [
            f"{title_words(played.plan)}, schedule {played.schedule}",
            f"{played.iteration_s:.4g} s per step by events, idle, mean of the stages, "
            f"{played.bubble_fraction:.1%}",
            f"closed form {closed_form_words(played)}",
        ]
        if self.before is not None:
            faster = self.before.iteration_s / played.iteration_s
            lines.append(
                f"as the plan is {self.before.iteration_s:.4g} s: this is {faster:.3g} times as fast"
            )
        lines += [f"prices: {self.prices}", *(f"cannot run: {rule}" for rule in self.violations)]
        return lines_repr(self, lines)


class SimulateWords(TypedDict, total=False):
    """What if, by the names of the options of `simulate`; what is left out is as the plan has it."""

    schedule: str | None
    """Play another schedule: 1f1b, gpipe, interleaved, zb-h1, zb-2p."""
    vpp: int | None
    """Chunks per stage, with schedule interleaved."""
    scale: str | Sequence[str] | None
    """op=matmul:0.5 halves the time of an operator kind (matmul, attention, memory, adam, host_adam),
    link=inter:2 doubles a link's bandwidth (intra, inter, h2d, d2h); or several of these."""
    trace: str | Path | None
    """Write a Chrome trace, for ui.perfetto.dev, to this file; compressed if it ends in .gz."""
    ranks: str
    """Devices told and traced: representative (one per stage), or all."""


@with_words
def simulate(
    plan: PlanLike, *, progress: Progress | None = None, **words: Unpack[SimulateWords]
) -> Simulated:
    """One iteration played event by event: time, idle time, critical path, memory over time.

    On another schedule or at other prices the plan is also played as it is.
    """
    ranks, schedule, trace = words.get("ranks", RANKS[0]), words.get("schedule"), words.get("trace")
    if ranks not in RANKS:
        raise InputError(f"--ranks: unknown choice {ranks!r}; known: {', '.join(RANKS)}")
    scales = parse_scales(texts(words.get("scale")))
    plan = load_plan(plan)
    changed = rescheduled(plan, schedule, words.get("vpp"))
    evaluator, prices = scaled_evaluator(changed, scales)
    played, before = play(changed, evaluator, schedule, progress), None
    if scales.any or schedule is not None:
        before = play(plan, scaled_evaluator(plan, AS_PRICED)[0], None, progress)
    answer = Simulated(
        simulation=played,
        before=before,
        prices=prices,
        violations=violations(changed),
        every_rank=ranks == "all",
    )
    return answer if trace is None else answer.with_trace(Path(trace))


def play(
    plan: Plan, evaluator: StageEvaluator, schedule: str | None = None, progress: Progress | None = None
) -> Simulation:
    """The events themselves; a schedule that cannot complete is told as wrong input."""
    try:
        return play_events(plan, evaluator, schedule=schedule, progress=progress)
    except Deadlock as stuck:
        raise InputError(f"schedule {schedule or plan.schedule}: {stuck}") from None


def rescheduled(plan: Plan, schedule: str | None, vpp: int | None) -> Plan:
    """What cannot be is told of the options, which are wrong, not of the plan, which is right as it is."""
    if schedule is None:
        if vpp is not None:
            raise InputError(f"--vpp is {vpp} without --schedule; try: --schedule {INTERLEAVED} --vpp {vpp}")
        return plan
    chunked = schedule in SCHEDULES and SCHEDULES[schedule].chunked
    try:
        changed = with_schedule(plan, schedule, vpp if chunked else None)
    except InputError as error:
        words = error.message.removeprefix("plan: ")
        if words.startswith("--"):
            raise
        asked = f"--schedule {schedule}" if vpp is None else f"--schedule {schedule} --vpp {vpp}"
        raise InputError(f"{asked}: {words}", details=error.details) from None
    if vpp is not None and not chunked:
        raise InputError(f"--vpp is {vpp} with --schedule {schedule}; only schedule {INTERLEAVED} has chunks")
    return changed


def scaled_evaluator(plan: Plan, scales: Scales) -> SourcedEvaluator:
    """The evaluator of a plan's job at scaled prices, and where those come from."""

    def build(job: Job) -> SourcedEvaluator:
        prices, origin = prices_for(job)
        scaled, cache = scaled_prices(prices, scales), kept_programs()
        return SourcedEvaluator(make_evaluator(job, scaled, cache=cache, learned=learned_of(job)), origin)

    return by_kind(job_of(plan), build)
