"""The head of a model with multi-token prediction: each depth is a projection, a layer and the output layer.

Megatron's multi_token_prediction.py: the hidden state and the next token's embedding are normed, put beside
each other and projected to one width; a layer like the last one and a norm follow, then the output layer that
all depths share, with a loss of its own. It lies with the loss, and is not recomputed here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from mist_megatron.cost.algebra import Expr
from mist_megatron.cost.blocks import Edge, blocks, last_edge
from mist_megatron.cost.layers import LayerOptions, head, norm, saved_bytes
from mist_megatron.cost.narrow import with_narrow_inputs
from mist_megatron.cost.operators import ZERO, Operator, SavedTensor, WorkKind
from mist_megatron.cost.shapes import ACTIVATION, FULL, GATHERED, HALF, TOKENS, VOCAB_SHARE
from mist_megatron.cost.symbols import HIDDEN, SP, TP
from mist_megatron.cost.works import collective_work, products
from mist_megatron.spec.model import ModelSpec


def whole_head(model: ModelSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Final norm, logits and loss, once and for each depth."""
    once = head(model, options)
    again = tuple(_shared(operator) for operator in once)
    own = _of_depths(options)
    depth = (*_joined(model, own), *_layers(model, own), *again)
    if not model.mtp_repeated:
        return once + model.mtp_layers * depth
    return once + depth * (model.mtp_layers > 0) + (model.mtp_layers - 1) * tuple(map(_without, depth))


def _of_depths(options: LayerOptions) -> LayerOptions:
    """Megatron-core enters a context of FP8 for the depths, and none of FP4: these stay in 16 bits."""
    if options.quantization != "nvfp4":
        return options
    return replace(options, eight_bit=False, quantization=None)


@lru_cache(maxsize=64)
def head_edge(model: ModelSpec, options: LayerOptions) -> Edge:
    """That head, as wide and as long as what it works on."""
    return last_edge(model, whole_head(model, options))


def _layers(model: ModelSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Of one depth: a layer like the last one, or those that the model says."""
    by_name = {block.kind.name: block.operators for block in blocks(model, options)}
    return tuple(operator for kind in model.mtp_kinds for operator in by_name[kind.name])


def _shared(operator: Operator) -> Operator:
    """The table of the output layer is that of the first loss; norms are each depth's own."""
    return _without(operator) if operator.name == "logits" else operator


def _without(operator: Operator) -> Operator:
    """With weights that another operator has."""
    return replace(operator, parameters=ZERO, expert_parameters=ZERO)


def _joined(model: ModelSpec, options: LayerOptions) -> tuple[Operator, ...]:
    """Two norms and the projection of both results, column-parallel and gathered."""
    forward, backward = products(
        "mtp_projection", TOKENS, (HIDDEN / TP, 2 * HIDDEN), eight_bit=options.eight_bit
    )
    whole = HALF * TOKENS * HIDDEN
    joined = (
        norm("mtp_norm_hidden", model, options, reads="mtp_hidden"),
        norm("mtp_norm_token", model, options, reads="mtp_token"),
        Operator(
            name="mtp_projection",
            forward=(
                collective_work("mtp_gather", WorkKind.ALL_GATHER, 2 * SP * GATHERED),
                *forward,
                collective_work("mtp_columns", WorkKind.ALL_GATHER, whole),
            ),
            backward=(
                *backward,
                collective_work("mtp_scatter", WorkKind.REDUCE_SCATTER, 2 * SP * GATHERED),
            ),
            saved=(SavedTensor(key="mtp_joined", size_bytes=2 * ACTIVATION, for_weight=True),),
            parameters=2 * HIDDEN * HIDDEN / TP,
        ),
    )
    return with_narrow_inputs(joined, options.quantization)


def depths_kept(model: ModelSpec, options: LayerOptions) -> Expr:
    """Bytes that the depths keep until the loss: each a layer, what was projected, and exponentials
    of logits in single precision (of logits in half precision a depth's loss keeps none)."""
    if not model.mtp_layers:
        return ZERO
    options = _of_depths(options)
    by_name = {block.kind.name: block.operators for block in blocks(model, options)}
    layers = sum((saved_bytes(by_name[kind.name]) for kind in model.mtp_kinds), start=ZERO)
    each = saved_bytes(_joined(model, options)) + layers
    return model.mtp_layers * (each + 2 * ACTIVATION + FULL * TOKENS * VOCAB_SHARE)
