"""Launch files: shells and schedulers can read them, and placeholders are all in env.sh."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_line import run

from mist_megatron.ask.emit import launch_sources
from mist_megatron.errors import InputError
from mist_megatron.formats.files import write_artifacts
from mist_megatron.formats.plan_yaml import plan_to_yaml
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

SOURCES = launch_sources(probe=False)


def plan(target: str, *, nodes: int = 2, model: str = "llama2-7b", **more) -> Plan:
    spec = presets.PRESETS[model]
    stages = nodes if target.startswith("megatron") else 1
    per_node = 4
    stage = StagePlan(
        layers=spec.layers // stages,
        nodes=nodes // stages,
        gpus_per_node=per_node,
        dp=per_node * nodes // stages,
        tp=1,
        micro_batch=1,
        zero=1,
        **more.pop("stage", {}),
    )
    return Plan(
        model=spec,
        training=TrainingSpec(global_batch=stage.dp * 8, seq_len=2048),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=nodes, gpus_per_node=per_node),
        target=target,
        grad_accum=8,
        stages=(stage,) * stages,
        **more,
    )


PLANS = {
    "megatron": plan("megatron"),
    "one node": plan("megatron", nodes=1),
    "patches": plan("megatron+patches", stage={"offload": Offload(optimizer=0.5, activations=0.25)}),
    "learned positions": plan("megatron", model="gpt2-xl", nodes=1),
    "deepspeed": plan("deepspeed"),
    "deepspeed one node": plan("deepspeed", nodes=1),
    "deepspeed+patches": plan("deepspeed+patches", stage={"ckpt": 3, "offload": Offload(optimizer=0.5)}),
}


@pytest.fixture(params=PLANS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_artifacts(tmp_path / "out", artifacts(PLANS[request.param], SOURCES))
    return tmp_path / "out"


def scripts(folder: Path) -> list[str]:
    return [str(p) for p in sorted(folder.iterdir()) if p.suffix in {".sh", ".sbatch"}]


def test_shells_can_read_them(folder: Path) -> None:
    assert len(scripts(folder)) == 5
    for script in scripts(folder):
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_shellcheck_has_nothing_to_say(folder: Path) -> None:
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([program, *scripts(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_schedulers_find_their_required_fields(folder: Path) -> None:
    read = {p.name: yaml.safe_load(p.read_text()) for p in folder.glob("*.yaml")}
    name = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    job = read["trainjob.yaml"]
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(name, job["metadata"]["name"]) and len(job["metadata"]["name"]) <= 63
    assert job["spec"]["runtimeRef"]["name"]
    trainer = job["spec"]["trainer"]
    nodes = trainer["numNodes"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 4
    legacy = read["pytorchjob.yaml"]
    assert (legacy["apiVersion"], legacy["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = legacy["spec"]["pytorchReplicaSpecs"]
    assert sum(role["replicas"] for role in replicas.values()) == nodes
    for role in replicas.values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["image"] and container["command"]
        mounted = {m["name"] for m in container["volumeMounts"]}
        assert mounted == {v["name"] for v in role["template"]["spec"]["volumes"]}
    sky = read["skypilot.yaml"]
    assert (
        sky["num_nodes"] == nodes
        and sky["resources"]["accelerators"] == "H100:4"
        and "train.sh" in sky["run"]
    )
    batch = (folder / "slurm.sbatch").read_text()
    assert f"#SBATCH --nodes={nodes}\n" in batch and "#SBATCH --gpus-per-node=4\n" in batch


def test_python_files_compile_and_nothing_is_left_unfilled(folder: Path) -> None:
    for path in folder.iterdir():
        text = path.read_text()
        assert "{{" not in text and "{%" not in text, path.name
        if path.suffix == ".py":
            ast.parse(text)
        if path.suffix == ".json":
            json.loads(text)
        if path.name not in {"env.sh"}:
            assert "path/to" not in text, f"{path.name}: placeholders belong in env.sh"


def test_scripts_run_up_to_the_launcher(folder: Path, tmp_path: Path) -> None:
    """train.sh with stand-ins for torchrun and friends: every variable is set and the words are right."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in ("torchrun", "accelerate", "deepspeed"):
        (bin_folder / tool).write_text('#!/bin/bash\nprintf "%s\\n" "$0" "$@"\n')
        (bin_folder / tool).chmod(0o755)
    (folder / "hostfile").write_text("h1 slots=4\nh2 slots=4\n")
    clean = {"PATH": f"{bin_folder}:/usr/bin:/bin", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}
    trainers = ["huggingface", "megatron-deepspeed"] if (folder / "ds_config.json").exists() else [""]
    for trainer in trainers:
        for script in ("train.sh", "deepspeed_launcher.sh"):
            done = subprocess.run(
                ["bash", str(folder / script), "--extra", "1"],
                env={**clean, "TRAINER": trainer or "huggingface"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            words = done.stdout.splitlines()
            assert words[-2:] == ["--extra", "1"]
            assert str(folder / "stages.json") in words
    if trainers != [""]:
        wrong = subprocess.run(
            ["bash", str(folder / "train.sh")],
            env={**clean, "TRAINER": "x"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert wrong.returncode == 2 and "TRAINER" in wrong.stderr


def emitted(tmp_path: Path, planned: Plan, *words: str) -> int:
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(planned))
    return run(["emit", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out"), *words])


def test_command_writes_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emitted(tmp_path, PLANS["patches"], "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert sorted(said["files"]) == sorted(p.name for p in (tmp_path / "out").iterdir())
    assert emitted(tmp_path, PLANS["patches"]) == 2
    assert "--force" in capsys.readouterr().err
    assert emitted(tmp_path, PLANS["patches"], "--force") == 0


@pytest.mark.parametrize(
    ("planned", "target", "said"),
    [
        (PLANS["patches"], "deepspeed", "stages"),
        (PLANS["patches"], "megatron", "megatron+patches"),
        (PLANS["megatron"], "tpu", "unknown target"),
        (plan("mist", model="falcon-7b", nodes=1), "megatron", "parallel"),
        (plan("deepspeed", nodes=1, stage={"ckpt": 3}), "deepspeed", "ckpt"),
        (
            replace(PLANS["one node"], execution=Execution(tp_comm_overlap=True)),
            "megatron",
            "tp-comm-overlap",
        ),
    ],
)
@pytest.mark.usefixtures("warm")
def test_what_a_target_cannot_run_is_refused(
    planned: Plan, target: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emitted(tmp_path, planned, "--target", target) == (2 if target == "tpu" else 5)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_cost_model_alone_is_no_target() -> None:
    with pytest.raises(InputError, match="no framework"):
        artifacts(plan("mist", nodes=1), SOURCES)


def test_rank_map_is_turned_round() -> None:
    placed = replace(PLANS["megatron"], rank_map=(4, 5, 6, 7, 0, 1, 3, 2))
    document = json.loads(artifacts(placed, SOURCES)["stages.json"])
    assert document["rank_of_gpu"] == [4, 5, 7, 6, 0, 1, 2, 3]
    assert json.loads(artifacts(PLANS["megatron"], SOURCES)["stages.json"])["rank_of_gpu"] is None
