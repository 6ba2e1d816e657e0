"""What host memory and its link do: pinned copies each way and both ways, and Adam on the processors.

Under torchrun all GPUs of a node copy, or step, at once, and the slowest counts: so it is in training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernels import ADAM
from runner import Bench, Measure, Point
from timers import Timing, summary

DIRECTIONS = ("h2d", "d2h", "both")


def copy_points(bench: Bench) -> Iterator[Point]:
    """Bytes of one way; `both` moves as many the other way at the same time."""
    top = 14 if bench.tiny else 29
    for power in range(12 if bench.tiny else 16, top + 1, 1 if bench.tiny else 2):
        for direction in DIRECTIONS:
            sizes = {"direction": direction, "bytes": 1 << power, "at_once": bench.team.local_world}
            name = f"copy {direction} {1 << power} at once {bench.team.local_world}"
            yield Point(name, "copy", sizes, _copy(bench, direction, 1 << power))


def _copy(bench: Bench, direction: str, size: int) -> Callable[[], Measure]:
    def prepare() -> Measure:
        pairs = [copied(bench, way, size) for way in ("h2d", "d2h") if direction in (way, "both")]
        work = pairs[0] if len(pairs) == 1 else _side_by_side(bench, pairs)

        def measure() -> Timing:
            bench.team.wait()
            samples = bench.timer.samples(work, bench.effort, cold=False, agreed=bench.team.most)
            return summary(bench.team.slowest(samples))

        return measure

    return prepare


def copied(bench: Bench, way: str, size: int) -> Callable[[], object]:
    """One asynchronous copy; on the CPU one of memory to memory."""
    on_gpu = bench.device.type == "cuda"
    host = torch.ones(size, dtype=torch.uint8, pin_memory=on_gpu)
    device = torch.ones(size, dtype=torch.uint8, device=bench.device)
    to, source = (device, host) if way == "h2d" else (host, device)
    return lambda: to.copy_(source, non_blocking=True)


def _side_by_side(bench: Bench, works: list[Callable[[], object]]) -> Callable[[], object]:
    """Each on a stream of its own (on the CPU a thread), begun together; done when all are."""
    if bench.device.type != "cuda":
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(len(works))
        return lambda: [done.result() for done in [pool.submit(work) for work in works]]
    streams = [torch.cuda.Stream(bench.device) for _ in works]

    def run() -> None:
        here = torch.cuda.current_stream(bench.device)
        for stream, work in zip(streams, works, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            here.wait_stream(stream)

    return run


def host_adam_points(bench: Bench) -> Iterator[Point]:
    """Adam on parameters in host memory, by the fastest implementation that is installed."""
    team = bench.team
    for count in (1 << 12, 1 << 13) if bench.tiny else (1 << 24, 1 << 26, 1 << 28):
        sizes = {"parameters": count, "at_once": team.local_world}
        name = f"host_adam {count} at once {team.local_world}"
        yield Point(name, "host_adam", sizes, _host_adam(bench, count))


def _host_adam(bench: Bench, count: int) -> Callable[[], Measure]:
    def prepare() -> Measure:
        threads = torch.get_num_threads()
        if not bench.tiny:
            torch.set_num_threads(max((os.cpu_count() or 1) // bench.team.local_world, 1))
        parameter = torch.nn.Parameter(torch.randn(count))
        parameter.grad = torch.randn(count)
        name, optimizer = _host_optimizer(parameter, bench.tiny)
        more: dict[str, Any] = {"implementation": name, "threads": torch.get_num_threads()}

        def step() -> float:
            start = time.perf_counter()
            optimizer.step()
            return time.perf_counter() - start

        def measure() -> Timing:
            step()
            bench.team.wait()
            repeats = bench.effort.repeats(bench.team.most(step()))
            samples = bench.team.slowest([step() for _ in range(repeats)])
            torch.set_num_threads(threads)
            return summary(samples, more)

        return measure

    return prepare


def _host_optimizer(parameter: torch.nn.Parameter, tiny: bool) -> tuple[str, Any]:
    """DeepSpeed's vectorised Adam, else torch's own fused one. DeepSpeed compiles its own when it is first
    used, for which a trial has no time."""
    if not tiny:
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return "deepspeed", DeepSpeedCPUAdam([parameter], adamw_mode=True, **ADAM)
        except Exception as error:  # whatever its build raises: torch's own serves as well
            first = next(iter(str(error).splitlines()), "")
            more = {"without_deepspeed": f"{type(error).__name__}: {first[:80]}"}
            return f"torch fused ({more['without_deepspeed']})", _torch_adam(parameter)
    return "torch fused", _torch_adam(parameter)


def _torch_adam(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    try:
        return torch.optim.AdamW([parameter], fused=True, **ADAM)
    except RuntimeError:  # torch before 2.4 has it on GPUs alone
        return torch.optim.AdamW([parameter], foreach=True, **ADAM)
