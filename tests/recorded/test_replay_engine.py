"""Replays of traces whose answer can be told by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hand_made import HandMade, two_streams
from playing import end_us, played_with, recording_of, times_of

from mist_megatron.recorded.engine import Change, play
from mist_megatron.recorded.graph import Edge


@pytest.mark.parametrize("said", [True, False], ids=["cuda_sync", "pairs"])
def test_streams_wait_for_each_other(said: bool) -> None:
    """gemm 100 -> 300: all that waits for it, directly or not, comes 200 us later, and so does the host."""
    recording = recording_of(two_streams(said=said))
    played = played_with(recording, {"gemm": 300.0})
    assert times_of(recording, played, "gemm") == [(15.0, 315.0)]
    assert times_of(recording, played, "nccl_AllReduce") == [(316.0, 366.0)]
    assert times_of(recording, played, "adam") == [(367.0, 397.0)]
    assert end_us(played) == pytest.approx(600.0)
    evidence = "waits said by cuda_sync" if said else "waits by pairs of record and wait"
    assert recording.counts[evidence] == 2


def test_a_faster_kernel_does_not_start_before_its_launch_arrives() -> None:
    recording = recording_of(two_streams())
    played = played_with(recording, {"gemm": 1.0, "nccl_AllReduce": 1.0})
    assert times_of(recording, played, "gemm") == [(15.0, 16.0)]
    start, end = times_of(recording, played, "nccl_AllReduce")[0]
    assert start == pytest.approx(27.0)  # launched at 22, and launches take 5 us
    assert times_of(recording, played, "adam")[0][0] == pytest.approx(max(end + 1.0, 39.0))


@pytest.mark.parametrize("kind", [Edge.THREAD, Edge.LAUNCH, Edge.STREAM, Edge.WAIT, Edge.SYNC])
def test_every_kind_of_edge_counts(kind: Edge) -> None:
    """Without any one kind the answer is another."""
    made = two_streams()
    made.kernel("tail", 210, 215, 20)
    made.kernel("tail", 214, 235, 20)
    recording = recording_of(made)
    lengths = {"gemm": 300.0, "tail": 90.0}
    whole, less = played_with(recording, lengths), played_with(recording, lengths, without=[kind])
    assert np.abs(whole.end_ns - less.end_ns).max() > 5_000


def test_collectives_wait_for_their_thread_and_are_waited_for() -> None:
    """As torch.distributed does it, without records and on time: known waits miss what inferred ones find."""
    made = HandMade()
    made.kernel("gemm", 10, 15, 5)
    made.call("cudaStreamWaitEvent", 18)
    made.kernel("nccl_AllReduce", 22, 27, 50, stream=20)
    made.kernel("beside", 26, 31, 5)
    made.call("cudaStreamWaitEvent", 80)
    made.kernel("adam", 84, 89, 30)
    starts = {}
    for waits in ("known", "inferred"):
        recording = recording_of(made, waits=waits)
        assert play(recording.graph).end_ns == pytest.approx(recording.graph.nodes.end_ns, abs=1.0)
        played = played_with(recording, {"gemm": 300.0})
        starts[waits] = [times_of(recording, played, name)[0][0] for name in ("nccl_AllReduce", "adam")]
    assert starts["known"] == pytest.approx([27.0, 321.0], abs=11)
    assert starts["inferred"] == pytest.approx([315.0, 365.0], abs=11)


def test_as_recorded_where_nothing_changes() -> None:
    recording = recording_of(two_streams())
    played = play(recording.graph)
    assert played.end_ns == pytest.approx(recording.graph.nodes.end_ns, abs=1.0)
    assert recording.explained == 1.0


def test_many_kernels_of_one_launch() -> None:
    """A CUDA graph: its kernels follow each other as they did, and come later together."""
    made = HandMade()
    made.kernel("before", 0, 5, 50)
    launch = made.call("cudaGraphLaunch", 10, 4)
    for name, at in (("first", 56), ("second", 70), ("third", 85)):
        made.event("kernel", name, (0, 7), at, 10, correlation=launch, stream=7)
    recording = recording_of(made)
    played = played_with(recording, {"before": 150.0})
    assert times_of(recording, played, "first") == [(156.0, 166.0)]
    assert times_of(recording, played, "third")[0][1] == pytest.approx(195.0)


def test_kernels_without_launch_keep_their_distance() -> None:
    made = HandMade()
    made.kernel("known", 0, 5, 50)
    made.event("kernel", "lost", (0, 7), 75, 10, correlation=999, stream=7)
    made.kernel("next", 20, 86, 10)
    recording = recording_of(made)
    played = played_with(recording, {"known": 70.0})
    assert times_of(recording, played, "lost") == [(95.0, 105.0)]
    assert times_of(recording, played, "next") == [(106.0, 116.0)]


def test_two_threads() -> None:
    """Forward launches, the backward thread begins when forward stands still, and forward goes on when it
    ends."""
    made = HandMade()
    made.operator("aten::mm", 0, 20)
    made.kernel("forward", 5, 10, 30)
    made.operator("autograd::engine::evaluate_function: MmBackward0", 60, 40, thread=2)
    made.kernel("backward", 70, 75, 20, thread=2)
    made.operator("aten::add_", 140, 10)
    made.kernel("step", 142, 147, 10)
    recording = recording_of(made)
    assert sum(count for name, count in recording.counts.items() if "hand-overs" in name) == 2
    graph = recording.graph
    lag = graph.edges.lag_ns.copy()
    threads = graph.edges.kind == Edge.THREAD
    backward = threads & (graph.nodes.role[graph.edges.target] == 0)
    backward &= graph.nodes.start_ns[graph.edges.target] == 70_000
    assert backward.sum() == 1
    lag[backward] += 100_000
    later = play(graph, Change(lag_ns=lag))
    assert times_of(recording, later, "forward") == [(10.0, 40.0)]
    assert times_of(recording, later, "backward") == [(175.0, 195.0)]
    # What lies between the backward thread's last launch and its end was recorded, and is kept.
    assert times_of(recording, later, "step")[0][0] >= 147.0


def test_a_contradicted_wait_is_left_out() -> None:
    """The trace says that stream 20 waited for what ended later: no edge, and it is told."""
    made = HandMade()
    made.kernel("long", 0, 5, 500)
    record = made.call("cudaEventRecord", 4)
    made.wait(8, 20, 7, record)
    made.kernel("early", 12, 17, 10, stream=20)
    recording = recording_of(made)
    assert recording.counts["waits that recorded times contradict"] == 1
    assert times_of(recording, played_with(recording, {"long": 900.0}), "early") == [(17.0, 27.0)]


def test_a_wait_without_evidence_is_no_edge_unless_asked_for() -> None:
    made = HandMade()
    made.kernel("other", 0, 5, 100, stream=20)
    made.call("cudaStreamWaitEvent", 10)
    made.kernel("late", 14, 106, 10)
    known, guessed = recording_of(made), recording_of(made, waits="inferred")
    assert known.explained == 0.5
    assert times_of(known, played_with(known, {"other": 200.0}), "late")[0][0] == pytest.approx(106.0)
    assert times_of(guessed, played_with(guessed, {"other": 200.0}), "late")[0][0] == pytest.approx(206.0)
    assert guessed.counts["waits inferred from collectives and what had just ended"] == 1


def test_one_step_alone() -> None:
    made = HandMade()
    for number in range(3):
        at = 1000.0 * number
        made.step(number, at, 1000.0)
        made.kernel("work", at + 10, at + 15, 500.0 + 100 * number)
    recording = recording_of(made, step=1)
    assert len(times_of(recording, play(recording.graph), "work")) == 1
    assert times_of(recording, play(recording.graph), "work") == [(1015.0, 1615.0)]
