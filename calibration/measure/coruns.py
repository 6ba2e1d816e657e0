"""Streams that run at once: compute, GPU-GPU, host-to-device and device-to-host, in all 11 sets.

Each stream gets an amount of work that lasts a given time when it runs alone; the sets then run with
several proportions of these times. A line holds the times alone and the time until all are done.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from exchange import gathered
from host import copied
from runner import Bench, Measure, Point
from timers import SLEEP_CYCLES_PER_S, Timing, summary

STREAMS = ("C", "G2G", "H2D", "D2H")
FIELDS = {"C": "c_s", "G2G": "g2g_s", "H2D": "h2d_s", "D2H": "d2h_s"}
BASE_S = 8e-3
"""Time alone of a stream of weight 1: a layer's worth, and long against the start of a copy."""
TINY_BASE_S = 1e-3
REPEATS = 7
QUEUE_S = 1.5e-5
"""Of the host for one queued operation; the device sleeps until all of them are queued."""


def proportions(count: int) -> list[tuple[float, ...]]:
    """Equal, and each stream in turn longer or shorter than the others; of pairs one step further."""
    found: list[tuple[float, ...]] = [(1.0,) * count]
    for factor in (2.0, 0.5, 4.0, 0.25)[: 4 if count == 2 else 2]:
        for place in range(count):
            weights = tuple(factor if index == place else 1.0 for index in range(count))
            if count > 2 or place == 0:
                found.append(weights)
    return found


@dataclass
class Streams:
    """Work of each stream in pieces, and how long a piece takes alone."""

    bench: Bench
    dtype: torch.dtype
    pieces: dict[str, Callable[[], object]] = field(default_factory=dict)
    piece_s: dict[str, float] = field(default_factory=dict)
    queues: dict[str, torch.cuda.Stream] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in STREAMS if name != "G2G" or self.bench.team.world > 1)

    def allocate(self) -> None:
        """Once for all sets."""
        if self.pieces:
            return
        copy_bytes, gather_bytes = (1 << 16, 1 << 14) if self.bench.tiny else (16 << 20, 32 << 20)
        self.pieces["C"] = self._compute()
        if "G2G" in self.names:
            self.pieces["G2G"] = gathered(self.bench, gather_bytes)
        self.pieces["H2D"] = copied(self.bench, "h2d", copy_bytes)
        self.pieces["D2H"] = copied(self.bench, "d2h", copy_bytes)
        if self.bench.device.type == "cuda":
            self.queues = {name: torch.cuda.Stream(self.bench.device) for name in self.pieces}

    def find_speeds(self) -> None:
        """Of a piece of each stream, once; all processes agree on the slowest."""
        trial = 4 if self.bench.tiny else 16
        for name in () if self.piece_s else self.pieces:
            self.together({name: trial})
            self.piece_s[name] = max(self.together({name: trial}) / trial, 1e-7)

    def _compute(self) -> Callable[[], object]:
        """An MLP with activation and norm: products and memory-bound kernels in a layer's proportion."""
        rows, width = (32, 32) if self.bench.tiny else (2048, 2048)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=self.bench.device).mul_(0.02).to(self.dtype)

        x, up, down = made(rows, width), made(4 * width, width), made(width, 4 * width)

        def piece() -> torch.Tensor:
            inner = F.gelu(F.linear(F.layer_norm(x, (width,)), up), approximate="tanh")
            return x + F.linear(inner, down)

        return piece

    def counts(self, weights: Mapping[str, float]) -> dict[str, int]:
        """Pieces of each stream for the times wanted."""
        unit_s = TINY_BASE_S if self.bench.tiny else BASE_S
        return {
            name: min(max(round(weight * unit_s / self.piece_s[name]), 1), 2000)
            for name, weight in weights.items()
        }

    def together(self, counts: Mapping[str, int]) -> float:
        """Seconds until the last stream of the slowest process is done."""
        self.bench.team.wait()
        on_gpu = self.bench.device.type == "cuda"
        return self.bench.team.most(self._on_gpu(counts) if on_gpu else self._on_cpu(counts))

    @torch.no_grad()
    def _on_gpu(self, counts: Mapping[str, int]) -> float:
        here = torch.cuda.current_stream(self.bench.device)
        torch.cuda._sleep(int((2e-4 + QUEUE_S * 4 * sum(counts.values())) * SLEEP_CYCLES_PER_S))
        start = torch.cuda.Event(enable_timing=True)
        start.record(here)
        ends = []
        for name, count in counts.items():
            queue = self.queues[name]
            queue.wait_event(start)
            with torch.cuda.stream(queue):
                for _ in range(count):
                    self.pieces[name]()
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record(queue)
        torch.cuda.synchronize(self.bench.device)
        return max(start.elapsed_time(end) for end in ends) / 1e3

    def _on_cpu(self, counts: Mapping[str, int]) -> float:
        """A thread for each stream."""

        def run(name: str) -> None:
            with torch.no_grad():
                for _ in range(counts[name]):
                    self.pieces[name]()

        with ThreadPoolExecutor(len(counts)) as pool:
            start = time.perf_counter()
            for done in [pool.submit(run, name) for name in counts]:
                done.result()
            return time.perf_counter() - start


def overlap_points(bench: Bench, dtype: torch.dtype) -> Iterator[Point]:
    """Every set of two to four streams, in several proportions."""
    streams = Streams(bench, torch.float32 if bench.tiny else dtype)
    for count in (2, 3, 4):
        for chosen in itertools.combinations(streams.names, count):
            for weights in proportions(count)[: 1 if bench.tiny else None]:
                text = ":".join(f"{weight:g}" for weight in weights)
                name = f"overlap {'+'.join(chosen)} {text} of {bench.team.world}"
                sizes = {"streams": "+".join(chosen), "proportion": text, "world": bench.team.world}
                yield Point(name, "overlap", sizes, _corun(streams, dict(zip(chosen, weights, strict=True))))


def _corun(streams: Streams, weights: Mapping[str, float]) -> Callable[[], Measure]:
    def prepare() -> Measure:
        streams.allocate()
        repeats = 3 if streams.bench.tiny else REPEATS

        def measure() -> Timing:
            streams.find_speeds()
            counts = streams.counts(weights)
            # Alone and together in turn, so that a drifting clock hurts both alike.
            alone: dict[str, list[float]] = {name: [] for name in counts}
            joint = []
            for _ in range(repeats):
                for name, count in counts.items():
                    alone[name].append(streams.together({name: count}))
                joint.append(streams.together(counts))
            times = {name: summary(samples) for name, samples in alone.items()}
            found = summary(joint)
            lone = {FIELDS[name]: round(times[name].seconds, 9) if name in times else 0.0 for name in STREAMS}
            widest = max(found.spread, *(time.spread for time in times.values()))
            return Timing(found.seconds, widest, repeats, {**lone, "spread_together": found.spread})

        return measure

    return prepare
