"""Stages of different sizes: against brute force, against `predict`, and what they are worth."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from jobs import evaluator_of, small_job
from short_form import one_of

from mist_megatron.cost.iteration import iteration_time
from mist_megatron.cost.predict import grid_of, predict, timing_of
from mist_megatron.search.borders import ROLES, Behind, Borders, Pairs, sides_of
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.search import Settings, search
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.kinds import KINDS, Offload
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.term import Term
from mist_megatron.targets.rules import violations


def job_on(nodes, per_node, layers, batch, limit_gib):
    job = small_job("mist", gpus=nodes * per_node, layers=layers, batch=batch)
    cluster = cluster_of(job.cluster.gpu, nodes * per_node, per_node)
    return replace(job, cluster=replace(cluster, memory_limit_bytes=limit_gib * 2**30))


def meshes(nodes, per_node):
    """Parts of a node that tile it, and whole nodes."""
    inside = [(1, part) for part in range(1, per_node) if per_node % part == 0]
    return inside + [(count, per_node) for count in range(1, nodes + 1)]


def pipelines(job, lengths, over_nodes=False):
    """(G, stages of (nodes, GPUs per node, dp, tp, micro-batch, layers)) on consecutive GPUs, none of which
    straddles nodes."""
    cluster, batch = job.cluster, job.training.global_batch
    for grad_accum in (g for g in range(1, batch + 1) if batch % g == 0):
        options = [
            (nodes, gpus, nodes * gpus // tp, tp, batch // grad_accum // (nodes * gpus // tp))
            for nodes, gpus in meshes(cluster.nodes, cluster.gpus_per_node)
            for tp in range(1, nodes * gpus + 1)
            if (gpus % tp == 0 or (over_nodes and nodes * gpus % tp == 0 and tp % cluster.gpus_per_node == 0))
            and job.model.heads % tp == 0
            and (batch // grad_accum) % (nodes * gpus // tp) == 0
        ]
        for stages in lengths:
            for picked in itertools.product(options, repeat=stages):
                sizes = [nodes * gpus for nodes, gpus, *_ in picked]
                if sum(sizes) != cluster.gpus or straddles(sizes, cluster.gpus_per_node):
                    continue
                for layers in itertools.product(range(1, job.model.layers + 1), repeat=stages):
                    if sum(layers) == job.model.layers:
                        yield grad_accum, [(*p, count) for p, count in zip(picked, layers, strict=True)]


def straddles(sizes, per_node):
    begins = np.cumsum([0, *sizes[:-1]])
    return any(
        (begin + size - 1) // per_node - begin // per_node + 1 != max(1, size // per_node)
        for begin, size in zip(begins, sizes, strict=True)
    )


def stage_of(mesh, zero=1, ckpt=0, offload=(0.0, 0.0, 0.0, 0.0)):
    nodes, gpus, dp, tp, micro_batch, layers = mesh
    return StagePlan(
        layers=layers,
        nodes=nodes,
        gpus_per_node=gpus,
        dp=dp,
        tp=tp,
        micro_batch=micro_batch,
        zero=zero,
        ckpt=ckpt,
        offload=Offload(**dict(zip(KINDS, offload, strict=True))),
    )


def plan_with(job, grad_accum, stages):
    return Plan(
        model=job.model,
        training=job.training,
        cluster=job.cluster,
        target=job.target,
        grad_accum=grad_accum,
        stages=tuple(stages),
    )


def priced(evaluator, plan, position, mesh):
    """The undominated (t, d) of one stage among all configurations that fit, offloads all or nothing."""
    layers = mesh[-1]
    rows = [
        (zero, ckpt, *offload)
        for zero, ckpt in itertools.product((1, 2, 3), range(layers + 1))
        for offload in itertools.product((0.0, 1.0), repeat=4)
        if not (offload[3] and ckpt == layers)
    ]
    zero, ckpt, *offloads = np.array(rows, dtype=float).T
    fractions = dict(zip(KINDS, offloads, strict=True))
    cost = evaluator(replace(grid_of(plan, position), zero=zero, ckpt=ckpt).offloading(**fractions))
    table = np.broadcast_arrays(cost.stable_s, cost.delta_s, cost.peak_bytes <= evaluator.limit_bytes)
    points = sorted({(t, d) for t, d, fits in zip(*(c.tolist() for c in table), strict=True) if fits})
    best, kept = np.inf, []
    for t, d in points:
        if d < best:
            best = d
            kept.append((t, d))
    return kept


def brute_force(job, evaluator, lengths):
    """What `predict` tells of the best of all plans whose stages are undominated."""
    best, memo = np.inf, {}
    for grad_accum, stages in pipelines(job, lengths):
        plan = plan_with(job, grad_accum, [stage_of(mesh) for mesh in stages])
        fronts = []
        for position, mesh in enumerate(stages):
            key = (grad_accum, len(stages), position, mesh, grid_of(plan, position).crossed)
            if key not in memo:
                memo[key] = priced(evaluator, plan, position, mesh)
            fronts.append(memo[key])
        base = predict(plan, evaluator)
        timings = [timing_of(base.stages, position) for position in range(len(stages))]
        for points in itertools.product(*fronts):
            changed = [
                replace(timing, stable_s=t + told.beyond_s[0], delta_s=d, forward_s=None)
                for timing, told, (t, d) in zip(timings, base.stages, points, strict=True)
            ]
            best = min(best, iteration_time(changed, grad_accum).total_s)
    return best


@pytest.mark.parametrize(
    ("nodes", "per_node", "stages", "layers", "batch", "limit_gib"),
    one_of(
        3,
        [
            (1, 8, 3, 3, 8, 3.0),
            (2, 2, 3, 4, 8, 4.0),
            (1, 4, 3, 5, 4, 100.0),
            (3, 2, 2, 4, 4, 5.0),
            (1, 6, 2, 3, 6, 4.0),
        ],
    ),
)
def test_search_equals_brute_force(nodes, per_node, stages, layers, batch, limit_gib):
    """Every split of GPUs and layers, and the whole grid of each stage, for pipelines that no division of
    the cluster into equal parts gives or that beat it."""
    job = job_on(nodes, per_node, layers, batch, limit_gib)
    evaluator = evaluator_of(job)
    result = search(evaluator, space_named("mist"), Settings(step=1.0, limits=Limits(fixed={"pp": stages})))
    best = result.solutions[0]
    # A third of a micro-batch forward, where the truth is a little more or less: that matters where stages
    # behind are much faster only.
    assert best.value_s == pytest.approx(brute_force(job, evaluator, [stages]), rel=1e-9)
    assert result.objective_s == best.value_s
    assert result.gap == 0.0
    plan = plan_of(evaluator, best)
    prediction = predict(plan, evaluator)
    assert violations(plan) == ()
    assert prediction.fits
    assert prediction.iteration_s == best.value_s


@pytest.mark.parametrize(
    ("target", "nodes", "per_node", "layers", "batch", "intra", "inter"),
    [
        # The best order of stages by eq. 1 (1, 2 and 1 GPUs) is 6 % behind another (2, 1 and 1) by predict.
        ("mist", 1, 4, 3, 4, 4.6e9, 2.3e9),
        # Three micro-batches of three stages, the first on slow links: 7 % behind by eq. 1, 14 % ahead.
        ("mist", 1, 6, 3, 6, 10e9, 10e9),
        # One GPU beside three on a slow network: ahead by eq. 1, which does not know their border; equal
        # stages are 10 % behind it by eq. 1.
        ("megatron+patches", 2, 3, 4, 6, 12e9, 3e9),
    ],
)
def test_the_plan_told_is_the_fastest_by_predict(target, nodes, per_node, layers, batch, intra, inter):
    """Few GPUs on slow links, where eq. 1 says too much or too little: held against every plan without
    recomputation and offload."""
    job = job_on(nodes, per_node, layers, batch, 5.0)
    links = replace(job.cluster.links, intra_bytes_per_s=intra, inter_bytes_per_s=inter)
    job = replace(job, target=target, cluster=replace(job.cluster, links=links))
    evaluator = evaluator_of(job)
    result = search(evaluator, space_named("mist" if target == "mist" else "full"), Settings(step=1.0))
    told = predict(plan_of(evaluator, result.solutions[0]), evaluator).iteration_s
    plans = [
        plan_with(job, grad_accum, [stage_of(mesh) for mesh in stages])
        for grad_accum, stages in pipelines(job, [1, 2, 3])
    ]
    found = [predict(plan, evaluator) for plan in plans if not violations(plan)]
    assert told == pytest.approx(min(p.iteration_s for p in found if p.fits), rel=1e-9)
    assert result.bound_s == pytest.approx(told, rel=0.002)


@pytest.mark.parametrize("target", ["mist", "megatron+patches"])
def test_a_search_knows_what_crosses_borders(target):
    """Of stages on all kinds of meshes, on nodes and in parts of them, as `predict` has it."""
    job = replace(job_on(2, 4, 5, 8, 100.0), target=target)
    evaluator = evaluator_of(job)
    sizes = [(1, 2, 2, 1, 2), (1, 2, 1, 2, 4), (1, 1, 1, 1, 4), (1, 1, 1, 1, 4), (1, 2, 2, 1, 2)]
    for order in ([0, 1, 2, 3, 4], [4, 2, 3, 1, 0], [1, 0, 4, 2, 3]):
        stages = [stage_of((*sizes[k], 1), ckpt=1) for k in order]
        plan = plan_with(job, 2, stages)
        shapes = [
            EqualPipeline(
                grad_accum=2,
                stages=3,
                nodes=stage.nodes,
                gpus_per_node=stage.gpus_per_node,
                dp=stage.dp,
                tp=stage.tp,
                micro_batch=stage.micro_batch,
                sequence_parallel=False,
                vpp=1,
                zero=(1,),
                bridged=target != "mist",
            )
            for stage in stages
        ]
        borders = Borders.of(evaluator, shapes, sides_of(evaluator, shapes))
        pairs = Pairs(borders, range(len(shapes)), job.cluster.gpus_per_node)
        none = len(shapes)
        kinds = [pairs.pairs.index((k - 1 if k else none, k)) for k in range(len(shapes))]
        gpus = [shape.gpus for shape in shapes]
        behind = [sum(gpus[k + 1 :]) for k in range(len(shapes))]
        table = [np.array(column) for column in (kinds, gpus, [*kinds[1:], len(pairs.pairs)], behind)]
        more = pairs.beyond_s(*table)
        prediction = predict(plan, evaluator)
        roles = [0, *[1] * (len(shapes) - 2), 2]
        sent = [
            stage.beyond_s[0] + stage.stable_terms_s[Term.PIPELINE_P2P] - borders.own_s[role, k]
            for k, (role, stage) in enumerate(zip(roles, prediction.stages, strict=True))
        ]
        assert more == pytest.approx(sent)
        assert max(more) > 0.0
        least = [
            borders.least_s(
                ROLES[0 if not k else 2 if k == len(shapes) - 1 else 1],
                k,
                parts_of_nodes=gpus[k] < job.cluster.gpus_per_node,
            )
            for k in range(len(shapes))
        ]
        assert (more >= np.array(least) - 1e-12).all()
        in_t_s = [[borders.least_s(role, k, parts_of_nodes=True) for role in ROLES] for k in range(none)]
        beside = np.ones((none, none), dtype=bool)
        known = Behind(borders, in_t_s, beside, (job.cluster.gpus, job.cluster.gpus_per_node))
        behind_s = known.beyond_s(np.arange(none), *table[1:2], np.arange(1, none + 1), table[3])
        in_role_s = np.array([in_t_s[k][role] for k, role in enumerate(roles)])
        assert (more >= behind_s + in_role_s - 1e-12).all()
        assert (behind_s + in_role_s > np.array(least)).any()
