"""Memory of a pipeline stage as named expressions in the configuration symbols.

Every candidate for the peak is linear in layers, recomputed layers, micro-batches in flight and offload
fractions, given micro-batch and parallel sizes: the search relies on it. (Where the target's rules tie the
optimizer's fraction to others, buffers may appear with the first of it: there every fraction is priced.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mist_megatron.cost.algebra import Expr, maximum, number
from mist_megatron.cost.blocks import Block, Edge, blocks, first_edge
from mist_megatron.cost.entries import outside_bytes
from mist_megatron.cost.layer_memory import layer_memory, norm_elements
from mist_megatron.cost.layers import LayerOptions, expert_parameters, saved_bytes
from mist_megatron.cost.mtp import depths_kept, head_edge
from mist_megatron.cost.narrow import narrow_elements
from mist_megatron.cost.offloaded import Moved, moved_bytes
from mist_megatron.cost.operators import ZERO
from mist_megatron.cost.shapes import (
    ACTIVATION,
    FULL,
    GATHERED,
    HALF,
    OWN_EXPERTS,
    SCORES,
    TOKENS,
    VOCAB_SHARE,
)
from mist_megatron.cost.symbols import (
    CP,
    DP,
    EP,
    ETP,
    HIDDEN,
    IN_FLIGHT,
    INSTANCES,
    LONE,
    OFFLOAD,
    SP,
    TP,
    Z1,
    Z2,
    Z3,
    B,
    S,
    own_symbol,
)
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.model import ModelSpec
from mist_megatron.targets.facts import MemoryFacts, Modules

ONE = number(1)


@dataclass(frozen=True)
class StageMemory:
    """What a stage holds (`terms`), and the moments at which it may hold most (`peaks`)."""

    terms: dict[str, Expr]
    """weights, grads, optimizer, buffers, framework: held throughout; activations: at the peak of
    backward."""
    peaks: dict[str, Expr]
    """Everything held at each moment; the largest is the stage's peak."""
    on_host: Expr = ZERO
    """What modules that are offloaded keep in host memory."""

    @property
    def peak(self) -> Expr:
        return maximum(*self.peaks.values())


def edge_parameters(model: ModelSpec, options: LayerOptions, role: StageRole) -> tuple[Expr, Expr]:
    """Elements of embedding and head on one rank of a stage of this role.

    Tied weights exist once where one stage has both ends, twice in a pipeline.
    """
    return _of_edges(model, options, role, lambda edge: edge.parameters)


def edge_weights(model: ModelSpec, options: LayerOptions, role: StageRole) -> tuple[Expr, Expr]:
    """The same with those that are frozen."""
    return _of_edges(model, options, role, lambda edge: edge.weights)


def _of_edges(
    model: ModelSpec, options: LayerOptions, role: StageRole, elements: Callable[[Edge], Expr]
) -> tuple[Expr, Expr]:
    head = head_edge(model, options)
    first = elements(first_edge(model, options)) if role.has_embedding else ZERO
    last = elements(head) if role.has_head else ZERO
    if model.tied_embeddings and role is StageRole.ONLY and last != ZERO:
        last = last - head.own(VOCAB_SHARE * HIDDEN)
    return first, last


def shared_table(model: ModelSpec, options: LayerOptions, role: StageRole) -> Expr:
    """Elements of a copy of the token table, on a stage where decoder tokens are looked up in it (T5) that
    has neither the embedding nor a head that is tied to it."""
    if role.has_embedding or (role.has_head and model.tied_embeddings):
        return ZERO
    of_blocks = blocks(model, options)
    tables = (
        _present(block, len(of_blocks)) * block.own(VOCAB_SHARE * HIDDEN)
        for block in of_blocks
        if block.kind.entry is not None and block.kind.entry.table == "shared"
    )
    return sum(tables, start=ZERO)


def stage_memory(model: ModelSpec, options: LayerOptions, facts: MemoryFacts, role: StageRole) -> StageMemory:
    """All terms and candidates of one stage."""
    of_blocks = blocks(model, options)
    kinds = tuple(_kind(block, len(of_blocks), options, facts) for block in of_blocks)
    states = _states(model, options, facts, role)
    piped = facts.pipe_buffers and role is not StageRole.ONLY
    pipe = _pipe_buffers(facts, role) if piped else NO_BUFFERS
    states["buffers"] = states["buffers"] + pipe.held
    held = sum(states.values(), start=ZERO)
    per_micro_batch = sum((_kept(kind) for kind in kinds), start=ZERO)
    # Offloaded tensors pass through the GPU: one layer's on the way out, one layer's on the way back.
    per_micro_batch_once = OFFLOAD.activations * _most([kind.present * kind.saved for kind in kinds])
    passing = _most([kind.present * kind.moved.freed for kind in kinds])
    per_micro_batch_once = per_micro_batch_once + _paired(kinds, facts) + _passing(role) * passing
    edge = _edge_activations(model, options, facts, role) + pipe.per_micro_batch
    edge = edge + sum((kind.present * kind.passing for kind in kinds[-1:]), start=ZERO)
    activations = IN_FLIGHT * (per_micro_batch + edge) + per_micro_batch_once
    others = (IN_FLIGHT - 1) * (per_micro_batch + edge) + (_passing(role) - 2) * passing
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
        at_loss = _head_transients(model, options, facts.modules) + depths_kept(model, options)
        at_loss = head_edge(model, options).own(at_loss)
        peaks["loss"] = held + activations + at_loss - pipe.own_logits
    if role.has_embedding and facts.table_gradient and not model.patch_elements:
        at_table = HALF * VOCAB_SHARE * HIDDEN + 2 * ACTIVATION
        peaks["embedding"] = held + others + first_edge(model, options).own(at_table)
    if facts.gradients_return:
        peaks["reduction"] = held + facts.grad_bytes * _elements(model, options, role) * OFFLOAD.grads
    if piped:
        # Beside the bucket that the engine keeps, its reduction takes another one.
        peaks["reduction"] = held + HALF * number(int(facts.bucket_elements))
    if facts.step.scratch or facts.step.widened:
        # Not where the gradients to step with are kept throughout: `held` has them.
        made = 1 - _any(OFFLOAD.optimizer) if facts.step.kept_gradient else ONE
        # Levels 1 and 2 give their buckets back when all gradients are reduced; level 3 keeps its one.
        released = (1 - Z3) * _buckets(facts)
        peaks["step"] = held - released + _step_copies(model, options, facts, role) * made
        if facts.step.of_layer:
            # The last is the head's, or a layer's, when the forward pass before it has been kept.
            widest = _widest(model, options, role) / _sharded(Z1, DP * CP)
            peaks["layer_step"] = held + activations + facts.step.of_layer * widest * made
    on_host = sum(((kind.layers - kind.ckpt) * kind.moved.copied for kind in kinds), start=ZERO)
    return StageMemory({**states, "activations": activations}, peaks, IN_FLIGHT * on_host)


def _step_copies(model: ModelSpec, options: LayerOptions, facts: MemoryFacts, role: StageRole) -> Expr:
    """Of the parameters whose states a rank has on its GPU. All gradients are copied before either of the
    optimizers steps, that of experts and that of all else; their moments while it does."""
    instances, together = _instances(facts)
    experts = sum(_experts(model, options, role), start=ZERO)
    others = (_elements(model, options, role) - experts) / _sharded(Z1, DP * CP / instances * together)
    experts = experts / _sharded(Z1, TP * CP * DP / (EP * ETP) / instances * together)
    copies = facts.step.scratch * (others + experts) + facts.step.widened * maximum(others, experts)
    return copies * (1 - OFFLOAD.optimizer)


def _kept(kind: _Kind) -> Expr:
    """On the GPU between its passes, of all layers of a kind."""
    saved = kind.saved * (1 - OFFLOAD.activations) - kind.moved.freed
    return (kind.layers - kind.ckpt) * saved + kind.ckpt * kind.kept_input


def _passing(role: StageRole) -> int:
    """Layers of which modules that are offloaded are on the GPU at once: the one that runs and the one that
    leaves, which the next one waits for (--fine-grained-offloading-max-inflight-offloads 1); in a pipeline
    also the one that the next backward pass begins with, which comes while a forward pass runs
    (`pre_reload_last_layer`), or, while a pipeline warms up, the last one of the pass before. Where a
    backward pass follows at once that one has never left. The limit is of each chunk and micro-batch alone:
    where chunks have one layer nothing waits for slow copies, and what is in flight may all be there: of
    such chunks memory counts all (LONE)."""
    return 2 if role is StageRole.ONLY else 3


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
    moved: Moved
    """What leaves of it for host memory."""
    passing: Expr
    """Of an encoder's output, which all its layers read and keep once."""


def _kind(block: Block, kinds: int, options: LayerOptions, facts: MemoryFacts) -> _Kind:
    memory = layer_memory(block.kind, options, facts.modules, passes_back=block.passes_back)
    source, moved = block.kind.cross_attention, moved_bytes(block.kind, options)
    leaves = 1 - own_symbol(LONE, block.kind.name) if options.offloaded else ONE
    return _Kind(
        layers=block.layers,
        ckpt=block.ckpt,
        present=_present(block, kinds),
        recomputing=block.ckpt / maximum(block.ckpt, 1),
        saved=block.own(memory.saved + facts.graph_buffers * ACTIVATION),
        kept_input=block.own(memory.kept_input),
        forward=block.own(memory.forward),
        backward=block.own(memory.backward),
        moved=Moved(block.own(moved.freed) * leaves, block.own(moved.copied)),
        passing=ZERO if source is None else block.own(outside_bytes(source)),
    )


def _paired(kinds: Sequence[_Kind], facts: MemoryFacts) -> Expr:
    """Of the micro-batch behind, while one goes back layer by layer (model_chunk_schedule_plan.py of
    Megatron-core): each layer that is given back makes room for one that comes in, which is whole by then.
    The further chunk that interleaving warms up for it stands for the chunk that would come in."""
    if not facts.pairs_layers:
        return ZERO
    layers = [kind.saved + kind.forward for kind in kinds]
    if facts.delays_weight_grads:
        layers = [beside + kind.backward for beside, kind in zip(layers, kinds, strict=True)]
    return _most([kind.present * layer for kind, layer in zip(kinds, layers, strict=True)])


def _present(block: Block, kinds: int) -> Expr:
    """1 where a stage has a layer of this kind; every stage has one of an only kind."""
    return ONE if kinds == 1 else block.layers / maximum(block.layers, 1)


def _most(sizes: Sequence[Expr]) -> Expr:
    """The largest, over kinds of layers."""
    return sizes[0] if len(sizes) == 1 else maximum(*sizes)


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
    return number(int(facts.bucket_elements)) * width * pair * Z1


def _elements(model: ModelSpec, options: LayerOptions, role: StageRole) -> Expr:
    first, last = edge_parameters(model, options, role)
    inner = sum((block.layers * block.parameters for block in blocks(model, options)), start=ZERO)
    return inner + first + last


def _experts(model: ModelSpec, options: LayerOptions, role: StageRole) -> tuple[Expr, Expr]:
    """Those of them that are experts', of the layers and of the head's depths."""
    of_layers = (kind.layers * kind.expert_parameters for kind in blocks(model, options))
    of_head = expert_parameters(head_edge(model, options).operators) if role.has_head else ZERO
    return sum(of_layers, start=ZERO), of_head


def _instances(facts: MemoryFacts) -> tuple[Expr, Expr]:
    """Sub-groups of the replicas, and how many of them share out one set of optimizer states."""
    instances = INSTANCES if facts.instances else ONE
    return instances, instances if facts.joint_states else ONE


def _sharded(switch: Expr, ranks: Expr) -> Expr:
    """Divisor of what is split over ranks when the switch is 1."""
    return 1 + switch * (ranks - 1)


def _states(model: ModelSpec, options: LayerOptions, facts: MemoryFacts, role: StageRole) -> dict[str, Expr]:
    """Weights, gradients and optimizer states by ZeRO level and offload, and the buffers they need."""
    kinds = blocks(model, options)
    inner = sum((kind.layers * kind.parameters for kind in kinds), start=ZERO)
    still = sum((kind.layers * kind.still for kind in kinds), start=ZERO)
    first, last = edge_parameters(model, options, role)
    still_edges = sum(edge_weights(model, options, role), start=ZERO) - first - last if still else ZERO
    first = first + shared_table(model, options, role)
    instances, together = _instances(facts)
    ranks = DP * CP / instances
    follow = facts.edges_follow
    grad, optimizer = facts.grad_bytes, facts.optimizer_bytes

    of_layers, of_head = _experts(model, options, role)
    experts = of_layers + of_head
    # Split over the ranks that have copies of the same experts.
    copies = TP * CP * DP / (EP * ETP) / instances
    inner, last = inner - of_layers, last - of_head

    def term(size: int, switch: Expr, offloaded: Expr, edge_switch: Expr, times: Expr = ONE) -> Expr:
        of_experts = size * experts / _sharded(switch, copies * times)
        return dense_term(size, switch, offloaded, edge_switch, ranks * times) + of_experts

    def dense_term(size: int, switch: Expr, offloaded: Expr, edge_switch: Expr, among: Expr) -> Expr:
        if follow:
            return size * (inner + first + last) / _sharded(switch, among) * (1 - offloaded)
        edges = (first + last) / _sharded(edge_switch, among)
        return size * (inner / _sharded(switch, among) * (1 - offloaded) + edges)

    frozen_bytes = HALF * (still + still_edges) / _sharded(Z3, ranks)
    second_bytes = _second_copy(inner + first + last + still + still_edges, facts)
    more_bytes = frozen_bytes + second_bytes + _narrow_weights(model, options, role, (ranks, copies))
    needs_weights, needs_grads = _either(Z3, OFFLOAD.weights), _either(Z2, OFFLOAD.grads)
    weights, grads = _at_once(facts, _widest_layer(kinds), _widest(model, options, role), first + last)
    buffers = HALF * weights * needs_weights + _buckets(facts) + number(grad) * grads * needs_grads
    states = {
        "weights": term(2, Z3, OFFLOAD.weights, ZERO) + more_bytes,
        "grads": term(grad, Z2, OFFLOAD.grads, ZERO),
        "optimizer": term(optimizer, Z1, OFFLOAD.optimizer, ONE, together),
        "buffers": buffers,
        # Traffic beside products is for sequence parallelism alone.
        "framework": number(int(facts.framework_bytes)) + facts.overlap_buffers * SP * GATHERED,
    }
    if facts.step.kept_gradient:
        kept = term(facts.step.kept_gradient, Z1, OFFLOAD.optimizer, ONE) * _any(OFFLOAD.optimizer)
        states["optimizer"] = states["optimizer"] + kept
    if facts.modules == "transformer_engine":
        # One unused half-precision weight gradient is kept per distinct weight shape: the real one is added
        # to the fp32 buffer inside the GEMM, and autograd is handed this instead.
        alike = {_matrices(kind.kind): kind for kind in reversed(kinds) if not kind.kind.still}
        kept_once = sum(
            (
                _present(kind, len(kinds)) * (_once(kind) - norm_elements(kind.kind))
                for kind in alike.values()
            ),
            start=ZERO,
        )
        states["buffers"] = states["buffers"] + HALF * kept_once
    return states


def _second_copy(weights: Expr, facts: MemoryFacts) -> Expr:
    """Of trained and frozen weights of ZeRO 3, in each sub-group of replicas, where there are several."""
    if not facts.second_weights:
        return ZERO
    several = (INSTANCES - 1) / maximum(INSTANCES - 1, 1)
    return HALF * weights * Z3 * several * INSTANCES / (DP * CP)


def _narrow_weights(
    model: ModelSpec, options: LayerOptions, role: StageRole, among: tuple[Expr, Expr]
) -> Expr:
    """Cast weights, over ranks that may share out dense ones and experts."""
    if not options.narrow_weight_bytes:
        return ZERO
    parts = [(kind.layers, kind.narrow) for kind in blocks(model, options)]
    if role.has_head:
        parts.append((ONE, narrow_elements(head_edge(model, options).operators)))
    dense = sum((times * narrow.dense for times, narrow in parts), start=ZERO)
    experts = sum((times * narrow.experts for times, narrow in parts), start=ZERO)
    if options.narrow_weights_alone:
        dense, experts = dense / _sharded(Z3, among[0]), experts / _sharded(Z3, among[1])
    return (dense + experts) * number(options.narrow_weight_bytes)


def _at_once(facts: MemoryFacts, layer: Expr, widest: Expr, edges: Expr) -> tuple[Expr, Expr]:
    """Whole weights and gradients on the device of what is sharded or offloaded, in elements."""
    if facts.units_are_layers:
        return facts.weights_at_once * layer + edges, 2 * layer + widest
    return facts.weights_at_once * widest, facts.grads_at_once * widest


def _widest(model: ModelSpec, options: LayerOptions, role: StageRole) -> Expr:
    """Parameters of the largest of layers, embedding and head."""
    edges = edge_weights(model, options, role)
    return maximum(_widest_layer(blocks(model, options)), *(e for e in edges if e != ZERO))


def _widest_layer(kinds: Sequence[Block]) -> Expr:
    return _most([_present(kind, len(kinds)) * kind.weights for kind in kinds])


def _once(kind: Block) -> Expr:
    """A layer's elements, those of one of its experts only: all have the same shapes."""
    if kind.expert_parameters == ZERO:
        return kind.parameters
    return kind.parameters - kind.expert_parameters * (1 - 1 / OWN_EXPERTS)


def _matrices(layer: LayerSpec) -> tuple[object, ...]:
    """What decides the shapes of a layer's matrices."""
    own = layer.hidden, layer.query_width, layer.kv_width, layer.ffn_hidden, int(layer.gated_mlp)
    mixer = layer.mamba, layer.delta_net, layer.half
    return (*own, layer.entry, layer.cross_attention is None, layer.attention_gate, *mixer)


def _any(fraction: Expr) -> Expr:
    """1 for any fraction above 0, else 0."""
    return fraction / maximum(fraction, number(10) ** -9)


def _either(switch: Expr, fraction: Expr) -> Expr:
    """1 when a state is sharded or any of it offloaded, else 0: then a full copy passes through a buffer."""
    return maximum(switch, _any(fraction))


def _edge_activations(model: ModelSpec, options: LayerOptions, facts: MemoryFacts, role: StageRole) -> Expr:
    """Kept per micro-batch outside of the layers: token ids, masks, boundary tensors."""
    kept: Expr = ZERO
    if role.has_embedding:
        kept = kept + saved_bytes(first_edge(model, options).operators)
    if role is not StageRole.ONLY and facts.boundary_tensors_stay:
        kept = kept + 2 * ACTIVATION
    return kept


def _head_transients(model: ModelSpec, options: LayerOptions, modules: Modules) -> Expr:
    """From the last layer's output to the loss and back to its gradient."""
    logits = TOKENS * VOCAB_SHARE
    if modules == "mist_runtime":
        # The buffer of scores that stands in for a fused core lives as long as the stage.
        scores = ZERO if options.flash_attention else SCORES
        return ACTIVATION + 2 * HALF * logits + 16 * B * S + scores
    if modules == "plain_torch":
        # Hugging Face and plain torch: the model's output keeps the half-precision logits; their fp32 copy,
        # the logarithm of the softmax and its gradient are live together; in 32 bits there is no copy. Capped
        # ones keep their tanh.
        capped = ZERO if model.logit_cap is None else HALF * logits
        each = 3 * HALF if options.by_halves else HALF + 3 * FULL
        return each * logits + capped + 3 * ACTIVATION
    # Loss: logits in half and in single precision; maximum, exponent and division work in place.
    at_loss = (HALF + FULL) * logits
    # Head's backward: the logits' gradient and Megatron's unused weight gradient of the whole table.
    at_head = HALF * logits + HALF * VOCAB_SHARE * HIDDEN
    # Norm input and output, their gradients, the boundary tensor; gathered input and gradient with SP.
    return maximum(at_loss, at_head) + 5 * ACTIVATION + SP * 2 * GATHERED
