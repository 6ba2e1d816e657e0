"""Hugging Face config.json -> ModelConstants: which key says what in each architecture, and what transformers
takes where it is absent. A test holds both against the configuration classes of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from mist_megatron.errors import InputError
from mist_megatron.formats.huggingface_config import number_of
from mist_megatron.spec.constants import ModelConstants, RotaryScaling

_Key = tuple[str, float]
"""A key and what its absence means; an empty key is none, and the value holds for all models."""
_ABSENT: _Key = ("", 0.0)


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """Where one architecture says its constants."""

    norm_epsilon: _Key = ("rms_norm_eps", 1e-6)
    init_std: _Key = ("initializer_range", 0.02)
    hidden_dropout: _Key = _ABSENT
    attention_dropout: _Key = ("attention_dropout", 0.0)
    rotary_base: _Key = ("rope_theta", 10_000)
    rotary_share: _Key = ("partial_rotary_factor", 1.0)
    window: _Key = _ABSENT


_USUAL = _Keys()
"""Of LLaMA and of most that came after it."""
_KEYS: Mapping[str, _Keys] = MappingProxyType(
    {
        "mistral": _Keys(window=("sliding_window", 4096)),
        "mixtral": _Keys(
            norm_epsilon=("rms_norm_eps", 1e-5),
            rotary_base=("rope_theta", 1_000_000),
            window=("sliding_window", 0),
        ),
        "gpt_oss": _Keys(norm_epsilon=("rms_norm_eps", 1e-5), rotary_base=("rope_theta", 150_000)),
        "llama4_text": _Keys(norm_epsilon=("rms_norm_eps", 1e-5), rotary_base=("rope_theta", 500_000)),
        "glm4_moe": _Keys(norm_epsilon=("rms_norm_eps", 1e-5), rotary_share=("partial_rotary_factor", 0.5)),
        "glm4_moe_lite": _Keys(norm_epsilon=("rms_norm_eps", 1e-5)),
        "solar_open": _Keys(norm_epsilon=("rms_norm_eps", 1e-5), rotary_base=("rope_theta", 1_000_000)),
        "ernie4_5": _Keys(norm_epsilon=("rms_norm_eps", 1e-5), rotary_base=("rope_theta", 500_000)),
        "arcee": _Keys(norm_epsilon=("rms_norm_eps", 1e-5)),
        "nemotron": _Keys(
            norm_epsilon=("norm_eps", 1e-5),
            init_std=("initializer_range", 0.0134),
            rotary_share=("partial_rotary_factor", 0.5),
        ),
        "seed_oss": _Keys(
            hidden_dropout=("residual_dropout", 0.1), attention_dropout=("attention_dropout", 0.1)
        ),
        **dict.fromkeys(
            ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
            _Keys(rotary_share=("partial_rotary_factor", 0.25)),
        ),
        "phi3": _Keys(
            norm_epsilon=("rms_norm_eps", 1e-5),
            hidden_dropout=("resid_pdrop", 0.0),
            window=("sliding_window", 0),
        ),
        "starcoder2": _Keys(
            norm_epsilon=("norm_epsilon", 1e-5),
            init_std=("initializer_range", 0.018042),
            hidden_dropout=("residual_dropout", 0.0),
            window=("sliding_window", 0),
        ),
        "falcon": _Keys(
            norm_epsilon=("layer_norm_epsilon", 1e-5),
            hidden_dropout=("hidden_dropout", 0.0),
        ),
        "gpt2": _Keys(
            norm_epsilon=("layer_norm_epsilon", 1e-5),
            hidden_dropout=("resid_pdrop", 0.1),
            attention_dropout=("attn_pdrop", 0.1),
        ),
        "gpt_neox": _Keys(
            norm_epsilon=("layer_norm_eps", 1e-5),
            hidden_dropout=("hidden_dropout", 0.0),
            rotary_base=("rotary_emb_base", 10_000),
            rotary_share=("rotary_pct", 0.25),
        ),
        "bert": _Keys(
            norm_epsilon=("layer_norm_eps", 1e-12),
            hidden_dropout=("hidden_dropout_prob", 0.1),
            attention_dropout=("attention_probs_dropout_prob", 0.1),
        ),
        "vit": _Keys(
            norm_epsilon=("layer_norm_eps", 1e-12),
            hidden_dropout=("hidden_dropout_prob", 0.0),
            attention_dropout=("attention_probs_dropout_prob", 0.0),
        ),
        "swin": _Keys(
            norm_epsilon=("layer_norm_eps", 1e-5),
            hidden_dropout=("hidden_dropout_prob", 0.0),
            attention_dropout=("attention_probs_dropout_prob", 0.0),
        ),
        # Initial weights of T5 follow from each matrix's width: a factor in place of a deviation.
        "t5": _Keys(
            norm_epsilon=("layer_norm_epsilon", 1e-6),
            init_std=("", 0.02),
            hidden_dropout=("dropout_rate", 0.1),
            attention_dropout=("dropout_rate", 0.1),
        ),
        "gemma3_text": _Keys(rotary_base=("rope_theta", 1_000_000)),
        "opt": _Keys(
            # torch's own default: OPT's configuration has no key for it.
            norm_epsilon=("", 1e-5),
            init_std=("init_std", 0.02),
            hidden_dropout=("dropout", 0.1),
        ),
    }
)


def constants_from_huggingface(values: Mapping[str, object], where: str) -> ModelConstants:
    """What the config says beside the shape. transformers 5 writes positions under `rope_parameters`, older
    versions as `rope_theta` and `rope_scaling`; both are read."""
    keys = _KEYS.get(str(values.get("model_type")), _USUAL)
    rope = _mapping(values, "rope_parameters", where)
    # Of layers without a window, where these have positions of their own.
    rope = _mapping(rope, "full_attention", where) or rope
    scaling = rope or _mapping(values, "rope_scaling", where)
    kind = _scaling(scaling, where)

    def number(key: _Key) -> float:
        name, default = key
        return _number(values, name, default, where)

    base = _number(rope, "rope_theta", number(keys.rotary_base), where)
    return ModelConstants(
        rotary_base=_whole(base, keys.rotary_base[0], where),
        rotary_share=_number(rope, "partial_rotary_factor", number(keys.rotary_share), where),
        rotary_scaling=kind,
        rotary_factor=1.0 if kind == "none" else _number(scaling, "factor", 1.0, where),
        rotary_high=_number(scaling, "high_freq_factor", 4.0, where) if kind == "llama3" else 4.0,
        rotary_mscale=_number(scaling, "mscale_all_dim", 1.0, where) or 1.0,
        norm_epsilon=number(keys.norm_epsilon),
        init_std=number(keys.init_std),
        hidden_dropout=number(keys.hidden_dropout),
        attention_dropout=number(keys.attention_dropout),
    )


def window_from_huggingface(values: Mapping[str, object], where: str) -> int | None:
    """Keys that a token sees in every layer; None for all before it."""
    name, default = _KEYS.get(str(values.get("model_type")), _USUAL).window
    return _whole(_number(values, name, default, where), name, where) or None


def _whole(value: float, name: str, where: str) -> int:
    if not value.is_integer():
        raise InputError(f"{where}: {name} is {value}; wanted a whole number")
    return int(value)


def _mapping(values: Mapping[str, object], name: str, where: str) -> Mapping[str, object]:
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {name} is {value!r}; wanted a mapping")
    return value


def _number(values: Mapping[str, object], name: str, default: float, where: str) -> float:
    value = values.get(name) if name else None
    if value is None:
        # A null window is no window, whatever absence means.
        return 0.0 if name == "sliding_window" and name in values else float(default)
    return number_of(value, f"{where}: {name}")


_LLAMA3 = {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192.0}


def _scaling(values: Mapping[str, object], where: str) -> RotaryScaling:
    """The kind of scaling; one that is not known would be a model that is not understood."""
    said = values.get("rope_type", values.get("type")) or "default"
    if said == "default":
        return "none"
    for kind in get_args(RotaryScaling):
        if said == kind or (said == "su" and kind == "longrope"):
            break
    else:
        raise InputError(
            f"{where}: rope_type is {said!r}; known: default, {', '.join(get_args(RotaryScaling)[1:])}"
        )
    if kind == "llama3":
        for name, usual in _LLAMA3.items():
            if _number(values, name, usual, where) != usual:
                raise InputError(
                    f"{where}: {name} is {values[name]}; llama3 scaling with other figures than "
                    f"{usual:g} is not supported"
                )
    scaling: RotaryScaling = kind
    return scaling
