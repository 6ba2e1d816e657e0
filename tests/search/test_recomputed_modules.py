"""Which modules of a layer are run again is chosen with the rest of the plan."""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.ask.tune import tune
from mist_megatron.formats.files import load_model
from mist_megatron.search.execution import recompute_modules
from mist_megatron.search.search import Settings
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.training import TrainingSpec

FULL = space_named("full")
LIMITS = Limits(most={"tp": 1, "cp": 1, "vpp": 4}, fixed={"pp": 4}, forbidden=frozenset({"offload_modules"}))


def job(*, flash: bool = True) -> Job:
    return Job(
        model=load_model("gpt3-7b"),
        training=TrainingSpec(global_batch=64, seq_len=4096, precision="bf16", flash_attention=flash),
        cluster=ClusterSpec(gpu=catalogue.gpu("l4-24gb"), nodes=2, gpus_per_node=8),
        target="megatron",
    )


def test_the_best_is_that_of_all_modules_tried_one_by_one():
    """Each by a search of its own, which knows of no other."""
    settings = Settings(step=0.5, limits=LIMITS)
    alone = {}
    for modules in (("core_attn",), ("mlp",)):
        said = replace(job(), execution=replace(job().execution, recompute_modules=modules))
        alone[modules] = tune(said, space=FULL, settings=settings).iteration_s
    found = tune(job(), space=FULL, settings=settings)
    assert found.iteration_s == min(alone.values())
    assert found.plan.execution.recompute_modules == ("mlp",), (
        "short of memory: an MLP costs least of a layer"
    )
    assert found.plan.stages[0].recompute == "selective"


def test_what_is_said_stays():
    assert recompute_modules(job(), FULL, Limits()) == [None, ("mlp",)]
    assert recompute_modules(job(flash=False), FULL, Limits()) == [None, ("mlp",), ("core_attn", "mlp")]
    assert recompute_modules(job(), space_named("megatron-expert"), Limits()) == [None]
    assert recompute_modules(job(), FULL, Limits(recompute="full")) == [None]
    said = replace(job(), execution=replace(job().execution, recompute_modules=("mlp",)))
    assert recompute_modules(said, FULL, Limits()) == [("mlp",)]
    assert recompute_modules(replace(job(), target="megatron+patches"), FULL, Limits()) == [None]
