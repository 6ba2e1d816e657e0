"""CUDA graphs of hybrids with experts: what the search replays, and that it takes no longer."""

from __future__ import annotations

from dataclasses import replace

import mist_megatron
from mist_megatron.search.mixtures import MixtureWay, mixture_ways, module_sets
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

NEMOTRON, QWEN = PRESETS["nemotron-3-nano-30b-a3b"], PRESETS["qwen3-30b-a3b"]


def job_of(model) -> Job:
    return Job(
        model=model,
        training=TrainingSpec(global_batch=16, seq_len=8192),
        cluster=cluster_of(gpu("h100-sxm-80gb"), 16),
        target="megatron",
        execution=Execution(expert_dispatcher="flex"),
    )


def every_way(job: Job) -> list[MixtureWay]:
    """Those that come after others too."""

    def every(way: MixtureWay):
        yield way
        for other in way.after:
            yield from every(other)

    return [one for way in mixture_ways(job, space_named("full"), Limits()) for one in every(way)]


def replayed(model) -> set[tuple[str, ...] | None]:
    return {way.execution.cuda_graphs for way in every_way(job_of(model))}


def test_sets_of_modules_are_run_again_whatever_tokens_wait_for() -> None:
    """All of them where nothing runs beside tokens; shared experts not where these do, nor mixtures beside
    passes."""
    job = job_of(replace(QWEN, experts=replace(QWEN.experts, shared_ffn_hidden=768)))
    sets, found = set(module_sets(job)), {}
    for way in every_way(job):
        if way.limits.recompute == "selective" and way.execution.offload_modules is None:
            beside = way.execution.expert_overlap, way.execution.shared_expert_overlap
            found.setdefault(beside, set()).add(way.execution.recompute_modules)
    assert found == {
        (None, None): sets,
        (None, True): {one for one in sets if "shared_experts" not in one},
        (True, None): {one for one in sets if "moe" not in one},
    }
    assert len(sets) > len(found[None, True]) > len(found[True, None])


def test_scans_are_replayed_where_there_are_some() -> None:
    """Also where all of a mixture is run again, which leaves graphs of what comes before it alone."""
    router = ("moe_router", "moe_preprocess")
    assert replayed(NEMOTRON) == {("attn", "mamba", *router), ("attn", "mamba"), None}
    assert replayed(QWEN) == {("attn", *router), ("attn",), None}
    # An MLP of some layers is replayed too, but not beside passes whose tokens are on their way.
    mixed = replace(QWEN, experts=replace(QWEN.experts, first_dense=1))
    assert replayed(mixed) == {("attn", "mlp", *router), ("attn", *router), ("attn",), None}


def test_a_graph_of_scans_gains_time_and_holds_no_less() -> None:
    """Of short sequences, whose kernels the host cannot launch quickly enough."""

    def told(*graphs: str):
        stage = StagePlan(
            layers=NEMOTRON.layers, nodes=2, gpus_per_node=8, dp=16, tp=1, micro_batch=1, zero=1
        )
        plan = Plan(
            model=NEMOTRON,
            training=TrainingSpec(global_batch=16, seq_len=1024),
            cluster=cluster_of(gpu("h100-sxm-80gb"), 16),
            target="megatron",
            grad_accum=1,
            stages=(stage,),
            execution=Execution(expert_parallel=8, cuda_graphs=graphs, overlap_grad_reduce=True),  # type: ignore[arg-type]
        )
        assert not violations(plan)
        return mist_megatron.predict(replace(plan))

    without, whole = told("attn"), told("attn", "mamba")
    assert whole.iteration_s < without.iteration_s
    assert whole.prediction.stages[0].peak_memory_bytes >= without.prediction.stages[0].peak_memory_bytes
