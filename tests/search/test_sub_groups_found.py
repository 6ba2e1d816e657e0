"""Optimizer states in sub-groups of the replicas, searched: as good as every plan one by one, never slower
than without, and by --fix."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import small_job, told_of
from short_form import one_of
from test_wider_spaces import every_plan, spread_job

import mist_megatron
from mist_megatron.ask.tune import tune
from mist_megatron.errors import InputError
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.pipelines import optimizer_instances, shapes
from mist_megatron.search.search import Settings
from mist_megatron.search.space import Limits, cut_to_target, space_named
from mist_megatron.targets.rules import violations

FULL = replace(space_named("full"), near_even=False, tp_comm_overlap=False)
"""Even splits, and overlap of tensor parallelism, have lists of their own."""
WITHOUT = replace(FULL, optimizer_instances=False)
SLOW = {"model": "gpt3-1.3b", "gpu": "a100-sxm-80gb", "gpus": 16, "global_batch": 16, "seq": 1024}


def with_instances(plans):
    """Each with every number of sub-groups that Megatron takes."""
    for plan in plans:
        for instances in (None, 2, 4):
            made = replace(plan, execution=replace(plan.execution, optimizer_instances=instances))
            if not violations(made):
                yield made


def test_equal_to_every_plan():
    job = spread_job(2, batch=4, seq=1024)
    job = replace(job, execution=replace(job.execution, cuda_graphs=()))
    every = every_plan(job, overlaps=(False,), graphed=(None,))
    plans = list(with_instances(every))
    assert any(plan.execution.instances > 1 for plan in plans)
    settings = Settings(limits=parse_limits(("vpp=1",), (), ()))
    found = tune(job, space=FULL, settings=settings)
    best_s = min(told_of(plan).iteration_s for plan in [found.plan, *one_of(4, plans)])
    assert found.iteration_s == pytest.approx(best_s, rel=1e-9)
    assert found.iteration_s <= tune(job, space=WITHOUT, settings=settings).iteration_s


def test_each_number_can_be_asked_for():
    job = spread_job(2, batch=4, seq=1024)
    each = {}
    for instances in (1, 2, 4):
        limits = parse_limits((f"vpp=1,pp=1,tp=1,cp=1,zero=1,instances={instances}",), (), ())
        each[instances] = tune(job, space=FULL, settings=Settings(limits=limits))
        assert each[instances].plan.execution.instances == instances
    open_still = Settings(limits=parse_limits(("vpp=1,pp=1,tp=1,cp=1,zero=1",), (), ()))
    best_s = min(each[instances].iteration_s for instances in (1, 2))
    assert tune(job, space=FULL, settings=open_still).iteration_s == pytest.approx(best_s, rel=1e-9)
    with pytest.raises(InputError):
        tune(job, space=FULL, settings=Settings(limits=parse_limits(("instances=3",), (), ())))


def test_it_gains_between_nodes():
    best = mist_megatron.tune(**SLOW, target="megatron", fix="vpp=1,cp=1")
    without = mist_megatron.tune(**SLOW, target="megatron", fix="vpp=1,cp=1,instances=1")
    assert best.iteration_s <= without.iteration_s


def test_mixtures_have_what_is_asked_for():
    words = {"model": "qwen3-30b-a3b", "gpu": "h100-sxm-80gb", "gpus": 16, "global_batch": 64, "seq": 4096}
    found = mist_megatron.tune(**words, target="megatron", fix="instances=2,pp=1,tp=1,cp=1")
    assert found.plan.execution.instances == 2 and not violations(found.plan)
    assert mist_megatron.predict(found.plan).iteration_s == pytest.approx(found.iteration_s, rel=1e-9)


def test_sub_groups_lie_on_fewer_nodes_than_all_replicas():
    job = small_job("megatron", gpus=16)
    space = cut_to_target(space_named("full"), "megatron")
    for shape in shapes(job, space, Limits()):
        found = optimizer_instances(job, space, Limits(), shape)
        if shape.zero == (0,) or shape.dp * shape.cp * shape.tp <= 8:
            assert found == (1,), shape
        elif shape.tp == 1 and shape.dp == 16:
            assert found == (1, 2), shape
        elif shape.tp == 8:
            assert found[:1] == (1,) and found[-1] == shape.dp * shape.cp
