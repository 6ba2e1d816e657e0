"""What deepspeed+patches refuses: what its patches refuse, and what is not priced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mist_megatron.formats.plan_yaml import plan_from_mapping, plan_to_mapping
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import runnable_on, violations

EVERYTHING = Offload(weights=0.25, grads=0.5, optimizer=0.75, activations=0.125)


def plan(zero: int, offload: Offload, *, precision: str = "bf16", grad_accum: int = 4, **execution: object):
    stage = StagePlan(layers=24, nodes=1, gpus_per_node=8, dp=8, tp=1, micro_batch=1)
    return Plan(
        model=preset("gpt3-1.3b"),
        training=TrainingSpec(global_batch=8 * grad_accum, seq_len=2048, precision=precision),  # type: ignore[arg-type]
        cluster=cluster_of(CATALOGUE["h100-sxm-80gb"], 8),
        target="deepspeed+patches",
        grad_accum=grad_accum,
        stages=(replace(stage, zero=zero, ckpt=5, offload=offload),),  # type: ignore[arg-type]
        execution=Execution(**execution),  # type: ignore[arg-type]
    )


RUNS = [
    plan(3, EVERYTHING),
    plan(3, EVERYTHING, decoupled_step=True),
    plan(3, EVERYTHING, grad_bytes=4),
    plan(3, Offload(weights=0.5, grads=0.5)),
    plan(2, Offload(optimizer=0.5, grads=0.25, activations=0.5)),
    plan(2, Offload(optimizer=0.5, grads=1.0, weights=0.5), decoupled_step=True),
    plan(2, Offload(optimizer=0.5, grads=1.0), grad_accum=1),
    plan(2, Offload(optimizer=0.5, weights=0.5), grad_bytes=4),
    plan(1, Offload(optimizer=0.5, weights=0.5), decoupled_step=True),
    plan(1, Offload(optimizer=0.5), precision="fp16", grad_bytes=4),
    plan(0, Offload(activations=0.5)),
]
REFUSED = [
    (plan(0, Offload(weights=0.5)), "offload.weights 0.5: needs zero 1"),
    (plan(0, Offload(optimizer=0.5)), "offload.optimizer 0.5: needs zero 1"),
    (plan(1, Offload(optimizer=0.5, grads=0.5)), "below zero 2 gradients add up on the GPU"),
    (plan(2, Offload(grads=0.5)), "with offload.optimizer only"),
    (plan(2, Offload(optimizer=0.5, grads=0.5), grad_bytes=4), "wider than the weights"),
    (plan(2, Offload(optimizer=0.5, grads=0.5), grad_accum=1), "one micro-batch"),
    (plan(2, Offload(optimizer=0.5, grads=0.5), decoupled_step=True), "groups cut by layer"),
    (plan(2, Offload(optimizer=0.5, grads=0.5, weights=0.5)), "groups cut by layer"),
    (plan(0, Offload(), decoupled_step=True), "execution.decoupled_step needs zero 1"),
    (plan(1, Offload(optimizer=0.5), grad_bytes=4), "it runs 2, 3 with gradients of 4 bytes"),
    (plan(0, Offload(), precision="fp16", grad_bytes=4), "it runs 1, 2, 3 with gradients of 4 bytes"),
]


@pytest.mark.parametrize("planned", RUNS)
def test_what_the_patches_can_do_is_a_plan(planned: Plan) -> None:
    assert violations(planned) == ()
    assert runnable_on(planned).count("deepspeed+patches") == 1
    assert "deepspeed" not in runnable_on(planned)
    assert plan_from_mapping(plan_to_mapping(planned), "plan") == planned


@pytest.mark.parametrize(("planned", "reason"), REFUSED)
def test_what_they_refuse_is_refused_with_the_reason(planned: Plan, reason: str) -> None:
    (rule,) = violations(planned)
    assert reason in rule
    assert rule.startswith("stages[0]")


def test_several_stages_differ_in_what_the_patches_give_each() -> None:
    whole = plan(1, Offload())
    stage = replace(whole.stages[0], layers=12, gpus_per_node=4, dp=4, micro_batch=2)
    offload = Offload(optimizer=0.25, weights=0.5, activations=0.25)
    more = replace(stage, layers=stage.layers + 2, ckpt=1, offload=offload)
    piped = replace(whole, stages=(more, replace(stage, layers=stage.layers - 2)))
    assert violations(piped) == ()
    for zero in (0, 2, 3):
        both = tuple(replace(one, zero=zero, offload=Offload()) for one in piped.stages)
        (one, other) = violations(replace(piped, stages=both))
        assert one == f"stages[0].zero {zero}: it runs 1 with a pipeline" and other.startswith("stages[1]")
    assert any("no pipeline parallelism" in rule for rule in violations(replace(piped, target="deepspeed")))
