"""What each stage of an emitted DeepSpeed pipeline holds on device and host while it trains on CPU, against
what `predict` says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs the test framework environment")
import deepspeed_by_plan
import warm_start_server

from mist_megatron.ask.emit import launch_sources
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import grid_of, job_of
from mist_megatron.formats.files import write_artifacts
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.deepspeed import MEMORY

HERE = Path(__file__).parent
MODEL = model_from_mapping(
    {"family": "gpt", "layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "tied_embeddings": False}, "model"
)
MODEL = replace(MODEL, learned_positions=0, linear_bias=False)
SEQ, MICRO_BATCH, GRAD_ACCUM = 32, 2, 3
TOKEN_IDS = 8.0 * MICRO_BATCH * SEQ
OFFLOADS = (Offload(optimizer=0.5, weights=0.5), Offload(optimizer=0.25))
CASES = {"as it is": (Offload(), Offload()), "with fractions": OFFLOADS}
LARGEST = max(MODEL.ffn_hidden, MODEL.vocab, 3 * MODEL.hidden) * MODEL.hidden
"""Elements of the largest parameter ..."""
LAYER = 12 * MODEL.hidden**2
"""... and of a layer but for its norms."""


def plan(offloads: tuple[Offload, Offload]) -> Plan:
    """Two stages of one rank each."""
    words = {"nodes": 1, "gpus_per_node": 1, "dp": 1, "tp": 1, "micro_batch": MICRO_BATCH, "zero": 1}
    return Plan(
        model=MODEL,
        training=TrainingSpec(
            global_batch=MICRO_BATCH * GRAD_ACCUM, seq_len=SEQ, precision="bf16", flash_attention=True
        ),
        cluster=ClusterSpec(gpu=CATALOGUE["a100-sxm-80gb"], nodes=1, gpus_per_node=2),
        target="deepspeed+patches",
        grad_accum=GRAD_ACCUM,
        stages=tuple(
            StagePlan(layers=layers, ckpt=ckpt, offload=offload, **words)  # type: ignore[arg-type]
            for layers, ckpt, offload in zip((1, 3), (0, 1), offloads, strict=True)
        ),
    )


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Case -> what each rank found; both folders in one start."""
    root = tmp_path_factory.mktemp("piped")
    folders = {name: root / str(k) for k, name in enumerate(CASES)}
    for name, folder in folders.items():
        write_artifacts(folder, artifacts(plan(CASES[name]), launch_sources(probe=False)))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(HERE / "deepspeed_pipeline_bytes.py"), "all", *map(str, folders.values())]
    path = f"{HERE}:{HERE.parent.parent / 'patches'}"
    environment = warm_start_server.environment("deepspeed", PYTHONPATH=path)
    environment = {k: v for k, v in environment.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {
        name: [json.loads((folder / f"held.{rank}.json").read_text()) for rank in range(2)]
        for name, folder in folders.items()
    }


def predicted(planned: Plan, stage: int) -> dict[str, float]:
    sizes = evaluator_for(job_of(planned))[0].memory_terms(grid_of(planned, stage))
    return {name: float(size) for name, size in sizes.items()}


def on_device(planned: Plan) -> Plan:
    """The same plan with nothing on the host."""
    return replace(planned, stages=tuple(replace(s, offload=Offload()) for s in planned.stages))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_states_are_where_predict_says(name: str, stage: int, held: dict[str, list[dict]]) -> None:
    planned, found = plan(CASES[name]), held[name][stage]
    assert found["stage"] == stage
    here, all_of_it = predicted(planned, stage), predicted(on_device(planned), stage)
    for kind, unit in (("weights", 2 * max(LAYER, LARGEST)), ("optimizer", 16 * LARGEST)):
        away = getattr(planned.stages[stage].offload, kind) * all_of_it[kind]
        assert abs(found[kind]["device"] - here[kind]) <= unit / 2, (kind, found[kind], here)
        assert abs(found[kind]["host"] - away) <= unit / 2, (kind, found[kind], away)
    # Whole, in the parameters, from the first backward pass to the step: no sums are kept or copied besides.
    assert set(found["grads"]) == {round(here["grads"])}
    assert set(found["sums_on_host"]) == {0}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_pipe_buffers_and_buckets_are_the_predicted_ones(
    name: str, stage: int, held: dict[str, list[dict]]
) -> None:
    planned, found = plan(CASES[name]), held[name][stage]
    evaluator = evaluator_for(job_of(planned))[0]
    grid = grid_of(planned, stage)
    activation = 2.0 * MICRO_BATCH * SEQ * MODEL.hidden
    # Of the buffers that `predict` counts some visit the device with offloaded weights.
    buffers = predicted(on_device(planned), stage)["buffers"]
    bucket = 2.0 * MEMORY.bucket_elements
    one, two = (
        float(evaluator.memory_moments(replace(grid, in_flight=grid.in_flight * k))["activations"])
        for k in (1, 2)
    )
    saved = float(evaluator.loads(grid).block.saved_bytes)
    ckpt = planned.stages[stage].ckpt
    layers = (planned.stages[stage].layers - ckpt) * saved + ckpt * activation
    a_micro_batch = (two - one) / float(grid.in_flight) - layers
    if stage == 0:
        a_micro_batch -= TOKEN_IDS  # integers, which are not counted
    per_micro_batch = round(a_micro_batch) * float(grid.in_flight)
    assert max(found["pipe"]) == per_micro_batch + buffers - bucket
    shrunk = 2 * deepspeed_by_plan.BUCKET / bucket
    assert set(found["buckets"]) == {round(bucket * shrunk)}
    # What the moment of the reduction adds to what is held.
    moment = float(evaluator.memory_moments(grid)["beyond.reduction"])
    assert set(found["buckets_at_reduction"]) == {round((bucket + moment) * shrunk)}


def test_the_last_stage_begins_with_one_micro_batchs_logits(held: dict[str, list[dict]]) -> None:
    """The logits of a second one come with it, and stay."""
    logits = 2 * MICRO_BATCH * SEQ * MODEL.vocab
    first, *later = held["as it is"][1]["pipe"]
    assert later == [first + logits] * len(later)
