"""plan.yaml: the written form of a Plan, and back. The round trip is exact."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.formats.document import Inline, Row, build_versioned, parse, schema_of, to_yaml
from mist_megatron.formats.model_yaml import model_from_mapping, model_to_mapping
from mist_megatron.spec import catalogue, check, presets
from mist_megatron.spec.cluster import ClusterSpec, GpuSpec, LinkOverrides, NodeGroup
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan, TargetName
from mist_megatron.spec.schedule import ONE_F_ONE_B, ScheduleName
from mist_megatron.spec.training import TrainingSpec

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class GroupDocument:
    """Nodes of one kind in a mixed cluster."""

    gpu: str | GpuSpec
    """Name, see `mist-megatron gpus`, or a mapping of all its figures, each `{value, source}`."""
    nodes: int
    """Number of its nodes."""
    profile: str | None = None
    """Hardware profile by name or path; null takes the one named after the GPU."""


@dataclass(frozen=True, kw_only=True)
class ClusterDocument:
    """The cluster of a plan: a GPU by name, or a full mapping of its figures."""

    gpu: str | GpuSpec
    """Name, see `mist-megatron gpus`, or a mapping of all its figures, each `{value, source}`."""
    nodes: int
    """Number of equal nodes."""
    gpus_per_node: int
    """GPUs of one node."""
    links: LinkOverrides = LinkOverrides()
    """Bandwidths that replace the catalogue's or the profile's."""
    memory_limit_bytes: float | None = None
    """Budget per GPU; null takes its memory less what the framework needs."""
    host_memory_bytes: float | None = None
    """Budget of one node for what its GPUs keep in host memory; null takes nine tenths of a usual node's."""
    profile: str | None = None
    """Hardware profile by name or path; null takes the one named after the GPU."""
    groups: tuple[GroupDocument, ...] = ()
    """Of a mixed cluster, its kinds of nodes in the order in which nodes are numbered; each stage lies on
    nodes of one of them. gpu and profile are then those of the first, nodes those of all together."""


@dataclass(frozen=True, kw_only=True)
class PlanDocument:
    """plan.yaml, key by key."""

    schema: int
    """Of this format: 1."""
    model: str | dict[str, Any]
    """Preset, see `mist-megatron models`, or a mapping of its shape."""
    training: TrainingSpec
    """What the user fixes."""
    cluster: ClusterDocument
    """Where it runs."""
    target: TargetName
    """Framework whose byte counts and overlaps hold, and whose rules the plan keeps."""
    grad_accum: int
    """Micro-batches per optimizer step; micro_batch * dp * grad_accum = global_batch on every stage."""
    stages: tuple[StagePlan, ...]
    """First to last; their layers sum to the model's, their GPUs to the cluster's."""
    schedule: ScheduleName = ONE_F_ONE_B
    """Order of micro-batches in the pipeline; interleaved and vpp above 1 go together."""
    vpp: int = 1
    """Model chunks per pipeline rank."""
    sequence_parallel: bool = False
    """Norms and dropouts split over the tensor-parallel ranks as well."""
    execution: Execution = Execution()
    """Framework switches; what is not said is the target's default."""
    rank_map: tuple[int, ...] | None = None
    """Logical rank -> physical GPU; null for the same order. Ranks count tensor parallel
    fastest, then context, data, pipeline."""
    prediction: dict[str, Any] | None = None
    """Written by `tune`: what `predict --json` prints. Times in seconds, sizes in bytes."""
    provenance: dict[str, Any] | None = None
    """Written by `tune`: version, profile, space, proof."""


def json_schema() -> dict[str, Any]:
    """Of a plan, for editors and other programs. What keys say of each other (sums, divisions) it
    cannot hold: reading a plan tells it."""
    made = schema_of(PlanDocument)
    properties = {**made["properties"], "schema": {"const": SCHEMA}}
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mist-megatron plan"}
    return {**made, **about, "properties": properties}


def plan_from_text(text: str, where: str = "plan") -> Plan:
    """Read plan.yaml or its JSON form."""
    return plan_from_mapping(parse(text, where), where)


def plan_from_mapping(value: Mapping[str, object], where: str = "plan") -> Plan:
    """Read the parsed form of a plan."""
    _refuse_boolean_levels(value, where)
    _check_records(value, where)
    document = build_versioned(PlanDocument, value, where, SCHEMA)
    cluster = document.cluster
    try:
        return Plan(
            model=_model(document.model),
            training=document.training,
            cluster=ClusterSpec(
                gpu=_gpu(cluster.gpu) if isinstance(cluster.gpu, str) else cluster.gpu,
                nodes=cluster.nodes,
                gpus_per_node=cluster.gpus_per_node,
                links=cluster.links,
                memory_limit_bytes=cluster.memory_limit_bytes,
                host_memory_bytes=cluster.host_memory_bytes,
                profile=cluster.profile,
                groups=tuple(
                    NodeGroup(
                        gpu=_gpu(group.gpu) if isinstance(group.gpu, str) else group.gpu,
                        nodes=group.nodes,
                        profile=group.profile,
                    )
                    for group in cluster.groups
                ),
            ),
            target=document.target,
            grad_accum=document.grad_accum,
            stages=document.stages,
            schedule=document.schedule,
            vpp=document.vpp,
            sequence_parallel=document.sequence_parallel,
            execution=document.execution,
            rank_map=document.rank_map,
            prediction=document.prediction,
            provenance=document.provenance,
        )
    except InputError as error:
        raise InputError(f"{where}: {error.message}", details=error.details) from None


def _refuse_boolean_levels(value: Mapping[str, object], where: str) -> None:
    """`zero: true` is not a level, though Python (and so the validator) takes true for 1."""
    stages = value.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else ()):
        if isinstance(stage, dict) and isinstance(stage.get("zero"), bool):
            level = str(stage["zero"]).lower()
            raise InputError(f"{where}: stages[{index}].zero is {level}; wanted 0, 1, 2 or 3")


RECORDED = ("iteration_s", "samples_per_s", "tokens_per_s", "tflops_per_gpu", "full_tflops_per_gpu", "mfu")
"""Of a prediction, what `recipes` and emitted folders tell again as it is written."""


def _check_records(value: Mapping[str, object], where: str) -> None:
    """What was told of the plan is told again to people and launchers, so it is what it was."""
    told, about = value.get("prediction"), value.get("provenance")
    recorded = told if isinstance(told, dict) else {}
    for key in RECORDED:
        number = recorded.get(key)
        fits = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 < number < math.inf
        if number is not None and not fits:
            raise InputError(f"{where}: prediction.{key} is {number!r}; wanted a number above 0")
    placement = about.get("placement") if isinstance(about, dict) else None
    if placement is not None and not isinstance(placement, dict):
        raise InputError(f"{where}: provenance.placement is {placement!r}; wanted a mapping")
    spares = (placement or {}).get("spares", [])
    if not isinstance(spares, list) or not all(isinstance(host, str) for host in spares):
        raise InputError(f"{where}: provenance.placement.spares is {spares!r}; wanted a list of host names")


def _model(value: str | dict[str, object]) -> ModelSpec:
    if not isinstance(value, str):
        return model_from_mapping(value, "model")
    if value.endswith((".json", ".yaml", ".yml")):
        raise InputError(f"model is {value!r}; wanted a preset's name, or the mapping that the file holds")
    check.known("model", "model preset", value, presets.preset_names(), see="mist-megatron models")
    return presets.preset(value)


def _gpu(name: str) -> GpuSpec:
    check.known("cluster.gpu", "GPU", name, catalogue.gpu_names(), see="mist-megatron gpus")
    return catalogue.gpu(name)


def plan_to_mapping(plan: Plan) -> dict[str, Any]:
    """The written form; names instead of figures where a name says it all."""
    cluster = plan.cluster
    written: dict[str, Any] = {
        "schema": SCHEMA,
        "model": plan.model.name
        if presets.PRESETS.get(plan.model.name) == plan.model
        else model_to_mapping(plan.model),
        "training": asdict(plan.training),
        "cluster": {
            "gpu": _gpu_words(cluster.gpu),
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
        },
        "target": plan.target,
        "grad_accum": plan.grad_accum,
        "schedule": plan.schedule,
        "vpp": plan.vpp,
        "sequence_parallel": plan.sequence_parallel,
        "stages": [_stage(stage) for stage in plan.stages],
        "rank_map": None if plan.rank_map is None else list(plan.rank_map),
    }
    if cluster.links != LinkOverrides():
        written["cluster"]["links"] = _links(cluster.links)
    for key in ("memory_limit_bytes", "host_memory_bytes", "profile"):
        if getattr(cluster, key) is not None:
            written["cluster"][key] = getattr(cluster, key)
    if cluster.groups:
        written["cluster"]["groups"] = [
            {"gpu": _gpu_words(group.gpu), "nodes": group.nodes}
            | ({} if group.profile is None else {"profile": group.profile})
            for group in cluster.groups
        ]
    if plan.execution != Execution():
        written["execution"] = _given(plan.execution)
    for key in ("prediction", "provenance"):
        if getattr(plan, key) is not None:
            written[key] = json.loads(json.dumps(getattr(plan, key), default=dict))
    return written


def _stage(stage: StagePlan) -> dict[str, Any]:
    """Strategies where its layers have their own."""
    own = ("strategies", "embedding", "head")
    return {key: value for key, value in asdict(stage).items() if key not in own or value}


def _gpu_words(gpu: GpuSpec) -> str | dict[str, Any]:
    return gpu.name if catalogue.CATALOGUE.get(gpu.name) == gpu else asdict(gpu)


def _links(links: LinkOverrides) -> dict[str, object]:
    given = _given(links)
    if links.matrix is not None:
        given["matrix"] = _rows(links.matrix)
    return given


def _rows(matrix: LinkMatrix) -> dict[str, object]:
    """A node's links a line."""
    known = {field.name: getattr(matrix, field.name) for field in fields(matrix)}
    rows: list[object] = [Row(row) for row in matrix.bytes_per_s]
    written = {**known, "hosts": Row(matrix.hosts), "bytes_per_s": rows}
    return {name: value for name, value in written.items() if value not in (None, "")}


def _given(value: LinkOverrides | Execution) -> dict[str, object]:
    return {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) is not None}


def _stage_line(stage: dict[str, Any]) -> Inline:
    runs = {"strategies": Row(Inline(run) for run in stage["strategies"])} if "strategies" in stage else {}
    return Inline({**stage, "offload": Inline(stage["offload"]), **runs})


def plan_to_yaml(plan: Plan) -> str:
    """YAML for people: stages one line each, as in the documentation."""
    written = plan_to_mapping(plan)
    written["stages"] = [_stage_line(stage) for stage in written["stages"]]
    for key in ("training", "cluster"):
        if not any(isinstance(v, dict | list) for v in written[key].values()):
            written[key] = Inline(written[key])
    # Wide enough for a stage with all its keys.
    return to_yaml(written, width=240)
