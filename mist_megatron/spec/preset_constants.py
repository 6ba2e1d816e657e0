"""Constants of the models known by name, from the config.json of each checkpoint and, where that was not at
hand, from Megatron-Bridge's model providers (v0.2.0 and v0.3.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mist_megatron.spec.constants import ModelConstants

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
        # The base of layers without a window; those with one have 10,000.
        "gemma-3-": replace(_MILLION, norm_epsilon=1e-6, rotary_scaling="linear", rotary_factor=8.0),
        "gemma-3-1b": replace(_MILLION, norm_epsilon=1e-6),
    }
)


def constants_of(name: str) -> ModelConstants:
    """By the longest beginning of a model's name that is known; else what most models have."""
    known = [start for start in _BY_BEGINNING if name.startswith(start)]
    return _BY_BEGINNING[max(known, key=len)] if known else USUAL
