"""The file of results and the clock's samples: what the measuring programs do without torch."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mist_megatron.calibrate.measurements import read_measurements

MEASURE = Path(__file__).parents[2] / "calibration" / "measure"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules of the programs, which are plain scripts and import each other by bare names."""
    monkeypatch.syspath_prepend(str(MEASURE))
    names = ("record", "clocks", "digest")
    found = ModuleType("programs")
    for name in names:
        setattr(found, name, __import__(name))
    yield found
    for name in names:
        sys.modules.pop(name, None)


def conditions(programs: Any, **more: Any) -> Any:
    values = {
        "device": "NVIDIA H200", "backend": "cuda", "precision": "bf16", "date": "2026-11-21",
        "versions": {"torch": "2.11.0", "driver": "580.1"}, "clock_mhz": 1980.0,
    }  # fmt: skip
    return programs.record.Conditions(**{**values, **more})


POINT = {"m": 8, "n": 16, "k": 32, "batch": 1, "layout": "nt", "seconds": 1e-3, "spread": 0.01}


def write(programs: Any, path: Path, *points: str, **more: Any) -> Any:
    recorder = programs.record.open_record(path, conditions(programs, **more))
    for point in points:
        recorder.write("gemm", point, POINT)
    recorder.close()
    return recorder


def test_lines_are_what_the_tuner_reads(programs: Any, tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    write(programs, path, "one", "two")
    raw = read_measurements(path.read_text("utf-8"), str(path))
    (found,) = raw.conditions.values()
    assert (found.device, found.clock_mhz, found.versions["driver"]) == ("NVIDIA H200", 1980.0, "580.1")
    assert [(point.kind, point.sizes["k"], point.seconds) for point in raw.points] == [("gemm", 32, 1e-3)] * 2


def test_taken_up_again_with_one_conditions_line(programs: Any, tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    write(programs, path, "one")
    recorder = programs.record.open_record(path, conditions(programs, date="2026-12-01", clock_mhz=1700.0))
    assert recorder.done == {"one"}
    recorder.close()
    assert path.read_text("utf-8").count('"conditions"') == 1


def test_each_point_is_on_the_disk_before_the_next(programs: Any, tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    recorder = programs.record.open_record(path, conditions(programs))
    recorder.write("gemm", "one", POINT)
    assert json.loads(path.read_text("utf-8").splitlines()[-1])["point"] == "one"
    recorder.close()


@pytest.mark.parametrize("kept", [1, 5, 40])
def test_half_a_line_is_dropped_with_a_notice(programs: Any, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "raw.jsonl"
    write(programs, path, "one", "two")
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:kept])
    recorder = programs.record.open_record(path, conditions(programs))
    recorder.write("gemm", "three", POINT)
    recorder.close()
    assert recorder.done == {"one", "two", "three"}
    assert f"cut off after {kept} bytes" in recorder.notices[0]
    assert path.read_bytes().startswith(whole)
    assert len(read_measurements(path.read_text("utf-8"), str(path)).points) == 3


def test_a_file_cut_off_in_its_first_line(programs: Any, tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    path.write_text('{"conditions": {"id": "7f', "utf-8")
    recorder = write(programs, path, "one")
    assert len(recorder.notices) == 1
    assert len(read_measurements(path.read_text("utf-8"), str(path)).points) == 1


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"device": "NVIDIA L4"}, "device is 'NVIDIA H200' there, 'NVIDIA L4' here"),
        ({"precision": "fp16"}, "precision"),
        ({"versions": {"torch": "2.12.0", "driver": "580.1"}}, "torch is 2.11.0 there, 2.12.0 here"),
    ],
)
def test_other_conditions_are_refused_or_kept_apart(
    programs: Any, tmp_path: Path, more: dict[str, Any], named: str
) -> None:
    path = tmp_path / "raw.jsonl"
    write(programs, path, "one")
    before = path.read_bytes()
    with pytest.raises(programs.record.Refused, match="other conditions") as refusal:
        programs.record.open_record(path, conditions(programs, **more))
    assert named in str(refusal.value)
    assert path.read_bytes() == before
    recorder = programs.record.open_record(path, conditions(programs, **more), append=True)
    assert recorder.done == set()
    recorder.write("gemm", "one", POINT)
    recorder.close()
    assert len(read_measurements(path.read_text("utf-8"), str(path)).conditions) == 2


def test_foreign_and_busy_files_are_refused(programs: Any, tmp_path: Path) -> None:
    refused = programs.record.Refused
    path = tmp_path / "raw.jsonl"
    path.write_text("m,n,k\n1,2,3\n", "utf-8")
    with pytest.raises(refused, match="line 1: not a JSON object"):
        programs.record.open_record(path, conditions(programs))
    path.write_text('{"a": 1}\n', "utf-8")
    with pytest.raises(refused, match="no conditions line"):
        programs.record.open_record(path, conditions(programs))
    with pytest.raises(refused, match="cannot be written"):
        programs.record.open_record(tmp_path, conditions(programs))
    held = programs.record.open_record(tmp_path / "busy.jsonl", conditions(programs))
    with pytest.raises(refused, match="another run"):
        programs.record.open_record(tmp_path / "busy.jsonl", conditions(programs))
    held.close()


def test_file_systems_without_locks_are_written_all_the_same(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(programs.record.fcntl, "flock", refuses)
    recorder = write(programs, tmp_path / "raw.jsonl", "one")
    assert "no locks" in recorder.notices[0]
    assert "one" in (tmp_path / "raw.jsonl").read_text("utf-8")


def test_clock_samples_and_their_reasons(programs: Any) -> None:
    clocks = programs.clocks
    # As nvidia-smi prints them: SM clock, bits of nvmlClocksEventReasons.
    power, hot, idle = "1755, 0x0000000000000004", "1200, 0x0000000000000040", "345, 0x0000000000000001"
    sampler = clocks.Clocks(None)
    assert sampler.since(0.0) == clocks.Spell()
    for at_s, line in enumerate((idle, power, power, hot)):
        sampler._samples.append(clocks.parse(line, float(at_s)))
    assert sampler.since(9.0) == clocks.Spell(1200.0, power_limited=False, overheated=True)
    assert sampler.since(1.0) == clocks.Spell(1755.0, power_limited=True, overheated=True)
    for nothing in ("[N/A], 0x0", "1755, [Not Supported]", "", "No devices were found"):
        assert clocks.parse(nothing, 0.0) is None


def test_digest_names_the_best_rates(programs: Any, tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    recorder = programs.record.open_record(path, conditions(programs))
    product = {"m": 1000, "n": 1000, "k": 1000, "batch": 1}
    recorder.write("gemm", "slow", {**product, "seconds": 2e-5, "spread": 0.0})
    recorder.write("gemm", "fast", {**product, "seconds": 1e-5, "spread": 0.0})
    recorder.write("copy", "up", {"direction": "h2d", "bytes": 10**9, "seconds": 0.02, "spread": 0.0})
    recorder.write("launch", "launch 0", {"seconds": 2.5e-6, "spread": 0.3, "wide_spread": True})
    recorder.close()
    text = "\n".join(programs.digest.digest(path))
    assert "200.00 TFLOP/s" in text and "best: fast" in text
    assert "50.00 GB/s" in text
    assert "4 points, 1 of them" in text


@pytest.mark.parametrize("content", ['{"hidden": 4096}', "one line\nand another", '{"hidden": 1}\n{"last"'])
def test_a_file_of_something_else_stays_as_it_is(programs: Any, tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(content, "utf-8")
    with pytest.raises(programs.record.Refused, match="file of this program"):
        programs.record.open_record(path, conditions(programs))
    assert path.read_text("utf-8") == content
