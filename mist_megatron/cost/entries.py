"""Layers between groups, attention to an encoder's output, and what of a layer that is not trained is left.

Widths that a layer has of other groups are numbers, being the model's; tokens are symbols of the layer's
kind: `s` for its own, `sx` for what it reads from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mist_megatron.cost.algebra import Expr, maximum, number
from mist_megatron.cost.cores import Softmax
from mist_megatron.cost.operators import ZERO, Operator, SavedTensor, Work, WorkKind
from mist_megatron.cost.shapes import ACTIVATION, FULL, HALF, KEY, QUERY, TOKENS, VOCAB_SHARE
from mist_megatron.cost.symbols import CP, HEAD_DIM, HEADS, HIDDEN, OUTSIDE, SP, TP, B, S
from mist_megatron.cost.works import collective_work, gemm_work, memory_work, products, weight_grad
from mist_megatron.spec.entry import EncoderOutput, Entry
from mist_megatron.spec.layer import LayerSpec

OUTSIDE_TOKENS: Expr = B * OUTSIDE / CP
OUTSIDE_ROWS: Expr = OUTSIDE_TOKENS / (1 + SP * (TP - 1))


def outside_bytes(source: Entry | EncoderOutput) -> Expr:
    """Of what a layer reads from outside, on one rank."""
    return HALF * OUTSIDE_ROWS * source.hidden


def entry_operators(layer: LayerSpec, statistics_bytes: int) -> tuple[Operator, ...]:
    """A layer with an entry, in the order in which it runs."""
    entry = layer.entry
    if entry is None:
        return ()
    operators: list[Operator] = []
    if entry.norm:
        operators.append(_entry_norm(layer, entry, statistics_bytes))
    if entry.projects:
        operators += _two_matrices(entry) if entry.inner else [_one_matrix(entry)]
    if entry.table != "none":
        operators.append(_lookup(own=entry.table == "own"))
    return tuple(operators)


def _entry_norm(layer: LayerSpec, entry: Entry, statistics_bytes: int) -> Operator:
    """Over each token, or over merged ones."""
    size = outside_bytes(entry)
    tokens = OUTSIDE_ROWS / (entry.merged if entry.norm_merged else 1)
    each = layer.norm_parameters // layer.hidden
    return Operator(
        name="entry_norm",
        forward=(memory_work("entry_norm_forward", 2 * size),),
        backward=(memory_work("entry_norm_backward", 3 * size, kernels=2),),
        saved=(
            SavedTensor(key="input", size_bytes=size),
            SavedTensor(key="entry_norm_statistics", size_bytes=statistics_bytes * tokens),
        ),
        parameters=number(each * entry.norm_width),
    )


def _read(entry: Entry) -> SavedTensor:
    """What the first matrix keeps."""
    key = "entry_normed" if entry.norm else "input"
    return SavedTensor(key=key, size_bytes=outside_bytes(entry), for_weight=True)


def _one_matrix(entry: Entry) -> Operator:
    """Whole on each tensor-parallel rank, which runs it over its rows."""
    forward, backward = products(
        "entry", OUTSIDE_ROWS / entry.merged, (HIDDEN, number(entry.merged_width)), eight_bit=False
    )
    return Operator(
        name="entry",
        forward=forward,
        backward=backward,
        saved=(_read(entry),),
        parameters=HIDDEN * entry.merged_width + (HIDDEN if entry.bias else ZERO),
    )


def _two_matrices(entry: Entry) -> list[Operator]:
    """Split over tensor-parallel ranks as an MLP is."""
    rows, inner = OUTSIDE_TOKENS / entry.merged, number(entry.inner) / TP
    wide, gathered = number(entry.merged_width), HALF * OUTSIDE_TOKENS * entry.hidden
    hidden = HALF * rows * inner
    into, out = (
        products(name, rows, columns, eight_bit=False)
        for name, columns in (("entry_in", (inner, wide)), ("entry_out", (HIDDEN, inner)))
    )
    given = HALF * rows * HIDDEN
    gather, scatter = WorkKind.ALL_GATHER, WorkKind.REDUCE_SCATTER
    return [
        Operator(
            name="entry_in",
            forward=(collective_work("entry_gather", gather, SP * gathered), *into[0]),
            backward=(
                *into[1],
                collective_work("entry_gather_again", gather, SP * gathered),
                collective_work("entry_scatter", scatter, SP * gathered),
                collective_work("entry_reduce", WorkKind.ALL_REDUCE, (1 - SP) * gathered),
            ),
            saved=(_read(entry),),
            parameters=inner * wide + (inner if entry.bias else ZERO),
        ),
        Operator(
            name="entry_activation",
            forward=(memory_work("entry_activation", 2 * hidden),),
            backward=(memory_work("entry_activation_backward", 3 * hidden),),
            saved=(SavedTensor(key="entry_hidden", size_bytes=hidden),),
        ),
        Operator(
            name="entry_out",
            forward=(
                *out[0],
                collective_work("entry_out_scatter", scatter, SP * given),
                collective_work("entry_out_reduce", WorkKind.ALL_REDUCE, (1 - SP) * given),
            ),
            backward=(*out[1], collective_work("entry_out_gather", gather, SP * given)),
            saved=(SavedTensor(key="entry_activated", size_bytes=hidden, for_weight=True),),
            parameters=inner * HIDDEN + (HIDDEN if entry.bias else ZERO),
        ),
    ]


def _lookup(*, own: bool) -> Operator:
    """Rows of a token table for all tokens of the output, as the embedding looks them up."""
    looked_up = HALF * TOKENS * HIDDEN
    return Operator(
        name="entry_table",
        forward=(
            memory_work("entry_table_forward", 2 * looked_up),
            collective_work("entry_table_scatter", WorkKind.REDUCE_SCATTER, SP * looked_up),
            collective_work("entry_table_reduce", WorkKind.ALL_REDUCE, (1 - SP) * looked_up),
        ),
        backward=(
            collective_work("entry_table_gather", WorkKind.ALL_GATHER, SP * looked_up),
            weight_grad(
                memory_work("entry_table_weight", 2 * looked_up + 6 * VOCAB_SHARE * HIDDEN, kernels=2)
            ),
        ),
        saved=(SavedTensor(key="entry_token_ids", size_bytes=8 * TOKENS),),
        parameters=VOCAB_SHARE * HIDDEN if own else ZERO,
    )


def cross_attention(
    source: EncoderOutput, softmax: Softmax | None, *, bias: bool, eight_bit: bool
) -> tuple[Operator, ...]:
    """From a normed input, gathered, to what the output projection reads: queries of the layer's own tokens,
    keys and values of the encoder's; fused where no softmax is given."""
    queries = products("cross_query", TOKENS, (QUERY, HIDDEN), eight_bit=eight_bit)
    width = number(source.hidden)
    both = products("cross_key_value", OUTSIDE_TOKENS, (2 * KEY, width), eight_bit=eight_bit)
    gathered = HALF * OUTSIDE_TOKENS * source.hidden
    return (
        Operator(
            name="cross_query",
            forward=queries[0],
            backward=queries[1],
            saved=(SavedTensor(key="cross_normed", size_bytes=ACTIVATION, for_weight=True),),
            parameters=QUERY * HIDDEN + (QUERY if bias else ZERO),
        ),
        Operator(
            name="cross_key_value",
            forward=(collective_work("cross_gather", WorkKind.ALL_GATHER, SP * gathered), *both[0]),
            backward=(
                *both[1],
                collective_work("cross_gather_again", WorkKind.ALL_GATHER, SP * gathered),
                collective_work("cross_scatter", WorkKind.REDUCE_SCATTER, SP * gathered),
                collective_work("cross_reduce", WorkKind.ALL_REDUCE, (1 - SP) * gathered),
                # Gradients of all decoder layers add up.
                memory_work("cross_added", 3 * outside_bytes(source)),
            ),
            parameters=2 * KEY * width + (2 * KEY if bias else ZERO),
        ),
        *(_flash_core() if softmax is None else _plain_core(softmax)),
    )


_PAIRS: Expr = S * OUTSIDE
CROSS_SCORES: Expr = HALF * B * (HEADS / TP) * _PAIRS / CP


def _core_inputs() -> tuple[SavedTensor, ...]:
    return (
        SavedTensor(key="cross_query", size_bytes=HALF * TOKENS * QUERY),
        SavedTensor(key="cross_key", size_bytes=HALF * OUTSIDE_TOKENS * KEY),
        SavedTensor(key="cross_value", size_bytes=HALF * OUTSIDE_TOKENS * KEY),
    )


def _flash_core() -> tuple[Operator, ...]:
    """Fused, priced as the share of a causal square of the longer side that its pairs are."""
    longer = maximum(S, OUTSIDE)
    share = _PAIRS / (longer * (longer + 1) / 2)
    full = 4 * B * (HEADS / TP) * _PAIRS * HEAD_DIM / CP
    size = (B, longer, HEADS / TP / CP, KEY / HEAD_DIM, HEAD_DIM)
    core = Work(
        name="cross_attention", kind=WorkKind.ATTENTION, flops=full, attention=size, pairs_share=share
    )
    back = replace(core, name="cross_attention_backward", flops=full * 5 / 2, kernels=3)
    return (
        Operator(
            name="cross_attention",
            forward=(core,),
            backward=(back,),
            saved=(
                *_core_inputs(),
                SavedTensor(key="cross_output", size_bytes=HALF * TOKENS * QUERY),
                SavedTensor(key="cross_log_sum", size_bytes=FULL * TOKENS * HEADS / TP, inner=True),
            ),
            part="attention_core",
        ),
    )


def _plain_core(softmax: Softmax) -> tuple[Operator, ...]:
    """Scores, softmax, weighted sum; the softmax is kept."""
    batch, scores = B * HEADS / TP, CROSS_SCORES
    passes, kernels = (5, 2) if softmax.dropped else (2, 1)
    rows = S / CP
    return (
        Operator(
            name="cross_scores",
            forward=(gemm_work("cross_scores", rows, OUTSIDE, HEAD_DIM, batch),),
            backward=(
                replace(gemm_work("cross_scores_query", rows, HEAD_DIM, OUTSIDE, batch), layout="nn"),
                replace(gemm_work("cross_scores_key", OUTSIDE, HEAD_DIM, rows, batch), layout="tn"),
            ),
            saved=_core_inputs()[:2],
            part="attention_core",
        ),
        Operator(
            name="cross_softmax",
            forward=(memory_work("cross_softmax", passes * scores, kernels=kernels),),
            backward=(memory_work("cross_softmax_backward", (passes + 1) * scores, kernels=kernels),),
            saved=softmax.saved("cross", scores),
            part="attention_core",
        ),
        Operator(
            name="cross_sum",
            forward=(replace(gemm_work("cross_sum", rows, HEAD_DIM, OUTSIDE, batch), layout="nn"),),
            backward=(
                gemm_work("cross_sum_scores", rows, OUTSIDE, HEAD_DIM, batch),
                replace(gemm_work("cross_sum_value", OUTSIDE, HEAD_DIM, rows, batch), layout="tn"),
            ),
            saved=_core_inputs()[2:],
            part="attention_core",
        ),
    )


def frozen(operators: Sequence[Operator], *, passes_back: bool) -> tuple[Operator, ...]:
    """Without gradients of weights, and without what was kept for them alone; without any backward pass where
    nothing before is trained: autograd records nothing there."""
    if not passes_back:
        return tuple(replace(operator, backward=(), saved=()) for operator in operators)
    return tuple(
        replace(
            operator,
            backward=tuple(
                work
                for work in operator.backward
                if not work.makes_weight_grad and not work.name.endswith("_bias")
            ),
            saved=tuple(kept for kept in operator.saved if not kept.for_weight),
        )
        for operator in operators
    )
