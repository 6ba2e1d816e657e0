"""Figures that a replay tells and evidence that it takes, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hand_made import HandMade, two_streams
from playing import recording_of, trace_of

from mist_megatron.recorded.report import retimed_document
from mist_megatron.recorded.what_if import Retimed
from mist_megatron.traces.nesting import gloo_calls


def test_shares_are_of_all_work_of_the_gpu() -> None:
    """Stream 7 computes 100 and 30 us, stream 20 moves 50: 60 us of kernels are a third."""
    recording = recording_of(two_streams())
    told = retimed_document(
        [Retimed("scaled", "gemm", 1, 60e-6, 30e-6), Retimed("host time scaled", "all", 0, 60e-6, 1e-6)],
        recording,
    )
    assert [one["share_of_gpu_work"] for one in told] == [pytest.approx(1 / 3), 0.0]


def test_an_arrow_begins_where_it_says() -> None:
    made = two_streams()
    for letter, thread, at in (("s", 1, 5), ("f", 2, 9)):
        made.events.append(
            {"ph": letter, "cat": "fwdbwd", "name": "fwdbwd", "id": 4, "pid": 100, "tid": thread, "ts": at}
        )
    flows = trace_of(made).flows
    assert [(flow.number, flow.starts) for flow in flows] == [(4, True), (4, False)]
    assert flows[1].at_ns - flows[0].at_ns == 4000


@pytest.mark.parametrize(("second_call", "found"), [(12, 2), (30, 0)])
def test_collectives_run_after_they_were_asked_for(second_call: float, found: int) -> None:
    """Two of one kind: where one ran before anything had asked for it, others asked, and nothing is told."""
    made = HandMade()
    for at in (5.0, second_call):
        made.operator("c10d::allreduce_", at, 1)
    for at in (10.0, 20.0):
        made.event("user_annotation", "gloo:all_reduce", (100, 9), at, 5)
    ran, calls = gloo_calls(trace_of(made))
    assert len(ran) == len(calls) == found
    trace = trace_of(made)
    assert np.all(trace.start_ns[ran] > trace.start_ns[calls])
