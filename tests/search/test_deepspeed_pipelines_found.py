"""Pipelines that are found for deepspeed+patches: what its stages may have, and what they may not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.tune import tune
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.files import load_model
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.search import Settings, search
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

FULL = space_named("full")
PIPED = Settings(step=0.5, limits=Limits(fixed={"pp": 2}))


def job(limit_gib: float, **execution: bool) -> Job:
    cluster = ClusterSpec(
        gpu=catalogue.gpu("l4-24gb"), nodes=1, gpus_per_node=4, memory_limit_bytes=int(limit_gib * 2**30)
    )
    return Job(
        model=load_model("gpt3-1.3b"),
        training=TrainingSpec(global_batch=16, seq_len=2048, precision="bf16", flash_attention=True),
        cluster=cluster,
        target="deepspeed+patches",
        execution=Execution(**execution),
    )


def test_stages_have_their_own_where_memory_is_short():
    found = tune(job(7.0), space=FULL, settings=PIPED)
    plan, told = found.plans[0], found.predictions[0]
    assert violations(plan) == () and told.fits
    assert {stage.zero for stage in plan.stages} == {1} and plan.execution.decoupled_step is None
    first, second = plan.stages
    assert (first.ckpt, first.offload) != (second.ckpt, second.offload) or first.layers != second.layers
    assert any(stage.ckpt or stage.offload.any for stage in plan.stages)
    evaluator = evaluator_for(job_of(plan))[0]
    assert simulate(plan, evaluator).iteration_s == pytest.approx(told.iteration_s, rel=0.03)
    # Each stage would step when its first micro-batch has come, one after the other.
    decoupled = replace(plan, execution=Execution(decoupled_step=True))
    other = predict(decoupled, evaluator_for(job_of(decoupled))[0])
    assert other.iteration_s > told.iteration_s


def test_decoupled_steps_are_searched_for_in_one_piece_only():
    usual, decoupled = execution_choices(job(20.0), FULL, Limits())
    assert not usual.job.execution.decoupled_step and "pp" not in usual.limits.fixed
    assert decoupled.job.execution.decoupled_step and decoupled.limits.fixed == {"pp": 1}
    assert len(execution_choices(job(20.0), FULL, PIPED.limits)) == 1


def test_what_has_no_pipeline_is_said():
    asked = job(20.0)
    level = replace(PIPED, limits=Limits(fixed={"pp": 2, "zero": 2}))
    with pytest.raises(InputError, match=r"with several stages .* runs ZeRO 1, got ZeRO 2"):
        search(evaluator_for(asked)[0], FULL, level)
    overlapping = job(20.0, overlap_grad_reduce=True)
    with pytest.raises(InputError, match="pp=2"):
        search(evaluator_for(overlapping)[0], FULL, PIPED)
