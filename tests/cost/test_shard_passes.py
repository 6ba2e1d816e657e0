"""Passes over memory around collectives of shards, by hand: PyTorch's first FSDP."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import grid_of, job_of
from mist_megatron.cost.work import stage_work
from mist_megatron.formats.files import load_model
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import Execution, Plan, StagePlan, Zero
from mist_megatron.spec.training import TrainingSpec

RANKS = 8


def plan_of(execution: Execution, zero: Zero = 3, grad_accum: int = 1) -> Plan:
    model = load_model("gpt3-7b")
    stage = StagePlan(
        layers=model.layers, nodes=1, gpus_per_node=RANKS, dp=RANKS, tp=1, micro_batch=1, zero=zero
    )
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=RANKS * grad_accum, seq_len=2048, precision="bf16"),
        cluster=cluster_of(CATALOGUE["a100-sxm-80gb"], RANKS),
        target="deepspeed",
        grad_accum=grad_accum,
        stages=(stage,),
        execution=execution,
    )


def passes_of(plan: Plan) -> tuple[float, float, float, float]:
    """Bytes per parameter that stop a layer around its gather forward, its gather and its reduction backward,
    and that are added to old gradients."""
    evaluator = evaluator_for(job_of(plan))[0]
    grid = grid_of(plan, 0)
    layer = stage_work(grid, evaluator.loads(grid), evaluator.time_context).kept
    profile = evaluator.time_context.prices.profile
    rate = CATALOGUE["a100-sxm-80gb"].memory_bytes_per_s.value * profile.kernels.memory_fraction.value
    latency_s = profile.kernels.memory_latency_s.value
    parameters = float(layer.load.parameters)

    def per_parameter(seconds: np.ndarray) -> float:
        return max(float(seconds) - latency_s, 0.0) * rate / parameters

    return (
        per_parameter(layer.forward.blocking_gather_s),
        per_parameter(layer.backward.blocking_gather_s),
        per_parameter(layer.backward.blocking_reduce_s),
        per_parameter(layer.accumulate_s),
    )


@pytest.mark.parametrize(
    ("grad_bytes", "reduced"),
    [
        # Laid side by side (read 2, write 2), cast (2, 4), divided (4, 4); a shard's rest divided (4, 4).
        (4, 4 + 6 + 8 + 8 / RANKS),
        # Nothing to cast before; divided (2, 2), and of a shard (2, 2), which is cast (2, 4).
        (2, 4 + 4 + (4 + 6) / RANKS),
    ],
)
def test_the_first_fsdp_lays_gradients_side_by_side(grad_bytes: int, reduced: float) -> None:
    plan = plan_of(Execution(zero3="fsdp", grad_bytes=grad_bytes), grad_accum=2)
    forward, backward, after, added = passes_of(plan)
    assert forward == pytest.approx(6 / RANKS, rel=0.02)
    assert backward == pytest.approx(6 / RANKS, rel=0.02)
    assert after == pytest.approx(reduced, rel=0.01)
    # Read two, write one, of a shard.
    assert added == pytest.approx(3 * grad_bytes / RANKS, rel=0.02)


def test_gradients_alone_are_gathered_for_once() -> None:
    """SHARD_GRAD_OP keeps weights until the backward pass has ended."""
    execution = Execution(zero3="fsdp", grad_bytes=4)
    forward, backward, after, _ = passes_of(plan_of(execution, zero=2))
    assert (forward, backward) == (pytest.approx(6 / RANKS, rel=0.02), 0.0)
    assert after == pytest.approx(4 + 6 + 8 + 8 / RANKS, rel=0.01)


def test_one_rank_moves_nothing() -> None:
    plan = plan_of(Execution(zero3="fsdp", grad_bytes=4))
    stage = replace(plan.stages[0], gpus_per_node=1, dp=1)
    alone = replace(
        plan,
        stages=(stage,),
        cluster=cluster_of(CATALOGUE["a100-sxm-80gb"], 1),
        training=replace(plan.training, global_batch=1),
    )
    assert passes_of(alone)[:3] == (0.0, 0.0, 0.0)
