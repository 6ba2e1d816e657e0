"""Which patches an emitted DeepSpeed plan asks for, and that the training side knows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mist_patches.core.registry import PATCHES

from mist_megatron.frameworks.deepspeed import patches as deepspeed_patches
from mist_megatron.frameworks.deepspeed import write as deepspeed
from mist_megatron.frameworks.megatron import patches as megatron_patches
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations


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


def test_both_sides_know_the_same_patches() -> None:
    """The tuner's names are the training side's, for either framework."""
    assert set(deepspeed_patches.Patch) == set(PATCHES["deepspeed"])
    assert set(megatron_patches.Patch) == set(PATCHES["megatron-core"])


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
    assert set(expected) <= set(PATCHES["deepspeed"])


def patched(zero: int, offload: Offload, ckpt: int = 0, grad_bytes: int | None = None, **more) -> Plan:
    made = plan(zero, offload, grad_bytes)
    (stage,) = made.stages
    execution = Execution(grad_bytes=grad_bytes, **more)
    stages = (replace(stage, ckpt=ckpt),)
    return replace(made, target="deepspeed+patches", stages=stages, execution=execution)


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (patched(3, Offload()), ()),
        (patched(3, HOST), ()),
        (patched(3, Offload(weights=1.0)), ()),
        (patched(3, Offload(optimizer=1.0)), ("gradient_fraction",)),
        (patched(3, Offload(grads=1.0)), ("gradient_fraction",)),
        (patched(3, Offload(optimizer=0.5, grads=1.0)), ("optimizer_fraction",)),
        (patched(2, Offload(optimizer=1.0, grads=1.0, weights=1.0)), ("weight_fraction",)),
        (patched(2, Offload(optimizer=1.0), grad_bytes=4), ("forget_overflow",)),
        (patched(1, Offload(optimizer=0.5)), ("optimizer_fraction",)),
        (patched(3, Offload(), ckpt=32), ("layer_activations",)),
        (patched(0, Offload(activations=0.5)), ("layer_activations",)),
        (patched(3, Offload(), decoupled_step=True), ("decoupled_steps",)),
    ],
)
def test_what_the_json_cannot_say_is_a_patch_and_nothing_else(planned, expected) -> None:
    assert violations(planned) == ()
    assert tuple(deepspeed.stages(planned)["patches"]) == expected
    assert set(expected) <= set(PATCHES["deepspeed"])
    # Where a patch recomputes, the trainer must not.
    assert not deepspeed.recomputes(planned)
    (stage,) = planned.stages
    section = deepspeed.zero_section(planned)
    assert ("offload_optimizer" in section) == (stage.offload.optimizer > 0.0)
    assert ("offload_param" in section) == (stage.zero == 3 and stage.offload.weights == 1.0)


@pytest.mark.parametrize(
    ("offload", "ckpt", "wanted"),
    [
        (Offload(), 0, set()),
        (Offload(), 1, {"LAYER_ACTIVATIONS"}),
        (Offload(activations=0.5), 0, {"LAYER_ACTIVATIONS"}),
        (Offload(optimizer=0.5), 0, {"OPTIMIZER_FRACTION", "GRADIENT_FRACTION"}),
        (Offload(optimizer=1.0, grads=1.0), 0, set()),
        (Offload(weights=0.5), 0, {"WEIGHT_FRACTION"}),
    ],
)
def test_a_patch_is_asked_for_where_something_is_for_it_to_do(
    offload: Offload, ckpt: int, wanted: set[str]
) -> None:
    usual = plan(2, offload, None)
    stage = replace(usual.stages[0], ckpt=ckpt)
    asked = deepspeed_patches.patches(replace(usual, target="deepspeed+patches", stages=(stage,)))
    assert {name.name for name in asked} == wanted
