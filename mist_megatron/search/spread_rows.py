"""Families of shapes with a row for each spread of their experts, and which rows are priced alike.

Ways of execution that have the same families share all of this: it follows from sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mist_megatron.search.choices import Array, Ints
from mist_megatron.search.pipelines import EqualPipeline, Family, Spread, slices_alike
from mist_megatron.spec.hashed import varied


class AlikeRows(NamedTuple):
    """Rows that are priced in one grid."""

    sliced: bool
    """Whether their layers take as long as with sequence parallelism."""
    rows: Ints
    stages: Array
    """Of each of these rows, as are chunks and micro-batches."""
    vpp: Array
    grad_accum: Array
    distinct: Array
    """What prices of layers follow from, each once: stages, nodes, GPUs per node, least ZeRO level,
    micro-batch, tensor-parallel ranks, and ranks over which experts are spread and which split them."""
    places: Ints
    """Which of these each row has."""


class SpreadRows:
    """The rows of some families, one family after the other."""

    def __init__(self, families: Sequence[Family]) -> None:
        self.shapes = [shape for shape, _ in families]
        self.of_family = np.repeat(np.arange(len(families)), [len(spreads) for _, spreads in families])
        known: dict[tuple[Spread, ...], Array] = {}
        for _, spreads in families:
            if spreads not in known:
                known[spreads] = np.array(spreads, dtype=np.float64).reshape(-1, 2)
        self.spreads = np.concatenate([np.zeros((0, 2)), *(known[spreads] for _, spreads in families)])

        self._made: dict[int, EqualPipeline] = {}

    def __len__(self) -> int:
        return len(self.of_family)

    def shape(self, row: int) -> EqualPipeline:
        """Made when it is asked for, and once: many ways of execution ask for the same."""
        if row not in self._made:
            ep, etp = self.spreads[row]
            self._made[row] = varied(self.shapes[self.of_family[row]], ep=int(ep), etp=int(etp))
        return self._made[row]

    @cached_property
    def _sizes(self) -> Array:
        """What is asked of shapes, a row each."""
        rows = [
            (
                slices_alike(shape),
                shape.stages,
                shape.nodes,
                shape.gpus_per_node,
                min(shape.zero),
                shape.micro_batch,
                shape.tp,
                shape.vpp,
                shape.grad_accum,
            )
            for shape in self.shapes
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, 9)[self.of_family]

    @cached_property
    def priced(self) -> list[AlikeRows]:
        """With one stage, and with several, whose first and last are priced."""
        sizes = self._sizes
        return [self._alike(rows) for rows in _groups(np.column_stack((sizes[:, 0], sizes[:, 1] > 1.0)))]

    @cached_property
    def computed(self) -> list[AlikeRows]:
        """All stages as one: what their layers compute is no matter of how many these are."""
        return [self._alike(rows, as_one=True) for rows in _groups(self._sizes[:, :1])]

    def _alike(self, rows: Ints, *, as_one: bool = False) -> AlikeRows:
        sizes = self._sizes[rows]
        stages = np.ones(len(rows)) if as_one else sizes[:, 1]
        distinct, places = distinct_sizes(np.column_stack((stages, sizes[:, 2:7], self.spreads[rows])))
        return AlikeRows(bool(sizes[0, 0]), rows, sizes[:, 1], sizes[:, 7], sizes[:, 8], distinct, places)


def _groups(sizes: Array) -> list[Ints]:
    """Which rows are equal."""
    distinct, places = distinct_sizes(sizes)
    return [np.flatnonzero(places == place) for place in range(len(distinct))]


def distinct_sizes(rows: Array) -> tuple[Array, Ints]:
    """Rows of whole numbers, each once and in order, and which of them every row is. They are made one number
    each, which is far quicker to sort than rows are, where they fit one."""
    if not len(rows):
        return rows, np.zeros(0, dtype=np.intp)
    if math.prod(int(most) + 1 for most in rows.max(axis=0)) > np.iinfo(np.int64).max:
        found, index = np.unique(rows, axis=0, return_inverse=True)
        return found, index.reshape(-1)
    code = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T.astype(np.int64):
        code = code * (int(column.max()) + 1) + column
    _, first, index = np.unique(code, return_index=True, return_inverse=True)
    return rows[first], index.reshape(-1)
