"""`stages.json`: what differs between pipeline stages, for the code that runs inside training.

One file, read by `mist_patches` (standard library only) on every rank before the framework parses
its arguments. The format, schema 1:

    {
      "schema": 1,
      "framework": "megatron-core",          or "deepspeed"
      "plan": "gpt3-7b, 2 stages",           for people and log lines
      "world_size": 16,
      "tensor_parallel": 2, "context_parallel": 1, "pipeline_parallel": 2, "virtual_pipeline": 1,
      "micro_batches": 32,                   per optimizer step
      "rank_of_gpu": null,                   or a list: position = GPU in launch order, value = its rank
      "hosts": ["node-7", "node-3"],         only of plans that were placed: nodes in launch order, by name
      "spare_hosts": ["node-9"],             and what may stand in for one, best first
      "links": [[0, 1, 4.5e10]], "links_at_once": 8,   pairs of them that ranks talk over: bytes/s of a GPU
      "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "SOMETHING": null},
                                             set before torch is imported; null: must not be set
      "patches": ["exact_optimizer_fraction", ...],   names that mist_patches.apply knows; may be empty
      "parallel_norms": 1,                   only where attention and MLP of a layer stand side by side
      "stages": [
        {
          "stage": 0, "first_rank": 0, "ranks": 8,
          "layers": 16, "chunk_layers": [16],          chunk_layers: one entry per virtual stage
          "dp": 4, "tp": 2, "micro_batch": 1, "zero": 1,
          "recompute": "full", "recompute_layers": 4,  layers of the stage that are recomputed in full
          "offload": {"weights": 0.0, "grads": 0.0, "optimizer": 0.5, "activations": 0.0},
          "arguments": ["--recompute-granularity", "full", ...],
          "config": "ds_config.stage0.json"            only in a DeepSpeed pipeline: its JSON beside this file
        }
      ]
    }

Ranks of a stage are contiguous: both frameworks let the pipeline vary slowest. `arguments` are put
behind the command line's own on the ranks of the stage, so the last word is the stage's. `offload` holds
the plan's fractions whether a framework flag or a patch carries them out; `patches` says which patches do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mist_megatron.errors import InputError
from mist_megatron.formats.document import build_versioned
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Plan, Zero

SCHEMA = 1


def rank_of_gpu(plan: Plan) -> list[int] | None:
    """The plan's map (rank -> GPU) turned round, as a process needs it that knows its GPU only."""
    if plan.rank_map is None or plan.rank_map == tuple(range(len(plan.rank_map))):
        return None
    turned = [0] * len(plan.rank_map)
    for rank, gpu in enumerate(plan.rank_map):
        turned[gpu] = rank
    return turned


def with_map(plan: Plan, document: Mapping[str, Any]) -> Plan:
    """The plan with the map of a document: the other way round, as a plan has it."""
    turned = document.get("rank_of_gpu")
    if not turned or len(turned) != plan.gpus:
        return plan
    rank_map = [0] * len(turned)
    for gpu, rank in enumerate(turned):
        rank_map[rank] = gpu
    return replace(plan, rank_map=tuple(rank_map))


def follows_names(plan: Plan) -> bool:
    """Whether ranks are not the launcher's own."""
    return plan.cluster.links.matrix is not None or rank_of_gpu(plan) is not None


def hosts_document(plan: Plan) -> dict[str, object]:
    """By name: the plan's nodes as its map counts them, and the links that it leans on."""
    matrix = plan.cluster.links.matrix
    if matrix is None:
        return {}
    placement = (plan.provenance or {}).get("placement") or {}
    links = [[a, b, min(matrix.rate(a, b), matrix.rate(b, a))] for a, b in plan.node_pairs()]
    return {
        "hosts": list(matrix.hosts),
        "spare_hosts": list(placement.get("spares", [])),
        "links": links,
        "links_at_once": matrix.gpus_at_once,
    }


def stages_document(
    plan: Plan,
    *,
    framework: str,
    arguments: Sequence[Sequence[str]],
    environment: Mapping[str, str | None],
    patches: Sequence[str],
    configs: Sequence[str] = (),
) -> dict[str, object]:
    """The document described above; `arguments` has one list per stage, `configs` one file name or none."""
    return {
        "schema": SCHEMA,
        "framework": framework,
        "plan": f"{plan.model.name}, {len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}",
        "world_size": plan.gpus,
        "tensor_parallel": plan.stages[0].tp,
        "context_parallel": plan.execution.context_parallel,
        "pipeline_parallel": len(plan.stages),
        "virtual_pipeline": plan.vpp,
        "micro_batches": plan.grad_accum,
        "rank_of_gpu": rank_of_gpu(plan),
        **hosts_document(plan),
        "environment": dict(environment),
        "patches": list(patches),
        **({"parallel_norms": plan.model.parallel_norms} if plan.model.parallel_block else {}),
        "stages": [
            {
                "stage": index,
                "first_rank": plan.ranks(index).start,
                "ranks": stage.gpus,
                "layers": stage.layers,
                "chunk_layers": list(plan.chunk_layers[index]),
                "dp": stage.dp,
                "tp": stage.tp,
                "micro_batch": stage.micro_batch,
                "zero": stage.zero,
                "recompute": stage.recompute,
                "recompute_layers": stage.ckpt,
                "offload": asdict(stage.offload),
                "arguments": list(arguments[index]),
                **({"config": configs[index]} if configs else {}),
            }
            for index, stage in enumerate(plan.stages)
        ],
    }


def stages_text(document: Mapping[str, object]) -> str:
    """The document as the file's text."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


@dataclass(frozen=True, kw_only=True)
class _Stage:
    stage: int
    first_rank: int
    ranks: int
    layers: int
    chunk_layers: list[int]
    dp: int
    tp: int
    micro_batch: int
    zero: Zero
    recompute: str
    recompute_layers: int
    offload: Offload
    arguments: list[str]
    config: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Document:
    schema: int
    framework: str
    plan: str
    world_size: int
    tensor_parallel: int
    context_parallel: int
    pipeline_parallel: int
    virtual_pipeline: int
    micro_batches: int
    rank_of_gpu: list[int] | None
    hosts: list[str] | None = None
    spare_hosts: list[str] | None = None
    links: list[tuple[int, int, float]] | None = None
    links_at_once: int | None = None
    environment: dict[str, str | None]
    patches: list[str]
    stages: list[_Stage]
    parallel_norms: Literal[1, 2] | None = None


def check_stages(document: dict[str, Any], where: str) -> dict[str, Any]:
    """The document itself, once it is known to be one: people edit these files."""
    read = build_versioned(_Document, document, where, SCHEMA)
    if not read.stages:
        raise InputError(
            f"{where}: it has no stages; wanted at least one", details=("try: emit the plan again",)
        )
    for index, stage in enumerate(read.stages):
        if min(stage.ranks, stage.layers, stage.dp, stage.tp, stage.micro_batch) < 1:
            raise InputError(
                f"{where}: stages[{index}] has {stage.ranks} ranks, {stage.layers} layers, dp {stage.dp}, tp "
                f"{stage.tp} and micro-batch {stage.micro_batch}; wanted at least 1 of each",
                details=("try: emit the plan again",),
            )
    offloads = (asdict(stage.offload) for stage in read.stages)
    told = [{**stage, "offload": kinds} for stage, kinds in zip(document["stages"], offloads, strict=True)]
    return {**document, "stages": told}
