"""Megatron's own overlaps are searched for where they gain, and given up where its patches exclude them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.tune import tune
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.formats.files import load_model
from mist_megatron.search.search import NoneFaster, Settings, search
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution, TargetName
from mist_megatron.spec.training import TrainingSpec

FUSED = Execution(fused_cross_entropy=True)
OVERLAPPED = replace(FUSED, overlap_grad_reduce=True, overlap_param_gather=True)
COARSE = Settings(step=0.5)


def job(target: TargetName, *, gpus: int = 2, limit_gib: float | None = None) -> Job:
    limit = None if limit_gib is None else int(limit_gib * 2**30)
    return Job(
        model=load_model("gpt3-1.3b"),
        training=TrainingSpec(global_batch=16, seq_len=2048, precision="bf16", flash_attention=True),
        cluster=ClusterSpec(
            gpu=catalogue.gpu("l4-24gb"), nodes=1, gpus_per_node=gpus, memory_limit_bytes=limit
        ),
        target=target,
    )


def test_a_plan_for_megatron_overlaps_its_collectives():
    settings = replace(COARSE, limits=Limits(fixed={"pp": 1, "tp": 1}))
    found = tune(job("megatron"), space=space_named("megatron"), settings=settings)
    apart = search(evaluator_for(job("megatron"))[0], space_named("megatron"), settings)
    assert found.plans[0].execution == OVERLAPPED
    assert found.result.objective_s < apart.objective_s, "dp 2 over PCIe: there is something to hide"


def test_a_pipeline_gathers_all_at_once():
    """Stages would gather one after the other, each when its first micro-batch comes."""
    settings = replace(COARSE, limits=Limits(fixed={"pp": 2, "dp": 2}))
    found = tune(job("megatron", gpus=4), space=space_named("megatron"), settings=settings)
    assert found.plans[0].execution == replace(FUSED, overlap_grad_reduce=True)
    gathering = replace(found.plans[0], execution=OVERLAPPED)
    gathering_s = predict(gathering, evaluator_for(job_of(gathering))[0]).iteration_s
    assert gathering_s > found.predictions[0].iteration_s


def test_what_the_user_says_stays():
    off = Execution(overlap_grad_reduce=False, overlap_param_gather=False, fused_cross_entropy=False)
    said = replace(job("megatron"), execution=off)
    found = tune(said, space=space_named("megatron"), settings=COARSE)
    assert found.plans[0].execution == said.execution


def test_given_up_where_gradients_must_leave_the_gpu():
    """One GPU of so little memory that a plan needs weights or gradients on the host."""
    tight = job("megatron+patches", gpus=1, limit_gib=8.0)
    found = tune(tight, space=space_named("full"), settings=COARSE)
    (stage,) = found.plans[0].stages
    assert stage.offload.weights > 0.0 and stage.offload.grads > 0.0
    assert found.plans[0].execution == replace(FUSED, decoupled_step=True)


def test_only_what_is_faster_than_asked():
    evaluator, _ = evaluator_for(job("megatron"))
    best_s = search(evaluator, space_named("megatron"), COARSE).objective_s
    with pytest.raises(NoneFaster):
        search(evaluator, space_named("megatron"), replace(COARSE, below_s=best_s))
    again = search(evaluator, space_named("megatron"), replace(COARSE, below_s=best_s * 1.001))
    assert again.objective_s == best_s
