"""Hand-overs between threads: a forward thread stands still while the backward thread works, and the other
way round.

Nothing says so but the gap itself: one thread has no operator and no call between two moments, and what the
other did in between began after the first and ended before the second. Which threads belong together is told
by `fwdbwd` arrows, else by autograd's names.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from mist_megatron.traces.columns import Kind, Mask, Trace, Whole, distinct
from mist_megatron.traces.nesting import Links

SHORTEST_GAP_NS = 20_000
_BACKWARD = re.compile(r"^autograd::engine|Backward\d*$")
_WORK_OF_NAMED = "DataLoader"


@dataclass(frozen=True, slots=True)
class HandOver:
    """From a moment of one thread to a moment of another."""

    from_place: int
    from_ns: int
    to_place: int
    to_ns: int


@dataclass(frozen=True)
class Busy:
    """Outermost operators and calls of a thread."""

    start_ns: Whole
    end_ns: Whole


def hand_overs(trace: Trace, links: Links, counts: Counter[str]) -> list[HandOver]:
    """Of all pairs of threads of one rank."""
    outermost = outermost_work(trace, links)
    hand_overs_found: list[HandOver] = []
    for back, forward, said in _pairs(trace):
        between = _between(busy_on(trace, outermost, forward), busy_on(trace, outermost, back), forward, back)
        counts[f"hand-overs between threads, by {said} and gaps"] += len(between)
        hand_overs_found += between
    return hand_overs_found


def _between(forward: Busy, back: Busy, forward_place: int, back_place: int) -> list[HandOver]:
    between: list[HandOver] = []
    reached = np.maximum.accumulate(forward.end_ns)
    gaps = np.flatnonzero(forward.start_ns[1:] - reached[:-1] > SHORTEST_GAP_NS)
    ends = np.maximum.accumulate(back.end_ns)
    for gap in gaps.tolist():
        left, returned = int(reached[gap]), int(forward.start_ns[gap + 1])
        first = int(np.searchsorted(back.start_ns, left, "left"))
        last = int(np.searchsorted(back.start_ns, returned, "left")) - 1
        if last < first or ends[last] > returned:
            continue
        if first == 0 or ends[first - 1] <= left:
            between.append(HandOver(forward_place, left, back_place, int(back.start_ns[first])))
        between.append(HandOver(back_place, int(ends[last]), forward_place, returned))
    return between


def _pairs(trace: Trace) -> list[tuple[int, int, str]]:
    """Backward thread, forward thread, how they were found."""
    begins = {flow.number: flow.place for flow in trace.flows if flow.starts}
    arrows = Counter(
        (flow.place, begins[flow.number])
        for flow in trace.flows
        if not flow.starts and flow.number in begins and begins[flow.number] != flow.place
    )
    pairs: dict[int, tuple[int, str]] = {}
    for (back, forward), _ in arrows.most_common():
        pairs.setdefault(back, (forward, "fwdbwd"))
    operators = trace.kind == Kind.OPERATOR
    backward = operators & trace.names_that(_BACKWARD.search)
    for place in distinct(trace.place[backward]).tolist():
        if place in pairs:
            continue
        process = trace.places[place][0]
        others = [
            (int((operators & ~backward & (trace.place == other)).sum()), other)
            for other in distinct(trace.place[operators]).tolist()
            if other != place and trace.places[other][0] == process
            if not (backward & (trace.place == other)).any()
        ]
        if others:
            pairs[place] = (max(others)[1], "names")
    return [(back, forward, said) for back, (forward, said) in pairs.items()]


def outermost_work(trace: Trace, links: Links) -> Mask:
    """Operators and calls that no other encloses; annotations only name what lies inside them."""
    works = trace.names_that(lambda name: _WORK_OF_NAMED in name)
    named_step = (trace.kind == Kind.OPERATOR) & trace.names_that(lambda name: "#" in name)
    wraps = ((trace.kind == Kind.ANNOTATION) | named_step) & ~works
    above = links.parent.copy()
    for _ in range(64):
        named = (above >= 0) & wraps[np.maximum(above, 0)]
        if not named.any():
            break
        above[named] = links.parent[above[named]]
    return np.asarray((trace.kind <= Kind.CALL) & ~wraps & (above < 0))


def busy_on(trace: Trace, outermost: Mask, place: int) -> Busy:
    """What such work one thread does."""
    mine = np.flatnonzero(outermost & (trace.place == place))
    return Busy(trace.start_ns[mine], trace.end_ns[mine])
