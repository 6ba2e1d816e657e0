"""Stock Megatron: of random small jobs with experts no plan that its table takes is faster than what is told.

Plans are listed here one by one, from loops of their own, and priced by `predict`: every spread of experts
and every dispatcher beside every pipeline, mesh and micro-batch. MIST_TEST_EXPERT_JOBS=100 tries so
many jobs; MIST_TEST_NARROW_EXPERT_JOBS=100 as many that cost seconds: two GPUs, one number of stages.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from kept_programs import KEPT
from short_form import one_of

from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.predict import predict
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.mixtures import module_sets
from mist_megatron.search.search import SearchResult, Settings, search_ways
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import Limits, space_named
from mist_megatron.search.ways import ways_of
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import DISPATCHERS
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.schedule import usual_schedule
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

JOBS = int(os.environ.get("MIST_TEST_EXPERT_JOBS", "1"))
SEEDS = (16, 3, *range(4, 16), *range(17, 1000))
"""The job of four GPUs that has the fewest plans comes first, then one of two. All dispatchers of two GPUs
are searched together; of four, which have several times as many plans, one alone."""
NARROW_JOBS = int(os.environ.get("MIST_TEST_NARROW_EXPERT_JOBS", "1"))
SPACE = replace(
    space_named("full"), near_even=False, decoupled_step=False, tp_comm_overlap=False, megatron_fsdp=True
)
"""Even splits, which have a list of their own (`test_alike_stages.py`)."""
WAYS = (
    Execution(),
    Execution(overlap_param_gather=True),
    Execution(overlap_param_gather=True, megatron_fsdp=True),
)
"""When updated weights are gathered, and who shards; not Megatron-FSDP where dense layers come in between."""


def small_mixture(rng: np.random.Generator) -> ModelSpec:
    """A few layers, all with experts, or some before or between that have none."""
    experts = ExpertSpec(
        count=int(rng.choice([4, 6, 8])),
        top_k=int(rng.choice([1, 2])),
        ffn_hidden=int(rng.choice([768, 4096])),
        shared_ffn_hidden=int(rng.choice([0, 1024])),
        first_dense=int(rng.choice([0, 0, 1])),
        every=int(rng.choice([1, 1, 2])),
        router="sigmoid",
    )
    heads = {"heads": 8, "kv_heads": int(rng.choice([2, 8]))}
    model = replace(
        PRESETS["llama3-8b"],
        name="small",
        layers=4,
        hidden=1024,
        ffn_hidden=4096,
        vocab=32_000,
        head_dim=128,
        **heads,
    )
    return replace(model, experts=experts, qk_norm=bool(rng.random() < 0.5))


def random_job(seed: int) -> Job:
    rng = np.random.default_rng(seed)
    closed = CLOSED[seed % len(CLOSED)]
    gpus = int(rng.choice([2, 4])) if closed is CLOSED[0] else 2
    cluster = cluster_of(gpu("h100-sxm-80gb"), gpus, int(rng.choice([gpus, max(gpus // 2, 1)])))
    links = replace(cluster.links, inter_bytes_per_s=float(10.0 ** rng.uniform(9.0, 11.0)))
    limit = float(rng.choice([2.5, 4.0, 8.0, 70.0])) * 2**30
    return Job(
        model=small_mixture(rng),
        training=TrainingSpec(global_batch=gpus * int(rng.choice([1, 2])), seq_len=1024),
        cluster=replace(cluster, links=links, memory_limit_bytes=limit),
        target="megatron",
        execution=replace(closed, expert_imbalance=float(rng.choice([1.0, 1.2]))),
    )


CLOSED = (
    Execution(
        expert_overlap=False, shared_expert_overlap=False, cuda_graphs=(), recompute_modules=("moe_act",)
    ),
    Execution(expert_overlap=False, shared_expert_overlap=False),
    Execution(cuda_graphs=()),
    Execution(recompute_modules=("moe_act",)),
)
"""Tokens on their way, graphs and modules: no job leaves all of them open, which would have too many plans
to list."""


@lru_cache(maxsize=1024)
def evaluator_of(job: Job) -> StageEvaluator:
    return make_evaluator(job, datasheet_prices(job.cluster, job.training.precision), cache=KEPT)


def searched(job: Job, limits: Limits | None = None, **settings: int) -> SearchResult | None:
    choices = execution_choices(job, SPACE, limits or Limits())
    ways = ways_of(choices, lambda choice: evaluator_of(choice.job))
    try:
        return search_ways(ways, SPACE, Settings(**settings))
    except NoFeasiblePlan:
        return None


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def executions(job: Job, cp: int) -> Iterator[Execution]:
    """Every switch, however few of them the rules leave; experts are split over fast links only, as the line
    of the proof says."""
    gpus, experts, linked = job.cluster.gpus, job.model.routed, job.cluster.linked_gpus
    in_turn = sum(one != other for one, other in itertools.pairwise(job.model.kind_of_layer)) > 1
    spreads = itertools.product(divisors(gpus), divisors(linked), DISPATCHERS, WAYS, switches(job))
    for ep, etp, dispatcher, way, execution in spreads:
        excluded = way.megatron_fsdp and (in_turn or execution.expert_overlap or execution.cuda_graphs)
        if experts.count % ep == 0 and experts.ffn_hidden % etp == 0 and not excluded:
            yield replace(
                execution,
                context_parallel=cp,
                expert_parallel=ep,
                expert_tensor_parallel=etp,
                expert_dispatcher=dispatcher,
                overlap_grad_reduce=True,
                overlap_param_gather=way.overlap_param_gather,
                megatron_fsdp=way.megatron_fsdp,
                fused_cross_entropy=True,
            )


def switches(job: Job) -> list[Execution]:
    """What of tokens on their way, graphs and modules the job leaves open: all graphs or none, or those of
    attention alone where a whole mixture is run again."""
    said = job.execution
    beside = [(False, False)] if said.expert_overlap is False else [(None, None), (True, None), (None, True)]
    sets = [said.recompute_modules] if said.recompute_modules else [None, *module_sets(job)]
    found = []
    for (passes, shared), modules in itertools.product(beside, sets):
        dense = not passes and any(kind.experts is None for kind in job.model.kinds)
        graphs = ("attn", *(["mlp"] if dense else []), "moe_router", "moe_preprocess")
        alone = ("attn",) if modules is not None and "moe" in modules else None
        for replayed in [None] if said.cuda_graphs == () else [None, graphs, alone]:
            own = replace(said, recompute_modules=modules, cuda_graphs=replayed)
            found.append(replace(own, expert_overlap=passes, shared_expert_overlap=shared))
    return list(dict.fromkeys(found))


def every_plan(job: Job) -> Iterator[Plan]:
    gpus, layers, batch = job.cluster.gpus, job.model.layers, job.training.global_batch
    for stages, tp, cp in itertools.product(divisors(gpus), divisors(gpus), divisors(gpus)):
        if gpus % (stages * tp * cp):
            continue
        dp, of_stage = gpus // (stages * tp * cp), gpus // stages
        inside = min(of_stage, job.cluster.gpus_per_node)
        for micro_batch, zero, vpp, split, execution in itertools.product(
            divisors(batch), (0, 1, 2, 3), divisors(layers), splits(job, stages), executions(job, cp)
        ):
            chunks = [count // vpp for count in split]
            if batch % (dp * micro_batch) or any(count % vpp for count in split):
                continue
            if zero > 1 and not (execution.megatron_fsdp and stages == 1):
                continue
            for again, kind in [*((k, "full") for k in range(min(chunks) + 1)), (0, "selective")]:
                if kind == "selective" and execution.recompute_modules is None:
                    continue
                try:
                    plan = Plan(
                        model=job.model,
                        training=job.training,
                        cluster=job.cluster,
                        target="megatron",
                        grad_accum=batch // dp // micro_batch,
                        stages=tuple(
                            StagePlan(
                                layers=count,
                                nodes=of_stage // inside,
                                gpus_per_node=inside,
                                dp=dp,
                                tp=tp,
                                micro_batch=micro_batch,
                                zero=zero,  # type: ignore[arg-type]
                                ckpt=again * vpp,
                                recompute=kind,
                            )
                            for count in split
                        ),
                        schedule=usual_schedule(vpp),
                        vpp=vpp,
                        sequence_parallel=tp > 1,
                        execution=execution,
                    )
                except InputError:
                    continue  # what Megatron refuses
                if not violations(plan):
                    yield plan


def splits(job: Job, stages: int) -> list[tuple[int, ...]]:
    """Even ones; of models whose layers differ all."""
    layers = job.model.layers
    if len(job.model.kinds) == 1:
        return [(layers // stages,) * stages] if layers % stages == 0 else []
    found = itertools.product(range(1, layers + 1), repeat=stages)
    return [split for split in found if sum(split) == layers]


def least_of_all(job: Job, plans: Iterable[Plan]) -> float:
    """Seconds of the fastest of these plans that fits."""
    evaluators: dict[Execution, StageEvaluator] = {}
    least_s = math.inf
    for plan in plans:
        if plan.execution not in evaluators:
            evaluators[plan.execution] = evaluator_of(replace(job, execution=plan.execution))
        told = predict(plan, evaluators[plan.execution])
        if told.fits:
            least_s = min(least_s, told.iteration_s)
    return least_s


def told(job: Job, found: SearchResult | None) -> list[Plan]:
    """The plan that a search tells: where but some of all are tried, it has to be one of them."""
    if found is None:
        return []
    (best, *_) = found.solutions
    plan = plan_of(evaluator_of(replace(job, execution=best.execution)), best)
    assert not violations(plan)
    return [plan]


@pytest.mark.parametrize("seed", SEEDS[:JOBS])
def test_the_best_of_all_plans_is_found(seed: int) -> None:
    job = random_job(seed)
    dispatcher = DISPATCHERS[seed % 2] if job.cluster.gpus == 4 else None
    found = searched(job, Limits(dispatcher=dispatcher))
    plans = [plan for plan in every_plan(job) if dispatcher in (None, plan.execution.expert_dispatcher)]
    least_s = least_of_all(job, [*told(job, found), *one_of(8, plans)])
    assert (found is None) == math.isinf(least_s)
    if found is not None:
        assert found.objective_s == pytest.approx(least_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(NARROW_JOBS))
def test_the_best_of_few_plans_is_found(seed: int) -> None:
    """One dispatcher, one number of stages, no graphs and nothing beside tokens, on two GPUs."""
    rng = np.random.default_rng(seed)
    dispatcher, stages = DISPATCHERS[int(rng.integers(2))], int(rng.integers(1, 3))
    drawn = (random_job(len(CLOSED) * number) for number in itertools.count(1000 * seed))
    job = next(job for job in drawn if job.cluster.gpus == 2)
    found = searched(job, Limits(dispatcher=dispatcher, fixed={"pp": stages}))
    few = (
        plan
        for plan in every_plan(job)
        if len(plan.stages) == stages and plan.execution.expert_dispatcher == dispatcher
    )
    least_s = least_of_all(job, few)
    assert (found is None) == math.isinf(least_s)
    if found is not None:
        assert found.objective_s == pytest.approx(least_s, rel=1e-9)
