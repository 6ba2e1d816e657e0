"""Attention cores: from queries, keys and values to outputs of heads; how split sequences meet in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mist_megatron.cost.algebra import Expr, number
from mist_megatron.cost.latent import CORE_DIM, QUERY_WIDTH, VALUE_WIDTH, latent_core_inputs
from mist_megatron.cost.operators import Operator, SavedTensor, Work, WorkKind
from mist_megatron.cost.shapes import FULL, HALF, KEY, QUERY, SCORES, TOKENS
from mist_megatron.cost.symbols import (
    CP,
    HEAD_DIM,
    HEADS,
    INNER_CP,
    NOPE_DIM,
    ROPE_DIM,
    TP,
    VALUE_DIM,
    WINDOW,
    B,
    S,
)
from mist_megatron.cost.works import all_to_all, collective_work, gemm_work, memory_work
from mist_megatron.spec.kinds import ContextExchange
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.recompute import Part

CORE: Part = "attention_core"
TILE = 128
"""Rows of queries, and of keys, that kernels of fused attention take at once."""


@dataclass(frozen=True)
class Softmax:
    """What a softmax that is a kernel of its own, and the dropout after it, keep."""

    dropped: bool = False
    keeps_input: bool = False
    by_halves: bool = False

    def saved(self, prefix: str, scores: Expr) -> tuple[SavedTensor, ...]:
        """Of scores of so many bytes: what it gives, a mask of one byte each, and what is dropped of it."""
        sizes = {"softmax": scores}
        if self.keeps_input:
            sizes["softmax_input"] = scores
        if self.dropped:
            sizes |= {"mask": scores / (4 if self.by_halves else 2), "dropped": scores}
        return tuple(
            SavedTensor(key=f"{prefix}_{name}", size_bytes=size, inner=True) for name, size in sizes.items()
        )


def context_exchange(kind: ContextExchange, *, latent: bool = False) -> tuple[Operator, ...]:
    """What context-parallel ranks send each other."""
    both = whole_keys_bytes(latent=latent)
    match kind:
        case "p2p":
            return (_context_ring(both),)
        case "a2a":
            return (_heads_exchange(Group.CONTEXT, latent=latent),)
        case "all_gather":
            return (_context_gather(both),)
        case "a2a+p2p":
            return _heads_exchange(Group.HEADS, latent=latent), _context_ring(both / INNER_CP)


def _heads_exchange(group: Group, *, latent: bool) -> Operator:
    """Queries, keys and values go to the ranks of their heads and outputs come back, gradients the other way;
    nothing hides it. Transformer Engine keeps what came, in place of what was sent, and the outputs on both
    ends (AttnFuncWithCPAndQKVOA2A; AttnFuncWithCPAndKVP2P where rings follow)."""
    output = VALUE_WIDTH if latent else QUERY
    inputs = 2 * QUERY_WIDTH + VALUE_WIDTH if latent else QUERY + 2 * KEY
    there = all_to_all("context_heads", inputs, group)
    back = all_to_all("context_together", output, group)
    return Operator(
        name="context_heads",
        forward=(there, back),
        backward=(replace(back, name="context_together_back"), replace(there, name="context_heads_back")),
        saved=(SavedTensor(key="attention_output_apart", size_bytes=HALF * TOKENS * output),),
        part=CORE,
    )


def _context_ring(both: Expr) -> Operator:
    """Keys and values of the whole sequence pass by every rank of a ring, their gradients on the way back
    too; attention on the part at hand hides it as far as it lasts (priced in `stage.py`)."""
    return Operator(
        name="context_ring",
        forward=(collective_work("context_gather", WorkKind.ALL_GATHER, both, Group.RINGS),),
        backward=(
            collective_work("context_gather", WorkKind.ALL_GATHER, both, Group.RINGS),
            collective_work("context_scatter", WorkKind.REDUCE_SCATTER, both, Group.RINGS),
        ),
        part=CORE,
    )


def _context_gather(both: Expr) -> Operator:
    """Keys and values of the whole sequence are gathered before attention, again in the backward pass, whose
    gradients of all of them are then summed and shared out. Nothing runs beside it.

    Transformer Engine 2.5 (AttnFuncWithCPAndKVAllGather) puts what came into the order of the sequence and
    copies what each half of the queries attends to: all of it together, since a rank has a half from either
    end. Its gradients are zeroed, summed from both halves, and put back into the order of ranks."""
    gather = collective_work("context_gather", WorkKind.ALL_GATHER, both, Group.CONTEXT)
    return Operator(
        name="context_gathered",
        forward=(gather, memory_work("context_order", 4 * both, kernels=6)),
        backward=(
            replace(gather, name="context_gather_again"),
            memory_work("context_order_back", 12 * both, kernels=18),
            collective_work("context_scatter", WorkKind.REDUCE_SCATTER, both, Group.CONTEXT),
        ),
        part=CORE,
    )


def whole_keys_bytes(*, latent: bool = False) -> Expr:
    """Keys and values of the whole sequence."""
    return HALF * B * S * (QUERY_WIDTH + VALUE_WIDTH if latent else 2 * KEY)


def _attention_inputs(*, latent: bool = False) -> tuple[SavedTensor, ...]:
    if latent:
        return latent_core_inputs()
    return (
        SavedTensor(key="query", size_bytes=HALF * TOKENS * QUERY),
        SavedTensor(key="key", size_bytes=HALF * TOKENS * KEY),
        SavedTensor(key="value", size_bytes=HALF * TOKENS * KEY),
    )


def _pairs_share(layer: LayerSpec) -> Expr | None:
    """Pairs of tokens of which one sees the other, of those of causal attention; None for all of these."""
    if layer.attention == "causal" and layer.window is None:
        return None
    causal = S * (S + 1) / 2
    if in_blocks(layer):
        return 2 * WINDOW / (WINDOW + 1)
    if layer.attention == "full":
        return S * S / causal
    return (WINDOW * S - WINDOW * (WINDOW - 1) / 2) / causal


def _visited_share(layer: LayerSpec) -> Expr | None:
    """The same of the pairs that a kernel visits: each tile of keys of which any row of a tile of queries
    sees one, so that about half a tile is visited in vain at both ends of a window."""
    exact = _pairs_share(layer)
    if exact is None or layer.attention == "full":
        return exact
    causal = S * (S + 1) / 2
    return (exact * causal + TILE * (2 * S - WINDOW) / 2) / (causal + TILE * S / 2)


def in_blocks(layer: LayerSpec) -> bool:
    """Whether tokens see those of their own window and no others: windows of a Swin transformer or of
    Qwen2.5-VL's images, or images beside each other. Each is a short sequence of its own."""
    return layer.attention == "full" and layer.window is not None


def scores_of(layer: LayerSpec) -> Expr:
    """Bytes of its attention scores in half precision."""
    return HALF * B * (HEADS / TP) * S * WINDOW / CP if in_blocks(layer) else SCORES


def flash_attention(layer: LayerSpec, *, latent: bool = False) -> Operator:
    """Fused attention core: keeps its inputs, its output and one fp32 number per row and head."""
    heads, kv_heads = HEADS / TP, HEADS / TP if latent else KEY / HEAD_DIM
    width, output = (CORE_DIM, VALUE_WIDTH) if latent else (HEAD_DIM, QUERY)
    # Causal work is half of the full square; flop counters count the square, as here.
    full = 4 * B * heads * S * S * width / CP
    share, visited = _pairs_share(layer), _visited_share(layer)
    if layer.window is not None:
        full = full * (WINDOW / S if layer.attention == "full" or share is None else share)
    capped = None if layer.score_cap is None else number(1)
    # A context-parallel rank computes its share of the square: priced as that share of the heads.
    size: tuple[Expr, ...] = (B, S, heads / CP, kv_heads, width)
    if in_blocks(layer):
        size = (B * S / WINDOW, WINDOW, heads / CP, kv_heads, width)
    return Operator(
        name="attention",
        forward=(
            Work(
                name="attention",
                kind=WorkKind.ATTENTION,
                flops=full,
                attention=size,
                pairs_share=visited,
                capped=capped,
            ),
        ),
        backward=(
            Work(
                name="attention_backward",
                kind=WorkKind.ATTENTION,
                flops=full * 5 / 2,
                attention=size,
                pairs_share=visited,
                capped=capped,
                kernels=3,
            ),
        ),
        saved=(
            *_attention_inputs(latent=latent),
            # Whoever reads it keeps it too, so that it stays where the core runs again.
            SavedTensor(key="attention_output", size_bytes=HALF * TOKENS * output, inner=True),
            SavedTensor(key="core_log_sum", size_bytes=FULL * TOKENS * heads, inner=True),
        ),
        part=CORE,
    )


def _score_cap(scores: Expr) -> Operator:
    """What transformers' Gemma 2 does in separate kernels (modeling_gemma2.py): division, tanh, product, the
    mask added, scores widened for a softmax in 32 bits and rounded again, keys and values copied for each
    query head. Kept are the tanh, the wide softmax and the copies."""
    return Operator(
        name="score_cap",
        forward=(memory_work("score_cap", 12 * scores, kernels=6),),
        backward=(memory_work("score_cap_backward", 13 * scores, kernels=5),),
        saved=(
            SavedTensor(key="core_capped", size_bytes=scores, inner=True),
            SavedTensor(key="core_wide_softmax", size_bytes=2 * scores, inner=True),
            SavedTensor(key="core_copies", size_bytes=2 * HALF * TOKENS * (QUERY - KEY), inner=True),
        ),
        part=CORE,
    )


def plain_attention(
    softmax: Softmax, *, latent: bool = False, layer: LayerSpec | None = None
) -> tuple[Operator, ...]:
    """Scores, softmax, weighted sum as three operators; the scores are kept after the softmax."""
    batch, rows, keys, scores = B * HEADS / TP, S / CP, S, SCORES
    if layer is not None and in_blocks(layer):
        batch, rows, keys, scores = batch * S / WINDOW, WINDOW / CP, WINDOW, scores_of(layer)
    passes, kernels = (5, 2) if softmax.dropped else (2, 1)
    deep, wide = (NOPE_DIM + ROPE_DIM, VALUE_DIM) if latent else (HEAD_DIM, HEAD_DIM)
    return (
        Operator(
            name="scores",
            forward=(gemm_work("scores", rows, keys, deep, batch),),
            backward=(
                replace(gemm_work("scores_query", rows, deep, keys, batch), layout="nn"),
                replace(gemm_work("scores_key", keys, deep, rows, batch), layout="tn"),
            ),
            saved=_attention_inputs(latent=latent)[:2],
            part=CORE,
        ),
        *((_score_cap(scores),) if layer is not None and layer.score_cap is not None else ()),
        Operator(
            name="softmax",
            forward=(memory_work("softmax", passes * scores, kernels=kernels),),
            backward=(memory_work("softmax_backward", (passes + 1) * scores, kernels=kernels),),
            saved=softmax.saved("core", scores),
            part=CORE,
        ),
        Operator(
            name="weighted_sum",
            forward=(replace(gemm_work("weighted_sum", rows, wide, keys, batch), layout="nn"),),
            backward=(
                gemm_work("weighted_sum_scores", rows, keys, wide, batch),
                replace(gemm_work("weighted_sum_value", keys, wide, rows, batch), layout="tn"),
            ),
            saved=(
                _attention_inputs(latent=latent)[2],
                SavedTensor(
                    key="attention_output",
                    size_bytes=HALF * TOKENS * (VALUE_WIDTH if latent else QUERY),
                    for_weight=True,
                ),
            ),
            part=CORE,
        ),
    )
