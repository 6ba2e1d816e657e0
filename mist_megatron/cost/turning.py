"""Where activations go to host memory: what a backward pass finds on the device of the layer that it begins
with, and what forward passes that follow each other wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from mist_megatron.cost.layer_runs import Way
from mist_megatron.cost.phases import Phase, phase
from mist_megatron.cost.sends import mean_hop_s
from mist_megatron.cost.terms import ZERO, LayerLoad, Linear
from mist_megatron.cost.work import LayerWork, PassWork, StageWork, kept_layer, recomputed_layer
from mist_megatron.price.overlap import GPU_GPU, until_done
from mist_megatron.price.prices import Array, any_of
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.term import Term


def last_layer_stays(work: StageWork) -> bool:
    """Whether what the stage's last layer saved is still there when its backward pass begins."""
    follows_at_once = work.grid.role.has_head and not work.grid.interleaved
    copies = work.context.facts.host_copies
    return copies.last_comes_early or (copies.last_stays and follows_at_once)


def found_there(work: StageWork, load: LayerLoad) -> LayerWork:
    """A kept layer of which nothing that it saved has to come in before its backward pass."""
    stays = work.grid.offloading(activations=ZERO)
    return kept_layer(stays, replace(load, moved_bytes=ZERO), work.context)


def begun_with(work: StageWork, place: int, kept: LayerWork, *, followed: bool) -> LayerWork:
    """What the first layer of a backward pass waits for, of the kind at that place. Where recomputed layers
    come first nothing that they saved has to come in before it."""
    load = work.loads.blocks[place]
    sends = any_of(work.grid.offload.activations) or any_of(load.moved_bytes)
    return found_there(work, load) if sends and (followed or last_layer_stays(work)) else kept


def recomputed_of(work: StageWork, place: int) -> LayerWork:
    """A layer of that kind that is run again, of stages that recompute nothing too."""
    block = work.blocks[place]
    if block.recomputed is not block.kept:
        return block.recomputed
    return recomputed_layer(work.grid, work.loads.blocks[place], work.context)


def comes_back_s(work: StageWork, place: int) -> Array:
    """What a recomputed layer's backward pass waits for where it is followed by that of a layer whose
    activations come in beside it. Of stages that recompute nothing too, as if they did."""
    if not any_of(work.grid.offload.activations):
        return ZERO
    again = recomputed_of(work, place)
    own, factors = again.backward, work.context.interference
    both = (replace(own, copy_in_s=work.blocks[place].kept.backward.copy_in_s), own)
    arriving, quiet = (phase(one, factors, again.accumulate_s, ZERO).inside_s for one in both)
    return np.asarray(arriving - quiet)


def apart_at_head(work: StageWork, place: int, streams: PassWork, usual: Phase) -> Phase:
    """A forward pass that turns round at the head: nothing leaves beside its first layer, and nothing comes
    in beside its last one, where a pass that another follows has both beside all layers but one."""
    if work.head is None or work.grid.interleaved:
        return usual
    some = (work.grid.by_kind[place].layers > 1.0) & (work.grid.offload.activations > 0.0)
    factors = work.context.interference
    leaving = replace(streams, gather_s=ZERO, copy_in_s=ZERO)
    one, other = (phase(each, factors, ZERO, ZERO) for each in (leaving, replace(streams, copy_out_s=ZERO)))
    apart_s = one.inside_s + other.inside_s - usual.inside_s
    return replace(usual, last_s=usual.last_s + np.where(some, apart_s, 0.0))


def warmed_up(work: StageWork, runs_ended: int | Array, forward: Phase, layer: LayerWork) -> Linear:
    """What d has of forward passes of chunks that follow each other while a pipeline warms up: what the last
    layer of one sends off leaves beside the next, which hides less of it than a backward pass does. Chunks of
    one layer wait for no copies: only layers of a chunk wait for each other's."""
    grid = work.grid
    if not grid.interleaved or not any_of(layer.load.moved_bytes):
        return Linear()
    between = {StageRole.FIRST: 2, StageRole.MIDDLE: 1}.get(grid.role, 0)
    passes = between * (grid.stages - 1) + (grid.vpp - 1) * grid.stages
    waits = np.minimum(passes, grid.grad_accum * grid.vpp - 1.0) - 1.0
    waits = np.where(grid.layers > grid.vpp, waits, 0.0)
    waited_s = waits * runs_ended / grid.vpp * (forward.inside_s - forward.last_s)
    # What the first micro-batch waits for on its way hides as much of that.
    copies = ZERO, layer.forward.copy_out_s
    sent_s, _ = until_done(GPU_GPU, mean_hop_s(work), copies, work.context.interference)
    return Linear(np.maximum(waited_s - (grid.stages * grid.vpp - 1.0) * sent_s, 0.0))


def leaving_s(work: StageWork, grad_accum: int, stages: int) -> Array:
    """How long one of so many stages with chunks sends off what its modules saved, copies of all its chunks
    one after another, but for the layer before the head, which stays. The last to leave is of the last chunk,
    which backward passes begin with: those of its other chunks follow, each for as many micro-batches as
    there are stages, and each when its input has come and the host has begun it."""
    grid, sent_s, back_s = work.grid, ZERO, ZERO
    before_head = (grid.runs[-1][1] if grid.runs else 0) if grid.role.has_head else None
    kinds = zip(work.blocks, work.loads.blocks, grid.by_kind, strict=True)
    for place, (block, load, count) in enumerate(kinds):
        if any_of(load.moved_bytes):
            leaving = np.maximum(count.layers - count.ckpt - (place == before_head), 0.0)
            sent_s = sent_s + leaving * block.kept.forward.copy_out_s
        back_s = back_s + count.layers * (load.backward_s + load.backward_collective_s)
    if not any_of(sent_s):
        return ZERO
    hop_s = ZERO if Term.PIPELINE_P2P in work.context.without else mean_hop_s(work)
    each_s = (back_s + work.host_s / 2) / grid.vpp + hop_s
    return grad_accum * sent_s + (grid.vpp - 1) * stages * each_s


def copies_beside(work: StageWork, place: int, kept: LayerWork) -> list[tuple[float, LayerWork]]:
    """Where modules of some kinds of layers send activations off, such a layer with all that the layers since
    the last one compute besides, and that one's copies in place of its own; and how often each is. Its
    forward pass runs beside what the one before it sends off, its backward pass beside what comes in for
    that one; layers between the two send nothing, and wait for nothing."""
    context, sends = work.context, _sending(work)
    if work.grid.parts or len(sends) == 1 or not sends[place]:
        return []
    every = [block.kept for block in work.blocks]
    shares = _steps(context.kind_of_layer, sends)[place]
    return [
        (share, _with_copies(kept, every[before], [(n, every[kind]) for kind, n in between]))
        for share, before, between in shares
    ]


def _sending(work: StageWork) -> tuple[bool, ...]:
    """Of which kinds of layers modules send activations off."""
    return tuple(any_of(load.moved_bytes) for load in work.loads.blocks)


def turns_taken(work: StageWork, way: Way, forward: Phase) -> Linear:
    """Nothing leaves beside the first layer of a forward pass that sends, but beside its last one what the
    layer before it sends off does. Of layers that are alike a pass has what it counts of one layer less;
    where kinds take turns, that is the kind that it sends first, not the one that it ends with."""
    if not copies_beside(work, way.place, work.blocks[way.place].kept):
        return Linear()
    first = _first_to_send(work.context.kind_of_layer, _sending(work))
    begun = sum(first[kind].get(way.place, 0.0) * way.grid.beginning(kind) for kind in first)
    return Linear((way.runs_ended - begun) * forward.inside_s)


@lru_cache(maxsize=64)
def _first_to_send(kinds: tuple[int, ...], sends: tuple[bool, ...]) -> dict[int, dict[int, float]]:
    """By kind that a pass begins with: how often the first layer from there on that sends is of a kind."""
    found: dict[int, Counter[int]] = {kind: Counter() for kind in set(kinds)}
    following = None
    for kind in reversed(kinds):
        following = kind if sends[kind] else following
        if following is not None:
            found[kind][following] += 1
    return {
        kind: {one: times / counts.total() for one, times in counts.items()} for kind, counts in found.items()
    }


_Between = tuple[tuple[int, int], ...]
"""Kinds of layers, and how many of each."""


@lru_cache(maxsize=64)
def _steps(kinds: tuple[int, ...], sends: tuple[bool, ...]) -> dict[int, list[tuple[float, int, _Between]]]:
    """By kind that sends: how often the last one before it that sends is of a kind, with others between."""
    found: dict[int, Counter[tuple[int, _Between]]] = {kind: Counter() for kind in set(kinds)}
    last, between = None, Counter[int]()
    for kind in kinds:
        if not sends[kind]:
            between[kind] += 1
            continue
        if last is not None:
            found[kind][last, tuple(sorted(between.items()))] += 1
        last, between = kind, Counter[int]()
    return {
        kind: [(times / counts.total(), *pair) for pair, times in counts.items()] or [(1.0, kind, ())]
        for kind, counts in found.items()
    }


def _with_copies(layer: LayerWork, other: LayerWork, between: Sequence[tuple[int, LayerWork]]) -> LayerWork:
    """With another layer's copies of activations beside its passes and those of the layers between."""

    def passes(of: Callable[[LayerWork], PassWork]) -> PassWork:
        own, copies = of(layer), of(other)
        more = sum((n * (of(one).compute_s + of(one).tensor_s) for n, one in between), start=ZERO)
        return replace(
            own,
            compute_s=own.compute_s + more,
            copy_in_s=copies.copy_in_s,
            copy_out_s=copies.copy_out_s,
        )

    return replace(
        layer,
        forward=passes(lambda one: one.forward),
        backward=passes(lambda one: one.backward),
        first=passes(lambda one: one.first),
        last=passes(lambda one: one.last),
    )
