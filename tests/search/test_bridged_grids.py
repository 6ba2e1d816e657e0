"""Jobs whose stages cannot have different grids where a bridge joins them (target megatron+patches)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import small_job

from mist_megatron.search.families import MixedFamily, mixed_families
from mist_megatron.search.space import Limits, apply_limits, cut_to_target, space_named
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.job import Job


def mixed(job: Job) -> list[MixedFamily]:
    cut = apply_limits(cut_to_target(space_named("full"), job.target), Limits())
    return list(mixed_families(job, cut, Limits()))


def six(target: str) -> Job:
    job = small_job(target, gpus=6, layers=4, batch=12)
    return replace(job, cluster=cluster_of(job.cluster.gpu, 6, 6))


def test_offered_otherwise() -> None:
    assert mixed(six("megatron+patches"))
    assert not mixed(six("megatron")), "without patches Megatron lays one grid over all ranks"


@pytest.mark.parametrize("change", ["tied", "fp8", "context"])
def test_none_where_the_job_rules_it_out(change: str) -> None:
    job = six("megatron+patches")
    if change == "tied":
        job = replace(job, model=replace(job.model, tied_embeddings=True))
    elif change == "fp8":
        job = replace(job, training=replace(job.training, precision="fp8"))
    else:
        job = replace(job, execution=replace(job.execution, context_parallel=2))
    assert mixed(job) == []
