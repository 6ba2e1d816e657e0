"""A step of many micro-batches from the events of some of them."""

from __future__ import annotations

import pytest
from plans_to_play import FULL_OFFLOAD, evaluator_of, plan_of

from mist_megatron.events import iteration
from mist_megatron.events.iteration import played_s, simulate
from mist_megatron.spec.passes import Order, PassCosts
from mist_megatron.spec.plan import Execution, Plan
from mist_megatron.spec.schedule import schedule_orders

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


def test_zero_bubble_balances_what_the_stages_take_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every layer recomputed: gradients of inputs and the forward pass anew, weight gradients apart."""
    seen: list[PassCosts] = []

    def orders(*asked: object) -> tuple[Order, ...]:
        seen.append(asked[-1])  # type: ignore[arg-type]
        return schedule_orders(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(iteration, "schedule_orders", orders)
    for layers, recomputed in ((6, 6), (2, 2), (4, 0)):
        plan = plan_of(*[layers] * 2, target="megatron", schedule="zb-h1", ckpt=recomputed)
        simulate(plan, evaluator_of(plan))
    whole, third, kept = seen
    assert 2.0 * whole.forward < whole.backward < 2.5 * whole.forward
    assert 0.2 * whole.forward < whole.weight < whole.forward
    assert 2.0 * third.forward < whole.forward < 3.0 * third.forward
    assert kept.forward < kept.backward < 1.5 * kept.forward
