"""Any valid plan, of any model, target and schedule, is priced: finite, positive, and its terms add up."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kept_programs import KEPT

from mist_megatron.cost.evaluate import make_evaluator
from mist_megatron.cost.predict import job_of, predict, prediction_document
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import TARGET_NAMES, Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

MODELS = (
    "gpt3-1.3b",
    "llama-7b",
    "falcon-7b",
    "falcon-40b",
    "llama3-8b",
    "qwen2.5-7b",
    "gpt2-xl",
    "mistral-7b",
)
ratio = st.sampled_from((0.0, 0.125, 0.5, 1.0))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    model = presets.preset(draw(st.sampled_from(MODELS)))
    stages = draw(st.sampled_from((1, 2, 4)))
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if model.heads % n == 0]))
    dp, cp = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2)))
    micro_batch, grad_accum = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    schedule = draw(st.sampled_from(("1f1b", "gpipe", "zb-h1", "interleaved") if stages > 1 else ("1f1b",)))
    if schedule == "interleaved":
        grad_accum *= stages
    gpus = tp * dp * cp
    each = [model.layers // stages] * stages
    each[-1] += model.layers - sum(each)
    if schedule == "interleaved" and any(layers % 2 for layers in each):
        schedule = "1f1b"
    vpp = 2 if schedule == "interleaved" else 1
    return Plan(
        model=model,
        training=TrainingSpec(
            global_batch=micro_batch * dp * grad_accum,
            seq_len=draw(st.sampled_from((512, 2048))),
            precision=draw(st.sampled_from(("fp16", "bf16", "fp8"))),
            flash_attention=draw(st.booleans()),
            dropout=draw(st.sampled_from((0.0, 0.1))),
        ),
        cluster=ClusterSpec(
            gpu=catalogue.gpu(draw(st.sampled_from(("l4-24gb", "h100-sxm-80gb", "mi300x-192gb")))),
            nodes=stages,
            gpus_per_node=gpus,
        ),
        target=draw(st.sampled_from(TARGET_NAMES)),
        grad_accum=grad_accum,
        schedule=schedule,  # type: ignore[arg-type]
        vpp=vpp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        execution=Execution(
            context_parallel=cp,
            overlap_grad_reduce=draw(st.sampled_from((None, False, True))),
            overlap_param_gather=draw(st.sampled_from((None, False, True))),
            fused_cross_entropy=draw(st.sampled_from((None, False, True))),
        ),
        stages=tuple(
            StagePlan(
                layers=layers,
                nodes=1,
                gpus_per_node=gpus,
                dp=dp,
                tp=tp,
                micro_batch=micro_batch,
                zero=draw(st.sampled_from((0, 1, 2, 3))),
                ckpt=vpp * draw(st.integers(0, layers // vpp)),  # frameworks count them by chunk
                recompute="full",
                offload=Offload(
                    weights=draw(ratio), grads=draw(ratio), optimizer=draw(ratio), activations=draw(ratio)
                ),
            )
            for layers in each
        ),
    )


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_valid_plan_has_a_price(plan: Plan) -> None:
    job = job_of(plan)
    evaluator = make_evaluator(job, datasheet_prices(job.cluster, job.training.precision), cache=KEPT)
    prediction = predict(plan, evaluator)
    assert all(math.isfinite(n) for n in numbers(prediction_document(prediction)))
    assert prediction.iteration_s > 0
    assert 0 < prediction.mfu < 1
    assert 0 <= prediction.time.bubble_fraction < 1
    for stage in prediction.stages:
        assert stage.stable_s > stage.forward_s > 0
        assert stage.stable_s > stage.weight_grad_s > 0
        assert stage.peak_memory_bytes > stage.memory_terms_bytes["weights"] >= 0
        assert sum(stage.stable_terms_s.values()) == pytest.approx(stage.stable_s)
        assert sum(stage.memory_terms_bytes.values()) == pytest.approx(stage.peak_memory_bytes)
        assert all(value >= -1e-12 for value in stage.stable_terms_s.values())
