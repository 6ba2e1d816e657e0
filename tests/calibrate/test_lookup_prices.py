"""Lookup: exact shapes, interpolation between neighbours, the fitted roofline elsewhere."""

from dataclasses import replace

import numpy as np
import pytest

from mist_megatron.calibrate.profiles import profile_of
from mist_megatron.errors import ProfileError
from mist_megatron.price.prices import Collective, Gemm
from mist_megatron.price.profile_prices import prices_of
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import LinkOverrides, cluster_of


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


@pytest.fixture(scope="module")
def cluster():
    return cluster_of(CATALOGUE["b200-sxm-180gb"], 8)


@pytest.fixture(scope="module")
def prices(cluster):
    return prices_of(profile_of(cluster), cluster, "bf16")


def gemm_rows(cluster) -> np.ndarray:
    tables = [table for table in profile_of(cluster).tables if table.operator == "gemm"]
    return np.array(tables[0].rows)


def test_measured_shapes_come_back_exactly(prices, cluster) -> None:
    rows = gemm_rows(cluster)
    found = prices.of(Gemm(*(rows[:, index] for index in range(4))))
    sustained = profile_of(cluster).kernels.sustained_fraction.value
    assert 0.85 < sustained < 1.0
    np.testing.assert_allclose(found.seconds, rows[:, 4] / sustained, rtol=1e-12)
    np.testing.assert_array_equal(found.exact_s, found.seconds)


def test_left_out_shapes_are_interpolated_well(cluster) -> None:
    """Every fifth shape is taken out of the table and asked for: the truth is its measured time."""
    profile, rows = profile_of(cluster), gemm_rows(cluster)
    held = np.arange(len(rows)) % 5 == 0
    kept = tuple(tuple(row) for row in rows[~held])
    tables = tuple(
        replace(table, rows=kept) if table.operator == "gemm" else table for table in profile.tables
    )
    prices = prices_of(replace(profile, tables=tables), cluster, "bf16")
    asked = rows[held]
    found = prices.of(Gemm(*(asked[:, index] for index in range(4))))
    near = found.interpolated_s > 0.0
    assert near.mean() > 0.8
    errors = np.abs(profile.kernels.sustained_fraction.value * found.seconds / asked[:, 4] - 1.0)
    assert np.median(errors[near]) < 0.12


def test_far_shapes_are_told_as_extrapolated(prices) -> None:
    found = prices.of(Gemm(array(7.0), array(11.0), array(3.0), array(1.0)))
    assert found.extrapolated_s[0] == found.seconds[0] > 0.0
    assert found.exact_s[0] == found.interpolated_s[0] == 0.0


def test_time_never_beats_the_datasheet_peak_far_from_tables(prices) -> None:
    size = array(2.0**17)
    found = prices.of(Gemm(size, size, size, array(1.0)))
    assert found.seconds[0] > 2.0 * (2.0**17) ** 3 / 2250e12


def test_strided_groups_over_pcie_are_slower() -> None:
    cluster = cluster_of(CATALOGUE["a100-pcie-80gb"], 8)
    prices = prices_of(profile_of(cluster), cluster, "bf16")
    ask = (array(1e9), array(4.0), array(1.0))
    near = prices.of(Collective("all_gather", *ask)).seconds[0]
    apart = prices.of(Collective("all_gather", *ask, strided=np.array([True]))).seconds[0]
    # SimuMax measured 7.65 GB/s for the four ranks of two switches: 0.75 GB take 98 ms. Its iterations show
    # collectives a tenth faster than its sweeps.
    assert 0.85 * 0.75 / 7.65 < apart <= 0.75 / 7.65
    assert apart > 2.0 * near


def test_the_users_bandwidth_replaces_the_curve(cluster) -> None:
    slow = replace(cluster, links=LinkOverrides(intra_bytes_per_s=10e9))
    work = Collective("all_reduce", array(8e9), array(8.0), array(1.0))
    found = prices_of(profile_of(slow), slow, "bf16").of(work)
    assert found.seconds[0] > 2.0 * 7.0 / 8.0 * 8e9 / 10e9


def test_a_group_of_one_costs_nothing(prices) -> None:
    assert prices.of(Collective("all_gather", array(1e9), array(1.0), array(1.0))).seconds[0] == 0.0


def test_another_gpus_profile_is_refused(cluster) -> None:
    other = cluster_of(CATALOGUE["l4-24gb"], 8)
    with pytest.raises(ProfileError, match=r"b200-sxm-180gb.*l4-24gb"):
        prices_of(profile_of(cluster), other, "bf16")


def test_interference_has_a_factor_for_every_stream_of_every_set(prices) -> None:
    table = prices.interference()
    assert table.shape == (16, 4)
    assert (table >= 1.0).all()
    assert (table[[0, 1, 2, 4, 8]] == 1.0).all()


def test_heads_of_odd_size_run_without_tensor_cores() -> None:
    """Attention's products, 108 wide, beside those of 112: BigScience's runs say some 16 times as long."""
    cluster = cluster_of(CATALOGUE["a100-sxm-80gb"], 8)
    prices = prices_of(profile_of(cluster), cluster, "fp16")
    whole = array(2048.0)
    odd, even = (prices.of(Gemm(whole, whole, array(size), array(64.0))).seconds for size in (108.0, 112.0))
    assert 12.0 < float(odd[0] / even[0]) < 17.0
    # One large product is padded by its library: nothing says that it falls as far.
    odd, even = (prices.of(Gemm(whole, whole, array(size), array(1.0))).seconds for size in (1800.0, 1796.0))
    assert float(odd[0] / even[0]) == pytest.approx(1800 / 1796, rel=0.01)
