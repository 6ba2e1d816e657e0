"""Weights, gradients and optimizer states per rank against what the frameworks really allocate."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")
pytest.importorskip("deepspeed", reason="needs the test framework environment")
from plain_values import value_of
from ranks import run_ranks

from mist_megatron.cost import symbols as s
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.cost.memory import stage_memory
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.mesh import StageRole
from mist_megatron.targets import deepspeed, megatron


@cache
def allocated(framework: str, ranks: int) -> list[dict[str, int]]:
    """What rank 0 holds after one step: of Megatron, or of DeepSpeed by ZeRO level."""
    first, *_ = run_ranks("measure_states.py", framework, ranks=ranks, ready=framework, DS_ACCELERATOR="cpu")
    return first


def terms(model, facts, ranks, zero):
    memory = stage_memory(model, LayerOptions(), facts, StageRole.ONLY)
    numbers = {
        s.LAYERS: model.layers, s.HIDDEN: model.hidden, s.FFN: model.ffn_hidden, s.HEADS: model.heads,
        s.KV_HEADS: model.kv_heads, s.HEAD_DIM: model.head_dim, s.VOCAB: model.vocab, s.TP: 1, s.CP: 1,
        s.DP: ranks, s.INSTANCES: 1, s.Z1: int(zero >= 1), s.Z2: int(zero >= 2), s.Z3: int(zero >= 3),
        **dict.fromkeys(s.OFFLOAD.values(), 0), s.CKPT: 0,
    }  # fmt: skip
    return {name: float(value_of(memory.terms[name], numbers)) for name in ("weights", "grads", "optimizer")}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_optimizer_bytes(zero, ranks):
    """Per parameter, so that the network behind the framework need not be a transformer."""
    found = allocated("deepspeed", ranks)[zero]
    model = model_from_mapping(
        {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 128}, "model"
    )
    expected = terms(model, deepspeed.MEMORY, ranks, zero)["optimizer"] / model.parameters
    assert found["optimizer"] / found["parameters"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatron_distributed_optimizer(ranks):
    """The tiny GPT itself: buffers are padded to whole alignment blocks, and nothing else differs."""
    (found,) = allocated("megatron", ranks)
    model = model_from_mapping(
        {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "ffn_hidden": 256}, "model"
    )
    assert model.parameters == found["parameters"]
    expected = terms(model, megatron.MEMORY, ranks, 1)
    padding = 64 * ranks  # elements: each rank's share of a bucket starts on a 128-byte line of bf16
    assert 0 <= found["weights"] - expected["weights"] <= 2 * padding
    assert 0 <= found["grads"] - expected["grads"] <= 4 * padding
    assert abs(found["optimizer"] - expected["optimizer"]) <= 12 * padding
