"""What memory adds to bounds of shapes whose stages are alike: the least recomputation with which they fit.

The bound of a shape assumes that nothing is recomputed. Of each split of its layers the kinds and amounts of
recomputation are found here with which a first, a second and a last stage fit, of many shapes at once, and
what the cheapest of them adds to the time of every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.grid import StageGrid
from mist_megatron.search.bounds import EqualBound, SearchProblem, least_recompute, split_bounds
from mist_megatron.search.choices import Array, Ints, ckpt_counts
from mist_megatron.search.least_memory import stages_of
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.splits import split_table, splits_layers
from mist_megatron.spec.kinds import alike
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import RECOMPUTES, Recompute

Pair = tuple[EqualBound, EqualPipeline]
Floored = tuple[float, EqualPipeline]
"""Seconds that no plan of a shape beats."""
AT_ONCE = 64
"""Shapes in one call."""


def rooms(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> dict[EqualPipeline, Array]:
    """By shape and split of its layers: what recomputation adds to t of every stage at least, infinite where
    nothing fits. Only for spaces in which nothing is kept in host memory and stages are alike."""
    groups: dict[tuple[object, ...], list[EqualPipeline]] = {}
    for shape in shapes:
        key = shape.stages, shape.nodes, shape.gpus_per_node, shape.sequence_parallel, shape.vpp
        groups.setdefault(key, []).append(shape)
    added_s: dict[EqualPipeline, Array] = {}
    for members in groups.values():
        for begin in range(0, len(members), AT_ONCE):
            question.tick()
            some = members[begin : begin + AT_ONCE]
            added_s.update(zip(some, _room(question, some), strict=True))
    return added_s


def with_room(
    question: SearchProblem, pairs: Sequence[Pair], added_s: Mapping[EqualPipeline, Array]
) -> tuple[list[Pair], list[Floored]]:
    """Shapes without what does not fit, with bounds that count what must be recomputed; and shapes of which
    some splits do not fit, with bounds of these."""
    roomy: list[Pair] = []
    short: list[Floored] = []
    for bound, shape in pairs:
        value_s, short_s = _values(question, bound, shape, added_s[shape])
        if np.isfinite(value_s):
            roomy.append((replace(bound, value_s=max(bound.value_s, value_s)), shape))
        if np.isfinite(short_s):
            short.append((max(bound.value_s, short_s), shape))
    return roomy, short


def _table(question: SearchProblem, shape: EqualPipeline) -> tuple[Ints, bool]:
    """Splits of the layers, a row each, and whether there are several."""
    layers = question.evaluator.job.model.layers
    if splits_layers(question.space, shape.stages, shape.vpp):
        return split_table(layers, shape.stages, shape.vpp), True
    return np.array([[layers // shape.stages] * shape.stages]), False


def _room(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> Array:
    """By shape, of one pipeline, and split: what recomputation adds to t of every stage at least; infinite
    where nothing fits."""
    table, _ = _table(question, shapes[0])
    added_s = np.full((len(shapes), len(table)), np.inf)
    for recompute in question.space.recompute:
        added_s = np.minimum(added_s, _added(question, shapes, table, recompute))
    return added_s


def _values(
    question: SearchProblem, bound: EqualBound, shape: EqualPipeline, more_s: Array
) -> tuple[float, float]:
    """The bound of a shape, and that of its splits that do not fit."""
    others = shape.grad_accum - 1
    times = others - (0.5 * min(shape.stages - 1, others) if shape.vpp == 1 else 0.0)
    table, several = _table(question, shape)
    values_s = split_bounds(shape, bound.stages, table) if several else np.array([bound.value_s])
    fits = np.isfinite(more_s)
    added = np.where(fits, times * np.where(fits, more_s, 0.0) * (1 - 1e-9), np.inf)
    return float((values_s + added).min()), float(np.where(fits, np.inf, values_s).min())


def _added(
    question: SearchProblem, shapes: Sequence[EqualPipeline], table: Ints, recompute: Recompute
) -> Array:
    """What a kind of recomputation adds to t of every stage at least, by shape and split."""
    first, stages, vpp = shapes[0], shapes[0].stages, shapes[0].vpp
    whole = RECOMPUTES[recompute].whole_layers
    largest = -(-table.max(axis=1) // vpp)
    counts = _per_chunk(question, int(largest.max())) if whole else np.zeros(1)
    fits = np.ones((len(shapes), len(table), len(counts)), dtype=bool)
    held = [stages_of(shape, question.space, question.evaluator.job.model.layers) for shape in shapes]
    for position in sorted({0, min(1, stages - 1), stages - 1}):
        sizes, row = np.unique(table[:, position], return_inverse=True)
        here = np.array([of_stage[position].held for of_stage in held])
        grid = _grid(shapes, role_of(position, stages), recompute)
        grid = replace(
            grid,
            in_flight=here.reshape(-1, 1, 1),
            layers=sizes.astype(np.float64).reshape(1, -1, 1),
            ckpt=np.minimum(sizes.reshape(1, -1, 1), vpp * counts.reshape(1, 1, -1)),
        )
        fits &= _fitting(question, grid, (len(shapes), len(sizes), len(counts)))[:, row.reshape(-1), :]
    again_s = _slope(question, shapes, recompute)
    fewest = table.min(axis=1).reshape(-1, 1)
    if not whole:
        # Bounds of spaces without whole layers count it.
        counted = least_recompute(question.space) == recompute
        return np.asarray(np.where(fits, 0.0 if counted else again_s * fewest, np.inf).min(axis=-1))
    kept = vpp * np.maximum(largest.reshape(-1, 1) - counts, 0.0)
    repeated = np.maximum(fewest - kept, 0.0) if first.stages > 1 else np.minimum(fewest, counts)
    return np.asarray(np.where(fits, again_s * repeated, np.inf).min(axis=-1))


def _per_chunk(question: SearchProblem, largest: int) -> Array:
    """Layers that each chunk may recompute."""
    return ckpt_counts(question.space, largest, 1)


def _fitting(question: SearchProblem, grid: StageGrid, size: tuple[int, int, int]) -> NDArray[np.bool_]:
    evaluator = question.evaluator
    return np.broadcast_to(evaluator.peak_bytes(grid) <= evaluator.limit_bytes, size)


def _slope(question: SearchProblem, shapes: Sequence[EqualPipeline], recompute: Recompute) -> Array:
    """What running a layer again, or parts of it, adds to t at least: compute, and collectives but for those
    that may run beside it."""
    evaluator = question.evaluator
    load = evaluator.loads(_grid(shapes, StageRole.MIDDLE, recompute)).block
    again = load.again if RECOMPUTES[recompute].whole_layers else load.dropped
    execution, added_s = evaluator.job.execution, again.compute_s
    if not (execution.expert_overlap or execution.shared_expert_overlap):
        added_s = added_s + (again.exchange_s if execution.tp_comm_overlap else again.collective_s)
    added_s = np.maximum(added_s, 0.0)
    return np.asarray(np.broadcast_to(added_s, (len(shapes), 1, 1)), dtype=np.float64)


def _grid(shapes: Sequence[EqualPipeline], role: StageRole, recompute: Recompute) -> StageGrid:
    """Stages of these shapes, a layer each, which is recomputed."""
    first, one = shapes[0], np.ones((1, 1, 1))

    def column(size: str) -> Array:
        return np.array([getattr(shape, size) for shape in shapes], dtype=np.float64).reshape(-1, 1, 1)

    return StageGrid(
        role=role,
        nodes=first.nodes,
        gpus_per_node=first.gpus_per_node,
        sequence_parallel=first.sequence_parallel,
        recompute=recompute,
        layers=one,
        ckpt=one,
        in_flight=one,
        micro_batch=column("micro_batch"),
        dp=column("dp"),
        tp=column("tp"),
        zero=np.array([min(shape.zero) for shape in shapes], dtype=np.float64).reshape(-1, 1, 1),
        grad_accum=column("grad_accum"),
        offload=alike(0.0 * one),
        ep=column("ep"),
        etp=column("etp"),
        # Of models with experts all shapes of a search have as many.
        instances=one * first.instances[0],
        stages=first.stages,
        vpp=first.vpp,
    )
