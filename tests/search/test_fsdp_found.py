"""Megatron-FSDP in the search: what is found runs, and more choices give no slower plan."""

from __future__ import annotations

import pytest

import mist_megatron
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

LLAMA = {"model": "llama3-8b", "gpu": "h100-sxm-80gb", "gpus": 8, "global_batch": 64, "seq": 8192}
QWEN = {"model": "qwen3-30b-a3b", "gpu": "h100-sxm-80gb", "gpus": 16, "global_batch": 64, "seq": 4096}


def found(job, **limits):
    tuned = mist_megatron.tune(**job, target="megatron", **limits)
    assert not violations(tuned.plan)
    assert mist_megatron.predict(tuned.plan).iteration_s == pytest.approx(tuned.iteration_s, rel=1e-9)
    return tuned


def test_it_is_found_where_memory_needs_it_and_is_never_slower() -> None:
    """Where ranks do not split layers, which would do as well."""
    best, without = found(LLAMA, fix="tp=1"), found(LLAMA, fix="tp=1", forbid="megatron_fsdp")
    assert best.plan.execution.megatron_fsdp and best.plan.stages[0].zero >= 2
    assert without.plan.execution.megatron_fsdp is None
    assert best.iteration_s < without.iteration_s
    assert best.iteration_s <= found(LLAMA, fix="tp=1,megatron_fsdp=1").iteration_s * (1 + 1e-9)


def test_mixtures_have_none_of_what_it_excludes() -> None:
    plan = found(QWEN, fix="zero=3").plan
    assert plan.execution.megatron_fsdp and plan.stages[0].zero == 3
    assert not plan.execution.cuda_graphs and not plan.execution.expert_overlap
    ranks = plan.cluster.gpus // (plan.execution.ep * plan.execution.etp)
    assert ranks > 1 or plan.grad_accum == 1


def test_layers_of_unlike_sizes_in_turn_take_it_too() -> None:
    space = space_named("full")

    def taken(name: str) -> bool:
        job = Job(
            model=PRESETS[name],
            training=TrainingSpec(global_batch=64, seq_len=4096),
            cluster=cluster_of(gpu("h100-sxm-80gb"), 16),
            target="megatron",
        )
        choices = execution_choices(job, space, Limits())
        return any(choice.job.execution.megatron_fsdp for choice in choices)

    assert (
        taken("nemotron-3-nano-30b-a3b")
        and taken("qwen3-30b-a3b")
        and taken("deepseek-v2-lite")
        and taken("llama3-8b")
    )


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        ("megatron_fsdp=1,pp=2", "megatron_fsdp=1"),
        ("megatron_fsdp=0,zero=3", "zero=3"),
        ("zero=3,pp=2", "zero=3"),
    ],
)
def test_what_it_has_not_is_refused(fix: str, words: str) -> None:
    with pytest.raises(mist_megatron.InputError, match=words):
        found(LLAMA, fix=fix)
