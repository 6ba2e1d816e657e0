"""Saved activations of layers in plain PyTorch against those of transformers' modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the test framework environment")
import torch
from late_module import LateModule
from plain_values import value_of

from mist_megatron.cost import symbols as s
from mist_megatron.cost.blocks import blocks
from mist_megatron.cost.compile import compile_expressions
from mist_megatron.cost.kinds import size_values
from mist_megatron.cost.layer_memory import layer_memory
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.formats.huggingface import model_from_huggingface
from mist_megatron.spec.layer import LayerGroup
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.presets import PRESETS
from mist_megatron.targets.facts import Modules

hf = LateModule("layers_of_others")


def saved_bytes(layer: torch.nn.Module, hidden_states: torch.Tensor, **given: Any) -> int:
    """Bytes of distinct storages, parameters aside, that one layer keeps for its backward pass."""
    whole = [*layer.parameters(), *layer.buffers()]
    own = {tensor.untyped_storage().data_ptr() for tensor in whole}
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
    config = hf.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    hidden_states, positions = inputs(hidden, seq, batch), torch.arange(seq)[None]
    tables = tuple(t.bfloat16() for t in hf.LlamaRotaryEmbedding(config)(hidden_states, positions))
    layer = hf.LlamaDecoderLayer(config, 0).bfloat16()
    found = saved_bytes(layer, hidden_states, position_embeddings=tables, position_ids=positions)
    # The tables are the model's, one pair for all layers.
    return found - sum(t.untyped_storage().nbytes() for t in tables)


def saved_by_gpt2(hidden: int, ffn: int, heads: int, seq: int, batch: int) -> int:
    config = hf.GPT2Config(
        n_embd=hidden, n_inner=ffn, n_head=heads, n_positions=seq, attn_implementation="sdpa",
        resid_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return saved_bytes(hf.GPT2Block(config, 0).bfloat16(), inputs(hidden, seq, batch))


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
    return float(value_of(layer_memory(model, options, modules).saved, values))


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


SEQ, BATCH = 128, 2
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 2}
OF_BERT = {**SIZES, "vocab_size": 100, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OF_LLAMA = {**SIZES, "vocab_size": 100, "num_key_value_heads": 2}
OF_T5 = {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_heads": 4, "vocab_size": 100, "dropout_rate": 0.0}
OF_GEMMA = {**OF_LLAMA, "head_dim": 64, "num_hidden_layers": 6, "sliding_window": 64}
OF_VIT = {**SIZES, "image_size": 64, "patch_size": 8}


def kept_by(model: ModelSpec, kind: str, *, fused: bool, dropped: bool = False, batch: int = BATCH) -> float:
    """What is predicted of a layer of that kind, for so many samples."""
    options = LayerOptions(flash_attention=fused, norm_statistics_bytes=4, dropout=dropped)
    sizes = {"b": batch, "tp": 1, "cp": 1, "sp": 0, "sel": 0, "v": model.vocab, **size_values(model, SEQ)}
    (block,) = [block for block in blocks(model, options) if block.kind.name == kind]
    memory = layer_memory(block.kind, options, "plain_torch", passes_back=block.passes_back)
    return compile_expressions({"saved": block.own(memory.saved)}).run(sizes)["saved"].item()


def read(kind: str, config: dict[str, Any], *, frozen: bool = False) -> ModelSpec:
    """The model of a config; with `frozen`, all its layers but the first."""
    model = model_from_huggingface({"model_type": kind, **config}, "config.json")
    if not frozen:
        return model
    live, still = (replace(model.kinds[0], name=name, frozen=name == "still") for name in ("live", "still"))
    groups = LayerGroup(layers=1, pattern=(live,)), LayerGroup(layers=model.layers - 1, pattern=(still,))
    return replace(model, groups=groups)


def implemented(config: Any, *, fused: bool) -> Any:
    config._attn_implementation = "sdpa" if fused else "eager"
    return config


def rotated(rotary: Any, hidden: int, *layer_type: str) -> tuple[torch.Tensor, dict[str, Any], int]:
    """Input, positions and the bytes of these, which a model has once."""
    given, places = inputs(hidden, SEQ, BATCH), torch.arange(SEQ)[None]
    tables = tuple(table.bfloat16() for table in rotary(given, places, *layer_type))
    more = {"position_embeddings": tables, "position_ids": places}
    return given, more, sum(table.untyped_storage().nbytes() for table in tables)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_bert_layer(fused: bool, frozen: bool) -> None:
    layer = (
        hf.BertLayer(implemented(hf.BertConfig(**OF_BERT), fused=fused)).bfloat16().requires_grad_(not frozen)
    )
    measured = saved_bytes(layer, inputs(256, SEQ, BATCH))
    model = read("bert", OF_BERT, frozen=frozen)
    assert kept_by(model, "still" if frozen else "block", fused=fused) == measured


def test_frozen_llama_layer() -> None:
    config = hf.LlamaConfig(**OF_LLAMA, attn_implementation="sdpa")
    given, more, tables = rotated(hf.LlamaRotaryEmbedding(config), 256)
    layer = hf.LlamaDecoderLayer(config, 0).bfloat16().requires_grad_(False)
    measured = saved_bytes(layer, given, **more) - tables
    assert kept_by(read("llama", OF_LLAMA, frozen=True), "still", fused=True) == measured


@pytest.mark.parametrize("fused", [False, True])
def test_vit_layer(fused: bool) -> None:
    model = read("vit", OF_VIT)
    layer = hf.ViTLayer(implemented(hf.ViTConfig(**OF_VIT), fused=fused)).bfloat16()
    measured = saved_bytes(layer, inputs(256, model.tokens or 0, BATCH))
    assert kept_by(model, "block", fused=fused) == measured


@pytest.mark.parametrize("fused", [False, True])
def test_clip_layer(fused: bool) -> None:
    """A ViT's, but for the activation."""
    model = read("vit", {**OF_VIT, "hidden_act": "quick_gelu"})
    config = implemented(hf.CLIPVisionConfig(**SIZES, hidden_act="quick_gelu"), fused=fused)
    measured = saved_bytes(
        hf.CLIPEncoderLayer(config).bfloat16(), inputs(256, model.tokens or 0, BATCH), attention_mask=None
    )
    assert kept_by(model, "block", fused=fused) == measured


def test_unfused_llama_layer() -> None:
    config = implemented(hf.LlamaConfig(**{**OF_LLAMA, "num_key_value_heads": 4}), fused=False)
    given, more, tables = rotated(hf.LlamaRotaryEmbedding(config), 256)
    measured = saved_bytes(hf.LlamaDecoderLayer(config, 0).bfloat16(), given, **more) - tables
    model = read("llama", {**OF_LLAMA, "num_key_value_heads": 4})
    assert kept_by(model, "block", fused=False) == measured


@pytest.mark.parametrize("shift", [0, 3])
def test_swin_layer(shift: int) -> None:
    """Its windows are copies, of what the norm gave, which is not kept besides. Unfused: its fused core takes
    a mask, with which a CPU has none."""
    sides = {"image_size": 112, "patch_size": 4, "window_size": 7, "embed_dim": 64}
    shape = {**sides, "depths": [2, 2], "num_heads": [2, 4], "drop_path_rate": 0.0}
    model, config = read("swin", shape), implemented(hf.SwinConfig(**shape), fused=False)
    layer = hf.SwinLayer(config, dim=64, input_resolution=(28, 28), num_heads=2, shift_size=shift).bfloat16()
    measured = saved_bytes(layer, inputs(64, 28 * 28, BATCH), input_dimensions=(28, 28))
    assert kept_by(model, "stage1", fused=False) == measured
    merge = saved_bytes(
        hf.SwinPatchMerging(64).bfloat16(), inputs(64, 28 * 28, BATCH), input_dimensions=(28, 28)
    )
    assert kept_by(model, "merge2", fused=False) == merge


OF_QWEN = {"depth": 8, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 256}


# All patches of an image attend to each other for half a minute where nothing is fused.
@pytest.mark.parametrize(
    ("fused", "kind"), [(False, "vision_window"), (True, "vision_window"), (True, "vision_full")]
)
def test_qwen_vision_layer(fused: bool, kind: str) -> None:
    """Values keep all that the QKV projection gave. Statistics and weights in fp32 aside."""
    model = read("qwen2_5_vl", {**OF_LLAMA, "vision_config": OF_QWEN})
    (tokens,) = {one.tokens for group in model.groups for one in group.pattern if one.name == kind}
    assert tokens is not None
    config = hf.Qwen2_5_VLVisionConfig(**OF_QWEN, attn_implementation="sdpa" if fused else "eager")
    bounds = torch.arange(0, tokens + 1, 64 if kind == "vision_window" else tokens, dtype=torch.int32)
    tables = torch.randn(tokens, 64), torch.randn(tokens, 64)
    given = torch.randn(tokens, 256, dtype=torch.bfloat16, requires_grad=True)
    block = hf.Qwen2_5_VLVisionBlock(config, config._attn_implementation).bfloat16()
    measured = saved_bytes(block, given, cu_seqlens=bounds, position_embeddings=tables)
    measured -= sum(table.untyped_storage().nbytes() for table in tables)
    assert kept_by(model, kind, fused=fused, batch=1) == pytest.approx(measured, rel=0.002)
    merger = saved_bytes(hf.Qwen2_5_VLPatchMerger(256, 256).bfloat16(), given)
    assert kept_by(model, "merger", fused=fused, batch=1) == pytest.approx(merger, rel=0.002)


def test_gemma3_layer() -> None:
    """Statistics and weights in fp32 aside."""
    config = implemented(hf.Gemma3TextConfig(**OF_GEMMA), fused=True)
    given, more, tables = rotated(hf.Gemma3RotaryEmbedding(config), 256, "full_attention")
    measured = saved_bytes(hf.Gemma3DecoderLayer(config, 5).bfloat16(), given, **more) - tables
    assert kept_by(read("gemma3_text", OF_GEMMA), "full", fused=True) == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize("cap", [50.0, None])
def test_gemma2_layer(cap: float | None) -> None:
    """Statistics and weights in fp32 aside; without a cap the core is fused."""
    said = {**OF_GEMMA, "attn_logit_softcapping": cap}
    config = implemented(hf.Gemma2Config(**said), fused=cap is None)
    given, more, tables = rotated(hf.Gemma2RotaryEmbedding(config), 256)
    measured = saved_bytes(hf.Gemma2DecoderLayer(config, 5).bfloat16(), given, **more) - tables
    model = read("gemma2", {**OF_GEMMA, "attn_logit_softcapping": cap})
    assert kept_by(model, "full", fused=cap is None) == pytest.approx(measured, rel=0.002)


def test_t5_layers() -> None:
    """The encoder's output, which all layers of the decoder read, is not a layer's."""
    bias = torch.zeros(1, 4, SEQ, SEQ, dtype=torch.bfloat16)
    model = read("t5", OF_T5)
    config = implemented(hf.T5Config(**OF_T5), fused=False)
    measured = saved_bytes(hf.T5Block(config).bfloat16(), inputs(256, SEQ, BATCH), position_bias=bias)
    assert kept_by(model, "encoder", fused=False) == measured
    config.is_decoder = True
    encoded = inputs(256, SEQ, BATCH)
    measured = saved_bytes(
        hf.T5Block(config, layer_idx=0).bfloat16(),
        inputs(256, SEQ, BATCH),
        position_bias=bias,
        encoder_hidden_states=encoded,
        encoder_decoder_position_bias=bias,
        use_cache=False,
    )
    assert kept_by(model, "decoder", fused=False) == measured - encoded.untyped_storage().nbytes()


def as_on_a_gpu(given: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout with a mask of one byte; that of a CPU is as wide as its input."""
    return torch.native_dropout(given, p, training)[0]


def test_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 drops what its MLPs' activation gives, too; BERT does not."""
    monkeypatch.setattr(torch.nn.functional, "dropout", as_on_a_gpu)
    bert = {**OF_BERT, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    layer = hf.BertLayer(implemented(hf.BertConfig(**bert), fused=False)).bfloat16()
    measured = saved_bytes(layer, inputs(256, SEQ, BATCH))
    assert kept_by(read("bert", bert), "block", fused=False, dropped=True) == measured
    t5 = {**OF_T5, "dropout_rate": 0.1}
    bias = torch.zeros(1, 4, SEQ, SEQ, dtype=torch.bfloat16)
    block = hf.T5Block(implemented(hf.T5Config(**t5), fused=False)).bfloat16()
    measured = saved_bytes(block, inputs(256, SEQ, BATCH), position_bias=bias)
    assert kept_by(read("t5", t5), "encoder", fused=False, dropped=True) == measured
