"""`simulate` as a user meets it: the text, the JSON, the trace file, and what is refused."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = """
schema: 1
model: gpt3-2.7b
training: {global_batch: 16, seq_len: 2048, precision: fp16, flash_attention: false, dropout: 0.0}
cluster: {gpu: l4-24gb, nodes: 1, gpus_per_node: 8}
target: mist
grad_accum: 8
stages:
  - {layers: 15, nodes: 1, gpus_per_node: 4, dp: 2, tp: 2, micro_batch: 1, zero: 2, ckpt: 8,
     offload: {optimizer: 0.25}}
  - {layers: 17, nodes: 1, gpus_per_node: 4, dp: 2, tp: 2, micro_batch: 1, zero: 1, ckpt: 4,
     offload: {activations: 0.25}}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN, "utf-8")
    return path


def test_text_fits_80_columns(mist, plan: Path) -> None:  # type: ignore[no-untyped-def]
    """Copies so slow that they bind, whatever the profile says of them."""
    ran = mist("simulate", str(plan), "--scale", "link=d2h:0.25")
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    for words in ("iteration", "closed form", "bubble", "memory over time", "critical path", "copy out"):
        assert words in ran.out


def test_json(mist, plan: Path) -> None:  # type: ignore[no-untyped-def]
    ran = mist("simulate", str(plan), "--json", "--scale", "op=matmul:0.5", "--scale", "link=intra:2")
    found = json.loads(ran.out)
    assert ran.code == 0
    assert {"iteration_s", "bubble_fraction", "closed_form_s", "devices", "memory"} <= found.keys()
    assert found["baseline"]["speedup"] > 1.0
    assert [device["ranks"] for device in found["devices"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for device in found["devices"]:
        parts = ("exposed_compute_s", "exposed_communication_s", "overlapped_s", "host_s", "idle_s")
        assert sum(device[part] for part in parts) == pytest.approx(found["iteration_s"], rel=1e-6)
    for stage in found["memory"]:
        assert max(stage["largest_bytes"]) == stage["peak_bytes"] == stage["predicted_peak_bytes"]


def test_other_schedules(mist, plan: Path) -> None:  # type: ignore[no-untyped-def]
    """Mist runs 1F1B only: another schedule is played, and told that it cannot be run."""
    ran = mist("simulate", str(plan), "--schedule", "zb-h1")
    assert ran.code == 0
    assert "cannot run on mist: schedule zb-h1" in ran.out
    assert "times as fast" in ran.out


def read_trace(path: Path) -> dict[str, list[dict]]:  # type: ignore[type-arg]
    by_phase: dict[str, list[dict]] = {}  # type: ignore[type-arg]
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text("utf-8")
    for event in json.loads(text)["traceEvents"]:
        by_phase.setdefault(event["ph"], []).append(event)
    return by_phase


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_trace(mist, plan: Path, tmp_path: Path, name: str) -> None:  # type: ignore[no-untyped-def]
    """The file is there, whole and alone, over what was there before; its format has tests of its own."""
    path = tmp_path / name
    path.write_text("what was there before", "utf-8")
    assert mist("simulate", str(plan), "--trace", str(path)).code == 0
    found = read_trace(path)
    titles = [e["args"]["name"] for e in found["M"] if e["name"] == "process_name"]
    assert titles == ["stage 0 (ranks 0-3, alike)", "stage 1 (ranks 4-7, alike)"]
    assert len(found["s"]) == len(found["f"]) == 2 * 8
    assert len({event["pid"] for event in found["C"]}) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["plan.yaml", name])


def test_every_rank(mist, plan: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "trace.json"
    ran = mist("simulate", str(plan), "--trace", str(path), "--ranks", "all", "--json")
    assert [device["ranks"] for device in json.loads(ran.out)["devices"]] == [[k] for k in range(8)]
    found = read_trace(path)
    titles = {e["pid"]: e["args"]["name"] for e in found["M"] if e["name"] == "process_name"}
    assert list(titles.values()) == [f"rank {k} (stage {k // 4})" for k in range(8)]
    assert {event["pid"] for event in found["X"]} == titles.keys()
    assert json.loads(ran.out)["trace"] == str(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scale", "op=gemm:2"], "unknown op 'gemm'; known: matmul"),
        (["--schedule", "2f2b"], "unknown schedule '2f2b'; known: 1f1b"),
        (["--schedule", "interleaved", "--vpp", "0"], "--vpp is 0; wanted --vpp 2 or more"),
        (
            ["--schedule", "interleaved", "--vpp", "40"],
            "vpp is 40; wanted no more chunks than the largest stage has layers, 17",
        ),
        (
            ["--schedule", "interleaved", "--vpp", "17"],
            "stages[0].layers is 15; wanted one for each of vpp 17 chunks",
        ),
        (["--vpp", "2"], "without --schedule"),
        (
            ["--schedule", "zb-2p", "--vpp", "2"],
            "--vpp is 2 with --schedule zb-2p; only schedule interleaved",
        ),
        (["--ranks", "some"], "known: representative, all"),
        (["--trace", "nowhere/trace.json"], "there is no folder nowhere"),
    ],
)
def test_bad_input(mist, plan: Path, arguments: list[str], words: str) -> None:  # type: ignore[no-untyped-def]
    ran = mist("simulate", str(plan), *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert words in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


def test_the_plan_is_never_overwritten(mist, plan: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    linked = tmp_path / "linked.json"
    linked.symlink_to(plan)
    ran = mist("simulate", str(plan), "--trace", str(linked))
    assert ran.code == 2
    assert "linked.json is what the command reads" in ran.err
    assert plan.read_text("utf-8") == PLAN


@pytest.mark.parametrize("columns", [20, 40])
def test_narrow_terminals(mist, plan: Path, tmp_path: Path, columns: int) -> None:  # type: ignore[no-untyped-def]
    """Memory over time becomes as long as a line; the file's name is told whole."""
    path = tmp_path / "[red]t.json"
    ran = mist("simulate", str(plan), "--trace", str(path), COLUMNS=str(columns))
    curves = [line for line in ran.out.splitlines() if re.search("[▁▂▃▄▅▆▇█]", line)]
    assert [len(line) for line in curves] == [columns, columns]
    assert f"wrote {path}, for ui.perfetto.dev" in " ".join(ran.out.split())


def test_bad_plans(mist, plan: Path) -> None:  # type: ignore[no-untyped-def]
    plan.write_text(PLAN.replace("grad_accum: 8", "grad_accum: 7"), "utf-8")
    assert mist("simulate", str(plan)).code == 2
    assert mist("simulate", "no_such_plan.yaml").code == 2


def test_terminals_without_blocks(mist_process, plan: Path) -> None:  # type: ignore[no-untyped-def]
    """ASCII and Latin-1 have no block characters: memory over time is told in digits."""
    for encoding in ("ascii", "latin-1"):
        ran = mist_process("simulate", str(plan), PYTHONIOENCODING=encoding)
        assert (ran.code, ran.err) == (0, "")
        assert re.search(r"^1 +[1-8]{40} +1 ", ran.out, re.MULTILINE)


def test_closed_stdout(plan: Path) -> None:
    """`>&-`: nobody is told, and nothing goes wrong."""
    command = (
        f"exec {shlex.quote(sys.executable)} -m mist_megatron simulate {shlex.quote(str(plan))} --json >&-"
    )
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_too_many_events(mist, plan: Path) -> None:  # type: ignore[no-untyped-def]
    """Refused at once, not after an hour."""
    large = PLAN.replace("grad_accum: 8", "grad_accum: 2000000")
    plan.write_text(large.replace("global_batch: 16", "global_batch: 4000000"), "utf-8")
    ran = mist("simulate", str(plan))
    assert ran.code == 2
    assert "128,000,000 passes" in ran.err
    assert "try: a plan with grad_accum 15,625" in ran.err


def test_a_stage_that_does_not_fit_is_told(mist, plan: Path) -> None:  # type: ignore[no-untyped-def]
    """GPipe holds all 32 micro-batches at once."""
    large = PLAN.replace("grad_accum: 8", "grad_accum: 32").replace("global_batch: 16", "global_batch: 64")
    plan.write_text(large, "utf-8")
    ran = mist("simulate", str(plan), "--schedule", "gpipe")
    assert ran.code == 0
    assert re.search(r"does not fit: stage \d needs .*; 2 of 2 stages are over", ran.out)
    assert max(map(len, ran.out.splitlines())) <= 80
    found = json.loads(mist("simulate", str(plan), "--schedule", "zb-2p", "--json").out)["memory"]
    assert all(stage["predicted_peak_bytes"] is None for stage in found)
    assert all(stage["fits"] == (stage["peak_bytes"] <= stage["limit_bytes"]) for stage in found)


def test_the_critical_path_takes_the_whole_iteration(mist, plan: Path) -> None:  # type: ignore[no-untyped-def]
    """Also here, where two iterations reach into each other."""
    found = json.loads(mist("simulate", str(plan), "--json").out)
    path = found["critical_path"]
    for part in (path["by_kind"], [{"seconds": e["end_s"] - e["start_s"]} for e in path["events"]]):
        assert sum(share["seconds"] for share in part) == pytest.approx(found["iteration_s"], rel=1e-9)
    shares = re.findall(r"^[a-z -]+ +[\d,]+ +[\d.e-]+ +([\d.]+)%$", mist("simulate", str(plan)).out, re.M)
    assert sum(map(float, shares)) == pytest.approx(100.0, abs=0.5)


def test_no_minus_nothing(mist, plan: Path) -> None:  # type: ignore[no-untyped-def]
    """A closed form that is off by a rounding error is off by +0.00 %, and nobody computes for -0.0 %."""
    alone = PLAN.split("stages:", maxsplit=1)[0].replace("target: mist", "target: megatron")
    alone = alone.replace("gpus_per_node: 8", "gpus_per_node: 1").replace("grad_accum: 8", "grad_accum: 16")
    stage = "  - {layers: 32, nodes: 1, gpus_per_node: 1, dp: 1, tp: 1, micro_batch: 1, zero: 0, ckpt: 0}\n"
    plan.write_text(f"{alone}stages:\n{stage}", "utf-8")
    ran = mist("simulate", str(plan))
    assert "(+0.00%)" in ran.out
    assert "-0.0" not in ran.out
