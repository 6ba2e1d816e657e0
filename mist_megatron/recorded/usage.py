"""Where a step goes: compute, communication, both, nothing; what the GPU waited for; who waited for whom."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mist_megatron.events.analysis import DeviceUsage, device_usage
from mist_megatron.events.engine import Program, Stream, Timeline
from mist_megatron.recorded.engine import Played
from mist_megatron.recorded.graph import Edge, Floats, Ints, Role
from mist_megatron.recorded.recording import Recording
from mist_megatron.recorded.steps import Step
from mist_megatron.traces.collectives import communicates
from mist_megatron.traces.columns import NS_PER_S, Kind, Trace

BIN_NS = 1e6
"""Share of every millisecond in which the GPU is busy."""


@dataclass(frozen=True, slots=True)
class Window:
    """What of a rank's time is told."""

    rank: int
    start_ns: float
    end_ns: float
    step: int | None
    """Number of the profiler's step; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """All kernels of one name in the windows of all ranks."""

    name: str
    seconds: float
    calls: int
    share: float
    """Of the windows' time, all ranks together."""


@dataclass(frozen=True, kw_only=True)
class CommunicatorTime:
    """Collectives of one kind in one communicator, mean of its ranks."""

    group: str
    collective: str
    calls: int
    size_bytes: int
    """Of all calls, as far as it is said; 0 where it is not."""
    transfer_s: float
    """From when the last rank came."""
    waited_s: float
    """Before that, mean of the ranks; where only one rank is there, it cannot be told apart from transfer."""
    waited_for: tuple[tuple[int, float], ...]
    """Rank that came last, and the seconds that all others together waited for it; longest first."""
    matched: bool


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """One rank's window; the parts of `usage` add up to it."""

    rank: int
    window_s: float
    usage: DeviceUsage
    busy_per_ms: tuple[float, ...]
    begins_after_s: float
    """Of the window, behind the first of all ranks'."""


def stream_classes(trace: Trace) -> NDArray[np.int64]:
    """Which of a device's streams each event would be on in a simulation."""
    if trace.after:
        return np.clip(trace.stream, 0, len(Stream) - 1).astype(np.int64)
    classes = np.full(len(trace), int(Stream.COMPUTE))
    copies = trace.kind == Kind.COPY
    classes[copies & trace.names_that(lambda name: "HtoD" in name or "HostToDevice" in name)] = (
        Stream.HOST_TO_DEVICE
    )
    classes[copies & trace.names_that(lambda name: "DtoH" in name or "DeviceToHost" in name)] = (
        Stream.DEVICE_TO_HOST
    )
    classes[copies & trace.names_that(lambda name: "PtoP" in name or "PeerToPeer" in name)] = (
        Stream.GPU_TO_GPU
    )
    classes[communicates(trace)] = Stream.GPU_TO_GPU
    return classes


def windows(recording: Recording, played: Played, step: int | None) -> tuple[Window, ...]:
    """The step that is told, on every rank: the one asked for, else that of median length but not the first,
    which pays for allocations and tuning; without marks all that was recorded."""
    spans = []
    chosen = step if step is not None else typical_step(recording)
    for rank in range(len(recording.traces)):
        mine = recording.graph.nodes.rank == rank
        ends = played.end_ns[mine & (recording.graph.nodes.role != Role.MEET)]
        begins = played.start_ns[mine & (recording.graph.nodes.role != Role.MEET)]
        marks = [
            (begin, end) for (one, begin, end), of in zip(recording.steps, recording.step_rank, strict=True)
            if of == rank and one.number == chosen
        ]  # fmt: skip
        if marks and chosen is not None:
            begin, end = marks[0]
            last = _is_last(recording, rank, chosen)
            until = float(played.start_ns[end])
            # Nothing follows the last step: what it launched belongs to it until it has ended.
            until = max(until, float(ends.max())) if last else until
            spans.append(Window(rank, float(played.start_ns[begin]), until, chosen))
        else:
            if recording.traces[rank].after:
                # All devices of a simulation are there from its begin to its end.
                begins, ends = played.start_ns, played.end_ns
            low, high = (float(begins.min()), float(ends.max())) if len(ends) else (0.0, 0.0)
            spans.append(Window(rank, low, high, None))
    return tuple(spans)


def _is_last(recording: Recording, rank: int, number: int) -> bool:
    steps = [one for (one, _, _), of in zip(recording.steps, recording.step_rank, strict=True) if of == rank]
    return max(steps, key=lambda one: one.start_ns).number == number


def typical_step(recording: Recording) -> int | None:
    """Of rank 0's steps that all ranks recorded the one of median length."""
    by_rank: dict[int, dict[int, Step]] = defaultdict(dict)
    for (one, _, _), rank in zip(recording.steps, recording.step_rank, strict=True):
        by_rank[rank][one.number] = one
    everywhere = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    steps = sorted(
        (one for one in by_rank[0].values() if one.number in everywhere or not everywhere),
        key=lambda one: one.start_ns,
    )
    told = steps[1:-1] or steps[1:] or steps
    if not told:
        return None
    return sorted(told, key=lambda one: one.length_ns)[(len(told) - 1) // 2].number


def step_lengths(recording: Recording, played: Played) -> dict[int, list[tuple[int, float]]]:
    """Rank's position -> its steps with their seconds."""
    lengths: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (step, begin, end), rank in zip(recording.steps, recording.step_rank, strict=True):
        seconds = float(played.start_ns[end] - played.start_ns[begin]) / NS_PER_S
        lengths[rank].append((step.number, seconds))
    return dict(lengths)


def rank_times(recording: Recording, played: Played, told: tuple[Window, ...]) -> tuple[RankTime, ...]:
    """Every rank's window by what its GPU did."""
    nodes = recording.graph.nodes
    first = min((window.start_ns for window in told), default=0.0)
    times = []
    for window in told:
        part = recording.parts[window.rank]
        gpu = np.flatnonzero((nodes.role == Role.GPU) & (nodes.rank == window.rank))
        start = np.clip(played.start_ns[gpu], window.start_ns, window.end_ns)
        end = np.clip(played.end_ns[gpu], window.start_ns, window.end_ns)
        inside = end > start
        classes = stream_classes(part.trace)[nodes.event[gpu]]
        waits = host_bound(recording, played, gpu, window)
        columns = [
            np.concatenate([start[inside], waits[0]]), np.concatenate([end[inside], waits[1]]),
            np.concatenate([classes[inside], np.full(len(waits[0]), int(Stream.HOST))]),
        ]  # fmt: skip
        length_s = (window.end_ns - window.start_ns) / NS_PER_S
        times.append(
            RankTime(
                rank=recording.rank_name(window.rank),
                window_s=length_s,
                usage=_usage(columns[0], columns[1], columns[2], window),
                busy_per_ms=_busy_per_ms(start[inside], end[inside], window),
                begins_after_s=(window.start_ns - first) / NS_PER_S,
            )
        )
    return tuple(times)


def _usage(start: Floats, end: Floats, streams: Ints, window: Window) -> DeviceUsage:
    begin = window.start_ns
    program = Program(devices=1, device=[0] * len(start), stream=streams.tolist())
    timeline = Timeline(
        program, (start - begin) / NS_PER_S, (end - begin) / NS_PER_S, np.full(len(start), -1, np.int64)
    )
    return device_usage(timeline, (window.end_ns - begin) / NS_PER_S)[0]


def host_bound(recording: Recording, played: Played, gpu: Ints, window: Window) -> tuple[Floats, Floats]:
    """Times in which the GPU had nothing to do and went on when a launch came."""
    graph = recording.graph
    order = gpu[np.argsort(played.start_ns[gpu], kind="stable")]
    if not len(order):
        return np.empty(0), np.empty(0)
    start, end = played.start_ns[order], np.maximum.accumulate(played.end_ns[order])
    until = np.concatenate([[window.start_ns], end[:-1]])
    cause = _cause_kinds(recording, played, order)
    launched = np.isin(cause, (Edge.LAUNCH, Edge.NEIGHBOUR)) & (graph.nodes.role[order] == Role.GPU)
    low, high = np.clip(until, window.start_ns, window.end_ns), np.clip(start, window.start_ns, window.end_ns)
    idle = launched & (high > low)
    return low[idle], high[idle]


def _cause_kinds(recording: Recording, played: Played, nodes: Ints) -> Ints:
    """Why each node started when it did; of members of collectives, why they arrived."""
    graph = recording.graph
    cause = played.cause[nodes]
    kind = np.where(cause >= 0, graph.edges.kind[np.maximum(cause, 0)], -1)
    for at in np.flatnonzero(kind == Edge.COLLECTIVE).tolist():
        arrive = int(graph.edges.source[cause[at]]) // 2
        before = int(played.cause[arrive])
        kind[at] = int(graph.edges.kind[before]) if before >= 0 else -1
    return np.asarray(kind)


def _busy_per_ms(start: Floats, end: Floats, window: Window) -> tuple[float, ...]:
    """Share of each millisecond in which at least one stream runs something."""
    count = int(np.ceil((window.end_ns - window.start_ns) / BIN_NS))
    if count <= 0 or not len(start):
        return (0.0,) * max(count, 0)
    order = np.argsort(start, kind="stable")
    low, high = start[order] - window.start_ns, np.maximum.accumulate(end[order]) - window.start_ns
    fresh = np.concatenate([[True], low[1:] > high[:-1]])
    groups = np.flatnonzero(fresh)
    low, high = low[groups], np.append(high[groups[1:] - 1], high[-1])
    edges = np.arange(count + 1) * BIN_NS
    covered = np.interp(edges, np.stack([low, high], 1).ravel(), _steps_up(low, high), left=0.0)
    length = np.minimum(edges[1:], window.end_ns - window.start_ns) - edges[:-1]
    return tuple(np.round(np.diff(covered) / length, 4).tolist())


def _steps_up(low: Floats, high: Floats) -> Floats:
    """Time covered so far at the begin and end of each interval."""
    total = np.cumsum(high - low)
    return np.stack([total - (high - low), total], 1).ravel()


def top_kernels(
    recording: Recording, played: Played, told: tuple[Window, ...], most: int
) -> tuple[KernelTime, ...]:
    """Names that take most of the GPUs' time in the windows."""
    nodes = recording.graph.nodes
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for window in told:
        trace = recording.traces[window.rank]
        begins = played.start_ns
        inside = (nodes.role == Role.GPU) & (nodes.rank == window.rank)
        inside &= (begins >= window.start_ns) & (begins < window.end_ns)
        mine = np.flatnonzero(inside)
        length = played.end_ns[mine] - played.start_ns[mine]
        total = np.bincount(trace.name[nodes.event[mine]], length, len(trace.names))
        count = np.bincount(trace.name[nodes.event[mine]], minlength=len(trace.names))
        for name in np.flatnonzero(count).tolist():
            seconds[trace.names[name]] += float(total[name]) / NS_PER_S
            calls[trace.names[name]] += int(count[name])
    whole_s = sum(window.end_ns - window.start_ns for window in told) / NS_PER_S
    ordered = sorted(seconds, key=lambda name: -seconds[name])[:most]
    return tuple(
        KernelTime(
            name=name,
            seconds=seconds[name],
            calls=calls[name],
            share=seconds[name] / whole_s if whole_s else 0.0,
        )
        for name in ordered
    )
