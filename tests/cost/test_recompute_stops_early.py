"""What a recomputation that stops early leaves out: a layer's last product, unless dropout follows it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import grid_of, job_of
from mist_megatron.formats.files import load_model
from mist_megatron.price.prices import Gemm
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import Plan, StagePlan, TargetName, Zero
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.deepspeed import ZERO3_NETWORK_SHARES
from mist_megatron.targets.facts import Zero3Facts


def plan_of(target: TargetName, *, dropout: float = 0.0, gpus: int = 8, zero: Zero = 3) -> Plan:
    model = load_model("gpt3-7b")
    stage = StagePlan(layers=model.layers, nodes=gpus // 8, gpus_per_node=8, dp=gpus, tp=1, micro_batch=4,
                      zero=zero, ckpt=model.layers)  # fmt: skip
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=4 * gpus, seq_len=2048, precision="bf16", dropout=dropout),
        cluster=cluster_of(CATALOGUE["a100-sxm-80gb"], gpus),
        target=target,
        grad_accum=1,
        stages=(stage,),
    )


@pytest.mark.parametrize(
    ("target", "dropout", "left_out"),
    [("deepspeed", 0.0, True), ("deepspeed", 0.1, False), ("megatron", 0.0, False), ("mist", 0.0, False)],
)
def test_the_last_product_is_not_run_again(target: TargetName, dropout: float, left_out: bool) -> None:
    """torch.utils.checkpoint without re-entrance: counted in `framework/test_checkpoint_stops_early.py`."""
    zero: Zero = 1 if target == "megatron" else 3
    plan = plan_of(target, dropout=dropout, zero=zero)
    evaluator = evaluator_for(job_of(plan))[0]
    block = evaluator.loads(grid_of(plan, 0)).block
    tokens, hidden = 4 * 2048.0, float(plan.model.hidden)
    sizes = (np.asarray(size) for size in (tokens, hidden, 4.0 * hidden, 1.0))
    product_s = float(evaluator.prices.of(Gemm(*sizes)).seconds)
    less_s = float(block.forward_s - block.again[0])
    if left_out:
        # And the addition after it, a tenth of it.
        assert product_s < less_s < 1.2 * product_s
    else:
        assert less_s == 0.0


def test_layer_wise_collectives_reach_a_share_of_the_network() -> None:
    """Between nodes only."""
    for gpus, slower in ((8, 1.0), (16, 1.0 / ZERO3_NETWORK_SHARES["fsdp"])):
        plan = plan_of("deepspeed", gpus=gpus)
        plan = replace(plan, execution=replace(plan.execution, zero3="fsdp"))
        evaluator = evaluator_for(job_of(plan))[0]
        quick = evaluator_for(job_of(plan))[0]
        context = evaluator.time_context
        quick._context = replace(context, facts=replace(context.facts, zero3=Zero3Facts()))
        grid = grid_of(replace(plan, stages=(replace(plan.stages[0], ckpt=0),)), 0)
        from mist_megatron.cost.traffic import layer_traffic

        ratio = (
            layer_traffic(grid, evaluator.loads(grid).block, evaluator.time_context).gather_s
            / layer_traffic(grid, quick.loads(grid).block, quick.time_context).gather_s
        )
        assert float(ratio) == pytest.approx(slower, rel=0.1)
