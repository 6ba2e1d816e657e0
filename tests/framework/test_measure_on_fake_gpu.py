"""What the measuring programs ask of a GPU, in which order: tried with one that only writes down."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

MEASURE = Path(__file__).parents[2] / "calibration" / "measure"
NAMES = ("record", "clocks", "timers", "team", "runner", "kernels", "exchange", "host", "coruns")


class Gpu:
    """Stands in for torch.cuda; events are two milliseconds apart, plus one for each that was recorded."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.current = "main"
        self.events = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                gpu.events += 1
                self.number = gpu.events

            def record(self, stream: Any = None) -> None:
                gpu.told.append(f"record on {stream.name if stream else gpu.current}")

            def elapsed_time(self, other: Any) -> float:
                return 2.0 + (other.number - self.number)

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.name = f"stream {len([t for t in gpu.told if t.startswith('new')])}"
                gpu.told.append(f"new {self.name}")

            def wait_event(self, event: Any) -> None:
                gpu.told.append(f"{self.name} waits for an event")

            def wait_stream(self, stream: Any) -> None:
                gpu.told.append(f"{self.name} waits for {stream.name}")

        self.Event, self.Stream = Event, Stream
        self.main = Stream()
        self.main.name = "main"
        self.told.clear()

    def sleep(self, cycles: int) -> None:
        assert isinstance(cycles, int)
        self.slept = cycles
        self.told.append("sleep")

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current = stream.name
        yield
        self.current = "main"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("Event", "Stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.main)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.told.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        properties = SimpleNamespace(L2_cache_size=1 << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    found.install(monkeypatch)
    return found


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(MEASURE))
    yield SimpleNamespace(**{name: __import__(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def timer(gpu: Gpu, programs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(programs.timers, "LEAST_FLUSH_BYTES", 1 << 12)
    found = programs.timers.CudaTimer(torch.device("cpu"))
    assert found._flush.nbytes == 1 << 12
    found._flush = SimpleNamespace(zero_=lambda: gpu.told.append("flush"))
    return found


def test_each_repeat_is_flushed_and_queued_behind_a_sleep(gpu: Gpu, programs: Any, timer: Any) -> None:
    effort = programs.timers.Effort(target_s=0.0, least=3, most=3)
    seconds = timer.samples(lambda: gpu.told.append("work"), effort)
    warm = ["work", "work", "synchronize", "work", "synchronize"]
    repeat = ["flush", "sleep", "record on main", "work", "record on main"]
    assert gpu.told == [*warm, *repeat * 3, "synchronize"]
    assert seconds == [0.003] * 3
    gpu.told.clear()
    timer.samples(lambda: None, effort, cold=False, queue_s=5e-3)
    assert "flush" not in gpu.told
    # 5 ms of a device of 2 GHz.
    assert gpu.slept == 10_000_000


def bench(programs: Any, timer: Any) -> Any:
    timer.device = SimpleNamespace(type="cuda")
    effort = programs.timers.Effort(target_s=0.0, least=2, most=2)
    return programs.runner.Bench(timer, effort, programs.team.Team(), False)


def test_streams_start_together_and_the_last_counts(gpu: Gpu, programs: Any, timer: Any) -> None:
    streams = programs.coruns.Streams(bench(programs, timer), torch.float32)
    streams.pieces = {
        name: lambda name=name: gpu.told.append(f"{name} on {gpu.current}") for name in ("C", "H2D", "D2H")
    }
    streams.queues = {name: gpu.Stream() for name in streams.pieces}
    gpu.told.clear()
    seconds = streams.together({"C": 2, "D2H": 1})
    assert gpu.told == [
        "sleep",
        "record on main",
        "stream 0 waits for an event",
        "C on stream 0",
        "C on stream 0",
        "record on stream 0",
        "stream 2 waits for an event",
        "D2H on stream 2",
        "record on stream 2",
        "synchronize",
    ]
    # The second stream's end is two events after the start.
    assert seconds == pytest.approx(0.004)


def test_copies_both_ways_run_side_by_side(gpu: Gpu, programs: Any, timer: Any) -> None:
    works = [
        lambda: gpu.told.append(f"up on {gpu.current}"),
        lambda: gpu.told.append(f"down on {gpu.current}"),
    ]
    run = programs.host._side_by_side(bench(programs, timer), works)
    gpu.told.clear()
    run()
    assert gpu.told == [
        "stream 0 waits for main",
        "up on stream 0",
        "stream 1 waits for main",
        "down on stream 1",
        "main waits for stream 0",
        "main waits for stream 1",
    ]


def test_only_kernels_that_run_the_shape_are_timed(programs: Any) -> None:
    """cuDNN's and the memory-efficient kernel need a GPU: their refusal is passed over."""
    timer = programs.timers.CpuTimer()
    query = torch.randn(1, 2, 16, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    found = programs.kernels._fastest(bench(programs, timer), lambda: lambda: attention(query, query, query))
    assert found.more == {"kernel": "flash"}

    def never() -> Any:
        raise RuntimeError("no kernel for this shape")

    with pytest.raises(programs.runner.NotPossible, match="no fused attention kernel"):
        programs.kernels._fastest(bench(programs, timer), lambda: never)

    def full() -> Any:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        programs.kernels._fastest(bench(programs, timer), lambda: full)
