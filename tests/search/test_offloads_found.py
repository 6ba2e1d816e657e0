"""Which modules' activations leave for host memory is chosen with the rest of the plan: of all sets that a
search tries no plan that the table of the target takes is faster.

Plans are listed here one by one, from loops of their own, and priced by `predict`.
MIST_TEST_OFFLOAD_JOBS=40 tries so many jobs.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
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
from mist_megatron.search.graphs import LAYERS
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.mixtures import module_sets
from mist_megatron.search.offloads import DENSE, mixture_sets
from mist_megatron.search.search import SearchResult, Settings, search_ways
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import STAYS, Limits, space_named
from mist_megatron.search.ways import ways_of
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

JOBS = int(os.environ.get("MIST_TEST_OFFLOAD_JOBS", "3"))
FULL = space_named("full")
SPACE = replace(
    FULL,
    near_even=False,
    decoupled_step=False,
    tp_comm_overlap=False,
    megatron_fsdp=False,
    context_parallel=False,
    interleaved=False,
    optimizer_instances=False,
    dispatchers=("alltoall",),
    expert_overlap=False,
    offload=STAYS,
    zero=(1,),
)
GRAPHS = ("attn", "moe_router", "moe_preprocess")


def random_job(seed: int) -> Job:
    """Of long sequences, so that copies have something to hide behind; every second one has experts."""
    rng = np.random.default_rng(seed)
    experts = ExpertSpec(count=4, top_k=2, ffn_hidden=int(rng.choice([768, 2048])))
    model = replace(
        PRESETS["llama3-8b"], name="small", layers=4, hidden=1024, ffn_hidden=4096, vocab=32_000, heads=8,
        kv_heads=int(rng.choice([2, 8])), head_dim=128, experts=experts if seed % 2 else None,
    )  # fmt: skip
    cluster = cluster_of(gpu(str(rng.choice(["h100-sxm-80gb", "gb200-186gb"]))), 2)
    limit = float(rng.uniform(5.0, 14.0) if seed % 2 else rng.uniform(4.0, 9.0)) * 2**30
    host = float(rng.choice([1.0, 64.0])) * 2**30
    return Job(
        model=model,
        training=TrainingSpec(global_batch=4, seq_len=int(rng.choice([8192, 16384]))),
        cluster=replace(cluster, memory_limit_bytes=limit, host_memory_bytes=host),
        target="megatron",
        # Graphs of dense layers gain more than what leaves.
        execution=Execution(shared_expert_overlap=False, cuda_graphs=None if seed % 4 else ()),
    )


@lru_cache(maxsize=256)
def evaluator_of(job: Job) -> StageEvaluator:
    return make_evaluator(job, datasheet_prices(job.cluster, job.training.precision), cache=KEPT)


def searched(job: Job, limits: Limits | None = None) -> SearchResult | None:
    choices = execution_choices(job, SPACE, limits or Limits())
    try:
        return search_ways(ways_of(choices, lambda choice: evaluator_of(choice.job)), SPACE, Settings())
    except NoFeasiblePlan:
        return None


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def executions(job: Job) -> Iterator[tuple[Execution, bool]]:
    """What leaves and what is run again, beside graphs or none of them, wherever experts are; and whether
    modules are run again."""
    said = replace(job.execution, overlap_grad_reduce=True, fused_cross_entropy=True)
    gathered = [replace(said, overlap_param_gather=beside) for beside in (None, True)]
    if job.model.routed is None:
        free = job.execution.cuda_graphs is None
        replayed = [replace(each, cuda_graphs=LAYERS) for each in gathered if free]
        yield from ((each, False) for each in replayed)
        yield from (
            (replace(each, offload_modules=sent), False) for each in gathered for sent in (None, *DENSE)
        )
        for each in (*gathered, *replayed):
            yield from ((replace(each, recompute_modules=modules), True) for modules in (None, ("mlp",)))
        return
    for each, (ep, etp) in itertools.product(gathered, [(1, 1), (2, 1), (1, 2)]):
        spread = replace(each, expert_parallel=ep, expert_tensor_parallel=etp, expert_dispatcher="alltoall")
        for graphs in (None, GRAPHS):
            replayed = replace(spread, cuda_graphs=graphs)
            yield replayed, False
            for sent, modules in mixture_sets(job, graphed=graphs is not None):
                yield replace(replayed, offload_modules=sent, recompute_modules=modules), modules is not None
        for modules, graphs in itertools.product(module_sets(job), (None, ("attn",), GRAPHS)):
            if graphs != ("attn",) or "moe" in modules:
                yield replace(spread, recompute_modules=modules, cuda_graphs=graphs), True


def every_plan(job: Job) -> Iterator[Plan]:
    gpus, layers, batch = job.cluster.gpus, job.model.layers, job.training.global_batch
    for stages, tp in ((1, 1), (1, 2), (2, 1)):
        dp = gpus // (stages * tp)
        for micro_batch, (execution, again) in itertools.product(divisors(batch // dp), executions(job)):
            most = 0 if execution.offload_modules or again else layers // stages
            for ckpt, sequence_parallel in itertools.product(range(most + 1), (False, True)[:tp]):
                stage = StagePlan(
                    layers=layers // stages, nodes=1, gpus_per_node=gpus // stages, dp=dp, tp=tp,
                    micro_batch=micro_batch, zero=1, ckpt=ckpt, recompute="selective" if again else "full",
                )  # fmt: skip
                try:
                    plan = Plan(
                        model=job.model, training=job.training, cluster=job.cluster, target="megatron",
                        grad_accum=batch // dp // micro_batch, stages=(stage,) * stages,
                        sequence_parallel=sequence_parallel, execution=execution,
                    )  # fmt: skip
                except InputError:
                    continue
                if not violations(plan):
                    yield plan


def least_of_all(job: Job, found: SearchResult | None) -> float:
    """Seconds of the fastest plan that fits, from all of them or from some and the one that was found."""
    least_s, plans = math.inf, one_of(8, [*every_plan(job)])
    if found is not None:
        best = found.solutions[0]
        plans.append(plan_of(evaluator_of(replace(job, execution=best.execution)), best))
    for plan in plans:
        told = predict(plan, evaluator_of(replace(job, execution=plan.execution)))
        if told.fits:
            least_s = min(least_s, told.iteration_s)
    return least_s


def test_the_best_of_all_plans_is_found() -> None:
    leaves = 0
    for seed in range(JOBS):
        job = random_job(seed)
        found = searched(job)
        least_s = least_of_all(job, found)
        assert (found is None) == math.isinf(least_s), seed
        if found is None:
            continue
        assert found.objective_s == pytest.approx(least_s, rel=1e-9), seed
        leaves += found.solutions[0].execution.offload_modules is not None
        kept = searched(job, parse_limits((), ("offload_modules",), ()))
        assert kept is None or kept.objective_s >= found.objective_s, seed
        assert kept is None or kept.solutions[0].execution.offload_modules is None, seed
    assert leaves, "some of these jobs should send activations away"
