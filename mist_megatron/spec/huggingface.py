"""Hugging Face config.json -> ModelSpec, with the defaults that transformers applies to absent keys.

A config is refused rather than half understood: an unknown architecture by name, and options that change
the shape in ways no ModelSpec can say (ALiBi, query-key norms, mixtures of experts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.spec.model import Activation, ModelSpec


class _Config:
    """Typed access to a config's keys; a wrong type is named with its key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise InputError(f"{self.where}: {name} is {value!r}; wanted a whole number")
                return value
        if default is None:
            raise InputError(f"{self.where}: key {names[0]} is missing")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.where}: {name} is {value!r}; wanted true or false")
        return value

    def activation(self, name: str, default: str) -> Activation:
        value = self.values.get(name, default)
        known: dict[str, Activation] = {
            "gelu": "gelu",
            "gelu_new": "gelu",
            "gelu_fast": "gelu",
            "gelu_pytorch_tanh": "gelu",
            "relu": "relu",
            "silu": "silu",
            "swish": "silu",
        }
        if not isinstance(value, str) or value not in known:
            raise InputError(f"{self.where}: {name} is {value!r}; wanted one of {', '.join(known)}")
        return known[value]

    def refuse(self, name: str, why: str) -> None:
        if self.values.get(name):
            raise InputError(f"{self.where}: {name} is {self.values[name]!r}: {why}")


def _heads(config: _Config, hidden: int, heads: int) -> int:
    given = config.integer("head_dim", default=0)
    if given:
        return given
    if heads < 1 or hidden % heads:
        raise InputError(f"{config.where}: attention heads ({heads}) must divide the hidden size ({hidden})")
    return hidden // heads


def _llama(config: _Config, name: str) -> ModelSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kind = config.values.get("model_type")
    if config.flag("mlp_bias", False) != config.flag("attention_bias", False):
        raise InputError(f"{config.where}: attention_bias and mlp_bias differ, which no layer here can have")
    return ModelSpec(
        name=name,
        family="llama",
        layers=config.integer("num_hidden_layers"),
        hidden=hidden,
        ffn_hidden=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=8 if kind == "mistral" else heads),
        vocab=config.integer("vocab_size"),
        head_dim=_heads(config, hidden, heads),
        gated_mlp=True,
        activation=config.activation("hidden_act", "silu"),
        norm="rmsnorm",
        linear_bias=config.flag("attention_bias", False),
        qkv_bias=kind == "qwen2",
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def _falcon(config: _Config, name: str) -> ModelSpec:
    config.refuse("alibi", "ALiBi positions are not modelled; Falcon-RW is not supported")
    hidden = config.integer("hidden_size", "n_embed", default=4544)
    heads = config.integer("num_attention_heads", "n_head", default=71)
    new = config.flag("new_decoder_architecture", False)
    if new:
        kv_heads = config.integer("num_kv_heads", "n_head_kv", default=heads)
        norms = config.integer("num_ln_in_parallel_attn", default=2)
    else:
        kv_heads = 1 if config.flag("multi_query", True) else heads
        norms = 1
    parallel = new or config.flag("parallel_attn", True)
    return ModelSpec(
        name=name,
        family="falcon",
        layers=config.integer("num_hidden_layers", "n_layer", default=32),
        hidden=hidden,
        ffn_hidden=config.integer("ffn_hidden_size", default=4 * hidden),
        heads=heads,
        kv_heads=kv_heads,
        vocab=config.integer("vocab_size", default=65024),
        head_dim=_heads(config, hidden, heads),
        activation=config.activation("activation", "gelu"),
        parallel_block=parallel,
        parallel_norms=norms,
        linear_bias=config.flag("bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _gpt2(config: _Config, name: str) -> ModelSpec:
    hidden = config.integer("n_embd", "hidden_size", default=768)
    heads = config.integer("n_head", "num_attention_heads", default=12)
    return ModelSpec(
        name=name,
        family="gpt",
        layers=config.integer("n_layer", "num_hidden_layers", default=12),
        hidden=hidden,
        ffn_hidden=config.integer("n_inner", default=4 * hidden),
        heads=heads,
        kv_heads=heads,
        vocab=config.integer("vocab_size", default=50257),
        head_dim=_heads(config, hidden, heads),
        activation=config.activation("activation_function", "gelu_new"),
        linear_bias=True,
        rotary=False,
        learned_positions=config.integer("n_positions", "max_position_embeddings", default=1024),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _gpt_neox(config: _Config, name: str) -> ModelSpec:
    hidden = config.integer("hidden_size", default=6144)
    heads = config.integer("num_attention_heads", default=64)
    parallel = config.flag("use_parallel_residual", True)
    return ModelSpec(
        name=name,
        family="falcon" if parallel else "gpt",
        layers=config.integer("num_hidden_layers", default=44),
        hidden=hidden,
        ffn_hidden=config.integer("intermediate_size", default=24576),
        heads=heads,
        kv_heads=heads,
        vocab=config.integer("vocab_size", default=50432),
        head_dim=_heads(config, hidden, heads),
        activation=config.activation("hidden_act", "gelu"),
        parallel_block=parallel,
        parallel_norms=2 if parallel else 1,
        linear_bias=config.flag("attention_bias", True),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def _opt(config: _Config, name: str) -> ModelSpec:
    hidden = config.integer("hidden_size", default=768)
    heads = config.integer("num_attention_heads", default=12)
    if config.integer("word_embed_proj_dim", default=hidden) != hidden:
        raise InputError(
            f"{config.where}: word_embed_proj_dim differs from hidden_size, which is not modelled"
        )
    if not config.flag("do_layer_norm_before", True):
        raise InputError(f"{config.where}: do_layer_norm_before is false: post-norm layers are not modelled")
    return ModelSpec(
        name=name,
        family="gpt",
        layers=config.integer("num_hidden_layers", default=12),
        hidden=hidden,
        ffn_hidden=config.integer("ffn_dim", default=3072),
        heads=heads,
        kv_heads=heads,
        vocab=config.integer("vocab_size", default=50272),
        head_dim=_heads(config, hidden, heads),
        activation=config.activation("activation_function", "relu"),
        linear_bias=config.flag("enable_bias", True),
        rotary=False,
        # OPT's table has two rows more than its positions (transformers, modeling_opt).
        learned_positions=config.integer("max_position_embeddings", default=2048) + 2,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


_READERS: dict[str, Callable[[_Config, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}


def is_huggingface(values: Mapping[str, Any]) -> bool:
    """Whether a parsed file looks like a Hugging Face config rather than our own model mapping."""
    return "model_type" in values or "architectures" in values


def model_from_huggingface(values: Mapping[str, Any], where: str) -> ModelSpec:
    """Read a config.json; the architecture decides which reader, or is refused by name."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        shown = kind if isinstance(kind, str) else values.get("architectures")
        raise InputError(
            f"{where}: architecture {shown!r} is not supported; supported: {', '.join(_READERS)}"
        )
    config = _Config(values, where)
    config.refuse("num_local_experts", "mixtures of experts are not modelled")
    config.refuse("num_experts", "mixtures of experts are not modelled")
    given = values.get("_name_or_path")
    name = given.rsplit("/", 1)[-1] if isinstance(given, str) and given.strip("/. ") else kind
    return _READERS[kind](config, name)
