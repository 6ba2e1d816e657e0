"""Timelines as Chrome-trace JSON, which Perfetto and chrome://tracing open.

One process per device, one thread per stream, arrows from sends to what they release, counters for
memory. Times in the format are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that runs on one thread of one process."""

    process: int
    thread: int
    name: str
    category: str
    start_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """A point-to-point transfer, drawn from the end of one slice to the start of another."""

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
    at_s: float
    value: float


@dataclass(frozen=True, kw_only=True)
class Names:
    """What processes and threads are called."""

    processes: dict[int, str]
    threads: tuple[str, ...]


def chrome_trace(
    names: Names,
    slices: Iterable[Slice],
    arrows: Iterable[Arrow] = (),
    counters: Iterable[Counter] = (),
) -> str:
    """The JSON document of a timeline."""
    events: list[dict[str, Any]] = []
    for process, title in names.processes.items():
        events.append(_metadata("process_name", process, 0, {"name": title}))
        events.append(_metadata("process_sort_index", process, 0, {"sort_index": process}))
        for thread, label in enumerate(names.threads):
            events.append(_metadata("thread_name", process, thread, {"name": label}))
            events.append(_metadata("thread_sort_index", process, thread, {"sort_index": thread}))
    events.extend(
        {
            "name": item.name,
            "cat": item.category,
            "ph": "X",
            "pid": item.process,
            "tid": item.thread,
            "ts": item.start_s * US_PER_S,
            "dur": item.duration_s * US_PER_S,
        }
        for item in slices
    )
    for number, arrow in enumerate(arrows):
        events.extend(_flow(number, arrow))
    events.extend(
        {
            "name": counter.name,
            "ph": "C",
            "pid": counter.process,
            "ts": counter.at_s * US_PER_S,
            "args": {"value": counter.value},
        }
        for counter in counters
    )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


def _flow(number: int, arrow: Arrow) -> tuple[dict[str, Any], dict[str, Any]]:
    shared = {"name": arrow.name, "cat": "transfer", "id": number}
    start = {"ph": "s", "pid": arrow.from_process, "tid": arrow.from_thread, "ts": arrow.from_s * US_PER_S}
    # "bp": "e" ties the arrow to the slice that encloses its end, not to the next one.
    end = {
        "ph": "f",
        "bp": "e",
        "pid": arrow.to_process,
        "tid": arrow.to_thread,
        "ts": arrow.to_s * US_PER_S,
    }
    return {**shared, **start}, {**shared, **end}
