"""Small jobs and their evaluators."""

from __future__ import annotations

from functools import lru_cache

from kept_programs import KEPT

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.predict import Prediction, job_of, predict
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan, TargetName
from mist_megatron.spec.training import TrainingSpec


def small_job(
    target: TargetName, gpus: int = 4, layers: int = 4, batch: int = 16, limit_gib: float | None = None
) -> Job:
    """A model of a few layers that needs several gigabytes."""
    model = model_from_mapping(
        {"family": "llama", "layers": layers, "hidden": 2048, "heads": 16, "vocab": 32000}, "model"
    )
    cluster = cluster_of(gpu("a100-sxm-40gb"), gpus)
    if limit_gib is not None:
        from dataclasses import replace

        cluster = replace(cluster, memory_limit_bytes=limit_gib * 2**30)
    return Job(
        model=model,
        training=TrainingSpec(global_batch=batch, seq_len=2048),
        cluster=cluster,
        target=target,
    )


def evaluator_of(job: Job) -> StageEvaluator:
    return make_evaluator(job, datasheet_prices(job.cluster, job.training.precision), cache=KEPT)


@lru_cache(maxsize=1024)
def _made_once(job: Job) -> StageEvaluator:
    return evaluator_for(job)[0]


def told_of(plan: Plan) -> Prediction:
    """As `predict` tells it. Making an evaluator takes longer than asking it, and lists of plans have few."""
    return predict(plan, _made_once(job_of(plan)))
