"""Flags of megatron-core 0.19 that describe the model: the shape, not how it is spread."""

from __future__ import annotations

from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.frameworks.refusal import Refusal
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.training import TrainingSpec

VERSION = "0.19.2"
"""The megatron-core whose argument parser these flags are tested against."""


def model_refusals(model: ModelSpec) -> tuple[Refusal, ...]:
    """Parts of a model that megatron-core has no flag for."""
    found = []
    if model.parallel_block:
        found.append(
            Refusal(
                rule=f"megatron-core {VERSION} has no parallel attention + MLP block",
                got=f"{model.name} computes attention and MLP of a block in parallel",
                instead="--target deepspeed with the Hugging Face implementation of the model",
            )
        )
    known = (model.activation == "silu") if model.gated_mlp else (model.activation == "gelu")
    if not known:
        found.append(
            Refusal(
                rule=f"megatron-core {VERSION} has flags for SwiGLU and plain GELU only",
                got=f"{model.name} uses {'gated ' if model.gated_mlp else ''}{model.activation}",
                instead="--target deepspeed with the Hugging Face implementation of the model",
            )
        )
    if not model.final_norm:
        found.append(
            Refusal(
                rule="Megatron's GPT always ends with a norm",
                got=f"{model.name} has no final norm",
                instead="final_norm: true",
            )
        )
    return tuple(found)


def model_flags(model: ModelSpec, training: TrainingSpec) -> Flags:
    """Shape, norm, positions, biases, dropout."""
    grouped = model.kv_heads != model.heads
    return (
        flag("--num-layers", model.layers),
        flag("--hidden-size", model.hidden),
        flag("--ffn-hidden-size", model.ffn_hidden),
        flag("--num-attention-heads", model.heads),
        flag("--kv-channels", model.head_dim),
        *when(grouped, flag("--group-query-attention"), flag("--num-query-groups", model.kv_heads)),
        flag("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"),
        *when(model.gated_mlp, flag("--swiglu")),
        *when(not model.linear_bias, flag("--disable-bias-linear")),
        *when(model.qkv_bias and not model.linear_bias, flag("--add-qkv-bias")),
        *when(not model.tied_embeddings, flag("--untie-embeddings-and-output-weights")),
        *position_flags(model, training),
        flag("--seq-length", training.seq_len),
        flag("--hidden-dropout", training.dropout),
        flag("--attention-dropout", training.dropout),
    )


def position_flags(model: ModelSpec, training: TrainingSpec) -> Flags:
    """Rotary, a learned table, or none; Megatron wants max-position-embeddings >= seq-length for all."""
    kind = "rope" if model.rotary else "learned_absolute" if model.learned_positions else "none"
    rows = training.seq_len if model.rotary else max(model.learned_positions, training.seq_len)
    return (flag("--position-embedding-type", kind), flag("--max-position-embeddings", rows))


def vocabulary_divisor(vocab: int, tp: int) -> int:
    """Keep Megatron from padding the table beyond what the plan counts.

    It pads to a multiple of (divisor x TP). The divisor is the largest power of two up to Megatron's own 128
    that leaves the planned size as it is; where TP itself does not divide it, 1 pads least.
    """
    divisor = 128
    while divisor > 1 and vocab % (divisor * tp):
        divisor //= 2
    return divisor


def precision_flags(training: TrainingSpec) -> Flags:
    """fp8 is a layer on bf16: delayed scaling, the recipe every GPU with fp8 has."""
    if training.precision == "fp16":
        return (flag("--fp16"),)
    fp8 = when(training.precision == "fp8", flag("--fp8-format", "hybrid"), flag("--fp8-recipe", "delayed"))
    return (flag("--bf16"), *fp8)


def attention_flags(training: TrainingSpec) -> Flags:
    """`unfused` keeps the score matrix, which is what a plan without flash attention was priced with."""
    return (flag("--attention-backend", "flash" if training.flash_attention else "unfused"),)
