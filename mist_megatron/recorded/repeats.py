"""What repeats in a recorded step: layers, by the kernels that follow each other again and again;
micro-batches, by how often forward and backward take turns.

A question about more of them stretches what repeats: its host time and its kernels take so many times as
long, and all that waits for it waits longer. First and last layers that differ from the rest stay as they
are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.recorded.build import Parts
from mist_megatron.recorded.graph import Floats, Ints
from mist_megatron.recorded.steps import Step, steps_of
from mist_megatron.traces.collectives import POINT_TO_POINT, communicates, message_of
from mist_megatron.traces.columns import Kind, Mask, Trace, Whole, distinct

LONGEST_PERIOD = 4_000
"""Kernels of one layer; no layer has more."""
LEAST_COVERED = 0.5
"""Of a thread's work in a step that must repeat for it to be layers."""
LEAST_PASS = 0.1
"""Of a micro-batch's work."""
NEARLY = 0.8
"""A short period that covers so much of what the best one does is the layer; longer ones are several of
them."""
_EXCHANGE = re.compile(r"all_?to_?all", re.IGNORECASE)
_SENDS = ("gloo:send", "gloo:recv")
BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
_STEP = re.compile(r"^Optimizer\.|^ProfilerStep|zero_grad")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a thread's time that takes longer or shorter."""

    place: int
    start_ns: int
    end_ns: int
    factor: float


@dataclass(frozen=True, slots=True)
class Repeat:
    """Runs of equal periods on one thread, in one step."""

    place: int
    count: int
    """Periods of each run."""
    runs: tuple[tuple[int, int], ...]
    """Begin and end in host time."""


def more_layers(part: Parts, layers: int) -> tuple[list[Stretch], int]:
    """What to stretch for so many layers, and how many were found."""
    of_window = [layer_repeats(part, step) for step in windows_of(part.trace)]
    counts = {count for _, count in of_window}
    if len(counts) > 1:
        raise _unclear(part, counts)
    stretches = [
        Stretch(repeat.place, begin, end, layers / count)
        for repeats, count in of_window for repeat in repeats for begin, end in repeat.runs
    ]  # fmt: skip
    return stretches, counts.pop()


def layer_repeats(part: Parts, step: Step) -> tuple[list[Repeat], int]:
    """Layers of every pass of a step, and how many a pass has."""
    repeats = [repeat for tokens in _passes(part, step) if (repeat := repeated(*tokens)) is not None]
    counts = {repeat.count for repeat in repeats}
    least = min(counts, default=0)
    if least and sends_of(part).any() and all(count % least == 0 for count in counts):
        # Passes of a pipeline follow each other with nothing but a transfer between.
        counts = {least}
    if not counts:
        raise InputError(
            f"no layers found in {part.trace.where}: nothing repeats in more than half of a pass"
        )
    if len(counts) > 1:
        raise _unclear(part, counts)
    return repeats, counts.pop()


def _unclear(part: Parts, counts: set[int]) -> InputError:
    told = ", ".join(map(str, sorted(counts)))
    return InputError(f"how many layers {part.trace.where} has is not clear: passes repeat {told} times")


def more_micro_batches(part: Parts, wanted: int) -> tuple[list[Stretch], int]:
    """What to stretch for so many micro-batches, and how many were found."""
    stretches: list[Stretch] = []
    counts: set[int] = set()
    for step in windows_of(part.trace):
        backward = backward_runs(part, step)
        count = len(backward)
        counts.add(count)
        if count < 1:
            continue
        begin = step.start_ns if count == 1 else backward[0][1]
        factor = wanted if count == 1 else (wanted - 1) / (count - 1)
        # All threads: forward stands still while backward works, and the other way round.
        stretches += [
            Stretch(place, begin, backward[-1][1], factor) for place in _host_places(part.trace)
        ]  # fmt: skip
    if counts == {0} or len(counts) > 1:
        told = "/".join(map(str, sorted(counts)))
        raise InputError(
            f"--micro-batches {wanted}: steps of {part.trace.where} have {told} "
            "backward passes; wanted as many in each"
        )
    return stretches, counts.pop()


def sends_of(part: Parts) -> Mask:
    """Events that hand data from one stage to another."""
    trace = part.trace
    sends = trace.names_that(_SENDS.__contains__)
    exchanges = trace.names_that(_EXCHANGE.search)
    for event in np.flatnonzero(communicates(trace)).tolist():
        said = message_of(trace, part.links, event)
        if said is not None:
            sends[event] = said.collective.lower() in POINT_TO_POINT
        elif "SendRecv" in trace.name_of(event):
            # Exchanges of all with all are kernels of that name, too; without a launch nothing tells.
            launch = int(part.links.launch[event])
            host = int(part.links.parent[launch]) if launch >= 0 else -1
            while host >= 0 and not exchanges[host]:
                host = int(part.links.parent[host])
            sends[event] = launch >= 0 and host < 0
    return sends


def windows_of(trace: Trace) -> Sequence[Step]:
    """Its steps, or all of it."""
    whole = Step(-1, -1, 0, int(trace.end_ns.max(initial=0)) + 1)
    return steps_of(trace) or (whole,)


def _host_places(trace: Trace) -> list[int]:
    return [int(place) for place in distinct(trace.place[trace.kind <= Kind.CALL])]


def _passes(part: Parts, step: Step) -> list[tuple[int, Ints, Floats, Whole, Whole]]:
    """Per thread and pass what it does one after the other: place, names, weights, begins and ends in host
    time.

    Passes are what lies between two moments at which backward begins or ends; what takes less than a tenth of
    a micro-batch is none, and neither is the optimizer.
    """
    trace, links = part.trace, part.links
    gpu = part.played
    gpu = gpu[(trace.kind[gpu] == Kind.KERNEL) & ~communicates(trace)[gpu]] if len(gpu) else gpu
    gpu = gpu[links.launch[gpu] >= 0]
    if len(gpu):
        host = links.launch[gpu]
        name, weight = trace.name[gpu], trace.length_ns[gpu]
    else:
        host = outermost(trace, links.parent)
        name, weight = trace.name[host], trace.length_ns[host]
    inside = (trace.start_ns[host] >= step.start_ns) & (trace.start_ns[host] < step.end_ns)
    inside &= ~_under(trace, links.parent)[host]
    whole = float(weight[inside].sum())
    borders = np.unique([moment for run in backward_runs(part, step) for moment in run])
    segment = np.searchsorted(borders, trace.start_ns[host], "right")
    passes = []
    for place, number in np.unique(np.stack([trace.place[host], segment])[:, inside], axis=1).T.tolist():
        mine = np.flatnonzero(inside & (trace.place[host] == place) & (segment == number))
        mine = mine[np.argsort(trace.start_ns[host[mine]], kind="stable")]
        if weight[mine].sum() < LEAST_PASS * whole / max(len(borders) // 2, 1):
            continue
        events = host[mine]
        passes.append(
            (place, name[mine].astype(np.int64), weight[mine].astype(np.float64), trace.start_ns[events],
             trace.end_ns[events])
        )  # fmt: skip
    return passes


def outermost(trace: Trace, parent: Whole) -> Whole:
    """Operators that only annotations enclose."""
    annotates = trace.kind == Kind.ANNOTATION
    above = parent.copy()
    while (named := (above >= 0) & annotates[np.maximum(above, 0)]).any():
        above[named] = parent[above[named]]
    return np.flatnonzero((trace.kind == Kind.OPERATOR) & (above < 0)).astype(np.int64)


def repeated(place: int, names: Ints, weights: Floats, begins: Whole, ends: Whole) -> Repeat | None:
    """The shortest period that covers most of what any period does."""
    count, whole = len(names), float(weights.sum())
    if count < 4 or whole <= 0.0:
        return None
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    best: dict[int, tuple[float, list[tuple[int, int]]]] = {}
    for period in range(1, min(count // 2, LONGEST_PERIOD) + 1):
        runs = _runs(names, period)
        if runs:
            best[period] = (sum(float(sums[high] - sums[low]) for low, high in runs) / whole, runs)
    most = max((covered for covered, _ in best.values()), default=0.0)
    if most < LEAST_COVERED:
        return None
    period = min(one for one, (covered, _) in best.items() if covered >= NEARLY * most)
    counts = {(high - low) // period for low, high in best[period][1]}
    times = max(counts)
    kept = [(low, high) for low, high in best[period][1] if (high - low) // period == times]
    spans = []
    for low, high in kept:
        last = low + times * period
        # Until the next thing begins: what lies between two layers lies behind each of them.
        until = int(begins[last]) if last < count else int(ends[high - 1])
        spans.append((int(begins[low]), until))
    return Repeat(place, times, tuple(spans))


def _runs(names: Ints, period: int) -> list[tuple[int, int]]:
    """Where at least two equal periods follow each other."""
    same = np.concatenate([[False], names[:-period] == names[period:], [False]])
    edges = np.flatnonzero(np.diff(same.astype(np.int8)))
    runs = []
    for low, high in zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True):
        if high - low >= period:
            runs.append((low, high + period))
    return runs


def backward_runs(part: Parts, step: Step) -> list[tuple[int, int]]:
    """Begin and end of every backward pass: autograd's operators between which nothing of forward lies."""
    trace, links = part.trace, part.links
    inside = (trace.start_ns >= step.start_ns) & (trace.start_ns < step.end_ns)
    named = trace.names_that(BACKWARD.search) & (trace.kind == Kind.OPERATOR)
    wraps = (trace.kind == Kind.ANNOTATION) | trace.names_that(_STEP.search)
    above = links.parent.copy()
    while (skipped := (above >= 0) & wraps[np.maximum(above, 0)]).any():
        above[skipped] = links.parent[above[skipped]]
    outermost = (above < 0) & (trace.kind == Kind.OPERATOR) & inside & ~trace.names_that(_STEP.search)
    under_step = _under(trace, links.parent)
    order = np.flatnonzero(outermost & ~under_step)
    runs: list[tuple[int, int]] = []
    open_run = False
    for event in order.tolist():
        if named[event]:
            begin, end = int(trace.start_ns[event]), int(trace.end_ns[event])
            if open_run:
                runs[-1] = (runs[-1][0], max(runs[-1][1], end))
            else:
                runs.append((begin, end))
            open_run = True
        elif trace.place[event] == step.place or step.place < 0:
            open_run = False
    return runs


def _under(trace: Trace, parent: Whole) -> np.ndarray:
    """What the optimizer does is no pass."""
    steps = trace.names_that(re.compile(r"^Optimizer\.").search)
    under = np.zeros(len(trace), np.bool_)
    above = parent.copy()
    while (above >= 0).any():
        under |= (above >= 0) & steps[np.maximum(above, 0)]
        above = np.where(above >= 0, parent[np.maximum(above, 0)], -1)
    return under
