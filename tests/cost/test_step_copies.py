"""What Megatron's optimizers copy to 32 bits while they step, against counts made by hand."""

from __future__ import annotations

import pytest

import mist_megatron
from mist_megatron.cost.predict import StagePrediction
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

MIXTURE = presets.PRESETS["moonlight-16b-a3b"]
RANKS = 8


def stepped(**execution: object) -> StagePrediction:
    """Moonlight on 8 GPUs that each have an eighth of all experts, with next to no activations."""
    plan = Plan(
        model=MIXTURE,
        training=TrainingSpec(
            global_batch=RANKS, seq_len=64, precision="fp8" if "quantization" in execution else "bf16"
        ),
        cluster=ClusterSpec(gpu=catalogue.gpu("b200-sxm-180gb"), nodes=1, gpus_per_node=RANKS),
        target="megatron",
        grad_accum=1,
        stages=(
            StagePlan(
                layers=MIXTURE.layers, nodes=1, gpus_per_node=RANKS, dp=RANKS, tp=1, micro_batch=1, zero=1
            ),
        ),
        execution=Execution(**{"expert_parallel": RANKS, **execution}),
    )
    (stage,) = mist_megatron.predict(plan).prediction.stages
    return stage


def owned() -> tuple[float, float]:
    """Parameters whose states a rank has: of experts, which have no copies, and of all else."""
    experts = MIXTURE.kinds[-1].experts
    assert experts is not None
    each = experts.expert_parameters(MIXTURE.hidden, gated=True, bias=False)
    routed = (MIXTURE.layers - 1) * experts.count * each
    return routed / RANKS, (MIXTURE.parameters - routed) / RANKS


def copies(stage: StagePrediction) -> float:
    assert stage.peak_moment == "step"
    held = sum(stage.memory_terms_bytes.values()) - stage.memory_terms_bytes["transient"]
    return stage.peak_memory_bytes - held + stage.memory_terms_bytes["activations"]


def test_narrow_moments_of_one_optimizer_at_a_time_are_widened() -> None:
    """Which Megatron-Bridge's runs of Moonlight show: 33.5 GiB whatever is recomputed."""
    experts, others = owned()
    assert experts > others
    for optimizer_bytes in (4, 6):
        found = copies(stepped(grad_bytes=2, optimizer_bytes=optimizer_bytes))
        assert found == pytest.approx(8 * experts, rel=1e-3)


def test_gradients_in_16_bits_are_copied_for_masters_in_32() -> None:
    found = copies(stepped(grad_bytes=2))
    assert found == pytest.approx(4 * sum(owned()), rel=1e-3)


def test_recipes_of_8_bits_without_remainders_copy_both() -> None:
    experts, others = owned()
    found = copies(stepped(grad_bytes=2, optimizer_bytes=8, quantization="mxfp8"))
    assert found == pytest.approx(4 * (experts + others) + 8 * experts, rel=1e-3)


@pytest.mark.parametrize("kept", [{}, {"grad_bytes": 2, "optimizer_bytes": 10}, {"grad_bytes": 4}])
def test_what_is_wide_enough_is_not_copied(kept: dict[str, int]) -> None:
    assert stepped(**kept).peak_moment != "step"
