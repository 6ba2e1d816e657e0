"""Timelines as Chrome traces: which devices, slices, arrows and counters go into the file."""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.errors import InputError
from mist_megatron.events.analysis import STREAM_NAMES
from mist_megatron.events.chrome_trace import Arrow, Counter, Names, Slice, chrome_trace
from mist_megatron.events.iteration import Simulation

MOST_SLICES = 4_000_000
"""About the most that is known to open: 3.7 million slices of 1,024 GPUs (560 MB, 30 CPU-seconds to write)
took Perfetto 52 107 s in a browser on 2 busy cores."""
GIB = float(1 << 30)


def trace_pieces(simulation: Simulation, *, every_rank: bool) -> Iterator[str]:
    """The text of the file, piece by piece."""
    members = processes(simulation, every_rank=every_rank)
    count = slice_count(simulation, members)
    if count > MOST_SLICES:
        raise InputError(
            f"--trace with --ranks all would write {count:,} slices; wanted at most {MOST_SLICES:,}",
            details=("try: --ranks representative, which has one process per stage",),
        )
    names = {
        process: title_of(simulation, stage, process, every_rank=every_rank)
        for stage, group in enumerate(members)
        for process in group
    }
    return chrome_trace(
        Names(processes=names, threads=STREAM_NAMES),
        _slices(simulation, members),
        _arrows(simulation, members),
        _counters(simulation, members),
    )


def processes(simulation: Simulation, *, every_rank: bool) -> list[list[int]]:
    """Process numbers of each stage: the stage itself, or its ranks."""
    count = len(simulation.plan.stages)
    if every_rank:
        return [list(simulation.plan.ranks(stage)) for stage in range(count)]
    return [[stage] for stage in range(count)]


def slice_count(simulation: Simulation, members: list[list[int]]) -> int:
    return sum(len(members[device]) for device in simulation.timeline.program.device)


def title_of(simulation: Simulation, stage: int, process: int, *, every_rank: bool) -> str:
    """Numbers have leading zeros: Perfetto orders processes by their names."""
    plan = simulation.plan
    name = f"stage {stage:0{len(str(len(plan.stages) - 1))}}"
    if every_rank:
        return f"rank {process:0{len(str(plan.cluster.gpus - 1))}} ({name})"
    ranks = plan.ranks(stage)
    alike = f"ranks {ranks[0]}-{ranks[-1]}, alike" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"{name} ({alike})"


def _slices(simulation: Simulation, members: list[list[int]]) -> Iterator[Slice]:

    timeline, kinds = simulation.timeline, simulation.built.kind
    program = timeline.program
    starts, ends = timeline.start_s.tolist(), timeline.end_s.tolist()
    count = sum(map(len, members))

    def number(event: int, place: int, size: int) -> int:
        """Of an event on the process that is at the same place of its stage, as for transfers."""
        there = members[program.device[event]]
        return event * count + there[place * len(there) // size]

    for event, kind in enumerate(kinds):
        mine = members[program.device[event]]
        name, size = f"{kind}: {program.name[event]}", len(mine)
        for place, process in enumerate(mine):
            after = tuple(number(earlier, place, size) for earlier in program.after[event])
            yield Slice(
                process, program.stream[event], name, kind, starts[event], ends[event],
                event * count + process, after,
            )  # fmt: skip


def _arrows(simulation: Simulation, members: list[list[int]]) -> Iterator[Arrow]:
    """From the middle of a transfer to the first event of the pass that it is for; between stages of
    different sizes a rank's partner is the one at the same place."""
    timeline, program = simulation.timeline, simulation.timeline.program
    for send, target in simulation.built.sends:
        senders, receivers = members[program.device[send]], members[program.device[target]]
        middle_s = 0.5 * float(timeline.start_s[send] + timeline.end_s[send])
        pairs = max(len(senders), len(receivers))
        for place in range(pairs):
            yield Arrow(
                program.name[send],
                senders[place * len(senders) // pairs],
                program.stream[send],
                middle_s,
                receivers[place * len(receivers) // pairs],
                program.stream[target],
                float(timeline.start_s[target]),
            )


def _counters(simulation: Simulation, members: list[list[int]]) -> Iterator[Counter]:

    for stage, curve in enumerate(simulation.memory):
        for at_s, live_bytes in zip(curve.at_s.tolist(), curve.live_bytes.tolist(), strict=True):
            for process in members[stage]:
                yield Counter(process, "memory", "GiB", at_s, round(live_bytes / GIB, 6))
