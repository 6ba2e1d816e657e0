"""What --fix sets of an execution: modules that are run again, the loss, delayed weight gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import small_job

from mist_megatron.ask.emit import framework_files
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.tune import tune
from mist_megatron.ask.tune_words import tune as tune_words
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.said import with_said
from mist_megatron.search.search import Settings
from mist_megatron.spec.cluster import LinkOverrides
from mist_megatron.spec.plan import TargetName


def found(job, *fix: str):
    return tune(job, settings=Settings(limits=parse_limits(fix, (), ())))


def tight_job():
    """Four GPUs on which something must be run again."""
    job = small_job("megatron", layers=8, batch=16)
    return replace(job, cluster=replace(job.cluster, memory_limit_bytes=9e9))


def test_chosen_modules_are_what_selective_runs_again() -> None:
    job = tight_job()
    every = {
        modules: found(job, f"recompute=selective,recompute_modules={modules}")
        for modules in ("mlp", "core_attn", "core_attn+mlp", "mlp+core_attn")
    }
    for modules, tuned in every.items():
        assert set(tuned.plan.execution.modules) == set(modules.split("+"))
        assert all(stage.recompute == "selective" for stage in tuned.plan.stages)
        written = "".join(framework_files(tuned.plan).values())
        assert f"--recompute-modules {' '.join(tuned.plan.execution.modules)}" in written
    assert every["mlp+core_attn"].iteration_s == every["core_attn+mlp"].iteration_s
    best_s = found(job, "recompute=selective").iteration_s
    assert best_s == min(every[modules].iteration_s for modules in ("mlp", "core_attn"))


def test_the_loss_with_and_without_a_wide_copy() -> None:
    job = small_job("megatron", layers=4, batch=16)
    usual, fused, plain = found(job), found(job, "fused_cross_entropy=1"), found(job, "fused_cross_entropy=0")
    assert usual.iteration_s == fused.iteration_s < plain.iteration_s
    assert plain.plan.execution.fused_cross_entropy is False
    assert "--cross-entropy-loss-fusion" in "".join(framework_files(fused.plan).values())
    assert "--cross-entropy-loss-fusion" not in "".join(framework_files(plain.plan).values())


def test_delayed_gradients_are_written_and_never_slower() -> None:
    words = {"model": "qwen3-30b-a3b", "gpus": 16, "gpu": "h100-sxm-80gb", "seq": 4096, "global_batch": 128}
    fix = "pp=1,tp=1,ep=8,micro_batch=1,zero=1,cuda_graphs=0,expert_overlap=1"
    told = {
        on: tune_words(**words, target="megatron", fix=f"{fix},delayed_weight_grad={on}", forbid="fewer_gpus")
        for on in (0, 1)
    }
    assert [bool(told[on].plan.execution.delayed_weight_grad) for on in (0, 1)] == [False, True]
    assert told[1].plan.execution.expert_overlap
    # What is kept until then takes room, for which more may be run again; the same plan is never slower.
    plan = told[1].plan
    without = replace(plan, execution=replace(plan.execution, delayed_weight_grad=None))
    assert told[1].iteration_s <= predict(without, evaluator_for(job_of(without))[0]).iteration_s
    assert "--delay-wgrad-compute" in "".join(framework_files(told[1].plan).values())
    line = [repr(told[on]).replace("\n    ", " ") for on in (0, 1)]
    assert ["weights' gradients with all others" in words for words in line] == [True, False]


@pytest.mark.parametrize(
    ("target", "fix", "words"),
    [
        ("megatron", "recompute_modules=moe", "to run moe again needs experts"),
        ("megatron", "recompute_modules=layernorm", "to run layernorm again needs experts or latent"),
        ("megatron", "recompute_modules=mlp+nothing", "unknown module 'nothing'"),
        ("megatron", "recompute_modules=", "unknown module ''"),
        ("deepspeed", "recompute_modules=mlp", "deepspeed has no choice"),
        ("megatron", "fused_cross_entropy=2", "wanted 1 for on or 0 for off"),
        ("deepspeed", "fused_cross_entropy=1", "no other loss than its own"),
        ("mist", "fused_cross_entropy=0", "no other loss than its own"),
        ("megatron", "delayed_weight_grad=1", "has no experts"),
        ("deepspeed", "delayed_weight_grad=1", "deepspeed delays none"),
        ("deepspeed", "context_exchange=a2a", "context_exchange=a2a: deepspeed has no context parallelism"),
        ("mist", "context_inner=2", "context_inner=2: mist has no context parallelism"),
    ],
)
def test_what_cannot_be_fixed_is_refused_in_a_line(target: str, fix: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        found(small_job(target), fix)
    assert "\n" not in raised.value.message


def test_what_contradicts_is_refused() -> None:
    job = small_job("megatron")
    ordered = replace(job, execution=replace(job.execution, deterministic=True))
    with pytest.raises(InputError, match="deterministic excludes it"):
        with_said(ordered, parse_limits(("fused_cross_entropy=1",), (), ()))
    mixture = {"model": "qwen3-30b-a3b", "gpus": 8, "gpu": "h100-sxm-80gb", "global_batch": 8, "seq": 4096}
    for more in ({"fix": "delayed_weight_grad=1,expert_overlap=0"}, {"forbid": "expert_overlap"}):
        with pytest.raises(InputError, match="part of expert_overlap, which is switched off"):
            tune_words(**mixture, target="megatron", **{"fix": "delayed_weight_grad=1", **more})


@pytest.mark.parametrize("target", ["deepspeed+patches", "megatron+patches"])
def test_decoupled_steps_are_searched_and_may_be_asked_for(target: TargetName) -> None:
    """GPUs of a slow bus gather updated weights, which steps of layers hide in the first passes."""
    job = small_job(target, layers=8, batch=16)
    job = replace(job, cluster=replace(job.cluster, links=LinkOverrides(intra_bytes_per_s=4e9)))
    usual, plain, stepped = found(job), found(job, "decoupled_step=0"), found(job, "decoupled_step=1")
    assert plain.plan.execution.decoupled_step is None and stepped.plan.execution.decoupled_step is True
    assert usual.iteration_s == min(plain.iteration_s, stepped.iteration_s)
    assert found(job, "decoupled_step=1", "overlap_param_gather=0").iteration_s == stepped.iteration_s


def test_decoupled_steps_are_refused_where_nobody_has_them() -> None:
    with pytest.raises(InputError, match=r"decoupled_step=1: .* no such way"):
        found(small_job("megatron", layers=8, batch=16), "decoupled_step=1")
    mixture = {"model": "mixtral-8x7b", "gpus": 16, "gpu": "h100-sxm-80gb", "global_batch": 16}
    with pytest.raises(InputError, match=r"decoupled_step=1: .* no such way to train mixtral-8x7b"):
        tune_words(**mixture, target="megatron+patches", fix="decoupled_step=1")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("context_parallel=2", "cp=2"),
        ("expert_parallel=4,expert_dispatcher=alltoall", "ep=4,dispatcher=alltoall"),
        ("optimizer_instances=2,hpz_size=4", "instances=2,hpz=4"),
        ("sp=1", "sequence_parallel=1"),
    ],
)
def test_sizes_may_be_named_as_a_plan_names_them(said: str, meant: str) -> None:
    assert parse_limits((said,), (), ()) == parse_limits((meant,), (), ())
    name, wanted = (pair.split("=")[0] for pair in (said, meant))
    with pytest.raises(InputError, match=f"--fix: {wanted} is both"):
        parse_limits((meant, f"{name}=7"), (), ())
