"""Recorded steps: where their time goes, and what they would be if something were different."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.plan_words import columns, lines_repr
from mist_megatron.ask.plans import PlanLike, load_plan
from mist_megatron.ask.recalibrate import Recalibrated, recalibrated
from mist_megatron.ask.replay_questions import NUMBERS, Questions, asked
from mist_megatron.ask.words import texts, with_words
from mist_megatron.cost.predict import job_of
from mist_megatron.cost.predict import predict as predict_plan
from mist_megatron.errors import InputError
from mist_megatron.formats.files import files_below, open_packed, write_pieces
from mist_megatron.recorded.against import Compared, compared, require_shape
from mist_megatron.recorded.engine import Played, play
from mist_megatron.recorded.recording import WAITS, Recording, record
from mist_megatron.recorded.report import (
    Page,
    links_document,
    meetings_document,
    page_document,
    page_of,
    retimed_document,
)
from mist_megatron.recorded.steps import odd_words, steps_of
from mist_megatron.recorded.timeline import timeline_pieces
from mist_megatron.recorded.usage import windows
from mist_megatron.recorded.what_if import Retimed, parse_scale
from mist_megatron.spec.plan import Plan
from mist_megatron.traces.columns import Kind, Trace
from mist_megatron.traces.reader import HOW, Reading, read_trace

ENDINGS = (".json", ".json.gz")
LEAST_MOVE = 0.02
"""Of a whole recording that is worth a word."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Replayed:
    """A recording, played as it was and, where something is asked, as it would be."""

    recording: Recording
    recorded: Page
    """Played unchanged."""
    changed: Page | None
    """With what was asked for; None where nothing was."""
    retimed: tuple[Retimed, ...]
    """What has another time in it, and from where."""
    notes: tuple[str, ...]
    """What the traces leave open."""
    played: Played
    compared: tuple[Compared, ...] = ()
    """Each rank's step beside the prediction of a plan, where one was given."""
    recalibrated: Recalibrated | None = None
    """A new profile with what was measured, where one was asked for."""
    trace: Path | None = None
    """The timeline, where one was written."""

    @property
    def step_s(self) -> float:
        """Seconds of the step that is told, changed where something was asked."""
        return (self.changed or self.recorded).step_s

    def with_trace(self, path: Path) -> Replayed:
        """Writes the replayed timeline as a Chrome trace, which `replay` reads again."""
        write_pieces(path, timeline_pieces(self.recording, self.played))
        return replace(self, trace=path)

    def to_dict(self) -> dict[str, Any]:
        """What `replay --json` prints."""
        return {
            "traces": [trace.where for trace in self.recording.traces],
            "recorded": page_document(self.recorded),
            "what_if": None if self.changed is None else page_document(self.changed),
            "retimed": retimed_document(self.retimed, self.recording),
            "against": [asdict(one) for one in self.compared],
            "recalibrated": self._recalibrated(),
            "links": links_document(self.recording),
            "meetings": meetings_document(self.recording),
            "clock_shifts_s": [shift / 1e9 for shift in self.recording.shifts_ns],
            "notes": list(self.notes),
            "trace": None if self.trace is None else str(self.trace),
        }

    def _recalibrated(self) -> dict[str, Any] | None:
        made = self.recalibrated
        return None if made is None else {**asdict(made), "profile": str(made.profile)}

    def __repr__(self) -> str:
        page = self.changed or self.recorded
        ranks = len(page.ranks)
        lines = [f"{ranks} rank{'s' if ranks > 1 else ''}, {step_words(page)}: {page.step_s * 1e3:.4g} ms"]
        if self.changed is not None:
            lines.append(f"as recorded {self.recorded.step_s * 1e3:.4g} ms")
        rows: list[tuple[str, ...]] = [("rank", "compute", "communication", "both", "host", "idle")]
        for one in page.ranks[:16]:
            usage = one.usage
            parts = (
                usage.exposed_compute_s, usage.exposed_communication_s, usage.overlapped_s, usage.host_s,
                usage.idle_s,
            )  # fmt: skip
            rows.append(
                (str(one.rank), *(f"{part / one.window_s:.1%}" if one.window_s else "-" for part in parts))
            )
        return lines_repr(self, [*lines, *columns(rows)])


def step_words(page: Page) -> str:
    """What of the recording is told."""
    return "the whole recording" if page.step is None else f"step {page.step}"


class ReplayWords(TypedDict, total=False):
    """How traces are read and what is asked of them, by the names of the options of `replay`."""

    step: int | None
    """Play this step alone, by the number of its ProfilerStep; without it everything is played and a typical
    step told."""
    waits: str
    """known: edges that the trace proves; inferred: guesses for kernels that start late, too."""
    scale: str | Sequence[str] | None
    """kernel=REGEX:F or op=REGEX:F: what matches takes F times as long; or several of these."""
    against: PlanLike | None
    """A plan that was run: its prediction beside what was measured, term by term."""
    recalibrate: str | Path | None
    """With `against`: write a profile (.yaml) with what the traces measured, and tell what it changes."""
    gpu: str | None
    """What every kernel would take on another GPU: a name of the catalogue, or a profile by name or path."""
    dp: int | None
    """So many data-parallel ranks, where all collectives are of groups of one size."""
    layers: int | None
    """So many layers, where as many equal ones are found in the recording as repeat in it."""
    hidden: int | None
    """So wide tokens: heads grow with them, the size of a head and the MLP's inner width stay."""
    ffn: int | None
    """So wide inside the MLP."""
    tp: int | None
    """So many tensor-parallel ranks; dp and pp stay, and with them the number of GPUs changes."""
    micro_batches: int | None
    """So many micro-batches a step."""
    pp: int | None
    """So many pipeline stages: the recorded passes in 1F1B's order, their layers shared out evenly."""
    partial: bool
    """Use what stands before the place where a file is cut off."""
    trace: str | Path | None
    """Write the replayed timeline, as a Chrome trace, to this file; compressed if it ends in .gz."""


@with_words
def replay(traces: str | Path | Sequence[str | Path], **words: Unpack[ReplayWords]) -> Replayed:
    """Traces of torch.profiler, one per rank, played again: where the step goes, who waited for whom, what
    if.

    `traces` are files or folders of them.
    """
    waits = words.get("waits", WAITS[0])
    if waits not in WAITS:
        raise InputError(f"--waits: unknown choice {waits!r}; known: {', '.join(WAITS)}")
    scales = [parse_scale(text) for text in texts(words.get("scale"))]
    read, notes = read_traces(traces, partial=words.get("partial", False))
    step = words.get("step")
    recording = record(read, step, waits)
    unchanged = play(recording.graph)
    recorded, played, changed, retimed = (
        page_of(recording, unchanged, step),
        unchanged,
        None,
        tuple[Retimed, ...](),
    )
    against = words.get("against")
    plan = None if against is None else load_plan(against)
    numbers: dict[str, Any] = {name: words.get(name) for name in NUMBERS}
    questions = Questions(scales=scales, gpu=words.get("gpu"), plan=plan, **numbers)
    compared_with = recording, unchanged
    if questions.any:
        recording, change, told = asked(recording, questions, step, waits)
        notes += _unknown_waits(recording, waits)
        played = play(recording.graph, change)
        changed, retimed = page_of(recording, played, recorded.step), tuple(told)
        notes += _marks_that_stay(recorded, changed)
        # A plan is of the model and the layout that were recorded.
        compared_with = compared_with if questions.of_another_shape else (recording, played)
    answer = Replayed(
        recording=recording, recorded=recorded, changed=changed, retimed=retimed, played=played,
        notes=(*notes, *recording.notes),
    )  # fmt: skip
    answer = _held_against(answer, plan, compared_with, words, step)
    target = words.get("trace")
    return answer if target is None else answer.with_trace(Path(target))


def _unknown_waits(recording: Recording, waits: str) -> list[str]:
    """What a question's answer leaves out: waits between streams that the traces do not explain."""
    counts = recording.counts
    unknown = counts["waits without evidence"] + counts["waits whose record is not in the trace"]
    if not unknown or waits != WAITS[0]:
        return []
    return [
        f"{unknown:,} waits between streams are not explained by the traces: what waits for a changed kernel "
        "there may keep its time; see --waits inferred, which guesses them"
    ]


def _marks_that_stay(recorded: Page, changed: Page) -> list[str]:
    """A host that does not wait for its GPU ends its steps when it did, whatever the GPU takes."""
    spans = [max(page.span_s.values(), default=0.0) for page in (recorded, changed)]
    steps = [
        sum(seconds for one in page.steps.values() for _, seconds in one) for page in (recorded, changed)
    ]
    ranks = max(len(recorded.steps), 1)
    moved_s, marks_s = spans[1] - spans[0], (steps[1] - steps[0]) / ranks
    if not recorded.steps or abs(moved_s) < LEAST_MOVE * spans[0] or abs(marks_s) >= abs(moved_s) / 2.0:
        return []
    return [
        "the host does not wait for the GPU in these steps, so that their marks hardly move: from first to "
        f"last all of it takes {spans[0] * 1e3:.4g} -> {spans[1] * 1e3:.4g} ms, which tells more"
    ]


def _held_against(
    answer: Replayed, plan: Plan | None, with_it: tuple[Recording, Played], words: ReplayWords,
    step: int | None,
) -> Replayed:  # fmt: skip
    """With the plan's prediction, and a new profile where one is asked for."""
    out = words.get("recalibrate")
    if plan is None:
        if out is not None:
            raise InputError("--recalibrate needs the plan that was run; wanted --against PLAN beside it")
        return answer
    recording, played = with_it
    answer = replace(answer, compared=beside(recording, played, step, plan))
    if out is None:
        return answer
    made = recalibrated(recording.traces, plan, answer.recorded.step_s, Path(out))
    return replace(answer, recalibrated=made)


def beside(recording: Recording, played: Played, step: int | None, plan: Plan) -> tuple[Compared, ...]:
    """The played step of each rank, and what was predicted of its stage."""
    require_shape(recording.traces, plan)
    told = windows(recording, played, step)
    prediction = predict_plan(plan, evaluator_for(job_of(plan)).evaluator)
    return tuple(compared(recording, played, told, plan, prediction))


def read_traces(
    traces: str | Path | Sequence[str | Path], *, partial: bool = False
) -> tuple[list[Trace], list[str]]:
    """The traces of one run, in order of their ranks, and what they leave open."""
    given = [traces] if isinstance(traces, str | Path) else list(traces)
    paths = [path for one in given for path in files_below(Path(one), ENDINGS)]
    if not paths:
        raise InputError("no trace is given; wanted files or folders", details=(HOW,))
    twice = {str(path) for path in paths if paths.count(path) > 1}
    if twice:
        raise InputError(f"{min(twice)} is given twice")
    read = []
    for path in paths:
        with open_packed(path) as file:
            read.append(read_trace(file, str(path), Reading(partial=partial)))
    return in_order(read)


def in_order(traces: Sequence[Trace]) -> tuple[list[Trace], list[str]]:
    """One trace per rank, of one run; what does not belong together is refused by name."""
    notes = [f"{trace.where}: {note}" for trace in traces for note in trace.notes]
    for trace in traces:
        _check(trace, notes)
    if len(traces) == 1:
        trace = traces[0]
        if trace.world is not None and trace.world > 1:
            notes.append(
                f"rank {trace.rank} of {trace.world} alone: how long collectives waited for others cannot "
                "be told apart from how long they took"
            )
        return list(traces), notes
    ranks = [trace.rank for trace in traces]
    known = [rank for rank in ranks if rank is not None]
    for rank in known:
        if known.count(rank) > 1:
            same = " and ".join(trace.where for trace in traces if trace.rank == rank)
            raise InputError(f"{same} are both of rank {rank}; wanted one trace per rank")
    if len(known) < len(ranks) and known:
        without = next(trace.where for trace in traces if trace.rank is None)
        raise InputError(f"{without} does not say its rank, others do: are they of one run?")
    if not known:
        notes.append("no trace says its rank: they are numbered in the order of their names")
    numbered = [{step.number for step in steps_of(trace)} for trace in traces]
    if all(numbered) and not set.intersection(*numbered):
        raise InputError(
            f"{traces[0].where} and {traces[-1].where} are of different steps "
            f"({min(numbered[0])} and {min(numbered[-1])}); wanted the same steps of every rank"
        )
    worlds = sorted({trace.world for trace in traces if trace.world is not None})
    if len(worlds) > 1:
        raise InputError(
            f"{traces[0].where} and {traces[-1].where} are of runs of {' and '.join(map(str, worlds))} "
            "ranks; wanted the ranks of one run"
        )
    world = worlds[0] if worlds else None
    if world is not None and world > len(traces):
        notes.append(
            f"{len(traces)} of {world} ranks: for ranks that are not here, waiting counts as transfer"
        )
    return sorted(traces, key=_place_among_ranks), notes


def _place_among_ranks(trace: Trace) -> tuple[int, list[tuple[int, str]]]:
    """By rank, else by name, with the numbers in it as numbers: worker2 before worker10."""
    parts = re.split(r"(\d+)", trace.where) if trace.rank is None else []
    return trace.rank or 0, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _check(trace: Trace, notes: list[str]) -> None:
    """What cannot be played, and what can only in part."""
    if not len(trace) and not trace.other_devices:
        seen = sorted(name for name, count in trace.dropped.items() if count and name != "None")
        others = f"only {', '.join(seen[:4])}" if seen else "none says its category: of another profiler?"
        raise InputError(
            f"{trace.where}: no operator, call or kernel of a GPU among its {trace.events_read:,} events "
            f"({others})",
            details=(HOW,),
        )
    unknown, gpu = trace.other_devices, trace.on_gpu
    if unknown and not gpu.any():
        told = f"recorded on a device that replay does not know ({', '.join(unknown[:3])}); wanted a GPU's"
        raise InputError(f"{trace.where}: {told}", details=(HOW,))
    notes += odd_words(trace)
    if unknown:
        notes.append(f"{trace.where}: what ran on other devices is left out ({', '.join(unknown[:3])})")
    if not gpu.any():
        notes.append(
            f"{trace.where}: no GPU events: only the host's threads are played (record CUDA activities too)"
        )
    elif not (trace.correlation[gpu] > 0).any() and not trace.after:
        raise InputError(
            f"{trace.where}: kernels carry no correlation, so that nothing says what launched them",
            details=(HOW,),
        )
    if gpu.any() and not len(trace.shape_table):
        why = "record_shapes was off" if (trace.kind == Kind.OPERATOR).any() else "no operator is in it"
        notes.append(f"{trace.where}: no shapes ({why}): questions about sizes cannot be answered")
