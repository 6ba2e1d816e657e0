"""Sub-groups of replicas of Megatron-FSDP, searched: as good as every plan one by one, never slower than
without, and by --fix."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from jobs import told_of
from test_wider_spaces import spread_job

import mist_megatron
from mist_megatron.ask.tune import tune
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.search import Settings
from mist_megatron.search.space import space_named
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.targets.rules import violations

FULL = replace(space_named("full"), near_even=False, context_exchanges=("p2p",), tensor_over_nodes=False)
GPUS = {"gpu": "h100-sxm-80gb", "gpus": 32, "bandwidth": ["inter=50GB/s"]}
SLOW = {"model": "llama3-8b", "global_batch": 128, "seq": 2048, "target": "megatron", **GPUS}


def every_sharded_plan(job):
    """All that Megatron-FSDP runs where nothing need be recomputed."""
    gpus, per_node, batch = job.cluster.gpus, job.cluster.gpus_per_node, job.training.global_batch
    sizes = [n for n in (1, 2, 4) if gpus % n == 0]
    levels = itertools.product((1, 2, 3), (None, 2, 4), (None, True), (False, True))
    for tp, cp, (zero, instances, outer, sequence) in itertools.product(sizes, sizes, list(levels)):
        dp = gpus // (tp * cp)
        if not dp or batch % dp or tp > per_node:
            continue
        for micro_batch in range(1, batch // dp + 1):
            if batch // dp % micro_batch:
                continue
            nodes = gpus // per_node
            stage = StagePlan(
                layers=job.model.layers, nodes=nodes, gpus_per_node=per_node,
                dp=dp, tp=tp, micro_batch=micro_batch, zero=zero,
            )  # fmt: skip
            plan = Plan(
                model=job.model,
                training=job.training,
                cluster=job.cluster,
                target="megatron",
                grad_accum=batch // dp // micro_batch,
                stages=(stage,),
                sequence_parallel=sequence,
                execution=replace(
                    job.execution, context_parallel=cp, megatron_fsdp=True, overlap_grad_reduce=True,
                    overlap_param_gather=True, fused_cross_entropy=True, optimizer_instances=instances,
                    outer_sharding=outer,
                ),
            )  # fmt: skip
            if not violations(plan):
                yield plan


@pytest.mark.parametrize(
    ("per_node", "batch", "fix"),
    [
        (2, 8, "megatron_fsdp=1"),
        (2, 8, "megatron_fsdp=1,zero=3"),
        (1, 4, "megatron_fsdp=1,zero=2,tp=1,cp=1"),
        (2, 8, "megatron_fsdp=1,instances=2,zero=3"),
        (2, 8, "outer_sharding=1"),
        (2, 8, "outer_sharding=0,instances=2,zero=3"),
    ],
)
def test_equal_to_every_plan(per_node: int, batch: int, fix: str) -> None:
    job = spread_job(per_node, batch=batch, seq=1024)
    limits = parse_limits((fix,), (), ())

    def asked(plan: Plan) -> bool:
        execution, stage = plan.execution, plan.stages[0]
        said = {
            "zero": stage.zero, "tp": stage.tp, "cp": execution.context_parallel,
            "instances": execution.instances, "outer_sharding": int(bool(execution.outer_sharding)),
        }  # fmt: skip
        alike = said["outer_sharding"] == limits.fixed.get("outer_sharding", 0)
        return alike and all(limits.allows(key, value) for key, value in said.items())

    plans = [plan for plan in every_sharded_plan(job) if asked(plan)]
    assert any(plan.execution.instances > 1 for plan in plans)
    best_s = min(told_of(plan).iteration_s for plan in plans)
    found = tune(job, space=FULL, settings=Settings(limits=limits))
    assert not violations(found.plan)
    assert found.iteration_s == pytest.approx(best_s, rel=1e-9)


def test_it_gains_between_slow_nodes() -> None:
    best = mist_megatron.tune(**SLOW, fix="zero=3", forbid="fewer_gpus")
    without = mist_megatron.tune(**SLOW, fix="zero=3,instances=1", forbid="fewer_gpus")
    assert best.plan.execution.instances > 1
    assert best.iteration_s < without.iteration_s
    assert mist_megatron.predict(best.plan).iteration_s == pytest.approx(best.iteration_s, rel=1e-9)
    assert best.plan.execution.outer_sharding is None
    assert "no optimizer states over sub-groups" in repr(best).replace("\n    ", " ")
    joint = mist_megatron.tune(**SLOW, fix="zero=3,outer_sharding=1", forbid="fewer_gpus")
    assert joint.plan.execution.outer_sharding and joint.plan.execution.instances > 1


def test_mixtures_have_what_is_asked_for() -> None:
    words = {"model": "qwen3-30b-a3b", "gpu": "h100-sxm-80gb", "gpus": 32, "global_batch": 64, "seq": 4096}
    found = mist_megatron.tune(**words, target="megatron", fix="instances=2,zero=3")
    execution, stage = found.plan.execution, found.plan.stages[0]
    assert execution.megatron_fsdp and execution.instances == 2 and stage.zero == 3
    assert not violations(found.plan)
    assert mist_megatron.predict(found.plan).iteration_s == pytest.approx(found.iteration_s, rel=1e-9)


@pytest.mark.parametrize("fix", ["outer_sharding=1,zero=2", "outer_sharding=1,instances=1"])
def test_what_it_has_not_is_refused(fix: str) -> None:
    with pytest.raises(mist_megatron.InputError, match="outer_sharding"):
        mist_megatron.tune(**SLOW, fix=fix)


def test_levels_that_only_sharded_weights_have_are_found_on_fewer_gpus_too() -> None:
    """Fewer nodes are looked at where they are too slow for all."""
    found = mist_megatron.tune(**{**SLOW, "global_batch": 64, "bandwidth": ["inter=25GB/s"]}, fix="zero=3")
    assert found.plan.stages[0].zero == 3 and found.plan.cluster.gpus < 32
