"""Emitted folders of mixtures train on CPU and gloo, spread over ranks as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")

from short_form import some_of
from test_emitted_megatron_training import MODEL, plan, stage, train

from mist_megatron.spec.experts import ExpertSpec, LatentAttention
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan

# Of Transformer Engine: local experts compute one after the other, and tokens are sorted by plain kernels.
KERNELS = ("--moe-grouped-gemm", "--moe-permute-fusion")
MIXTURE = ExpertSpec(count=4, top_k=2, ffn_hidden=24, balance="seq_aux_loss", balance_loss=0.05)
MIXTRAL = replace(MODEL, name="tiny-mixtral", kv_heads=2, experts=MIXTURE)
SIGMOID = replace(
    MIXTURE, router="sigmoid", balance_bias=True, groups=2, group_top_k=1, scaling=1.5, shared_ffn_hidden=32
)
QWEN = replace(MODEL, name="tiny-qwen", kv_heads=2, qk_norm=True, experts=replace(SIGMOID, shared_gate=True))
DEEPSEEK = replace(
    MODEL,
    name="tiny-deepseek",
    experts=replace(SIGMOID, first_dense=1),
    mtp_layers=1,
    latent_attention=LatentAttention(q_lora=16, kv_lora=8, nope_head_dim=4, rope_head_dim=4, v_head_dim=8),
    constants=replace(MODEL.constants, rotary_scaling="yarn", rotary_factor=4.0, rotary_mscale=0.7),
)


def mixture(model: ModelSpec, *stages, sequence_parallel: bool = False, **execution: object) -> Plan:
    made = plan(*stages, sequence_parallel=sequence_parallel)
    return replace(made, model=model, target="megatron", execution=Execution(**execution))


CASES = {
    "ep 2": mixture(MIXTRAL, stage(4, dp=2), expert_parallel=2),
    "ep 2 folded over tp 2": mixture(
        QWEN, stage(4, tp=2, zero=0), sequence_parallel=True, expert_parallel=2, expert_tensor_parallel=1
    ),
    "pp 2 with a depth of prediction": mixture(DEEPSEEK, stage(3), stage(1)),
}
CASES = some_of(2, CASES)


@pytest.mark.parametrize("name", CASES)
def test_spread_experts_train_as_one_process_does(name: str, tmp_path: Path) -> None:
    spread = CASES[name]
    losses = []
    for place, planned in (("plain", mixture(spread.model, stage(4, zero=0))), ("spread", spread)):
        (tmp_path / place).mkdir()
        losses.append(train(tmp_path / place, planned, without=KERNELS))
    plain, found = losses
    assert plain[-1] < plain[0] - 0.3, f"the tiny model does not learn: {plain}"
    assert found == pytest.approx(plain, abs=1e-5)
