"""What a GPU takes, asked for a recording and asked for a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mist_megatron.ask.devices import device_named
from mist_megatron.ask.evaluators import prices_for
from mist_megatron.calibrate.profiles import shipped_profiles
from mist_megatron.price.prices import Attention, Gemm, Work
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec


def sizes(*values: float) -> tuple[np.ndarray, ...]:
    return tuple(np.array(value) for value in values)


WORK: tuple[Work, ...] = (
    Gemm(*sizes(8192.0, 8192.0, 8192.0, 1.0)),
    Gemm(*sizes(4096.0, 1024.0, 128.0, 32.0)),
    Gemm(*sizes(3137.0, 64.0, 3137.0, 96.0)),
    Attention(*sizes(2.0, 4096.0, 32.0, 8.0, 128.0), backward=True),
)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_recording_and_a_plan_are_priced_alike(name: str) -> None:
    gpu, device = CATALOGUE[name], device_named(name)
    cluster = ClusterSpec(gpu=gpu, nodes=1, gpus_per_node=gpu.usual_gpus_per_node)
    training = TrainingSpec(seq_len=2048, global_batch=64)
    assert device.by_precision
    for precision in device.by_precision:
        job = Job(
            model=PRESETS["gpt3-1.3b"], training=replace(training, precision=precision), cluster=cluster
        )  # type: ignore[arg-type]
        prices, _ = prices_for(job)
        assert [device.seconds(work, precision) for work in WORK] == [
            float(prices.of(work).seconds) for work in WORK
        ]


def test_the_largest_product_is_the_catalogues() -> None:
    """MI300X's fastest product reaches 668.4 TFLOP/s of the 1,307.4 that are printed."""
    largest = 2.0 * 65536.0**3 / 668.4e12
    said_s = device_named("mi300x-192gb").seconds(Gemm(*sizes(65536.0, 65536.0, 65536.0, 1.0)), "bf16")
    assert said_s == pytest.approx(largest, rel=0.01) and said_s > largest


@pytest.mark.parametrize("name", sorted(CATALOGUE.keys() - shipped_profiles().keys()))
def test_attention_is_no_faster_than_the_fastest_product(name: str) -> None:
    """It is products of the same units; of GPUs of which nothing else is known."""
    device = device_named(name)
    large = Gemm(*sizes(16384.0, 16384.0, 16384.0, 1.0))
    core = Attention(*sizes(4.0, 32768.0, 32.0, 32.0, 128.0), backward=False)
    for precision in set(device.by_precision) - {"fp8"}:
        product_s, core_s = device.seconds(large, precision), device.seconds(core, precision)
        assert product_s is not None and core_s is not None
        assert float(core.flops) / core_s < 2.0 * 16384.0**3 / product_s


def test_small_products_take_turns_where_a_unit_holds_one() -> None:
    """37,632 products of 8 x 8 are 124 turns of 304 units, each as long as the shortest kernel; on H100,
    whose units hold many, they are a pass over memory."""
    small, few = Gemm(*sizes(8.0, 8.0, 64.0, 37632.0)), Gemm(*sizes(8.0, 8.0, 64.0, 304.0))
    one_at_a_time, many = device_named("mi300x-192gb"), device_named("h100-sxm-80gb")
    turn_s = one_at_a_time.seconds(few, "bf16")
    assert turn_s is not None
    assert one_at_a_time.seconds(small, "bf16") == pytest.approx(124 * turn_s)
    assert many.seconds(small, "bf16") == pytest.approx(41e-6, rel=0.15)  # recorded on H100
