"""Passes of a run without a GPU, added up by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hand_made import HandMade
from playing import recording_of

from mist_megatron.errors import InputError
from mist_megatron.recorded.engine import play
from mist_megatron.recorded.passes import _kinds, _on_host, _refuse_mixed, _taken, _waits, _Work, passes_of
from mist_megatron.recorded.repeats import sends_of, windows_of
from mist_megatron.recorded.what_if import Covered, parse_scale

BACK = "autograd::engine::evaluate_function: MulBackward0"


def made() -> HandMade:
    """A step of 100 us: forward 20 and 10, a pause of 10 between, 20 of waiting for others, backward 20."""
    trace = HandMade()
    trace.step(1, 0, 100)
    trace.operator("aten::linear", 5, 20)
    trace.operator("aten::mm", 8, 4)
    trace.operator("aten::gelu", 35, 10)
    trace.event("user_annotation", "gloo:recv", (100, 1), 45, 20)
    trace.operator(BACK, 65, 20)
    return trace


def work(*scales: str):
    part = recording_of(made()).parts[0]
    (step,) = windows_of(part.trace)
    return _on_host(part, step, sends_of(part), [parse_scale(scale) for scale in scales])


def test_what_nothing_encloses_is_work_and_waiting_is_none() -> None:
    told = work()
    assert told.start_ns.tolist() == [5e3, 35e3, 65e3]
    assert told.end_ns.tolist() == [25e3, 45e3, 85e3]
    assert not told.longer_ns.any()


def test_a_pause_counts_but_for_what_others_were_waited_for() -> None:
    """Each from when all before it had ended: 20, 10 + 10 and 20 + 20, of which 20 were waiting."""
    assert _taken(work(), None).tolist() == [20e3, 20e3, 40e3]
    waits = Covered(np.array([45e3]), np.array([65e3]))
    assert _taken(work(), waits).tolist() == [20e3, 20e3, 20e3]


@pytest.mark.parametrize(("scale", "longer"), [("op=aten::mm:3", [8e3, 0, 0]), ("op=gelu:0.5", [0, -5e3, 0])])
def test_a_scaled_operator_lengthens_what_it_lies_in(scale: str, longer: list[float]) -> None:
    """Three times 4 us are 8 us more of the product's layer; half of 10 are 5 less."""
    assert work(scale).longer_ns.tolist() == longer


def test_a_scale_that_meets_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="no operator of that name"):
        work("op=conv:2")


def test_passes_are_told_apart_by_when_they_were_begun() -> None:
    """Before and between backward runs is forward, behind the last one the step's tail."""
    host = np.array([0, 10, 19, 20, 30, 39, 40])
    assert _kinds(host, [(10, 20), (30, 40)]).tolist() == [0, 1, 1, 0, 1, 1, 2]


def test_a_step_that_was_not_recorded_is_refused() -> None:
    recording = recording_of(made())
    with pytest.raises(InputError, match="no step 7"):
        passes_of(recording, play(recording.graph), 0, 7, by_layer=False)


@pytest.mark.parametrize(("begun", "refused"), [(9e3, False), (8.9e3, True), (5e3, True)])
def test_passes_at_the_same_time_are_no_schedule_of_one_after_the_other(begun: float, refused: bool) -> None:
    """Forward runs for 10 us; a tenth of it may lie beside a backward pass."""
    part = recording_of(made()).parts[0]
    start, zero = np.array([0.0, begun]), np.zeros(2, np.int64)
    both = _Work(start, np.array([10e3, 30e3]), zero, zero, np.zeros(2))
    kinds = np.array([0, 1])
    if refused:
        with pytest.raises(InputError, match="at the same time"):
            _refuse_mixed(part, both, kinds)
    else:
        _refuse_mixed(part, both, kinds)
    _refuse_mixed(part, both, np.array([0, 0]))  # nothing goes back: nothing is beside it


def test_a_host_waits_where_it_receives() -> None:
    recording = recording_of(made())
    sent = sends_of(recording.parts[0])
    played = play(recording.graph)
    waits = _waits(recording, played, 0, sent)
    assert waits is not None
    assert waits.until(np.array([45e3, 55e3, 90e3])).tolist() == [0.0, 10e3, 20e3]
    alone = HandMade()
    alone.step(1, 0, 50)
    alone.operator("aten::linear", 5, 20)
    still = recording_of(alone)
    assert _waits(still, play(still.graph), 0, sends_of(still.parts[0])) is None
