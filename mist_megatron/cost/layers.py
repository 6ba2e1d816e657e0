"""Layer graphs: what a transformer block, the embedding and the head compute, move and keep.

One builder for GPT, LLaMA, Falcon and any mix of their options; nothing is written per family. A layer is a
tuple of operators in forward order, each made by one small function below from the sizes of `shapes.py`. To
add an operator, write such a function and put it where it runs in `block`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sympy import Expr, Integer

from mist_megatron.cost.operators import ZERO, Operator, SavedTensor, Work, WorkKind
from mist_megatron.cost.shapes import (
    ACTIVATION,
    EIGHTH,
    FULL,
    GATHERED,
    HALF,
    INNER,
    KEY,
    QUERY,
    ROWS,
    SCORES,
    TOKENS,
    VOCAB_SHARE,
)
from mist_megatron.cost.symbols import CP, HEAD_DIM, HEADS, HIDDEN, SP, TP, WINDOW, B, S
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.recompute import RECOMPUTES, Part, Recompute

ONE = Integer(1)
CORE: Part = "attention_core"


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What of an implementation changes bytes or kernels."""

    flash_attention: bool = True
    dropout: bool = False
    norm_statistics_bytes: int | None = None
    """Per token and norm; None: 8 for LayerNorm (mean and 1/std in fp32), 4 for RMSNorm."""
    fused_cross_entropy: bool = True
    eight_bit: bool = False
    """Transformer Engine's FP8: products of the projections inside a block have 8-bit operands. Attention and
    logits stay in 16 bits: fp8_dpa is off by default, and Megatron's output layer is none of the engine's."""


def block(model: LayerSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """One transformer layer of that shape."""
    attention = (
        *_projection_in(
            "qkv",
            (QUERY + 2 * KEY, HIDDEN),
            bias=model.qkv_bias or model.linear_bias,
            saves="normed1",
            eight_bit=options.eight_bit,
        ),
        *((_rotary(),) if model.rotary else ()),
        _context_ring(),
        *(_flash_attention(model),) * options.flash_attention,
        *(() if options.flash_attention else _plain_attention(options)),
        *_projection_out(
            "attention_out",
            (HIDDEN, QUERY),
            bias=model.linear_bias,
            saves="attention_output",
            eight_bit=options.eight_bit,
        ),
    )
    gates = 2 if model.gated_mlp else 1
    # A parallel block with one norm feeds attention and MLP from the same tensor, kept once.
    shared = model.parallel_block and model.parallel_norms == 1
    mlp = (
        *_projection_in(
            "mlp_in",
            (gates * INNER, HIDDEN),
            bias=model.linear_bias,
            saves="normed1" if shared else "normed2",
            eight_bit=options.eight_bit,
        ),
        _activation(model, gates),
        *_projection_out(
            "mlp_out",
            (HIDDEN, INNER),
            bias=model.linear_bias,
            saves="activated",
            eight_bit=options.eight_bit,
        ),
    )
    if model.parallel_block:
        # Attention and MLP are added before the one reduction over tensor-parallel ranks.
        entry = _parallel_entry(model, options)
        return (*entry, *attention, *mlp, _reduce("reduce1"), _residual("residual", options))
    return (
        _norm("norm1", model, options, reads="input"),
        _gather("gather1"),
        *attention,
        _reduce("reduce1"),
        _residual("residual1", options),
        _norm("norm2", model, options, reads="middle"),
        _gather("gather2"),
        *mlp,
        _reduce("reduce2"),
        _residual("residual2", options),
    )


def _parallel_entry(model: LayerSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Norms of a block whose attention and MLP stand side by side. Two norms make two tensors that enter the
    tensor-parallel region. One makes one, whose gradients are added before they are reduced; but under
    sequence parallelism each linear module gathers it for itself, so that it keeps only its rows."""
    first = (_norm("norm1", model, options, reads="input"), _gather("gather1"))
    if model.parallel_norms == 1:
        return (*first, _gather("gather2", SP))
    return (*first, _norm("norm2", model, options, reads="input"), _gather("gather2"))


def embedding(model: ModelSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Token table (rows split over tensor-parallel ranks), learned positions, dropout."""
    looked_up = HALF * TOKENS * HIDDEN
    # The gradient is scattered into a table of its own, then added to the accumulated one.
    scattered = _memory("embedding_weight", 2 * looked_up + 6 * VOCAB_SHARE * HIDDEN, kernels=2)
    lookup = Operator(
        name="embedding",
        forward=(_memory("embedding_forward", 2 * looked_up),),
        backward=(_weight_grad(scattered),),
        saved=(SavedTensor(key="token_ids", size_bytes=8 * TOKENS),),
        parameters=VOCAB_SHARE * HIDDEN,
    )
    operators = [lookup, _reduce("embedding_reduce")]
    if model.learned_positions:
        operators.append(
            Operator(
                name="positions",
                forward=(_memory("positions_forward", 3 * ACTIVATION),),
                backward=(_weight_grad(_memory("positions_weight", 2 * ACTIVATION)),),
                parameters=model.learned_positions * HIDDEN,
            )
        )
    if options.dropout:
        operators.append(_dropout("embedding_dropout"))
    return tuple(operators)


def head(model: ModelSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Final norm, logits of this rank's part of the vocabulary, cross entropy."""
    logits = TOKENS * VOCAB_SHARE
    norm = (_norm("final_norm", model, options, reads="head_input"),) if model.final_norm else ()
    projection = _projection_in("logits", (VOCAB_SHARE, HIDDEN), bias=False, saves="normed_head")
    # Passes over the logits: to fp32, maximum, exponent and sum, division; fused ones read them once less.
    passes = 10 if options.fused_cross_entropy else 16
    loss = Operator(
        name="cross_entropy",
        forward=(
            _memory("cross_entropy_forward", passes * logits, kernels=4),
            _collective("cross_entropy_reduce", WorkKind.ALL_REDUCE, FULL * TOKENS),
            _collective("cross_entropy_reduce", WorkKind.ALL_REDUCE, FULL * TOKENS),
            _collective("cross_entropy_reduce", WorkKind.ALL_REDUCE, FULL * TOKENS),
        ),
        backward=(_memory("cross_entropy_backward", 10 * logits, kernels=2),),
        saved=(SavedTensor(key="softmax", size_bytes=FULL * logits),),
    )
    return (*norm, _gather("head_gather"), *projection, loss)


def unneeded_again(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """What a recomputation may leave out that stops when it has all that backward needs: the last matrix
    product, whose input is the last thing saved, and what follows. Dropout after it saves a mask, for which
    the product is needed."""
    last = max(index for index, operator in enumerate(operators) if operator.saved)
    inputs_saved = any(work.kind is WorkKind.GEMM for work in operators[last].forward)
    return operators[last:] if inputs_saved else ()


def saved_bytes(operators: tuple[Operator, ...], recompute: Recompute = "full") -> Expr:
    """Bytes kept for backward by a layer that is not run again in whole: distinct storages, without what
    parts hold alone that this kind of recomputation drops."""
    sizes: dict[str, Expr] = {}
    for operator in operators:
        dropped = operator.part in RECOMPUTES[recompute].drops
        for tensor in operator.saved:
            if not (dropped and tensor.inner):
                sizes[tensor.key] = tensor.size_bytes
    return sum(sizes.values(), start=ZERO)


def parameters(operators: tuple[Operator, ...]) -> Expr:
    """Trainable elements on one tensor-parallel rank."""
    return sum((operator.parameters for operator in operators), start=ZERO)


def forward_flops(operators: tuple[Operator, ...]) -> Expr:
    """FLOPs of matrix products and attention in the forward pass."""
    return sum((work.flops for operator in operators for work in operator.forward), start=ZERO)


def backward_flops(operators: tuple[Operator, ...]) -> Expr:
    """The same in the backward pass, nothing recomputed."""
    return sum((work.flops for operator in operators for work in operator.backward), start=ZERO)


def _memory(name: str, moved: Expr, kernels: int = 1) -> Work:
    return Work(name=name, kind=WorkKind.MEMORY, moved_bytes=moved, kernels=kernels)


def _collective(name: str, kind: WorkKind, message: Expr, group: Group = Group.TENSOR) -> Work:
    return Work(name=name, kind=kind, moved_bytes=message, group=group)


def _weight_grad(work: Work) -> Work:
    return replace(work, makes_weight_grad=True, layout="tn")


def _gemm(name: str, m: Expr, n: Expr, k: Expr, batch: Expr = ONE, *, eight_bit: bool = False) -> Work:
    return Work(
        name=name,
        kind=WorkKind.GEMM,
        flops=2 * m * n * k * batch,
        moved_bytes=HALF * batch * (m * k + k * n + m * n),
        gemm=(m, n, k, batch),
        eight_bit=eight_bit,
    )


def _products(
    name: str, wide: Expr, deep: Expr, *, eight_bit: bool
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Of one projection, forward and backward. An 8-bit product reads its activations, or their gradients,
    after a pass that writes them in 8 bits twice: as they are, and transposed for the weight's gradient."""
    forward = (_gemm(name, TOKENS, wide, deep, eight_bit=eight_bit),)
    backward = (
        replace(_gemm(f"{name}_input", TOKENS, deep, wide, eight_bit=eight_bit), layout="nn"),
        _weight_grad(_gemm(f"{name}_weight", wide, deep, TOKENS, eight_bit=eight_bit)),
    )
    if not eight_bit:
        return forward, backward
    cast_bytes = HALF + 2 * EIGHTH
    return (
        (_memory(f"{name}_cast", cast_bytes * TOKENS * deep), *forward),
        (_memory(f"{name}_gradient_cast", cast_bytes * TOKENS * wide), *backward),
    )


def _norm(name: str, model: LayerSpec, options: LayerOptions, reads: str) -> Operator:
    statistics = options.norm_statistics_bytes or (8 if model.norm == "layernorm" else 4)
    return Operator(
        name=name,
        forward=(_memory(f"{name}_forward", 2 * ACTIVATION),),
        # Reads input and gradient, writes the input's gradient, then reduces over rows for the weight's.
        backward=(_memory(f"{name}_backward", 3 * ACTIVATION, kernels=2),),
        saved=(
            SavedTensor(key=reads, size_bytes=ACTIVATION),
            SavedTensor(key=f"{name}_statistics", size_bytes=statistics * ROWS),
        ),
        parameters=Integer(model.norm_parameters),
    )


def _projection_in(
    name: str, columns: tuple[Expr, Expr], *, bias: bool, saves: str, eight_bit: bool = False
) -> tuple[Operator, ...]:
    """Column-parallel matrix; keeps its input, which sequence parallelism keeps split."""
    wide, deep = columns
    forward, backward = _products(name, wide, deep, eight_bit=eight_bit)
    return (
        Operator(
            name=name,
            forward=forward,
            backward=(
                *backward,
                *((_memory(f"{name}_bias", HALF * TOKENS * wide),) if bias else ()),
            ),
            saved=(SavedTensor(key=saves, size_bytes=ACTIVATION),),
            parameters=wide * deep + (wide if bias else ZERO),
        ),
    )


def _projection_out(
    name: str, columns: tuple[Expr, Expr], *, bias: bool, saves: str, eight_bit: bool = False
) -> tuple[Operator, ...]:
    """Row-parallel matrix; its bias is added once, after the reduction."""
    wide, deep = columns
    forward, backward = _products(name, wide, deep, eight_bit=eight_bit)
    return (
        Operator(
            name=name,
            forward=forward,
            backward=(
                *backward,
                *((_memory(f"{name}_bias", HALF * TOKENS * wide),) if bias else ()),
            ),
            saved=(SavedTensor(key=saves, size_bytes=HALF * TOKENS * deep),),
            parameters=wide * deep + (wide if bias else ZERO),
        ),
    )


def _rotary() -> Operator:
    """Rotates queries and keys; rotation is undone by rotating back, so nothing is kept."""
    moved = 2 * HALF * TOKENS * (QUERY + KEY)
    return Operator(
        name="rotary",
        forward=(_memory("rotary_forward", moved, kernels=2),),
        backward=(_memory("rotary_backward", moved, kernels=2),),
    )


def _context_ring() -> Operator:
    """Keys and values of the whole sequence pass by every context-parallel rank, their gradients on the way
    back too; attention on the part at hand hides it as far as it lasts (priced in `stage.py`)."""
    both = 2 * HALF * B * S * KEY
    return Operator(
        name="context_ring",
        forward=(_collective("context_gather", WorkKind.ALL_GATHER, both, Group.CONTEXT),),
        backward=(
            _collective("context_gather", WorkKind.ALL_GATHER, both, Group.CONTEXT),
            _collective("context_scatter", WorkKind.REDUCE_SCATTER, both, Group.CONTEXT),
        ),
        part=CORE,
    )


def _attention_inputs() -> tuple[SavedTensor, ...]:
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
    if layer.attention == "full":
        return S * (S if layer.window is None else WINDOW) / causal
    return (WINDOW * S - WINDOW * (WINDOW - 1) / 2) / causal


def _flash_attention(layer: LayerSpec) -> Operator:
    """Fused attention core: keeps its inputs, its output and one fp32 number per row and head."""
    heads, kv_heads = HEADS / TP, KEY / HEAD_DIM
    # Causal work is half of the full square; flop counters count the square, as here.
    full = 4 * B * heads * S * S * HEAD_DIM / CP
    share = _pairs_share(layer)
    if layer.window is not None:
        full = full * (WINDOW / S if layer.attention == "full" else share)
    # A context-parallel rank computes its share of the square: priced as that share of the heads.
    size = (B, S, heads / CP, kv_heads, HEAD_DIM)
    return Operator(
        name="attention",
        forward=(
            Work(name="attention", kind=WorkKind.ATTENTION, flops=full, attention=size, pairs_share=share),
        ),
        backward=(
            Work(
                name="attention_backward",
                kind=WorkKind.ATTENTION,
                flops=full * 5 / 2,
                attention=size,
                pairs_share=share,
                kernels=3,
            ),
        ),
        saved=(
            *_attention_inputs(),
            SavedTensor(key="attention_output", size_bytes=HALF * TOKENS * QUERY),
            SavedTensor(key="core_log_sum", size_bytes=FULL * TOKENS * heads, inner=True),
        ),
        part=CORE,
    )


def _plain_attention(options: LayerOptions) -> tuple[Operator, ...]:
    """Scores, softmax, weighted sum as three operators; the scores are kept after the softmax."""
    batch, rows = B * HEADS / TP, S / CP
    scores = SCORES
    dropped = options.dropout
    saved = [SavedTensor(key="core_softmax", size_bytes=scores, inner=True)]
    if dropped:
        # A mask of one byte per score and the dropped scores themselves.
        saved += [
            SavedTensor(key="core_mask", size_bytes=scores / 2, inner=True),
            SavedTensor(key="core_dropped", size_bytes=scores, inner=True),
        ]
    passes = 5 if dropped else 2
    return (
        Operator(
            name="scores",
            forward=(_gemm("scores", rows, S, HEAD_DIM, batch),),
            backward=(
                replace(_gemm("scores_query", rows, HEAD_DIM, S, batch), layout="nn"),
                replace(_gemm("scores_key", S, HEAD_DIM, rows, batch), layout="tn"),
            ),
            saved=_attention_inputs()[:2],
            part=CORE,
        ),
        Operator(
            name="softmax",
            forward=(_memory("softmax", passes * scores, kernels=2 if dropped else 1),),
            backward=(_memory("softmax_backward", (passes + 1) * scores, kernels=2 if dropped else 1),),
            saved=tuple(saved),
            part=CORE,
        ),
        Operator(
            name="weighted_sum",
            forward=(replace(_gemm("weighted_sum", rows, HEAD_DIM, S, batch), layout="nn"),),
            backward=(
                _gemm("weighted_sum_scores", rows, S, HEAD_DIM, batch),
                replace(_gemm("weighted_sum_value", S, HEAD_DIM, rows, batch), layout="tn"),
            ),
            saved=(
                _attention_inputs()[2],
                SavedTensor(key="attention_output", size_bytes=HALF * TOKENS * QUERY),
            ),
            part=CORE,
        ),
    )


def _activation(model: LayerSpec, gates: int) -> Operator:
    """Activation of the MLP, fused with the product of a gated one: keeps its input only."""
    inner = HALF * TOKENS * INNER
    return Operator(
        name="activation",
        forward=(_memory("activation", (gates + 1) * inner),),
        backward=(_memory("activation_backward", (2 * gates + 1) * inner),),
        saved=(SavedTensor(key="mlp_hidden", size_bytes=gates * inner),),
    )


def _residual(name: str, options: LayerOptions) -> Operator:
    """Dropout of a branch and its addition to the residual stream, one fused kernel."""
    mask = (SavedTensor(key=f"{name}_mask", size_bytes=ACTIVATION / 2),) if options.dropout else ()
    extra = ACTIVATION / 2 if options.dropout else ZERO
    return Operator(
        name=name,
        forward=(_memory(f"{name}_forward", 3 * ACTIVATION + extra),),
        backward=(_memory(f"{name}_backward", 2 * ACTIVATION + extra),) if options.dropout else (),
        saved=mask,
    )


def _dropout(name: str) -> Operator:
    return Operator(
        name=name,
        forward=(_memory(f"{name}_forward", 5 * ACTIVATION / 2),),
        backward=(_memory(f"{name}_backward", 5 * ACTIVATION / 2),),
        saved=(SavedTensor(key=f"{name}_mask", size_bytes=ACTIVATION / 2),),
    )


def _gather(name: str, where: Expr = ONE) -> Operator:
    """Entry of a tensor-parallel region: sequence parallelism gathers the rows, in backward once more for the
    weight gradient, and scatters the reduced input gradient; otherwise the gradient is all-reduced. `where`
    is 1 in plans that have this entry and 0 in others."""
    rows = where * GATHERED
    return Operator(
        name=name,
        forward=(_collective(f"{name}_forward", WorkKind.ALL_GATHER, SP * rows),),
        backward=(
            _collective(f"{name}_again", WorkKind.ALL_GATHER, SP * rows),
            _collective(f"{name}_scatter", WorkKind.REDUCE_SCATTER, SP * rows),
            _collective(f"{name}_reduce", WorkKind.ALL_REDUCE, (1 - SP) * rows),
        ),
    )


def _reduce(name: str) -> Operator:
    """Exit of a tensor-parallel region."""
    return Operator(
        name=name,
        forward=(
            _collective(f"{name}_scatter", WorkKind.REDUCE_SCATTER, SP * GATHERED),
            _collective(f"{name}_reduce", WorkKind.ALL_REDUCE, (1 - SP) * GATHERED),
        ),
        backward=(_collective(f"{name}_gather", WorkKind.ALL_GATHER, SP * GATHERED),),
    )
