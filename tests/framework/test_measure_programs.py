"""The measuring programs run for real on the CPU: all kinds, two processes, stopped and taken up again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from short_form import long_form

pytest.importorskip("torch")

import torch
import warm_start_server
from command_line import run

from mist_megatron.calibrate.measurements import SIZES, read_measurements

MEASURE = Path(__file__).parents[2] / "calibration" / "measure"
NAMES = ("record", "clocks", "timers", "team", "runner", "kernels", "exchange", "host", "coruns")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(MEASURE))
    yield SimpleNamespace(**{name: __import__(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)


@long_form
def test_everything_runs_on_the_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "raw.jsonl"
    command = ["calibrate", "run", "--device", "cpu", "--model", "llama3-8b", "--out", str(out), "--json"]
    assert run(command) == 0
    told = json.loads(capfd.readouterr().out)
    raw = read_measurements(out.read_text("utf-8"), str(out))
    assert told["measured"] == len(raw.points) and not told["skipped"]
    assert {point.kind for point in raw.points} == SIZES.keys() - {"link"}
    assert {point.label for point in raw.of("copy")} == {"h2d", "d2h", "both"}
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "send_recv"}
    assert {point.label for point in raw.of("collective")} == kinds
    assert all(point.sizes["ranks"] == 2 and point.sizes["nodes"] == 1 for point in raw.of("collective"))
    streams = ("c_s", "g2g_s", "h2d_s", "d2h_s")
    sets = {tuple(point.sizes[name] > 0.0 for name in streams) for point in raw.of("overlap")}
    assert len(sets) == 11
    (conditions,) = raw.conditions.values()
    assert conditions.backend == "cpu"
    assert conditions.versions["torch"] == torch.__version__


def measure(out: Path, *more: str) -> list[str]:
    return [sys.executable, str(MEASURE / "measure.py"), "--device", "cpu", "--out", str(out), *more]


def points_in(out: Path) -> list[str]:
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    return [line["point"] for line in lines if "point" in line]


def test_killed_and_taken_up_again(tmp_path: Path) -> None:
    out, tally = tmp_path / "raw.jsonl", tmp_path / "tally.json"
    what = ("--what", "gemm,attention,memory,copies,host-adam", "--tally", str(tally))
    process = subprocess.Popen(measure(out, *what), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while (not out.exists() or out.read_bytes().count(b"\n") < 5) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = points_in(out) if out.read_bytes().endswith(b"\n") else []
    with out.open("ab") as file:
        file.write(b'{"kind": "gemm", "of": "12')
    environment = warm_start_server.environment()
    done = subprocess.run(measure(out, *what), capture_output=True, text=True, check=True, env=environment)
    assert "cut off after" in done.stderr
    counts = json.loads(tally.read_text("utf-8"))
    points = points_in(out)
    assert points[: len(before)] == before
    assert len(points) == len(set(points)) == counts["measured"] + counts["found"]
    assert counts["found"] >= 4
    read_measurements(out.read_text("utf-8"), str(out))


@long_form
def test_stopped_by_a_signal_it_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "raw.jsonl"
    command = measure(out, "--what", "interference,collectives")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    try:
        _, told = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130, told
    assert "run it again to go on" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "gpt9"], "unknown model preset 'gpt9'"),
        (["--model", "gpt3-7b", "--tp", "0"], "--tp: '0'; wanted whole numbers from 1"),
        (["--model", "gpt3-7b", "--tp", "7"], "--tp: gpt3-7b runs with none of 7"),
        (["--budget-s", "-1"], "--budget-s is -1"),
        (["--precision", "int3"], "unknown precision 'int3'"),
        (["--python", "no-such-python"], "cannot be started"),
        (["--shapes-to", "x.json"], "--shapes-to needs --model"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", "run", "--device", "cpu", "--out", str(tmp_path / "raw"), *arguments]) == 2
    shown = capfd.readouterr().err
    assert shown.startswith("error: ")
    assert told in " ".join(shown.split())
    assert not list(tmp_path.iterdir())


def test_python_without_torch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    without = tmp_path / "python"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n', "utf-8")
    without.chmod(0o755)
    assert run(["calibrate", "run", "--python", str(without), "--out", str(tmp_path / "raw")]) == 2
    assert "torch is not installed" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "run", "--out", str(tmp_path / "raw")]) == 2
    assert "try: --device cpu" in capfd.readouterr().err


def test_seconds_are_seconds(programs: Any) -> None:
    timers = programs.timers
    samples = timers.CpuTimer().samples(lambda: time.sleep(0.02), timers.TRIAL)
    assert 0.02 <= min(samples) < 0.2  # a busy machine may wake a sleeper late, never early
    assert timers.summary([1.0, 3.0, 2.0], parts=2).seconds == 1.0
    assert timers.summary([1.0, 3.0]).spread == 0.5


def bench(programs: Any) -> Any:
    timers = programs.timers
    return programs.runner.Bench(timers.CpuTimer(), timers.TRIAL, programs.team.Team(), True)


def test_streams_run_at_the_same_time(programs: Any) -> None:
    streams = programs.coruns.Streams(bench(programs), torch.float32)
    streams.pieces = {"C": lambda: time.sleep(0.02), "H2D": lambda: time.sleep(0.01)}
    alone = [streams.together({name: count}) for name, count in {"C": 3, "H2D": 4}.items()]
    assert alone[0] >= 0.06 and alone[1] >= 0.04
    meeting = threading.Barrier(2)  # in turn nobody would come
    streams.pieces = dict.fromkeys(streams.pieces, lambda: meeting.wait(timeout=60))
    assert streams.together({"C": 3, "H2D": 3}) > 0.0


class Spells:
    """A clock that tells one spell after another."""

    def __init__(self, programs: Any, *overheated: bool) -> None:
        self.left = [programs.clocks.Spell(1500.0, overheated=hot) for hot in overheated]

    def since(self, start_s: float) -> Any:
        return self.left.pop(0)


class Lines:
    """A recorder that keeps what is written."""

    def __init__(self, *done: str) -> None:
        self.done, self.written = set(done), {}

    def write(self, kind: str, point: str, values: dict[str, Any]) -> None:
        self.written[point] = values


def walk(programs: Any, recorder: Lines, clocks: Any, points: list[Any], deadline_s: float = 1e12) -> Any:
    runner = programs.runner
    found = runner.Run(bench(programs), recorder, clocks, runner.Progress(False), deadline_s)
    found.points(points)
    return found.tally


def point(programs: Any, name: str, *timings: tuple[float, float]) -> Any:
    """Its attempts give these seconds and spreads, one after the other."""
    left = [programs.timers.Timing(seconds, spread, 5) for seconds, spread in timings]
    return programs.runner.Point(name, "gemm", {}, lambda: lambda: left.pop(0))


def test_unsteady_and_hot_points_are_measured_again(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs.runner, "COOLING_S", 0.0)
    recorder = Lines("known")
    points = [
        point(programs, "known"),
        point(programs, "steady", (1.0, 0.01)),
        point(programs, "second", (1.0, 0.5), (2.0, 0.02)),
        point(programs, "never", (1.0, 0.5), (2.0, 0.3), (3.0, 0.4)),
        point(programs, "hot", (1.0, 0.01), (2.0, 0.05)),
    ]
    clocks = Spells(programs, *[False] * 6, True, False)
    tally = walk(programs, recorder, clocks, points)
    seconds = {name: line["seconds"] for name, line in recorder.written.items()}
    assert seconds == {"steady": 1.0, "second": 2.0, "never": 2.0, "hot": 2.0}
    assert {name for name, line in recorder.written.items() if "wide_spread" in line} == {"never"}
    assert (tally.found, tally.measured, tally.marked) == (1, 4, 1)


def test_too_large_points_and_those_after_the_deadline(programs: Any) -> None:
    def raises() -> Any:
        raise RuntimeError("CUDA error: out of memory")

    def breaks() -> Any:
        raise RuntimeError("illegal address")

    runner, recorder, clocks = programs.runner, Lines(), Spells(programs, False)
    points = [
        runner.Point("large", "gemm", {}, raises),
        runner.Point("large later", "gemm", {}, lambda: raises),
        point(programs, "small", (1.0, 0.0)),
    ]
    tally = walk(programs, recorder, clocks, points)
    assert tally.skipped == {"large": "out of memory", "large later": "out of memory"}
    assert list(recorder.written) == ["small"]
    assert walk(programs, recorder, clocks, points, deadline_s=0.0).out_of_time == 3
    with pytest.raises(RuntimeError, match="illegal address"):
        walk(programs, recorder, clocks, [runner.Point("bug", "gemm", {}, breaks)])


def test_a_run_that_ends_early_has_covered_the_range(programs: Any) -> None:
    order = programs.runner.spread_out([SimpleNamespace(name=str(n)) for n in range(32)])
    assert [int(item.name) for item in order[:8]] == [0, 8, 16, 24, 4, 12, 20, 28]
    assert sorted(int(item.name) for item in order) == list(range(32))


def test_groups_of_ranks(programs: Any) -> None:
    team = programs.team.Team(rank=0, world=8, local_rank=0, local_world=4)
    found = {(g.size, g.stride): (g.members(team), g.nodes(team)) for g in programs.exchange.groupings(team)}
    assert found[2, 1] == ([[0, 1], [2, 3], [4, 5], [6, 7]], 1)
    assert found[2, 4] == ([[0, 4], [1, 5], [2, 6], [3, 7]], 2)
    assert found[4, 2] == ([[0, 2, 4, 6], [1, 3, 5, 7]], 2)
    assert found[8, 1] == ([list(range(8))], 2)
    for members, _ in found.values():
        assert sorted(rank for group in members for rank in group) == list(range(8))
