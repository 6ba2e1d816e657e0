"""Bytes and traffic of Megatron-FSDP, against counts made by hand and against its neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mist_megatron
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations
from tests.cost.test_explained_plans import check_plan

LLAMA = presets.PRESETS["llama3-8b"]
MIXTURE = presets.PRESETS["qwen3-30b-a3b"]
BESIDE = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def plan(model=LLAMA, zero: int = 3, nodes: int = 2, grad_accum: int = 4, **execution: object) -> Plan:
    spread = {"expert_parallel": 8} if model.routed else {}
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=8 * nodes * grad_accum, seq_len=4096),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=nodes, gpus_per_node=8),
        target="megatron",
        grad_accum=grad_accum,
        stages=(
            StagePlan(
                layers=model.layers,
                nodes=nodes,
                gpus_per_node=8,
                dp=8 * nodes,
                tp=1,
                micro_batch=1,
                zero=zero,
            ),
        ),
        execution=Execution(**{"megatron_fsdp": True, **BESIDE, **spread, **execution}),
    )


def held(made: Plan) -> dict[str, float]:
    (stage,) = mist_megatron.predict(made).prediction.stages
    return dict(stage.memory_terms_bytes)


def test_bytes_of_each_strategy_by_hand() -> None:
    """Llama-3 8B on 16 ranks: whole weights up to optim_grads, one sixteenth of all states with
    optim_grads_params, whose units are the layers: two of their weights and all of embedding and head on the
    device, and of gradients in 32 bits two layers and the widest of all."""
    elements = LLAMA.parameters
    table = LLAMA.vocab * LLAMA.hidden
    layer = LLAMA.kinds[0].block_parameters
    found = {zero: held(plan(zero=zero)) for zero in (1, 2, 3)}
    for zero, terms in found.items():
        assert terms["optimizer"] == pytest.approx(12 * elements / 16, rel=1e-6)
        assert terms["weights"] == pytest.approx(2 * elements / (16 if zero == 3 else 1), rel=1e-6)
        assert terms["grads"] == pytest.approx(4 * elements / (16 if zero > 1 else 1), rel=1e-6)
    unused = found[1]["buffers"]  # of Transformer Engine's weight gradients, as without sharding
    gradients = 4 * (2 * layer + table)
    assert found[2]["buffers"] - unused == pytest.approx(gradients, rel=1e-3)
    assert found[3]["buffers"] - unused == pytest.approx(gradients + 2 * (2 * layer + 2 * table), rel=1e-3)


def test_experts_are_shared_out_over_the_ranks_that_have_them() -> None:
    """Qwen3 30B on 16 ranks, experts over 8: each has two copies, all else sixteen."""
    experts = MIXTURE.kinds[0].experts
    assert experts is not None
    each = experts.expert_parameters(MIXTURE.hidden, gated=True, bias=False)
    routed = MIXTURE.layers * experts.count * each
    rest = MIXTURE.parameters - routed
    terms = held(plan(MIXTURE))
    for name, width in (("weights", 2), ("grads", 4), ("optimizer", 12)):
        assert terms[name] == pytest.approx(width * (rest / 16 + routed / 8 / 2), rel=1e-6), name


@pytest.mark.parametrize("model", [LLAMA, MIXTURE])
def test_more_is_shared_out_the_less_is_held_and_the_more_travels(model) -> None:
    """Levels 2 and 3 reduce, and 3 gathers, in every micro-batch; level 1 takes what the distributed
    optimizer takes."""
    told = {zero: mist_megatron.predict(plan(model, zero=zero)).prediction for zero in (1, 2, 3)}
    peaks = [told[zero].stages[0].peak_memory_bytes for zero in (1, 2, 3)]
    seconds = [told[zero].iteration_s for zero in (1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3
    assert seconds == sorted(seconds)
    plain = mist_megatron.predict(plan(model, zero=1, megatron_fsdp=None)).prediction
    assert plain.iteration_s == seconds[0]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("model", [LLAMA, MIXTURE])
def test_what_explain_prints_is_what_predict_says(model, zero: int) -> None:
    check_plan(plan(model, zero=zero, grad_bytes=2 + 2 * (zero % 2)))


def test_narrow_gradients_are_cast_for_the_step() -> None:
    made = plan(zero=3, grad_bytes=2)
    (stage,) = mist_megatron.predict(made).prediction.stages
    wide = held(plan(zero=3))
    assert held(made)["grads"] == pytest.approx(wide["grads"] / 2, rel=1e-9)
    assert (
        stage.peak_memory_bytes < mist_megatron.predict(plan(zero=3)).prediction.stages[0].peak_memory_bytes
    )


@pytest.mark.parametrize(
    ("execution", "words"),
    [
        ({"tp_comm_overlap": True}, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"cuda_graphs": ("attn",)}, "graphs are not priced"),
        ({"optimizer_bytes": 6}, "whole masters"),
        ({"overlap_grad_reduce": False}, "overlap_grad_reduce"),
    ],
)
def test_what_it_excludes_is_said(execution, words: str) -> None:
    assert any(words in rule for rule in violations(plan(zero=3, **execution)))


def test_levels_stages_and_targets_it_has() -> None:
    assert not violations(plan(zero=3))
    assert any("it runs 1, 2, 3" in rule for rule in violations(plan(zero=0)))
    assert any("it runs 0, 1" in rule for rule in violations(plan(zero=3, megatron_fsdp=None)))
    patched = replace(plan(zero=3), target="megatron+patches")
    assert any("megatron_fsdp: it has no such switch" in rule for rule in violations(patched))
    whole = plan(zero=3)
    half = replace(whole.stages[0], layers=8, nodes=1, dp=8)
    chunks = replace(
        whole, stages=(replace(half, layers=16),) * 2, vpp=2, schedule="interleaved", grad_accum=8
    )
    broken = violations(chunks)
    assert any("schedule interleaved" in rule for rule in broken)
    assert any("2 stages" in rule for rule in broken)
    away = replace(whole, stages=(replace(whole.stages[0], offload=Offload(optimizer=1.0)),))
    assert any("keeps optimizer on the GPU" in rule for rule in violations(away))
