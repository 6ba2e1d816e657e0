"""Saved activations of the DeepSpeed targets' layers against those of transformers' LLaMA and GPT-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the test framework environment")
import torch
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from mist_megatron.cost import symbols as s
from mist_megatron.cost.layer_memory import layer_memory
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.spec.presets import PRESETS
from mist_megatron.targets.facts import Modules


def saved_bytes(layer: torch.nn.Module, hidden_states: torch.Tensor, **given: Any) -> int:
    """Bytes of distinct storages, parameters aside, that one layer keeps for its backward pass."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(hidden_states, **given)
    assert out is not None
    return sum(found.values())


def inputs(hidden: int, seq: int, batch: int) -> torch.Tensor:
    return torch.randn(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)


def saved_by_llama(hidden: int, ffn: int, heads: int, seq: int, batch: int) -> int:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    hidden_states, positions = inputs(hidden, seq, batch), torch.arange(seq)[None]
    tables = tuple(t.bfloat16() for t in LlamaRotaryEmbedding(config)(hidden_states, positions))
    layer = LlamaDecoderLayer(config, 0).bfloat16()
    found = saved_bytes(layer, hidden_states, position_embeddings=tables, position_ids=positions)
    # The tables are the model's, one pair for all layers.
    return found - sum(t.untyped_storage().nbytes() for t in tables)


def saved_by_gpt2(hidden: int, ffn: int, heads: int, seq: int, batch: int) -> int:
    config = GPT2Config(
        n_embd=hidden, n_inner=ffn, n_head=heads, n_positions=seq, attn_implementation="sdpa",
        resid_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return saved_bytes(GPT2Block(config, 0).bfloat16(), inputs(hidden, seq, batch))


SHAPES = pytest.mark.parametrize(
    ("hidden", "ffn", "heads", "seq", "batch"), [(256, 768, 4, 128, 2), (384, 1024, 6, 256, 1)]
)


def predicted(preset: str, sizes: tuple[int, ...], modules: Modules, options: LayerOptions) -> float:
    hidden, ffn, heads, seq, batch = sizes
    shape = {"hidden": hidden, "ffn_hidden": ffn, "heads": heads, "kv_heads": heads, "layers": 2}
    model = replace(PRESETS[preset], **shape)
    values = {
        s.B: batch, s.S: seq, s.TP: 1, s.CP: 1, s.SP: 0,
        s.RECOMPUTE["selective"]: 0, s.HIDDEN: hidden, s.FFN: ffn,
        s.HEADS: heads, s.KV_HEADS: heads, s.HEAD_DIM: hidden // heads,
    }  # fmt: skip
    return float(layer_memory(model, options, modules).saved.subs(values))


@SHAPES
def test_llama_layer(hidden: int, ffn: int, heads: int, seq: int, batch: int) -> None:
    sizes = (hidden, ffn, heads, seq, batch)
    measured = saved_by_llama(*sizes)
    # A CPU's attention keeps its statistics, the fused core's too, in fp32 per head and row; norms theirs.
    assert predicted("llama-7b", sizes, "plain_torch", LayerOptions()) == pytest.approx(measured, rel=0.005)
    assert predicted("llama-7b", sizes, "transformer_engine", LayerOptions()) < 0.75 * measured


@SHAPES
def test_gpt2_layer(hidden: int, ffn: int, heads: int, seq: int, batch: int) -> None:
    sizes = (hidden, ffn, heads, seq, batch)
    measured = saved_by_gpt2(*sizes)
    # A CPU's LayerNorm keeps its statistics in the precision of its input.
    options = LayerOptions(norm_statistics_bytes=4)
    assert predicted("gpt2-xl", sizes, "plain_torch", options) == pytest.approx(measured, rel=0.005)
    assert predicted("gpt2-xl", sizes, "transformer_engine", options) < 0.75 * measured
