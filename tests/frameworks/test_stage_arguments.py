"""What stages.json says reaches the right rank, before anything of a framework is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mist_patches.core.stage_arguments import (
    apply_stage_arguments,
    rank_of_process,
    read_stages,
    stage_of_rank,
)

from mist_megatron.frameworks.megatron import write as megatron
from mist_megatron.frameworks.stages_json import stages_text
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

LAUNCH = Path(__file__).parent.parent.parent / "launch"


def plan() -> Plan:
    stages = tuple(
        StagePlan(layers=n, nodes=1, gpus_per_node=2, dp=1, tp=2, micro_batch=2, ckpt=c)
        for n, c in ((14, 5), (10, 0))
    )
    return Plan(
        model=presets.PRESETS["gpt3-1.3b"],
        training=TrainingSpec(global_batch=16, seq_len=2048),
        cluster=ClusterSpec(gpu=catalogue.gpu("l4-24gb"), nodes=2, gpus_per_node=2),
        target="megatron+patches",
        grad_accum=8,
        stages=stages,
    )


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    path = tmp_path / "stages.json"
    path.write_text(stages_text(megatron.stages(plan())))
    return path


def environment(rank: int, world: int = 4) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world)}


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_each_rank_gets_its_stage(stages: Path, rank: int, stage: int) -> None:
    argv, variables = ["x", "--bf16"], environment(rank)
    assert apply_stage_arguments(read_stages(stages), argv, variables)["stage"] == stage
    wanted = ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "5"]
    assert argv == ["x", "--bf16", *(wanted if stage == 0 else [])]
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_twice_does_no_harm(stages: Path) -> None:
    argv, variables = ["x"], environment(0)
    for _ in range(2):
        apply_stage_arguments(read_stages(stages), argv, variables)
    assert argv.count("--recompute-granularity") == 1


def test_placed_ranks(tmp_path: Path) -> None:
    """GPU 3 plays rank 0: the process on it gets the first stage's arguments and rank 0."""
    path = tmp_path / "stages.json"
    path.write_text(stages_text(megatron.stages(replace(plan(), rank_map=(3, 1, 2, 0)))))
    document = read_stages(path)
    assert [rank_of_process(document, environment(gpu)) for gpu in range(4)] == [3, 1, 2, 0]
    variables = environment(3)
    assert apply_stage_arguments(document, ["x"], variables)["stage"] == 0
    assert variables["RANK"] == "0"


def test_a_variable_that_must_not_be_set(stages: Path) -> None:
    document = read_stages(stages)
    document["environment"] = {"CUDA_DEVICE_MAX_CONNECTIONS": None}
    variables = {**environment(0), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    apply_stage_arguments(document, ["x"], variables)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in variables


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "RANK is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, "for 4 GPUs, this job has 8"),
    ],
)
def test_the_wrong_job_is_refused(stages: Path, variables: dict[str, str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        apply_stage_arguments(read_stages(stages), ["x"], variables)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON"), ('{"schema": 2}', "schema 2"), ("[]", "schema list"), ('{"schema": 1}', "stages")],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "stages.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=said):
        read_stages(path)
    with pytest.raises(SystemExit, match="cannot read"):
        read_stages(tmp_path / "nothing.json")


def test_a_rank_without_a_stage(stages: Path) -> None:
    with pytest.raises(SystemExit, match="no stage for rank 9"):
        stage_of_rank(read_stages(stages), 9)


def start(stages: Path, script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    import os

    variables = {**os.environ, **environment(0), "PYTHONPATH": str(LAUNCH.parent / "patches")}
    command = [sys.executable, str(LAUNCH / "pretrain.py"), *words]
    command += ["--mist-stages", str(stages), f"--mist-script={script}", "--bf16"]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_entry_runs_the_users_script_with_the_stage(stages: Path, tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(
        "import json, sys, neighbour\nif __name__ == '__main__': print('GOT', json.dumps(sys.argv))\n"
    )
    (tmp_path / "neighbour.py").write_text("")
    done = start(stages, script, "--lr", "1e-4")
    assert done.returncode == 0, done.stderr
    argv = json.loads(done.stdout.partition("GOT ")[2])
    assert argv[:4] == [str(script), "--lr", "1e-4", "--bf16"]
    assert argv[-1] == "5" and "--mist-stages" not in argv


def test_entry_refuses_a_missing_script(stages: Path, tmp_path: Path) -> None:
    done = start(stages, tmp_path / "nothing.py")
    assert done.returncode == 1
    assert "MEGATRON_LM" in done.stderr and "Traceback" not in done.stderr
