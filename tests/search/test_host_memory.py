"""What is kept in host memory is counted and limited, in what is told and in what is searched."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.tune import tune
from mist_megatron.cost.predict import predict
from mist_megatron.errors import NoFeasiblePlan
from mist_megatron.search.choices import AXES, Choices, StageSlot, stage_grid
from mist_megatron.search.least_memory import StageSizes, least_memory
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.search import Settings
from mist_megatron.search.space import cut_to_target, space_named
from mist_megatron.search.stage_prices import RolePrices
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.plan import Plan, StagePlan, TargetName
from tests.search.jobs import evaluator_of, small_job

GIB = 2.0**30


def plan_with(offload: Offload, zero: int = 1) -> Plan:
    job = small_job("megatron+patches")
    stage = StagePlan(
        layers=4, nodes=1, gpus_per_node=4, dp=4, tp=1, micro_batch=2, zero=zero, offload=offload
    )
    return Plan(
        model=job.model, training=job.training, cluster=job.cluster, target=job.target, grad_accum=2,
        stages=(stage,),
    )  # fmt: skip


def host_bytes(plan: Plan) -> float:
    job = small_job("megatron+patches")
    (stage,) = predict(plan, evaluator_of(job)).stages
    return stage.host_bytes


def test_bytes_of_states_by_hand() -> None:
    """4 layers of 12 bytes a parameter (masters and moments), split over 4 ranks, and 4 for the gradient."""
    model = small_job("megatron+patches").model
    parameters = model.layers * (4 * 2048**2 + 3 * 2048 * model.ffn_hidden + 2 * 2048)
    edges = 2 * 2048 * 32000 + 2048
    half = host_bytes(plan_with(Offload(optimizer=0.5)))
    assert half == pytest.approx(0.5 * (12 + 4) / 4 * (parameters + edges), rel=1e-3)
    weights = host_bytes(plan_with(Offload(weights=1.0)))
    assert weights == pytest.approx(2 * (parameters + edges), rel=1e-3)
    assert host_bytes(plan_with(Offload())) == 0.0


def test_activations_count_with_their_pool() -> None:
    """Twice the fraction is twice the bytes, of all four layers."""
    quarter, whole = (host_bytes(plan_with(Offload(activations=part))) for part in (0.25, 1.0))
    assert whole == pytest.approx(4.0 * quarter)
    job = small_job("megatron+patches")
    kept = predict(plan_with(Offload()), evaluator_of(job)).stages[0].memory_terms_bytes["activations"]
    assert 0.5 * kept < whole < 1.25 * kept


def test_a_plan_over_the_host_does_not_fit() -> None:
    plan = plan_with(Offload(optimizer=1.0))
    small = replace(plan, cluster=replace(plan.cluster, host_memory_bytes=4 * GIB))
    needed = host_bytes(plan)
    assert needed > GIB
    job = replace(small_job("megatron+patches"), cluster=small.cluster)
    prediction = predict(small, evaluator_of(job))
    assert not prediction.fits and not prediction.stages[0].host_fits
    assert prediction.stages[0].host_limit_bytes == GIB


def test_an_unknown_node_sets_no_limit_and_a_usual_one_its_share() -> None:
    assert cluster_of(CATALOGUE["rtx4090-24gb"], 8).host_share_bytes is None
    share = cluster_of(CATALOGUE["a100-sxm-80gb"], 2).host_share_bytes
    assert share == pytest.approx(0.9 * 1152 * GIB / 8)


def test_the_search_keeps_the_limit_and_is_exact() -> None:
    """Against all plans of a tiny space, each priced alone: least time of those that fit GPU and host."""
    for host_gib in (6.0, 9.0, 1000.0):
        base = small_job("megatron+patches", gpus=1, layers=3, batch=4, limit_gib=9.0)
        job = replace(base, cluster=replace(base.cluster, host_memory_bytes=host_gib * GIB))
        evaluator, _ = evaluator_for(job)
        best = min(
            (
                found.iteration_s
                for plan in every_plan(job)
                if (found := predict(plan, evaluator)).fits
            ),
            default=None,
        )  # fmt: skip
        try:
            tuned = tune(job, settings=Settings(step=0.5))
        except NoFeasiblePlan:
            assert best is None
            continue
        assert tuned.prediction.fits
        assert best is not None and tuned.iteration_s <= best * (1 + 1e-9)


def every_plan(job):
    halves = (0.0, 0.5, 1.0)
    for micro, ckpt, optimizer, activations in itertools.product((1, 2, 4), range(4), halves, halves):
        if activations and ckpt == 3:
            continue
        stage = StagePlan(
            layers=3, nodes=1, gpus_per_node=1, dp=1, tp=1, micro_batch=micro, zero=1, ckpt=ckpt,
            offload=Offload(optimizer=optimizer, activations=activations),
        )  # fmt: skip
        yield Plan(
            model=job.model, training=job.training, cluster=job.cluster, target=job.target,
            grad_accum=4 // micro, stages=(stage,),
        )  # fmt: skip


def test_a_moment_that_one_kind_of_recomputation_does_not_tell_rules_nothing_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host's moments are left out where its limit is far: here for layers that run again alone. Of the
    moments that both tell the lesser counts."""
    told = {"full": [[[6.0, 9.0], [16.0, 19.0]]], "selective": [[[5.0, 7.0, 50.0], [20.0, 17.0, 90.0]]]}
    monkeypatch.setattr(
        "mist_megatron.search.least_memory._moments",
        lambda *of, recompute: np.array(told[recompute]),
    )
    evaluator, _ = evaluator_for(small_job("megatron+patches", gpus=1, layers=6))
    space = replace(space_named("full"), recompute=("full", "selective"))
    sizes = StageSizes(StageRole.ONLY, False, (1,), 8, 1, 1, 1, 1, (1,), 1.0)
    (line,) = least_memory(evaluator, space, [sizes]).values()
    assert line.one_bytes.tolist() == [5.0, 7.0]
    assert line.more_bytes.tolist() == pytest.approx([(16 - 5) / 5, (17 - 7) / 5])


@pytest.mark.parametrize("target", ["megatron+patches", "deepspeed"])
def test_stages_of_any_levels_hold_together_what_each_does_alone(target: TargetName) -> None:
    """Their levels are one axis, on which who has fewer has its last again. No level of a stage holds less
    than all of them at best."""
    job = small_job(target, gpus=4, layers=6)
    space = cut_to_target(space_named("full"), target)
    each = [(1,), (0,), (0, 1), (2, 3), (0, 1, 2, 3)]
    asked = [StageSizes(StageRole.FIRST, False, levels, 2, 4, 1, 1, 1, (1,), 2.0) for levels in each]
    together = least_memory(evaluator_of(job), space, asked)
    for sizes in asked:
        (alone,) = least_memory(evaluator_of(job), space, [sizes]).values()
        for layers in (1, 4):
            assert together[sizes].least_bytes(layers) == pytest.approx(alone.least_bytes(layers), rel=1e-12)
    one, none, both, more, every = (together[sizes].least_bytes(6) for sizes in asked)
    assert both == min(one, none) and every == min(both, more) and one < none


@pytest.mark.parametrize(
    ("target", "levels", "instances"), [("mist", (1, 2), (1,)), ("megatron", (1,), (1, 2))]
)
def test_slots_keep_on_the_host_what_each_of_their_configurations_does(
    target: TargetName, levels: tuple[int, ...], instances: tuple[int, ...]
) -> None:
    """Of all levels, sub-groups, fractions and numbers of recomputed layers at once, as of each alone."""
    job = small_job(target, gpus=8)
    shape = EqualPipeline(
        grad_accum=4, stages=2, nodes=1, gpus_per_node=4, dp=4, tp=1, micro_batch=2,
        sequence_parallel=False, vpp=1, zero=levels, instances=instances,
    )  # fmt: skip
    space, evaluator = cut_to_target(space_named("full"), target), evaluator_of(job)
    choices = Choices(space=space, shape=shape, step=0.5)
    role = RolePrices(evaluator, choices, StageRole.FIRST, range(1, 4), recompute="full")
    for layers in (1, 3):
        slot = StageSlot(role=StageRole.FIRST, layers=layers, held=2.0)
        axes = choices.axes(choices.counts(layers, recompute="full"))
        alone = evaluator.host_bytes(stage_grid(shape, slot, axes, recompute="full"))
        alone = np.broadcast_to(alone, [axes[name].size for name in AXES])
        rows = np.indices(alone.shape).reshape(len(AXES), -1)
        assert role.host_bytes(slot, tuple(rows)) == pytest.approx(alone.reshape(-1), rel=1e-12)
        assert len(np.unique(alone)) > 3
