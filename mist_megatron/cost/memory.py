"""Memory of a pipeline stage as named expressions in the configuration symbols.

Every candidate for the peak is linear in layers, recomputed layers, micro-batches in flight and offload
fractions, given micro-batch and parallel sizes: the search relies on it. (Where the target's rules tie the
optimizer's fraction to others, buffers may appear with the first of it: there every fraction is priced.)
"""

from __future__ import annotations

from dataclasses import dataclass

from sympy import Expr, Integer, Max

from mist_megatron.cost.layers import CORE, LayerOptions, block, embedding, head, parameters, saved_bytes
from mist_megatron.cost.operators import ZERO
from mist_megatron.cost.shapes import (
    ACTIVATION,
    FULL,
    GATHERED,
    HALF,
    INNER,
    QUERY,
    ROWS,
    SCORES,
    TOKENS,
    VOCAB_SHARE,
)
from mist_megatron.cost.symbols import (
    CKPT,
    CP,
    DP,
    HIDDEN,
    IN_FLIGHT,
    LAYERS,
    OFFLOAD,
    RECOMPUTE,
    SP,
    TP,
    Z1,
    Z2,
    Z3,
    B,
    S,
)
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.recompute import PARTIAL, kinds_that_drop
from mist_megatron.targets.facts import MemoryFacts, Modules

ONE = Integer(1)


@dataclass(frozen=True)
class StageMemory:
    """What a stage holds (`terms`), and the moments at which it may hold most (`peaks`)."""

    terms: dict[str, Expr]
    """weights, grads, optimizer, buffers, framework: held throughout; activations: at the peak of
    backward."""
    peaks: dict[str, Expr]
    """Everything held at each moment; the largest is the stage's peak."""

    @property
    def peak(self) -> Expr:
        return Max(*self.peaks.values(), evaluate=False)


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


def layer_memory(model: ModelSpec, options: LayerOptions, modules: Modules) -> LayerMemory:
    """Saved and transient bytes of a transformer layer."""
    operators = block(model, options)
    kept = saved_bytes(operators)
    light = {kind: saved_bytes(operators, kind) for kind in PARTIAL}
    if modules == "plain_torch":
        kept = kept + _plain_modules(model)
        light = {kind: size + _plain_modules(model) for kind, size in light.items()}
    saved = sum((RECOMPUTE[kind] * (size - kept) for kind, size in light.items() if size != kept), start=kept)
    without_core = {kind: light[kind] for kind in kinds_that_drop(CORE)}
    if modules == "mist_runtime":
        forward, backward = _mist_transients(model, options, saved)
        return LayerMemory(saved, ACTIVATION, forward, backward)
    gates = 2 if model.gated_mlp else 1
    hidden, activated = HALF * TOKENS * gates * INNER, HALF * TOKENS * INNER
    # Backward of the activation: the gradients of both sides of it live, its output is gone.
    at_activation = 2 * ACTIVATION + hidden
    if modules == "plain_torch" and _composite_gelu(model):
        at_activation = at_activation + activated  # the gradients of both factors of its last product
    # Backward of the matrix before it: the gathered input and its gradient, activation tensors gone.
    at_input = ACTIVATION + GATHERED * (1 + SP) - activated
    candidates = [at_activation, at_input]
    if modules == "plain_torch":
        # Plain autograd makes the weight gradient first and adds it to the kept one afterwards: the MLP's
        # output matrix beside the gradients on either side of it.
        candidates.append(ACTIVATION + activated + HALF * INNER * HIDDEN)
    if not options.flash_attention:
        # Gradients of softmax output and of scores beside the kept scores, MLP tensors gone; where the core
        # is run again it has them to make first.
        passes = sum(
            (RECOMPUTE[kind] * 2 for kind in without_core), start=Integer(3 if options.dropout else 2)
        )
        candidates.append(passes * SCORES + 2 * ACTIVATION - hidden - activated)
    elif any(size != kept for size in without_core.values()):
        made = sum((RECOMPUTE[kind] * (kept - size) for kind, size in without_core.items()), start=ZERO)
        candidates.append(made + 4 * HALF * TOKENS * QUERY - hidden - activated)
    backward = Max(*candidates, evaluate=False)
    forward = hidden + activated + GATHERED
    return LayerMemory(saved, ACTIVATION, forward, backward)


def _plain_modules(model: ModelSpec) -> Expr:
    """What modules written in plain PyTorch keep beyond fused kernels, as in LLaMA of Hugging Face's
    transformers: an RMSNorm its input in fp32 and the normalised input in half precision, where a fused one
    keeps the input; a gated MLP silu(gate) beside gate, up and their product."""
    norms = 2 * FULL * ROWS * HIDDEN if model.norm == "rmsnorm" else ZERO
    gelu = 3 * HALF * TOKENS * INNER if _composite_gelu(model) else ZERO
    return norms + gelu + (HALF * TOKENS * INNER if model.gated_mlp else ZERO)


def _composite_gelu(model: ModelSpec) -> bool:
    """GPT-2 in transformers spells its GELU out (NewGELUActivation): beside input and output it keeps half
    the input, the hyperbolic tangent, and one more than that. Models of its shape, with learned positions and
    a key head for each query head, are trained with that module; later ones have a fused GELU, OPT none."""
    like_gpt2 = model.learned_positions > 0 and model.kv_heads == model.heads
    return like_gpt2 and model.activation == "gelu" and not model.gated_mlp


def _mist_transients(model: ModelSpec, options: LayerOptions, saved: Expr) -> tuple[Expr, Expr]:
    """Beyond saved bytes, as measured on Mist's runtime (artifact, README and 26 stage peaks)."""
    share = INNER / HIDDEN
    norms = 16 * B * S
    forward: Expr
    if options.flash_attention:
        backward = ACTIVATION * (5 + 4 / TP + (5 if model.gated_mlp else 3) * share) + norms - saved
        return 2 * ACTIVATION, backward
    # Without a fused core one buffer of scores is live in either pass on top of what the passes need.
    forward = Max(ACTIVATION * (2 + 5 / TP) + 2 * SCORES, saved + 2 * ACTIVATION, evaluate=False)
    backward = ACTIVATION * (3 + 3 / TP) + 3 * SCORES + norms / 2
    return forward - saved + SCORES, backward - saved + SCORES


def _norm_parameters(model: ModelSpec) -> Expr:
    norms = model.parallel_norms if model.parallel_block else 2
    return Integer(norms * model.norm_parameters)


def edge_parameters(model: ModelSpec, options: LayerOptions, role: StageRole) -> tuple[Expr, Expr]:
    """Elements of embedding and head on one rank of a stage of this role.

    Tied weights exist once where one stage has both ends, twice in a pipeline.
    """
    first = parameters(embedding(model, options)) if role.has_embedding else ZERO
    last = parameters(head(model, options)) if role.has_head else ZERO
    if model.tied_embeddings and role is StageRole.ONLY:
        last = last - VOCAB_SHARE * HIDDEN
    return first, last


def stage_memory(
    model: ModelSpec,
    options: LayerOptions,
    facts: MemoryFacts,
    role: StageRole,
) -> StageMemory:
    """All terms and candidates of one stage."""
    layer = layer_memory(model, options, facts.modules)
    states = _states(model, options, facts, role)
    piped = facts.pipe_buffers and role is not StageRole.ONLY
    pipe = _pipe_buffers(facts, role) if piped else NO_BUFFERS
    states["buffers"] = states["buffers"] + pipe.held
    held = sum(states.values(), start=ZERO)
    resident = LAYERS - CKPT
    per_micro_batch = resident * layer.saved * (1 - OFFLOAD.activations) + CKPT * layer.kept_input
    # Offloaded tensors pass through the GPU: one layer's on the way out, one layer's on the way back.
    per_micro_batch_once = OFFLOAD.activations * layer.saved
    edge = _edge_activations(model, options, facts, role) + pipe.per_micro_batch
    activations = IN_FLIGHT * (per_micro_batch + edge) + per_micro_batch_once
    others = (IN_FLIGHT - 1) * (per_micro_batch + edge)
    peaks = {
        "backward": held + activations + layer.backward,
        "forward": held + activations + layer.forward,
    }
    if facts.recomputes_first_layers:
        again = others + edge + CKPT * layer.kept_input + layer.saved
        peaks["recompute"] = held + again + layer.backward
    else:
        # Recomputation meets everything kept; without recomputed layers nothing is made again. The live
        # layer's tensors are counted once: as made again when it is recomputed, else in activations.
        recomputing = CKPT / Max(CKPT, 1, evaluate=False)
        peaks["backward"] = held + activations + recomputing * layer.saved + layer.backward
    if role.has_head:
        peaks["loss"] = held + activations + _head_transients(options, facts.modules) - pipe.own_logits
    if role.has_embedding and facts.table_gradient:
        peaks["embedding"] = held + others + HALF * VOCAB_SHARE * HIDDEN + 2 * ACTIVATION
    if facts.gradients_return:
        peaks["reduction"] = held + facts.grad_bytes * _elements(model, options, role) * OFFLOAD.grads
    if piped:
        # Beside the bucket that the engine keeps, its reduction takes another one.
        peaks["reduction"] = held + HALF * Integer(int(facts.bucket_elements))
    if facts.step.scratch:
        own = _elements(model, options, role) / _sharded(Z1, DP * CP) * (1 - OFFLOAD.optimizer)
        # Not where the gradients to step with are kept throughout: `held` has them.
        made = 1 - _any(OFFLOAD.optimizer) if facts.step.kept_gradient else ONE
        # Levels 1 and 2 give their buckets back when all gradients are reduced; level 3 keeps its one.
        released = (1 - Z3) * _buckets(facts)
        peaks["step"] = held - released + facts.step.scratch * own * made
        if facts.step.of_layer:
            # The last is the head's, or a layer's, when the forward pass before it has been kept.
            widest = _widest(model, options, role) / _sharded(Z1, DP * CP)
            peaks["layer_step"] = held + activations + facts.step.of_layer * widest * made
    return StageMemory({**states, "activations": activations}, peaks)


@dataclass(frozen=True)
class _PipeBuffers:
    """What a stage of DeepSpeed's pipeline has beyond a model in one piece."""

    per_micro_batch: Expr
    held: Expr
    own_logits: Expr
    """Part of `held` that the loss's own moment counts too."""


NO_BUFFERS = _PipeBuffers(ZERO, ZERO, ZERO)


def _pipe_buffers(facts: MemoryFacts, role: StageRole) -> _PipeBuffers:
    """What was received has a gradient of its own, so layers are given a copy (_exec_forward_pass). What the
    last stage makes of a micro-batch, its logits, stays until the second one after it comes."""
    sides = (not role.has_embedding) + (not role.has_head)
    logits = HALF * TOKENS * VOCAB_SHARE if role.has_head else ZERO
    return _PipeBuffers(sides * ACTIVATION, sides * ACTIVATION + 2 * logits, logits)


def _buckets(facts: MemoryFacts) -> Expr:
    """Of as many elements as configured however small the stage is, from ZeRO 1 on (setup_buckets of
    stage_1_and_2.py, __init__ of stage3.py). ZeRO 1 reduces what it has added up, in that width, and levels
    1 and 2 take two if reductions overlap."""
    width = facts.grad_bytes * (Z1 - Z2) + HALF * Z2
    pair = 2 - Z3 if facts.reductions_overlap else ONE
    return Integer(int(facts.bucket_elements)) * width * pair * Z1


def _elements(model: ModelSpec, options: LayerOptions, role: StageRole) -> Expr:
    first, last = edge_parameters(model, options, role)
    return LAYERS * parameters(block(model, options)) + first + last


def _sharded(switch: Expr, ranks: Expr) -> Expr:
    """Divisor of what is split over ranks when the switch is 1."""
    return 1 + switch * (ranks - 1)


def _states(model: ModelSpec, options: LayerOptions, facts: MemoryFacts, role: StageRole) -> dict[str, Expr]:
    """Weights, gradients and optimizer states by ZeRO level and offload, and the buffers they need."""
    each = parameters(block(model, options))
    inner = LAYERS * each
    first, last = edge_parameters(model, options, role)
    ranks = DP * CP
    follow = facts.edges_follow
    grad, optimizer = facts.grad_bytes, facts.optimizer_bytes

    def term(size: int, switch: Expr, offloaded: Expr, edge_switch: Expr) -> Expr:
        if follow:
            return size * (inner + first + last) / _sharded(switch, ranks) * (1 - offloaded)
        edges = (first + last) / _sharded(edge_switch, ranks)
        return size * (inner / _sharded(switch, ranks) * (1 - offloaded) + edges)

    widest = _widest(model, options, role)
    needs_weights, needs_grads = _either(Z3, OFFLOAD.weights), _either(Z2, OFFLOAD.grads)
    buffers = 2 * HALF * widest * needs_weights + 2 * Integer(grad) * widest * needs_grads
    buffers = buffers + _buckets(facts)
    states = {
        "weights": term(2, Z3, OFFLOAD.weights, ZERO),
        "grads": term(grad, Z2, OFFLOAD.grads, ZERO),
        "optimizer": term(optimizer, Z1, OFFLOAD.optimizer, ONE),
        "buffers": buffers,
        "framework": Integer(int(facts.framework_bytes)),
    }
    if facts.step.kept_gradient:
        kept = term(facts.step.kept_gradient, Z1, OFFLOAD.optimizer, ONE) * _any(OFFLOAD.optimizer)
        states["optimizer"] = states["optimizer"] + kept
    if facts.modules == "transformer_engine":
        # One unused half-precision weight gradient is kept per distinct weight shape: the real one is added
        # to the fp32 buffer inside the GEMM, and autograd is handed this instead.
        states["buffers"] = states["buffers"] + HALF * (each - _norm_parameters(model))
    return states


def _widest(model: ModelSpec, options: LayerOptions, role: StageRole) -> Expr:
    """Parameters of the largest of layer, embedding and head."""
    edges = edge_parameters(model, options, role)
    return Max(parameters(block(model, options)), *(e for e in edges if e != ZERO), evaluate=False)


def _any(fraction: Expr) -> Expr:
    """1 for any fraction above 0, else 0."""
    return fraction / Max(fraction, Integer(10) ** -9, evaluate=False)


def _either(switch: Expr, fraction: Expr) -> Expr:
    """1 when a state is sharded or any of it offloaded, else 0: then a full copy passes through a buffer."""
    return Max(switch, _any(fraction), evaluate=False)


def _edge_activations(model: ModelSpec, options: LayerOptions, facts: MemoryFacts, role: StageRole) -> Expr:
    """Kept per micro-batch outside of the layers: token ids, masks, boundary tensors."""
    kept: Expr = ZERO
    if role.has_embedding:
        kept = kept + saved_bytes(embedding(model, options))
    if role is not StageRole.ONLY and facts.boundary_tensors_stay:
        kept = kept + 2 * ACTIVATION
    return kept


def _head_transients(options: LayerOptions, modules: Modules) -> Expr:
    """From the last layer's output to the loss and back to its gradient."""
    logits = TOKENS * VOCAB_SHARE
    if modules == "mist_runtime":
        # The buffer of scores that stands in for a fused core lives as long as the stage.
        scores = ZERO if options.flash_attention else SCORES
        return ACTIVATION + 2 * HALF * logits + 16 * B * S + scores
    if modules == "plain_torch":
        # Hugging Face and plain torch: the model's output keeps the half-precision logits; their fp32 copy,
        # the logarithm of the softmax and its gradient are live together.
        return (HALF + 3 * FULL) * logits + 3 * ACTIVATION
    # Loss: logits in half and in single precision; maximum, exponent and division work in place.
    at_loss = (HALF + FULL) * logits
    # Head's backward: the logits' gradient and Megatron's unused weight gradient of the whole table.
    at_head = HALF * logits + HALF * VOCAB_SHARE * HIDDEN
    # Norm input and output, their gradients, the boundary tensor; gathered input and gradient with SP.
    return Max(at_loss, at_head, evaluate=False) + 5 * ACTIVATION + SP * 2 * GATHERED
