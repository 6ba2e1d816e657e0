"""Presets against published parameter counts, and models read from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mist_megatron.errors import InputError
from mist_megatron.formats.files import load_model
from mist_megatron.formats.huggingface import model_from_huggingface
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.expert_presets import PUBLISHED
from mist_megatron.spec.hybrid_presets import HYBRID_PUBLISHED
from mist_megatron.spec.presets import PRESETS, PUBLISHED_PARAMETERS

MIST = {"1.3b": (2048, 24, 16), "2.7b": (2560, 32, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40),
        "22b": (6144, 48, 64), "40b": (8192, 48, 64)}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_published_parameter_counts(name):
    published, source = PUBLISHED_PARAMETERS[name]
    assert source
    assert PRESETS[name].parameters == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts_of_experts(name):
    """Totals are published to a million, what a token meets to ten million."""
    total, active, source = PUBLISHED[name]
    assert source
    assert abs(PRESETS[name].parameters - total) < 0.6e6
    assert abs(PRESETS[name].active_parameters - active) < 6e6


@pytest.mark.parametrize("name", HYBRID_PUBLISHED)
def test_published_counts_of_hybrids(name):
    """In the digits that were published."""
    total, active, source = HYBRID_PUBLISHED[name]
    assert source
    assert PRESETS[name].parameters == pytest.approx(total, rel=5e-3)
    assert PRESETS[name].active_parameters == pytest.approx(active, rel=1e-2)


CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())
"""Hugging Face configs with the shapes that were published, and the keys that say them."""


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_hugging_face_are_read_as_published(name):
    """Each as its preset, whose counts are held against the published ones above, or by its own."""
    read = model_from_huggingface(CONFIGS[name], "config.json")
    published = {"phi-3-mini": 3_821_079_552, "phi-4-mini": 3_836_021_760}.get(name)
    assert read.parameters == (published or PRESETS[name].parameters)
    assert read.active_parameters == (published or PRESETS[name].active_parameters)
    assert read.mtp_layers == (0 if published else PRESETS[name].mtp_layers)


def test_weights_stored_in_fewer_bits_are_read_where_checkpoints_are_published_so():
    stored = CONFIGS["deepseek-v3"]["quantization_config"]
    for name, method in (("deepseek-v3", "bitsandbytes"), ("mixtral-8x7b", "fp8"), ("gpt-oss-20b", "fp8")):
        changed = {**CONFIGS[name], "quantization_config": {**stored, "quant_method": method}}
        with pytest.raises(InputError, match="quantized weights are not modelled"):
            model_from_huggingface(changed, "config.json")


@pytest.mark.parametrize(
    ("name", "depths"), [("deepseek-v3", 11.61e9), ("glm-4.5", 3.99e9), ("glm-4.5-air", 2.38e9)]
)
def test_published_counts_of_multi_token_prediction(name, depths):
    assert abs(PRESETS[name].mtp_parameters - depths) < 6e6


EXPERTS = {"count": 8, "top_k": 2, "ffn_hidden": 32}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experts": {**EXPERTS, "top_k": 9}}, "top_k is 9; wanted at most count"),
        ({"experts": {**EXPERTS, "shared_gate": True}}, "shared_gate is true without shared experts"),
        ({"experts": {**EXPERTS, "first_dense": 9}}, "leave none of the"),
        ({"experts": {**EXPERTS, "every": 0}}, "every"),
        ({"experts": EXPERTS, "parallel_block": True}, "parallel block"),
        ({"latent_attention": {"kv_lora": 16}}, "nope_head_dim"),
        ({"mtp_layers": -1}, "mtp_layers"),
    ],
)
def test_parts_that_contradict_are_refused(change, words):
    with pytest.raises(InputError, match=words) as caught:
        model_from_mapping({**SMALL, **change}, "model.yaml")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("family", ["gpt3", "llama", "falcon"])
@pytest.mark.parametrize("size", MIST)
def test_mist_shapes(family, size):
    name = f"{family}-{size}" + ("-mist" if family == "falcon" and size in ("7b", "40b") else "")
    spec = PRESETS[name]
    assert (spec.hidden, spec.layers, spec.heads) == MIST[size]
    assert spec.vocab == 50304
    assert not spec.linear_bias
    assert not spec.tied_embeddings


HUGGING_FACE = {
    "llama3-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "llama2-7b": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11008, "vocab_size": 32000,
    },
    "mistral-7b": {
        "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "falcon-7b": {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False, "vocab_size": 65024,
    },
    "falcon-40b": {
        "model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
        "num_kv_heads": 8, "new_decoder_architecture": True, "vocab_size": 65024,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257},
    "gpt-neox-20b": {
        "model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24576, "vocab_size": 50432,
    },
    "opt-6.7b": {
        "model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "ffn_dim": 16384, "vocab_size": 50272, "max_position_embeddings": 2048,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_configs_give_the_published_count(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HUGGING_FACE[name]))
    assert load_model(str(path)).parameters == PUBLISHED_PARAMETERS[name][0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "llama", "num_local_experts": 8}, "experts"),
        ({**HUGGING_FACE["llama2-7b"], "num_attention_heads": 3}, "divide"),
        ({"model_type": "llama", "hidden_size": "4096", "num_attention_heads": 32}, "whole number"),
        ({"model_type": "llama"}, "missing"),
        ({"model_type": "gpt2", "activation_function": "tanh"}, "wanted one of"),
    ],
)
def test_refused_configs(config, words):
    with pytest.raises(InputError, match=words):
        model_from_huggingface(config, "config.json")


SMALL = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 100}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 5}, "divide hidden"),
        ({"hidden": -64}, "hidden|divide"),
        ({"layers": 0}, "layers is 0"),
        ({"kv_heads": 3}, "must divide heads"),
        ({"famliy": "gpt"}, "unknown key famliy"),
        ({"vocab": "100"}, "wanted a whole number"),
        ({"layers": True}, "layers"),
        ({"rotary": True, "learned_positions": 8}, "one kind of positions"),
    ],
)
def test_wrong_model_mappings(change, words):
    with pytest.raises(InputError, match=words):
        model_from_mapping({**SMALL, **change}, "model.yaml")


def test_defaults_follow_the_family():
    llama = model_from_mapping({**SMALL, "family": "llama"}, "model")
    assert llama.gated_mlp and llama.norm == "rmsnorm" and llama.rotary and not llama.linear_bias
    gpt = model_from_mapping(SMALL, "model")
    assert gpt.linear_bias and gpt.norm == "layernorm" and gpt.ffn_hidden == 256


def test_a_typing_error_is_answered_with_the_nearest_name():
    with pytest.raises(InputError, match="did you mean llama2-70b"):
        load_model("lama2-70b")
