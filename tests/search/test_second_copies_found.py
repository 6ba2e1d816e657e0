"""Second copies of weights (DeepSpeed's hpZ), searched: as good as every plan one by one, never slower than
without, and by --fix."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import told_of
from short_form import one_of
from test_wider_spaces import spread_job

import mist_megatron
from mist_megatron.ask.tune import tune
from mist_megatron.frameworks.deepspeed.convert import candidates
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.pipelines import families
from mist_megatron.search.search import Settings
from mist_megatron.search.space import space_named
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.targets.rules import violations

FULL = space_named("full")
GPUS = {"gpu": "h100-sxm-80gb", "gpus": 32, "bandwidth": ["inter=50GB/s"]}
SLOW = {"model": "llama3-8b", "global_batch": 128, "seq": 2048, "target": "deepspeed", **GPUS}


def every_plan(job) -> list[Plan]:
    """All that a DeepSpeed JSON can say, on all GPUs."""
    cluster, batch = job.cluster, job.training.global_batch
    gpus = cluster.gpus
    stage = StagePlan(
        layers=job.model.layers, nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node, dp=gpus, tp=1,
        micro_batch=batch // gpus,
    )  # fmt: skip
    first = Plan(
        model=job.model, training=job.training, cluster=cluster, target="deepspeed", grad_accum=1,
        stages=(stage,), execution=job.execution,
    )  # fmt: skip
    return list(candidates(first, may_checkpoint=True))


JOBS = [
    (2, 2, ""),
    (4, 2, ""),
    (4, 2, "zero=3"),
    (4, 2, "hpz=2"),
    (4, 2, "hpz=4"),
    (4, 2, "hpz=1"),
    (2, 4, "zero=3"),
    (1, 4, "zero=3"),
    (2, 3, "zero=3"),
]


@pytest.mark.parametrize(
    ("nodes", "per_node", "fix", "memory_bytes"),
    one_of(2, [(*job, limit) for job in JOBS for limit in (1e12, 6e9)]),
)
def test_equal_to_every_plan(memory_bytes: float, nodes: int, per_node: int, fix: str) -> None:
    job = replace(spread_job(2, batch=24, seq=1024), target="deepspeed")
    cluster = replace(job.cluster, nodes=nodes, gpus_per_node=per_node, memory_limit_bytes=memory_bytes)
    job = replace(job, cluster=cluster)
    limits = parse_limits((fix,) if fix else (), (), ())

    def asked(plan: Plan) -> bool:
        said = {"zero": plan.stages[0].zero, "hpz": plan.execution.hpz_size or 1}
        return all(limits.allows(key, value) for key, value in said.items())

    told = {}
    for plan in filter(asked, every_plan(job)):
        predicted = told_of(plan)
        if predicted.fits:
            told[predicted.iteration_s] = plan
    if not told:
        with pytest.raises(mist_megatron.NoFeasiblePlan):
            tune(job, space=FULL, settings=Settings(limits=limits))
        return
    found = tune(job, space=FULL, settings=Settings(limits=limits))
    assert not violations(found.plan)
    assert found.iteration_s == pytest.approx(min(told), rel=1e-9)


def test_some_are_the_best_and_some_are_not() -> None:
    """Over slow links they are, without need of a switch; over fast ones on one node there are none."""
    best = mist_megatron.tune(**SLOW, forbid="fewer_gpus")
    without = mist_megatron.tune(**SLOW, fix="hpz=1", forbid="fewer_gpus")
    assert (best.plan.execution.hpz_size or 1) > 1
    assert without.plan.execution.hpz_size is None
    assert best.iteration_s < without.iteration_s
    assert mist_megatron.predict(best.plan).iteration_s == pytest.approx(best.iteration_s, rel=1e-9)
    assert "second copies of weights in whole nodes or equal parts" in repr(best).replace("\n    ", " ")
    node = mist_megatron.tune(**{**SLOW, "gpus": 8, "bandwidth": []}, fix="zero=3")
    assert node.plan.execution.hpz_size is None
    assert "no second copies of weights" in repr(node).replace("\n    ", " ")
    asked = mist_megatron.tune(**{**SLOW, "gpus": 8, "bandwidth": []}, fix="hpz=4")
    assert asked.plan.execution.hpz_size == 4 and not violations(asked.plan)


def test_patches_are_never_slower_than_without() -> None:
    """Whatever else they leave open, and steps are decoupled only where there are no copies."""
    words = {**SLOW, "fix": "zero=3,micro_batch=2", "forbid": "fewer_gpus,offload.activations"}
    plain, patched = (
        mist_megatron.tune(**{**words, "target": target}) for target in ("deepspeed", "deepspeed+patches")
    )
    assert plain.plan.execution.hpz_size and plain.iteration_s >= patched.iteration_s * (1 - 1e-9)
    assert not violations(patched.plan)
    asked = mist_megatron.tune(
        **{**words, "target": "deepspeed+patches", "fix": "hpz=8", "forbid": "fewer_gpus,offload.optimizer"}
    )
    assert asked.plan.execution.hpz_size == 8 and not asked.plan.execution.decoupled_step
    assert not asked.plan.stages[0].offload.weights and not violations(asked.plan)


def test_most_of_them() -> None:
    found = mist_megatron.tune(**SLOW, max="hpz=4", forbid="fewer_gpus")
    assert found.plan.execution.hpz_size in (2, 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"fix": "hpz=3"}, "--fix hpz=3: wanted a divisor of dp"),
        ({"fix": "hpz=8,zero=2"}, "--fix hpz=8: acts at zero 3"),
        ({"fix": "hpz=8", "target": "megatron"}, "--fix hpz=8: target megatron has no second copy"),
        ({"fix": "hpz=8,instances=2"}, "--fix instances=2: target deepspeed has no sub-groups"),
    ],
)
def test_what_it_has_not_is_refused(words: dict, said: str) -> None:
    with pytest.raises(mist_megatron.InputError, match=said):
        mist_megatron.tune(**{**SLOW, **words})


def test_none_asked_for_leaves_sub_groups_of_other_targets() -> None:
    """Targets without copies have their own sub-groups of optimizer states all the same."""
    job = replace(spread_job(2, batch=24, seq=1024), target="megatron")
    job = replace(job, cluster=replace(job.cluster, nodes=4, gpus_per_node=2))
    space = replace(FULL, second_weights=False, zero=(1,))
    asked = ("instances=2",)
    some, none = (list(families(job, space, parse_limits(fix, (), ()))) for fix in (asked, (*asked, "hpz=1")))
    assert some and none == some
