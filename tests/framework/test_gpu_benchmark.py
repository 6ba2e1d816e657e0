"""The GPU benchmark on the CPU: what it does to make a model fit changes nothing that the model learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("steps") / "steps.jsonl"
    run("training_steps.py", "--device", "cpu", "--steps", "2", "--out", str(out))
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()]


def test_recomputation_and_offload_change_no_bit_of_the_loss(steps: Path) -> None:
    base, *others = lines(steps)
    same = [line for line in others if line["case"]["micro_batch"] == base["case"]["micro_batch"]]
    assert len(same) == 7
    assert {line["loss"] for line in same} == {base["loss"]}
    assert any(line["loss"] != base["loss"] for line in others)


def test_asked_fractions_are_what_happens(steps: Path) -> None:
    for line in lines(steps):
        case = line["case"]
        assert line["host_optimizer_share"] == pytest.approx(case["optimizer"], abs=0.1)
        assert line["host_activation_share"] == pytest.approx(case["activations"], abs=0.05)


def test_a_second_run_measures_nothing_again(steps: Path) -> None:
    before = steps.read_bytes()
    run("training_steps.py", "--device", "cpu", "--out", str(steps))
    assert steps.read_bytes() == before


def test_comparison_reads_what_was_measured(steps: Path, tmp_path: Path) -> None:
    measured = tmp_path / "measured.jsonl"
    # As a GPU would have told them: the CPU has no peak.
    told = [{**line, "seconds": 0.5, "peak_bytes": 8 << 30} for line in lines(steps)]
    told[1] = {"case": told[1]["case"], "out_of_memory": True}
    measured.write_text("".join(json.dumps(line) + "\n" for line in told), "utf-8")
    rows = json.loads(run("compare.py", str(measured), "--gpu", "a100-sxm-80gb", "--json"))
    assert len(rows) == len(told)
    assert rows[0]["time_error"] == pytest.approx(rows[0]["predicted_s"] / 0.5 - 1.0)
    assert rows[0]["memory_error"] == pytest.approx(rows[0]["predicted_bytes"] / (8 << 30) - 1.0)
    assert "time_error" not in rows[1]
    text = run("compare.py", str(measured), "--gpu", "a100-sxm-80gb")
    assert "mean absolute error" in text and "9 cases" in text
