"""Flags of megatron-core 0.19 that describe the model: the shape, not how it is spread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mist_megatron.frameworks.findings import Refusal
from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.frameworks.megatron.block_configs import block_flags
from mist_megatron.frameworks.megatron.experts import (
    expert_flags,
    latent_attention_of,
    latent_flags,
    prediction_flags,
)
from mist_megatron.frameworks.megatron.hybrids import is_hybrid, scan_flags, unwritten_kinds
from mist_megatron.spec.constants import ModelConstants
from mist_megatron.spec.layer import kind_of
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.megatron_layers import by_block_configs

VERSION = "0.19.2"
"""The megatron-core whose argument parser these flags are tested against."""


def model_refusals(model: ModelSpec) -> tuple[Refusal, ...]:
    """Parts of a model that no flag is written for, beyond what its target's table says."""
    return (*_part_refusals(model), *_kind_refusals(model), *_constant_refusals(model))


def _kind_refusals(model: ModelSpec) -> list[Refusal]:
    """Layers that no flag is written for: of those that differ, some may have windows of one size, some
    experts of one kind, and some no positions. Sequences are of one chunk wherever there is a plan."""
    # What a model with kinds of its own says of its own shape is that of none of its layers.
    kinds = model.kinds if model.groups else (kind_of(model, "own"), *model.kinds)
    whole = [replace(k, half=None, mamba=None, delta_net=None, attention_gate=False) for k in kinds]
    same: dict[str, Any] = {"window": None, "chunk": None, "experts": None, "rotary": True}
    if by_block_configs(model):
        same["ffn_hidden"] = model.ffn_hidden
        whole = [replace(kind, kv_heads=kind.heads) for kind in whole]
    alike = {replace(kind, name="alike", **same) for kind in whole}
    windows, experts = (
        {kind.window for kind in kinds} - {None},
        {kind.experts for kind in model.kinds} - {None},
    )
    few = len(alike) == 1 and len(windows) <= 1 and len(experts) <= 1
    if few and kinds[0].attention == "causal" and not unwritten_kinds(model):
        return []
    return [
        Refusal(
            rule="flags are written for causal attention, layers that differ in having a window, experts, "
            "rotary positions or a delta net alone, layers of half a block, and dense layers of several "
            "widths and numbers of key-value heads",
            got=f"{model.name} has layers of kind {', '.join(kind.name for kind in model.kinds)}",
            instead="predict and simulate, which take its plans, and tune, which finds them",
        )
    ]


def _part_refusals(model: ModelSpec) -> list[Refusal]:
    """Parts that no flag is written for, so that another model would be trained."""
    refusals = []
    if model.mtp_layers and model.learned_positions:
        refusals.append(
            Refusal(
                rule="multi-token prediction takes rotary positions or none (A:856)",
                got=f"{model.name} has a table of positions and multi-token prediction",
                instead="rotary: true",
            )
        )
    unwritten = {
        "norms after attention and MLP": any(kind.post_norms for kind in model.kinds),
        "layers of several widths or tokens, images, or frozen layers": not model.plain,
        "a matrix before its output layer": model.head_transform,
    }
    refusals += [
        Refusal(
            rule="flags are written for models that pretrain_gpt builds",
            got=f"{model.name} has {part}",
            instead="predict --what-if and simulate, and --target deepspeed or torch",
        )
        for part, there in unwritten.items()
        if there
    ]
    experts = model.routed
    if experts is not None and experts.router_bias != model.linear_bias:
        refusals.append(
            Refusal(
                rule="Megatron's router has a trained bias where all other products have one (router.py:64)",
                got=f"{model.name} has router_bias {str(experts.router_bias).lower()} and linear_bias "
                f"{str(model.linear_bias).lower()}",
                instead="the same of both",
            )
        )
    return refusals


def _constant_refusals(model: ModelSpec) -> list[Refusal]:
    """Scalings of rotary positions that the command line of dense models cannot say."""
    kind, factor = model.constants.rotary_scaling, model.constants.rotary_factor
    if latent_attention_of(model) is not None:
        return _latent_constant_refusals(model)
    said = kind == "none" or (kind == "linear" and factor.is_integer())
    said = said or (kind == "llama3" and model.constants.rotary_high == 4.0)
    if said or not model.rotary or _turns_by_yarn(model):
        return []
    return [
        Refusal(
            rule=f"megatron-core {VERSION} has flags for llama3 (rotary_high 4) and whole linear scaling of "
            "rotary positions; of yarn those of GPT-OSS are known",
            got=f"{model.name} scales them by {kind} {factor:g}"
            + (f" and rotary_high {model.constants.rotary_high:g}" if kind == "llama3" else ""),
            instead="--target deepspeed with the Hugging Face implementation of the model",
        )
    ]


def has_sinks(model: ModelSpec) -> bool:
    """GPT-OSS, the one family that has them."""
    return any(kind.sinks for kind in model.kinds)


def _turns_by_yarn(model: ModelSpec) -> bool:
    """From which length on is no constant of ours: of GPT-OSS it is known."""
    return has_sinks(model) and model.constants.rotary_scaling == "yarn"


def _latent_constant_refusals(model: ModelSpec) -> list[Refusal]:
    """Latent attention rotates its common key whole, by yarn."""
    constants = model.constants
    if model.rotary and constants.rotary_scaling in ("none", "yarn") and constants.rotary_share == 1.0:
        return []
    return [
        Refusal(
            rule="latent attention has flags for rotary positions of all its columns for them, by yarn or "
            "not scaled",
            got=f"{model.name} has {'' if model.rotary else 'no '}rotary positions of "
            f"{constants.rotary_share:.0%}, scaled by {constants.rotary_scaling}",
            instead="rotary: true, rotary_share: 1 and rotary_scaling: yarn or none",
        )
    ]


SINK_FLAGS: Flags = (
    flag("--softmax-type", "learnable"),
    flag("--quick-geglu"),
    flag("--glu-linear-offset", 1.0),
    flag("--activation-func-clamp-value", 7.0),
)
"""A learned addend of each head's softmax, and x sigmoid(1.702 x) (y + 1) of what is clamped at 7
(GptOssAttention and GptOssExperts of transformers)."""
YARN_FLAGS: Flags = (
    flag("--yarn-original-max-position-embeddings", 4096),
    flag("--yarn-beta-fast", 32.0),
    flag("--yarn-beta-slow", 1.0),
    flag("--no-yarn-correction-range-round-to-int"),
)
"""The rope_scaling of GPT-OSS's config."""


def own_shape(model: ModelSpec) -> ModelSpec:
    """The model with the width and the key-value heads of one of its layers for its own, which flags say."""
    widths = [model.kinds[place].ffn_hidden for place in model.kind_of_layer if model.kinds[place].has_mlp]
    groups = [model.kinds[place].kv_heads for place in model.kind_of_layer if model.kinds[place].attends]
    return replace(
        model,
        ffn_hidden=model.ffn_hidden if model.ffn_hidden in widths or not widths else widths[0],
        kv_heads=model.kv_heads if model.kv_heads in groups or not groups else groups[0],
    )


def model_flags(model: ModelSpec, training: TrainingSpec) -> Flags:
    """Shape, norm, positions, biases, dropout, initialisation."""
    model = own_shape(model)
    grouped = model.kv_heads != model.heads or by_block_configs(model)
    hidden_dropout, attention_dropout = dropouts(model, training)
    latent = latent_attention_of(model)
    return (
        flag("--num-layers", model.layers),
        flag("--hidden-size", model.hidden),
        flag("--ffn-hidden-size", model.ffn_hidden),
        flag("--num-attention-heads", model.heads),
        flag("--kv-channels", model.head_dim if latent is None else latent.v_head_dim),
        *when(grouped, flag("--group-query-attention"), flag("--num-query-groups", model.kv_heads)),
        flag("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"),
        flag("--norm-epsilon", model.constants.norm_epsilon),
        *when((model.qk_norm and model.qk_norm_weights) or latent is not None, flag("--qk-layernorm")),
        *when(model.qk_norm and not model.qk_norm_weights, flag("--qk-l2-norm")),
        *when(model.gated_mlp and not has_sinks(model), flag("--swiglu")),
        *when(has_sinks(model), *SINK_FLAGS),
        *when(model.activation == "squared_relu", flag("--squared-relu")),
        *when(not model.linear_bias, flag("--disable-bias-linear")),
        *when(model.qkv_bias and not model.linear_bias, flag("--add-qkv-bias")),
        *when(not model.tied_embeddings, flag("--untie-embeddings-and-output-weights")),
        *position_flags(model, training),
        flag("--seq-length", training.seq_len),
        *window_flags(model, training),
        flag("--hidden-dropout", hidden_dropout),
        flag("--attention-dropout", attention_dropout),
        flag("--init-method-std", model.constants.init_std),
        *latent_flags(model),
        *expert_flags(model),
        *prediction_flags(model),
        *scan_flags(model),
        *block_flags(model),
    )


def dropouts(model: ModelSpec, training: TrainingSpec) -> tuple[float, float]:
    """After attention and MLP, and inside attention: the model's own two, unless the job says another."""
    constants = model.constants
    if training.dropout == constants.dropout:
        return constants.hidden_dropout, constants.attention_dropout
    return training.dropout, training.dropout


def window_flags(model: ModelSpec, training: TrainingSpec) -> Flags:
    """The window, and which layers have it: all, all but each n-th, or a list."""
    windows = [kind.window for kind in model.kinds if kind.window is not None]
    if not windows or windows[0] >= training.seq_len:
        return ()
    # The first number counts the tokens before the current one.
    size = flag("--window-size", f"{windows[0] - 1},0")
    has = [int(model.kinds[place].window is not None) for place in model.kind_of_layer]
    if all(has):
        return (size,)
    each = has.index(0) + 1
    in_turns = has == [int(layer % each != 0) for layer in range(1, model.layers + 1)]
    return size, flag("--window-attn-skip-freq", each if in_turns else str(has).replace(" ", ""))


def unrotated_flags(model: ModelSpec) -> Flags:
    """Which layers have no rotary positions: each n-th, or a list."""
    without = [int(not model.kinds[place].rotary) for place in model.kind_of_layer]
    if not any(without) or is_hybrid(model):
        return ()
    each = without.index(1) + 1
    in_turns = model.layers % each == 0 and without == [
        int(layer % each == 0) for layer in range(1, model.layers + 1)
    ]
    return (flag("--no-rope-freq", each if in_turns and each > 1 else str(without).replace(" ", "")),)


def windowed_attention(model: ModelSpec, training: TrainingSpec) -> bool:
    """Whether layers have a window that is shorter than the sequence: a longer one does nothing."""
    return any(kind.window is not None and kind.window < training.seq_len for kind in model.kinds)


def position_flags(model: ModelSpec, training: TrainingSpec) -> Flags:
    """Rotary, a learned table, or none; Megatron wants max-position-embeddings >= seq-length for all."""
    kind = "rope" if model.rotary else "learned_absolute" if model.learned_positions else "none"
    rows = training.seq_len if model.rotary else max(model.learned_positions, training.seq_len)
    return (
        flag("--position-embedding-type", "yarn" if _turns_by_yarn(model) else kind),
        flag("--max-position-embeddings", rows),
        *when(model.rotary, *rotary_flags(model.constants), *unrotated_flags(model)),
        *when(
            _turns_by_yarn(model),
            flag("--rotary-scaling-factor", model.constants.rotary_factor),
            *YARN_FLAGS,
        ),
    )


def rotary_flags(constants: ModelConstants) -> Flags:
    """Base, share of a head and scaling: all said, since a default is another model."""
    kind, factor = constants.rotary_scaling, constants.rotary_factor
    return (
        flag("--rotary-base", constants.rotary_base),
        flag("--rotary-percent", constants.rotary_share),
        *when(kind == "llama3", flag("--use-rope-scaling"), flag("--rope-scaling-factor", factor)),
        *when(kind == "linear", flag("--rotary-seq-len-interpolation-factor", f"{factor:.0f}")),
    )


def attention_backend(model: ModelSpec, training: TrainingSpec) -> str:
    """`unfused` keeps the score matrix, which is what a plan without flash attention was priced with. Heads
    whose values are narrower than their keys are cuDNN's `fused`, and so are sinks: flash-attn 2 takes
    neither."""
    if not training.flash_attention:
        return "unfused"
    return "fused" if has_sinks(model) or latent_attention_of(model) is not None else "flash"


def attention_flags(model: ModelSpec, training: TrainingSpec) -> Flags:
    """Which kernels attention runs in."""
    return (flag("--attention-backend", attention_backend(model, training)),)
