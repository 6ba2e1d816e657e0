"""Hugging Face config.json -> ModelSpec, with the defaults that transformers applies to absent keys.

A config is refused rather than half understood: an unknown architecture by name, and options that change
the shape in ways no ModelSpec can say (ALiBi, state-space layers, windows on some layers only). Which keys
a model reads, and what an absent one means, is what transformers 5 builds; a test counts the parameters of
its modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from mist_megatron.errors import InputError
from mist_megatron.formats.block_configs import nemotron_nas
from mist_megatron.formats.huggingface_config import Config, even, gated_model
from mist_megatron.formats.huggingface_constants import constants_from_huggingface, window_from_huggingface
from mist_megatron.formats.huggingface_experts import EXPERT_READERS
from mist_megatron.formats.huggingface_groups import (
    GROUP_READERS,
    HEADS,
    TEXT_ALONE,
    text_alone,
    text_values,
)
from mist_megatron.formats.huggingface_hybrids import HYBRID_READERS
from mist_megatron.spec import check
from mist_megatron.spec.model import ModelSpec


def _llama(config: Config, name: str) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    if config.flag("mlp_bias", False) != bias:
        raise InputError(f"{config.where}: attention_bias and mlp_bias differ, which no layer here can have")
    return gated_model(config, name, linear_bias=bias)


def _mistral(config: Config, name: str) -> ModelSpec:
    return gated_model(config, name, kv_heads=8)


def _qwen2(config: Config, name: str) -> ModelSpec:
    config.demand("use_sliding_window", False, "windows on some layers only are not modelled")
    return gated_model(config, name, kv_heads=32, qkv_bias=True)


def _phi3(config: Config, name: str) -> ModelSpec:
    return gated_model(config, name)


def _seed_oss(config: Config, name: str) -> ModelSpec:
    config.demand("attention_out_bias", False, "a bias on the output projection is not modelled")
    config.demand("mlp_bias", False, "biases on the MLP alone are not modelled")
    return gated_model(
        config,
        name,
        kv_heads=8,
        head_dim=config.integer("head_dim", default=128, null=0),
        qkv_bias=config.flag("attention_bias", True),
    )


def _ernie(config: Config, name: str) -> ModelSpec:
    return gated_model(
        config,
        name,
        kv_heads=2,
        head_dim=config.integer("head_dim", default=128, null=0),
        linear_bias=config.flag("use_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _arcee(config: Config, name: str) -> ModelSpec:
    """LLaMA's layers with an MLP of two products and squared ReLU."""
    return replace(_llama(config, name), gated_mlp=False, activation=config.activation("hidden_act", "relu2"))


def _nemotron(config: Config, name: str) -> ModelSpec:
    """Nemotron-4 and Minitron: norms with biases, whose weights are told less one."""
    return replace(_arcee(config, name), norm="layernorm", norm_bias=True)


def _gemma(config: Config, name: str) -> ModelSpec:
    config.demand("attention_bias", False, "biases on the attention alone are not modelled")
    config.demand("use_bidirectional_attention", False, "attention without a causal mask is not modelled")
    return gated_model(
        config,
        name,
        kv_heads=16,
        head_dim=config.integer("head_dim", default=256),
        activation=config.activation("hidden_act", "gelu_pytorch_tanh"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _starcoder2(config: Config, name: str) -> ModelSpec:
    hidden = config.integer("hidden_size", default=3072)
    heads = config.integer("num_attention_heads", default=24)
    return ModelSpec(
        name=name,
        family="gpt",
        layers=config.integer("num_hidden_layers", default=30),
        hidden=hidden,
        ffn_hidden=config.integer("intermediate_size", default=12288),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=2),
        vocab=config.integer("vocab_size", default=49152),
        head_dim=config.integer("head_dim", default=0) or even(config, hidden, heads),
        activation=config.activation("hidden_act", "gelu_pytorch_tanh"),
        linear_bias=config.flag("use_bias", True),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _falcon(config: Config, name: str) -> ModelSpec:
    config.refuse("alibi", "ALiBi positions are not modelled; Falcon-RW is not supported")
    for old, now in (
        ("n_head", "num_attention_heads"),
        ("n_layer", "num_hidden_layers"),
        ("n_head_kv", "num_kv_heads"),
    ):
        if config.values.get(old) is not None and config.values.get(now) is None:
            raise InputError(f"{config.where}: key {old} is of an older format; transformers reads {now}")
    hidden = config.integer("n_embed", "hidden_size", default=4544)
    heads = config.integer("num_attention_heads", default=71)
    new = config.flag("new_decoder_architecture", False)
    parallel = config.flag("parallel_attn", True)
    norms = config.integer("num_ln_in_parallel_attn", default=2 if new else 1)
    if (new and not parallel) or (norms == 2 and not new):
        raise InputError(
            f"{config.where}: new_decoder_architecture {new}, parallel_attn {parallel} and "
            f"num_ln_in_parallel_attn {norms} make no model that transformers can run"
        )
    multi_query = config.flag("multi_query", True)
    return ModelSpec(
        name=name,
        family="falcon",
        layers=config.integer("num_hidden_layers", default=32),
        hidden=hidden,
        ffn_hidden=config.integer("ffn_hidden_size", default=4 * hidden),
        heads=heads,
        kv_heads=config.integer("num_kv_heads", default=heads) if new else 1 if multi_query else heads,
        vocab=config.integer("vocab_size", default=65024),
        head_dim=even(config, hidden, heads),
        activation=config.activation("activation", "gelu"),
        parallel_block=parallel,
        parallel_norms=norms,
        linear_bias=config.flag("bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _gpt2(config: Config, name: str) -> ModelSpec:
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
        head_dim=even(config, hidden, heads),
        activation=config.activation("activation_function", "gelu_new"),
        linear_bias=True,
        rotary=False,
        learned_positions=config.integer("n_positions", "max_position_embeddings", default=1024),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _gpt_neox(config: Config, name: str) -> ModelSpec:
    config.demand("attention_bias", True, "biases on the MLP alone are not modelled")
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
        head_dim=even(config, hidden, heads),
        activation=config.activation("hidden_act", "gelu"),
        parallel_block=parallel,
        parallel_norms=2 if parallel else 1,
        linear_bias=True,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def _opt(config: Config, name: str) -> ModelSpec:
    hidden = config.integer("hidden_size", default=768)
    heads = config.integer("num_attention_heads", default=12)
    if config.integer("word_embed_proj_dim", default=hidden) != hidden:
        raise InputError(
            f"{config.where}: word_embed_proj_dim differs from hidden_size, which is not modelled"
        )
    config.demand("do_layer_norm_before", True, "post-norm layers are not modelled")
    config.demand("layer_norm_elementwise_affine", True, "norms without weights are not modelled")
    config.refuse("layerdrop", "layers left out at random are not modelled")
    return ModelSpec(
        name=name,
        family="gpt",
        layers=config.integer("num_hidden_layers", default=12),
        hidden=hidden,
        ffn_hidden=config.integer("ffn_dim", default=3072),
        heads=heads,
        kv_heads=heads,
        vocab=config.integer("vocab_size", default=50272),
        head_dim=even(config, hidden, heads),
        activation=config.activation("activation_function", "relu"),
        linear_bias=config.flag("enable_bias", True),
        rotary=False,
        # OPT's table has two rows more than its positions (transformers, modeling_opt).
        learned_positions=config.integer("max_position_embeddings", default=2048) + 2,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        final_norm=not config.flag("_remove_final_layer_norm", False),
    )


_READERS: dict[str, Callable[[Config, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "gemma": _gemma,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "arcee": _arcee,
    "nemotron": _nemotron,
    "nemotron-nas": nemotron_nas,
    **EXPERT_READERS,
    **HYBRID_READERS,
    **GROUP_READERS,
}

_MIXTURES = {*EXPERT_READERS, *HYBRID_READERS, "gpt_oss", "llama4_text"} - {"qwen3", "qwen3_5_text"}
"""What may have experts."""
_REASONS = {
    "olmo": "norms without weights are not modelled",
    "olmo2": "query-key norms are not modelled",
    "bloom": "ALiBi positions are not modelled",
    "mpt": "ALiBi positions are not modelled",
    "gptj": "a bias on the output projection is not modelled",
    "phi": "a bias on the output projection is not modelled",
    "phimoe": "biases on the attention alone are not modelled",
}
"""Why some well-known architectures are refused; the others are simply not known."""


def is_huggingface(values: Mapping[str, object]) -> bool:
    """Whether a parsed file looks like a Hugging Face config rather than our own model mapping."""
    return "model_type" in values or "architectures" in values


def model_from_huggingface(values: Mapping[str, object], where: str) -> ModelSpec:
    """Read a config.json; the architecture decides which reader, or is refused by name."""
    values = text_alone(values, where)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        shown = kind if isinstance(kind, str) else values.get("architectures")
        reason = f": {_REASONS[kind]}" if isinstance(kind, str) and kind in _REASONS else ""
        raise InputError(
            f"{where}: architecture {shown!r} is not supported{reason}; supported: "
            f"{', '.join((*_READERS, *TEXT_ALONE))}"
        )
    values = text_values(values)
    config = Config(values, where)
    if kind not in _MIXTURES:
        for experts in ("num_local_experts", "num_experts", "n_routed_experts"):
            config.refuse(experts, f"no architecture {kind} has experts")
    config.refuse("add_cross_attention", "attention to an encoder is not modelled")
    if kind != "t5":
        config.refuse("is_encoder_decoder", "models with an encoder are not modelled")
    _refuse_quantized(config, kind)
    _refuse_other_heads(values, where)
    given = values.get("_name_or_path")
    name = given.rsplit("/", 1)[-1] if isinstance(given, str) and given.strip("/. ") else kind
    check.name(f"{where}: _name_or_path", name)
    try:
        read = _READERS[kind](config, name)
    except InputError as error:
        raise _by_its_keys(error, where) from None
    model = replace(read, constants=constants_from_huggingface(values, where))
    return model if kind in GROUP_READERS else replace(model, window=window_from_huggingface(values, where))


_STORED: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": ("fp8",),
    "kimi_k2": ("fp8", "compressed-tensors"),
    "gpt_oss": ("mxfp4",),
}
"""Architectures whose checkpoints are published in fewer bits: the shape is the same, and what is trained are
weights that were made wide again first."""


def _refuse_quantized(config: Config, kind: str) -> None:
    said = config.values.get("quantization_config")
    if isinstance(said, Mapping) and said.get("quant_method") in _STORED.get(kind, ()):
        return
    config.refuse(
        "quantization_config", "quantized weights are not modelled; give the config of the full model"
    )


_KEYS = {
    "top_k": "num_experts_per_tok",
    "group_top_k": "topk_group",
    "groups": "n_group",
    "ffn_hidden": "moe_intermediate_size",
    "count": "the number of experts",
}
"""Parts of `ExpertSpec` -> what configs call them."""


def _by_its_keys(error: InputError, where: str) -> InputError:
    """A refusal of a model's parts by the file and its own keys."""
    if error.message.startswith(where):
        return error
    told = re.sub(r"\w+", lambda word: _KEYS.get(word.group(), word.group()), error.message)
    return InputError(f"{where}: {told}", details=error.details)


def _refuse_other_heads(values: Mapping[str, object], where: str) -> None:
    """A classifier has no projection onto the vocabulary; its loss is not ours."""
    named = values.get("architectures")
    wanted = HEADS.get(str(values.get("model_type")), "ForCausalLM")
    what = "causal language model" if wanted == "ForCausalLM" else f"model {wanted}"
    for text in named if isinstance(named, list) else ():
        if isinstance(text, str) and "For" in text and wanted not in text:
            raise InputError(
                f"{where}: architecture {text!r} is no {what}, which is all that is modelled of it"
            )
