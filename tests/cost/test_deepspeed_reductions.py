"""What DeepSpeed's ZeRO 1 and 2 send to average gradients, against DeepSpeed's own function."""

from __future__ import annotations

import inspect

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import grid_of, job_of
from mist_megatron.cost.traffic import layer_traffic
from mist_megatron.formats.files import load_model
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import Execution, Plan, StagePlan, Zero, Zero3Name
from mist_megatron.spec.training import TrainingSpec


def reduced_s(zero: Zero, whose: Zero3Name | None) -> float:
    """Seconds of one layer's gradients on 8 GPUs of a node."""
    model = load_model("gpt3-7b")
    stage = StagePlan(layers=model.layers, nodes=1, gpus_per_node=8, dp=8, tp=1, micro_batch=1, zero=zero)
    plan = Plan(
        model=model,
        training=TrainingSpec(global_batch=8, seq_len=2048, precision="bf16"),
        cluster=cluster_of(CATALOGUE["a100-sxm-80gb"], 8),
        target="deepspeed",
        grad_accum=1,
        stages=(stage,),
        execution=Execution(zero3=whose),
    )
    evaluator = evaluator_for(job_of(plan))[0]
    grid = grid_of(plan, 0)
    return float(layer_traffic(grid, evaluator.loads(grid).block, evaluator.time_context).reduce_s)


@pytest.mark.parametrize("zero", [1, 2])
def test_all_ranks_get_all_gradients(zero: Zero) -> None:
    """A ring sends 2 (n - 1) / n of the bytes to reduce them everywhere, (n - 1) / n to reduce parts."""
    assert reduced_s(zero, None) == pytest.approx(2.0 * reduced_s(zero, "deepspeed-2021"), rel=0.02)
    assert reduced_s(zero, None) == pytest.approx(reduced_s(0, None), rel=1e-9)


def test_stage_3_scatters() -> None:
    assert reduced_s(3, None) == pytest.approx(reduced_s(1, "deepspeed-2021"), rel=0.02)


def test_deepspeed_reduces_on_all_ranks_by_itself() -> None:
    """Its default, and what `average_tensor` does with it whatever `reduce_scatter` says."""
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    assert config.model_fields["use_multi_rank_bucket_allreduce"].default is True
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    source = inspect.getsource(DeepSpeedZeroOptimizer.average_tensor)
    assert "if self.use_multi_rank_bucket_allreduce" in source
    assert "self.allreduce_and_scatter(" in source
    scatter = inspect.getsource(DeepSpeedZeroOptimizer.allreduce_bucket)
    assert "dist.all_reduce(tensor_to_allreduce" in scatter
