"""Prices that are asked for again are those that were told before, of the very same sizes only."""

from __future__ import annotations

import pickle

import numpy as np

from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.price.kept import LARGEST
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
    long = MemoryPass(np.ones(LARGEST + 1))
    assert prices.of(long) is not prices.of(long)


def test_another_process_is_told_nothing_of_it() -> None:
    prices = datasheet_prices(cluster_of(CATALOGUE["h100-sxm-80gb"], 8), "bf16")
    before = len(pickle.dumps(prices))
    prices.of(MemoryPass(np.arange(1.0, LARGEST)))
    assert len(pickle.dumps(prices)) < before + LARGEST
