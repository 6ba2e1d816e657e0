"""The largest part of memory is named, and what is said to make it smaller does."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mist_megatron as mm
from mist_megatron.cost.memory_parts import part_words, shrunk_by
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import Plan, StagePlan, TargetName
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations


def plan_for(target: TargetName, model: str, **stage: object) -> Plan:
    one = StagePlan(layers=preset(model).layers, nodes=1, gpus_per_node=8, dp=8, tp=1, micro_batch=4)
    whole = replace(one, **stage)  # type: ignore[arg-type]
    return Plan(
        model=preset(model),
        training=TrainingSpec(global_batch=64, seq_len=2048),
        cluster=cluster_of(CATALOGUE["h100-sxm-80gb"], 8),
        target=target,
        grad_accum=8 // whole.micro_batch,
        stages=(whole,),
    )


def applied(plan: Plan, switch: str) -> Plan | None:
    """The plan with a switch turned on; None for what changes its whole shape."""
    (stage,) = plan.stages
    if switch.startswith("zero"):
        return replace(plan, stages=(replace(stage, zero=int(switch.split()[1])),))
    if switch.startswith("offload."):
        kind = switch.split()[0].removeprefix("offload.")
        return replace(plan, stages=(replace(stage, offload=replace(stage.offload, **{kind: 1.0})),))
    if switch.startswith("recompute"):
        return replace(plan, stages=(replace(stage, recompute=switch.split()[1]),))
    if switch.startswith("ckpt"):
        return replace(plan, stages=(replace(stage, ckpt=stage.layers),))
    if switch.startswith("micro_batch"):
        return replace(
            plan, grad_accum=2 * plan.grad_accum, stages=(replace(stage, micro_batch=stage.micro_batch // 2),)
        )
    if switch.startswith("tp"):
        dp, batch = stage.dp // 2, plan.grad_accum * 2
        return replace(plan, grad_accum=batch, stages=(replace(stage, dp=dp, tp=2 * stage.tp),))
    return None


@pytest.mark.parametrize(
    ("target", "model", "stage"),
    [
        ("megatron", "gpt3-1.3b", {}),
        ("megatron", "llama3-8b", {"micro_batch": 1, "ckpt": 32}),
        ("megatron+patches", "gpt3-2.7b", {"zero": 1}),
        ("deepspeed", "gpt3-1.3b", {"zero": 1}),
        ("deepspeed+patches", "llama-7b", {"zero": 2, "micro_batch": 2}),
        ("mist", "gpt3-2.7b", {}),
    ],
)
def test_each_switch_that_is_named_makes_its_part_smaller(target, model, stage):
    plan = plan_for(target, model, **stage)
    before = mm.predict(plan, what_if=True).prediction.stages[0]
    tried = 0
    for part, held in before.memory_terms_bytes.items():
        for switch in shrunk_by(part, before.peak_moment, plan, 0):
            changed = applied(plan, switch)
            if changed is None:
                continue
            after = mm.predict(changed, what_if=True).prediction.stages[0]
            # Another moment may become the worst; what was largest at this one is what was asked for.
            assert after.memory_terms_bytes[part] < held or after.peak_moment != before.peak_moment, switch
            tried += 1
    assert tried >= 4


def test_logits_are_named_where_they_are_the_most():
    """A large vocabulary and few layers: 128,256 rows of logits beside a model of one layer."""
    small = plan_for("megatron", "llama3-8b", micro_batch=8)
    one_layer = replace(
        small, model=replace(small.model, layers=1), stages=(replace(small.stages[0], layers=1),)
    )
    stage = mm.predict(one_layer).prediction.stages[0]
    largest = max(stage.memory_terms_bytes, key=lambda name: stage.memory_terms_bytes[name])
    assert part_words(largest, stage.peak_moment) == "logits and their gradient at the loss"
    assert "micro_batch below 8" in shrunk_by(largest, stage.peak_moment, one_layer, 0)
    assert "logits and their gradient" in " ".join(repr(mm.predict(one_layer)).split())


def test_predict_refuses_what_emit_refuses_of_traffic_beside_products():
    plan = plan_for("megatron", "gpt3-1.3b")
    overlapped = replace(plan, execution=replace(plan.execution, tp_comm_overlap=True))
    (rule,) = violations(overlapped)
    assert "needs sequence_parallel" in rule
    for ask in (mm.predict, mm.emit):
        with pytest.raises(Exception, match="tp_comm_overlap"):
            ask(overlapped)


def test_emit_says_that_a_plan_does_not_fit_on_gpu_or_host():
    roomy = plan_for("megatron", "gpt3-1.3b", zero=1)
    assert not mm.emit(roomy).warnings
    (device,) = mm.emit(replace(roomy, cluster=replace(roomy.cluster, memory_limit_bytes=8e9))).warnings
    assert "does NOT fit" in device and "on a GPU" in device
    away = replace(roomy.stages[0], offload=replace(roomy.stages[0].offload, optimizer=1.0))
    small = replace(roomy, stages=(away,), cluster=replace(roomy.cluster, host_memory_bytes=1e9))
    (host,) = mm.emit(small).warnings
    assert "host memory" in host and "does NOT fit" in host
