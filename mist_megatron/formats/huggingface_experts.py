"""Readers of Hugging Face configs with experts, latent attention or query-key norms; see `huggingface`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.formats.huggingface_config import Config, gated_model
from mist_megatron.spec.experts import ExpertSpec, LatentAttention, Router
from mist_megatron.spec.model import ModelSpec


def _mixtral(config: Config, name: str) -> ModelSpec:
    experts = ExpertSpec(
        count=config.integer("num_local_experts", default=8),
        top_k=config.integer("num_experts_per_tok", default=2),
        ffn_hidden=config.integer("intermediate_size", default=14336),
        **_evened(config),
    )
    return gated_model(config, name, kv_heads=8, experts=experts)


def _evened(config: Config) -> dict[str, Any]:
    """The loss over all tokens of a micro-batch that evens loads."""
    share = config.number("router_aux_loss_coef", 0.001)
    return {"balance": "aux_loss" if share else "none", "balance_loss": share}


def _no_windows(config: Config) -> None:
    config.demand("use_sliding_window", False, "windows on some layers only are not modelled")


def _qwen3(config: Config, name: str, **kind: Any) -> ModelSpec:
    _no_windows(config)
    config.demand("attention_bias", False, "biases on the attention alone are not modelled")
    return gated_model(config, name, qk_norm=True, **kind)


def _qwen3_dense(config: Config, name: str) -> ModelSpec:
    return _qwen3(config, name, kv_heads=32, head_dim=config.integer("head_dim", default=128))


def _router(config: Config) -> Router:
    """Chosen weights that are made to sum to one are a softmax of the chosen scores."""
    return "softmax" if config.flag("norm_topk_prob", False) else "softmax_before_top_k"


def _every(config: Config) -> int:
    """Each n-th layer has experts, if no layer is left out by its number."""
    config.refuse("mlp_only_layers", "layers without experts at single places are not modelled")
    return config.integer("decoder_sparse_step", default=1)


def _qwen3_moe(config: Config, name: str) -> ModelSpec:
    experts = ExpertSpec(
        count=config.integer("num_experts", "num_local_experts", default=128),
        top_k=config.integer("num_experts_per_tok", default=8),
        ffn_hidden=config.integer("moe_intermediate_size", default=768),
        router=_router(config),
        every=_every(config),
        **_evened(config),
    )
    return _qwen3(config, name, kv_heads=4, experts=experts)


def _qwen2_moe(config: Config, name: str) -> ModelSpec:
    _no_windows(config)
    experts = ExpertSpec(
        count=config.integer("num_experts", default=60),
        top_k=config.integer("num_experts_per_tok", default=4),
        ffn_hidden=config.integer("moe_intermediate_size", default=1408),
        shared_ffn_hidden=config.integer("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
        router=_router(config),
        every=_every(config),
        **_evened(config),
    )
    return gated_model(
        config, name, kv_heads=16, qkv_bias=config.flag("qkv_bias", True), head_dim=None, experts=experts
    )


def _deepseek_experts(
    config: Config, defaults: Mapping[str, int], router: Router, scaling: float = 1.0
) -> ExpertSpec | None:
    """Shared experts are one MLP, so many times as wide as a routed one."""
    if router == "sigmoid":
        config.demand("norm_topk_prob", True, "weights of experts that are not normed are not modelled")
    ffn = config.integer("moe_intermediate_size", default=defaults["moe_intermediate_size"])
    shared = config.integer("n_shared_experts", default=defaults["n_shared_experts"], null=0)
    if config.integer("moe_layer_freq", default=1) != 1:
        raise InputError(f"{config.where}: moe_layer_freq is not 1, which is not modelled")
    dense = config.integer("first_k_dense_replace", default=defaults["first_k_dense_replace"])
    if dense >= config.integer("num_hidden_layers"):
        return None
    share = config.number("aux_loss_alpha", 0.0)
    return ExpertSpec(
        count=config.integer("n_routed_experts", default=defaults.get("n_routed_experts")),
        top_k=config.integer("num_experts_per_tok", default=defaults.get("num_experts_per_tok")),
        ffn_hidden=ffn,
        shared_ffn_hidden=shared * ffn,
        router=router,
        groups=config.integer("n_group", default=defaults["n_group"], null=1),
        group_top_k=config.integer("topk_group", default=defaults["topk_group"], null=1),
        scaling=config.number("routed_scaling_factor", scaling),
        balance="seq_aux_loss" if share else "none",
        balance_loss=share,
        balance_bias=router == "sigmoid",
        first_dense=dense,
    )


_DEEPSEEK_V2 = {
    "moe_intermediate_size": 1407, "n_shared_experts": 2, "first_k_dense_replace": 0, "n_routed_experts": 64,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
_DEEPSEEK_V3 = {
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
}  # fmt: skip
_GLM4 = {
    "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GLM4_LITE = {
    **_GLM4, "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
}  # fmt: skip
_SOLAR = {**_GLM4, "moe_intermediate_size": 1280, "first_k_dense_replace": 0}
_DOTS = {
    "moe_intermediate_size": 1408, "n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip


def _latent(
    config: Config,
    name: str,
    experts: ExpertSpec | None,
    sizes: Mapping[str, int] = _DEEPSEEK_V3,
    **kind: Any,
) -> ModelSpec:
    config.demand("attention_bias", False, "biases of latent attention are not modelled")
    config.demand("mlp_bias", False, "biases on the MLP alone are not modelled")
    latent = LatentAttention(
        kv_lora=config.integer("kv_lora_rank", default=512),
        q_lora=config.integer("q_lora_rank", default=sizes.get("q_lora_rank", 1536), null=0),
        nope_head_dim=config.integer("qk_nope_head_dim", default=sizes.get("qk_nope_head_dim", 128)),
        rope_head_dim=config.integer("qk_rope_head_dim", default=64),
        v_head_dim=config.integer("v_head_dim", default=sizes.get("v_head_dim", 128)),
    )
    heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", default=heads, null=heads) != heads:
        raise InputError(f"{config.where}: num_key_value_heads differs from num_attention_heads; latent "
                         "attention makes a key head for each query head")  # fmt: skip
    return gated_model(
        config, name, head_dim=latent.qk_head_dim, latent_attention=latent, experts=experts, **kind
    )


def _deepseek_v2(config: Config, name: str) -> ModelSpec:
    return _latent(config, name, _deepseek_experts(config, _DEEPSEEK_V2, _router(config)))


def _deepseek_v3(config: Config, name: str) -> ModelSpec:
    depths = config.integer("num_nextn_predict_layers", default=0)
    experts = _deepseek_experts(config, _DEEPSEEK_V3, "sigmoid", 2.5)
    return _latent(config, name, experts, mtp_layers=depths)


def _glm4_moe(config: Config, name: str) -> ModelSpec:
    return gated_model(
        config,
        name,
        kv_heads=8,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        experts=_deepseek_experts(config, _GLM4, "sigmoid"),
        mtp_layers=config.integer("num_nextn_predict_layers", default=0),
    )


def _glm4_lite(config: Config, name: str) -> ModelSpec:
    """Latent attention, and a list that tells dense layers from mixtures, which come after them."""
    listed = config.values.get("mlp_layer_types")
    dense = config.integer("first_k_dense_replace", default=1)
    if listed is not None:
        layers = config.integer("num_hidden_layers")
        dense = listed.count("dense") if isinstance(listed, list) else 0
        if listed != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise InputError(
                f"{config.where}: mlp_layer_types is not dense layers and then sparse ones, "
                f"{layers} in all, which alone are modelled"
            )
    told = Config({**config.values, "first_k_dense_replace": dense}, config.where)
    experts = _deepseek_experts(told, _GLM4_LITE, "sigmoid", 1.8)
    depths = config.integer("num_nextn_predict_layers", default=0)
    return _latent(config, name, experts, _GLM4_LITE, mtp_layers=depths)


def _dots(config: Config, name: str) -> ModelSpec:
    config.demand("attention_bias", False, "biases on the attention alone are not modelled")
    layers, kinds = config.integer("num_hidden_layers"), config.values.get("layer_types")
    windows = config.integer("sliding_window", default=4096, null=0) > 0
    some = kinds is None and windows and config.integer("max_window_layers", default=62) < layers
    if some or kinds not in (None, ["full_attention"] * layers):
        raise InputError(f"{config.where}: windows on some layers only are not modelled")
    experts = _deepseek_experts(config.usually(norm_topk_prob=False), _DOTS, "sigmoid")
    return gated_model(config, name, kv_heads=32, qk_norm=True, experts=experts)


def _solar_open(config: Config, name: str) -> ModelSpec:
    """All layers are mixtures; a shared expert is as wide as a routed one."""
    config.demand("attention_bias", False, "biases on the attention alone are not modelled")
    experts = _deepseek_experts(config, _SOLAR, "sigmoid")
    width = config.integer("moe_intermediate_size", default=_SOLAR["moe_intermediate_size"])
    whole = config.usually(intermediate_size=width)
    return gated_model(
        whole, name, kv_heads=8, head_dim=config.integer("head_dim", default=128), experts=experts
    )


EXPERT_READERS: Mapping[str, Callable[[Config, str], ModelSpec]] = MappingProxyType(
    {
        "mixtral": _mixtral,
        "qwen2_moe": _qwen2_moe,
        "qwen3": _qwen3_dense,
        "qwen3_moe": _qwen3_moe,
        "deepseek_v2": _deepseek_v2,
        "deepseek_v3": _deepseek_v3,
        "kimi_k2": _deepseek_v3,
        "glm4_moe": _glm4_moe,
        "glm4_moe_lite": _glm4_lite,
        "dots1": _dots,
        "solar_open": _solar_open,
    }
)
"""By `model_type`. Multi-token prediction counts where a config says so: transformers builds none of it."""
