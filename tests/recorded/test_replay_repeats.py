"""More layers and more micro-batches: what repeats is found, stretched, and refused where it is not clear."""

from __future__ import annotations

from pathlib import Path

import pytest
from hand_made import HandMade

from mist_megatron.ask.replay import replay
from mist_megatron.errors import InputError

LAYER, BACK = ("ln", "qkv", "gelu"), ("gelu_back", "qkv_back")


def training(layers: int, micro_batches: int = 1, *, pipeline: bool = False) -> HandMade:
    """Kernels of 50 us that are launched every 10: the GPU is what takes time. Backward has a thread of its
    own."""
    made = HandMade()
    host, gpu = 0.0, 5.0
    start = host

    def launch(name: str, thread: int, operator: str) -> None:
        nonlocal host, gpu
        made.operator(operator, host, 9, thread=thread)
        gpu = max(gpu, host + 6)
        made.kernel(name, host + 1, gpu, 50, thread=thread)
        gpu += 51
        host += 10

    for _ in range(micro_batches):
        launch("embedding", 1, "aten::embedding")
        for _ in range(layers):
            for name in LAYER:
                launch(name, 1, f"aten::{name}")
        launch("loss", 1, "aten::loss")
        host += 40
        for _ in range(layers):
            for name in BACK:
                launch(name, 2, f"autograd::engine::evaluate_function: {name}Backward0")
        host += 40
    if pipeline:
        made.kernel("ncclDevKernel_SendRecv", host, gpu, 5, **{"Collective name": "send", "dtype": "Float"})
    made.event("user_annotation", "Optimizer.step#SGD.step", (100, 1), host, 12)
    launch("sgd", 1, "aten::add_")
    made.call("cudaDeviceSynchronize", host, gpu - host + 5)
    made.step(1, start, gpu + 10 - start)
    return made


@pytest.mark.parametrize(("have", "wanted"), [(4, 8), (8, 4), (4, 5), (3, 3)])
def test_more_layers(tmp_path: Path, have: int, wanted: int) -> None:
    """The GPU works all the time: five kernels of 51 us a layer."""
    answer = replay(training(have).write(tmp_path / "t.json"), layers=wanted)
    truth = replay(training(wanted).write(tmp_path / "u.json"))
    assert answer.changed is not None
    assert answer.changed.step_s == pytest.approx(truth.recorded.step_s, rel=0.02)
    told = {one.how: one for one in answer.retimed}
    assert told["stretched"].what == f"layers {have} -> {wanted}"
    assert told["stretched"].kernels == 5 * have


@pytest.mark.parametrize(("have", "wanted"), [(2, 4), (4, 2), (1, 3)])
def test_more_micro_batches(tmp_path: Path, have: int, wanted: int) -> None:
    answer = replay(training(4, have).write(tmp_path / "t.json"), micro_batches=wanted)
    truth = replay(training(4, wanted).write(tmp_path / "u.json"))
    assert answer.changed is not None
    assert answer.changed.step_s == pytest.approx(truth.recorded.step_s, rel=0.03)


def test_layers_and_micro_batches_at_once(tmp_path: Path) -> None:
    answer = replay(training(4, 2).write(tmp_path / "t.json"), layers=8, micro_batches=4)
    truth = replay(training(8, 4).write(tmp_path / "u.json"))
    assert answer.changed is not None
    assert answer.changed.step_s == pytest.approx(truth.recorded.step_s, rel=0.06)


def test_what_does_not_repeat(tmp_path: Path) -> None:
    made = HandMade()
    for number in range(8):
        made.operator(f"aten::op{number}", 20 * number, 10)
        made.kernel(f"kernel{number}", 20 * number + 1, 20 * number + 6, 10)
    path = made.write(tmp_path / "t.json")
    with pytest.raises(InputError, match="no layers found"):
        replay(path, layers=8)
    with pytest.raises(InputError, match="0 backward passes"):
        replay(path, micro_batches=8)
    with pytest.raises(InputError, match="layers is 0"):
        replay(path, layers=0)


def test_pipelines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="filling and draining do not repeat"):
        replay(training(4, 2, pipeline=True).write(tmp_path / "t.json"), micro_batches=4)
