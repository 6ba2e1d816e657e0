"""What is not modelled is refused by its name: keys of Hugging Face configs, and choices of plans."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mist_megatron.errors import InputError, ProfileError
from mist_megatron.formats.huggingface import model_from_huggingface
from mist_megatron.formats.plan_yaml import plan_from_mapping
from mist_megatron.spec.layer import kind_of
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.profile import TABLE_COLUMNS, OperatorTable, Source
from mist_megatron.spec.recurrent import DeltaNet, Mamba

PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text("utf-8"))
SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128,
         "intermediate_size": 96}  # fmt: skip
LLAMA = {"model_type": "llama", **SHAPE}
FALCON, OPT = {"model_type": "falcon", **SHAPE}, {"model_type": "opt", "ffn_dim": 96, **SHAPE}
NEXT, NEMOTRON = {"model_type": "qwen3_next", **SHAPE}, PUBLISHED["nemotron-h-8b"]
DEEPSEEK = {"model_type": "deepseek_v3", **SHAPE}
BLOCKS = [{"attention": {"n_heads_in_group": size}, "ffn": {"ffn_mult": 2.0}} for size in (1, 2, 4, 4)]
PUZZLE = {"model_type": "nemotron-nas", **SHAPE, "block_configs": BLOCKS}
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
SWIN = {"model_type": "swin", "architectures": ["SwinForImageClassification"]}
YARN = {"rope_type": "llama3", "factor": 8.0}


def with_parts(attention: dict[str, Any], mlp: dict[str, Any] | None = None) -> dict[str, Any]:
    """A layer of block configs."""
    first = BLOCKS[0]
    return {"attention": {**first["attention"], **attention}, "ffn": {**first["ffn"], **(mlp or {})}}


@pytest.mark.parametrize(("config", "changed", "said"), [
    (NEMOTRON, {"conv_kernel": 3}, "conv_kernel is not 4"),
    (NEMOTRON, {"hybrid_override_pattern": "MX*"}, "wanted letters of M"),
    (NEMOTRON, {"hybrid_override_pattern": 5}, "wanted letters of M"),
    (NEMOTRON, {"layers_block_type": ["mamba", "conv"]}, "holds 'conv'"),
    (NEMOTRON, {"layers_block_type": "mamba"}, "wanted a list of kinds"),
    (NEMOTRON, {"use_conv_bias": False}, "convolution without bias"),
    (NEMOTRON, {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}, "of multi-token"),
    (PUBLISHED["gemma-3-1b"], {"sliding_window_pattern": 0}, "wanted 1 or more layers a turn"),
    (NEXT, {"full_attention_interval": 0}, "wanted 1 to the 4 layers"),
    (NEXT, {"full_attention_interval": 10**400}, "wanted 1 to the 4 layers"),
    (VIT, {"patch_size": 0}, "must divide image_size"),
    (SWIN, {"window_size": 0}, "must divide the 56/1 tokens"),
    (SWIN, {"image_size": 10**400}, "must divide the"),
    (NEXT, {"decoder_sparse_step": 2}, "decoder_sparse_step is not 1"),
    (NEXT, {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is not 4"),
    (NEXT, {"layer_types": ["full_attention", "linear_attention"] * 2}, "not in turns of one length"),
    (NEXT, {"attention_bias": True}, "biases on the attention alone"),
    (LLAMA, {"attention_bias": True}, "attention_bias and mlp_bias differ"),
    (LLAMA, {"num_hidden_layers": 2.5}, "wanted a whole number"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "wanted true or false"),
    (LLAMA, {"rope_scaling": "linear"}, "wanted a mapping"),
    (LLAMA, {"rope_scaling": {**YARN, "low_freq_factor": 2.0}}, "low_freq_factor"),
    (LLAMA, {"rms_norm_eps": "small"}, "wanted a number"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "which is all that is modelled"),
    (FALCON, {"n_head_kv": 2}, "older format"),
    (FALCON, {"new_decoder_architecture": True, "parallel_attn": False}, "new_decoder_architecture"),
    (OPT, {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
    (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq is not 1"),
    (DEEPSEEK, {"num_key_value_heads": 2}, "latent attention"),
    (PUZZLE, {"block_configs": None}, "wanted a list with an entry a layer"),
    (PUZZLE, {"block_configs": BLOCKS[:3]}, "has 3 layers and num_hidden_layers is 4"),
    (PUZZLE, {"block_configs": [*BLOCKS[:3], 4]}, r"block_configs\[3\] is 4; wanted a mapping"),
    (PUZZLE, {"block_configs": [*BLOCKS[:3], {"attention": BLOCKS[0]["attention"]}]}, "ffn is None"),
    (PUZZLE, {"block_configs": [*BLOCKS[:3], with_parts({"n_heads_in_group": 3})]}, "divide the 4 heads"),
    (PUZZLE, {"block_configs": [*BLOCKS[:3], with_parts({"no_op": True}, {"no_op": True})]}, "both no_op"),
    (PUZZLE, {"block_configs": [*BLOCKS[:3], with_parts({"replace_with_linear": True})]}, "single product"),
    (PUZZLE, {"block_configs": [*BLOCKS[:3], with_parts({"window_length": 8})]}, "window_length is 8"),
    (PUZZLE, {"block_configs": [*BLOCKS[:3], with_parts({}, {"ffn_mult": None})]}, "ffn_mult is missing"),
    (PUZZLE, {"block_configs": [*BLOCKS[:3], with_parts({}, {"ffn_mult": -1.0})]}, "has 0 columns"),
    (PUZZLE, {"hidden_size": 10**400}, "wanted 1 to"),
    (PUZZLE, {"hidden_act": "gelu"}, "wanted silu"),
    (PUZZLE, {"mlp_bias": True}, "biases of such layers"),
])  # fmt: skip
def test_configs(config: dict[str, Any], changed: dict[str, Any], said: str) -> None:
    model_from_huggingface(config, "x")
    with pytest.raises(InputError, match=said):
        model_from_huggingface({**config, **changed}, "x")


PLAN = yaml.safe_load("""
schema: 1
model: gpt3-1.3b
training: {global_batch: 32, seq_len: 2048}
cluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 4}
target: megatron
grad_accum: 8
stages: [{layers: 24, nodes: 1, gpus_per_node: 4, dp: 4, tp: 1, micro_batch: 1}]
""")


@pytest.mark.parametrize(("model", "execution", "said"), [
    ("gpt3-1.3b", {"grad_bytes": 3}, "grad_bytes is 3; wanted 2 or 4"),
    ("gpt3-1.3b", {"quantization": "mxfp8"}, "quantization is mxfp8 and precision bf16"),
    ("gpt3-1.3b", {"optimizer_bytes": 13}, "optimizer_bytes is 13"),
    ("gpt3-1.3b", {"expert_parallel": 0}, "expert_parallel is 0; wanted at least 1"),
    ("gpt3-1.3b", {"expert_parallel": 2}, "has no experts; wanted 1"),
    ("gpt3-1.3b", {"expert_overlap": True}, "has none; wanted null"),
    ("qwen3-30b-a3b", {"delayed_weight_grad": True}, "without expert_overlap"),
    ("qwen3-30b-a3b", {"expert_overlap": True, "shared_expert_overlap": True}, "exclude each other"),
])  # fmt: skip
def test_plans(model: str, execution: dict[str, Any], said: str) -> None:
    stages = [{**PLAN["stages"][0], "layers": PRESETS[model].layers}]
    document = {**PLAN, "model": model, "stages": stages}
    plan_from_mapping(document, "x")
    with pytest.raises(InputError, match=said):
        plan_from_mapping({**document, "execution": execution}, "x")


def test_a_plan_has_stages_and_as_many_chunks_as_layers() -> None:
    with pytest.raises(InputError, match="stages is empty"):
        replace(plan_from_mapping(PLAN, "x"), stages=())
    halves = [{**PLAN["stages"][0], "gpus_per_node": 2, "dp": 2, "layers": 12}] * 2
    with pytest.raises(InputError, match="no more chunks than the largest stage has layers, 12"):
        plan_from_mapping(
            {**PLAN, "stages": halves, "schedule": "interleaved", "grad_accum": 16, "vpp": 10**12}, "x"
        )
    stage = {**PLAN["stages"][0], "ckpt": 2, "recompute": "none"}
    with pytest.raises(InputError, match="ckpt is 2 but recompute is none"):
        plan_from_mapping({**PLAN, "stages": [stage]}, "x")


def test_figures_without_a_source_or_out_of_range() -> None:
    with pytest.raises(ProfileError, match="without a text"):
        Source(origin="measured", text=" ")
    with pytest.raises(ProfileError, match="wanted 0 to 10"):
        Source(origin="assumed", text="x", uncertainty=11.0)
    for operator, row, said in (("none", (1.0,), "is unknown"), ("gemm", (1.0,), "1 values; wanted")):
        with pytest.raises(ProfileError, match=said):
            OperatorTable(operator=operator, precision="bf16", source="x", rows=(row,))
    width = len(TABLE_COLUMNS["gemm"])
    with pytest.raises(ProfileError, match="wanted numbers above 0"):
        OperatorTable(operator="gemm", precision="bf16", source="x", rows=((0.0,) * width,))


MAMBA, NET = Mamba(heads=8, head_dim=64, state=128, groups=4), DeltaNet(key_heads=8, value_heads=16)


@pytest.mark.parametrize(("mixer", "tp", "cp", "said"), [
    (MAMBA, 3, 1, "must divide its 8 Mamba heads"),
    (MAMBA, 4, 4, "must divide its 8 Mamba heads"),
    (MAMBA, 4, 2, ""),
    (NET, 4, 2, ""),
    (NET, 4, 4, "must divide its 8 key heads"),
])  # fmt: skip
def test_heads_are_whole_on_every_rank(mixer: Mamba | DeltaNet, tp: int, cp: int, said: str) -> None:
    assert said in (mixer.unsplit(tp, cp) or "") and bool(said) == bool(mixer.unsplit(tp, cp))


@pytest.mark.parametrize(("changed", "said"), [
    ({"parallel_norms": 3}, "wanted 1 or 2"),
    ({"mamba": MAMBA, "delta_net": NET}, "wanted one of them"),
    ({"mamba": MAMBA, "half": "mlp"}, "half mlp has no mixer"),
    ({"name": "not a name"}, "wanted a name of letters"),
])  # fmt: skip
def test_kinds_of_layers(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        replace(kind_of(PRESETS["llama2-7b"], "own"), **changed)


def test_no_number_of_a_config_ends_in_a_traceback():
    """Each key of each published config with what nobody writes: a model or one line."""
    strange = (0, -1, 10**400, -0.5, "x", [], [0], {}, None, True)
    for name, config in PUBLISHED.items():
        for key in config:
            for value in strange:
                with suppress(InputError):
                    model_from_huggingface({**config, key: value}, name)
