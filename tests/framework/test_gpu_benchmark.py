"""The GPU benchmark on the CPU: what it does to make a model fit changes nothing that the model learns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from short_form import long_form

pytest.importorskip("torch")

import warm_start_server

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / program), *arguments]
    environment = warm_start_server.environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
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


@pytest.fixture(scope="module")
def offloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind and fraction in Megatron itself, with the patches."""
    pytest.importorskip("megatron", reason="megatron-core is not installed")
    out = tmp_path_factory.mktemp("first run")
    environment = {
        **warm_start_server.environment("megatron"),
        "FIRST_RUN_OUT": str(out),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    command = ["bash", str(FOLDER / "first_run.sh"), "h200-sxm-141gb", "--cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = (out / "report.txt").read_text("utf-8")
    assert "mean absolute error" in report, "one command does it all"
    assert report.count("from those without patches") == 14
    measured = out / "offload.jsonl"
    beside = [line for line in lines(measured) if line["case"]["norms"]]
    assert [line["case"]["norms"] for line in beside] == [1, 2], "Transformer Engine needs a GPU"
    assert all(line["losses"][-1] < line["losses"][0] for line in beside)
    return measured


@pytest.mark.parametrize(("usable", "written", "status"), [(True, 2, 1), (False, 1, 3)])
def test_a_case_that_fails_keeps_no_other_from_being_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: bool, written: int, status: int
) -> None:
    """Unless the GPU takes no more work from the process: the next one goes on behind the case."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import megatron_offload as program

    def fail(case: Any) -> Any:
        monkeypatch.setattr(program, "is_usable", lambda: usable)
        raise RuntimeError("a kernel that is not there")

    monkeypatch.setattr(program, "stepper", fail)
    monkeypatch.setattr(program, "is_usable", lambda: True)
    out, chosen = tmp_path / "offload.jsonl", [program.Case(), program.Case(layers=2)]
    assert program.run(out, chosen, lambda: True, 1, True) == status
    assert [line["failed"] for line in lines(out)] == ["RuntimeError: a kernel that is not there"] * written


def of_one_model(offloads: Path) -> list[dict[str, Any]]:
    """All but those whose layers compute something else."""
    return [line for line in lines(offloads) if not line["case"]["norms"]]


KINDS = ("weights", "grads", "optimizer", "activations")


@long_form
def test_every_kind_and_fraction_learns_the_same_in_megatron(offloads: Path) -> None:
    base, *others = of_one_model(offloads)
    asked = {(kind, line["case"][kind]) for line in others[1:-1] for kind in KINDS if line["case"][kind]}
    assert asked == {(kind, fraction) for kind in KINDS for fraction in (0.25, 0.5, 1.0)}
    for line in others:
        if not line["case"]["optimizer"]:  # Adam on host and device rounds differently
            assert line["losses"] == base["losses"], line["case"]
        assert line["losses"] == pytest.approx(base["losses"], rel=1e-3)
        for kind in KINDS:
            assert line["host_share"][kind] == pytest.approx(line["case"][kind], abs=0.11), line["case"]
    assert others[-1]["case"]["decoupled"] and others[0]["case"]["decoupled"], "alone, and with all others"


@long_form
def test_comparison_reads_megatron_too(offloads: Path, tmp_path: Path) -> None:
    measured = tmp_path / "measured.jsonl"
    overlap = {"copies_s": 0.1, "beside_compute": 0.75}
    big = {"hidden": 2048, "ffn_hidden": 5632, "layers": 16, "heads": 16, "vocab": 50304, "seq": 1024}
    told = [
        {**line, "case": {**line["case"], **big}, "seconds": 0.5, "peak_bytes": 8 << 30, "overlap": overlap}
        for line in of_one_model(offloads)
    ]
    measured.write_text("".join(json.dumps(line) + "\n" for line in told), "utf-8")
    rows = json.loads(run("compare.py", str(measured), "--gpu", "h200-sxm-141gb", "--json"))
    base, predicted = rows[0]["predicted_bytes"], {}
    for item in rows[2:-1]:
        ((kind, fraction),) = [(k, item["case"][k]) for k in KINDS if item["case"][k]]
        predicted.setdefault(kind, {})[fraction] = item["predicted_bytes"]
    for kind in ("weights", "optimizer", "activations"):
        assert base > predicted[kind][0.5] > predicted[kind][1.0], kind
    assert rows[0]["beside_compute"] == 0.75
    assert "75%" in run("compare.py", str(measured), "--gpu", "h200-sxm-141gb")


def test_overlap_of_a_trace(tmp_path: Path) -> None:
    """Copies from 0 to 10 and from 20 to 30 microseconds, the first half beside kernels."""

    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    trace = [
        event("kernel", "gemm", 0, 6),
        event("kernel", "add", 4, 6),
        event("kernel", "gemm", 40, 5),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 10),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 41, 1),
        event("cpu_op", "aten::copy_", 20, 10),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": trace}), "utf-8")
    found = json.loads(run("trace_overlap.py", str(path)))
    assert found["beside_compute"] == pytest.approx(0.5)
    assert found["copies_s"] == pytest.approx(20e-6)
    assert found["kernels_s"] == pytest.approx(15e-6)
    assert found["to_device_s"] == found["to_host_s"] == pytest.approx(10e-6)
