"""Saved activations of the DeepSpeed targets' gated layers against transformers' LLaMA layer, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="needs the test framework environment")
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from mist_megatron.cost import symbols as s
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.cost.memory import layer_memory
from mist_megatron.spec.presets import PRESETS


def saved_by_transformers(hidden: int, ffn: int, heads: int, seq: int, batch: int) -> int:
    """Bytes of distinct storages, parameters aside, that one layer keeps for its backward pass."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    layer = LlamaDecoderLayer(config, 0).bfloat16()
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden_states = torch.randn(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(seq)[None]
    tables = tuple(t.bfloat16() for t in LlamaRotaryEmbedding(config)(hidden_states, positions))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(hidden_states, position_embeddings=tables, position_ids=positions)
    assert out is not None
    # The tables are the model's, one pair for all layers.
    return sum(found.values()) - sum(t.untyped_storage().nbytes() for t in tables)


@pytest.mark.parametrize(
    ("hidden", "ffn", "heads", "seq", "batch"), [(256, 768, 4, 128, 2), (384, 1024, 6, 256, 1)]
)
def test_llama_layer(hidden: int, ffn: int, heads: int, seq: int, batch: int) -> None:
    sizes = {"hidden": hidden, "ffn_hidden": ffn, "heads": heads, "kv_heads": heads, "layers": 2}
    model = replace(PRESETS["llama-7b"], **sizes)
    values = {
        s.B: batch, s.S: seq, s.TP: 1, s.CP: 1, s.SP: 0, s.SELECTIVE: 0, s.HIDDEN: hidden, s.FFN: ffn,
        s.HEADS: heads, s.KV_HEADS: heads, s.HEAD_DIM: hidden // heads,
    }  # fmt: skip
    measured = saved_by_transformers(hidden, ffn, heads, seq, batch)
    fused = float(layer_memory(model, LayerOptions(), "megatron").saved.subs(values))
    plain = float(layer_memory(model, LayerOptions(), "deepspeed").saved.subs(values))
    # A CPU's attention keeps its statistics, the fused core's too, in fp32 per head and row; norms theirs.
    assert plain == pytest.approx(measured, rel=0.005)
    assert fused < 0.75 * measured
