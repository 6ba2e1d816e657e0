"""Prices from datasheets: physics that must hold whatever the constants, and published figures as anchors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mist_megatron.price.datasheet import LAUNCH_S, datasheet_prices
from mist_megatron.price.prices import Collective, Gemm, HostCopy, MemoryPass, Prices
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import cluster_of

A100 = datasheet_prices(cluster_of(catalogue.gpu("a100-sxm-80gb"), 32), "bf16")
size = st.integers(1, 1 << 14)


def gemm(m: float, n: float, k: float, batch: float = 1.0, prices: Prices = A100) -> float:
    return float(prices.of(Gemm(*(np.asarray(float(x)) for x in (m, n, k, batch)))).seconds)


@settings(max_examples=100, deadline=None)
@given(size, size, size)
def test_gemm_never_beats_peak_nor_its_launch(m: int, n: int, k: int) -> None:
    seconds = gemm(m, n, k)
    assert seconds >= LAUNCH_S
    assert 2.0 * m * n * k / seconds <= 312e12
    assert gemm(2 * m, n, k) >= seconds * (1 - 1e-12)


def test_large_gemm_is_near_what_a100_measures() -> None:
    # Published sweeps of 8192-cubed products on A100-SXM give 230-260 TFLOP/s.
    assert 220e12 < 2 * 8192**3 / gemm(8192, 8192, 8192) < 260e12


def test_small_messages_cost_latency_large_ones_bandwidth() -> None:
    ranks, nodes = np.asarray(8.0), np.asarray(1.0)
    small = float(A100.of(Collective("all_reduce", np.asarray(1024.0), ranks, nodes)).seconds)
    assert 10e-6 < small < 100e-6
    message = float(1 << 30)
    large = float(A100.of(Collective("all_reduce", np.asarray(message), ranks, nodes)).seconds)
    # nccl-tests on 8 A100 with NVLink report 220-240 GB/s of bus bandwidth.
    assert 200e9 < 2 * 7 / 8 * message / large < 245e9


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather_at_full_size() -> None:
    message, ranks, nodes = np.asarray(1e9), np.asarray(16.0), np.asarray(2.0)
    parts = [
        float(A100.of(Collective(kind, message, ranks, nodes)).seconds)  # type: ignore[arg-type]
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    ]
    assert parts[0] == pytest.approx(parts[1] + parts[2], rel=0.02)


def test_nothing_costs_nothing() -> None:
    zero, one = np.asarray(0.0), np.asarray(1.0)
    assert A100.of(Collective("all_gather", np.asarray(1e9), one, one)).seconds == 0
    assert A100.of(Collective("all_gather", zero, np.asarray(8.0), one)).seconds == 0
    assert A100.of(HostCopy(zero, "h2d")).seconds == 0
    assert A100.of(MemoryPass(zero)).seconds == 0


def test_crossing_nodes_is_slower_and_shared_by_a_nodes_gpus() -> None:
    message, eight = np.asarray(1e9), np.asarray(8.0)
    inside = float(A100.of(Collective("all_gather", message, eight, np.asarray(1.0))).seconds)
    # One rank on each of 8 nodes: each GPU of a node has its own group, so an eighth of the adapters.
    spread = float(A100.of(Collective("all_gather", message, eight, eight)).seconds)
    assert spread > 5 * inside


def test_everything_is_marked_extrapolated_and_interference_is_sane() -> None:
    priced = A100.of(MemoryPass(np.asarray([1e6, 1e9])))
    np.testing.assert_array_equal(priced.extrapolated_s, priced.seconds)
    assert not priced.exact_s.any()
    table = A100.interference()
    assert table.shape == (16, 4)
    assert (table >= 1.0).all()


@pytest.mark.parametrize("name", catalogue.gpu_names())
def test_every_gpu_of_the_catalogue_can_be_priced(name: str) -> None:
    prices = datasheet_prices(
        cluster_of(catalogue.gpu(name), catalogue.gpu(name).usual_gpus_per_node), "fp16"
    )
    assert 0 < gemm(4096, 4096, 4096, prices=prices) < 1.0
