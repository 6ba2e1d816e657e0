"""Traces that nobody here made: replays, collectives of all ranks, one step's kernels in another's graph, and
a what-if whose answer was recorded."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from mist_megatron.ask.replay import read_traces, replay
from mist_megatron.recorded.engine import Change, Played, play
from mist_megatron.recorded.graph import Role
from mist_megatron.recorded.recording import Recording, record
from mist_megatron.recorded.steps import steps_of
from mist_megatron.recorded.usage import step_lengths


@pytest.fixture(scope="module")
def traces(measured_dir: Path) -> Path:
    folder = measured_dir / "traces"
    if not folder.is_dir():
        pytest.skip("no real traces below the measured data")
    return folder


def test_eight_ranks_of_dlrm(traces: Path) -> None:
    """Eight collectives on every rank: transfers of 7 to 90 us, starts up to 7,624 us apart, rank 7 the
    last."""
    answer = replay(traces / "dlrm_v100_8ranks")
    met = answer.recording.meetings
    assert [len(meeting.members) for meeting in met] == [8] * 8
    apart = [meeting.last_start_ns - min(one.start_ns for one in meeting.members) for meeting in met]
    assert max(apart) == pytest.approx(7_624_000, abs=5_000)
    assert all(7_000 <= meeting.transfer_ns <= 90_000 for meeting in met)
    told = answer.to_dict()["meetings"]
    assert told["collectives"] == 8
    assert told["ends_apart_s"] <= 8e-6
    assert told["starts_apart_s"] == pytest.approx(7_624e-6, rel=0.01)
    assert told["last_rank"] == 7
    waits = answer.recorded.communicators[0]
    assert waits.waited_for[0][0] == 7
    assert waits.waited_s > 50 * waits.transfer_s
    recording = answer.recording
    nodes = recording.graph.nodes
    for rank in range(8):
        mine = (nodes.rank == rank) & (nodes.role != Role.MEET)
        span = nodes.end_ns[mine].max() - nodes.start_ns[mine].min()
        assert answer.recorded.span_s[rank] * 1e9 == pytest.approx(span, rel=0.01)
    for one in answer.recorded.ranks:
        assert one.usage.makespan_s == pytest.approx(one.window_s, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3_train_h800_rank0of64.json.gz",
        "critical_path_cuda_event_sync_multi_stream_event_sync_trace.json.gz",
    ],
)
@pytest.mark.parametrize("waits", ["known", "inferred"])
def test_no_guess_makes_a_trace_longer(traces: Path, name: str, waits: str) -> None:
    """What edges alone explain, without the delays that are kept, is no longer than the recording and at most
    3 % shorter."""
    read, _ = read_traces(traces / name)
    graph = record(read, None, waits).graph
    nothing = np.zeros(len(graph.nodes))
    played = play(graph, Change(rest_ns=nothing, end_rest_ns=nothing))
    span = float(graph.nodes.end_ns.max() - graph.nodes.start_ns.min())
    assert 0.97 * span <= float(played.end_ns.max() - played.start_ns.min()) <= 1.001 * span


def test_loading_without_the_loader(traces: Path) -> None:
    """ResNet-50 that loads its images itself, asked for its step without loading; recorded with four loaders
    too."""
    found = [
        replay(traces / f"kineto2021_v100_resnet50_workers{workers}_6steps.json.gz", scale=scale)
        for workers, scale in ((0, "op=DataLoader:0"), (4, None))
    ]
    slow, fast = found
    assert slow.changed is not None
    assert slow.recorded.median_step_s == pytest.approx(0.1765, rel=0.01)
    assert slow.changed.median_step_s == pytest.approx(fast.recorded.median_step_s, rel=0.1)


def crossed(recording: Recording, other: Recording) -> Played | None:
    """One step's graph with the kernel times of another, where both have the same number of kernels."""
    graph, there = recording.graph, other.graph
    mine, theirs = (
        np.flatnonzero(
            (one.graph.nodes.role == Role.GPU) & ~np.isin(one.graph.nodes.event, one.parts[0].backlog)
        )
        for one in (recording, other)
    )
    if len(mine) != len(theirs):
        return None
    mine, theirs = (
        gpu[np.lexsort((one.nodes.start_ns[gpu], one.nodes.place[gpu]))]
        for one, gpu in ((graph, mine), (there, theirs))
    )
    own = graph.nodes.own_ns.copy()
    own[mine] = there.nodes.own_ns[theirs]
    return play(graph, Change(own_ns=own))


def test_one_steps_graph_with_the_next_ones_kernels(traces: Path) -> None:
    """Median over traces of the median over steps: within 5 %."""
    errors = []
    for name in (
        "hta_a100_rank0of16_5streams_cudagraph", "hta_v100_ddp_rank1of2_5steps_2020nccl",
        "kineto2021_v100_resnet50_workers0_6steps", "kineto2021_v100_resnet50_workers4_6steps",
        "hta_v100_dlrm_rank1of2_6steps_shapes", "trace_filter_sampled_rank-0",
    ):  # fmt: skip
        (trace,), _ = read_traces(traces / f"{name}.json.gz")
        steps = [record([trace], step.number) for step in steps_of(trace)]
        found = []
        for one, after in itertools.pairwise(steps):
            played = crossed(one, after)
            if played is not None:
                nodes = after.graph.nodes
                truth = float(nodes.end_ns.max() - nodes.start_ns.min())
                found.append(abs(float(played.end_ns.max() - played.start_ns.min()) / truth - 1.0))
        errors.append(median(found))
    assert median(errors) < 0.05


def test_a_replayed_timeline_replays(traces: Path, tmp_path: Path) -> None:
    path = traces / "kineto2021_v100_resnet50_workers0_6steps.json.gz"
    first = replay(path, scale="op=DataLoader:0", trace=tmp_path / "replayed.json.gz")
    again = replay(tmp_path / "replayed.json.gz")
    assert again.recorded.median_step_s == pytest.approx(first.step_s, rel=0.03)
    assert step_lengths(again.recording, again.played)[0][3][1] == pytest.approx(
        step_lengths(first.recording, first.played)[0][3][1], rel=1e-3
    )


def products_s(traces: Path, name: str, gpu: str) -> tuple[float, float]:
    """What products took, and what they would take there."""
    told = [one for one in replay(traces / name, gpu=gpu).retimed if one.what.startswith("products")]
    return sum(one.before_s for one in told), sum(one.after_s for one in told)


@pytest.mark.parametrize(
    ("model", "of_h100", "of_mi300x"),
    [
        ("gaunernst_bert-small-uncased__1016001", 0.38, 0.17),
        ("facebook_timesformer-base-finetuned-k400__1016002", 0.05, 0.15),
    ],
)
def test_products_on_another_vendors_gpu(traces: Path, model: str, of_h100: float, of_mi300x: float) -> None:
    """Recorded on H100 and on MI300X: one from the other. Of the larger owlv2 it is -2 and -11 %.

    bert-small computes 141 tokens: 26 products of 6 us, by kernels of the generation before, which fitted
    curves of training's products tell 37 % too fast."""
    h100_s, mi300x_said_s = products_s(traces, f"tracelens_h100_{model}.json.gz", "mi300x-192gb")
    mi300x_s, h100_said_s = products_s(traces, f"tracelens_mi300_{model}.json.gz", "h100-sxm-80gb")
    assert h100_said_s == pytest.approx(h100_s, rel=of_h100)
    assert mi300x_said_s == pytest.approx(mi300x_s, rel=of_mi300x)
