"""Prices that are asked for again are those that were told before, of the very same sizes only."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.price.kept import LARGEST, distinct_rows
from mist_megatron.price.prices import Gemm, MemoryPass
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of


def test_the_same_work_is_priced_once() -> None:
    prices = datasheet_prices(cluster_of(CATALOGUE["h100-sxm-80gb"], 8), "bf16")
    m, n = np.array([256.0, 512.0]), np.asarray(1024.0)
    first = prices.of(Gemm(m, n, n, np.ones(())))
    assert prices.of(Gemm(m.copy(), n.copy(), n, np.ones(()))) is first
    for other in (
        Gemm(m + 1.0, n, n, np.ones(())),
        Gemm(m.reshape(2, 1), n, n, np.ones(())),
        Gemm(m, n, n, np.ones(()), eight_bit=True),
    ):
        assert prices.of(other) is not first
    long = MemoryPass(np.arange(1.0, LARGEST + 2))
    assert prices.of(long) is not prices.of(long)


def test_of_work_of_many_sizes_equal_ones_are_priced_once() -> None:
    """And each takes what it takes alone; sizes that have axes of their own are left as they are."""
    prices = datasheet_prices(cluster_of(CATALOGUE["h100-sxm-80gb"], 8), "bf16")
    m, n, k = (
        size.reshape(20, 100) for size in np.random.default_rng(1).choice(4, (3, 2000)) * 512.0 + 512.0
    )
    one = np.ones(())
    told = prices.of(Gemm(m, n, k, one)).seconds
    assert told.shape == m.shape
    for place in ((0, 0), (3, 7), (19, 99)):
        alone = prices.of(Gemm(*(np.asarray(size[place]) for size in (m, n, k)), one)).seconds
        assert told[place] == pytest.approx(float(alone), rel=1e-12)
    across = prices.of(Gemm(m[:, :1], n[:1], k[:1], one)).seconds
    assert across.shape == m.shape
    assert across[3, 7] == pytest.approx(
        float(prices.of(Gemm(m[3:4, 0], n[0, 7:8], k[0, 7:8], one)).seconds[0]), rel=1e-12
    )


def test_rows_are_told_apart_whatever_their_bits() -> None:
    """Powers of two differ in few bits, the highest."""
    columns = [2.0 ** np.random.default_rng(seed).integers(0, 9, 3000) for seed in (1, 2)]
    rows = distinct_rows(columns)
    assert rows is not None
    assert len(rows[0]) == len({*zip(*columns, strict=True)})
    assert all(np.array_equal(column[rows[0]][rows[1]], column) for column in columns)


def test_another_process_is_told_nothing_of_it() -> None:
    prices = datasheet_prices(cluster_of(CATALOGUE["h100-sxm-80gb"], 8), "bf16")
    before = len(pickle.dumps(prices))
    prices.of(MemoryPass(np.arange(1.0, LARGEST)))
    assert len(pickle.dumps(prices)) < before + LARGEST
