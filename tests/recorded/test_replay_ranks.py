"""Several ranks: collectives matched, clocks aligned, waiting told from transfer, and who was waited for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hand_made import HandMade
from playing import played_with, recording_of, times_of, trace_of

from mist_megatron.ask.devices import device_named
from mist_megatron.ask.replay import in_order, replay
from mist_megatron.errors import InputError
from mist_megatron.price.prices import Collective, HostCopy
from mist_megatron.recorded.engine import play
from mist_megatron.recorded.report import page_of

COMM = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


def rank(number: int, computes: float, *, clock: float = 0.0, named: bool = True) -> HandMade:
    """Computes so long, then reduces with the others: the transfer takes 40 us, from when the last has come
    at 205."""
    made = HandMade(rank=number, world=3)
    made.step(1, clock, 400)
    made.kernel("gemm", clock, clock + 5, computes)
    said = {}
    if named:
        said = {
            "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000, "Out msg nelems": 1000,
            "Group size": 3, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2]", "Seq": 7,
        }  # fmt: skip
    begins = clock + 5 + computes
    made.kernel(COMM, clock + 3, begins, clock + 245 - begins, **said)
    made.call("cudaDeviceSynchronize", clock + 10, 240)
    return made


@pytest.mark.parametrize("named", [True, False], ids=["communicator and Seq", "order on the stream"])
def test_who_waited_for_whom(named: bool) -> None:
    recording = recording_of(*(rank(k, computes, named=named) for k, computes in enumerate((50, 100, 200))))
    page = page_of(recording, play(recording.graph), None)
    (told,) = page.communicators
    assert told.matched and told.calls == 1
    assert told.transfer_s == pytest.approx(40e-6)
    assert told.waited_s == pytest.approx((150e-6 + 100e-6) / 3)
    assert dict(told.waited_for) == {2: pytest.approx(250e-6)}
    assert told.size_bytes == (4000 if named else 0)


def test_the_last_rank_decides_for_all() -> None:
    recording = recording_of(*(rank(k, computes) for k, computes in enumerate((50.0, 100.0, 200.0))))
    slower = play_all(recording, {0: 300.0})
    assert slower == [
        pytest.approx((305.0, 345.0)),
        pytest.approx((105.0, 345.0)),
        pytest.approx((205.0, 345.0)),
    ]
    faster = play_all(recording, {2: 20.0})
    assert [end for _, end in faster] == [pytest.approx(145.0)] * 3


def play_all(recording, lengths):  # type: ignore[no-untyped-def]
    """Start and end of the collective, where these ranks compute so long."""
    graph = recording.graph
    own = graph.nodes.own_ns.copy()
    for node, place in enumerate(graph.nodes.rank.tolist()):
        event = int(graph.nodes.event[node])
        named = event >= 0 and recording.traces[place].name_of(event) == "gemm"
        if named and place in lengths:
            own[node] = lengths[place] * 1e3
    from mist_megatron.recorded.engine import Change

    return times_of(recording, play(graph, Change(own_ns=own)), COMM)


def replica(late: float) -> HandMade:
    """Two backward passes that each ask gloo for a reduction, of 100 us from when the other rank has come at
    1,592 and at 2,592; the step ends behind the second."""
    made = HandMade()
    made.step(1, 0, 2800)
    if late:
        made.operator("late", 0, late)
    for number, there in enumerate((1592, 2592)):
        begin = late + 1000 * number
        made.operator("autograd::engine::evaluate_function: LayerBackward", begin, 1000)
        made.operator("c10d::allreduce_", begin + 990, 5)
        place, at = (100, 2 + number), begin + 992
        made.event("user_annotation", "gloo:all_reduce", place, at, there + 100 - at)
    made.operator("next", 2700, 100)
    return made


@pytest.mark.parametrize(
    ("scale", "step_us"),
    [("op=^late$:0", 2200), ("op=^late$:2", 3400), ("kernel=gloo:2", 2900), ("op=allreduce:2", 2900)],
)
def test_reductions_of_gloo_beside_the_backward_pass(tmp_path: Path, scale: str, step_us: float) -> None:
    paths = [replica(late).write(tmp_path / f"{late}.json") for late in (0.0, 600.0)]
    answer = replay(paths, scale=scale)
    assert answer.changed is not None
    for page, wanted in ((answer.recorded, 2800), (answer.changed, step_us)):
        for ((_, step_s),) in page.steps.values():
            assert step_s == pytest.approx(wanted * 1e-6, rel=0.003)


def test_clocks_that_differ_by_milliseconds() -> None:
    """+-5 ms of clock change nothing: collectives end together."""
    straight = recording_of(*(rank(k, computes) for k, computes in enumerate((50, 100, 200))))
    skewed = recording_of(
        *(
            rank(k, computes, clock=clock)
            for k, computes, clock in ((0, 50, 0), (1, 100, 5000), (2, 200, 10000))
        )
    )
    pages = [page_of(one, play(one.graph), None) for one in (straight, skewed)]
    assert pages[0].communicators == pages[1].communicators
    assert [shift - skewed.shifts_ns[0] for shift in skewed.shifts_ns] == pytest.approx([0, 0, 0], abs=2.0)
    assert [trace.origin_ns for trace in skewed.traces] == [0, 5_000_000, 10_000_000]


def test_parts_add_up_to_the_step() -> None:
    recording = recording_of(*(rank(k, computes) for k, computes in enumerate((50, 100, 200))))
    for one in page_of(recording, play(recording.graph), None).ranks:
        assert one.usage.makespan_s == pytest.approx(one.window_s)
        assert one.window_s == pytest.approx(400e-6)
    first = page_of(recording, play(recording.graph), None).ranks[0]
    assert first.usage.exposed_compute_s == pytest.approx(50e-6)
    assert first.usage.exposed_communication_s == pytest.approx(190e-6)
    assert first.usage.host_s == pytest.approx(5e-6)


def test_a_transfer_can_be_scaled_but_waiting_cannot() -> None:
    recording = recording_of(*(rank(k, computes) for k, computes in enumerate((50, 100, 200))))
    from mist_megatron.recorded.what_if import parse_scale, scaled

    change, told = scaled(recording, [parse_scale("kernel=nccl:0.5")])
    ends = [end for _, end in times_of(recording, play(recording.graph, change), COMM)]
    assert ends == [pytest.approx(225.0)] * 3
    assert [(one.kernels, one.before_s) for one in told] == [(3, pytest.approx(120e-6))]


def test_collectives_that_do_not_fit_are_not_matched() -> None:
    other = rank(1, 100, named=False)
    other.kernel(COMM, 300, 320, 20)
    recording = recording_of(rank(0, 50, named=False), other)
    assert not recording.meetings
    assert "not matched" in recording.notes[0]
    assert times_of(recording, played_with(recording, {}), COMM)[0] == pytest.approx((55.0, 245.0))


def test_traces_of_different_runs() -> None:
    with pytest.raises(InputError, match="both of rank 0"):
        in_order([trace_of(rank(0, 50)), trace_of(rank(0, 50))])
    later = HandMade(rank=1, world=3)
    later.step(5, 0, 100)
    later.kernel("gemm", 0, 5, 10)
    with pytest.raises(InputError, match="different steps"):
        in_order([trace_of(rank(0, 50)), trace_of(later)])
    _, notes = in_order([trace_of(rank(0, 50))])
    assert any("rank 0 of 3 alone" in note for note in notes)


def test_more_ranks(tmp_path: Path) -> None:
    """The transfer takes what prices say of more ranks; waiting for the last rank stays what it was."""
    device = [{"name": "NVIDIA A100-SXM4-80GB"}]
    paths = [
        rank(k, computes).write(tmp_path / f"{k}.json", deviceProperties=device)
        for k, computes in enumerate((50, 100, 200))
    ]
    answer = replay(paths, dp=16)
    a100 = device_named("a100-sxm-80gb")
    sizes = (np.array(4000.0), *(np.array(float(count)) for count in (3, 1)))
    larger = (np.array(4000.0), *(np.array(float(count)) for count in (16, 2)))
    before, after = (a100.seconds(Collective("all_reduce", *one)) for one in (sizes, larger))
    assert before is not None and after is not None and after > before
    ends = [end for _, end in times_of(answer.recording, answer.played, COMM)]
    assert ends == [pytest.approx(205.0 + 40.0 * after / before)] * 3
    mixed = rank(0, 50)
    mixed.kernel(COMM, 260, 265, 10, **{
        "Collective name": "allreduce", "dtype": "Float", "In msg nelems": 9, "Out msg nelems": 9,
        "Group size": 2,
        "Process Group Name": "1", "Process Group Ranks": "[0, 1]", "Seq": 1,
    })  # fmt: skip
    path = mixed.write(tmp_path / "mixed.json", deviceProperties=device)
    with pytest.raises(InputError, match="groups of 2, 3 ranks"):
        replay(path, dp=16)


def test_collectives_and_copies_on_another_gpu(tmp_path: Path) -> None:
    """What prices of both say of as many bytes; what says no bytes keeps its time, and so do sends when there
    are more data-parallel ranks."""
    made = rank(0, 50)
    made.number += 10
    for at, name, said in (
        (300, "Memcpy HtoD (Pinned -> Device)", {"bytes": 8_000_000}),
        (330, "Memcpy HtoD (Pageable -> Device)", {"bytes": 8_000_000}),
    ):
        number = made.call("cudaMemcpyAsync", at)
        made.event("gpu_memcpy", name, (0, 9), at + 5, 20, correlation=number, stream=9, device=0, **said)
    made.kernel("ncclDevKernel_SendRecv", 305, 310, 15, stream=20, **{
        "Collective name": "send", "dtype": "Float", "In msg nelems": 1000, "Out msg nelems": 1000,
        "Group size": 2, "Process Group Name": "1", "Process Group Ranks": "[0, 3]", "Seq": 1,
    })  # fmt: skip
    path = made.write(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA A100-SXM4-80GB"}])
    answer = replay(path, gpu="h100-sxm-80gb")
    here, there = (device_named(name) for name in ("a100-sxm-80gb", "h100-sxm-80gb"))
    sizes = {"all_reduce": (190.0, 3.0, 1.0), "send_recv": (15.0, 2.0, 1.0)}
    parts = [(length, Collective(kind, *(np.array(value) for value in (4000.0, ranks, nodes))))
             for kind, (length, ranks, nodes) in sizes.items()]  # fmt: skip
    told = {one.what: one for one in answer.retimed}
    for what, works in (("collectives", parts), ("copies", [(20.0, HostCopy(np.array(8e6), "h2d"))])):
        seconds = [[device.seconds(work) for _, work in works] for device in (here, there)]
        after = sum(length * fast / slow for (length, _), slow, fast in zip(works, *seconds, strict=True))
        one = told[what]
        assert (one.kernels, one.after_s) == (len(works), pytest.approx(after * 1e-6))
        assert one.after_s != pytest.approx(one.before_s)
    assert sum(one.kernels for one in answer.retimed if one.how == "kept") == 1
    more = replay(path, dp=16)
    lengths = [[end - start for start, end in times_of(more.recording, played, "ncclDevKernel_SendRecv")]
               for played in (more.played, play(more.recording.graph))]  # fmt: skip
    assert lengths[0] == lengths[1] == [15.0]
