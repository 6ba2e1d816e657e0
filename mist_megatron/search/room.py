"""What memory adds to bounds of shapes whose stages are alike: the least recomputation with which they fit.

The bound of a shape assumes that nothing is recomputed. Of each split of its layers the kinds and amounts of
recomputation are found here with which a first, a second and a last stage fit, of many shapes at once, and
what the cheapest of them adds to the time of every stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.grid import StageGrid
from mist_megatron.search.bounds import EqualBound, SearchProblem, least_recompute, split_bounds
from mist_megatron.search.choices import Array, Ints, ckpt_counts
from mist_megatron.search.least_memory import held_by
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.splits import split_rows, splits_layers
from mist_megatron.spec.kinds import alike
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import RECOMPUTES, Recompute

Pair = tuple[EqualBound, EqualPipeline]
Floored = tuple[float, EqualPipeline]
"""Seconds that no plan of a shape beats."""
AT_ONCE = 4096
"""Numbers of recomputed layers in one call, over all shapes."""


def rooms(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> dict[EqualPipeline, Array]:
    """By shape and split of its layers: what recomputation adds to t of every stage at least, infinite where
    nothing fits. Only for spaces in which nothing is kept in host memory and stages are alike."""
    groups: dict[bool, list[EqualPipeline]] = {}
    for shape in shapes:
        groups.setdefault(shape.sequence_parallel, []).append(shape)
    added_s: dict[EqualPipeline, Array] = {}
    layers = question.evaluator.job.model.layers
    for members, recompute in product(groups.values(), question.space.recompute):
        whole = RECOMPUTES[recompute].whole_layers
        at_once = AT_ONCE // (len(ckpt_counts(question.space, layers, 1)) if whole else 1)
        for begin in range(0, len(members), max(at_once, 1)):
            question.tick()
            for shape, more_s in _added(question, members[begin : begin + max(at_once, 1)], recompute):
                added_s[shape] = np.minimum(added_s.get(shape, np.inf), more_s)
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
        return split_rows(question.space, layers, shape.stages, shape.vpp), True
    return np.array([[layers // shape.stages] * shape.stages]), False


def _values(
    question: SearchProblem, bound: EqualBound, shape: EqualPipeline, more_s: Array
) -> tuple[float, float]:
    """The bound of a shape, and that of its splits that do not fit."""
    others = shape.grad_accum - 1
    times = others - (0.5 * min(shape.stages - 1, others) if shape.vpp == 1 else 0.0)
    table, several = _table(question, shape)
    values_s = (
        split_bounds(shape, bound.stages, table, bound.crossed) if several else np.array([bound.value_s])
    )
    fits = np.isfinite(more_s)
    added = np.where(fits, times * np.where(fits, more_s, 0.0) * (1 - 1e-9), np.inf)
    return float((values_s + added).min()), float(np.where(fits, np.inf, values_s).min())


class _Splits(NamedTuple):
    """Splits of the layers of pipelines of so many stages and chunks."""

    table: Ints
    counts: Array
    """Layers that each chunk may recompute."""
    positions: dict[StageRole, int]
    """Of stages that tell of all."""

    @staticmethod
    def of(question: SearchProblem, shape: EqualPipeline, *, whole_layers: bool) -> _Splits:
        table, _ = _table(question, shape)
        largest = -(-int(table.max()) // shape.vpp)
        counts = ckpt_counts(question.space, largest, 1) if whole_layers else np.zeros(1)
        last = shape.stages - 1
        return _Splits(table, counts, {role_of(at, shape.stages): at for at in (0, min(1, last), last)})

    def sizes(self, role: StageRole) -> tuple[Ints, Ints]:
        """Numbers of layers of stages of a role, and which of them each split has."""
        sizes, places = np.unique(self.table[:, self.positions[role]], return_inverse=True)
        return sizes, places.reshape(-1)


def _added(
    question: SearchProblem, shapes: Sequence[EqualPipeline], recompute: Recompute
) -> Iterator[tuple[EqualPipeline, Array]]:
    """By shape: what a kind of recomputation adds to t of every stage at least, by split of its layers."""
    whole = RECOMPUTES[recompute].whole_layers
    alike: dict[tuple[int, int], list[int]] = {}
    for row, shape in enumerate(shapes):
        alike.setdefault((shape.stages, shape.vpp), []).append(row)
    splits = {key: _Splits.of(question, shapes[rows[0]], whole_layers=whole) for key, rows in alike.items()}
    fitting = _all_fitting(question, shapes, splits, alike, recompute)
    fewest: dict[tuple[int, int], Array] = {}
    asked: list[int] = []
    for key, rows in alike.items():
        repeated = _repeated(question, splits[key], key, recompute)
        fewest[key] = np.where(fitting[key], repeated, np.inf).min(axis=-1)
        # Where something fits with nothing run again nobody asks what that takes.
        some = (np.isfinite(fewest[key]) & (fewest[key] > 0.0)).any(axis=1)
        asked += [rows[k] for k in np.flatnonzero(some)]
    again_s = np.zeros(len(shapes))
    again_s[asked] = _slopes(question, [shapes[row] for row in asked], recompute)
    for key, rows in alike.items():
        fits = np.isfinite(fewest[key])
        added_s = np.where(fits, again_s[rows].reshape(-1, 1) * np.where(fits, fewest[key], 0.0), np.inf)
        yield from ((shapes[row], each_s) for row, each_s in zip(rows, added_s, strict=True))


def _repeated(question: SearchProblem, splits: _Splits, key: tuple[int, int], recompute: Recompute) -> Array:
    """Of how many layers at least, by split and number of recomputed layers, each stage runs something again
    that its bound does not count."""
    table, counts, _ = splits
    stages, vpp = key
    fewest = np.asarray(table.min(axis=1).reshape(-1, 1), dtype=np.float64)
    if RECOMPUTES[recompute].whole_layers:
        kept = vpp * np.maximum(-(-table.max(axis=1).reshape(-1, 1) // vpp) - counts, 0.0)
        return np.maximum(fewest - kept, 0.0) if stages > 1 else np.minimum(fewest, counts)
    # Bounds of spaces without whole layers count it.
    return 0.0 * fewest if least_recompute(question.space) == recompute else fewest


def _all_fitting(
    question: SearchProblem,
    shapes: Sequence[EqualPipeline],
    splits: Mapping[tuple[int, int], _Splits],
    alike: Mapping[tuple[int, int], list[int]],
    recompute: Recompute,
) -> dict[tuple[int, int], NDArray[np.bool_]]:
    """By stages and chunks: by shape, split and number of recomputed layers, whether all stages fit. Stages
    of a role are asked of shapes whose others fit."""
    fitting = {
        key: np.ones((len(rows), len(splits[key].table), len(splits[key].counts)), dtype=bool)
        for key, rows in alike.items()
    }
    for role in StageRole:
        fits = _fitting(question, shapes, splits, role, recompute, _left(alike, fitting))
        for key, rows in alike.items():
            mine = np.flatnonzero(fitting[key].any(axis=(1, 2)))
            if role in splits[key].positions and len(mine):
                _, places = splits[key].sizes(role)
                fitting[key][mine] &= fits[np.array(rows)[mine, None], places, : len(splits[key].counts)]
    return fitting


def _left(
    alike: Mapping[tuple[int, int], list[int]], fitting: Mapping[tuple[int, int], NDArray[np.bool_]]
) -> list[int]:
    """Shapes of which something fits."""
    return [rows[k] for key, rows in alike.items() for k in np.flatnonzero(fitting[key].any(axis=(1, 2)))]


def _fitting(
    question: SearchProblem,
    shapes: Sequence[EqualPipeline],
    splits: Mapping[tuple[int, int], _Splits],
    role: StageRole,
    recompute: Recompute,
    left: Sequence[int],
) -> NDArray[np.bool_]:
    """By shape, number of layers and number of recomputed layers: whether stages of a role fit, of the shapes
    that are left. What a stage holds depends on nothing else of its pipeline."""
    evaluator, layers = question.evaluator, question.evaluator.job.model.layers
    own = [splits[shape.stages, shape.vpp] for shape in shapes]
    rows = [row for row in left if role in own[row].positions]
    counts = _padded([each.counts for each in own])
    of_split = {key: each.sizes(role)[0] for key, each in splits.items() if role in each.positions}
    each_sizes = [of_split[shapes[row].stages, shapes[row].vpp] for row in rows]
    sizes = _padded(each_sizes) if rows else np.zeros((0, 1))
    fits = np.zeros((len(shapes), sizes.shape[1], counts.shape[1]), dtype=bool)
    if not rows:
        return fits
    some = [shapes[row] for row in rows]
    held = [held_by(shapes[row], question.space, layers)[own[row].positions[role]] for row in rows]
    grid = _grid(some, role, recompute)
    vpp = np.array([shape.vpp for shape in some]).reshape(-1, 1, 1)
    grid = replace(
        grid,
        in_flight=np.array(held).reshape(-1, 1, 1),
        layers=sizes[:, :, None],
        ckpt=np.minimum(sizes[:, :, None], vpp * counts[rows][:, None, :]),
    )
    fits[rows] = evaluator.peak_bytes(grid) <= evaluator.limit_bytes
    return fits


def _padded(rows: Sequence[Array | Ints]) -> Array:
    """As rows of one array: shorter ones have their last value again."""
    most = max(map(len, rows))
    return np.array([row[np.minimum(np.arange(most), len(row) - 1)] for row in rows], dtype=np.float64)


def _slopes(question: SearchProblem, shapes: Sequence[EqualPipeline], recompute: Recompute) -> Array:
    """What running a layer again, or parts of it, adds to t at least, by shape. Where sends or gathered
    weights take longer than what is computed beside them, part of it takes no time."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for row, shape in enumerate(shapes):
        alike.setdefault((min(shape.stages, 3), shape.vpp > 1), []).append(row)
    added_s = np.zeros(len(shapes))
    for (stages, chunked), rows in alike.items():
        some = [shapes[row] for row in rows]
        last = stages - 1
        positions = (0, min(1, last), last) if chunked else (min(1, last),)
        roles = {role_of(at, stages) for at in positions}
        levels = sorted({level for shape in some for level in _levels(question, shape)})
        least_s = np.full(len(rows), np.inf)
        for role, level in product(roles, levels):
            grid = _grid(some, role, recompute, level)
            mine = np.array([level in _levels(question, shape) for shape in some])
            more_s = np.broadcast_to(_slope(question, grid, recompute), (len(rows), 1, 1)).reshape(-1)
            least_s = np.where(mine, np.minimum(least_s, more_s), least_s)
        added_s[rows] = np.maximum(least_s, 0.0)
    return added_s


def _levels(question: SearchProblem, shape: EqualPipeline) -> tuple[int, ...]:
    """ZeRO levels by which what is gathered beside compute differs."""
    return shape.zero if question.evaluator.job.execution.megatron_fsdp else (min(shape.zero),)


def _slope(question: SearchProblem, grid: StageGrid, recompute: Recompute) -> Array:
    """Of one layer of t, which is linear in layers and in recomputed ones."""
    stable = question.evaluator.factors(grid).stable
    if RECOMPUTES[recompute].whole_layers:
        return stable.per_ckpt
    nothing = question.evaluator.factors(replace(grid, recompute="full", ckpt=0.0 * grid.ckpt)).stable
    return stable.per_layer - nothing.per_layer + np.minimum(stable.fixed - nothing.fixed, 0.0)


def _grid(
    shapes: Sequence[EqualPipeline], role: StageRole, recompute: Recompute, level: int | None = None
) -> StageGrid:
    """Stages of these shapes, a layer each, which is recomputed; at its least ZeRO level, or at one."""
    first, one = shapes[0], np.ones((1, 1, 1))
    levels = [min(shape.zero) if level is None else level for shape in shapes]

    def column(size: str) -> Array:
        return np.array([getattr(shape, size) for shape in shapes], dtype=np.float64).reshape(-1, 1, 1)

    def shared(size: str) -> int | Array:
        sizes = {getattr(shape, size) for shape in shapes}
        return int(sizes.pop()) if len(sizes) == 1 else column(size)

    return StageGrid(
        role=role,
        nodes=shared("nodes"),
        gpus_per_node=shared("gpus_per_node"),
        sequence_parallel=first.sequence_parallel,
        recompute=recompute,
        layers=one,
        ckpt=one,
        in_flight=one,
        micro_batch=column("micro_batch"),
        dp=column("dp"),
        tp=column("tp"),
        zero=np.array(levels, dtype=np.float64).reshape(-1, 1, 1),
        grad_accum=column("grad_accum"),
        offload=alike(0.0 * one),
        ep=column("ep"),
        etp=column("etp"),
        # Of models with experts all shapes of a search have as many.
        instances=one * first.instances[0],
        stages=shared("stages"),
        vpp=shared("vpp"),
    )
