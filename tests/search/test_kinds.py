"""Models whose layers differ: what is found is the best of all plans, tried one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
from short_form import one_of

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import predict
from mist_megatron.errors import NoFeasiblePlan
from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.kind_bounds import bounds_of_kinds
from mist_megatron.search.kinds import solve_kinds
from mist_megatron.search.pipelines import shapes
from mist_megatron.search.search import Settings, search
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import Limits, cut_to_target, space_named
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.entry import EncoderOutput, Entry
from mist_megatron.spec.job import Job
from mist_megatron.spec.model import LayerGroup, ModelSpec
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

LAYERS, GPUS, BATCH = 6, 4, 8
GIB = float(1 << 30)


def heavy_first() -> ModelSpec:
    """Two wide layers, then narrow ones with a window in turns with such without."""
    model = replace(preset("llama3-8b"), layers=LAYERS, vocab=8192)
    narrow = model.kind("narrow", ffn_hidden=4096)
    groups = (
        LayerGroup(layers=2, pattern=(model.kind("wide", ffn_hidden=32768),)),
        LayerGroup(layers=4, pattern=(narrow, model.kind("near", ffn_hidden=4096, window=256))),
    )
    return replace(model, groups=groups)


def job_with(limit_gib: float) -> Job:
    cluster = ClusterSpec(
        gpu=gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=GPUS, memory_limit_bytes=limit_gib * GIB
    )
    training = TrainingSpec(seq_len=2048, global_batch=BATCH)
    return Job(model=heavy_first(), training=training, cluster=cluster, target="megatron")


def splits_of(stages: int) -> Iterator[tuple[int, ...]]:
    for borders in combinations(range(1, LAYERS), stages - 1):
        ends = (0, *borders, LAYERS)
        yield tuple(right - left for left, right in pairwise(ends))


def every_plan(job: Job) -> Iterator[Plan]:
    """Of space mist-ckpt: uneven stages, as many recomputed layers on each, ZeRO 1."""
    for stages, tp in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)):
        dp = GPUS // stages // tp
        for micro_batch in (1, 2, 4, 8):
            if BATCH % (dp * micro_batch):
                continue
            stage = StagePlan(
                layers=1, nodes=1, gpus_per_node=GPUS // stages, dp=dp, tp=tp, micro_batch=micro_batch
            )
            for split in splits_of(stages):
                for ckpt in range(min(split) + 1):
                    yield Plan(
                        model=job.model,
                        training=job.training,
                        cluster=job.cluster,
                        target=job.target,
                        grad_accum=BATCH // dp // micro_batch,
                        stages=tuple(replace(stage, layers=layers, ckpt=ckpt) for layers in split),
                        execution=job.execution,
                    )


@cache
def tried() -> tuple[tuple[float, float], ...]:
    """Seconds, and bytes of the fullest stage, of every plan that the target runs."""
    job = job_with(60.0)
    evaluator, _ = evaluator_for(job)
    told = [predict(plan, evaluator) for plan in one_of(3, [*every_plan(job)]) if not violations(plan)]
    return tuple((one.iteration_s, max(stage.peak_memory_bytes for stage in one.stages)) for one in told)


@pytest.mark.parametrize("limit_gib", [60.0, 24.0, 17.0])
def test_the_best_of_all_plans_is_found(limit_gib):
    job = job_with(limit_gib)
    evaluator, _ = evaluator_for(job)
    found = search(evaluator, space_named("mist-ckpt"), Settings())
    best = plan_of(evaluator, found.solutions[0])
    least_s = min(seconds for seconds, held_bytes in tried() if held_bytes <= limit_gib * GIB)
    told = predict(best, evaluator)
    assert told.fits and not violations(best)
    assert found.objective_s == pytest.approx(min(least_s, told.iteration_s), rel=1e-9)


def test_layers_move_to_where_they_are_light():
    """Of two stages the one with the wide layers has fewer; an even split is not the fastest."""
    job = job_with(60.0)
    evaluator, _ = evaluator_for(job)
    settings = Settings(limits=replace(Settings().limits, fixed={"pp": 2, "tp": 2}))
    first, second = search(evaluator, space_named("mist-ckpt"), settings).solutions[0].stages
    assert first["layers"] < second["layers"]


def test_bounds_count_what_borders_of_nodes_take():
    """Of stages that share nodes: without it pipelines of many small stages look best on slow networks."""
    job = job_with(60.0)
    links = LinkOverrides(inter_bytes_per_s=3e8)
    job = replace(job, cluster=replace(job.cluster, nodes=2, gpus_per_node=3, links=links))
    evaluator, _ = evaluator_for(job)
    space = cut_to_target(space_named("mist-ckpt"), job.target)
    question = SearchProblem(evaluator=evaluator, space=space, step=1.0)
    for shape in shapes(job, space, Limits(fixed={"tp": 1, "pp": 6, "vpp": 1, "micro_batch": 1})):
        (bound,) = bounds_of_kinds(question, [shape])
        solved = solve_kinds(question, shape, bound, math.inf).solution
        assert solved is not None
        assert 0.7 * solved.value_s < bound.value_s <= solved.value_s * (1.0 + 1e-9)


def test_no_plan_is_told_as_such():
    evaluator, _ = evaluator_for(job_with(2.0))
    with pytest.raises(NoFeasiblePlan, match="no plan fits llama3-8b"):
        search(evaluator, space_named("mist-ckpt"), Settings())


def test_the_space_is_what_the_target_runs():
    cut = cut_to_target(space_named("mist-ckpt"), "megatron")
    assert not cut.per_stage and cut.ckpt == "any" and cut.zero == (1,)


def encoder_decoder() -> ModelSpec:
    """A wide encoder on 512 tokens, two layers of it frozen, and a decoder on 64."""
    model = replace(preset("llama3-8b"), layers=1, hidden=2048, ffn_hidden=8192, vocab=8192, rotary=False)
    given = EncoderOutput(hidden=2048)
    entry = Entry(hidden=2048, norm=True, projects=False, table="shared")
    more = {"cross_attention": given, "tokens": 64}
    encoder = model.kind("encoder", attention="full")
    groups = [
        (2, replace(encoder, name="frozen", frozen=True)),
        (1, encoder),
        (1, model.kind("start", entry=entry, **more)),
        (2, model.kind("decoder", **more)),
    ]
    made = tuple(LayerGroup(layers=layers, pattern=(kind,)) for layers, kind in groups)
    return replace(model, layers=LAYERS, groups=made)


def widths_job(limit_gib: float) -> Job:
    training = TrainingSpec(seq_len=512, global_batch=BATCH)
    return replace(job_with(limit_gib), model=encoder_decoder(), training=training, target="torch")


def every_plan_of_torch(job: Job) -> Iterator[Plan]:
    """Of space full without tensor parallelism: replicated or sharded, any split, any layers recomputed."""
    for stages in (1, 2, 4):
        dp = GPUS // stages
        for micro_batch in (1, 2, 4, 8):
            if BATCH % (dp * micro_batch):
                continue
            for split in splits_of(stages):
                for ckpt in range(min(split) + 1):
                    for zero in (0, 3) if dp > 1 else (0,):
                        stage = StagePlan(
                            layers=1, nodes=1, gpus_per_node=dp, dp=dp, tp=1, micro_batch=micro_batch,
                            ckpt=ckpt, zero=zero,
                        )  # fmt: skip
                        yield Plan(
                            model=job.model,
                            training=job.training,
                            cluster=job.cluster,
                            target=job.target,
                            grad_accum=BATCH // dp // micro_batch,
                            stages=tuple(replace(stage, layers=layers) for layers in split),
                        )


@cache
def tried_of_torch() -> tuple[tuple[int, float, float], ...]:
    """Stages, seconds and bytes of the fullest stage of every plan."""
    job = widths_job(60.0)
    evaluator, _ = evaluator_for(job)
    plans = [plan for plan in one_of(3, [*every_plan_of_torch(job)]) if not violations(plan)]
    told = [(len(plan.stages), predict(plan, evaluator)) for plan in plans]
    return tuple((n, one.iteration_s, max(s.peak_memory_bytes for s in one.stages)) for n, one in told)


@pytest.mark.parametrize("stages", [None, 2, 4])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.05])
def test_the_best_of_all_plans_of_unlike_widths_is_found(share, stages):
    """Of all pipelines, or of those of one length, where so many of them fit."""
    plans = [plan for plan in tried_of_torch() if stages in (None, plan[0])]
    limit = sorted(held for _, _, held in plans)[int(share * (len(plans) - 1))]
    job = widths_job(limit / GIB)
    evaluator, _ = evaluator_for(job)
    fixed = {"tp": 1, **({} if stages is None else {"pp": stages})}
    settings = Settings(limits=replace(Settings().limits, fixed=fixed))
    found = search(evaluator, space_named("full"), settings)
    best = plan_of(evaluator, found.solutions[0])
    told = predict(best, evaluator)
    assert told.fits and not violations(best)
    least_s = min(seconds for _, seconds, held in plans if held <= limit)
    assert found.objective_s == pytest.approx(min(least_s, told.iteration_s), rel=1e-9)
