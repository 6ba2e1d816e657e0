"""Exchanges of context parallelism, tensor parallelism over nodes, narrow states: against every plan, one by
one, as `predict` has them; and a larger space is never slower."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace

import pytest
from jobs import small_job, told_of
from short_form import long_form, one_of

from mist_megatron.ask.emit import framework_files
from mist_megatron.ask.fewer_gpus import layers_alone
from mist_megatron.ask.tune import tune
from mist_megatron.ask.tune_words import tune as tune_words
from mist_megatron.cost.predict import job_of
from mist_megatron.errors import InputError
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.search import Settings
from mist_megatron.search.space import cut_to_target, named_spaces, space_named
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import TARGET_NAMES, Plan, StagePlan, TargetName
from mist_megatron.targets.rules import violations

FULL = space_named("full")
EXCHANGES = ((None, None), ("a2a", None), ("all_gather", None), ("a2a+p2p", 2))
NARROW = replace(FULL, tensor_over_nodes=False, context_exchanges=("p2p",))


def spread_job(per_node: int, *, batch: int, seq: int, kv_heads: int = 16):
    """Four GPUs with much memory."""
    job = small_job("megatron", layers=4, batch=batch)
    cluster = replace(cluster_of(job.cluster.gpu, 4, per_node), memory_limit_bytes=1e12)
    model = replace(job.model, kv_heads=kv_heads)
    return replace(job, model=model, cluster=cluster, training=replace(job.training, seq_len=seq))


def every_plan(job, *, overlaps=(False, True), graphed=(None, ("layer",))):
    """All that stock Megatron runs in equal stages where nothing need be recomputed or offloaded."""
    gpus, per_node, batch = job.cluster.gpus, job.cluster.gpus_per_node, job.training.global_batch
    sizes = [n for n in (1, 2, 4) if gpus % n == 0]
    for pp, tp, cp, micro_batch in itertools.product(sizes, sizes, sizes, range(1, batch + 1)):
        dp, rest = divmod(gpus, pp * tp * cp)
        if rest or not dp or batch % (dp * micro_batch):
            continue
        nodes = max(1, gpus // pp // per_node)
        mesh = {"nodes": nodes, "gpus_per_node": gpus // pp // nodes}
        stage = StagePlan(layers=job.model.layers // pp, dp=dp, tp=tp, micro_batch=micro_batch, **mesh)
        on_off = (False, True)
        switches = itertools.product((0, 1), on_off, overlaps, on_off, EXCHANGES, graphed)
        for zero, sequence, beside, gathers, (exchange, inner), graphs in switches:
            if inner is not None and inner >= cp:
                continue
            plan = Plan(
                model=job.model,
                training=job.training,
                cluster=job.cluster,
                target="megatron",
                grad_accum=batch // dp // micro_batch,
                stages=(replace(stage, zero=zero),) * pp,
                sequence_parallel=sequence,
                execution=replace(
                    job.execution,
                    context_parallel=cp,
                    context_exchange=exchange,
                    context_inner=inner,
                    tp_comm_overlap=beside,
                    overlap_grad_reduce=True,
                    overlap_param_gather=gathers,
                    fused_cross_entropy=True,
                    cuda_graphs=graphs,
                ),
            )
            if not violations(plan) and not (beside and tp > per_node):
                yield plan


@pytest.mark.parametrize(("per_node", "batch", "seq", "kv_heads"), [(1, 1, 8192, 16), (2, 2, 2048, 2)])
def test_equal_to_every_plan(per_node, batch, seq, kv_heads):
    job = spread_job(per_node, batch=batch, seq=seq, kv_heads=kv_heads)
    settings = Settings(limits=parse_limits(("vpp=1",), (), ()))
    found = tune(job, space=replace(FULL, near_even=False), settings=settings)
    best_s = min(told_of(plan).iteration_s for plan in [found.plan, *one_of(4, every_plan(job))])
    assert found.iteration_s == pytest.approx(best_s, rel=1e-9)
    assert (
        found.iteration_s <= tune(job, space=replace(NARROW, near_even=False), settings=settings).iteration_s
    )


def test_narrow_states_are_asked_for_by_name():
    job = spread_job(4, batch=8, seq=2048)
    usual = tune(job)
    settings = Settings(limits=parse_limits(("optimizer_bytes=6,grad_bytes=2",), (), ()))
    narrow = tune(job, settings=settings)
    assert (usual.plan.execution.optimizer_bytes, usual.plan.execution.grad_bytes) == (None, None)
    assert (narrow.plan.execution.optimizer_bytes, narrow.plan.execution.grad_bytes) == (6, 2)
    assert narrow.iteration_s < usual.iteration_s
    written = "".join(framework_files(narrow.plan).values())
    assert "--exp-avg-dtype" in written and "--grad-reduce-in-bf16" in written
    assert "grad_bytes and optimizer_bytes that --fix says" in repr(narrow).replace("\n    ", " ")


@pytest.mark.parametrize(
    ("target", "precision", "width"),
    [("megatron", "fp16", 6), ("megatron", "bf16", 7), ("deepspeed", "bf16", 6)],
)
def test_states_that_nobody_keeps_are_refused(target, precision, width):
    job = small_job(target)
    job = replace(job, training=replace(job.training, precision=precision))
    with pytest.raises(InputError, match=f"optimizer_bytes={width}: {target} keeps"):
        tune(job, settings=Settings(limits=parse_limits((f"optimizer_bytes={width}",), (), ())))


def test_either_exchange_can_be_asked_for():
    job = spread_job(1, batch=1, seq=8192)
    told = []
    for kind in ("p2p", "a2a", "all_gather", "a2a+p2p"):
        limits = parse_limits((f"cp=4,context_exchange={kind}",), (), ())
        told.append(tune(job, settings=Settings(limits=limits)).plan.execution.context_exchange)
    assert told == [None, "a2a", "all_gather", "a2a+p2p"]
    with pytest.raises(InputError, match="contradicts"):
        parse_limits(("context_exchange=a2a",), ("context_exchange.a2a",), ())


@long_form
def test_fewer_gpus_over_slow_links():
    """Two of four nodes, or one, where sends between them cost more than their GPUs gain."""
    words = {"model": "gpt3-1.3b", "gpus": 8, "gpus_per_node": 2, "gpu": "a100-sxm-40gb", "seq": 1024}
    words = {**words, "global_batch": 4, "bandwidth": ["inter=1GB/s"], "space": "full", "fix": ["cp=1,vpp=1"]}
    found = tune_words(**words)
    each = {gpus: tune_words(**{**words, "gpus": gpus, "forbid": "fewer_gpus"}) for gpus in (8, 6, 4, 2)}
    each[1] = tune_words(**{**words, "gpus": 1, "gpus_per_node": 1, "forbid": "fewer_gpus"})
    fastest = min(each.values(), key=lambda tuned: tuned.iteration_s)
    assert found.iteration_s == fastest.iteration_s < each[8].iteration_s
    assert found.plan.cluster.gpus < 8 and "of the 8 GPUs are faster than all" in found.notes[0]
    assert "on any whole nodes, or part of one" in repr(found).replace("\n    ", " ")
    assert "on all GPUs" in repr(each[8]).replace("\n    ", " ")
    stage = found.plan.stages[0]
    fix = [f"cp=1,vpp=1,pp={len(found.plan.stages)},dp={stage.dp},tp={stage.tp}"]
    assert tune_words(**{**words, "fix": fix}).iteration_s == found.iteration_s
    with pytest.raises(InputError, match="dp=3: wanted one of"):
        tune_words(**{**words, "fix": ["pp=1,dp=3,tp=1"]})


def test_numbers_on_which_layers_alone_take_too_long_are_passed_over():
    """What is passed over has no faster plan."""
    job = replace(spread_job(2, batch=8, seq=2048), target="megatron")
    alone = layers_alone(job, FULL, Settings())
    for gpus, per_node in ((4, 2), (2, 2), (1, 1)):
        part = replace(job, cluster=replace(job.cluster, nodes=gpus // per_node, gpus_per_node=per_node))
        least_s, found_s = min(each.step_s(part.cluster) for each in alone), tune(part).iteration_s
        assert 0.3 * found_s < min(each.gpu_s for each in alone) / gpus <= least_s < found_s


def test_numbers_on_which_nothing_may_lie_are_passed_over():
    """On 5 nodes 4 layers make no five stages, nor do 8 sequences five replicas: they are not searched. Of
    three stages one has two layers."""
    job = replace(spread_job(2, batch=8, seq=2048), target="megatron")
    job = replace(job, cluster=replace(job.cluster, nodes=6))
    alone = layers_alone(job, FULL, Settings())
    five, three = (replace(job.cluster, nodes=nodes) for nodes in (5, 3))
    assert all(each.step_s(five) == math.inf for each in alone)
    with pytest.raises(InputError):
        tune(replace(job, cluster=five))
    least_s = min(each.step_s(three) for each in alone)
    assert 1.15 * min(each.gpu_s for each in alone) / three.gpus < least_s
    assert least_s < tune(replace(job, cluster=three)).iteration_s


def test_what_layers_of_several_kinds_compute_at_least():
    """Layers with windows and layers without: below what fewer GPUs take, and near it."""
    words = {"model": "gemma-3-1b", "gpus": 2, "gpu": "a100-sxm-80gb", "seq": 2048, "global_batch": 8}
    words = {**words, "target": "deepspeed"}
    tuned = tune_words(**words)
    gpu_s = min(each.gpu_s for each in layers_alone(job_of(tuned.plan), FULL, Settings()))
    one = tune_words(**{**words, "gpus": 1, "forbid": "fewer_gpus"})
    assert 0.3 * one.iteration_s < gpu_s < one.iteration_s and tuned.iteration_s <= one.iteration_s


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_what_a_target_runs_of_a_space_is_in_the_space(target: TargetName) -> None:
    """No choice is added but what the target does whoever asks, and what is left is left as it is."""
    for space in named_spaces():
        try:
            cut = cut_to_target(space, target)
        except InputError:
            continue
        for name in {one.name for one in fields(space)} - {"grads_follow_optimizer"}:
            before, after = getattr(space, name), getattr(cut, name)
            if isinstance(before, bool):
                assert after <= before, (space.name, name)
            elif isinstance(before, tuple):
                assert set(after) <= set(before), (space.name, name)
        assert cut_to_target(cut, target) == cut
