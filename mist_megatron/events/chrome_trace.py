"""Timelines as Chrome-trace JSON, which Perfetto and chrome://tracing open.

One process per device, one thread per stream, arrows from sends to what they release, counters for
memory. Three rules come from the importers, not from the format's description, and were found by loading
traces into Perfetto 52:

- Times are microseconds, which Perfetto turns into whole nanoseconds one by one: a start and a duration
  that are each rounded can reach a nanosecond into the next slice, and then that slice is dropped as
  overlapping. Starts and ends are therefore put on a grid of 1/8 microsecond = 125 ns, which binary
  floating point holds exactly; a duration is the difference of two grid points.
- Thread 0 is the kernel's idle thread, one for all processes: streams numbered from 0 would land on each
  other. Ids of threads are therefore unique in the file and never 0.
- A process's first thread carries the process's id, or a nameless thread appears beside the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

TICKS_PER_S = 8e6
TICKS_PER_US = 8.0
IDS_PER_PROCESS = 10
"""Process k has id 10 (k + 1), its threads that id and the ones that follow it."""
EVENTS_PER_PIECE = 2000
"""Events that are handed out together: some 200 kB of text."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that runs on one thread of one process."""

    process: int
    thread: int
    name: str
    category: str
    start_s: float
    end_s: float
    event: int = 0
    """Number of its own in the file ..."""
    after: tuple[int, ...] = ()
    """... and those of what it waited for, by which `replay` plays the file again."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A point-to-point transfer, drawn from the middle of one slice to the start of another."""

    name: str
    from_process: int
    from_thread: int
    from_s: float
    to_process: int
    to_thread: int
    to_s: float


@dataclass(frozen=True, slots=True)
class Counter:
    """A value of one process from this moment on."""

    process: int
    name: str
    unit: str
    at_s: float
    value: float


@dataclass(frozen=True, kw_only=True)
class Names:
    """What processes and threads are called; at most `IDS_PER_PROCESS` threads."""

    processes: dict[int, str]
    threads: tuple[str, ...]


def chrome_trace(
    names: Names,
    slices: Iterable[Slice],
    arrows: Iterable[Arrow] = (),
    counters: Iterable[Counter] = (),
) -> Iterator[str]:
    """The JSON document of a timeline, piece by piece: a large one never lies in memory as a whole."""
    # Whole lists at a time: one by one takes three times as long.
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    events = _events(names, slices, arrows, counters)
    yield '{"displayTimeUnit": "ms", "traceEvents": ['
    before = "\n"
    while piece := list(islice(events, EVENTS_PER_PIECE)):
        yield before + encode(piece)[1:-1]
        before = ",\n"
    yield "\n]}\n"


def process_id(process: int) -> int:
    return IDS_PER_PROCESS * (process + 1)


def _events(
    names: Names, slices: Iterable[Slice], arrows: Iterable[Arrow], counters: Iterable[Counter]
) -> Iterator[dict[str, object]]:
    for place, (process, title) in enumerate(names.processes.items()):
        yield _metadata("process_name", process, 0, {"name": title})
        yield _metadata("process_sort_index", process, 0, {"sort_index": place})
        for thread, label in enumerate(names.threads):
            yield _metadata("thread_name", process, thread, {"name": label})
            yield _metadata("thread_sort_index", process, thread, {"sort_index": thread})
    for item in slices:
        start, end = _ticks(item.start_s), _ticks(item.end_s)
        yield {
            "name": item.name,
            "cat": item.category,
            "ph": "X",
            **_place(item.process, item.thread),
            "ts": start / TICKS_PER_US,
            "dur": (end - start) / TICKS_PER_US,
            "args": {"event": item.event, "after": item.after, "stream": item.thread},
        }
    for number, arrow in enumerate(arrows):
        yield from _flow(number, arrow)
    for counter in counters:
        yield {
            "name": counter.name,
            "ph": "C",
            "pid": process_id(counter.process),
            "ts": _ticks(counter.at_s) / TICKS_PER_US,
            "args": {counter.unit: counter.value},
        }


def _ticks(at_s: float) -> int:
    return round(at_s * TICKS_PER_S)


def _place(process: int, thread: int) -> dict[str, int]:
    return {"pid": process_id(process), "tid": process_id(process) + thread}


def _metadata(name: str, process: int, thread: int, args: dict[str, object]) -> dict[str, object]:
    return {"name": name, "ph": "M", **_place(process, thread), "args": args}


def _flow(number: int, arrow: Arrow) -> tuple[dict[str, object], dict[str, object]]:
    shared = {"name": arrow.name, "cat": "transfer", "id": number}
    start = {
        "ph": "s",
        **_place(arrow.from_process, arrow.from_thread),
        "ts": _ticks(arrow.from_s) / TICKS_PER_US,
    }
    # "bp": "e" ties the arrow to the slice that encloses its end, not to the next one.
    end = {
        "ph": "f",
        "bp": "e",
        **_place(arrow.to_process, arrow.to_thread),
        "ts": _ticks(arrow.to_s) / TICKS_PER_US,
    }
    return {**shared, **start}, {**shared, **end}
