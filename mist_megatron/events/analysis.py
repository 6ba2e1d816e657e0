"""What a timeline tells: who was busy, what was hidden behind what, and which events bind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mist_megatron.events.engine import Array, Stream, Timeline, critical_path

STREAM_NAMES = ("compute", "gpu_gpu", "host_to_device", "device_to_host", "host", "send")


@dataclass(frozen=True, kw_only=True)
class DeviceUsage:
    """Seconds of one device; the first five add up to the makespan."""

    device: int
    exposed_compute_s: float
    """Compute runs, no transfer beside it."""
    exposed_communication_s: float
    """Transfers run, no compute beside them."""
    overlapped_s: float
    """Both at once."""
    host_s: float
    """The GPU does nothing because its host has not launched anything, or updates states itself."""
    idle_s: float
    """Neither the GPU nor its host does anything: the bubble."""
    busy_s: tuple[float, ...]
    """Per stream, in the order of STREAM_NAMES."""

    @property
    def makespan_s(self) -> float:
        return self.busy_somehow_s + self.idle_s

    @property
    def busy_somehow_s(self) -> float:
        moving_s = self.exposed_communication_s + self.overlapped_s
        return self.exposed_compute_s + moving_s + self.host_s

    @property
    def utilisation(self) -> float:
        """Share of the iteration in which the GPU computes."""
        computing_s = self.exposed_compute_s + self.overlapped_s
        return computing_s / self.makespan_s if self.makespan_s else 0.0


@dataclass(frozen=True, kw_only=True)
class PathShare:
    """How much of the critical path one kind of event takes."""

    name: str
    seconds: float
    events: int


def device_usage(timeline: Timeline, period_s: float | None = None) -> tuple[DeviceUsage, ...]:
    """Split every device's time into exposed, overlapped, waiting for the host, and idle. `period_s` is the
    time of an iteration in a row of them; without, the timeline stands alone."""
    whole_s = timeline.makespan_s if period_s is None else period_s
    device = np.array(timeline.program.device, dtype=np.int64)
    order = np.argsort(device, kind="stable")
    bounds = np.searchsorted(device[order], np.arange(timeline.program.devices + 1))
    stream = np.array(timeline.program.stream, dtype=np.int64)
    return tuple(
        _usage(number, timeline, (stream, whole_s), order[bounds[number] : bounds[number + 1]])
        for number in range(timeline.program.devices)
    )


def _usage(
    number: int, timeline: Timeline, about: tuple[NDArray[np.int64], float], mine: NDArray[np.int64]
) -> DeviceUsage:
    stream, whole_s = about
    start, end, streams = timeline.start_s[mine], timeline.end_s[mine], stream[mine]

    def covered(chosen: NDArray[np.bool_]) -> float:
        return _covered(start[chosen], end[chosen])

    busy = [covered(streams == k) for k in range(len(Stream))]
    on_gpu = streams != Stream.HOST
    computing = covered(streams == Stream.COMPUTE)
    moving = covered(on_gpu & (streams != Stream.COMPUTE))
    either = covered(on_gpu)
    anything = _covered(start, end)
    # Differences of sums: what rounding leaves of nothing may lie below it.
    both = max(computing + moving - either, 0.0)
    return DeviceUsage(
        device=number,
        exposed_compute_s=max(computing - both, 0.0),
        exposed_communication_s=max(moving - both, 0.0),
        overlapped_s=both,
        host_s=max(anything - either, 0.0),
        idle_s=max(whole_s - anything, 0.0),
        busy_s=tuple(busy),
    )


def _covered(start_s: Array, end_s: Array) -> float:
    """Length of the union of intervals."""
    if not len(start_s):
        return 0.0
    order = np.argsort(start_s, kind="stable")
    start, end = start_s[order], np.maximum.accumulate(end_s[order])
    # A gap opens where an interval starts after everything before it has ended.
    gaps = np.maximum(start[1:] - end[:-1], 0.0).sum()
    return float(end[-1] - start[0] - gaps)


def bubble_fraction(usages: tuple[DeviceUsage, ...]) -> float:
    """Mean share of the iteration in which a device and its host do nothing at all."""
    total_s = sum(usage.makespan_s for usage in usages)
    return sum(usage.idle_s for usage in usages) / total_s if total_s else 0.0


def path_shares(timeline: Timeline, kind_of: tuple[str, ...]) -> tuple[PathShare, ...]:
    """The critical path summed by kind of event, longest first; `kind_of` names each event's kind."""
    seconds: dict[str, float] = {}
    events: dict[str, int] = {}
    for event in critical_path(timeline):
        kind = kind_of[event]
        seconds[kind] = seconds.get(kind, 0.0) + float(timeline.end_s[event] - timeline.start_s[event])
        events[kind] = events.get(kind, 0) + 1
    ordered = sorted(seconds, key=lambda kind: -seconds[kind])
    return tuple(PathShare(name=kind, seconds=seconds[kind], events=events[kind]) for kind in ordered)
