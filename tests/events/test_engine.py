"""The event engine against timelines worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import ALONE, bare_program, run_bare

from mist_megatron.events.engine import Deadlock, Program, Stream, critical_path, run_program
from mist_megatron.spec.passes import Pass, PassCosts, PassKind


def table(**slowdown: float) -> np.ndarray:
    """Slowdown of every stream that runs beside another one."""
    factors = np.ones((16, 4))
    for row in range(16):
        if bin(row).count("1") > 1:
            factors[row] = [slowdown.get(k, 1.0) for k in ("compute", "g2g", "h2d", "d2h")]
    return factors


def test_two_streams_slow_each_other_piecewise():
    """6 s of compute at half speed beside a 2 s copy that runs alone-fast: 2 s pass, 1 s of compute
    is done, and the other 5 s follow at full speed: 7 s."""
    program = Program(1)
    program.add("compute", 0, Stream.COMPUTE, 6.0)
    program.add("copy", 0, Stream.HOST_TO_DEVICE, 2.0)
    timeline = run_program(program, table(compute=2.0))
    assert timeline.end_s.tolist() == pytest.approx([7.0, 2.0])


def test_late_start_counts_only_the_overlap():
    """Compute of 4 s; a copy of 3 s starts after a 1 s event elsewhere. Both slow down by 1.5 while
    together: 1 s alone, 3 s of compute left = 4.5 s together, in which the copy does its 3 s."""
    program = Program(2)
    program.add("compute", 0, Stream.COMPUTE, 4.0)
    gate = program.add("gate", 1, Stream.COMPUTE, 1.0)
    program.add("copy", 0, Stream.DEVICE_TO_HOST, 3.0, [gate])
    timeline = run_program(program, table(compute=1.5, d2h=1.5))
    assert timeline.end_s.tolist() == pytest.approx([5.5, 1.0, 5.5])


@pytest.mark.parametrize(
    ("places", "ends"),
    [(set(), [5.0, 4.0]), ({0, 1}, [5.0, 4.0]), ({0}, [3.0, 2.0]), ({1}, [3.0, 2.0])],
)
def test_a_send_and_a_collective_share_a_link_of_one_kind(places: set[int], ends: list[float]) -> None:
    """3 s of collective beside 2 s of send: over one link 4 s at half speed each, then 1 s alone."""
    program = Program(1)
    program.add("collective", 0, Stream.GPU_TO_GPU, 3.0)
    program.add("send", 0, Stream.SEND, 2.0)
    program.between_nodes.update(places)
    assert run_program(program, ALONE).end_s.tolist() == pytest.approx(ends)


def test_a_stream_is_a_queue_in_ready_order():
    program = Program(1)
    slow = program.add("slow", 0, Stream.COMPUTE, 2.0)
    program.add("after slow", 0, Stream.GPU_TO_GPU, 1.0, [slow])
    program.add("at once", 0, Stream.GPU_TO_GPU, 5.0)
    timeline = run_program(program, ALONE)
    assert timeline.start_s.tolist() == pytest.approx([0.0, 5.0, 0.0])
    assert critical_path(timeline) == (2, 1)


def test_hand_made_pipeline():
    """1F1B, 2 ranks, 2 micro-batches, forward 1, backward 2: rank 0 idles from 2 to 4, ends at 9."""
    timeline = run_bare("1f1b", 2, 2)
    started = dict(
        zip(
            zip(timeline.program.device, timeline.program.name, strict=True),
            timeline.start_s,
            strict=True,
        )
    )
    assert {k: float(v) for k, v in started.items()} == {
        (0, "F0"): 0, (0, "F1"): 1, (0, "B0"): 4, (0, "B1"): 7,
        (1, "F0"): 1, (1, "B0"): 2, (1, "F1"): 4, (1, "B1"): 5,
    }  # fmt: skip
    assert timeline.makespan_s == 9


def test_deadlock_is_named():
    wrong = (Pass(PassKind.BACKWARD, 0), Pass(PassKind.FORWARD, 0))
    with pytest.raises(Deadlock, match="B0"):
        run_program(bare_program((wrong,), PassCosts()), ALONE)


@st.composite
def programs(draw):
    program = Program(draw(st.integers(1, 3)))
    for number in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=3, unique=True)) if number else []
        program.add(
            str(number),
            draw(st.integers(0, program.devices - 1)),
            draw(st.sampled_from(Stream)),
            draw(st.floats(0, 10)),
            after,
        )
        if draw(st.booleans()):
            program.between_nodes.add(number)
    return program


@settings(max_examples=200, deadline=None)
@given(programs(), st.lists(st.floats(1, 4), min_size=4, max_size=4))
def test_conservation(program, slow):
    """Dependencies hold, a stream runs one event at a time, and each event gets exactly its work."""
    factors = table(compute=slow[0], g2g=slow[1], h2d=slow[2], d2h=slow[3])
    timeline = run_program(program, factors)
    edges = np.unique(np.concatenate([timeline.start_s, timeline.end_s]))
    done = np.zeros(len(program.name))
    for begin, end in pairwise(edges):
        for device in range(program.devices):
            running = [
                k
                for k in range(len(program.name))
                if program.device[k] == device and timeline.start_s[k] <= begin and timeline.end_s[k] >= end
            ]
            streams = [program.stream[k] for k in running]
            assert len(set(streams)) == len(streams)
            # Sends slow others down, and are slowed down, as GPU-GPU traffic is.
            kinds = [Stream.GPU_TO_GPU if s == Stream.SEND else s for s in streams]
            row = sum(1 << s for s in set(kinds) if s != Stream.HOST)
            for k, kind in zip(running, kinds, strict=True):
                slow = 1.0 if kind == Stream.HOST else factors[row, kind]
                # Two transfers over the same kind of link halve it between them.
                alike = [j for j, s in zip(running, kinds, strict=True) if s == Stream.GPU_TO_GPU]
                places = {j in program.between_nodes for j in alike}
                slow *= 2.0 if k in alike and len(alike) == 2 and len(places) == 1 else 1.0
                done[k] += (end - begin) / slow
    assert done == pytest.approx(np.array(program.work_s), abs=1e-6)
    for event, after in enumerate(program.after):
        assert all(timeline.end_s[k] <= timeline.start_s[event] + 1e-9 for k in after)


def test_a_yielding_event_stands_still_for_an_urgent_one() -> None:
    """A reduction of 10 s, for 3 s of which a collective takes its stream, and another one for 2 s."""
    program = Program(1)
    reduction = program.add("reduction", 0, Stream.GPU_TO_GPU, 10.0)
    program.yielding.add(reduction)
    for lasts_s in (3.0, 2.0):
        before = program.add("compute", 0, Stream.HOST, 4.0)
        program.urgent.add(program.add("collective", 0, Stream.GPU_TO_GPU, lasts_s, [before]))
    timeline = run_program(program, np.ones((16, 4)))
    assert timeline.start_s[reduction] == 0.0
    assert timeline.end_s.tolist() == [15.0, 4.0, 7.0, 8.0, 10.0]
