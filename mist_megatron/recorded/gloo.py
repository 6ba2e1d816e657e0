"""Collectives of gloo, which threads of the host run beside the others: when a rank stands still for them.

Nothing says what a thread waits for but its own gap: it did nothing until one of the collectives that it had
asked for ended, and went on then. What it had asked for before is over by then, too: whoever waits for
several waits for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mist_megatron.recorded.threads import Busy, busy_on, outermost_work
from mist_megatron.traces.columns import Trace, Whole, distinct
from mist_megatron.traces.nesting import Links

LATE_NS = 1_000_000
"""A thread that waited for some of its collectives does the next thing so soon behind their end ..."""
LATE_FOR_ALL_NS = 10_000_000
"""... and one that waited for all of them, which says more."""
SHORTEST_GAP_NS = 20_000


@dataclass(frozen=True, slots=True)
class Stand:
    """A thread did nothing from one moment to another, for these collectives."""

    place: int
    left_ns: int
    returned_ns: int
    awaited: tuple[int, ...]
    """Events, by when they were asked for."""
    ended_ns: int
    """When the last of them had ended."""


def stands(trace: Trace, links: Links, events: Whole) -> list[Stand]:
    """Of all threads that asked for collectives."""
    calls = links.launch[events]
    outermost = outermost_work(trace, links)
    found: list[Stand] = []
    for place in distinct(trace.place[calls]).tolist():
        mine = events[trace.place[calls] == place]
        mine = mine[np.argsort(trace.start_ns[links.launch[mine]], kind="stable")]
        found += _on_thread(trace, links, mine, busy_on(trace, outermost, place), place)
    return found


def _on_thread(trace: Trace, links: Links, events: Whole, busy: Busy, place: int) -> list[Stand]:
    """Each gap ends behind the first few of those that are not waited for yet, or is for something else."""
    asked, ended = trace.start_ns[links.launch[events]], np.maximum.accumulate(trace.end_ns[events])
    reached = np.maximum.accumulate(busy.end_ns)[:-1]
    found: list[Stand] = []
    done = 0
    for gap in np.flatnonzero(busy.start_ns[1:] - reached > SHORTEST_GAP_NS).tolist():
        left, returned = int(reached[gap]), int(busy.start_ns[gap + 1])
        until = min(int(np.searchsorted(asked, left, "left")), int(np.searchsorted(ended, returned, "right")))
        late = LATE_FOR_ALL_NS if until == np.searchsorted(asked, left, "left") else LATE_NS
        if until > done and left < ended[until - 1] and returned - ended[until - 1] <= late:
            awaited = tuple(events[done:until].tolist())
            found.append(Stand(place, left, returned, awaited, int(ended[until - 1])))
            done = until
    return found
