"""What is held beside a step where passes of neighbouring micro-batches are paired layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kept_programs import KEPT

from mist_megatron.cost.evaluate import make_evaluator
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.schedule import INTERLEAVED, in_flight
from mist_megatron.spec.training import TrainingSpec

HIDDEN, TOP_K, INNER, TOKENS, LAYERS = 2048, 8, 768, 4096, 48


def most_layers(stage: int, stages: int, vpp: int, grad_accum: int, layers: int) -> int:
    """Layers held at once, pass by pass as schedules.py and model_chunk_schedule_plan.py of megatron-core
    order them: one more chunk of warm-up passes, then each layer comes in beside one that goes back."""
    chunks = grad_accum * vpp
    ahead = min(2 * (stages - stage - 1) + (vpp - 1) * stages + 1, chunks)
    held = most = ahead * layers
    for behind in range(chunks):
        for _ in range(layers):
            held += ahead + behind < chunks
            most = max(most, held)
            held -= 1
    assert held == 0
    return most


@pytest.mark.parametrize(("stages", "vpp", "grad_accum"), [(2, 2, 8), (2, 3, 4), (4, 2, 16), (8, 4, 8)])
def test_paired_passes_hold_a_layer_more(stages: int, vpp: int, grad_accum: int) -> None:
    for stage in range(stages):
        usual = in_flight(INTERLEAVED, stage, stages, grad_accum, vpp) * vpp * 5
        assert most_layers(stage, stages, vpp, grad_accum, 5) in (usual, usual + 1)
    many = 100 * stages
    usual = in_flight(INTERLEAVED, 0, stages, many, vpp) * vpp * 5
    assert most_layers(0, stages, vpp, many, 5) == usual + 1


def plan(**execution: object) -> Plan:
    said = Execution(expert_parallel=8, expert_dispatcher="flex", **execution)  # type: ignore[arg-type]
    stage = StagePlan(layers=LAYERS, nodes=1, gpus_per_node=8, dp=8, tp=1, micro_batch=1)
    return Plan(
        model=preset("qwen3-30b-a3b"),
        training=TrainingSpec(global_batch=64, seq_len=TOKENS),
        cluster=cluster_of(gpu("h100-sxm-80gb"), 8),
        target="megatron",
        grad_accum=8,
        stages=(stage,),
        execution=said,
    )


def of_layers(count: int) -> Plan:
    whole = plan()
    stage = replace(whole.stages[0], layers=count)
    return replace(whole, model=replace(whole.model, layers=count), stages=(stage,))


def activations(asked: Plan) -> float:
    job = job_of(asked)
    told = predict(
        asked, make_evaluator(job, datasheet_prices(job.cluster, job.training.precision), cache=KEPT)
    )
    return told.stages[0].memory_terms_bytes["activations"]


def test_of_mixtures_the_layer_that_comes_in_is_whole() -> None:
    usual, paired = activations(plan()), activations(plan(expert_overlap=True))
    saved = activations(of_layers(2)) - activations(of_layers(1))
    rows = TOKENS * TOP_K
    passing = 2 * rows * (3 * INNER + 2 * HIDDEN)
    assert paired - usual == pytest.approx(saved + passing, rel=1e-12)


def test_graphs_keep_what_they_read_and_give() -> None:
    usual, graphs = activations(plan()), activations(plan(cuda_graphs=("moe_router", "moe_preprocess")))
    assert graphs - usual == pytest.approx(2 * 2 * TOKENS * HIDDEN * LAYERS, rel=1e-12)
