"""Stages of models whose layers differ: which layers they may have, and their grids.

A stage's time and memory follow from its place in the model as well as from its size: slots are pairs of a
first layer and a number of layers. Those with the same kinds at their ends are priced in one grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mist_megatron.cost.grid import Ends as Kinds
from mist_megatron.cost.grid import LayerCount, StageGrid
from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.choices import AXES, Array, Ints, slot_at, stage_grid
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.spec.recompute import Recompute
from mist_megatron.spec.schedule import even_chunks
from mist_megatron.targets.table import TARGETS

Slot = tuple[int, int]
"""First layer of a stage, and how many it has."""
MOST = 256
"""Kinds of stages of which it is kept what layers they have: all shapes of as many stages have the same."""


def slots_of(question: SearchProblem, shape: EqualPipeline, position: int) -> Mapping[int, Sequence[Slot]]:
    """Slots of a stage, by their first layer."""
    uneven = question.space.uneven_layers and shape.vpp == 1
    return _slots(question.evaluator.job.model.layers, shape.stages, position, uneven)


@lru_cache(maxsize=MOST)
def _slots(layers: int, stages: int, position: int, uneven: bool) -> dict[int, list[Slot]]:
    each, behind = layers // stages, stages - 1 - position
    if not uneven:
        return {position * each: [(position * each, each)]} if layers % stages == 0 else {}
    firsts = range(position, layers - behind) if position else range(1)
    return {
        first: [(first, layers - first)]
        if not behind
        else [(first, count) for count in range(1, layers - first - behind + 1)]
        for first in firsts
    }


def slots_at(question: SearchProblem, shape: EqualPipeline, positions: Iterable[int]) -> tuple[Slot, ...]:
    """Slots of stages at any of these positions, in order."""
    uneven = question.space.uneven_layers and shape.vpp == 1
    return _slots_at(question.evaluator.job.model.layers, shape.stages, tuple(positions), uneven)


@lru_cache(maxsize=MOST)
def _slots_at(layers: int, stages: int, positions: tuple[int, ...], uneven: bool) -> tuple[Slot, ...]:
    every = (_slots(layers, stages, position, uneven).values() for position in positions)
    return tuple(sorted({slot for of_first in every for some in of_first for slot in some}))


Around = tuple[tuple[Kinds, ...], int | None]
"""Kinds at the ends of a stage's chunks, and, where its boundaries may differ, of the layer before it."""
Alike = tuple[Sequence[Slot], Around]
Group = tuple[Alike, Ints]
"""Slots that are alike, and which of all they are."""


def groups_of(question: SearchProblem, shape: EqualPipeline, slots: Sequence[Slot]) -> Sequence[Group]:
    """Slots by what is around them."""
    model = question.evaluator.job.model
    return _groups(model.kind_of_layer, model.alike, shape.vpp, tuple(slots))


@lru_cache(maxsize=MOST)
def _groups(kinds: tuple[int, ...], alike: bool, vpp: int, slots: tuple[Slot, ...]) -> tuple[Group, ...]:
    rows: dict[Around, list[int]] = {}
    for row, slot in enumerate(slots):
        chunks = even_chunks(len(kinds), *slot, vpp)
        runs = tuple((kinds[chunk[0]], kinds[chunk[-1]]) for chunk in chunks)
        before = kinds[slot[0] - 1] if slot[0] and not alike else None
        rows.setdefault((runs, before), []).append(row)
    return tuple(
        (([slots[row] for row in own], around), np.array(own, dtype=np.intp)) for around, own in rows.items()
    )


def slots_grid(
    question: SearchProblem,
    shape: EqualPipeline,
    alike: Alike,
    axes: dict[str, Array],
    position: int,
    recompute: Recompute,
) -> tuple[StageGrid, Ints]:
    """The evaluator's grid of these stages, along an axis before the others; and which of its rows each is,
    of which those that are the same are one."""
    job, (slots, (runs, before)) = question.evaluator.job, alike
    first_ones = TARGETS[job.target].memory(job.execution).recomputes_first_layers
    again = tuple((axes["ckpt"].reshape(-1) // shape.vpp).astype(np.intp).tolist())
    known = _layers_of(job.model.kind_of_layer, shape.vpp, tuple(slots), again, first_ones)
    grid = stage_grid(shape, slot_at(shape, position, 1), axes, recompute=recompute)
    grid = replace(
        grid,
        layers=known.layers,
        counts=known.counts,
        runs=runs,
        before=before,
        end_chunks=known.end_chunks,
    )
    return grid, known.places


class _Layers(NamedTuple):
    """Stages that have as many layers of each kind, and recompute as many, each once: nothing else of a stage
    with the same kinds at its ends is of any matter."""

    layers: Array
    counts: tuple[LayerCount, ...]
    end_chunks: tuple[tuple[LayerCount, ...], ...]
    places: Ints
    """Which of them each stage is."""


@lru_cache(maxsize=MOST)
def _layers_of(
    kinds: tuple[int, ...], vpp: int, slots: tuple[Slot, ...], ckpt: tuple[int, ...], first_ones: bool
) -> _Layers:
    """Layers of slots by kind, where each chunk recomputes so many, the first ones or the last."""
    starts, lengths = _chunks(len(kinds), slots, vpp)
    again = np.minimum(np.array(ckpt, dtype=np.intp)[None, None, :], lengths[..., None])
    begin = starts[..., None] if first_ones else starts[..., None] + lengths[..., None] - again
    counts, of_chunks = [], []
    for kind in range(max(kinds) + 1):
        until = np.array([0, *accumulate(int(k == kind) for k in kinds)], dtype=np.float64)
        layers, some = until[starts + lengths] - until[starts], until[begin + again] - until[begin]
        counts.append(_sized(layers.sum(axis=1), some.sum(axis=1)))
        of_chunks.append([_sized(layers[:, end], some[:, end]) for end in (0, -1)])
    every = [counts, *zip(*of_chunks, strict=True)] if vpp > 1 else [counts]
    rows = np.concatenate(
        [
            part.reshape(len(slots), -1)
            for some_of in every
            for count in some_of
            for part in (count.layers, count.ckpt)
        ],
        axis=1,
    )
    _, first, places = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    own, *ends = (
        tuple(LayerCount(count.layers[first], count.ckpt[first]) for count in some_of) for some_of in every
    )
    whole = np.array([float(count) for _, count in slots]).reshape(-1, 1, *(1,) * (len(AXES) - 1))
    return _Layers(whole[first], own, tuple(ends), places.reshape(-1))


def _sized(layers: Array, ckpt: Array) -> LayerCount:
    """By slot and configuration: layers, and those of them that are recomputed, by slot and number."""
    one = (1,) * (len(AXES) - 1)
    return LayerCount(layers.reshape(-1, 1, *one), ckpt.reshape(len(layers), -1, *one))


def _chunks(total: int, slots: Sequence[Slot], vpp: int) -> tuple[Ints, Ints]:
    """First layer and length of each chunk of each slot."""
    chunks = [even_chunks(total, *slot, vpp) for slot in slots]
    starts = np.array([[chunk.start for chunk in row] for row in chunks], dtype=np.intp)
    return starts, np.array([[len(chunk) for chunk in row] for row in chunks], dtype=np.intp)
