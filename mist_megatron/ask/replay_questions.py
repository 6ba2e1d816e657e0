"""What is asked of a recording: every question changes its graph, or makes another of the same pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mist_megatron.ask.devices import device_named, device_of
from mist_megatron.errors import InputError
from mist_megatron.price.prices import Collective
from mist_megatron.recorded.against import stage_of
from mist_megatron.recorded.engine import Change, play
from mist_megatron.recorded.passes import StagePasses, passes_of
from mist_megatron.recorded.pipeline import rebuilt, recorded_send_s, shared_out
from mist_megatron.recorded.recording import Recording, record
from mist_megatron.recorded.repeats import more_layers, more_micro_batches, sends_of
from mist_megatron.recorded.resize import on_widths, with_sums
from mist_megatron.recorded.retime import Device, on_device, on_more_ranks
from mist_megatron.recorded.usage import typical_step
from mist_megatron.recorded.what_if import Retimed, Scale, scaled, stretched
from mist_megatron.recorded.widths import Resized, resized, widths_of
from mist_megatron.spec import check
from mist_megatron.spec.plan import Plan
from mist_megatron.traces.reader import HOW

NUMBERS = ("layers", "micro_batches", "dp", "pp", "hidden", "ffn", "tp")
"""Questions that are a number each."""


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What is asked at once."""

    scales: Sequence[Scale] = ()
    gpu: str | None = None
    layers: int | None = None
    micro_batches: int | None = None
    dp: int | None = None
    pp: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    tp: int | None = None
    plan: Plan | None = None
    """What was run, which says what a trace does not."""

    def __post_init__(self) -> None:
        for name in NUMBERS:
            number = getattr(self, name)
            if number is not None:
                check.at_least("replay", 2 if name == "dp" else 1, **{name: number})

    @property
    def any(self) -> bool:
        return bool(self.scales) or self.gpu is not None or self.of_another_shape

    @property
    def of_another_shape(self) -> bool:
        return any(getattr(self, name) is not None for name in NUMBERS)

    def device(self, recording: Recording) -> Device:
        """Whose prices new sizes have: the GPU that is asked for, else the recording's, else the plan's."""
        if self.gpu is not None:
            return device_named(self.gpu)
        told = any(trace.header.get("deviceProperties") for trace in recording.traces)
        if self.plan is not None and not told:
            return device_named(self.plan.cluster.profile or self.plan.cluster.gpu.name)
        return device_of(recording.traces)


def asked(
    recording: Recording, questions: Questions, step: int | None = None, waits: str = "known"
) -> tuple[Recording, Change, list[Retimed]]:
    """All that is asked at once: another GPU first, other widths, more of what repeats then, and what is
    scaled last."""
    sizes = _sizes(recording, questions)
    if sizes and any(one.old.tp == 1 < one.tp for one in sizes):
        traces = [
            with_sums(part.trace, part, one) for part, one in zip(recording.parts, sizes, strict=True)
        ]  # fmt: skip
        recording = record(traces, step, waits)
    change, told = Change(), list[Retimed]()
    if questions.gpu is not None:
        _require_kernels(recording, f"--gpu {questions.gpu}")
        change, told = on_device(recording, device_of(recording.traces), device_named(questions.gpu))
    if sizes:
        change, more = on_widths(recording, sizes, questions.device(recording), change)
        told += more
    if _rebuilds(recording, questions):
        return _pipeline(recording, questions, change, told)
    counted = (
        ("layers", questions.layers, more_layers),
        ("micro-batches", questions.micro_batches, more_micro_batches),
    )
    for name, wanted, find in counted:
        if wanted is not None:
            repeats = [find(part, wanted) for part in recording.parts]
            before = "/".join(map(str, sorted({count for _, count in repeats})))
            words = f"{name} {before} -> {wanted}"
            change, more = stretched(recording, [stretches for stretches, _ in repeats], words, change)
            told += more
    if questions.micro_batches is not None and any(part.trace.on_gpu.any() for part in recording.parts):
        # Refuses passes that run at the same time: they cannot be told apart.
        played = play(recording.graph)
        for rank in range(len(recording.parts)):
            passes_of(recording, played, rank, typical_step(recording), by_layer=False)
    change = _beside(recording, questions, change, told)
    return recording, change, told


def _beside(recording: Recording, questions: Questions, change: Change, told: list[Retimed]) -> Change:
    """What any graph can be asked."""
    if questions.dp is not None:
        change, more = on_more_ranks(recording, questions.dp, questions.device(recording), change)
        told += more
    if questions.scales:
        change, more = scaled(recording, questions.scales, change)
        told += more
    return change


def _rebuilds(recording: Recording, questions: Questions) -> bool:
    """A pipeline's filling and draining do not repeat: another one is put together from its passes. Without
    a GPU nothing else joins the ranks of one either."""
    if questions.pp is not None:
        return True
    pipeline = any(sends_of(part).any() for part in recording.parts)
    moved = questions.layers is not None or bool(questions.scales)
    on_host = not any(part.trace.on_gpu.any() for part in recording.parts)
    return pipeline and (questions.micro_batches is not None or (moved and on_host))


def _pipeline(
    recording: Recording, questions: Questions, change: Change, told: list[Retimed]
) -> tuple[Recording, Change, list[Retimed]]:
    """The passes of a recording, with all else that is asked in them, as another pipeline."""
    on_host = not any(part.trace.on_gpu.any() for part in recording.parts)
    scales: Sequence[Scale] = questions.scales if on_host else ()
    if not on_host:
        change = _beside(recording, questions, change, told)
    elif told or questions.dp is not None or any(scale.what != "op" for scale in scales):
        raise InputError(
            "a pipeline recorded without a GPU can be asked for pp, layers, micro_batches and op="
        )
    ranks = _stage_ranks(recording, questions.plan)
    stages = questions.pp or len(ranks)
    by_layer = stages != len(ranks) or questions.layers is not None
    played = play(recording.graph, change)
    passes = [
        passes_of(recording, played, rank, typical_step(recording), by_layer=by_layer, scales=scales)
        for rank in ranks
    ]
    counts = {one.micro_batches for one in passes}
    if len(counts) > 1:
        told_counts = ", ".join(map(str, sorted(counts)))
        raise InputError(f"stages run {told_counts} backward passes a step; wanted as many on each")
    _refuse_other_schedules(recording, passes, ranks)
    send_s = recorded_send_s(recording) if len(ranks) > 1 else None
    if send_s is None:
        send_s = 0.0 if stages == 1 else _send_s(recording, questions)
    elif questions.hidden is not None:
        send_s *= questions.hidden / widths_of(recording.parts[0], questions.plan, 0).hidden
    new = shared_out(passes, stages, questions.layers)
    trace, more = rebuilt(new, questions.micro_batches or counts.pop(), send_s)
    return record([trace]), Change(), [*told, *more]


def _stage_ranks(recording: Recording, plan: Plan | None) -> list[int]:
    """One traced rank of every stage of the recorded pipeline."""
    parts = recording.parts
    if plan is not None:
        of = [stage_of(plan, recording.rank_name(rank)) for rank in range(len(parts))]
        missing = [stage for stage in range(len(plan.stages)) if stage not in of]
        if missing:
            raise InputError(f"no trace is of stage {missing[0]}; wanted one rank of every stage")
        return [of.index(stage) for stage in range(len(plan.stages))]
    if not any(sends_of(part).any() for part in parts):
        return [0]
    world = parts[0].trace.world
    if len(parts) != world:
        raise InputError(
            f"{parts[0].trace.where}: of a pipeline of {world or 'some'} ranks, {len(parts)} here; which "
            "stages they are is not said; wanted all ranks, each a stage, or --against PLAN"
        )
    return list(range(len(parts)))


def _refuse_other_schedules(
    recording: Recording, passes: Sequence[StagePasses], ranks: Sequence[int]
) -> None:
    """In 1F1B each stage has as many transfers as passes go past its borders."""
    for place, (one, rank) in enumerate(zip(passes, ranks, strict=True)):
        least = ((place > 0) + (place < len(passes) - 1)) * one.micro_batches
        # A transfer there and one back may be one kernel.
        if not least <= one.sends <= 2 * least:
            raise InputError(
                f"{recording.parts[rank].trace.where}: {one.sends} transfers between stages for "
                f"{one.micro_batches} backward passes are no 1F1B (interleaved, DualPipe?); "
                f"wanted {least} to {2 * least}"
            )


def _send_s(recording: Recording, questions: Questions) -> float:
    """What the tokens of one micro-batch take from stage to stage."""
    part, plan = recording.parts[0], questions.plan
    widths = widths_of(part, plan, 0)
    device = questions.device(recording)
    tokens = max(widths.rows, default=0)
    moved = 2.0 * tokens * (questions.hidden or widths.hidden)
    work = Collective("send_recv", np.array(moved), np.array(2.0), np.array(1.0))
    return device.seconds(work) or 0.0


def _require_kernels(recording: Recording, option: str) -> None:
    """What other prices are asked for: a host's times have none."""
    if not any(part.trace.on_gpu.any() for part in recording.parts):
        raise InputError(f"{option}: no kernel of a GPU is in these traces", details=(HOW,))


def _sizes(recording: Recording, questions: Questions) -> list[Resized]:
    """Of every rank; empty where nothing is asked about sizes."""
    if questions.hidden is None and questions.ffn is None and questions.tp is None:
        return []
    named = next(name for name in ("hidden", "ffn", "tp") if getattr(questions, name) is not None)
    _require_kernels(recording, f"--{named} {getattr(questions, named)}")
    plan = questions.plan
    sizes = []
    for part in recording.parts:
        stage = 0 if plan is None else stage_of(plan, part.trace.rank or 0)
        old = widths_of(part, plan, stage)
        sizes.append(
            resized(
                part.trace.where, old, hidden=questions.hidden, ffn=questions.ffn, tp=questions.tp
            )
        )  # fmt: skip
    return sizes
