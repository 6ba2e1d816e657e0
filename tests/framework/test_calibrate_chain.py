"""From measuring on the CPU to a plan: run, fit, show and tune, each with the file of the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from command_line import run


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capfd.readouterr()
    code = run([*arguments, "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_measured_fitted_shown_and_planned_with(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    raw, profile = str(tmp_path / "raw.jsonl"), str(tmp_path / "rehearsed.yaml")
    parts = "launch,copies,gemm,attention,memory,host-adam"
    said(capfd, "calibrate", "run", "--device", "cpu", "--what", parts, "--out", raw)
    fit = ["calibrate", "fit", raw, "--gpu", "h200-sxm-141gb", "--out", profile]
    assert run(fit) == 2  # a CPU is not this GPU
    assert "--rehearsal" in capfd.readouterr().err
    fitted = said(capfd, *fit, "--rehearsal")
    shown = said(capfd, "calibrate", "show", profile)
    assert shown["content_hash"] == fitted["content_hash"]
    figures = {figure["name"]: figure for figure in shown["figures"]}  # type: ignore[attr-defined]
    for name in ("launch_s", "h2d_bytes_per_s", "host_adam_parameters_per_s"):
        assert (figures[name]["source"], figures[name]["measured"]) == ("rehearsal", False)
    assert "not for planning" in str(shown["note"])
    assert {"gemm", "attention_forward", "attention_backward"} <= {
        table["operator"]
        for table in shown["tables"]  # type: ignore[attr-defined]
    }
    job = ["--model", "gpt3-1.3b", "--gpus", "2", "--global-batch", "8", "--seq", "512"]
    tuned = said(capfd, "tune", *job, "--gpu", profile, "--space", "megatron")
    assert str(fitted["content_hash"]) in json.dumps(tuned["provenance"])
    shipped = said(capfd, "tune", *job, "--gpu", "h200-sxm-141gb", "--space", "megatron")
    assert tuned["prediction"]["iteration_s"] != shipped["prediction"]["iteration_s"]  # type: ignore[index]
