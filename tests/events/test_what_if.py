"""Scaled prices: each factor changes its own kind of work and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mist_megatron.errors import InputError
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.price.prices import (
    Attention,
    Collective,
    DeviceAdam,
    Gemm,
    HostAdam,
    HostCopy,
    MemoryPass,
    Prices,
    Work,
)
from mist_megatron.price.what_if import LINKS, OPERATORS, parse_scales, scaled_prices
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.profile import CollectiveKind

PRICES = datasheet_prices(ClusterSpec(gpu=CATALOGUE["a100-sxm-80gb"], nodes=2, gpus_per_node=8), "bf16")


def one(value: float) -> np.ndarray:
    return np.asarray(value)


def answers(prices: Prices) -> dict[str, float]:
    """Seconds of one large piece of every kind of work."""
    big = one(1e9)
    works: dict[str, Work] = {
        "matmul": Gemm(one(4096), one(4096), one(4096), one(1)),
        "attention": Attention(one(2), one(4096), one(32), one(32), one(128), backward=False),
        "memory": MemoryPass(big),
        "adam": DeviceAdam(big),
        "host_adam": HostAdam(big),
        "intra": Collective("all_reduce", big, one(8), one(1)),
        "inter": Collective("all_gather", big, one(2), one(2)),
        "h2d": HostCopy(big, "h2d"),
        "d2h": HostCopy(big, "d2h"),
    }
    return {name: float(prices.of(work).seconds) for name, work in works.items()}


@pytest.mark.parametrize("kind", [*OPERATORS, *LINKS])
def test_a_factor_changes_its_own_kind_only(kind: str) -> None:
    what = "op" if kind in OPERATORS else "link"
    plain = answers(PRICES)
    scaled = answers(scaled_prices(PRICES, parse_scales([f"{what}={kind}:0.25"])))
    for name, seconds in plain.items():
        wanted = 1.0 if name != kind else 0.25 if what == "op" else 4.0
        assert scaled[name] / seconds == pytest.approx(wanted, rel=0.01), name


def test_the_least_and_the_largest_factor_are_taken() -> None:
    for factor in ("1e-06", "1e6"):
        assert parse_scales([f"op=matmul:{factor}"]).operators["matmul"] == float(factor)
    for factor in ("9.9e-07", "1.01e6"):
        with pytest.raises(InputError, match="wanted a number from 1e-06 to 1e"):
            parse_scales([f"op=matmul:{factor}"])


@pytest.mark.parametrize("sizes", [(1025, 1024), (1024, 1025), (1031, 1024)])
def test_many_products_whose_sizes_eight_does_not_divide_have_no_tensor_cores(sizes: tuple[int, int]) -> None:
    """Whatever is left over; one product alone is padded."""

    def seconds(*size: int) -> float:
        return float(PRICES.of(Gemm(*(one(float(each)) for each in size))).seconds)

    assert seconds(1024, *sizes, 8) > 10.0 * seconds(1024, 1024, 1024, 8)
    assert seconds(1024, *sizes, 1) < 1.1 * seconds(1024, 1024, 1024, 1)


def test_latency_stays() -> None:
    """A message of one byte takes as long over a link of ten times the bandwidth."""
    scaled = scaled_prices(PRICES, parse_scales(["link=intra:10"]))
    for message, speedup in ((1.0, 1.0), (1e10, 10.0)):
        work = Collective("send_recv", one(message), one(2), one(1))
        before, after = (prices.of(work) for prices in (PRICES, scaled))
        assert float(before.seconds / after.seconds) == pytest.approx(speedup, rel=0.01)


CLUSTERS = {
    "NVLink": ClusterSpec(gpu=CATALOGUE["a100-sxm-80gb"], nodes=4, gpus_per_node=8),
    "PCIe": ClusterSpec(gpu=CATALOGUE["l4-24gb"], nodes=4, gpus_per_node=8),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize(("intra", "inter"), [(1, 2), (1, 1e3), (2, 1), (0.01, 1), (0.5, 0.5), (3, 0.2)])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "send_recv"])
def test_faster_links_are_those_of_a_cluster_that_has_them(
    cluster: ClusterSpec, intra: float, inter: float, kind: CollectiveKind
) -> None:
    """A ring through nodes is no faster than its links inside them, however quick the network."""
    plain = datasheet_prices(cluster, "bf16")
    scaled = scaled_prices(plain, parse_scales([f"link=intra:{intra}", f"link=inter:{inter}"]))
    rates = replace(
        plain.rates,
        intra_bytes_per_s=plain.rates.intra_bytes_per_s * intra,
        inter_bytes_per_s_per_gpu=plain.rates.inter_bytes_per_s_per_gpu * inter,
    )
    built = replace(plain, rates=rates)
    groups = [(2, 1), (8, 1), (16, 2), (32, 4), (8, 4)] if kind != "send_recv" else [(2, 1)]
    ranks, nodes = np.array(groups, dtype=np.float64).T
    for message in (1.0, 1e5, 1e9):
        work = Collective(kind, one(message), ranks, nodes)
        asked, wanted = (prices.of(work).seconds for prices in (scaled, built))
        assert asked == pytest.approx(wanted, rel=2e-3)


def test_a_rank_in_each_node_uses_the_network_only() -> None:
    scaled = scaled_prices(PRICES, parse_scales(["link=intra:0.01", "link=inter:2"]))
    kinds: tuple[CollectiveKind, ...] = ("all_reduce", "send_recv")
    for kind in kinds:
        work = Collective(kind, one(1e9), one(2), one(2))
        before, after = (prices.of(work) for prices in (PRICES, scaled))
        assert float(before.seconds / after.seconds) == pytest.approx(2.0, rel=0.01)


def test_nothing_scaled_is_the_same_object() -> None:
    assert scaled_prices(PRICES, parse_scales([])) is PRICES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("op=gemm:0.5", "known: matmul, attention, memory, adam, host_adam"),
        ("link=nvlink:2", "known: intra, inter, h2d, d2h"),
        ("matmul:2", "op=KIND:FACTOR"),
        ("op=matmul", "op=KIND:FACTOR"),
        ("op=matmul:fast", "a number from"),
        ("op=matmul:0", "a number from"),
        ("op=matmul:nan", "a number from"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_scales([text])


def test_given_twice() -> None:
    with pytest.raises(InputError, match="twice"):
        parse_scales(["op=matmul:0.5", "op=matmul:2"])
