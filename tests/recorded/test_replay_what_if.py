"""What if: scaled kernels and operators, another GPU, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hand_made import HandMade
from playing import end_us, recording_of, times_of

from mist_megatron.ask.devices import device_named
from mist_megatron.ask.replay import replay
from mist_megatron.errors import InputError
from mist_megatron.price.prices import Gemm
from mist_megatron.recorded.engine import play
from mist_megatron.recorded.what_if import parse_scale, scaled
from mist_megatron.traces.sizes import OperatorWork


def loading() -> HandMade:
    """A loader takes 300 us of the host, then a product is launched, and the host waits for it."""
    made = HandMade()
    made.step(1, 0, 600)
    made.operator("enumerate(DataLoader)#next", 10, 300)
    shapes = {"Input Dims": [[4096, 1024], [1024, 8192]], "Input type": ["c10::BFloat16"] * 2}
    made.operator("aten::mm", 320, 40, **shapes)
    made.kernel("gemm", 330, 335, 100)
    made.operator("aten::add_", 370, 20)
    made.kernel("add", 375, 436, 50)
    made.call("cudaDeviceSynchronize", 400, 91)
    return made


@pytest.mark.parametrize(
    ("scale", "gemm_at", "end"),
    [
        (
            "kernel=gemm:0.5",
            335.0,
            545.0,
        ),
        ("kernel=gemm:3", 335.0, 800.0),
        ("op=DataLoader:0", 35.0, 300.0),
        ("op=DataLoader:2", 635.0, 900.0),
        ("op=aten::mm:2", 345.0, 710.0),  # 10 us more until the launch, 30 behind it, and 100 in the kernel
    ],
)
def test_scales(scale: str, gemm_at: float, end: float) -> None:
    recording = recording_of(loading())
    change, told = scaled(recording, [parse_scale(scale)])
    played = play(recording.graph, change)
    assert times_of(recording, played, "gemm")[0][0] == pytest.approx(gemm_at)
    assert end_us(played) == pytest.approx(end, abs=6.0)
    assert told


def test_scales_together_multiply() -> None:
    recording = recording_of(loading())
    change, _ = scaled(recording, [parse_scale("kernel=gemm:0.5"), parse_scale("kernel=ge.*:0.5")])
    start, end = times_of(recording, play(recording.graph, change), "gemm")[0]
    assert end - start == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        ("gemm:2", "wanted kernel=REGEX:FACTOR"),
        ("kernel=gemm", "wanted kernel=REGEX:FACTOR"),
        ("kernel=:2", "wanted kernel=REGEX:FACTOR"),
        ("size=gemm:2", "wanted kernel=REGEX:FACTOR"),
        ("kernel=gemm:fast", "wanted a number"),
        ("kernel=gemm:-1", "wanted 0 or more"),
        ("kernel=gemm:nan", "wanted 0 or more"),
        ("kernel=(:2", "no regular expression"),
        ("kernel=conv:2", "no kernel of that name"),
        ("op=conv:2", "no operator of that name"),
    ],
)
def test_scales_that_cannot_be(scale: str, told: str) -> None:
    recording = recording_of(loading())
    with pytest.raises(InputError, match=told):
        scaled(recording, [parse_scale(scale)])


def test_another_gpu(tmp_path: Path) -> None:
    """A product takes what the prices of both say, the rest goes by memory rate, and both are told."""
    path = loading().write(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA A100-SXM4-80GB"}])
    answer = replay(path, gpu="h100-sxm-80gb")
    work = Gemm(*(np.array(size) for size in (4096.0, 8192.0, 1024.0, 1.0)))  # type: ignore[arg-type]
    slow, fast = (device_named(name).seconds(work, "bf16") for name in ("a100-sxm-80gb", "h100-sxm-80gb"))
    assert slow is not None and fast is not None and fast < slow
    start, end = times_of(answer.recording, answer.played, "gemm")[0]
    assert end - start == pytest.approx(100.0 * fast / slow)
    told = {one.what: one for one in answer.retimed}
    assert told["products"].kernels == told["other kernels, by memory rate"].kernels == 1
    assert told["products"].how == "profile a100-sxm-80gb to profile h100-sxm-80gb"
    assert answer.step_s == answer.changed.step_s  # type: ignore[union-attr]


@pytest.mark.parametrize(("inner", "wanted_s"), [(3137.0, 2 * 3137 * 64 * 3137 * 96 / 67e12), (3136.0, None)])
def test_batched_products_of_odd_sizes(inner: float, wanted_s: float | None) -> None:
    """Their arithmetic runs without tensor cores, which is no slower for a shallow depth; H100's 67 TFLOP/s
    are the datasheet's, and cuBLAS took 1.70 ms for the odd ones where this says 1.80."""
    device = device_named("h100-sxm-80gb")
    said_s = device.operator_s(OperatorWork("gemm", "bf16", (3137.0, 64.0, inner, 96.0)))
    aligned_s = device.seconds(Gemm(*(np.array(size) for size in (3137.0, 64.0, 3136.0, 96.0))), "bf16")  # type: ignore[arg-type]
    assert aligned_s is not None
    assert said_s == pytest.approx(wanted_s or aligned_s)


def test_another_gpu_than_nobody_knows(tmp_path: Path) -> None:
    path = loading().write(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA A100-SXM4-80GB"}])
    with pytest.raises(InputError, match="no such GPU or profile"):
        replay(path, gpu="h1000")
    with pytest.raises(InputError, match="deviceProperties"):
        replay(loading().write(tmp_path / "u.json"), gpu="h100-sxm-80gb")


def test_recordings_that_cannot_be_played(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no step 7; steps in it: 1"):
        replay(loading().write(tmp_path / "t.json"), step=7)
    with pytest.raises(InputError, match="does not exist"):
        replay(tmp_path / "absent.json")
    with pytest.raises(InputError, match="holds no file that ends in"):
        (tmp_path / "empty").mkdir()
        replay(tmp_path / "empty")
    unlinked = HandMade()
    unlinked.event("kernel", "k", (0, 7), 0, 5, stream=7)
    with pytest.raises(InputError, match="carry no correlation"):
        replay(unlinked.write(tmp_path / "v.json"))
    alone = HandMade()
    alone.event("overhead", "Buffer Flush", (0, 7), 0, 5)
    with pytest.raises(InputError, match="no operator, call or kernel"):
        replay(alone.write(tmp_path / "w.json"))
    only_host = HandMade()
    only_host.operator("aten::mm", 0, 50)
    answer = replay(only_host.write(tmp_path / "x.json"))
    assert any("no GPU events" in note for note in answer.notes)
