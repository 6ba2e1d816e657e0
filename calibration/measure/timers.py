"""How long something takes: warmed up, repeated, the median with its spread.

On a GPU each repeat stands between two events of its stream, with the second-level cache flushed before. A
short sleep of the device goes ahead of it, so that the host has queued all of it before the first event
passes, and the host's own time is not in the figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Work = Callable[[], object]
Agreed = Callable[[float], float]
"""Own seconds -> those of the slowest process, where several must repeat equally often."""
QUEUE_S = 2e-4
"""The device sleeps so long ahead of each repeat: the backward pass of attention takes the host 100 us."""
SLEEP_CYCLES_PER_S = 2e9
"""Upper end of the clocks of today's GPUs: the sleep is this long or a little longer."""
LEAST_FLUSH_BYTES = 256 << 20
"""Four times the second-level cache of an H200 (60 MB), twice that of a B200 (126 MB)."""


@dataclass(frozen=True)
class Timing:
    """One measured point."""

    seconds: float
    spread: float
    """Standard deviation of the repeats over their mean."""
    repeats: int
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of the point's line."""


@dataclass(frozen=True)
class Effort:
    """How hard to look."""

    target_s: float
    """Seconds to spend on the repeats of one point, if that lies between the two bounds."""
    least: int
    most: int

    def repeats(self, once_s: float) -> int:
        return min(max(int(self.target_s / max(once_s, 1e-9)), self.least), self.most)


THOROUGH = Effort(target_s=0.1, least=7, most=50)
TRIAL = Effort(target_s=0.002, least=3, most=10)
"""For runs on the CPU that only try the programs out."""


class Timer(Protocol):
    """Samples of one piece of work."""

    device: torch.device

    def samples(
        self,
        work: Work,
        effort: Effort,
        *,
        cold: bool = True,
        agreed: Agreed = float,
        queue_s: float = QUEUE_S,
    ) -> list[float]:
        """Seconds of each repeat; `cold` flushes the caches before each, `queue_s` is what the host needs
        to queue the work."""
        ...


class CpuTimer:
    """Wall clock."""

    device = torch.device("cpu")

    def samples(
        self,
        work: Work,
        effort: Effort,
        *,
        cold: bool = True,
        agreed: Agreed = float,
        queue_s: float = QUEUE_S,
    ) -> list[float]:
        work()
        return [_clocked(work) for _ in range(effort.repeats(agreed(_clocked(work))))]


class CudaTimer:
    """Events on the current stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        found = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._flush = torch.empty(max(LEAST_FLUSH_BYTES, 2 * found) // 4, dtype=torch.int32, device=device)

    def samples(
        self,
        work: Work,
        effort: Effort,
        *,
        cold: bool = True,
        agreed: Agreed = float,
        queue_s: float = QUEUE_S,
    ) -> list[float]:
        for _ in range(2):
            work()
        torch.cuda.synchronize(self.device)
        once_s = _clocked(lambda: (work(), torch.cuda.synchronize(self.device)))
        count = effort.repeats(agreed(once_s))
        events = [_event_pair() for _ in range(count)]
        for start, end in events:
            if cold:
                self._flush.zero_()
            torch.cuda._sleep(int(queue_s * SLEEP_CYCLES_PER_S))
            start.record()
            work()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in events]


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _clocked(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def summary(samples: list[float], more: dict[str, Any] | None = None, *, parts: int = 1) -> Timing:
    """Median and relative spread; each sample held `parts` equal pieces."""
    mean = statistics.fmean(samples)
    spread = statistics.pstdev(samples) / mean if mean > 0.0 else 0.0
    # Nothing takes no time: below the resolution of the clock a sample may read zero.
    seconds = max(statistics.median(samples) / parts, 1e-9)
    return Timing(seconds, round(spread, 4), len(samples), more or {})


def timer_of(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()
