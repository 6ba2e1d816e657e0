"""Memory of a pipeline stage as named expressions in the configuration symbols.

Every candidate for the peak is linear in layers, recomputed layers, micro-batches in flight and offload
fractions, given micro-batch and parallel sizes: the search relies on it. (Where the target's rules tie the
optimizer's fraction to others, buffers may appear with the first of it: there every fraction is priced.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sympy import Expr, Integer, Max

from mist_megatron.cost.blocks import Block, blocks
from mist_megatron.cost.cores import CORE
from mist_megatron.cost.layers import (
    LayerOptions,
    block,
    embedding,
    expert_parameters,
    parameters,
    saved_bytes,
)
from mist_megatron.cost.mtp import depths_kept, whole_head
from mist_megatron.cost.operators import ZERO
from mist_megatron.cost.shapes import (
    ACTIVATION,
    EXPERT_INNER,
    EXPERT_ROWS,
    FULL,
    GATHERED,
    HALF,
    INNER,
    OWN_EXPERTS,
    QUERY,
    ROWS,
    SCORES,
    TOKENS,
    VOCAB_SHARE,
)
from mist_megatron.cost.symbols import (
    CP,
    DP,
    EP,
    ETP,
    EXPERT_WIDTH,
    HIDDEN,
    IN_FLIGHT,
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
from mist_megatron.spec.layer import LayerSpec
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


def layer_memory(model: LayerSpec, options: LayerOptions, modules: Modules) -> LayerMemory:
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
    if model.experts is not None:
        # Tokens come one for each of their experts; their input is gathered by the exchange.
        activated = HALF * EXPERT_ROWS * EXPERT_INNER
        came = HALF * EXPERT_ROWS * EXPERT_WIDTH
        at_input = ACTIVATION + 2 * came - activated
        peak = Max(2 * ACTIVATION + gates * activated, at_input, evaluate=False)
        return LayerMemory(saved, ACTIVATION, gates * activated + activated + 2 * came, peak)
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


def _plain_modules(model: LayerSpec) -> Expr:
    """What modules written in plain PyTorch keep beyond fused kernels, as in LLaMA of Hugging Face's
    transformers: an RMSNorm its input in fp32 and the normalised input in half precision, where a fused one
    keeps the input; a gated MLP silu(gate) beside gate, up and their product."""
    norms = 2 * FULL * ROWS * HIDDEN if model.norm == "rmsnorm" else ZERO
    gelu = 3 * HALF * TOKENS * INNER if _composite_gelu(model) else ZERO
    return norms + gelu + (HALF * TOKENS * INNER if model.gated_mlp else ZERO)


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
    forward = Max(ACTIVATION * (2 + 5 / TP) + 2 * SCORES, saved + 2 * ACTIVATION, evaluate=False)
    backward = ACTIVATION * (3 + 3 / TP) + 3 * SCORES + norms / 2
    return forward - saved + SCORES, backward - saved + SCORES


def _norm_parameters(model: LayerSpec) -> Expr:
    norms = model.parallel_norms if model.parallel_block else 2
    return Integer(norms * model.norm_parameters)


def edge_parameters(model: ModelSpec, options: LayerOptions, role: StageRole) -> tuple[Expr, Expr]:
    """Elements of embedding and head on one rank of a stage of this role.

    Tied weights exist once where one stage has both ends, twice in a pipeline.
    """
    first = parameters(embedding(model, options)) if role.has_embedding else ZERO
    last = parameters(whole_head(model, options)) if role.has_head else ZERO
    if model.tied_embeddings and role is StageRole.ONLY:
        last = last - VOCAB_SHARE * HIDDEN
    return first, last


def stage_memory(model: ModelSpec, options: LayerOptions, facts: MemoryFacts, role: StageRole) -> StageMemory:
    """All terms and candidates of one stage."""
    found = blocks(model, options)
    kinds = tuple(_kind(block, len(found), options, facts.modules) for block in found)
    states = _states(model, options, facts, role)
    piped = facts.pipe_buffers and role is not StageRole.ONLY
    pipe = _pipe_buffers(facts, role) if piped else NO_BUFFERS
    states["buffers"] = states["buffers"] + pipe.held
    held = sum(states.values(), start=ZERO)
    per_micro_batch = sum(
        (
            (kind.layers - kind.ckpt) * kind.saved * (1 - OFFLOAD.activations) + kind.ckpt * kind.kept_input
            for kind in kinds
        ),
        start=ZERO,
    )
    # Offloaded tensors pass through the GPU: one layer's on the way out, one layer's on the way back.
    per_micro_batch_once = OFFLOAD.activations * _most([kind.present * kind.saved for kind in kinds])
    edge = _edge_activations(model, options, facts, role) + pipe.per_micro_batch
    activations = IN_FLIGHT * (per_micro_batch + edge) + per_micro_batch_once
    others = (IN_FLIGHT - 1) * (per_micro_batch + edge)
    peaks = {
        "backward": held + activations + _most([kind.present * kind.backward for kind in kinds]),
        "forward": held + activations + _most([kind.present * kind.forward for kind in kinds]),
    }
    if facts.recomputes_first_layers:
        kept = sum((kind.ckpt * kind.kept_input for kind in kinds), start=ZERO)
        live = _most([kind.present * (kind.saved + kind.backward) for kind in kinds])
        peaks["recompute"] = held + others + edge + kept + live
    else:
        # Recomputation meets everything kept; without recomputed layers nothing is made again. The live
        # layer's tensors are counted once: as made again when it is recomputed, else in activations.
        live = _most([kind.present * (kind.recomputing * kind.saved + kind.backward) for kind in kinds])
        peaks["backward"] = held + activations + live
    if role.has_head:
        at_loss = _head_transients(options, facts.modules) + depths_kept(model, options)
        peaks["loss"] = held + activations + at_loss - pipe.own_logits
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
class _Kind:
    """A kind of layer on a stage."""

    layers: Expr
    ckpt: Expr
    present: Expr
    """1 where the stage has a layer of this kind."""
    recomputing: Expr
    """1 where it recomputes one."""
    saved: Expr
    kept_input: Expr
    forward: Expr
    backward: Expr


def _kind(block: Block, kinds: int, options: LayerOptions, modules: Modules) -> _Kind:
    memory = layer_memory(block.kind, options, modules)
    return _Kind(
        layers=block.layers,
        ckpt=block.ckpt,
        present=_present(block, kinds),
        recomputing=block.ckpt / Max(block.ckpt, 1, evaluate=False),
        saved=block.own(memory.saved),
        kept_input=block.own(memory.kept_input),
        forward=block.own(memory.forward),
        backward=block.own(memory.backward),
    )


def _present(block: Block, kinds: int) -> Expr:
    """1 where a stage has a layer of this kind; every stage has one of an only kind."""
    return ONE if kinds == 1 else block.layers / Max(block.layers, 1, evaluate=False)


def _most(sizes: Sequence[Expr]) -> Expr:
    """The largest, over kinds of layers."""
    return sizes[0] if len(sizes) == 1 else Max(*sizes, evaluate=False)


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
    inner = sum((block.layers * block.parameters for block in blocks(model, options)), start=ZERO)
    return inner + first + last


def _sharded(switch: Expr, ranks: Expr) -> Expr:
    """Divisor of what is split over ranks when the switch is 1."""
    return 1 + switch * (ranks - 1)


def _states(model: ModelSpec, options: LayerOptions, facts: MemoryFacts, role: StageRole) -> dict[str, Expr]:
    """Weights, gradients and optimizer states by ZeRO level and offload, and the buffers they need."""
    kinds = blocks(model, options)
    inner = sum((kind.layers * kind.parameters for kind in kinds), start=ZERO)
    first, last = edge_parameters(model, options, role)
    ranks = DP * CP
    follow = facts.edges_follow
    grad, optimizer = facts.grad_bytes, facts.optimizer_bytes

    of_head = expert_parameters(whole_head(model, options)) if role.has_head else ZERO
    of_layers = sum((kind.layers * kind.expert_parameters for kind in kinds), start=ZERO)
    experts = of_layers + of_head
    # Split over the ranks that have copies of the same experts.
    copies = TP * CP * DP / (EP * ETP)
    inner, last = inner - of_layers, last - of_head

    def term(size: int, switch: Expr, offloaded: Expr, edge_switch: Expr) -> Expr:
        return dense_term(size, switch, offloaded, edge_switch) + size * experts / _sharded(switch, copies)

    def dense_term(size: int, switch: Expr, offloaded: Expr, edge_switch: Expr) -> Expr:
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
        # Traffic beside products is for sequence parallelism alone.
        "framework": Integer(int(facts.framework_bytes)) + facts.overlap_buffers * SP * GATHERED,
    }
    if facts.step.kept_gradient:
        kept = term(facts.step.kept_gradient, Z1, OFFLOAD.optimizer, ONE) * _any(OFFLOAD.optimizer)
        states["optimizer"] = states["optimizer"] + kept
    if facts.modules == "transformer_engine":
        # One unused half-precision weight gradient is kept per distinct weight shape: the real one is added
        # to the fp32 buffer inside the GEMM, and autograd is handed this instead.
        alike = {_matrices(kind.kind): kind for kind in reversed(kinds)}
        kept_once = sum(
            (
                _present(kind, len(kinds)) * (_once(kind) - _norm_parameters(kind.kind))
                for kind in alike.values()
            ),
            start=ZERO,
        )
        states["buffers"] = states["buffers"] + HALF * kept_once
    return states


def _widest(model: ModelSpec, options: LayerOptions, role: StageRole) -> Expr:
    """Parameters of the largest of layers, embedding and head."""
    edges, kinds = edge_parameters(model, options, role), blocks(model, options)
    layers = [_present(kind, len(kinds)) * kind.parameters for kind in kinds]
    return Max(*layers, *(e for e in edges if e != ZERO), evaluate=False)


def _once(kind: Block) -> Expr:
    """A layer's elements, those of one of its experts only: all have the same shapes."""
    if kind.expert_parameters == ZERO:
        return kind.parameters
    return kind.parameters - kind.expert_parameters * (1 - 1 / OWN_EXPERTS)


def _matrices(layer: LayerSpec) -> tuple[int, ...]:
    """What decides the shapes of a layer's matrices."""
    return layer.hidden, layer.query_width, layer.kv_width, layer.ffn_hidden, int(layer.gated_mlp)


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
