"""A pipeline of recorded passes: other stages, layers or micro-batches in the order of 1F1B.

What a recorded stage takes per micro-batch is shared out by layers; what lies before the first layer goes
with the first stage, what lies behind the last one with the last. Stages send to each other as the price
says, or as was recorded where the run was a pipeline already.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.events.chrome_trace import Names, Slice, chrome_trace
from mist_megatron.events.engine import GPU_STREAMS, Program, Stream, run_program
from mist_megatron.recorded.passes import StagePasses
from mist_megatron.recorded.recording import Recording
from mist_megatron.recorded.repeats import sends_of
from mist_megatron.recorded.what_if import Retimed
from mist_megatron.spec.passes import PassKind
from mist_megatron.spec.schedule import ONE_F_ONE_B, schedule_orders
from mist_megatron.traces.columns import NS_PER_S, Trace
from mist_megatron.traces.reader import read_trace

_STREAMS = ("compute", "send")


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage of the new pipeline takes per micro-batch, and at the end of a step."""

    forward_s: float
    backward_s: float
    tail_s: float


def shared_out(by_rank: Sequence[StagePasses], stages: int, layers: int | None) -> list[Stage]:
    """The recorded stages' work on so many stages of so many layers in all."""
    if stages == len(by_rank) and layers is None:
        return [Stage(one.forward_s, one.backward_s, one.tail_s) for one in by_rank]
    old = sum(one.layers for one in by_rank)
    new = old if layers is None else layers
    if new % stages:
        raise InputError(f"{new} layers do not divide among {stages} stages; wanted a number that does")
    first, last = by_rank[0].before_s, by_rank[-1].behind_s
    whole = [sum(one.forward_s for one in by_rank), sum(one.backward_s for one in by_rank)]
    # What middle stages do outside of layers, every stage does.
    inner = [one.behind_s for one in by_rank[:-1]] + [one.before_s for one in by_rank[1:]]
    beside = [sum(edge[at] for edge in inner) for at in (0, 1)]
    each = [(whole[at] - first[at] - last[at] - beside[at]) / old * new / stages for at in (0, 1)]
    extra = [beside[at] / len(by_rank) for at in (0, 1)]
    tail = sum(one.tail_s for one in by_rank) / old * new / stages
    made = []
    for stage in range(stages):
        ends = [edge for edge, mine in ((first, stage == 0), (last, stage == stages - 1)) if mine]
        passes = [each[at] + extra[at] + sum(edge[at] for edge in ends) for at in (0, 1)]
        made.append(Stage(passes[0], passes[1], tail))
    return made


def recorded_send_s(recording: Recording) -> float | None:
    """What a transfer between stages took that waited for nobody: the median of the shortest quarter."""
    lengths: list[int] = []
    for part in recording.parts:
        sent = sends_of(part) & ~part.trace.names_that("gloo:send".__eq__)
        lengths += part.trace.length_ns[sent].tolist()
    lengths.sort()
    return median(lengths[: max(1, len(lengths) // 4)]) / NS_PER_S if lengths else None


def rebuilt(stages: Sequence[Stage], micro_batches: int, send_s: float) -> tuple[Trace, list[Retimed]]:
    """The new step as a trace of our own, which plays as others do."""
    count = len(stages)
    program = Program(devices=count)
    orders = schedule_orders(ONE_F_ONE_B, count, micro_batches)
    done: dict[tuple[PassKind, int, int], int] = {}
    before: list[list[int]] = [[] for _ in stages]
    at = [0] * count
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                one = order[at[rank]]
                forward = one.kind is PassKind.FORWARD
                neighbour = rank - 1 if forward else rank + 1
                after = list(before[rank])
                if 0 <= neighbour < count:
                    key = (one.kind, neighbour, one.micro_batch)
                    if key not in done:
                        break
                    after.append(_sent(program, done[key], neighbour, f"{one}", send_s))
                elif not forward:
                    after.append(done[PassKind.FORWARD, rank, one.micro_batch])
                seconds = stages[rank].forward_s if forward else stages[rank].backward_s
                name = f"{'forward' if forward else 'backward'}: micro-batch {one.micro_batch}"
                event = program.add(name, rank, Stream.COMPUTE, seconds, after)
                done[one.kind, rank, one.micro_batch] = event
                before[rank], at[rank] = [event], at[rank] + 1
    for rank, stage in enumerate(stages):
        program.add("optimizer step: and reductions", rank, Stream.COMPUTE, stage.tail_s, before[rank])
    # Recorded times have in them what traffic cost compute.
    timeline = run_program(program, np.ones((1 << GPU_STREAMS, GPU_STREAMS)))
    names = Names(processes={rank: f"stage {rank}" for rank in range(count)}, threads=_STREAMS)
    slices = _slices(program, timeline.start_s.tolist(), timeline.end_s.tolist())
    text = "".join(chrome_trace(names, slices)).encode()
    return read_trace(io.BytesIO(text), f"pipeline of {count} stages"), _told(program)


def _sent(program: Program, event: int, rank: int, name: str, seconds: float) -> int:
    return program.add(f"send: {name}", rank, Stream.SEND, seconds, [event])


def _slices(program: Program, start: list[float], end: list[float]) -> Iterator[Slice]:
    for event, name in enumerate(program.name):
        thread = 0 if program.stream[event] == Stream.COMPUTE else 1
        yield Slice(
            process=program.device[event], thread=thread, name=name, category=name.partition(":")[0],
            start_s=start[event], end_s=end[event], event=event, after=program.after[event],
        )  # fmt: skip


def _told(program: Program) -> list[Retimed]:
    sums = {0: [0, 0.0], 1: [0, 0.0]}
    for stream, seconds in zip(program.stream, program.work_s, strict=True):
        one = sums[0 if stream == Stream.COMPUTE else 1]
        one[0], one[1] = one[0] + 1, one[1] + seconds
    (passes, work_s), (sends, moved_s) = sums[0], sums[1]
    return [
        Retimed("kept", "passes of recorded kernels, in the order of 1F1B", int(passes), work_s, work_s),
        Retimed("curve", "sends between stages", int(sends), 0.0, moved_s),
    ]
