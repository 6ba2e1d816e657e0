"""Latent attention (DeepSeek-V2) and norms of query and key heads, as megatron-core 0.19 has them
(multi_latent_attention.py, attention.py)."""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.cost.algebra import Expr
from mist_megatron.cost.operators import ZERO, Operator, SavedTensor, WorkKind
from mist_megatron.cost.shapes import ACTIVATION, FULL, HALF, KEY, QUERY, ROWS, TOKENS
from mist_megatron.cost.symbols import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_LATENT,
    NOPE_DIM,
    Q_LATENT,
    ROPE_DIM,
    SP,
    TP,
    VALUE_DIM,
)
from mist_megatron.cost.works import collective_work, memory_work, products, summed_gradients
from mist_megatron.spec.experts import LatentAttention

QUERY_WIDTH: Expr = HEADS * (NOPE_DIM + ROPE_DIM) / TP
"""Columns of this rank's query heads; its key heads have as many."""
VALUE_WIDTH: Expr = HEADS * VALUE_DIM / TP
KV_UP_WIDTH: Expr = HEADS * (NOPE_DIM + VALUE_DIM) / TP
CORE_DIM: Expr = (NOPE_DIM + ROPE_DIM + VALUE_DIM) / 2
"""Width of a head whose two products are as much work: scores over query columns, sums over value columns."""


def latent_inputs(
    latent: LatentAttention, statistics_bytes: int, *, eight_bit: bool, fused_rotary: bool = True
) -> tuple[Operator, ...]:
    """From the normed input to queries, keys and values. Matrices down to the latents lie whole on every
    tensor-parallel rank, which runs them over its own rows; only latents are gathered."""
    kv_down = _down("kv_down", KV_LATENT + ROPE_DIM, "kv_latent", eight_bit)
    # Queries are made of the same rows.
    summed = summed_gradients("normed1", 2, ROWS * HIDDEN)
    kv_down = replace(kv_down, backward=(*kv_down.backward, *summed))
    kv_norm = _latent_norm("kv_norm", KV_LATENT, statistics_bytes)
    kv_up = _up("kv_up", (KV_UP_WIDTH, KV_LATENT), "kv_latent_normed", eight_bit)
    queries: tuple[Operator, ...]
    if latent.q_lora:
        queries = (
            _down("q_down", Q_LATENT, "q_latent", eight_bit),
            _latent_norm("q_norm", Q_LATENT, statistics_bytes),
            _gather("q_gather", Q_LATENT),
            _up("q_up", (QUERY_WIDTH, Q_LATENT), "q_latent_normed", eight_bit),
        )
    else:
        queries = (_gather("q_gather", HIDDEN), _up("q_up", (QUERY_WIDTH, HIDDEN), "normed1", eight_bit))
    rotated = _rotated() if fused_rotary else _rotated_apart()
    return (*queries, kv_down, kv_norm, _gather("kv_gather", KV_LATENT + ROPE_DIM), kv_up, rotated)


def _down(name: str, wide: Expr, keeps: str, eight_bit: bool) -> Operator:
    """Keeps its input, and its result for the norm that reads it."""
    forward, backward = products(name, ROWS, (wide, HIDDEN), eight_bit=eight_bit)
    return Operator(
        name=name,
        forward=forward,
        backward=backward,
        saved=(
            SavedTensor(key="normed1", size_bytes=ACTIVATION, for_weight=True),
            SavedTensor(key=keeps, size_bytes=HALF * ROWS * wide),
        ),
        parameters=wide * HIDDEN,
    )


def _latent_norm(name: str, wide: Expr, statistics_bytes: int) -> Operator:
    one = HALF * ROWS * wide
    return Operator(
        name=name,
        forward=(memory_work(f"{name}_forward", 2 * one),),
        backward=(memory_work(f"{name}_backward", 3 * one, kernels=2),),
        saved=(SavedTensor(key=f"{name}_statistics", size_bytes=statistics_bytes * ROWS),),
        parameters=wide,
    )


def _gather(name: str, wide: Expr) -> Operator:
    """Rows of a latent that sequence parallelism splits."""
    whole = SP * HALF * TOKENS * wide
    return Operator(
        name=name,
        forward=(collective_work(name, WorkKind.ALL_GATHER, whole),),
        backward=(
            collective_work(f"{name}_again", WorkKind.ALL_GATHER, whole),
            collective_work(f"{name}_scatter", WorkKind.REDUCE_SCATTER, whole),
            collective_work(f"{name}_reduce", WorkKind.ALL_REDUCE, (1 - SP) * HALF * TOKENS * wide),
        ),
    )


def _up(name: str, columns: tuple[Expr, Expr], reads: str, eight_bit: bool) -> Operator:
    forward, backward = products(name, TOKENS, columns, eight_bit=eight_bit)
    wide, deep = columns
    # A latent is kept as the norm gave it, before rows are gathered.
    read = ACTIVATION if reads == "normed1" else HALF * ROWS * deep
    kept = SavedTensor(key=reads, size_bytes=read, for_weight=True)
    return Operator(name=name, forward=forward, backward=backward, saved=(kept,), parameters=wide * deep)


def _rotated() -> Operator:
    """Rotates the common key and the queries' part of it, and puts heads together; made anew, so that their
    own storages are kept by the attention core."""
    moved = 2 * HALF * TOKENS * (2 * QUERY_WIDTH)
    return Operator(
        name="latent_rotary",
        forward=(memory_work("latent_rotary_forward", moved, kernels=4),),
        backward=(memory_work("latent_rotary_backward", moved, kernels=4),),
    )


def _rotated_apart() -> Operator:
    """The same where no kernel does it at once: Megatron has one for YaRN's positions alone. On megatron-core
    0.19.2 (rope_utils.py, multi_latent_attention.py; 16 heads of 128 and 64 columns) these are 29 and 23
    operators, and 11 and 12 times a pass over the queries. Three such small ones keep the host as long as one
    kernel with all around it: recomputing what is rotated costs Moonlight 0.85 ms a layer (0.457 -> 0.480 s,
    Megatron-Bridge's skill on recomputation), of which the other kernels take 0.25 ms."""
    query = HALF * TOKENS * QUERY_WIDTH
    return Operator(
        name="latent_rotary",
        forward=(memory_work("latent_rotary_forward", 11 * query, kernels=10),),
        backward=(memory_work("latent_rotary_backward", 12 * query, kernels=8),),
    )


def latent_core_inputs() -> tuple[SavedTensor, ...]:
    """Kept by the attention core."""
    return (
        SavedTensor(key="query", size_bytes=HALF * TOKENS * QUERY_WIDTH),
        SavedTensor(key="key", size_bytes=HALF * TOKENS * QUERY_WIDTH),
        SavedTensor(key="value", size_bytes=HALF * TOKENS * VALUE_WIDTH),
    )


def head_norms(statistics_bytes: int, *, weights: bool = True) -> Operator:
    """RMSNorm or LayerNorm over each query and key head: keeps them as they were before it."""
    moved = HALF * TOKENS * (QUERY + KEY)
    return Operator(
        name="head_norms",
        forward=(memory_work("head_norms_forward", 2 * moved, kernels=2),),
        backward=(memory_work("head_norms_backward", 3 * moved, kernels=4),),
        saved=(
            SavedTensor(key="query_key_unnormed", size_bytes=moved),
            SavedTensor(
                key="head_norms_statistics", size_bytes=statistics_bytes * TOKENS * (QUERY + KEY) / HEAD_DIM
            ),
        ),
        parameters=2 * HEAD_DIM if weights else ZERO,
    )


def sinks() -> Operator:
    """One trained number per query head; its work is lost in the core's."""
    return Operator(
        name="sinks",
        forward=(),
        backward=(memory_work("sinks_backward", FULL * TOKENS * HEADS / TP),),
        parameters=HEADS / TP + ZERO,
    )
