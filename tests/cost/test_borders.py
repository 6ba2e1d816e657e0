"""Borders between stages that differ, against counts made by hand of who sends to whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kept_programs import KEPT

from mist_megatron.cost.borders import border_seconds, exchanges_seconds, parts_moved
from mist_megatron.cost.boundary import hop_seconds
from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.predict import grid_of, job_of, predict, prediction_document
from mist_megatron.events.iteration import simulate
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec


def plan_of_grids(*grids: tuple[int, int], target: str = "megatron+patches", micro_batch: int = 4) -> Plan:
    """Stages of (dp, tp) on eight GPUs each, a node each, joined by a slow network."""
    model, tokens = replace(PRESETS["gpt3-1.3b"], layers=2 * len(grids)), 2048
    most = max(dp for dp, _ in grids)
    stages = [
        StagePlan(
            layers=2, nodes=1, gpus_per_node=8, dp=dp, tp=tp, micro_batch=micro_batch * most // dp, zero=1
        )
        for dp, tp in grids
    ]
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=micro_batch * most * 8, seq_len=tokens),
        cluster=ClusterSpec(
            gpu=CATALOGUE["a100-sxm-40gb"],
            nodes=len(grids),
            gpus_per_node=8,
            links=LinkOverrides(inter_bytes_per_s=5e9),
        ),
        target=target,  # type: ignore[arg-type]
        grad_accum=8,
        stages=tuple(stages),
    )


def evaluator_for_plan(plan: Plan) -> StageEvaluator:
    job = job_of(plan)
    return make_evaluator(job, datasheet_prices(job.cluster, job.training.precision), cache=KEPT)


@pytest.mark.parametrize(
    ("target", "grids", "there", "back"),
    [
        # One leader of a group of eight sends a quarter to each of four leaders, and gets four back.
        ("megatron+patches", ((1, 8), (4, 2)), 4.0, 4.0),
        ("megatron+patches", ((4, 2), (2, 4)), 2.0, 2.0),
        ("megatron+patches", ((4, 2), (4, 2)), 1.0, 1.0),
        # Each of eight ranks with all of a micro-batch has one of eight receivers, who take an eighth each.
        ("mist", ((1, 8), (8, 1)), 1.0, 8.0),
        ("mist", ((8, 1), (4, 2)), 2.0, 1.0),
    ],
)
def test_parts_by_hand(target: str, grids: tuple[tuple[int, int], ...], there: float, back: float) -> None:
    plan = plan_of_grids(*grids, target=target)
    one, other = (grid_of(plan, position) for position in range(2))
    assert (parts_moved(one, other), parts_moved(other, one)) == (there, back)


def test_a_border_takes_its_parts_one_after_another() -> None:
    plan = plan_of_grids((2, 4), (8, 1), (8, 1))
    evaluator, grids = evaluator_for_plan(plan), [grid_of(plan, position) for position in range(3)]
    # A rank of the second stage has a micro-batch of 4 sequences of 2048 tokens, in two bytes.
    across_s = float(hop_seconds(4 * 2048 * plan.model.hidden * 2.0, evaluator.time_context)[1])
    assert border_seconds(plan, grids, evaluator) == {(0, 1): pytest.approx((4 * across_s, 4 * across_s))}
    found = exchanges_seconds(plan, grids, evaluator)
    assert found.keys() == {0, 1}
    # The second stage has no group to hand on to: it sends one part on, and four back.
    assert found[1] == pytest.approx((across_s, 4 * across_s))


@pytest.mark.parametrize("target", ["megatron+patches", "mist"])
def test_the_closed_form_of_unequal_stages_on_a_slow_network(target: str) -> None:
    """Priced by each stage's own side it was 5.5 % below the events here."""
    plan = plan_of_grids((8, 1), (1, 8), (4, 2), target=target)
    evaluator = evaluator_for_plan(plan)
    assert predict(plan, evaluator).iteration_s == pytest.approx(
        simulate(plan, evaluator).iteration_s, rel=0.03
    )


def test_no_link_takes_in_more_than_it_carries() -> None:
    """Each of eight ranks of the middle stage has all of a micro-batch, which comes in parts from the stage
    before, and as many gradients from the one behind, over the link of their node. Priced by who sends alone,
    an iteration took a quarter less than that, in closed form and in events."""
    plan = plan_of_grids((8, 1), (1, 8), (8, 1), target="mist")
    plan = replace(plan, cluster=replace(plan.cluster, links=LinkOverrides(inter_bytes_per_s=1e9)))
    evaluator = evaluator_for_plan(plan)
    micro_batch_bytes = plan.stages[1].micro_batch * plan.training.seq_len * plan.model.hidden * 2
    least_s = plan.grad_accum * 2 * 8 * micro_batch_bytes / 1e9
    assert predict(plan, evaluator).iteration_s > least_s
    assert simulate(plan, evaluator).iteration_s > least_s


def test_both_sides_wait_for_the_longer_way() -> None:
    """Gradients come back in eight parts while one goes there."""
    plan = plan_of_grids((1, 8), (8, 1), target="mist")
    evaluator, grids = evaluator_for_plan(plan), [grid_of(plan, position) for position in range(2)]
    part_s = float(hop_seconds(4 * 2048 * plan.model.hidden * 2.0, evaluator.time_context)[1])
    assert exchanges_seconds(plan, grids, evaluator) == {
        0: (pytest.approx(8 * part_s), 0.0),
        1: (0.0, pytest.approx(8 * part_s)),
    }


def test_what_borders_add_is_told() -> None:
    """The terms of t are of a stage alone; what the iteration counts besides is in the document."""
    plan = plan_of_grids((1, 8), (4, 2))
    evaluator, grids = evaluator_for_plan(plan), [grid_of(plan, position) for position in range(2)]
    crossing = exchanges_seconds(plan, grids, evaluator)
    for position, stage in enumerate(prediction_document(predict(plan, evaluator))["stages"]):
        said_s = stage["stable_terms_s"]["pipeline_p2p"] + stage["beyond_s"]["stable"]
        assert said_s == pytest.approx(sum(crossing[position]))
    alike = plan_of_grids((4, 2), (4, 2))
    for stage in prediction_document(predict(alike, evaluator_for_plan(alike)))["stages"]:
        assert "beyond_s" not in stage
