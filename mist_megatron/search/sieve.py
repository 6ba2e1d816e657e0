"""Least times of stage slots, memory considered, without their fronts: what rules most mixed families out.

t does not depend on layers but linearly, and of meshes of whole nodes not on how many nodes they are but by
their sizes dp, tp and micro-batch. So all meshes of a search are priced in a few batched calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.search.choices import AXES, Array, Choices, StageSlot, stage_grid
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.space import Space
from mist_megatron.search.stage_prices import HeldMemory, corner_moments, ends_of, with_axes
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.recompute import Recompute

AT_ONCE = 200_000
"""Configurations priced in one call: the arrays of one fit a cache."""

_Key = tuple[object, ...]


@dataclass(frozen=True)
class _Rows:
    """t of some meshes as `fixed + layers * per_layer + ckpt * per_ckpt`, each (mesh, some layers kept or all
    recomputed, other axes)."""

    fixed: Array
    per_layer: Array
    per_ckpt: Array


class Sieve:
    """Least times of the stages of all meshes of a search, priced when first asked for."""

    def __init__(
        self, evaluator: StageEvaluator, space: Space, step: float, meshes: Sequence[EqualPipeline]
    ) -> None:
        self.evaluator, self.space, self.step = evaluator, space, step
        self._groups: dict[_Key, list[EqualPipeline]] = {}
        self._place: dict[EqualPipeline, tuple[_Key, int]] = {}
        for mesh in meshes:
            key = (mesh.gpus_per_node, mesh.sequence_parallel, mesh.zero)
            self._place[mesh] = key, len(self._groups.setdefault(key, []))
            self._groups[key].append(mesh)
        self._priced: dict[tuple[_Key, int, StageRole, Recompute], _Rows] = {}

    def least_times(
        self, mesh: EqualPipeline, role: StageRole, window: range, held: Sequence[int], cap_s: float
    ) -> Array:
        """By layers of the window and by micro-batches held: no configuration that fits is faster; infinite
        where none fits with t up to `cap_s`."""
        least = np.full((len(window), len(held)), np.inf)
        for recompute in self.space.recompute:
            choices = Choices(space=self.space, shape=mesh, step=self.step)
            each = choices.size(window[-1], recompute=recompute)
            for begin in range(0, len(window), max(1, AT_ONCE // each)):
                part = window[begin : begin + max(1, AT_ONCE // each)]
                least_s = self._least_times(choices, role, part, recompute=recompute)
                rows = slice(begin, begin + len(part))
                least[rows] = np.minimum(least[rows], _by_held(*least_s, held, cap_s))
        return least

    def _least_times(
        self, choices: Choices, role: StageRole, window: range, *, recompute: Recompute
    ) -> tuple[Array, Array]:
        """t of all configurations, and how many micro-batches fit with it; axes are layers, then AXES without
        the optimizer's."""
        counts = [choices.counts(layers, recompute=recompute) for layers in window]
        longest = max(counts, key=len)
        recomputed = np.stack([np.pad(c, (0, len(longest) - len(c)), mode="edge") for c in counts])
        layers = np.array(window, dtype=np.float64).reshape(-1, 1, *_ONE)
        ckpt = recomputed.reshape(*recomputed.shape, *_ONE)
        rows, row = self._rows(choices, role, recompute=recompute)
        kind = (recomputed >= layers.reshape(-1, 1)).astype(np.intp)

        def part(array: Array) -> Array:
            mine = array[row if array.shape[0] > 1 else 0]
            spread = mine[kind] if mine.shape[0] > 1 else mine
            return np.asarray(spread, dtype=np.float64)

        t_s = part(rows.fixed) + layers * part(rows.per_layer) + ckpt * part(rows.per_ckpt)
        axes = choices.axes(longest)
        grid = stage_grid(
            choices.shape, StageSlot(role=role, layers=window[-1], held=1.0), axes, recompute=recompute
        )
        moments = corner_moments(self.evaluator, replace(grid, layers=layers, ckpt=ckpt))
        memory = HeldMemory(axes["optimizer"].reshape(-1), self.evaluator.limit_bytes, moments)
        return np.asarray(t_s.min(axis=-1), dtype=np.float64), memory.most_held()[..., 0]

    def _rows(self, choices: Choices, role: StageRole, *, recompute: Recompute) -> tuple[_Rows, int]:
        key, place = self._place[choices.shape]
        per_chunk = max(1, AT_ONCE // (2 * choices.size_of(np.zeros(1))))
        chunk, row = divmod(place, per_chunk)
        if (key, chunk, role, recompute) not in self._priced:
            meshes = self._groups[key][chunk * per_chunk : (chunk + 1) * per_chunk]
            self._priced[key, chunk, role, recompute] = self._price(
                choices, meshes, role, recompute=recompute
            )
        return self._priced[key, chunk, role, recompute], row

    def _price(
        self, choices: Choices, meshes: Sequence[EqualPipeline], role: StageRole, *, recompute: Recompute
    ) -> _Rows:
        def column(values: Sequence[float]) -> Array:
            return np.array(values, dtype=np.float64).reshape(-1, 1, *_ONE)

        counts = choices.counts(1, recompute=recompute)
        grid = stage_grid(
            choices.shape, StageSlot(role=role, layers=1, held=1.0), choices.axes(counts), recompute=recompute
        )
        grid = replace(
            grid,
            nodes=max(mesh.nodes for mesh in meshes),
            micro_batch=column([mesh.micro_batch for mesh in meshes]),
            dp=column([mesh.dp for mesh in meshes]),
            tp=column([mesh.tp for mesh in meshes]),
            grad_accum=column([mesh.grad_accum for mesh in meshes]),
        )
        # t hardly ever depends on the optimizer's fraction: its ends tell.
        grid = grid.offloading(optimizer=ends_of(grid.offload.optimizer))
        stable = self.evaluator.factors(grid).stable
        axes = len(AXES) + 1
        return _Rows(
            *(with_axes(np.asarray(p), axes) for p in (stable.fixed, stable.per_layer, stable.per_ckpt))
        )


_ONE = (1,) * (len(AXES) - 1)


def _by_held(t_s: Array, most: Array, held: Sequence[int], cap_s: float) -> Array:
    """Least t by layers and by micro-batches held, which ascend."""
    shape = np.broadcast_shapes(t_s.shape, most.shape)
    t_s, most = np.broadcast_to(t_s, shape), np.broadcast_to(most, shape)
    rows = np.nonzero((t_s <= cap_s) & (most >= held[0]))
    # Of each configuration the largest of these numbers that it can hold; then what holds more holds less.
    column = np.searchsorted(held, most[rows], side="right") - 1
    least = np.full((shape[0], len(held)), np.inf)
    np.minimum.at(least, (rows[0], column), t_s[rows])
    return np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]
