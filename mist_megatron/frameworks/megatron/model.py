"""Flags of megatron-core 0.19 that describe the model: the shape, not how it is spread."""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.frameworks.refusal import Refusal
from mist_megatron.spec.constants import ModelConstants
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.training import TrainingSpec

FP8_HISTORY = 1024
VERSION = "0.19.2"
"""The megatron-core whose argument parser these flags are tested against."""


def model_refusals(model: ModelSpec) -> tuple[Refusal, ...]:
    """Parts of a model that no flag is written for, beyond what its target's table says."""
    return (*_part_refusals(model), *_kind_refusals(model), *_constant_refusals(model))


def _kind_refusals(model: ModelSpec) -> list[Refusal]:
    """Layers that no flag is written for: of those that differ, windows of one size on some are."""
    alike = {replace(kind, name="alike", window=None) for kind in model.kinds}
    windows = {kind.window for kind in model.kinds} - {None}
    if len(alike) == 1 and len(windows) <= 1 and model.kinds[0].attention == "causal":
        return []
    return [
        Refusal(
            rule="flags are written for causal attention, and layers that differ in having a window alone",
            got=f"{model.name} has layers of kind {', '.join(kind.name for kind in model.kinds)}",
            instead="predict and simulate, which take its plans, and tune, which finds them",
        )
    ]


def _part_refusals(model: ModelSpec) -> list[Refusal]:
    """Parts that no flag is written for, so that another model would be trained."""
    parts = {
        "experts": model.experts is not None,
        "latent attention": model.latent_attention is not None,
        "attention sinks": model.sinks,
        "multi-token prediction": model.mtp_layers > 0,
    }
    return [
        Refusal(
            rule="flags are written for attention and one MLP per layer",
            got=f"{model.name} has {part}",
            instead="a model without it",
        )
        for part, there in parts.items()
        if there
    ]


def _constant_refusals(model: ModelSpec) -> list[Refusal]:
    """Scalings of rotary positions that the command line of dense models cannot say."""
    kind, factor = model.constants.rotary_scaling, model.constants.rotary_factor
    said = kind in ("none", "llama3") or (kind == "linear" and factor.is_integer())
    if said or not model.rotary:
        return []
    return [
        Refusal(
            rule=f"megatron-core {VERSION} has flags for llama3 and whole linear scaling of rotary positions",
            got=f"{model.name} scales them by {kind} {factor:g}",
            instead="--target deepspeed with the Hugging Face implementation of the model",
        )
    ]


def model_flags(model: ModelSpec, training: TrainingSpec) -> Flags:
    """Shape, norm, positions, biases, dropout, initialisation."""
    grouped = model.kv_heads != model.heads
    hidden_dropout, attention_dropout = dropouts(model, training)
    return (
        flag("--num-layers", model.layers),
        flag("--hidden-size", model.hidden),
        flag("--ffn-hidden-size", model.ffn_hidden),
        flag("--num-attention-heads", model.heads),
        flag("--kv-channels", model.head_dim),
        *when(grouped, flag("--group-query-attention"), flag("--num-query-groups", model.kv_heads)),
        flag("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"),
        flag("--norm-epsilon", model.constants.norm_epsilon),
        *when(model.qk_norm, flag("--qk-layernorm")),
        *when(model.gated_mlp, flag("--swiglu")),
        *when(not model.linear_bias, flag("--disable-bias-linear")),
        *when(model.qkv_bias and not model.linear_bias, flag("--add-qkv-bias")),
        *when(not model.tied_embeddings, flag("--untie-embeddings-and-output-weights")),
        *position_flags(model, training),
        flag("--seq-length", training.seq_len),
        *window_flags(model, training),
        flag("--hidden-dropout", hidden_dropout),
        flag("--attention-dropout", attention_dropout),
        flag("--init-method-std", model.constants.init_std),
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


def windowed_attention(model: ModelSpec, training: TrainingSpec) -> bool:
    """Whether layers have a window that is shorter than the sequence: a longer one does nothing."""
    return any(kind.window is not None and kind.window < training.seq_len for kind in model.kinds)


def position_flags(model: ModelSpec, training: TrainingSpec) -> Flags:
    """Rotary, a learned table, or none; Megatron wants max-position-embeddings >= seq-length for all."""
    kind = "rope" if model.rotary else "learned_absolute" if model.learned_positions else "none"
    rows = training.seq_len if model.rotary else max(model.learned_positions, training.seq_len)
    return (
        flag("--position-embedding-type", kind),
        flag("--max-position-embeddings", rows),
        *when(model.rotary, *rotary_flags(model.constants)),
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


def precision_flags(training: TrainingSpec) -> Flags:
    """fp8 is a layer on bf16: delayed scaling, the recipe every GPU with fp8 has, as NVIDIA's recipes use it:
    the largest of the last 1,024 values. Megatron's own default is the most recent one alone."""
    if training.precision == "fp16":
        return (flag("--fp16"),)
    fp8 = when(
        training.precision == "fp8",
        flag("--fp8-format", "hybrid"),
        flag("--fp8-recipe", "delayed"),
        flag("--fp8-amax-history-len", FP8_HISTORY),
        flag("--fp8-amax-compute-algo", "max"),
    )
    return (flag("--bf16"), *fp8)


def attention_flags(training: TrainingSpec) -> Flags:
    """`unfused` keeps the score matrix, which is what a plan without flash attention was priced with."""
    return (flag("--attention-backend", "flash" if training.flash_attention else "unfused"),)
