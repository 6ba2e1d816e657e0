"""Stages of models whose layers differ: which layers they may have, and their grids.

A stage's time and memory follow from its place in the model as well as from its size: slots are pairs of a
first layer and a number of layers. Those with the same kinds at their ends are priced in one grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

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


def slots_of(question: SearchProblem, shape: EqualPipeline, position: int) -> dict[int, list[Slot]]:
    """Slots of a stage, by their first layer."""
    layers, stages = question.evaluator.job.model.layers, shape.stages
    each, behind = layers // stages, stages - 1 - position
    if not question.space.uneven_layers or shape.vpp > 1:
        return {position * each: [(position * each, each)]} if layers % stages == 0 else {}
    firsts = range(position, layers - behind) if position else range(1)
    return {
        first: [(first, layers - first)]
        if not behind
        else [(first, count) for count in range(1, layers - first - behind + 1)]
        for first in firsts
    }


Around = tuple[tuple[Kinds, ...], int | None]
"""Kinds at the ends of a stage's chunks, and, where its boundaries may differ, of the layer before it."""
Alike = tuple[Sequence[Slot], Around]


def around_of(question: SearchProblem, shape: EqualPipeline, slot: Slot) -> Around:
    model = question.evaluator.job.model
    chunks = even_chunks(model.layers, *slot, shape.vpp)
    runs = tuple((model.kind_of_layer[chunk[0]], model.kind_of_layer[chunk[-1]]) for chunk in chunks)
    first = slot[0]
    return runs, model.kind_of_layer[first - 1] if first and not model.alike else None


def slots_grid(
    question: SearchProblem,
    shape: EqualPipeline,
    alike: Alike,
    axes: dict[str, Array],
    position: int,
    recompute: Recompute,
) -> StageGrid:
    """The evaluator's grid of these stages, along an axis before the others."""
    job, (slots, (runs, before)) = question.evaluator.job, alike
    first_ones = TARGETS[job.target].memory(job.execution).recomputes_first_layers
    again = (axes["ckpt"].reshape(-1) // shape.vpp).astype(np.intp)
    one = (1,) * (len(AXES) - 1)
    starts, lengths = _chunks(job.model.layers, slots, shape.vpp)
    again = np.minimum(again[None, None, :], lengths[..., None])
    begin = starts[..., None] if first_ones else starts[..., None] + lengths[..., None] - again
    counts, of_chunks = [], []
    for kind in range(len(job.model.kinds)):
        until = np.array([0, *accumulate(int(k == kind) for k in job.model.kind_of_layer)], dtype=np.float64)
        layers, ckpt = until[starts + lengths] - until[starts], until[begin + again] - until[begin]
        counts.append(_sized(layers.sum(axis=1), ckpt.sum(axis=1)))
        of_chunks.append([_sized(layers[:, end], ckpt[:, end]) for end in (0, -1)])
    grid = stage_grid(shape, slot_at(shape, position, 1), axes, recompute=recompute)
    return replace(
        grid,
        layers=np.array([float(count) for _, count in slots]).reshape(-1, 1, *one),
        counts=tuple(counts),
        runs=runs,
        before=before,
        end_chunks=tuple(zip(*of_chunks, strict=True)) if shape.vpp > 1 else (),
    )


def distinct(grid: StageGrid) -> tuple[StageGrid, Ints]:
    """One of those stages that have as many layers of each kind, and recompute as many: nothing else of a
    stage with the same kinds at its ends is of any matter. And which of them each stage is."""
    counts = [grid.counts, *grid.end_chunks]
    rows = np.concatenate(
        [
            part.reshape(len(grid.layers), -1)
            for some in counts
            for count in some
            for part in (count.layers, count.ckpt)
        ],
        axis=1,
    )
    _, first, places = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    some, *ends = (
        tuple(LayerCount(count.layers[first], count.ckpt[first]) for count in each) for each in counts
    )
    return replace(grid, layers=grid.layers[first], counts=some, end_chunks=tuple(ends)), places.reshape(-1)


def _sized(layers: Array, ckpt: Array) -> LayerCount:
    """By slot and configuration: layers, and those of them that are recomputed, by slot and number."""
    one = (1,) * (len(AXES) - 1)
    return LayerCount(layers.reshape(-1, 1, *one), ckpt.reshape(len(layers), -1, *one))


def _chunks(total: int, slots: Sequence[Slot], vpp: int) -> tuple[Ints, Ints]:
    """First layer and length of each chunk of each slot."""
    chunks = [even_chunks(total, *slot, vpp) for slot in slots]
    starts = np.array([[chunk.start for chunk in row] for row in chunks], dtype=np.intp)
    return starts, np.array([[len(chunk) for chunk in row] for row in chunks], dtype=np.intp)
