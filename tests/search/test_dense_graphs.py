"""CUDA graphs of layers without experts: searched where they gain, given up where memory is short, asked for
and forbidden by name, and refused where Megatron refuses them."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from jobs import small_job
from short_form import one_of

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.tune import tune
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.graphs import LAYERS
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.search import Settings
from mist_megatron.search.space import space_named
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.rules import violations

FULL = space_named("full")
WITHOUT = replace(FULL, cuda_graphs=False)


def asked(fix: str = "", forbid: str = "") -> Settings:
    limits = parse_limits((fix,) if fix else (), (forbid,) if forbid else (), ())
    return Settings(step=0.5, limits=limits)


def predicted_s(plan: Plan) -> float:
    return predict(plan, evaluator_for(job_of(plan))[0]).iteration_s


def test_graphs_are_taken_where_they_fit():
    job = small_job("megatron", limit_gib=100.0)
    best, without = tune(job, space=FULL, settings=asked()), tune(job, space=WITHOUT, settings=asked())
    assert best.plan.execution.cuda_graphs == LAYERS and not violations(best.plan)
    assert without.plan.execution.cuda_graphs is None
    assert best.iteration_s < without.iteration_s
    bare = replace(best.plan, execution=replace(best.plan.execution, cuda_graphs=None))
    assert predicted_s(bare) > best.iteration_s


@pytest.mark.parametrize("limit_gib", one_of(2, [4.0, 6.0, 8.0, 12.0]))
def test_never_slower_than_either_alone(limit_gib: float):
    """Where memory is short, graphs cost what must be run again instead."""
    job = small_job("megatron", limit_gib=limit_gib)
    best_s = tune(job, space=FULL, settings=asked()).iteration_s
    each_s = [tune(job, space=WITHOUT, settings=asked()).iteration_s]
    with contextlib.suppress(NoFeasiblePlan):
        each_s.append(tune(job, space=FULL, settings=asked("cuda_graphs=1")).iteration_s)
    assert best_s == pytest.approx(min(each_s), rel=1e-12)


def test_memory_keeps_shapes_from_graphs():
    job = small_job("megatron", limit_gib=6.0)
    wanted = asked("pp=1,tp=1,micro_batch=4,megatron_fsdp=0")
    found = tune(job, space=FULL, settings=wanted).plan
    assert found.execution.cuda_graphs is None and any(stage.ckpt for stage in found.stages)
    stages = tuple(replace(stage, ckpt=0, recompute="none") for stage in found.stages)
    replayed = replace(found, stages=stages, execution=replace(found.execution, cuda_graphs=LAYERS))
    assert not violations(replayed) and not predict(replayed, evaluator_for(job_of(replayed))[0]).fits


def test_asked_for_and_forbidden_by_name():
    job = small_job("megatron", limit_gib=100.0)
    on = tune(job, space=FULL, settings=asked("cuda_graphs=1")).plan
    off = tune(job, space=FULL, settings=asked("cuda_graphs=0"))
    forbidden = tune(job, space=FULL, settings=asked(forbid="cuda_graphs"))
    assert on.execution.cuda_graphs == LAYERS
    assert off.plan == forbidden.plan and off.plan.execution.cuda_graphs is None
    with pytest.raises(InputError, match="--fix cuda_graphs=1"):
        tune(job, space=FULL, settings=asked("cuda_graphs=1,recompute=full"))
    with pytest.raises(InputError, match="--fix cuda_graphs=1"):
        tune(small_job("deepspeed"), settings=asked("cuda_graphs=1"))


def test_what_the_job_says_stays():
    """Of a graph of the whole step layers may be run again, of graphs of layers none."""
    job = small_job("megatron", limit_gib=100.0)
    for graphs in (("full_iteration",), ("layer",)):
        said = replace(job, execution=replace(job.execution, cuda_graphs=graphs))
        found = tune(said, space=FULL, settings=asked())
        assert found.plan.execution.cuda_graphs == graphs and not violations(found.plan)


def test_dropout_is_not_drawn_again_in_a_graph():
    job = small_job("megatron", limit_gib=100.0)
    job = replace(job, training=replace(job.training, dropout=0.1))
    found = tune(job, space=FULL, settings=asked("cuda_graphs=1"))
    stages = tuple(replace(stage, recompute="selective") for stage in found.plan.stages)
    (why,) = violations(replace(found.plan, stages=stages))
    assert "excludes it among recompute_modules" in why
    with pytest.raises(InputError, match="--fix cuda_graphs=1"):
        tune(job, space=FULL, settings=asked("cuda_graphs=1,recompute=selective"))
    assert tune(job, space=FULL, settings=asked("recompute=selective")).plan.execution.cuda_graphs is None


def test_patches_are_not_replayed():
    found = tune(small_job("megatron+patches", limit_gib=100.0), space=FULL, settings=asked())
    assert found.plan.execution.cuda_graphs is None
