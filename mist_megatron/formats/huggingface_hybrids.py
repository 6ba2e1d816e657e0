"""Readers of Hugging Face configs whose layers carry a state from token to token; see `huggingface`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.formats.huggingface_config import Config, gated_model
from mist_megatron.spec.experts import ExpertSpec, Router
from mist_megatron.spec.hybrid_presets import hybrid_model, qwen_next_groups
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.recurrent import CONV_WIDTH, DeltaNet, Mamba

_LETTERS: Mapping[str, str] = MappingProxyType(
    {
        "linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-",
        "moe": "E",
    }
)  # fmt: skip
"""Kinds of layers in a list, by their letters in a pattern."""
USUAL_PATTERN = "ME*-"
"""What transformers takes where a config says none."""


def _letters(config: Config, listed: str, patterned: str, default: str) -> str:
    """Layers, a letter each: from a list of their kinds, or from a pattern of older configs."""
    kinds, pattern = config.values.get(listed), config.values.get(patterned)
    if isinstance(kinds, list) and kinds:
        wrong = [kind for kind in kinds if kind not in _LETTERS]
        if wrong:
            raise InputError(
                f"{config.where}: {listed} holds {str(wrong[0])[:40]!r}; wanted {', '.join(_LETTERS)}"
            )
        return "".join(_LETTERS[kind] for kind in kinds)
    if kinds is not None:
        raise InputError(f"{config.where}: {listed} is {str(kinds)[:40]!r}; wanted a list of kinds of layers")
    if pattern is None:
        return default
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*-E"):
        raise InputError(f"{config.where}: {patterned} is {str(pattern)[:60]!r}; wanted letters of M * - E")
    return pattern


def _nemotron_h(config: Config, name: str) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        config.demand(key, False, "biases on parts of such a layer are not modelled")
    config.demand("use_conv_bias", True, "a convolution without bias is not modelled")
    config.refuse("sliding_window", "windows on some layers only are not modelled")
    if config.integer("conv_kernel", "mamba_d_conv", default=CONV_WIDTH) != CONV_WIDTH:
        raise InputError(f"{config.where}: conv_kernel is not {CONV_WIDTH}, which alone is modelled")
    letters = _letters(config, "layers_block_type", "hybrid_override_pattern", USUAL_PATTERN)
    depths = config.integer("num_nextn_predict_layers", default=0)
    heads = config.integer("num_attention_heads", default=32)
    shape = ModelSpec(
        name=name,
        family="llama",
        layers=1,
        hidden=config.integer("hidden_size", default=4096),
        ffn_hidden=config.integer("intermediate_size", default=21504),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=8, null=heads),
        head_dim=config.integer("head_dim", default=128),
        vocab=config.integer("vocab_size", default=131072),
        activation=config.activation("mlp_hidden_act", "relu2"),
        norm="rmsnorm",
        rotary=False,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        mtp_layers=depths,
    )
    mamba = Mamba(
        heads=config.integer("mamba_num_heads", default=128),
        head_dim=config.integer("mamba_head_dim", default=64),
        state=config.integer("ssm_state_size", default=128),
        groups=config.integer("n_groups", "mamba_n_groups", default=8),
    )
    depth = _letters(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern", "*E") if depths else ""
    if set(depth) - set(letters):
        raise InputError(
            f"{config.where}: depths of multi-token prediction have layers {depth}, of which the model's "
            f"{letters} has not all; wanted mtp_layers_block_type of its kinds"
        )
    experts = _nemotron_experts(config) if "E" in letters else None
    return hybrid_model(shape, letters, mamba, experts, depth=depth)


def _nemotron_experts(config: Config) -> ExpertSpec:
    config.demand("norm_topk_prob", True, "weights of experts that are not normed are not modelled")
    return ExpertSpec(
        count=config.integer("n_routed_experts", default=8),
        top_k=config.integer("num_experts_per_tok", default=2),
        ffn_hidden=config.integer("moe_intermediate_size", default=7688),
        shared_ffn_hidden=config.integer("moe_shared_expert_intermediate_size", default=7688),
        latent=config.integer("moe_latent_size", default=0, null=0),
        router="sigmoid",
        groups=config.integer("n_group", default=1),
        group_top_k=config.integer("topk_group", default=1),
        scaling=config.number("routed_scaling_factor", 1.0),
        balance_bias=True,
    )


def _qwen3_next(config: Config, name: str) -> ModelSpec:
    config.refuse("mlp_only_layers", "layers without experts at single places are not modelled")
    if config.integer("decoder_sparse_step", default=1) != 1:
        raise InputError(f"{config.where}: decoder_sparse_step is not 1, which is not modelled here")
    normed = config.flag("norm_topk_prob", True)
    experts = _qwen_experts(config, 512, 10, "softmax" if normed else "softmax_before_top_k")
    return _with_delta_nets(config, name, kv_heads=2, experts=experts)


def _qwen3_5_moe(config: Config, name: str) -> ModelSpec:
    """Without a width of dense layers, which it has none of."""
    experts = _qwen_experts(config, 256, 8, "softmax")
    whole = config.usually(intermediate_size=experts.ffn_hidden)
    return _with_delta_nets(whole, name, kv_heads=2, experts=experts)


def _qwen3_5(config: Config, name: str) -> ModelSpec:
    return _with_delta_nets(config, name, kv_heads=4)


def _qwen_experts(config: Config, count: int, top_k: int, router: Router) -> ExpertSpec:
    share = config.number("router_aux_loss_coef", 0.001)
    return ExpertSpec(
        count=config.integer("num_experts", default=count),
        top_k=config.integer("num_experts_per_tok", default=top_k),
        ffn_hidden=config.integer("moe_intermediate_size", default=512),
        shared_ffn_hidden=config.integer("shared_expert_intermediate_size", default=512),
        shared_gate=True,
        router=router,
        balance="aux_loss" if share else "none",
        balance_loss=share,
    )


def _with_delta_nets(config: Config, name: str, **kind: Any) -> ModelSpec:
    """Attention in each n-th layer; a depth of prediction is as the last layer, one that attends."""
    config.demand("attention_bias", False, "biases on the attention alone are not modelled")
    if config.integer("linear_conv_kernel_dim", default=CONV_WIDTH) != CONV_WIDTH:
        raise InputError(
            f"{config.where}: linear_conv_kernel_dim is not {CONV_WIDTH}, which alone is modelled"
        )
    net = DeltaNet(
        key_heads=config.integer("linear_num_key_heads", default=16),
        value_heads=config.integer("linear_num_value_heads", default=32),
        key_dim=config.integer("linear_key_head_dim", default=128),
        value_dim=config.integer("linear_value_head_dim", default=128),
    )
    head_dim = config.integer("head_dim", default=256)
    depths = config.integer("mtp_num_hidden_layers", default=0)
    model = gated_model(config, name, qk_norm=True, head_dim=head_dim, mtp_layers=depths, **kind)
    return qwen_next_groups(model, net, _full_attention_every(config, model.layers))


def _full_attention_every(config: Config, layers: int) -> int:
    """Each n-th layer attends, the last of each n."""
    every = config.integer("full_attention_interval", default=4)
    listed = config.values.get("layer_types")
    if isinstance(listed, list) and "full_attention" in listed:
        every = listed.index("full_attention") + 1
    if not 1 <= every <= max(layers, 1):
        raise InputError(
            f"{config.where}: full_attention_interval is {str(every)[:40]}; wanted 1 to the {layers} layers"
        )
    wanted = ["linear_attention" if (k + 1) % every else "full_attention" for k in range(layers)]
    if listed is not None and listed != wanted:
        raise InputError(
            f"{config.where}: layer_types are not in turns of one length; wanted each n-th layer of "
            "full_attention and linear_attention before it"
        )
    return every


HYBRID_READERS: Mapping[str, Callable[[Config, str], ModelSpec]] = MappingProxyType(
    {
        "nemotron_h": _nemotron_h,
        "qwen3_next": _qwen3_next,
        "qwen3_5_text": _qwen3_5,
        "qwen3_5_moe_text": _qwen3_5_moe,
    }
)
"""By `model_type`."""
