"""Shares of saved activations that Megatron's fine-grained offload takes, worked out by hand."""

from __future__ import annotations

import pytest

from mist_megatron.calibrate.table_models import offloaded_share
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.model import ModelSpec

MODEL = ModelSpec(
    name="m", family="llama", layers=2, hidden=8, ffn_hidden=16, heads=2, kv_heads=1, head_dim=4, vocab=128,
    gated_mlp=True, activation="silu", norm="rmsnorm", experts=ExpertSpec(count=4, top_k=2, ffn_hidden=6),
)  # fmt: skip
# Norm and QKV inputs 8 + 8, QKV 16, output 8; norms 8 + 8, two experts' inputs 16, hidden 24, activated 12.
KEPT = 8 + 8 + 16 + 8 + 8 + 8 + 16 + 24 + 12


@pytest.mark.parametrize(
    ("modules", "gone"),
    [(("expert_fc1",), 16), (("expert_fc1", "moe_act"), 40), (("fused_group_mlp",), 40),
     (("core_attn", "attn_proj"), 24)],
)  # fmt: skip
def test_a_layer_of_experts(modules: tuple[str, ...], gone: int) -> None:
    assert offloaded_share(MODEL, modules) == pytest.approx(gone / KEPT)
