"""The JSONs of a DeepSpeed pipeline's stages, read again: whether they fit each other and stages.json. Pure.

`mist_patches.deepspeed.stage_files` refuses the same when training starts; there nothing of the tuner is
installed, so that the rule stands twice, and a test holds one against the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from mist_megatron.errors import InputError
from mist_megatron.frameworks.deepspeed.convert import batch_of, flat
from mist_megatron.frameworks.deepspeed.patches import PATCH_OF, Patch
from mist_megatron.frameworks.deepspeed.read import Config, Reading, patch_findings
from mist_megatron.frameworks.findings import Finding
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan, Zero
from mist_megatron.spec.training import TrainingSpec

OWN = (
    "_mist",
    "zero_optimization.offload_optimizer",
    "pipeline.activation_checkpoint_interval",
)
"""Keys in which the stages of a pipeline may differ."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What no file of a stage says."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec


def config_files(document: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The JSON of each stage, by name."""
    names = tuple(stage.get("config") for stage in document["stages"])
    if None in names:
        raise InputError(
            f"{where}: stages[{names.index(None)}] has no config; wanted the name of its JSON",
            details=("try: emit the plan again",),
        )
    return cast(tuple[str, ...], names)


def stage_findings(readings: Mapping[int, Reading], document: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What stands in the files by itself, and where they disagree with each other or with stages.json."""
    findings: list[Finding] = []
    names = [stage["config"] for stage in document["stages"]]
    for index, reading in readings.items():
        told = [*reading.findings, *_contradictions(reading, document, index)]
        if document["stages"][index]["offload"]["optimizer"]:
            told += patch_findings(reading, document)
        where = f"{names[index]}: " if len(set(names)) > 1 else ""
        findings += (replace(finding, message=f"{where}{finding.message}") for finding in told)
    first = _common(readings[0].config)
    for index, reading in readings.items():
        other = _common(reading.config)
        for key in sorted({*first, *other}):
            mine, its = first.get(key, "not there"), other.get(key, "not there")
            if repr(mine) != repr(its):
                message = (
                    f"{names[index]}: got {its!r}, {names[0]} has {mine!r}; wanted the same in all stages"
                )
                findings.append(Finding(level="rejected", key=key, message=message))
    return tuple(dict.fromkeys(findings))


def _common(config: Config) -> dict[str, object]:
    return {
        key: value
        for key, value in flat(config).items()
        if not any(key == own or key.startswith(f"{own}.") for own in OWN)
    }


def _contradictions(reading: Reading, document: Mapping[str, Any], index: int) -> Iterator[Finding]:
    """What a stage's JSON says and stages.json does not."""
    stage, said = document["stages"][index], reading.config.get("_mist")
    told = {
        "_mist.stage": (said.get("stage") if isinstance(said, dict) else None, index),
        "_mist.stages": (said.get("stages") if isinstance(said, dict) else None, len(document["stages"])),
        "train_micro_batch_size_per_gpu": (
            reading.config.get("train_micro_batch_size_per_gpu"),
            stage["micro_batch"],
        ),
        "gradient_accumulation_steps": (
            reading.config.get("gradient_accumulation_steps"),
            document["micro_batches"],
        ),
        "zero_optimization.stage": (reading.zero.get("stage"), stage["zero"]),
        "zero_optimization.offload_optimizer": (
            reading.moves("offload_optimizer"),
            stage["offload"]["optimizer"] > 0.0,
        ),
        "pipeline.activation_checkpoint_interval": (recomputes(reading), stage["recompute_layers"] > 0),
    }
    for key, (got, wanted) in told.items():
        if got is not None and got != wanted:
            words = {True: "on", False: "off"}
            message = f"got {words.get(got, got) if isinstance(got, bool) else got}, stages.json has "
            message += words[wanted] if isinstance(wanted, bool) else str(wanted)
            yield Finding(level="rejected", key=key, message=message)


def recomputes(reading: Reading) -> bool:
    """Whether the JSON switches on the recomputation of a PipelineModule's layers."""
    section = reading.config.get("pipeline")
    return bool(section.get("activation_checkpoint_interval")) if isinstance(section, dict) else False


def pipeline_plan(readings: Sequence[Reading], document: Mapping[str, Any], about: About) -> Plan:
    """The plan that the files of all stages say together."""
    named, first = frozenset(document["patches"]), readings[0]
    dp = document["stages"][0]["ranks"]
    micro, steps = batch_of(first, dp)
    stages = []
    for said, reading in zip(document["stages"], readings, strict=True):
        asked = {kind: said["offload"][kind] for kind, patch in PATCH_OF.items() if patch in named}
        moves = reading.moves("offload_optimizer")
        optimizer = asked.get("optimizer", 1.0) if moves else 0.0
        per_node = min(about.cluster.gpus_per_node, said["ranks"])
        stages.append(
            StagePlan(
                layers=said["layers"],
                nodes=said["ranks"] // per_node,
                gpus_per_node=per_node,
                dp=said["ranks"],
                tp=1,
                micro_batch=micro,
                zero=cast(Zero, reading.stage),
                ckpt=said["recompute_layers"] if recomputes(reading) else 0,
                offload=Offload(**{**asked, "optimizer": optimizer}),
            )
        )
    overlap = first.zero.get("overlap_comm")
    return Plan(
        model=about.model,
        training=replace(about.training, global_batch=micro * steps * dp),
        cluster=about.cluster,
        target="deepspeed+patches",
        grad_accum=steps,
        execution=Execution(
            overlap_grad_reduce=overlap if isinstance(overlap, bool) else None,
            grad_bytes=4 if first.wide_grads else None,
            decoupled_step=True if Patch.DECOUPLED_STEPS in named else None,
        ),
        stages=tuple(stages),
    )
