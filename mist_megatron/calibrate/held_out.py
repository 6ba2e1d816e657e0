"""How well a profile's tables predict shapes that they do not hold, through the cost model's own lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast, get_args

import numpy as np

from mist_megatron.price.prices import Array
from mist_megatron.price.profile_prices import prices_of, table_work
from mist_megatron.spec.cluster import GpuSpec, cluster_of
from mist_megatron.spec.profile import OperatorTable, Profile
from mist_megatron.spec.training import Precision

Row = tuple[float, ...]
FOLDS = 5
LEAST_ROWS = 10
"""Shapes of a table from which on holding a fifth of them out says something."""


def held_out_shapes(profile: Profile, gpu: GpuSpec) -> Iterator[str]:
    """One line for each large table: the error of its shapes, each predicted from the others."""
    for table in profile.tables:
        priced = table.operator.startswith(("gemm", "attention")) and table.precision in get_args(Precision)
        if priced and len(table.rows) >= LEAST_ROWS:
            errors = _errors(profile, gpu, table)
            yield (
                f"{table.operator} in {table.precision}: {len(table.rows)} shapes, each predicted from the "
                f"others: {errors.by_table:.1%} off; by the curve alone {errors.by_curve:.1%}"
            )


class HeldOut(NamedTuple):
    """Mean relative errors of shapes: interpolated among those of the other folds, and from the curve."""

    by_table: float
    by_curve: float


def _errors(profile: Profile, gpu: GpuSpec, table: OperatorTable) -> HeldOut:
    others = tuple(each for each in profile.tables if each.operator != table.operator)
    bare = replace(profile, tables=others)
    missed = []
    for fold in range(min(FOLDS, len(table.rows))):
        kept = tuple(row for at, row in enumerate(table.rows) if at % FOLDS != fold)
        held = [row for at, row in enumerate(table.rows) if at % FOLDS == fold]
        known = replace(profile, tables=(*others, replace(table, rows=kept)))
        missed.append(_missed(known, gpu, table, held))
    by_curve = _missed(bare, gpu, table, table.rows)
    return HeldOut(float(np.concatenate(missed).mean()), float(by_curve.mean()))


def _missed(profile: Profile, gpu: GpuSpec, table: OperatorTable, rows: Sequence[Row]) -> Array:
    # Tables are of short benchmarks, and so is what they are compared with here.
    kernels = replace(profile.kernels, sustained_fraction=None, eight_bit_sustained_fraction=None)
    unlimited = replace(profile, kernels=kernels)
    prices = prices_of(unlimited, cluster_of(gpu, 1, 1), cast(Precision, table.precision))
    measured = np.array(rows)
    priced = prices.of(table_work(table.operator, measured, eight_bit=table.precision == "fp8"))
    return np.asarray(np.abs(priced.seconds / measured[:, -1] - 1.0))
