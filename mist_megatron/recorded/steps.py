"""Steps of a trace, by the profiler's own marks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mist_megatron.traces.columns import Kind, Trace

OVERLAP_NS = 10_000
"""Marks may overlap by what they are rounded to."""
_STEP = re.compile(r"^ProfilerStep#(\d+)$")


@dataclass(frozen=True, slots=True)
class Step:
    """One `ProfilerStep` of one rank."""

    number: int
    place: int
    """Thread that calls the profiler's `step`."""
    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


def steps_of(trace: Trace) -> tuple[Step, ...]:
    """In order of time; empty where the trace was recorded without a schedule."""
    marked = trace.names_that(_STEP.match) & (trace.kind <= Kind.ANNOTATION)
    steps: dict[int, Step] = {}
    for event in np.flatnonzero(marked).tolist():
        named = _STEP.match(trace.name_of(event))
        assert named is not None
        number = int(named.group(1))
        step = Step(number, int(trace.place[event]), int(trace.start_ns[event]), int(trace.end_ns[event]))
        steps.setdefault(number, step)
    return tuple(sorted(steps.values(), key=lambda step: step.start_ns))


def odd_words(trace: Trace) -> list[str]:
    """What a trace says twice, and what is made of it."""
    told = []
    calls = trace.correlation[(trace.kind == Kind.CALL) & (trace.correlation > 0)]
    numbers, times = np.unique(calls, return_counts=True)
    shared = int(np.isin(trace.correlation[trace.on_gpu], numbers[times > 1]).sum())
    if shared:
        told.append(
            f"{trace.where}: {shared:,} kernels carry a correlation that several calls have: the last call "
            "before each is taken for its launch"
        )
    marked = np.flatnonzero(trace.names_that(_STEP.match) & (trace.kind <= Kind.ANNOTATION))
    begins = {(trace.name_of(event), int(trace.start_ns[event])) for event in marked.tolist()}
    name, often = Counter(name for name, _ in begins).most_common(1)[0] if begins else ("", 0)
    if often > 1:
        told.append(f"{trace.where}: {name} is marked {often} times (recordings mixed?): the first is told")
    steps = steps_of(trace)
    for before, after in pairwise(steps):
        if after.start_ns < before.end_ns - OVERLAP_NS:
            told.append(
                f"{trace.where}: step {after.number} begins before step {before.number} ends (recordings "
                "mixed?): their times hold each other's work"
            )
            break
    return told
