"""What forward and backward passes of a recorded step take, from the first thing that they run to the last,
waiting for other stages left out.

The moment until something has ended belongs to the pass that launched it, with the pause before it: what the
host was late with in the recording it is late with again. Of pauses in which data of another stage were on
their way only the rest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.recorded.build import Parts
from mist_megatron.recorded.engine import Played
from mist_megatron.recorded.graph import Floats, Ints, Role
from mist_megatron.recorded.recording import Recording
from mist_megatron.recorded.repeats import backward_runs, layer_repeats, outermost, sends_of, windows_of
from mist_megatron.recorded.steps import Step
from mist_megatron.recorded.what_if import Covered, Scale
from mist_megatron.traces.columns import NS_PER_S, Kind, Mask

FORWARD, BACKWARD, TAIL = 0, 1, 2
_STOPS = ("gloo:recv", "gloo:barrier", "c10d::barrier")
"""Where a host without a GPU stands still until others come."""
MOST_MIXED = 0.1
"""Of a step's forward work that may run while backward does: more is no schedule of one pass after the
other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePasses:
    """One stage of the recording; seconds of one micro-batch, and of the step's end."""

    micro_batches: int
    layers: int
    """0 where nobody asked."""
    forward_s: float
    backward_s: float
    before_s: tuple[float, float]
    """Of these, outside of layers: before them, forward and back (where the embedding is) ..."""
    behind_s: tuple[float, float]
    """... and behind them (where the head is)."""
    tail_s: float
    """What follows the last backward pass: reductions and the optimizer."""
    sends: int


@dataclass(frozen=True, slots=True)
class _Work:
    """What a rank ran, in order of its begin, and from where."""

    start_ns: Floats
    end_ns: Floats
    host_ns: Ints
    """Moment of the launch ..."""
    place: Ints
    """... and its thread."""
    longer_ns: Floats
    """What is added to it."""


def passes_of(
    recording: Recording, played: Played, rank: int, number: int | None, *, by_layer: bool,
    scales: Sequence[Scale] = (),
) -> StagePasses:  # fmt: skip
    """Of one rank's step."""
    part = recording.parts[rank]
    step = next((one for one in windows_of(part.trace) if number in (None, one.number)), None)
    if step is None:
        raise InputError(f"{part.trace.where}: no step {number}")
    sent = sends_of(part)
    work = _on_gpu(recording, played, rank, step, sent)
    if not len(work.start_ns):
        work = _on_host(part, step, sent, scales)
    runs = backward_runs(part, step)
    if not runs or not len(work.start_ns):
        raise InputError(
            f"{part.trace.where}: no backward pass in the step; wanted training, recorded with operators"
        )
    kind = _kinds(work.host_ns, runs)
    seconds = _taken(work, _waits(recording, played, rank, sent)) / NS_PER_S
    _refuse_mixed(part, work, kind)
    count = len(runs)
    sums = [float(seconds[kind == one].sum()) for one in (FORWARD, BACKWARD, TAIL)]
    layers, before, behind = 0, (0.0, 0.0), (0.0, 0.0)
    if by_layer:
        repeats, layers = layer_repeats(part, step)
        spans = [(repeat.place, *run) for repeat in repeats for run in repeat.runs]
        side = _sides(work, spans)
        first, last = (
            [float(seconds[(kind == one) & (side == at)].sum()) / count for one in (FORWARD, BACKWARD)]
            for at in (-1, 1)
        )
        # Backward meets the head first, and the embedding last.
        before, behind = (first[0], last[1]), (last[0], first[1])
    return StagePasses(
        micro_batches=count, layers=layers, forward_s=sums[0] / count, backward_s=sums[1] / count,
        before_s=before, behind_s=behind, tail_s=sums[2], sends=_calls(part, step, sent),
    )  # fmt: skip


def _calls(part: Parts, step: Step, sent: Mask) -> int:
    """Transfers that a step asks for."""
    events = np.flatnonzero(sent)
    launch = part.links.launch[events]
    asked = part.trace.start_ns[np.where(launch >= 0, launch, events)]
    return int(((asked >= step.start_ns) & (asked < step.end_ns)).sum())


def _on_gpu(recording: Recording, played: Played, rank: int, step: Step, sent: Mask) -> _Work:
    nodes, part = recording.graph.nodes, recording.parts[rank]
    trace, launch = part.trace, part.links.launch
    mine = np.flatnonzero((nodes.role == Role.GPU) & (nodes.rank == rank))
    events = nodes.event[mine]
    host = np.where(
        launch[events] >= 0, trace.start_ns[np.maximum(launch[events], 0)], trace.start_ns[events]
    )
    kept = ~sent[events] & (host >= step.start_ns) & (host < step.end_ns)
    mine, events, host = mine[kept], events[kept], host[kept]
    order = np.argsort(played.start_ns[mine], kind="stable")
    mine, place = mine[order], trace.place[np.maximum(launch[events[order]], 0)].astype(np.int64)
    return _Work(played.start_ns[mine], played.end_ns[mine], host[order], place, np.zeros(len(mine)))


def _on_host(part: Parts, step: Step, sent: Mask, scales: Sequence[Scale]) -> _Work:
    """Without a GPU: what threads do that nothing encloses, longer or shorter as is asked."""
    trace = part.trace
    events = outermost(trace, part.links.parent)
    stops = trace.names_that(_STOPS.__contains__)
    events = events[~sent[events] & ~stops[events] & (trace.start_ns[events] >= step.start_ns)]
    events = events[trace.start_ns[events] < step.end_ns]
    start, end = trace.start_ns[events].astype(np.float64), trace.end_ns[events].astype(np.float64)
    longer = np.zeros(len(events))
    for scale in scales:
        named = np.flatnonzero(trace.names_that(scale.pattern.search) & (trace.kind <= Kind.ANNOTATION))
        if not len(named):
            raise InputError(f"--scale {scale.text}: no operator of that name")
        inside = Covered(trace.start_ns[named].astype(np.float64), trace.end_ns[named].astype(np.float64))
        before, reached = _spans(start, end)
        longer += (scale.factor - 1.0) * (inside.until(reached) - inside.until(before))
    return _Work(start, end, trace.start_ns[events], trace.place[events].astype(np.int64), longer)


def _kinds(host: Ints, runs: Sequence[tuple[int, int]]) -> Ints:
    begins, ends = (np.array([run[at] for run in runs]) for at in (0, 1))
    at = np.searchsorted(begins, host, "right") - 1
    inside = (at >= 0) & (host < ends[np.maximum(at, 0)])
    return np.asarray(np.where(inside, BACKWARD, np.where(host >= ends[-1], TAIL, FORWARD)))


def _waits(recording: Recording, played: Played, rank: int, sent: Mask) -> Covered | None:
    """When data were on their way between stages."""
    nodes, trace = recording.graph.nodes, recording.parts[rank].trace
    mine = np.flatnonzero((nodes.role == Role.GPU) & (nodes.rank == rank))
    mine = mine[sent[nodes.event[mine]]]
    if len(mine):
        return Covered(played.start_ns[mine], played.end_ns[mine])
    received = np.flatnonzero(trace.names_that(_STOPS.__contains__))
    if not len(received):
        return None
    return Covered(trace.start_ns[received].astype(np.float64), trace.end_ns[received].astype(np.float64))


def _taken(work: _Work, waits: Covered | None) -> Floats:
    """Until when each has ended, from when all before it had."""
    before, reached = _spans(work.start_ns, work.end_ns)
    taken = reached - before
    if waits is not None:
        pause = np.maximum(work.start_ns, before)
        taken -= np.clip(waits.until(pause) - waits.until(before), 0.0, taken)
    return np.asarray(taken + work.longer_ns)


def _spans(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    reached = np.maximum.accumulate(end)
    return np.concatenate([start[:1], reached[:-1]]), reached


def _sides(work: _Work, spans: Sequence[tuple[int, int, int]]) -> Ints:
    """0 in a layer, -1 before the layers of its pass, 1 behind them: the nearest layers are its pass's."""
    begins = np.array(sorted(span[1] for span in spans))
    ends = np.array(sorted(span[2] for span in spans))
    side = np.zeros(len(work.host_ns), np.int64)
    for index, at in enumerate(work.host_ns.tolist()):
        after = int(np.searchsorted(ends, at, "right"))
        if after < len(begins) and begins[after] <= at:
            continue
        behind = at - ends[after - 1] if after > 0 else np.inf
        ahead = begins[after] - at if after < len(begins) else np.inf
        side[index] = -1 if ahead < behind else 1
    return side


def _refuse_mixed(part: Parts, work: _Work, kind: Ints) -> None:
    """Forward and backward passes at the same time, as DualPipe runs them, have no 1F1B to be rebuilt."""
    forward, backward = (np.flatnonzero(kind == one) for one in (FORWARD, BACKWARD))
    if not len(forward) or not len(backward):
        return
    runs = Covered(work.start_ns[backward], work.end_ns[backward])
    low, high = work.start_ns[forward], work.end_ns[forward]
    mixed = float((runs.until(high) - runs.until(low)).sum())
    if mixed > MOST_MIXED * float((high - low).sum()):
        raise InputError(
            f"{part.trace.where}: forward and backward passes run at the same time (DualPipe?); "
            "wanted passes one after the other, as in 1F1B"
        )
