"""Low-rank adapters against PEFT's: elements, and what a layer keeps for its backward pass."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the test framework environment")
import test_plain_modules as plain

from mist_megatron.frameworks.deepspeed.write import adapter_text
from mist_megatron.spec.adapter import PLACES, adapter_of
from mist_megatron.spec.model import with_adapter


@pytest.fixture(scope="module")
def peft() -> Any:
    """Imported by the worker that runs these tests alone: it loads all of transformers."""
    return pytest.importorskip("peft", reason="needs the test framework environment")


@pytest.mark.parametrize("words", ["8", "16:q,v", "4:gate,down", "8:up"])
def test_llama_layer_with_adapters(words: str, peft: Any) -> None:
    adapter = adapter_of(words)
    config = plain.hf.LlamaConfig(**plain.OF_LLAMA, attn_implementation="sdpa")
    given, more, tables = plain.rotated(plain.hf.LlamaRotaryEmbedding(config), 256)
    names = [f"{place}_proj" for place in adapter.on]
    wanted = peft.LoraConfig(r=adapter.rank, target_modules=names)
    layer = peft.inject_adapter_in_model(wanted, plain.hf.LlamaDecoderLayer(config, 0)).bfloat16()
    model = with_adapter(plain.read("llama", plain.OF_LLAMA), adapter)
    trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    assert trained == model.trained_parameters / model.layers
    measured = plain.saved_bytes(layer, given, **more) - tables
    assert plain.kept_by(model, "block", fused=True) == measured
    assert set(adapter.on) <= set(PLACES)


def test_the_emitted_words_are_what_peft_takes(peft: Any) -> None:
    model = with_adapter(plain.read("llama", plain.OF_LLAMA), adapter_of("16:q,gate"))
    said: dict[str, dict[str, object]] = {}
    exec(adapter_text(model), said)
    config = peft.LoraConfig(**said["lora_config"])
    assert config.r == 16 and set(config.target_modules or ()) == {"q_proj", "gate_proj"}
