"""The event engine: what runs when, on the streams of each device, which slow each other down.

Events are columns, not objects: a run of a large pipeline has a hundred thousand of them. Each
stream runs one event at a time, in the order in which events become ready, urgent ones first. While
several of the GPU's streams are busy, each proceeds at 1 / f of its speed, f from the profile's
interference table (Mist, EuroSys 2025, Algorithm 1); the slowdown applies piecewise to the overlapping
intervals, so that work is conserved: the integral of an event's speed over its life is its exclusive time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called with events done and events in all."""


class Stream(IntEnum):
    """Streams of a device; of the first four the value is the bit position in an interference row."""

    COMPUTE = 0
    GPU_TO_GPU = 1
    HOST_TO_DEVICE = 2
    DEVICE_TO_HOST = 3
    HOST = 4
    """The host of the device: launches that the GPU waits for, updates of offloaded states. It runs at
    its own pace whatever the GPU does, and slows nothing down."""
    SEND = 5
    """Boundary tensors: a communicator of its own in every framework, so that neither do tensor-parallel
    collectives queue behind them nor they behind reductions. It slows others down as GPU-GPU traffic does;
    beside GPU-GPU traffic over the same kind of link, either gets half of the bandwidth."""


STREAMS = len(Stream)
GPU_STREAMS = 4
STEP = 4096
"""Events between two reports of progress."""


class Deadlock(Exception):
    """Events that can never start because they wait for each other; `waiting` names the first few."""

    def __init__(self, waiting: tuple[str, ...]) -> None:
        super().__init__("schedule cannot complete; waiting for each other: " + ", ".join(waiting))
        self.waiting = waiting


@dataclass(slots=True)
class Program:
    """Events of one run, built up by `add` and then handed to `run_program`."""

    devices: int
    device: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    urgent: set[int] = field(default_factory=set)
    """Events that their stream runs before others: what compute waits for, before what it does not."""
    yielding: set[int] = field(default_factory=set)
    """Events that urgent ones do not even wait for once they run: they stand still meanwhile and go on after.
    Long reductions are pieces on a communicator of their own, which leave the network to others."""
    between_nodes: set[int] = field(default_factory=set)
    """Transfers over links between nodes; all others use links inside one."""

    def add(self, name: str, device: int, stream: Stream, work_s: float, after: Sequence[int] = ()) -> int:
        """Append one event and return its number. `after` names events that must end first."""
        if not work_s >= 0.0:
            raise ValueError(f"event {name} has a duration of {work_s} s")
        self.device.append(device)
        self.stream.append(int(stream))
        self.work_s.append(work_s)
        self.name.append(name)
        self.after.append(tuple(after))
        return len(self.name) - 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every event of a program ran."""

    program: Program
    start_s: Array
    end_s: Array
    cause: NDArray[np.int64]
    """The event whose end let this one start (a dependency, or the event before it on its stream);
    -1 for events that start at once."""

    @property
    def makespan_s(self) -> float:
        return float(self.end_s.max(initial=0.0))


class _Device:
    """Running events of one device and the speeds at which they proceed."""

    __slots__ = ("active", "first", "mask", "queue", "rates", "remaining_s", "updated_s", "version")

    def __init__(self) -> None:
        self.active = [-1] * STREAMS
        self.mask = 0
        self.first: list[deque[int]] = [deque() for _ in range(STREAMS)]
        """Urgent events that wait for their stream ..."""
        self.queue: list[deque[int]] = [deque() for _ in range(STREAMS)]
        """... and the others."""
        self.remaining_s = [0.0] * STREAMS
        self.rates: Sequence[float] = (1.0,) * STREAMS
        self.updated_s = 0.0
        self.version = 0

    def advance(self, now_s: float) -> None:
        """Do the work that the running events got done since the last change."""
        passed_s = now_s - self.updated_s
        if passed_s > 0.0 and self.mask:
            for stream in _STREAMS_OF[self.mask]:
                self.remaining_s[stream] -= passed_s * self.rates[stream]
        self.updated_s = now_s

    def next_end_s(self) -> float:
        soonest = float("inf")
        for stream in _STREAMS_OF[self.mask]:
            left_s = self.remaining_s[stream] / self.rates[stream]
            if left_s < soonest:
                soonest = left_s
        return self.updated_s + max(soonest, 0.0)


_STREAMS_OF = [tuple(k for k in range(STREAMS) if mask >> k & 1) for mask in range(1 << STREAMS)]
"""Streams of each set of active streams."""


_BOTH = 1 << Stream.GPU_TO_GPU | 1 << Stream.SEND


def halved(speeds: tuple[float, ...]) -> tuple[float, ...]:
    """Speeds where sends and GPU-GPU traffic share a link."""
    shares = (0.5 if stream in (Stream.GPU_TO_GPU, Stream.SEND) else 1.0 for stream in Stream)
    return tuple(speed * share for speed, share in zip(speeds, shares, strict=True))


def speed_table(factors: Array) -> list[tuple[float, ...]]:
    """Speeds (1 / slowdown) per set of active streams, from the (16, 4) interference table. A busy host
    changes nothing for the others, and sends count as GPU-GPU traffic."""
    if factors.shape != (1 << GPU_STREAMS, GPU_STREAMS):
        raise ValueError(f"interference table has shape {factors.shape}, wanted (16, 4)")
    rows = factors.tolist()
    speeds = []
    for mask in range(1 << STREAMS):
        sending = mask >> Stream.SEND & 1
        row = rows[mask & 0b1111 | sending << Stream.GPU_TO_GPU]
        speeds.append((*(1.0 / factor for factor in row), 1.0, 1.0 / row[Stream.GPU_TO_GPU]))
    return speeds


class _Run:
    """State of one simulation."""

    def __init__(self, program: Program, factors: Array) -> None:
        self.program = program
        tables = np.broadcast_to(factors, (program.devices, *factors.shape[-2:]))
        known = {table.tobytes(): speed_table(table) for table in tables}
        self.speeds = [known[table.tobytes()] for table in tables]
        """Of each device; and with sends beside other traffic on one link."""
        halves = {key: [halved(speeds) for speeds in table] for key, table in known.items()}
        self.shared = [halves[table.tobytes()] for table in tables]
        self.devices = [_Device() for _ in range(program.devices)]
        count = len(program.name)
        self.waits = [len(after) for after in program.after]
        self.successors: list[list[int]] = [[] for _ in range(count)]
        for event, after in enumerate(program.after):
            for earlier in after:
                self.successors[earlier].append(event)
        self.start_s = [-1.0] * count
        self.end_s = [-1.0] * count
        self.left_s: dict[int, float] = {}
        """Of events that stand still."""
        self.cause = [-1] * count
        self.heap: list[tuple[float, int, int]] = []
        self.done = 0

    def offer(self, event: int, now_s: float, cause: int, touched: set[int]) -> None:
        """An event whose dependencies are met: start it, or queue it behind its stream's work."""
        device = self.devices[self.program.device[event]]
        stream = self.program.stream[event]
        if device.mask >> stream & 1:
            urgent, running = event in self.program.urgent, device.active[stream]
            if not (urgent and running in self.program.yielding):
                (device.first if urgent else device.queue)[stream].append(event)
                return
            device.advance(now_s)
            self.left_s[running] = device.remaining_s[stream]
            device.queue[stream].appendleft(running)
        self.begin(event, now_s, cause, touched)

    def begin(self, event: int, now_s: float, cause: int, touched: set[int]) -> None:
        number = self.program.device[event]
        device, stream = self.devices[number], self.program.stream[event]
        device.advance(now_s)
        device.active[stream] = event
        device.mask |= 1 << stream
        device.remaining_s[stream] = self.left_s.pop(event, self.program.work_s[event])
        if self.start_s[event] < 0.0:
            self.start_s[event], self.cause[event] = now_s, cause
        touched.add(number)

    def finish(self, number: int, now_s: float, touched: set[int]) -> list[tuple[int, int]]:
        """End what is done on a device; returns newly ready events with what released them."""
        device = self.devices[number]
        device.advance(now_s)
        ready: list[tuple[int, int]] = []
        for stream in _STREAMS_OF[device.mask]:
            event = device.active[stream]
            # 1e-12 relative: the remainder is a difference of sums of the same size as the work.
            if device.remaining_s[stream] > 1e-12 * (self.program.work_s[event] + now_s):
                continue
            device.mask &= ~(1 << stream)
            self.end_s[event] = now_s
            self.done += 1
            for later in self.successors[event]:
                self.waits[later] -= 1
                if self.waits[later] == 0:
                    ready.append((later, event))
            waiting = device.first[stream] or device.queue[stream]
            if waiting:
                self.begin(waiting.popleft(), now_s, event, touched)
        return ready

    def on_one_link(self, device: _Device) -> bool:
        """Whether what a device sends and its other GPU-GPU traffic share a link. What arrives meanwhile is
        not asked: links carry as much in either direction, and neighbours send as this one does."""
        between = self.program.between_nodes
        sent, moved = device.active[Stream.SEND], device.active[Stream.GPU_TO_GPU]
        return (sent in between) == (moved in between)

    def reschedule(self, touched: set[int]) -> None:
        for number in touched:
            device = self.devices[number]
            device.version += 1
            if device.mask:
                one_link = device.mask & _BOTH == _BOTH and self.on_one_link(device)
                device.rates = (self.shared if one_link else self.speeds)[number][device.mask]
                heappush(self.heap, (device.next_end_s(), number, device.version))


def run_program(program: Program, factors: Array, progress: Progress | None = None) -> Timeline:
    """Simulate a program; `factors` is the (16, 4) interference table of the profile, or one for each
    device."""
    run = _Run(program, factors)
    total, reported = len(program.name), 0
    touched: set[int] = set()
    for event, waits in enumerate(run.waits):
        if waits == 0:
            run.offer(event, 0.0, -1, touched)
    run.reschedule(touched)
    while run.heap:
        now_s, number, version = heappop(run.heap)
        if version != run.devices[number].version:
            continue
        touched = {number}
        # What becomes ready at the same time: urgent events take an idle stream before others do.
        ready = sorted(run.finish(number, now_s, touched), key=lambda pair: pair[0] not in program.urgent)
        for event, cause in ready:
            run.offer(event, now_s, cause, touched)
        run.reschedule(touched)
        if progress is not None and run.done - reported >= STEP:
            reported = run.done
            progress(run.done, total)
    if run.done < total:
        stuck = [k for k, end in enumerate(run.end_s) if end < 0.0]
        raise Deadlock(tuple(program.name[k] for k in stuck[:6]))
    return Timeline(program, np.array(run.start_s), np.array(run.end_s), np.array(run.cause, dtype=np.int64))


def critical_path(timeline: Timeline) -> tuple[int, ...]:
    """Events from the first to the last that determine the makespan, each released by the one before."""
    if not len(timeline.end_s):
        return ()
    event = int(timeline.end_s.argmax())
    path = [event]
    while timeline.cause[event] >= 0:
        event = int(timeline.cause[event])
        path.append(event)
    return tuple(reversed(path))
