"""Every number of small recordings, counted by hand, and what lies exactly on a border: the first event of a
file, a kernel that begins with its step, a process without a GPU."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hand_made import HandMade
from playing import played_with, recording_of, times_of

import mist_megatron as mm
from mist_megatron.ask.devices import device_named
from mist_megatron.ask.replay import replay
from mist_megatron.errors import InputError
from mist_megatron.recorded.engine import play
from mist_megatron.recorded.graph import Edge, Role
from mist_megatron.recorded.passes import _calls, _on_gpu, _on_host, passes_of
from mist_megatron.recorded.repeats import Stretch, backward_runs, more_layers, windows_of
from mist_megatron.recorded.resize import SUM, _parameters, _Ratios, on_widths, with_sums
from mist_megatron.recorded.retime import on_device
from mist_megatron.recorded.usage import Window, rank_times, top_kernels, typical_step, windows
from mist_megatron.recorded.waits import RECORDS, called
from mist_megatron.recorded.what_if import stretched
from mist_megatron.recorded.widths import Widths, _hidden, _Seen, resized
from mist_megatron.traces.reader import Reading, read_trace
from mist_megatron.traces.sizes import OperatorWork

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def test_what_begins_with_the_window_is_in_it_and_what_begins_with_its_end_is_not() -> None:
    made = HandMade()
    for number, (name, length) in enumerate((("a", 10), ("b", 20), ("a", 30), ("a", 40))):
        made.kernel(name, 2 * number, 100 * (number + 1), length)
    recording = recording_of(made)
    played = play(recording.graph)
    begin = float(played.start_ns[recording.graph.nodes.role == Role.GPU].min())
    window = Window(0, begin, begin + 300e3, None)
    told = {one.name: one for one in top_kernels(recording, played, (window,), 5)}
    assert {name: one.calls for name, one in told.items()} == {"a": 2, "b": 1}
    assert told["a"].seconds == pytest.approx(40e-6) and told["a"].share == pytest.approx(40 / 300)
    assert told["b"].seconds == pytest.approx(20e-6) and told["b"].share == pytest.approx(20 / 300)
    assert [one.name for one in top_kernels(recording, played, (window,), 1)] == ["a"]


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [((900, 50, 10), 1), ((900, 50, 10, 700), 2), ((9, 8, 5, 7, 6, 1), 4), ((4,), 0), ((4, 9), 1)],
)
def test_the_typical_step_is_neither_the_first_nor_the_last(lengths: tuple[int, ...], wanted: int) -> None:
    """Of those between the lower one of the middle two, else the second, else the only one."""
    made, at = HandMade(), 0.0
    for number, length in enumerate(lengths):
        made.step(number, at, length)
        made.kernel("k", at + 0.1, at + 0.2, 0.5)
        at += length
    assert typical_step(recording_of(made)) == wanted


def test_a_launch_that_is_the_first_event() -> None:
    """It is stretched like any other: 30 us of the host twice as long, and the kernels that it and the next
    launch started; neither a collective nor what another thread launched."""
    made = HandMade()
    made.kernel("first", 0, 5, 50)
    made.kernel("second", 10, 60, 20)
    made.kernel("ncclDevKernel_AllReduce", 15, 85, 40)
    made.kernel("elsewhere", 16, 130, 7, thread=2)
    recording = recording_of(made)
    part = recording.parts[0]
    place = int(part.trace.place[part.links.launch[part.trace.names_that("first".__eq__).argmax()]])
    begin = int(part.trace.start_ns.min())
    _, told = stretched(recording, [[Stretch(place, begin, begin + 30_000, 2.0)]], "all")
    host, kernels = told
    assert (host.how, host.kernels, kernels.how, kernels.kernels) == (
        "host time stretched",
        0,
        "stretched",
        2,
    )
    assert host.after_s == pytest.approx(2 * host.before_s) and 0.0 < host.before_s < 31e-6
    assert (kernels.before_s, kernels.after_s) == (pytest.approx(70e-6), pytest.approx(140e-6))


def test_a_backward_operator_that_is_the_first_event(tmp_path: Path) -> None:
    plan = mm.tune(model="gpt3-1.3b", gpus=8, gpu="a100-sxm-80gb", target="megatron", fix="tp=8").plan
    rows, hidden = plan.stages[0].micro_batch * plan.training.seq_len, plan.model.hidden
    made = HandMade(rank=0, world=8)
    made.operator(BACKWARD, 0, 30)
    made.operator("aten::mm", 1, 20, **{
        "Input Dims": [[rows, hidden], [hidden, 3 * hidden // 8]], "Input type": ["c10::BFloat16"] * 2,
    })  # fmt: skip
    made.kernel("gemm", 5, 10, 50)
    made.kernel("free", 40, 61, 25)
    (told,) = replay(made.write(tmp_path / "t.json"), against=plan).compared
    measured = {line.name: line.measured_s for line in told.lines}
    assert (measured["backward"], measured["forward"]) == (pytest.approx(50e-6), pytest.approx(25e-6))


def test_a_wait_for_a_kernel_that_was_launched_before_the_recording() -> None:
    """The kernel is the file's first event: what waits for it waits."""
    made = HandMade()
    made.event("kernel", "before", (0, 7), 0, 100, correlation=999, stream=7)
    record = made.call("cudaEventRecord", 4)
    made.wait(8, 20, 7, record)
    made.kernel("late", 12, 101, 10, stream=20)
    recording = recording_of(made)
    assert recording.counts["waits said by cuda_sync"] == 1
    assert recording.counts["waits on streams that do nothing here"] == 0


def test_nodes_of_a_meeting_are_of_those_who_meet() -> None:
    made = []
    for number in range(3):
        rank = HandMade(rank=number, world=3)
        rank.kernel("ncclDevKernel_AllReduce", 1, 6 + number, 50 - number, **{
            "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 8, "Out msg nelems": 8,
            "Group size": 3, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2]", "Seq": 1,
        })  # fmt: skip
        made.append(rank)
    nodes = recording_of(*made).graph.nodes
    assert sorted(nodes.rank[nodes.role == Role.ARRIVE].tolist()) == [0, 1, 2]
    assert nodes.rank[nodes.role == Role.MEET].tolist() == [0]


def test_products_without_usual_sizes_keep_their_time(tmp_path: Path) -> None:
    made = HandMade()
    made.operator("aten::mm", 0, 20, **{"Input Dims": [[64, 32]], "Input type": ["float"]})
    made.kernel("gemm", 5, 10, 50)
    made.kernel("other", 22, 61, 50)
    recording = recording_of(made)
    _, told = on_device(recording, device_named("a100-sxm-80gb"), device_named("h100-sxm-80gb"))
    kept = {one.what: one for one in told}["products and attention without usual sizes"]
    assert (kept.kernels, kept.before_s, kept.after_s) == (1, pytest.approx(50e-6), pytest.approx(50e-6))


def on_the_host(layers: int, micro_batches: int, gap: float = 0.0) -> HandMade:
    """Operators and nothing else: embedding, layers of two, a loss, and one for each of them back."""
    made, at = HandMade(), 0.0

    def run(name: str, length: float) -> None:
        nonlocal at
        made.operator(name, at, length)
        at += length

    for _ in range(micro_batches):
        run("aten::embedding", 30)
        for _ in range(layers):
            run("aten::mm", 50)
            run("aten::gelu", 50)
        run("aten::loss", 20)
        for _ in range(layers):
            run(BACKWARD, 70)
        at += gap
    run("aten::add_", 10)
    made.step(1, 0, at)
    return made


def test_passes_of_a_process_without_a_gpu() -> None:
    recording = recording_of(on_the_host(4, 3, gap=60))
    told = passes_of(recording, play(recording.graph), 0, 1, by_layer=True)
    assert (told.micro_batches, told.layers, told.sends) == (3, 4, 0)
    # The host stands still for 60 us before each micro-batch but the first, and before the tail.
    assert (told.forward_s, told.backward_s) == (pytest.approx(490e-6), pytest.approx(280e-6))
    assert (told.before_s, told.behind_s) == ((pytest.approx(70e-6), 0.0), (pytest.approx(20e-6), 0.0))
    assert told.tail_s == pytest.approx(70e-6)


def test_the_optimizer_is_no_pass_even_as_the_first_event() -> None:
    """What it runs backward (a closure) is its own."""
    made = HandMade()
    made.event("user_annotation", "Optimizer.step#SGD.step", (100, 1), 0, 100)
    made.operator(BACKWARD, 10, 50)
    made.operator("aten::mm", 110, 20)
    made.operator(BACKWARD, 140, 20)
    recording = recording_of(made)
    (window,) = windows_of(recording.parts[0].trace)
    assert len(backward_runs(recording.parts[0], window)) == 1


def test_steps_of_unequal_layers_are_told() -> None:
    made, at = HandMade(), 0.0
    for number, layers in enumerate((3, 5)):
        begin = at
        for event in on_the_host(layers, 1).events[:-1]:
            made.operator(event["name"], begin + event["ts"], event["dur"])
            at = begin + event["ts"] + event["dur"]
        made.step(number, begin, at - begin)
    with pytest.raises(InputError, match="passes repeat 3, 5 times"):
        more_layers(recording_of(made).parts[0], 8)


def test_a_file_cut_off_behind_a_comma() -> None:
    whole = HandMade()
    whole.operator("aten::mm", 0, 9)
    text = json.dumps(whole.document())[: -len("]}")] + ",\n "
    with pytest.raises(InputError, match=r"cut off at traceEvents\[1\]"):
        read_trace(io.BytesIO(text.encode()), "t.json")
    assert len(read_trace(io.BytesIO(text.encode()), "t.json", Reading(partial=True))) == 1


def test_a_step_begins_behind_what_the_step_before_left_to_do() -> None:
    """300 us of step 1's kernel run into step 2: the GPU is busy, and a kernel of no length frees them."""
    made = HandMade()
    made.step(1, 0, 100)
    made.kernel("long", 50, 60, 340)
    made.step(2, 100, 500)
    made.kernel("mine", 110, 400, 100)
    made.call("cudaDeviceSynchronize", 120, 385)
    recording = recording_of(made, step=2)
    played = play(recording.graph)
    (window,) = windows(recording, played, 2)
    (told,) = rank_times(recording, played, (window,))
    assert told.usage.host_s == 0.0
    assert told.usage.exposed_compute_s == pytest.approx(400e-6, rel=0.01)
    assert [note for note in recording.notes if "1 kernels of earlier steps" in note]
    assert times_of(recording, played_with(recording, {"long": 0.0}), "mine")[0][0] <= 120.0
    assert recording.parts[0].played.tolist() == [
        event for event in range(len(recording.traces[0])) if recording.traces[0].name_of(event) == "mine"
    ]


def test_marks_of_a_host_that_runs_ahead_are_told(tmp_path: Path) -> None:
    """A kernel takes 300 us longer, its step ends as it did: all of it tells more."""
    made = HandMade()
    made.step(1, 0, 100)
    made.kernel("gemm", 10, 15, 300)
    made.step(2, 100, 100)
    path = made.write(tmp_path / "t.json")
    answer = replay(path, scale="kernel=gemm:2")
    (told,) = [note for note in answer.notes if "does not wait for the GPU" in note]
    assert "0.315 -> 0.615 ms" in told
    made.call("cudaDeviceSynchronize", 110, 210)
    made.events[-2]["dur"] = 230.0 if made.events[-2]["name"] == "ProfilerStep#2" else 0.0
    path = made.write(tmp_path / "waits.json")
    assert not [note for note in replay(path, scale="kernel=gemm:2").notes if "does not wait" in note]


def test_a_window_has_the_calls_of_its_first_and_last_moment() -> None:
    made = HandMade()
    for at in (0, 10, 20, 30):
        made.call("cudaEventRecord", at)
    trace = recording_of(made).traces[0]
    calls = called(trace, RECORDS, 10_000, 20_000)
    assert trace.start_ns[calls].tolist() == [10_000, 20_000]


@pytest.mark.parametrize(("begins", "how"), [(114, "waits said by cuda_sync"),
                                             (113, "waits that recorded times contradict")])  # fmt: skip
def test_recorded_times_are_rounded_by_a_microsecond(begins: int, how: str) -> None:
    """A kernel that ends at 115 may be waited for by one that begins as much as a microsecond before."""
    made = HandMade()
    made.kernel("first", 0, 15, 100)
    record = made.call("cudaEventRecord", 4)
    made.wait(8, 20, 7, record)
    made.kernel("late", 12, begins, 10, stream=20)
    counts = recording_of(made).counts
    assert {name: counts[name] for name in counts if name.startswith("waits")} == {how: 1}


def test_a_synchronisation_whose_record_is_not_known_waits_for_what_ended_with_it() -> None:
    """It names a stream that was idle long before; the other one's kernel ended when the call returned."""
    made = HandMade()
    made.kernel("idle", 0, 5, 10)
    made.kernel("busy", 4, 9, 191, stream=20)
    number = made.call("cudaEventSynchronize", 50, 152)
    made.event(
        "cuda_sync", "Event Sync", (0, 7), 50, 152, correlation=number, stream=-1,
        wait_on_stream=7, wait_on_cuda_event_record_corr_id=999,
    )  # fmt: skip
    recording = recording_of(made)
    assert recording.counts["synchronisations by their common end"] == 1
    played = played_with(recording, {"busy": 391.0})
    assert float(played.end_ns.max()) >= 400e3


def test_what_begins_with_a_step_is_the_step_s() -> None:
    """Host work, kernels and transfers of its first moment; what begins with its end is the next step's."""
    made = HandMade()
    made.step(1, 0, 100)
    made.operator("aten::mm", 0, 10)
    made.kernel("work", 0, 5, 20)
    made.operator("aten::send", 100, 10)
    made.kernel("nccl_SendRecv", 100, 105, 20)
    made.step(2, 100, 100)
    recording = recording_of(made)
    part, nobody = recording.parts[0], np.zeros(len(recording.parts[0].trace), np.bool_)
    sends = part.trace.names_that("nccl_SendRecv".__eq__)
    first, second = windows_of(part.trace)
    assert (_calls(part, first, sends), _calls(part, second, sends)) == (0, 1)
    played = play(recording.graph)
    hosts = [_on_gpu(recording, played, 0, step, nobody).host_ns.tolist() for step in (first, second)]
    assert hosts == [[0], [100_000]]
    hosts = [_on_host(part, step, nobody, []).start_ns.tolist() for step in (first, second)]
    assert hosts == [[0], [100_000]]


def test_synchronisations_return_as_long_after_the_gpu_as_is_usual() -> None:
    """3, 5 and 40 us after what they waited for: the last waited for something else too, 4 are usual. One
    whose kernel had ended before waited for nothing, and says nothing of what is usual."""
    made, at = HandMade(), 0.0
    for late in (3, 5, 40):
        made.kernel("work", at, at + 5, 100)
        made.call("cudaStreamSynchronize", at + 10, 95 + late)
        at += 200
    made.kernel("short", at, at + 5, 10)
    made.call("cudaStreamSynchronize", at + 50, 30)
    edges = recording_of(made).graph.edges
    lags = edges.lag_ns[edges.at_end & (edges.kind == Edge.SYNC)]
    assert sorted((lags / 1e3).tolist()) == [3.0, 4.0, 4.0, 4.0]


def test_the_first_launch_alone_is_stretched_where_it_was_made() -> None:
    made = HandMade()
    made.kernel("first", 0, 5, 50)
    made.kernel("second", 10, 60, 20)
    recording = recording_of(made)
    part = recording.parts[0]
    begin, place = int(part.trace.start_ns.min()), int(part.trace.place[0])
    _, told = stretched(recording, [[Stretch(place, begin, begin + 3_000, 2.0)]], "all")
    (_, kernels) = told
    assert (kernels.kernels, kernels.before_s) == (1, pytest.approx(50e-6))


@pytest.mark.parametrize(("calls", "clear"), [((5, 2), True), ((4, 2), True), ((3, 2), False)])
def test_a_hidden_size_is_clear_where_twice_as_many_products_have_it(
    calls: tuple[int, int], clear: bool
) -> None:
    sizes = ((64.0, 16.0, 512.0, 1.0), (64.0, 16.0, 256.0, 1.0))
    products = Counter({OperatorWork("gemm", "bf16", size): n for size, n in zip(sizes, calls, strict=True)})
    seen = _Seen(products, Counter(), Counter({(64, 512): 1, (64, 256): 1}), Counter())
    trace = recording_of(on_the_host(1, 1)).traces[0]
    if clear:
        assert _hidden(trace, seen) == 512
    else:
        with pytest.raises(InputError, match="512 or 256 is not clear"):
            _hidden(trace, seen)


def test_a_product_that_is_the_first_event_is_resized_and_summed() -> None:
    """An MLP's second product, 64 tokens from 1,024 columns to 256, is all that a trace has: at twice the
    hidden size it has twice the parameters, and two ranks would add it up."""
    made = HandMade()
    made.operator("aten::mm", 0, 20, **{
        "Input Dims": [[64, 1024], [1024, 256]], "Input type": ["c10::BFloat16"] * 2,
    })  # fmt: skip
    made.kernel("gemm", 5, 10, 50)
    recording = recording_of(made)
    part = recording.parts[0]
    assert part.trace.shapes[0] == 0
    old = Widths(
        hidden=256, rows=frozenset({64}), local_rows=frozenset(), attention=frozenset(),
        ffn=frozenset({1024}), vocab=frozenset(), heads=frozenset(), batches=frozenset(), tp=1,
    )  # fmt: skip
    wider = resized("t", old, hidden=512)
    assert _parameters(part.trace, wider) == pytest.approx(2.0)
    _, told = on_widths(recording, [wider], device_named("a100-sxm-80gb"))
    assert [(one.what, one.kernels) for one in told] == [("products", 1)]
    summed = with_sums(part.trace, part, resized("t", old, tp=2))
    assert summed.names_that(SUM.__eq__).sum() == 1


def test_what_waits_for_its_stream_says_nothing_of_launches() -> None:
    """Launches take 5 us to an idle stream; two kernels that stood in a queue came 14 and 22 us after."""
    made = HandMade()
    for launch, begin in ((0, 5), (4, 18), (8, 30)):
        made.kernel("work", launch, begin, 11)
    edges = recording_of(made).graph.edges
    assert (edges.lag_ns[edges.kind == Edge.LAUNCH] / 1e3).tolist() == [5.0, 5.0, 5.0]


def test_a_rank_has_a_key_head_at_least() -> None:
    """8 query heads and 2 key heads of a rank, shared out among four: 2 and 1."""
    asked: list[tuple[float, ...]] = []

    def seconds(work: OperatorWork) -> float:
        asked.append(work.sizes)
        return 1.0

    part = recording_of(on_the_host(1, 1)).parts[0]
    old = Widths(
        hidden=512, rows=frozenset({64}), local_rows=frozenset(), attention=frozenset(), ffn=frozenset(),
        vocab=frozenset(), heads=frozenset({8}), batches=frozenset(), tp=1,
    )  # fmt: skip
    device: Any = SimpleNamespace(operator_s=seconds, source="made")
    way = _Ratios(part, resized("t", old, tp=4), device)._sized(
        OperatorWork("attention_forward", "bf16", (1.0, 64.0, 8.0, 2.0, 64.0))
    )
    assert (way.what, asked[-1]) == ("attention", (1.0, 64.0, 2.0, 1.0, 64.0))
