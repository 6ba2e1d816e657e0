"""What a timeline tells: who was busy, what was hidden behind what, and which events bind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mist_megatron.simulate.engine import Array, Stream, Timeline, critical_path

STREAM_NAMES = ("compute", "gpu_gpu", "host_to_device", "device_to_host")


@dataclass(frozen=True, kw_only=True)
class DeviceUsage:
    """Seconds of one device; the first four add up to the makespan."""

    device: int
    exposed_compute_s: float
    """Compute runs, no transfer beside it."""
    exposed_communication_s: float
    """Transfers run, no compute beside them."""
    overlapped_s: float
    """Both at once."""
    idle_s: float
    """Neither: the bubble."""
    busy_s: tuple[float, float, float, float]
    """Per stream: compute, GPU-GPU, host-to-device, device-to-host."""

    @property
    def makespan_s(self) -> float:
        return self.exposed_compute_s + self.exposed_communication_s + self.overlapped_s + self.idle_s


@dataclass(frozen=True, kw_only=True)
class PathShare:
    """How much of the critical path one kind of event takes."""

    name: str
    seconds: float
    events: int


def device_usage(timeline: Timeline) -> tuple[DeviceUsage, ...]:
    """Split every device's time into exposed, overlapped and idle."""
    device = np.array(timeline.program.device, dtype=np.int64)
    stream = np.array(timeline.program.stream, dtype=np.int64)
    usages = []
    for number in range(timeline.program.devices):
        mine = device == number
        busy = tuple(
            float((timeline.end_s - timeline.start_s)[mine & (stream == k)].sum()) for k in range(len(Stream))
        )
        compute = mine & (stream == Stream.COMPUTE)
        transfer = mine & (stream != Stream.COMPUTE)
        computing = _covered(timeline.start_s[compute], timeline.end_s[compute])
        moving = _covered(timeline.start_s[transfer], timeline.end_s[transfer])
        either = _covered(timeline.start_s[mine], timeline.end_s[mine])
        both = computing + moving - either
        usages.append(
            DeviceUsage(
                device=number,
                exposed_compute_s=computing - both,
                exposed_communication_s=moving - both,
                overlapped_s=both,
                idle_s=timeline.makespan_s - either,
                busy_s=(busy[0], busy[1], busy[2], busy[3]),
            )
        )
    return tuple(usages)


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
    """Mean share of the iteration in which a device does nothing at all."""
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
