"""What a boundary between stages on different grids costs: whole activations, and handing them on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kept_programs import KEPT

from mist_megatron.cost.evaluate import make_evaluator
from mist_megatron.cost.predict import bridged, grid_of, job_of
from mist_megatron.price.datasheet import datasheet_profile
from mist_megatron.price.prices import Collective, Priced, Work
from mist_megatron.price.profile_prices import ProfilePrices, rates_of
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations


class Links(ProfilePrices):
    """Collectives at a byte a second."""

    def of(self, work: Work) -> Priced:
        if not isinstance(work, Collective):
            return super().of(work)
        passes = 1.0 if work.kind == "send_recv" else (np.asarray(work.ranks) - 1.0) / np.asarray(work.ranks)
        return Priced(passes * np.asarray(work.moved_bytes))


def plan_of(second_tp: int, *, sequence_parallel: bool) -> Plan:
    model = preset("gpt3-1.3b")
    stages = [
        StagePlan(layers=12, nodes=1, gpus_per_node=4, dp=4 // tp, tp=tp, micro_batch=tp)
        for tp in (2, second_tp)
    ]
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=16, seq_len=512),
        cluster=cluster_of(CATALOGUE["a100-sxm-80gb"], 8),
        target="megatron+patches",
        grad_accum=4,
        stages=tuple(stages),
        sequence_parallel=sequence_parallel,
    )


def hop_s(plan: Plan, *, bridge: bool) -> float:
    profile, rates = datasheet_profile(plan.cluster.gpu), rates_of(plan.cluster, "bf16")
    prices = Links(profile=profile, rates=rates)
    evaluator = make_evaluator(job_of(plan), prices, cache=KEPT)
    grid = replace(grid_of(plan, 0), bridged=bridge)
    return float(evaluator.terms(grid).stable["pipeline_p2p"].fixed)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_bridge_moves_whole_activations_and_hands_them_on(sequence_parallel: bool) -> None:
    plan = plan_of(4, sequence_parallel=sequence_parallel)
    whole = 2.0 * 2 * 512 * 2048
    own = whole / 2 if sequence_parallel else whole
    assert hop_s(plan, bridge=False) == pytest.approx(own)
    assert hop_s(plan, bridge=True) == pytest.approx(whole + whole / 2)


def test_scattered_activations_are_sent_in_parts_and_gathered() -> None:
    plan = plan_of(2, sequence_parallel=False)
    whole = 2.0 * 2 * 512 * 2048
    scattered = replace(plan, target="megatron", execution=Execution(scattered_boundaries=True))
    assert hop_s(scattered, bridge=False) == pytest.approx(whole / 2 + whole / 2)
    both = replace(scattered, sequence_parallel=True)
    assert hop_s(both, bridge=False) == pytest.approx(whole / 2)
    assert any("scattered_boundaries" in reason for reason in violations(scattered))


def test_only_stages_that_differ_are_bridged() -> None:
    assert bridged(plan_of(4, sequence_parallel=False))
    assert not bridged(plan_of(2, sequence_parallel=False))
    assert not bridged(replace(plan_of(4, sequence_parallel=False), target="mist"))
