"""What reductions of ZeRO 0 and 1 add to the last backward pass of an iteration.

A layer's gradients leave when its backward pass has ended, beside the layer that comes next: those of a head
beside the stage's last layer, those of its first layer beside the embedding, and those of the embedding
beside nothing. They go over one communicator, one after the other, and hold nothing up. What the head's take
longer than the layer beside them hides behind whatever the following layers leave of their time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mist_megatron.cost.terms import ZERO, Linear, of_kind
from mist_megatron.cost.work import LayerWork, PassWork, StageWork
from mist_megatron.price.overlap import COMPUTE, GPU_GPU, overlapped_time
from mist_megatron.price.prices import Array


def counted_apart(work: StageWork, layer: LayerWork) -> PassWork:
    """The last backward pass without them."""
    if layer.last is layer.backward:
        return layer.last
    reduce_s = np.where(work.grid.zero <= 1.0, layer.backward.reduce_s, layer.last.reduce_s)
    return replace(layer.last, reduce_s=reduce_s)


def last_reductions(work: StageWork) -> Linear:
    """In d, of a stage that is no chunks; of single layers (`StageGrid.runs`) what each adds."""
    grid, factors = work.grid, work.context.interference
    edges = [_reduced_s(work, layer) for layer in (work.head, work.embedding)]
    blocks = [_reduced_s(work, block.kept) for block in work.blocks]
    if not any(np.any(seconds) for seconds in (*edges, *blocks)):
        return Linear()

    def beside_s(compute_s: Array, reduce_s: Array) -> Array:
        return overlapped_time((compute_s, reduce_s, ZERO, ZERO), factors) - compute_s

    added, spare_s = Linear(), ZERO
    for place, (block, reduce_s) in enumerate(zip(work.blocks, blocks, strict=True)):
        kept_s, whole_s = (beside_s(_compute_s(one), reduce_s) for one in (block.kept, block.recomputed))
        added = added + of_kind(place, kept_s, whole_s - kept_s)
        spare_s = spare_s + grid.by_kind[place].layers * np.maximum(_at_end_s(work, place) - reduce_s, 0.0)
    first, last = (grid.runs[0][0], grid.runs[-1][1]) if grid.runs else (0, 0)
    if last >= 0:
        compute_s = _at_end_s(work, last)
        added = added + Linear(beside_s(compute_s, edges[0]) - beside_s(compute_s, blocks[last]))
        if first >= 0 and np.any(edges[0]):
            own_s = np.maximum(compute_s - blocks[last], 0.0)
            hidden_s = np.minimum(np.maximum(edges[0] - compute_s, 0.0), np.maximum(spare_s - own_s, 0.0))
            slow_compute, slow = (float(factors[0b0011, stream]) for stream in (COMPUTE, GPU_GPU))
            added = added + Linear(-hidden_s * (1.0 - slow * (1.0 - 1.0 / slow_compute)))
    if first >= 0:
        beside = ZERO if work.embedding is None else _compute_s(work.embedding)
        added = added + Linear(beside_s(beside, blocks[first]) + edges[1])
    return added


def _reduced_s(work: StageWork, layer: LayerWork | None) -> Array:
    """Gradients of a layer that leave in the last backward pass only."""
    if layer is None or layer.last is layer.backward:
        return ZERO
    return np.where(work.grid.zero <= 1.0, layer.last.reduce_s - layer.backward.reduce_s, 0.0)


def _compute_s(layer: LayerWork) -> Array:
    return layer.last.compute_s + layer.accumulate_s


def _at_end_s(work: StageWork, place: int) -> Array:
    """Of a layer of that kind: kept, where any is."""
    block, count = work.blocks[place], work.grid.by_kind[place]
    kept_s, whole_s = _compute_s(block.kept), _compute_s(block.recomputed)
    if block.recomputed is block.kept:
        return kept_s
    return np.where((count.ckpt < count.layers) | (count.layers == 0.0), kept_s, whole_s)
