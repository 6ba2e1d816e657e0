"""What --fix says of host memory: the same fraction of all stages, of which the best is found."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from jobs import small_job

from mist_megatron.ask.tune import tune
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.search import Settings
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.kinds import KINDS
from mist_megatron.spec.plan import TargetName

EVERY = (0.0, 1.0)


def found(job, *fix: str):
    return tune(job, settings=Settings(step=1.0, limits=parse_limits(fix, (), ())))


@pytest.mark.parametrize("target", ["mist", "megatron+patches", "deepspeed+patches"])
def test_the_best_of_all_that_may_be_fixed_is_the_best(target: TargetName) -> None:
    """Of one stage, whose fractions of a grid are all tried; memory is so short that some leave."""
    job = small_job(target, gpus=2, layers=4, batch=4, limit_gib=3.0)
    best = found(job, "pp=1")
    times = {}
    for fractions in itertools.product(EVERY, repeat=len(KINDS)):
        fix = [f"offload.{kind}={each}" for kind, each in zip(KINDS, fractions, strict=True)]
        try:
            tuned = found(job, "pp=1", *fix)
        except (InputError, NoFeasiblePlan):
            continue
        (stage,) = tuned.plan.stages
        assert tuple(stage.offload.values()) == fractions
        times[fractions] = tuned.iteration_s
    assert len(times) > 3 and min(times, key=lambda key: times[key]) != (0.0,) * 4
    assert min(times.values()) == best.iteration_s


def test_a_fraction_between_those_of_the_grid_is_every_stages() -> None:
    job = small_job("megatron+patches", layers=4, batch=4)
    tuned = found(job, "offload.optimizer=0.3,pp=2")
    assert [stage.offload.optimizer for stage in tuned.plan.stages] == [0.3, 0.3]
    assert tuned.iteration_s >= found(job, "pp=2").iteration_s


@pytest.mark.parametrize(
    ("target", "fix", "words"),
    [
        ("megatron", "offload.optimizer=2", "'2'; wanted a fraction from 0 to 1"),
        ("megatron", "offload.optimizer=nan", "wanted a fraction from 0 to 1"),
        ("megatron", "offload.nothing=1", "did you mean offload"),
        ("megatron", "offload.weights=0.5", "keeps weights on the GPU here; wanted 0"),
        ("deepspeed", "offload.optimizer=0.5", "moves all or nothing here; wanted 0 or 1"),
        ("megatron", "offload.optimizer=0.5,zero=0", "optimizer states leave at zero 1 or above"),
        ("deepspeed", "offload.grads=1,zero=1", "gradients leave at zero 2 or above"),
        ("mist", "offload.activations=1,recompute=full", "no activations leave"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(target: TargetName, fix: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        found(small_job(target), fix)
    assert "\n" not in raised.value.message


def test_a_fraction_is_refused_beside_what_keeps_states_on_the_gpu() -> None:
    """Weights in 8 bits alone do, but by delayed scaling."""
    job = small_job("megatron")
    job = replace(
        job,
        cluster=cluster_of(gpu("h100-sxm-80gb"), 4),
        training=replace(job.training, precision="fp8"),
        execution=replace(job.execution, quantization="tensorwise"),
    )
    assert found(job, "fp8_param_gather=1").plan.execution.fp8_param_gather
    with pytest.raises(InputError, match=r"offload.optimizer=0.5: .* keeps optimizer on the GPU"):
        found(job, "fp8_param_gather=1,offload.optimizer=0.5")


def test_what_contradicts_is_refused() -> None:
    with pytest.raises(InputError, match=r"offload.grads=0.5 contradicts --forbid offload.grads"):
        parse_limits(("offload.grads=0.5",), ("offload.grads",), ())
    assert parse_limits(("offload.grads=0",), ("offload.grads",), ()).offload == {"grads": 0.0}
