"""Bytes of one layer: what it keeps for its backward pass, and what lives beyond that in either pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mist_megatron.cost.algebra import Expr, maximum, number
from mist_megatron.cost.cores import CORE, scores_of, whole_keys_bytes
from mist_megatron.cost.entries import CROSS_SCORES, frozen, outside_bytes
from mist_megatron.cost.layers import LayerOptions, block, saved_bytes
from mist_megatron.cost.narrow import narrow_width
from mist_megatron.cost.operators import ZERO
from mist_megatron.cost.recurrent import scan_transients
from mist_megatron.cost.shapes import (
    ACTIVATION,
    EXPERT_INNER,
    EXPERT_ROWS,
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
from mist_megatron.cost.symbols import EXPERT_WIDTH, HIDDEN, RECOMPUTE, SP, TP, B, S
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.recompute import PARTIAL, Module, kinds_that_drop
from mist_megatron.targets.facts import Modules

AROUND_EXPERTS: frozenset[Module] = frozenset({"moe", "moe_act", "shared_experts"})
"""Modules whose backward passes are those of a mixture."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer on one rank."""

    saved: Expr
    """Kept for backward by a layer that is not recomputed in full."""
    kept_input: Expr
    """Kept by a layer that is."""
    forward: Expr
    """Live beyond saved tensors at the worst moment of its forward pass."""
    backward: Expr
    """The same of its backward pass, where its saved tensors go one by one."""


def layer_memory(
    model: LayerSpec, options: LayerOptions, modules: Modules, *, passes_back: bool = True
) -> LayerMemory:
    """Saved and transient bytes of a transformer layer, or of one between groups."""
    if model.entry is not None:
        return _entry_memory(model, options, modules, passes_back=passes_back)
    memory = _block_memory(model, options, modules)
    if options.context_exchange == "all_gather" and model.attends:
        memory = _with_gathered_keys(model, memory)
    mixer = model.mamba or model.delta_net
    if mixer is not None:
        forward, backward = scan_transients(mixer)
        forward = maximum(memory.forward, GATHERED + forward)
        backward = maximum(memory.backward, 2 * ACTIVATION + backward)
        memory = replace(memory, forward=forward, backward=backward)
    if not passes_back:
        # What would be kept lives as long as its readers do: input, residual stream and norm beside the MLP.
        return LayerMemory(ZERO, ZERO, memory.forward + 2 * ACTIVATION, ZERO)
    if model.cross_attention is not None:
        # The gradients of an encoder's output, of this layer and of those after it.
        return replace(memory, backward=memory.backward + 2 * outside_bytes(model.cross_attention))
    return memory


def _with_gathered_keys(model: LayerSpec, memory: LayerMemory) -> LayerMemory:
    """Where keys and values of all tokens are gathered: they and the copies that both halves of a rank's
    queries attend to; in the backward pass the gradients of either too, when what the MLP kept is gone
    (Transformer Engine 2.5, AttnFuncWithCPAndKVAllGather). What experts kept is not counted as gone."""
    whole = whole_keys_bytes()
    of_mlp = ZERO
    if model.has_mlp and model.experts is None:
        of_mlp = (3 if model.gated_mlp else 2) * HALF * TOKENS * INNER
    around = 2 * ACTIVATION + 2 * HALF * TOKENS * (QUERY + KEY) - of_mlp
    return replace(
        memory,
        forward=maximum(memory.forward, 2 * whole),
        backward=maximum(memory.backward, 4 * whole + around),
    )


def _entry_memory(
    model: LayerSpec, options: LayerOptions, modules: Modules, *, passes_back: bool
) -> LayerMemory:
    entry = model.entry
    assert entry is not None
    operators = block(model, options)
    if model.frozen:
        operators = frozen(operators, passes_back=passes_back)
    came, inner = outside_bytes(entry), HALF * ROWS * entry.inner / TP
    table = HALF * VOCAB_SHARE * HIDDEN if entry.table != "none" and not model.frozen else ZERO
    forward = came + 2 * inner + ACTIVATION
    if not passes_back:
        return LayerMemory(ZERO, ZERO, forward, ZERO)
    saved = saved_bytes(operators)
    if modules == "plain_torch" and entry.norm:
        saved = saved + _plain_norm(model, options) / HALF * came
    return LayerMemory(saved, came, forward, 2 * came + 2 * inner + 2 * ACTIVATION + table)


def _block_memory(model: LayerSpec, options: LayerOptions, modules: Modules) -> LayerMemory:
    operators = block(model, options)
    if model.frozen:
        operators = frozen(operators, passes_back=True)
    kept = saved_bytes(operators)
    light = {kind: saved_bytes(operators, kind) for kind in PARTIAL}
    if modules == "plain_torch":
        more, core = _plain_modules(model, options), _plain_core(model, options)
        without = kinds_that_drop(CORE)
        light = {kind: size + more + (ZERO if kind in without else core) for kind, size in light.items()}
        kept = kept + more + core
    saved = sum((RECOMPUTE[kind] * (size - kept) for kind, size in light.items() if size != kept), start=kept)
    without_core = {kind: light[kind] for kind in kinds_that_drop(CORE)}
    if modules == "mist_runtime":
        forward, backward = _mist_transients(model, options, saved)
        return LayerMemory(saved, ACTIVATION, forward, backward)
    gates = 2 if model.gated_mlp else 1
    inner = INNER if model.has_mlp else ZERO
    hidden, activated = HALF * TOKENS * gates * inner, HALF * TOKENS * inner
    if model.experts is not None:
        # Made again before that; what attention makes again comes when experts' tensors are gone.
        again = sum((RECOMPUTE[kind] * (kept - size) for kind, size in light.items()), start=ZERO)
        forward, backward = _expert_transients(gates, options, again)
        return LayerMemory(saved, ACTIVATION, forward, backward)
    # Backward of the activation: the gradients of both sides of it live, its output is gone.
    gone, casts = _narrow(activated, hidden, options)
    at_activation = 2 * ACTIVATION + hidden + (activated - gone)
    if modules == "plain_torch" and _composite_gelu(model):
        at_activation = at_activation + activated  # the gradients of both factors of its last product
    # Backward of the matrix before it: the gathered input and its gradient, activation tensors gone.
    at_input = ACTIVATION + GATHERED * (1 + SP) + casts - gone
    candidates = [at_activation, at_input]
    if not model.has_mlp and model.attends:
        # Of the core: the gradients of its output, queries, keys and values.
        candidates.append(2 * ACTIVATION + 2 * HALF * TOKENS * (QUERY + KEY))
    if modules == "plain_torch":
        # Plain autograd makes the weight gradient first and adds it to the kept one afterwards: the MLP's
        # output matrix beside the gradients on either side of it.
        candidates.append(ACTIVATION + activated + HALF * INNER * HIDDEN)
    if not options.flash_attention:
        # Gradients of softmax output and of scores beside the kept scores, MLP tensors gone; where the core
        # is run again it has them to make first.
        passes = sum(
            (RECOMPUTE[kind] * 2 for kind in without_core), start=number(3 if options.dropout else 2)
        )
        most = scores_of(model)
        if model.cross_attention is not None:
            most = maximum(most, CROSS_SCORES)
        candidates.append(passes * most + 2 * ACTIVATION - hidden - gone)
    elif any(size != kept for size in without_core.values()):
        made = sum((RECOMPUTE[kind] * (kept - size) for kind, size in without_core.items()), start=ZERO)
        candidates.append(made + 4 * HALF * TOKENS * QUERY - hidden - gone)
    backward = maximum(*candidates)
    forward = hidden + activated + GATHERED
    return LayerMemory(saved, ACTIVATION, forward, backward)


def _expert_transients(gates: int, options: LayerOptions, again: Expr) -> tuple[Expr, Expr]:
    """Of a mixture: tokens come one for each of their experts; their input is gathered by the exchange."""
    activated, came = HALF * EXPERT_ROWS * EXPERT_INNER, HALF * EXPERT_ROWS * EXPERT_WIDTH
    gone, casts = _narrow(activated, gates * activated, options)
    at_input = ACTIVATION + 2 * came + casts - gone
    backward = maximum(2 * ACTIVATION + gates * activated + (activated - gone), at_input)
    if AROUND_EXPERTS & set(options.modules):
        backward = backward + again
    return gates * activated + activated + 2 * came, backward


def _narrow(activated: Expr, hidden: Expr, options: LayerOptions) -> tuple[Expr, Expr]:
    """What was kept of what the last product reads, and casts of the gradients that the first one gets, both
    ways, beside these."""
    if not options.eight_bit:
        return activated, ZERO
    width = number(narrow_width(options.quantization))
    return activated * width / 2, hidden * width


def _plain_modules(model: LayerSpec, options: LayerOptions) -> Expr:
    """What modules written in plain PyTorch keep beyond fused kernels, as in Hugging Face's transformers: an
    RMSNorm its input in fp32 and the normalised input in half precision, where a fused one keeps the input; a
    gated MLP silu(gate) beside gate, up and their product; CLIP's GELU its sigmoid. A ReLU keeps its result
    alone, which the next matrix reads, but in a T5 with dropout, which drops some of it first."""
    if not model.has_mlp:
        return _plain_norms(model, options)
    inner = HALF * TOKENS * INNER
    gelu = 3 * inner if _composite_gelu(model) else ZERO
    gate = inner if model.gated_mlp or model.activation == "quick_gelu" else ZERO
    drops = options.dropout and _like_t5(model)
    relu = inner if model.activation == "relu" and not model.gated_mlp and not drops else ZERO
    mask = options.mask * inner / 2 if drops else ZERO
    return _plain_norms(model, options) + gelu + gate - relu + mask


def _plain_core(model: LayerSpec, options: LayerOptions) -> Expr:
    """The same of attention. The vision layers of Qwen2-VL, which alone rotate where every token sees all,
    keep all that their QKV projection gave, of which the values are a view, beside rotated queries and keys;
    behind a fused core they join the outputs of windows, of one as well. Where the core is not fused, the
    softmax is made and kept in 32 bits, but in the models of before 2020: BERT, GPT-2 and T5."""
    if not model.attends:
        return ZERO
    views = ZERO
    if model.rotary and model.attention == "full":
        views = HALF * TOKENS * ((2 if options.flash_attention else 1) * QUERY + KEY)
    of_text = not model.rotary and model.attention == "full" and model.tokens is None
    early = of_text or _like_t5(model) or _composite_gelu(model)
    if options.flash_attention or options.by_halves or early or model.score_cap is not None:
        return views
    return views + 2 * scores_of(model)


def _plain_norms(model: LayerSpec, options: LayerOptions) -> Expr:
    """Of all norms of a layer, beyond their inputs in half precision."""
    count = (4 if model.post_norms else 2) + (model.cross_attention is not None)
    heads = TOKENS * (QUERY + KEY) if model.qk_norm else ZERO
    return _plain_norm(model, options) * (count * ROWS * HIDDEN + heads)


def _like_t5(model: LayerSpec) -> bool:
    """No other model has RMSNorm without rotary positions."""
    return model.norm == "rmsnorm" and not model.rotary


def _plain_norm(model: LayerSpec, options: LayerOptions) -> Expr:
    """Of one element of an RMSNorm. That of T5 multiplies the input itself, which so stays beside its fp32
    copy; that of Gemma 3 keeps input and result in fp32. In 32 bits nothing is copied."""
    if model.norm != "rmsnorm":
        return ZERO
    if options.by_halves:
        return ZERO if model.still else HALF
    each = FULL + (HALF if _like_t5(model) else ZERO)
    if model.post_norms:
        each = 2 * FULL - HALF
    if model.still:
        # The normalised input is for the gradient of the norm's weight.
        each = each - (FULL if model.post_norms else HALF)
    return each


def _composite_gelu(model: LayerSpec) -> bool:
    """GPT-2 in transformers spells its GELU out (NewGELUActivation): beside input and output it keeps half
    the input, the hyperbolic tangent, and one more than that. Models of its shape, with learned positions, a
    key head for each query head and causal attention, are trained with that module; later ones and BERT have
    a fused GELU, OPT none."""
    like_gpt2 = not model.rotary and model.attention == "causal" and model.kv_heads == model.heads
    return like_gpt2 and model.activation == "gelu" and not model.gated_mlp


def _mist_transients(model: LayerSpec, options: LayerOptions, saved: Expr) -> tuple[Expr, Expr]:
    """Beyond saved bytes, as measured on Mist's runtime (artifact, README and 26 stage peaks)."""
    share = INNER / HIDDEN
    norms = 16 * B * S
    forward: Expr
    if options.flash_attention:
        backward = ACTIVATION * (5 + 4 / TP + (5 if model.gated_mlp else 3) * share) + norms - saved
        return 2 * ACTIVATION, backward
    # Without a fused core one buffer of scores is live in either pass on top of what the passes need.
    forward = maximum(ACTIVATION * (2 + 5 / TP) + 2 * SCORES, saved + 2 * ACTIVATION)
    backward = ACTIVATION * (3 + 3 / TP) + 3 * SCORES + norms / 2
    return forward - saved + SCORES, backward - saved + SCORES


def norm_elements(model: LayerSpec) -> Expr:
    if model.entry is not None:
        return number(model.norm_parameters // model.hidden * model.entry.norm_width)
    return number((model.norms + (model.cross_attention is not None)) * model.norm_parameters)
