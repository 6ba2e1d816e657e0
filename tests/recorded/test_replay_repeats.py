"""More layers and more micro-batches: what repeats is found, stretched, and refused where it is not clear."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hand_made import HandMade

from mist_megatron.ask.devices import device_named
from mist_megatron.ask.replay import replay
from mist_megatron.errors import InputError
from mist_megatron.price.prices import Collective

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


def sized(made: HandMade) -> HandMade:
    """With operators that say the hidden size; they launch nothing."""
    made.operator("aten::layer_norm", 0.2, 0.2, **{"Input Dims": [[1, 4096, 1024]]})
    dims = [[4096, 1024], [1024, 4096]]
    made.operator("aten::mm", 0.5, 0.2, **{"Input Dims": dims, "Input type": ["c10::BFloat16"] * 2})
    return made


def one_f_one_b(times: list[tuple[float, float]], micro_batches: int, send: float) -> float:
    """When the last pass of 1F1B ends, by going through the passes until nothing moves any more."""
    stages = len(times)
    ends: dict[tuple[int, str, int], float] = {}
    for _ in range(4 * stages * micro_batches):
        for stage in range(stages):
            warm = min(stages - stage - 1, micro_batches)
            order = [("F", k) for k in range(warm)]
            for k in range(micro_batches):
                order += [("F", warm + k)] * (warm + k < micro_batches) + [("B", k)]
            now = 0.0
            for kind, k in order:
                other = stage - 1 if kind == "F" else stage + 1
                if 0 <= other < stages:
                    now = max(now, ends.get((other, kind, k), 0.0) + send)
                now += times[stage]["FB".index(kind)]
                ends[stage, kind, k] = now
    return max(ends.values())


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 4), (4, 6)])
def test_a_pipeline_of_recorded_passes(tmp_path: Path, stages: int, micro_batches: int) -> None:
    """Four layers of 3 + 2 kernels of 51 us; forward, the first stage embeds and the last has a loss."""
    device = [{"name": "NVIDIA A100-SXM4-80GB"}]
    path = sized(training(4, 2)).write(tmp_path / "t.json", deviceProperties=device)
    answer = replay(path, pp=stages, micro_batches=micro_batches, trace=tmp_path / "new.json")
    forward, backward = 3 * 51e-6 * 4 / stages, 2 * 51e-6 * 4 / stages
    work = Collective("send_recv", *(np.array(float(x)) for x in (2 * 4096 * 1024, 2, 1)))  # type: ignore[arg-type]
    send = device_named("a100-sxm-80gb").seconds(work)
    assert send is not None
    ends = [(stage == 0) + (stage == stages - 1) for stage in range(stages)]
    times = [(forward + 51e-6 * edges, backward) for edges in ends]
    assert answer.changed is not None
    wanted = one_f_one_b(times, micro_batches, send) + 51e-6 / stages
    assert answer.changed.step_s == pytest.approx(wanted, rel=0.02)
    assert [one.window_s for one in answer.changed.ranks] == [answer.changed.step_s] * stages
    again = replay(tmp_path / "new.json")
    assert again.recorded.step_s == pytest.approx(answer.changed.step_s, rel=1e-3)
    told = {one.what: one for one in answer.retimed}
    assert told["sends between stages"].kernels == 2 * (stages - 1) * micro_batches


def test_pipelines_that_cannot_be(tmp_path: Path) -> None:
    device = [{"name": "NVIDIA A100-SXM4-80GB"}]
    piped = training(4, 2, pipeline=True).write(tmp_path / "p.json", deviceProperties=device)
    for question in ({"micro_batches": 4}, {"pp": 2}):
        with pytest.raises(InputError, match="wanted all ranks, each a stage, or --against PLAN"):
            replay(piped, **question)  # type: ignore[arg-type]
    path = training(4, 2).write(tmp_path / "t.json", deviceProperties=device)
    with pytest.raises(InputError, match="4 layers do not divide among 3 stages"):
        replay(sized(training(4, 2)).write(tmp_path / "s.json", deviceProperties=device), pp=3)
    with pytest.raises(InputError, match="no shapes"):
        replay(path, pp=2)
    made = training(4, 2)
    for event in list(made.events):
        if event["name"] in BACK:
            # Backward on a stream of its own, at the time of forward passes.
            event["ts"], event["tid"] = event["ts"] - 700, 9
            event["args"]["stream"] = 9
    with pytest.raises(InputError, match="at the same time"):
        replay(sized(made).write(tmp_path / "d.json", deviceProperties=device), pp=2)
