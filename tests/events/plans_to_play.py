"""Small plans, and programs of benchmarks/ as modules."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.predict import job_of
from mist_megatron.formats.files import CacheFolder
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"family": "llama", "layers": 16, "hidden": 1024, "heads": 16, "vocab": 32000}
_EVALUATORS: dict[Any, StageEvaluator] = {}
_COMPILED = tempfile.TemporaryDirectory()
"""Compiled programs, which depend on little of a job."""


def benchmark_program(name: str) -> ModuleType:
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def plan_of(
    *layers: int,
    target: str = "mist",
    grad_accum: int = 8,
    schedule: str = "1f1b",
    vpp: int = 1,
    execution: Execution | None = None,
    sizes: dict[str, Any] | None = None,
    **stage: Any,
) -> Plan:
    """Stages of so many layers, otherwise alike, one node each."""
    tp, dp, micro_batch = stage.get("tp", 1), stage.get("dp", 1), stage.get("micro_batch", 1)
    stage = {"zero": 1, **stage, "tp": tp, "dp": dp, "micro_batch": micro_batch}
    return Plan(
        model=model_from_mapping({**MODEL, **(sizes or {}), "layers": sum(layers)}, "model"),
        training=TrainingSpec(global_batch=micro_batch * dp * grad_accum, seq_len=1024),
        cluster=ClusterSpec(gpu=CATALOGUE["a100-sxm-80gb"], nodes=len(layers), gpus_per_node=tp * dp),
        target=target,  # type: ignore[arg-type]
        grad_accum=grad_accum,
        schedule=schedule,  # type: ignore[arg-type]
        vpp=vpp,
        stages=tuple(StagePlan(layers=n, nodes=1, gpus_per_node=tp * dp, **stage) for n in layers),
        execution=execution or Execution(),
    )


def evaluator_of(plan: Plan) -> StageEvaluator:
    """At datasheet prices: what is tested here is what is made of prices."""
    job = job_of(plan)
    if job not in _EVALUATORS:
        prices = datasheet_prices(job.cluster, job.training.precision)
        _EVALUATORS[job] = make_evaluator(job, prices, cache=CacheFolder(Path(_COMPILED.name)))
    return _EVALUATORS[job]


FULL_OFFLOAD = Offload(weights=0.25, grads=0.25, optimizer=0.5, activations=0.5)
