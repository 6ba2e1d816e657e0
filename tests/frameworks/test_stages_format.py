"""stages.json is described twice, by its writer and by its reader inside training, which may not import each
other: no key may be known to one of them alone."""

from __future__ import annotations

from dataclasses import fields, replace

from mist_patches.core import stage_guards, stage_shape
from mist_patches.core.stage_arguments import SCHEMA as READ_SCHEMA

from mist_megatron.frameworks import stages_json
from mist_megatron.frameworks.deepspeed import write as deepspeed
from mist_megatron.frameworks.megatron import write as megatron
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.plan import Plan, StagePlan, TargetName
from mist_megatron.spec.recompute import RECOMPUTE_KINDS
from mist_megatron.spec.training import TrainingSpec


def plan(target: TargetName, stages: int, model: str = "llama2-7b") -> Plan:
    layers = presets.PRESETS[model].layers // stages
    stage = StagePlan(
        layers=layers, nodes=1, gpus_per_node=4 // stages, dp=4 // stages, tp=1, micro_batch=1, zero=1
    )
    return Plan(
        model=presets.PRESETS[model],
        training=TrainingSpec(global_batch=8 * stage.dp, seq_len=2048),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=1, gpus_per_node=4),
        target=target,
        grad_accum=8,
        stages=(stage,) * stages,
    )


def named() -> Plan:
    """On nodes that have names."""
    usual = plan("megatron", 2)
    stages = tuple(replace(stage, gpus_per_node=2) for stage in usual.stages)
    matrix = LinkMatrix(hosts=("a", "b"), bytes_per_s=((None, 1e10), (1e10, None)))
    links = replace(usual.cluster.links, matrix=matrix)
    return replace(
        usual, stages=stages, cluster=replace(usual.cluster, nodes=2, gpus_per_node=2, links=links)
    )


WRITTEN = (
    megatron.stages(plan("megatron+patches", 2, "falcon-40b")),
    megatron.stages(named()),
    deepspeed.stages(plan("deepspeed", 1)),
    deepspeed.stages(plan("deepspeed+patches", 2)),
)


def names(described: type) -> set[str]:
    return {field.name for field in fields(described)}  # type: ignore[arg-type]


def test_every_key_that_may_be_written_is_known_to_the_reader_and_the_other_way_round() -> None:
    assert {key for document in WRITTEN for key in document} == set(stage_shape.DOCUMENT)
    stages = [stage for document in WRITTEN for stage in document["stages"]]
    assert {key for stage in stages for key in stage} == set(stage_shape.STAGE)
    assert {kind for stage in stages for kind in stage["offload"]} == set(stage_shape.OFFLOAD)


def test_what_lint_takes_is_what_training_takes() -> None:
    assert names(stages_json._Document) == set(stage_shape.DOCUMENT)
    assert names(stages_json._Stage) == set(stage_shape.STAGE)
    assert names(Offload) == set(stage_shape.OFFLOAD)
    assert set(stage_shape.RECOMPUTE) == set(RECOMPUTE_KINDS)
    assert stages_json.SCHEMA == READ_SCHEMA
    for document in WRITTEN:
        assert stages_json.check_stages(document, "stages.json") == document
        assert list(stage_shape.shape_problems(document)) == []
        assert list(stage_guards.problems(document)) == []
