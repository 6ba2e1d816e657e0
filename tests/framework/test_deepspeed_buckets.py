"""The buckets that DeepSpeed reduces gradients through, as it allocates them, against predicted memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs the test framework environment")
import warm_start_server
from deepspeed_buckets import CASES
from kept_programs import KEPT

from mist_megatron.cost.evaluate import make_evaluator
from mist_megatron.cost.predict import grid_of, job_of
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.deepspeed import MEMORY

ELEMENTS = 1000
PROGRAM = Path(__file__).with_name("deepspeed_buckets.py")
CLUSTER = ClusterSpec(gpu=CATALOGUE["a100-sxm-80gb"], nodes=1, gpus_per_node=2)
MODEL = model_from_mapping({"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 128}, "model")
TRAINING = TrainingSpec(global_batch=6, seq_len=64, flash_attention=True)


@pytest.fixture(scope="module")
def held() -> dict[str, dict]:
    command = [sys.executable, str(PROGRAM), str(ELEMENTS)]
    environment = warm_start_server.environment("deepspeed", PYTHONPATH=str(PROGRAM.parent))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def plan_of(level: int, overlaps: bool) -> Plan:
    words = {"layers": 2, "nodes": 1, "gpus_per_node": 2, "dp": 2, "tp": 1, "micro_batch": 1, "zero": level}
    return Plan(
        model=MODEL,
        training=TRAINING,
        cluster=CLUSTER,
        target="deepspeed",
        grad_accum=3,
        stages=(StagePlan(**words),),  # type: ignore[arg-type]
        execution=Execution(overlap_grad_reduce=overlaps),
    )


@pytest.mark.parametrize(("level", "overlaps"), CASES)
def test_buckets_are_as_many_and_as_long_as_deepspeed_s(level: int, overlaps: bool, held: dict) -> None:
    found = held[f"{level} {overlaps}"]
    plan = plan_of(level, overlaps)
    evaluator, grid = (
        make_evaluator(job_of(plan), datasheet_prices(CLUSTER, "bf16"), cache=KEPT),
        grid_of(plan, 0),
    )
    buffers = float(evaluator.memory_terms(grid)["buffers"])
    at_step = buffers + float(evaluator.memory_moments(grid)["beyond.step"])
    larger = MEMORY.bucket_elements / ELEMENTS
    # Also while micro-batches are only added up, also where the model has fewer elements; at the step those
    # of level 3 alone. Other buffers, and what the step makes, are a megabyte here.
    assert [seen * larger for seen in found["passes"]] == pytest.approx([buffers] * 3, abs=1e6)
    assert found["at_step"] * larger == pytest.approx(at_step, abs=1e6)
