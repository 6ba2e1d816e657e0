"""Searches over nodes of several kinds, against every plan of small jobs priced one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from jobs import told_of
from short_form import one_of

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.job_words import job
from mist_megatron.ask.tune import tune
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.node_groups import cut_to_groups
from mist_megatron.search.search import Settings
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec.cluster import NodeGroup
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.term import Term
from mist_megatron.targets.rules import violations

LAYERS = 5
MODEL = model_from_mapping(
    {"family": "gpt", "layers": LAYERS, "hidden": 2048, "heads": 16, "vocab": 50304}, "small"
)
MICRO = 2
FIXED = {"cp": 1, "sequence_parallel": 0, "tp_comm_overlap": 0, "micro_batch": MICRO}


def asked(gpus: str, target: str, limit: str | None = None, batch: int = 8) -> Job:
    return job(
        model=MODEL, gpus=gpus, gpus_per_node=2, global_batch=batch, target=target, precision="fp16",
        memory_limit=limit,
    )  # fmt: skip


def splits(stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, LAYERS), stages - 1):
        ends = (0, *cuts, LAYERS)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def every_plan(job: Job, space: str, *, own_ckpt: bool) -> Iterator[Plan]:
    """All plans on the cluster's groups in every order, nothing offloaded."""
    cluster, kinds, levels = job.cluster, space_named(space).recompute, space_named(space).zero
    orders = set(itertools.permutations(range(len(cluster.groups))))
    ways = [choice.job for choice in execution_choices(job, space_named(space), Limits(fixed=FIXED))]
    for way, stages, order in itertools.product(ways, (2, 3, 4), sorted(orders)):
        gpus, rest = divmod(cluster.gpus, stages)
        if rest or gpus == 3:
            continue
        for tp, zero, counts in itertools.product((1, 2), levels, splits(stages)):
            micro = MICRO
            dp, left = divmod(gpus, tp)
            if left or not dp or job.training.global_batch % (dp * micro):
                continue
            for kind in kinds:
                most = max(counts) if kind == "full" else 0
                each = [range(count + 1) for count in counts]
                again = (
                    itertools.product(*each)
                    if own_ckpt and most
                    else [tuple(min(k, count) for count in counts) for k in range(most + 1)]
                )
                for ckpt in again:
                    nodes = max(gpus // 2, 1)
                    stage = StagePlan(
                        layers=1, nodes=nodes, gpus_per_node=gpus // nodes, dp=dp, tp=tp, micro_batch=micro,
                        zero=zero, recompute=kind,
                    )  # fmt: skip
                    try:
                        yield Plan(
                            model=job.model, training=job.training, cluster=cluster.in_order(order),
                            target=job.target, grad_accum=job.training.global_batch // (dp * micro),
                            stages=tuple(
                                replace(stage, layers=n, ckpt=k) for n, k in zip(counts, ckpt, strict=True)
                            ),
                            execution=way.execution,
                        )  # fmt: skip
                    except InputError:
                        continue


def best_of(plans: Iterable[Plan]) -> float:
    best = float("inf")
    for plan in plans:
        found = told_of(plan)
        if found.fits and found.iteration_s < best and not violations(plan):
            best = found.iteration_s
    return best


def limited(space: str) -> Limits:
    forbidden = frozenset(f"offload.{kind}" for kind in ("weights", "grads", "optimizer", "activations"))
    return Limits(fixed=FIXED, forbidden=forbidden)


@pytest.mark.parametrize(
    ("gpus", "target", "space", "limit"),
    [
        ("2xa100-sxm-40gb+2xv100-sxm-16gb", "megatron", "megatron-expert", None),
        ("2xv100-sxm-16gb+2xt4-16gb", "megatron", "megatron-expert", "6GiB"),
        ("2xt4-16gb+4xa100-sxm-40gb", "megatron", "megatron", "7GiB"),
        ("2xa100-sxm-40gb+2xt4-16gb", "mist", "aceso", "6GiB"),
    ],
)
def test_equal_to_brute_force(gpus, target, space, limit):
    asking = asked(gpus, target, limit)
    settings = Settings(limits=limited(space))
    found = tune(asking, space=space_named(space), settings=settings)
    own = space_named(space).per_stage
    least = best_of([found.plan, *one_of(6, [*every_plan(asking, space, own_ckpt=own)])])
    assert found.iteration_s == pytest.approx(least, rel=1e-9)
    assert found.result.bound_s <= least * (1 + 1e-9)
    assert predict(found.plan, found.evaluators[0]).iteration_s == found.iteration_s
    told = predict(found.plan, evaluator_for(job_of(found.plan))[0])
    assert told.iteration_s == found.iteration_s and told.fits


def test_what_is_not_searched_is_told():
    mixed = "16xa100-sxm-80gb+16xh100-sxm-80gb"
    with pytest.raises(InputError, match="layers of several kinds or experts"):
        cut_to_groups(space_named("full"), job(model="mixtral-8x7b", gpus=mixed, global_batch=64))
    with pytest.raises(InputError, match="no stages that differ in layers"):
        cut_to_groups(space_named("deepspeed"), job(model="gpt3-1.3b", gpus=mixed, global_batch=64))
    few = job(model="gpt3-40b", gpus="8xa100-sxm-40gb+8xv100-sxm-16gb", gpus_per_node=8, global_batch=16)
    settings = Settings(limits=Limits(fixed={**FIXED, "pp": 2, "micro_batch": 1}))
    with pytest.raises(NoFeasiblePlan, match="8 x a100-sxm-40gb"):
        tune(few, space=space_named("megatron"), settings=settings)


def test_kinds_that_are_alike_find_what_one_kind_does():
    """Two groups of the same GPU: the same plan as of one cluster, whose stages may differ in layers too."""
    same, limits = "2xa100-sxm-40gb+2xa100-sxm-40gb", Limits(fixed={**FIXED, "pp": 2})
    settings, hand = Settings(limits=limits), space_named("megatron")
    merged = asked(same, "megatron", "9GiB")
    assert merged.cluster.groups == () and merged.cluster.nodes == 2
    group = NodeGroup(gpu=merged.cluster.gpu, nodes=1, profile=merged.cluster.profile)
    apart = replace(merged, cluster=replace(merged.cluster, groups=(group, group)))
    found = tune(apart, space=hand, settings=settings)
    plain = job(
        model=MODEL, gpus=4, gpu="a100-sxm-40gb", gpus_per_node=2, global_batch=8, precision="fp16",
        memory_limit="9GiB",
    )  # fmt: skip
    one = tune(plain, space=replace(hand, near_even=True), settings=settings)
    assert found.iteration_s <= one.iteration_s * (1 + 1e-9)
    played = simulate(found.plan, found.evaluators[0]).iteration_s
    assert played == pytest.approx(found.iteration_s, rel=0.03)


@pytest.mark.parametrize("gpus", ["2xv100-sxm-16gb+4xa100-sxm-40gb", "4xa100-sxm-40gb+2xt4-16gb"])
@pytest.mark.parametrize("target", ["megatron", "mist"])
def test_tied_embeddings_are_summed_as_slowly_as_the_slower_end(gpus, target):
    """Against the events, where both ends wait for each other; each by its own links was 9 % too quick."""
    large = replace(MODEL, name="tied", vocab=200_000, tied_embeddings=True)
    asking = replace(asked(gpus, target, batch=16), model=large)
    plan = tune(asking, space=space_named("megatron"), settings=Settings(limits=limited("megatron"))).plan
    evaluator, _ = evaluator_for(job_of(plan))
    told = predict(plan, evaluator)
    ends = [told.stages[end].delta_terms_s[Term.TIED_EMBEDDINGS] for end in (0, -1)]
    assert ends[0] == ends[1] > 0.02 * told.iteration_s
    assert told.iteration_s == pytest.approx(simulate(plan, evaluator).iteration_s, rel=0.01)
