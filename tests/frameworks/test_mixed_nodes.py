"""A plan on several kinds of nodes is started with each node at its place, by the names of the GPUs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from mist_megatron.ask.emit import emit
from mist_megatron.formats.plan_yaml import plan_from_text
from mist_megatron.frameworks.launch import node_kinds
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec, NodeGroup

PLAN = """
schema: 1
model: llama2-7b
training: {global_batch: 64, seq_len: 2048, precision: bf16, flash_attention: true, dropout: 0.0}
cluster:
  {gpu: h100-sxm-80gb, nodes: 3, gpus_per_node: 8,
   groups: [{gpu: h100-sxm-80gb, nodes: 1}, {gpu: a100-sxm-80gb, nodes: 2}]}
target: megatron
grad_accum: 8
stages:
- {layers: 16, nodes: 1, gpus_per_node: 8, dp: 8, tp: 1, micro_batch: 1}
- {layers: 8, nodes: 1, gpus_per_node: 8, dp: 8, tp: 1, micro_batch: 1}
- {layers: 8, nodes: 1, gpus_per_node: 8, dp: 8, tp: 1, micro_batch: 1}
"""
DRIVERS = {"n1": "NVIDIA A100-SXM4-80GB", "n2": "NVIDIA H100 80GB HBM3", "n3": "NVIDIA A100-SXM4-80GB"}


@pytest.mark.parametrize(
    ("name", "drivers", "others"),
    [
        ("h100-sxm-80gb", "NVIDIA H100 80GB HBM3", "NVIDIA H200"),
        ("l4-24gb", "NVIDIA L4", "NVIDIA L40S"),
        ("b200-sxm-180gb", "NVIDIA B200", "NVIDIA GB200"),
        ("rtx3090-24gb", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090"),
        ("v100-sxm-16gb", "Tesla V100-SXM2-16GB", "Tesla T4"),
    ],
)
def test_patterns_are_of_what_drivers_say(name, drivers, others):
    t4 = "t4-16gb" if name != "t4-16gb" else "l4-24gb"
    groups = tuple(NodeGroup(gpu=gpu(one), nodes=1) for one in (name, t4))
    (pattern, _, _), _ = node_kinds(ClusterSpec(gpu=gpu(name), nodes=2, gpus_per_node=4, groups=groups))
    assert re.search(pattern, drivers) and not re.search(pattern, others)


def test_sizes_tell_what_models_do_not():
    groups = tuple(NodeGroup(gpu=gpu(f"a100-sxm-{size}gb"), nodes=1) for size in (40, 80))
    cluster = ClusterSpec(gpu=gpu("a100-sxm-40gb"), nodes=2, gpus_per_node=8, groups=groups)
    assert [re.search(p, "NVIDIA A100-SXM4-80GB") is None for p, *_ in node_kinds(cluster)] == [True, False]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    emit(plan_from_text(PLAN), target="megatron", out=tmp_path / "run")
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert "slurm.sbatch" in found and not {"skypilot.yaml", "trainjob.yaml", "pytorchjob.yaml"} & found
    return tmp_path / "run"


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    for name, body in scripts.items():
        path = folder.parent / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}", "MEGATRON_LM": "/megatron"}


@pytest.mark.parametrize(("rank", "driver", "starts"), [(0, "n2", True), (0, "n1", False), (2, "n3", True)])
def test_a_node_of_another_kind_does_not_start(folder, rank, driver, starts):
    known = programs(folder, torchrun='echo "started $*"')
    known |= programs(folder, **{"nvidia-smi": f'echo "{DRIVERS[driver]}"'}) | {"NODE_RANK": str(rank)}
    ran = subprocess.run(
        ["bash", folder / "train.sh"], env=known, capture_output=True, text=True, check=False
    )
    assert (ran.returncode == 0) is starts, ran.stderr
    assert f"--node-rank {rank}" in ran.stdout if starts else "order the nodes by kind" in ran.stderr


@pytest.mark.parametrize("missing", [None, "n3"])
def test_slurm_starts_nodes_in_the_order_of_the_plan(folder, missing):
    """Its own order is by name: n1 (A100), n2 (H100), n3 (A100)."""
    seen = "\n".join(f'echo "{node} {name}"' for node, name in DRIVERS.items() if node != missing)
    srun = f'if [[ "$*" == *nvidia-smi* ]]; then\n{seen}\nelse echo "$*"; cat "$SLURM_HOSTFILE"; fi'
    scontrol = f'if [[ "$1 $2" == "show job" ]]; then echo " Command={folder}/slurm.sbatch"; else echo n1; fi'
    known = programs(folder, srun=srun, scontrol=scontrol) | {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_SUBMIT_DIR": str(folder.parent),
    }  # fmt: skip
    script = ["bash", folder / "slurm.sbatch"]
    ran = subprocess.run(script, env=known, capture_output=True, text=True, check=False)
    if missing:
        assert ran.returncode == 2
        assert "wanted 2 node(s) with a100-sxm-80gb, got: n1" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    assert "--distribution=arbitrary" in ran.stdout
    assert ran.stdout.split()[-3:] == ["n2", "n1", "n3"]
