"""Which patches an emitted DeepSpeed plan asks for, and that the training side knows them."""

from __future__ import annotations

import pytest
from mist_patches.applying import DEEPSPEED

from mist_megatron.emit import deepspeed
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.plan import Execution, Offload, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec


def plan(zero: int, offload: Offload, grad_bytes: int | None) -> Plan:
    return Plan(
        model=presets.PRESETS["llama2-7b"],
        training=TrainingSpec(global_batch=8, seq_len=2048, precision="fp16"),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=2),
        target="deepspeed",
        grad_accum=2,
        stages=(
            StagePlan(
                layers=32, nodes=1, gpus_per_node=2, dp=2, tp=1, micro_batch=2, zero=zero, offload=offload
            ),
        ),
        execution=Execution(grad_bytes=grad_bytes),
    )


HOST = Offload(optimizer=1.0, grads=1.0)


@pytest.mark.parametrize(
    ("zero", "offload", "grad_bytes", "expected"),
    [
        (2, HOST, 4, ("forget_overflow",)),
        (1, Offload(optimizer=1.0), 4, ("forget_overflow",)),
        (2, HOST, None, ()),
        (2, Offload(), 4, ()),
        (3, HOST, 4, ()),
    ],
)
def test_overflow_is_forgotten_where_deepspeed_keeps_it(zero, offload, grad_bytes, expected) -> None:
    document = deepspeed.stages(plan(zero, offload, grad_bytes))
    assert tuple(document["patches"]) == expected
    assert set(expected) <= set(DEEPSPEED)
