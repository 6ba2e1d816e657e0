"""Models known by name: the shapes of the Mist paper and public models with their published shapes.

`falcon-7b` and `falcon-40b` are the public models; the Mist paper's shapes of these two sizes, which are
something else, are `falcon-7b-mist` and `falcon-40b-mist`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mist_megatron.spec import check
from mist_megatron.spec.constants import ModelConstants
from mist_megatron.spec.expert_presets import expert_presets
from mist_megatron.spec.group_presets import group_presets
from mist_megatron.spec.hybrid_presets import hybrid_presets
from mist_megatron.spec.model import Family, ModelSpec

USUAL = ModelConstants()
_DROPPED = ModelConstants(hidden_dropout=0.1, attention_dropout=0.1)
_LLAMA3 = ModelConstants(rotary_base=500_000)
_LLAMA31 = replace(_LLAMA3, rotary_scaling="llama3", rotary_factor=8.0)
_LLAMA32 = replace(_LLAMA31, rotary_factor=32.0)
_MILLION = ModelConstants(rotary_base=1_000_000)
_QWEN = replace(_MILLION, norm_epsilon=1e-6)
_DEEPSEEK = ModelConstants(norm_epsilon=1e-6, rotary_scaling="yarn", rotary_factor=40.0)
_HALF_ROTATED = replace(_MILLION, rotary_share=0.5)
_GPT_OSS = ModelConstants(rotary_base=150_000, rotary_scaling="yarn", rotary_factor=32.0)

_BY_BEGINNING: Mapping[str, ModelConstants] = MappingProxyType(
    {
        "gpt2": _DROPPED,
        "opt-": ModelConstants(hidden_dropout=0.1),
        "gpt-neox-": ModelConstants(rotary_share=0.25),
        "pythia-": ModelConstants(rotary_share=0.25),
        "llama3-": _LLAMA3,
        # Of the release 3.1.
        "llama3-405b": _LLAMA31,
        "llama3.1-": _LLAMA31,
        "llama3.2-": _LLAMA32,
        "mistral-7b-v0.3": _MILLION,
        "mistral-nemo-": _MILLION,
        "mistral-small-": ModelConstants(rotary_base=100_000_000),
        "mixtral-": _MILLION,
        "phi4": ModelConstants(rotary_base=250_000),
        "qwen2": _QWEN,
        # The config.json of these three says 1e-5.
        "qwen2.5-14b": _MILLION,
        "qwen2.5-32b": _MILLION,
        "qwen2.5-72b": _MILLION,
        "qwen3-": _QWEN,
        "qwen3-next-": replace(_QWEN, rotary_base=10_000_000, rotary_share=0.25),
        "deepseek-v2": replace(_DEEPSEEK, rotary_mscale=0.707),
        "deepseek-v3": _DEEPSEEK,
        "moonlight-": ModelConstants(rotary_base=50_000),
        "kimi-k2": replace(_DEEPSEEK, rotary_base=50_000, rotary_factor=32.0),
        "gpt-oss-": _GPT_OSS,
        "glm-4.5": _HALF_ROTATED,
        "t5-": replace(_DROPPED, norm_epsilon=1e-6),
        "gemma-2-": ModelConstants(norm_epsilon=1e-6),
        "llama-4-": _LLAMA3,
        # The factor of Megatron-LM and Megatron-Bridge, which know no other high frequency than 4.
        "llama-4-scout": _LLAMA31,
        # The base of layers without a window; those with one have 10,000.
        "gemma-3-": replace(_MILLION, norm_epsilon=1e-6, rotary_scaling="linear", rotary_factor=8.0),
        "gemma-3-1b": replace(_MILLION, norm_epsilon=1e-6),
    }
)


def constants_of(name: str) -> ModelConstants:
    """By the longest beginning of a model's name that is known; else what most models have."""
    known = [start for start in _BY_BEGINNING if name.startswith(start)]
    return _BY_BEGINNING[max(known, key=len)] if known else USUAL


_GALVATRON = "Wang et al. 2024 (Galvatron-BMW), Table I"
_GEMMA3 = "Gemma Team 2025 (arXiv:2503.19786), Table 1, without the vision encoder"
PUBLISHED_PARAMETERS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "gpt2": (124_439_808, "Hugging Face openai-community/gpt2"),
        "gpt2-medium": (354_823_168, "Hugging Face openai-community/gpt2-medium"),
        "gpt2-large": (774_030_080, "Hugging Face openai-community/gpt2-large"),
        "gpt2-xl": (1_557_611_200, "Hugging Face openai-community/gpt2-xl"),
        "gpt3-175b": (175_000_000_000, "Brown et al. 2020, Table 2.1"),
        "gpt3-15b": (15_400_000_000, _GALVATRON),
        "gpt3-39b": (39_100_000_000, _GALVATRON),
        "gpt3-65b": (64_900_000_000, _GALVATRON),
        "bert-huge-32": (672_000_000, _GALVATRON),
        "bert-huge-48": (987_000_000, _GALVATRON),
        "bert-xhuge": (10_200_000_000, _GALVATRON),
        "vit-huge-32": (632_000_000, _GALVATRON),
        "vit-huge-48": (947_000_000, _GALVATRON),
        "vit-xhuge": (10_100_000_000, _GALVATRON),
        "t5-large-32": (502_000_000, _GALVATRON),
        "t5-large-48": (737_000_000, _GALVATRON),
        "t5-512/4-32": (502_000_000, _GALVATRON),
        "t5-512/4-48": (737_000_000, _GALVATRON),
        "swin-huge-32": (701_000_000, _GALVATRON),
        "swin-huge-48": (1_016_000_000, _GALVATRON),
        "qwen2.5-vl-7b": (8_292_166_656, "Hugging Face Qwen/Qwen2.5-VL-7B-Instruct"),
        "qwen2.5-vl-7b-frozen-vision": (8_292_166_656, "Hugging Face Qwen/Qwen2.5-VL-7B-Instruct"),
        "llava-1.5-13b": (13_350_000_000, "Hugging Face llava-hf/llava-1.5-13b-hf"),
        "gemma-2-2b": (2_614_341_888, "Hugging Face google/gemma-2-2b"),
        "gemma-2-9b": (9_241_705_984, "Hugging Face google/gemma-2-9b"),
        "gemma-2-27b": (27_227_128_320, "Hugging Face google/gemma-2-27b"),
        "gemma-3-1b": (1_000_000_000, _GEMMA3),
        "gemma-3-4b": (3_884_000_000, _GEMMA3),
        "gemma-3-12b": (11_771_000_000, _GEMMA3),
        "gemma-3-27b": (27_016_000_000, _GEMMA3),
        "opt-1.3b": (1_315_758_080, "Hugging Face facebook/opt-1.3b"),
        "opt-6.7b": (6_658_473_984, "Hugging Face facebook/opt-6.7b"),
        "opt-13b": (12_853_473_280, "Hugging Face facebook/opt-13b"),
        "opt-30b": (29_974_540_288, "Hugging Face facebook/opt-30b"),
        "gpt-neox-20b": (20_554_567_680, "Black et al. 2022, section 2"),
        "pythia-6.9b": (6_857_302_016, "Biderman et al. 2023, Table 1"),
        "pythia-12b": (11_846_072_320, "Biderman et al. 2023, Table 1"),
        "llama2-7b": (6_738_415_616, "Hugging Face meta-llama/Llama-2-7b-hf"),
        "llama2-13b": (13_015_864_320, "Hugging Face meta-llama/Llama-2-13b-hf"),
        "llama2-70b": (68_976_648_192, "Hugging Face meta-llama/Llama-2-70b-hf"),
        "llama3-8b": (8_030_261_248, "Hugging Face meta-llama/Meta-Llama-3-8B"),
        "llama3-70b": (70_553_706_496, "Hugging Face meta-llama/Meta-Llama-3-70B"),
        "llama3-405b": (405_853_388_800, "Hugging Face meta-llama/Llama-3.1-405B"),
        "llama3.1-8b": (8_030_261_248, "Hugging Face meta-llama/Llama-3.1-8B"),
        "llama3.1-70b": (70_553_706_496, "Hugging Face meta-llama/Llama-3.1-70B"),
        "llama3.2-1b": (1_235_814_400, "Hugging Face meta-llama/Llama-3.2-1B"),
        "llama3.2-3b": (3_212_749_824, "Hugging Face meta-llama/Llama-3.2-3B"),
        "mistral-7b": (7_241_732_096, "Hugging Face mistralai/Mistral-7B-v0.1"),
        "mistral-7b-v0.3": (7_248_023_552, "Hugging Face mistralai/Mistral-7B-v0.3"),
        "mistral-nemo-12b": (12_247_782_400, "Hugging Face mistralai/Mistral-Nemo-Base-2407"),
        "mistral-small-24b": (23_572_403_200, "Hugging Face mistralai/Mistral-Small-24B-Base-2501"),
        "phi4": (14_659_507_200, "Hugging Face microsoft/phi-4"),
        "qwen2.5-0.5b": (494_032_768, "Hugging Face Qwen/Qwen2.5-0.5B"),
        "qwen2.5-1.5b": (1_543_714_304, "Hugging Face Qwen/Qwen2.5-1.5B"),
        "qwen2.5-3b": (3_085_938_688, "Hugging Face Qwen/Qwen2.5-3B"),
        "qwen2.5-7b": (7_615_616_512, "Hugging Face Qwen/Qwen2.5-7B"),
        "qwen2.5-14b": (14_770_033_664, "Hugging Face Qwen/Qwen2.5-14B"),
        "qwen2.5-32b": (32_763_876_352, "Hugging Face Qwen/Qwen2.5-32B"),
        "qwen2.5-72b": (72_706_203_648, "Hugging Face Qwen/Qwen2.5-72B"),
        "falcon-7b": (6_921_720_704, "Hugging Face tiiuae/falcon-7b"),
        "falcon-40b": (41_303_293_952, "Hugging Face tiiuae/falcon-40b"),
        "falcon-180b": (179_522_565_120, "Hugging Face tiiuae/falcon-180B"),
    }
)
"""Parameter counts as published, to hold the shapes against (a test does, within 1 %)."""

_MIST_SIZES = {
    # size: hidden, layers, heads, llama ffn (Mist, EuroSys 2025, Table 4 and its artifact)
    "1.3b": (2048, 24, 16, 5632),
    "2.7b": (2560, 32, 32, 6912),
    "7b": (4096, 32, 32, 11008),
    "13b": (5120, 40, 40, 13824),
    "22b": (6144, 48, 64, 16384),
    "40b": (8192, 48, 64, 22016),
}


def _mist(family: Family, prefix: str, size: str) -> ModelSpec:
    hidden, layers, heads, gated_ffn = _MIST_SIZES[size]
    llama = family == "llama"
    clash = family == "falcon" and size in {"7b", "40b"}
    return ModelSpec(
        name=f"{prefix}-{size}" + ("-mist" if clash else ""),
        family=family,
        layers=layers,
        hidden=hidden,
        ffn_hidden=gated_ffn if llama else 4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=50304,
        gated_mlp=llama,
        activation="silu" if llama else "gelu",
        norm="rmsnorm" if llama else "layernorm",
        parallel_block=family == "falcon",
        rotary=family != "gpt",
        learned_positions=2048 if family == "gpt" else 0,
    )


def _gpt(name: str, shape: tuple[int, int, int], *, vocab: int, positions: int, **more: Any) -> ModelSpec:
    """GPT-2 style: learned positions, biases everywhere, tied embeddings."""
    layers, hidden, heads = shape
    fields = {
        "ffn_hidden": 4 * hidden,
        "linear_bias": True,
        "rotary": positions == 0,
        "learned_positions": positions,
        "tied_embeddings": True,
        **more,
    }
    return _spec(name, "gpt", (layers, hidden, heads, heads), vocab, fields)


def _llama(name: str, shape: tuple[int, int, int, int], ffn: int, vocab: int, **more: Any) -> ModelSpec:
    """RMSNorm, SwiGLU, rotary, no biases; shape is layers, hidden, heads, key-value heads."""
    fields = {"ffn_hidden": ffn, "gated_mlp": True, "activation": "silu", "norm": "rmsnorm", **more}
    return _spec(name, "llama", shape, vocab, fields)


def _parallel(name: str, shape: tuple[int, int, int, int], vocab: int, **more: Any) -> ModelSpec:
    """Attention and MLP side by side: Falcon, GPT-NeoX, Pythia."""
    fields = {"ffn_hidden": 4 * shape[1], "parallel_block": True, **more}
    return _spec(name, "falcon", shape, vocab, fields)


def _spec(
    name: str, family: Family, shape: tuple[int, int, int, int], vocab: int, fields: dict[str, Any]
) -> ModelSpec:
    layers, hidden, heads, kv_heads = shape
    return ModelSpec(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        **{"head_dim": hidden // heads, **fields},
    )


def _galvatron() -> tuple[ModelSpec, ...]:
    """Of Galvatron-BMW. BERT sees the whole sequence; it has its norms after attention and MLP and one after
    the embedding, as many as here, and rows for two kinds of segments beside its 512 positions."""
    sizes = {"15b": (48, 5120, 40), "39b": (48, 8192, 64), "65b": (80, 8192, 64)}
    bert: dict[str, Any] = {"vocab": 30522, "positions": 514, "attention": "full", "head_transform": True}
    return (
        *(_gpt(f"gpt3-{size}", shape, vocab=50257, positions=2048) for size, shape in sizes.items()),
        _gpt("bert-huge-32", (32, 1280, 16), **bert),
        _gpt("bert-huge-48", (48, 1280, 16), **bert),
        _gpt("bert-xhuge", (128, 2560, 32), **bert),
    )


def _public() -> tuple[ModelSpec, ...]:
    neox = {"linear_bias": True, "parallel_norms": 2}
    tied = {"tied_embeddings": True}
    qwen = {"qkv_bias": True}
    relu = {"activation": "relu"}
    return (
        _gpt("gpt2", (12, 768, 12), vocab=50257, positions=1024),
        _gpt("gpt2-medium", (24, 1024, 16), vocab=50257, positions=1024),
        _gpt("gpt2-large", (36, 1280, 20), vocab=50257, positions=1024),
        _gpt("gpt2-xl", (48, 1600, 25), vocab=50257, positions=1024),
        _gpt("gpt3-175b", (96, 12288, 96), vocab=50257, positions=2048),
        *_galvatron(),
        # OPT's position table has two rows more than its 2048 positions.
        _gpt("opt-1.3b", (24, 2048, 32), vocab=50272, positions=2050, **relu),
        _gpt("opt-6.7b", (32, 4096, 32), vocab=50272, positions=2050, **relu),
        _gpt("opt-13b", (40, 5120, 40), vocab=50272, positions=2050, **relu),
        _gpt("opt-30b", (48, 7168, 56), vocab=50272, positions=2050, **relu),
        _parallel("gpt-neox-20b", (44, 6144, 64, 64), 50432, **neox),
        _parallel("pythia-6.9b", (32, 4096, 32, 32), 50432, **neox),
        _parallel("pythia-12b", (36, 5120, 40, 40), 50688, **neox),
        _llama("llama2-7b", (32, 4096, 32, 32), 11008, 32000),
        _llama("llama2-13b", (40, 5120, 40, 40), 13824, 32000),
        _llama("llama2-70b", (80, 8192, 64, 8), 28672, 32000),
        _llama("llama3-8b", (32, 4096, 32, 8), 14336, 128256),
        _llama("llama3-70b", (80, 8192, 64, 8), 28672, 128256),
        _llama("llama3-405b", (126, 16384, 128, 8), 53248, 128256),
        _llama("llama3.1-8b", (32, 4096, 32, 8), 14336, 128256),
        _llama("llama3.1-70b", (80, 8192, 64, 8), 28672, 128256),
        _llama("llama3.2-1b", (16, 2048, 32, 8), 8192, 128256, **tied),
        _llama("llama3.2-3b", (28, 3072, 24, 8), 8192, 128256, **tied),
        _llama("mistral-7b", (32, 4096, 32, 8), 14336, 32000, window=4096),
        _llama("mistral-7b-v0.3", (32, 4096, 32, 8), 14336, 32768),
        _llama("mistral-nemo-12b", (40, 5120, 32, 8), 14336, 131072, head_dim=128),
        _llama("mistral-small-24b", (40, 5120, 32, 8), 32768, 131072, head_dim=128),
        _llama("phi4", (40, 5120, 40, 10), 17920, 100352),
        _llama("qwen2.5-0.5b", (24, 896, 14, 2), 4864, 151936, **qwen, **tied),
        _llama("qwen2.5-1.5b", (28, 1536, 12, 2), 8960, 151936, **qwen, **tied),
        _llama("qwen2.5-3b", (36, 2048, 16, 2), 11008, 151936, **qwen, **tied),
        _llama("qwen2.5-7b", (28, 3584, 28, 4), 18944, 152064, **qwen),
        _llama("qwen2.5-14b", (48, 5120, 40, 8), 13824, 152064, **qwen),
        _llama("qwen2.5-32b", (64, 5120, 40, 8), 27648, 152064, **qwen),
        _llama("qwen2.5-72b", (80, 8192, 64, 8), 29568, 152064, **qwen),
        _parallel("falcon-7b", (32, 4544, 71, 1), 65024, **tied),
        _parallel("falcon-40b", (60, 8192, 128, 8), 65024, parallel_norms=2, **tied),
        _parallel("falcon-180b", (80, 14848, 232, 8), 65024, parallel_norms=2),
    )


def _all() -> dict[str, ModelSpec]:
    families: tuple[tuple[Family, str], ...] = (("gpt", "gpt3"), ("llama", "llama"), ("falcon", "falcon"))
    mist = [_mist(family, prefix, size) for family, prefix in families for size in _MIST_SIZES]
    shapes = (*mist, *_public(), *expert_presets(), *group_presets(), *hybrid_presets())
    return {spec.name: replace(spec, constants=constants_of(spec.name)) for spec in shapes}


PRESETS: Mapping[str, ModelSpec] = MappingProxyType(_all())


_BY_LETTERS = {name.replace("-", ""): model for name, model in PRESETS.items()}


def preset_names() -> tuple[str, ...]:
    return tuple(PRESETS)


SAME_SHAPE = re.compile(r"-(hf|base|instruct|chat|it|v0\.1|pt)(?=-|$)")
"""What publishers add to a model's name where its shape is that of the others."""


def preset_like(name: str) -> ModelSpec | None:
    """The model that a name means as publishers write it: Llama-2-7b-hf, Meta-Llama-3.1-70B-Instruct; None
    where that is no name of ours, as nearness is no sameness."""
    plain = SAME_SHAPE.sub("", name.strip().lower().replace("_", "-")).removeprefix("meta-")
    return _BY_LETTERS.get(plain.replace("-", ""))


WHAT_MODELS = (
    "mist-megatron models lists them; a Hugging Face config.json or a file of the shape (mist-megatron "
    "reference model) does as well"
)
"""What somebody looks for who names a model that is none of them."""


def preset(name: str) -> ModelSpec:
    """A model by name; a typing error is answered with the nearest name."""
    check.known("--model", "model preset", name, preset_names(), see=WHAT_MODELS)
    return PRESETS[name]
