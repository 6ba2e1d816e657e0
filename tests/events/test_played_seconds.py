"""A step of many micro-batches from the events of some of them."""

from __future__ import annotations

import pytest
from plans_to_play import FULL_OFFLOAD, evaluator_of, plan_of

from mist_megatron.events.iteration import played_s, simulate
from mist_megatron.spec.plan import Execution, Plan

BESIDE = Execution(overlap_grad_reduce=True, overlap_param_gather=True)
PLANS = {
    "mist, unlike stages": plan_of(3, 5, 2, target="mist", grad_accum=24, dp=2, offload=FULL_OFFLOAD, ckpt=1),
    "megatron, chunks": plan_of(
        *[6] * 4, target="megatron", schedule="interleaved", vpp=3, execution=BESIDE, dp=2, grad_accum=32
    ),
    "megatron, slow first stage": plan_of(9, 2, 2, 3, target="megatron", execution=BESIDE, grad_accum=31),
    "megatron, zero bubble": plan_of(*[4] * 4, target="megatron", schedule="zb-h1", grad_accum=32),
    "deepspeed, sends in turn": plan_of(4, 6, 4, target="deepspeed", dp=2, grad_accum=40),
    "one stage": plan_of(6, target="deepspeed", dp=4, zero=3, grad_accum=16),
    "few micro-batches": plan_of(3, 4, 3, target="mist", grad_accum=7),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_equals_all_events(plan: Plan) -> None:
    told = played_s(plan, evaluator_of(plan))
    assert told == pytest.approx(simulate(plan, evaluator_of(plan)).iteration_s, rel=1e-9)


def test_long_work_is_left_alone() -> None:
    """Of 96 stages with 384 layers even five pipelines full are 368,640 passes over layers."""
    plan = plan_of(*[4] * 96, target="megatron", grad_accum=960)
    assert played_s(plan, evaluator_of(plan)) is None
