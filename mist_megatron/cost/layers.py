"""Layer graphs: what a transformer block, the embedding and the head compute, move and keep.

One builder for GPT, LLaMA, Falcon and any mix of their options; nothing is written per family. A layer is a
tuple of operators in forward order, each made by one small function below from the sizes of `shapes.py`. To
add an operator, write such a function and put it where it runs in `block`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mist_megatron.cost.algebra import Expr, number
from mist_megatron.cost.chosen import captured, chosen
from mist_megatron.cost.cores import Softmax, context_exchange, flash_attention, plain_attention
from mist_megatron.cost.entries import cross_attention, entry_operators
from mist_megatron.cost.experts import mixture, with_clamp
from mist_megatron.cost.latent import (
    VALUE_WIDTH,
    head_norms,
    latent_inputs,
    sinks,
)
from mist_megatron.cost.narrow import with_narrow_inputs
from mist_megatron.cost.operators import ZERO, Operator, SavedTensor, WorkKind
from mist_megatron.cost.projections import (
    gathered_rows,
    joined_gradients,
    projection_in,
    projection_out,
    reduced_rows,
    rotary,
    with_adapters,
)
from mist_megatron.cost.recurrent import output_gate, scan_operators, slowed
from mist_megatron.cost.residual import dropout, residual
from mist_megatron.cost.shapes import (
    ACTIVATION,
    FULL,
    HALF,
    INNER,
    KEY,
    QUERY,
    ROWS,
    TOKENS,
    VOCAB_SHARE,
)
from mist_megatron.cost.symbols import (
    HIDDEN,
    SP,
    TP,
)
from mist_megatron.cost.works import collective_work, in_low_precision, memory_work, products, weight_grad
from mist_megatron.price.compiled_kernels import USUAL
from mist_megatron.spec.experts import LatentAttention
from mist_megatron.spec.kinds import ContextExchange, Dispatcher, GraphModule, Quantization
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.offloaded import OffloadModule
from mist_megatron.spec.recompute import RECOMPUTES, USUAL_MODULES, Module, Recompute
from mist_megatron.spec.recurrent import DeltaNet, Mamba


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What of an implementation changes bytes or kernels."""

    flash_attention: bool = True
    dropout: bool = False
    norm_statistics_bytes: int | None = None
    """Per token and norm; None: 8 for LayerNorm (mean and 1/std in fp32), 4 for RMSNorm."""
    softmax_keeps_input: bool = False
    by_halves: bool = False
    """Of these two, as `MemoryFacts` says."""
    fused_cross_entropy: bool = True
    eight_bit: bool = False
    """Transformer Engine's FP8: products of the projections inside a block have 8-bit operands. Attention and
    logits stay in 16 bits: fp8_dpa is off by default, and Megatron's output layer is none of the engine's."""
    quantization: Quantization | None = None
    """By which recipe."""
    narrow_weight_bytes: Fraction = Fraction(0)
    """What a weight of such a product takes beyond its 16 bits ..."""
    narrow_weights_alone: bool = False
    """... of which it has none: what the former takes away is sharded as they are."""
    dispatcher: Dispatcher = "alltoall"
    modules: tuple[Module, ...] = USUAL_MODULES
    """What selective recomputation runs again."""
    offloaded: tuple[OffloadModule, ...] = ()
    """Whose saved tensors leave for host memory."""
    graphs: tuple[GraphModule, ...] = ()
    """What CUDA graphs replay."""
    fused_experts: bool = False
    """Products of experts, their activation and casts are one kernel (--use-transformer-engine-op-fuser)."""
    shared_apart: bool = False
    """Shared experts compute beside the dispatch of tokens."""
    fused_rotary: bool = True
    """One kernel rotates queries and keys of latent attention."""
    compiled_slowdown: Fraction = USUAL  # price/compiled_kernels.py
    context_exchange: ContextExchange = "p2p"
    """How context-parallel ranks attend to each other's tokens."""
    joins_gradients: bool = False
    """Those of queries, keys and values are laid side by side before the projection's are made."""

    @property
    def softmax(self) -> Softmax:
        """Where the core of attention is not fused."""
        return Softmax(self.dropout, self.softmax_keeps_input, self.by_halves)

    @property
    def mask(self) -> Fraction:
        """Bytes of an element of dropout's masks."""
        return Fraction(1, 2 if self.by_halves else 1)

    @property
    def dropped(self) -> Fraction | None:
        """The same; None where nothing is dropped."""
        return self.mask if self.dropout else None


def block(model: LayerSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """One transformer layer of that shape."""
    if model.entry is not None:
        return entry_operators(model, _statistics(model, options))
    whole = slowed(_whole_block(model, options), options.compiled_slowdown)
    recipe = (options.quantization or "delayed") if options.eight_bit else None
    made = chosen(in_low_precision(whole, recipe, options.shared_apart), options.modules)
    operators = with_narrow_inputs(made, options.quantization, options.modules, options.offloaded)
    if model.adapter is not None:
        operators = with_adapters(operators, model.adapter, gated=model.gated_mlp)
    return captured(operators, options.graphs, shared_apart=options.shared_apart)


def _statistics(model: LayerSpec, options: LayerOptions) -> int:
    usual = 8 if model.norm == "layernorm" else 4
    return options.norm_statistics_bytes or usual // (2 if options.by_halves else 1)


def _latent_block_attention(
    model: LayerSpec, latent: LatentAttention, options: LayerOptions
) -> tuple[Operator, ...]:
    statistics = options.norm_statistics_bytes or 4
    core = flash_attention(model, latent=True) if options.flash_attention else None
    return (
        *latent_inputs(latent, statistics, eight_bit=options.eight_bit, fused_rotary=options.fused_rotary),
        *context_exchange(options.context_exchange, latent=True),
        *((core,) if core else plain_attention(options.softmax, latent=True)),
        *projection_out(
            "attention_out",
            (HIDDEN, VALUE_WIDTH),
            bias=False,
            saves="attention_output",
            eight_bit=options.eight_bit,
        ),
        reduced_rows("reduce1"),
    )


def _in_sequence(
    model: LayerSpec, options: LayerOptions, attention: tuple[Operator, ...], mlp: tuple[Operator, ...]
) -> tuple[Operator, ...]:
    """Attention, then the MLP; latent attention and experts in place of these."""
    latent, experts = model.latent_attention, model.experts
    plain = (gathered_rows("gather1"), *attention, reduced_rows("reduce1"))
    if latent is not None and model.attends:
        plain = _latent_block_attention(model, latent, options)
    inside = (gathered_rows("gather2"), *mlp, reduced_rows("reduce2"))
    if experts is not None:
        kind, eight_bit = options.dispatcher, options.eight_bit
        gated, bias = model.gated_mlp, model.linear_bias
        inside = mixture(
            experts,
            gated=gated,
            bias=bias,
            dispatcher=kind,
            eight_bit=eight_bit,
            fused=options.fused_experts,
        )
        if model.sinks and not options.fused_experts:
            inside = with_clamp(inside)
    # What these norms read: the results of attention and MLP.
    after = [norm(f"post_norm{k}", model, options, reads=f"branch{k}") for k in (1, 2) if model.post_norms]
    first = (
        norm("norm1", model, options, reads="input"),
        *plain,
        *after[:1],
        residual("residual1", options.dropped),
        *_to_encoder(model, options),
    )
    second = (
        norm("norm2", model, options, reads="middle"),
        *inside,
        *after[1:],
        residual("residual2", options.dropped),
    )
    return (*(() if model.half == "mlp" else first), *(second if model.has_mlp else ()))


def _to_encoder(model: LayerSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Attention to the output of an encoder."""
    source = model.cross_attention
    if source is None:
        return ()
    return (
        norm("cross_norm", model, options, reads="after_attention"),
        gathered_rows("cross_own_gather"),
        *cross_attention(
            source,
            None if options.flash_attention else options.softmax,
            bias=model.linear_bias,
            eight_bit=options.eight_bit,
        ),
        *projection_out(
            "cross_out",
            (HIDDEN, QUERY),
            bias=model.linear_bias,
            saves="cross_output",
            eight_bit=options.eight_bit,
        ),
        reduced_rows("cross_own_reduce"),
        residual("cross_residual", options.dropped),
    )


def _mixer(model: LayerSpec, mixer: Mamba | DeltaNet, options: LayerOptions) -> tuple[Operator, ...]:
    """What stands in place of attention: a projection, a scan, a projection back."""
    inner = mixer.inner if isinstance(mixer, Mamba) else mixer.values
    eight_bit = options.eight_bit
    columns = number(mixer.projected) / TP, HIDDEN
    back = HIDDEN, number(inner) / TP
    return (
        *projection_in("mixer_in", columns, bias=False, saves="normed1", eight_bit=eight_bit),
        *scan_operators(mixer, _statistics(model, options)),
        *projection_out("mixer_out", back, bias=False, saves="mixer_normed", eight_bit=eight_bit),
    )


def _attention(model: LayerSpec, options: LayerOptions) -> tuple[Operator, ...]:
    gate = (output_gate(),) if model.attention_gate else ()
    return (
        *projection_in(
            "qkv",
            ((2 if gate else 1) * QUERY + 2 * KEY, HIDDEN),
            bias=model.qkv_bias or model.linear_bias,
            saves="normed1",
            eight_bit=options.eight_bit,
        ),
        *(
            (head_norms(options.norm_statistics_bytes or 4, weights=model.qk_norm_weights),)
            if model.qk_norm
            else ()
        ),
        *((rotary(),) if model.rotary else ()),
        *((joined_gradients(),) if options.joins_gradients else ()),
        *((sinks(),) if model.sinks else ()),
        *context_exchange(options.context_exchange),
        *(flash_attention(model),) * options.flash_attention,
        *(() if options.flash_attention else plain_attention(options.softmax, layer=model)),
        *gate,
        *projection_out(
            "attention_out",
            (HIDDEN, QUERY),
            bias=model.linear_bias,
            saves="attention_gated" if gate else "attention_output",
            eight_bit=options.eight_bit,
        ),
    )


def _whole_block(model: LayerSpec, options: LayerOptions) -> tuple[Operator, ...]:
    mixer = model.mamba or model.delta_net
    attention = _attention(model, options) if mixer is None else _mixer(model, mixer, options)
    gates = 2 if model.gated_mlp else 1
    # A parallel block with one norm feeds attention and MLP from the same tensor, kept once.
    shared = model.parallel_block and model.parallel_norms == 1
    mlp = (
        *projection_in(
            "mlp_in",
            (gates * INNER, HIDDEN),
            bias=model.linear_bias,
            saves="normed1" if shared else "normed2",
            eight_bit=options.eight_bit,
        ),
        _activation(model, gates),
        *projection_out(
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
        # Two norms read the input beside the residual stream; or attention and the MLP what the one gives.
        after = residual("residual", options.dropped, readers=3)
        return (*entry, *attention, *mlp, reduced_rows("reduce1"), after)
    return _in_sequence(model, options, attention, mlp)


def _parallel_entry(model: LayerSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Norms of a block whose attention and MLP stand side by side. Two norms make two tensors that enter the
    tensor-parallel region. One makes one, whose gradients are added before they are reduced; but under
    sequence parallelism each linear module gathers it for itself, so that it keeps only its rows."""
    first = (norm("norm1", model, options, reads="input"), gathered_rows("gather1"))
    if model.parallel_norms == 1:
        return (*first, gathered_rows("gather2", SP))
    return (*first, norm("norm2", model, options, reads="input"), gathered_rows("gather2"))


def embedding(model: ModelSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Token table (rows split over tensor-parallel ranks) or matrix of patches, learned positions,
    dropout."""
    operators = [_patches(model)] if model.patch_elements else [_lookup(), reduced_rows("embedding_reduce")]
    if model.learned_positions:
        operators.append(
            Operator(
                name="positions",
                forward=(memory_work("positions_forward", 3 * ACTIVATION),),
                backward=(weight_grad(memory_work("positions_weight", 2 * ACTIVATION)),),
                parameters=model.learned_positions * HIDDEN,
            )
        )
    if options.dropout:
        operators.append(dropout("embedding_dropout", options.mask))
    return tuple(operators)


def _lookup() -> Operator:
    looked_up = HALF * TOKENS * HIDDEN
    # The gradient is scattered into a table of its own, then added to the accumulated one.
    scattered = memory_work("embedding_weight", 2 * looked_up + 6 * VOCAB_SHARE * HIDDEN, kernels=2)
    return Operator(
        name="embedding",
        forward=(memory_work("embedding_forward", 2 * looked_up),),
        backward=(weight_grad(scattered),),
        saved=(SavedTensor(key="token_ids", size_bytes=8 * TOKENS),),
        parameters=VOCAB_SHARE * HIDDEN,
    )


def _patches(model: ModelSpec) -> Operator:
    """Pieces of an image, each by one matrix to a token. The matrix is whole on every rank, and so are
    pixels, which need no gradient."""
    deep = number(model.patch_elements)
    forward, backward = products("patches", ROWS, (HIDDEN, deep), eight_bit=False)
    return Operator(
        name="embedding",
        forward=forward,
        backward=tuple(work for work in backward if work.makes_weight_grad),
        saved=(SavedTensor(key="pixels", size_bytes=HALF * ROWS * deep, for_weight=True),),
        parameters=HIDDEN * (deep + model.patch_bias),
    )


def _transform(model: ModelSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """BERT's matrix, activation and norm before the output layer, whole on every rank."""
    forward, backward = products("transform", ROWS, (HIDDEN, HIDDEN), eight_bit=False)
    return (
        Operator(
            name="transform",
            forward=forward,
            backward=backward,
            saved=(SavedTensor(key="head_given", size_bytes=ACTIVATION, for_weight=True),),
            parameters=HIDDEN * HIDDEN + HIDDEN,
        ),
        Operator(
            name="transform_activation",
            forward=(memory_work("transform_activation", 2 * ACTIVATION),),
            backward=(memory_work("transform_activation_backward", 3 * ACTIVATION),),
            saved=(SavedTensor(key="transformed", size_bytes=ACTIVATION),),
        ),
        norm("transform_norm", model.head_shape, options, reads="transform_activated"),
    )


def head(model: ModelSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Final norm, logits of this rank's part of the vocabulary, cross entropy."""
    logits = TOKENS * VOCAB_SHARE
    last = (norm("final_norm", model.head_shape, options, reads="head_input"),) if model.final_norm else ()
    if model.head_transform:
        last = (*last, *_transform(model, options))
    projection = projection_in(
        "logits", (VOCAB_SHARE, HIDDEN), bias=model.head_transform, saves="normed_head"
    )
    # Passes over the logits: to fp32, maximum, exponent and sum, division; fused ones read them once less.
    passes = 10 if options.fused_cross_entropy else 16
    loss = Operator(
        name="cross_entropy",
        forward=(
            memory_work("cross_entropy_forward", passes * logits, kernels=4),
            collective_work("cross_entropy_reduce", WorkKind.ALL_REDUCE, FULL * TOKENS),
            collective_work("cross_entropy_reduce", WorkKind.ALL_REDUCE, FULL * TOKENS),
            collective_work("cross_entropy_reduce", WorkKind.ALL_REDUCE, FULL * TOKENS),
        ),
        backward=(memory_work("cross_entropy_backward", 10 * logits, kernels=2),),
        saved=(SavedTensor(key="softmax", size_bytes=FULL * logits),),
    )
    cap = () if model.logit_cap is None else (_logit_cap(HALF * logits),)
    return (*last, gathered_rows("head_gather"), *projection, *cap, loss)


def _logit_cap(logits: Expr) -> Operator:
    """Division, tanh, product, one kernel each (transformers, modeling_gemma2.py); the tanh keeps what it
    gives."""
    return Operator(
        name="logit_cap",
        forward=(memory_work("logit_cap", 6 * logits, kernels=3),),
        backward=(memory_work("logit_cap_backward", 7 * logits, kernels=3),),
        saved=(SavedTensor(key="capped_logits", size_bytes=logits),),
    )


def unneeded_again(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """What a recomputation may leave out that stops when it has all that backward needs: the last matrix
    product, whose input is the last thing saved, and what follows. Dropout after it saves a mask, for which
    the product is needed."""
    last = max((index for index, operator in enumerate(operators) if operator.saved), default=len(operators))
    if last == len(operators):
        return ()
    inputs_saved = any(work.kind is WorkKind.GEMM for work in operators[last].forward)
    return operators[last:] if inputs_saved else ()


def saved_bytes(operators: tuple[Operator, ...], recompute: Recompute = "full") -> Expr:
    """Bytes kept for backward by a layer that is not run again in whole: distinct storages, without what
    parts hold alone that this kind of recomputation drops."""
    sizes: dict[str, Expr] = {}
    for operator in operators:
        dropped = operator.part in RECOMPUTES[recompute].drops
        for tensor in operator.saved:
            if not (dropped and tensor.inner) and not (tensor.chosen and RECOMPUTES[recompute].drops):
                sizes[tensor.key] = tensor.size_bytes
    return sum(sizes.values(), start=ZERO)


def parameters(operators: tuple[Operator, ...]) -> Expr:
    """Trainable elements on one tensor-parallel rank."""
    return sum((operator.parameters for operator in operators), start=ZERO)


def expert_parameters(operators: tuple[Operator, ...]) -> Expr:
    """Those of them that belong to routed experts."""
    return sum((operator.expert_parameters for operator in operators), start=ZERO)


def forward_flops(operators: tuple[Operator, ...]) -> Expr:
    """FLOPs of matrix products and attention in the forward pass."""
    return sum((work.flops for operator in operators for work in operator.forward), start=ZERO)


def backward_flops(operators: tuple[Operator, ...]) -> Expr:
    """The same in the backward pass, nothing recomputed."""
    return sum((work.flops for operator in operators for work in operator.backward), start=ZERO)


def norm(name: str, model: LayerSpec, options: LayerOptions, reads: str) -> Operator:
    """Over a token's channels; keeps its input."""
    statistics = _statistics(model, options)
    return Operator(
        name=name,
        forward=(memory_work(f"{name}_forward", 2 * ACTIVATION),),
        # Reads input and gradient, writes the input's gradient, then reduces over rows for the weight's.
        backward=(memory_work(f"{name}_backward", 3 * ACTIVATION, kernels=2),),
        saved=(
            SavedTensor(key=reads, size_bytes=ACTIVATION),
            SavedTensor(key=f"{name}_statistics", size_bytes=statistics * ROWS),
        ),
        parameters=number(model.norm_parameters),
    )


def _activation(model: LayerSpec, gates: int) -> Operator:
    """Activation of the MLP, fused with the product of a gated one: keeps its input only."""
    inner = HALF * TOKENS * INNER
    return Operator(
        name="activation",
        forward=(memory_work("activation", (gates + 1) * inner),),
        backward=(memory_work("activation_backward", (2 * gates + 1) * inner),),
        saved=(SavedTensor(key="mlp_hidden", size_bytes=gates * inner),),
    )
