"""What the importers of Perfetto and of chrome://tracing demand of a trace; breaking a rule loses slices,
arrows or counters there, with an error mark at best. Found by loading traces into Perfetto 52."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

KEYS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "id", "ph", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "ph", "bp", "pid", "tid", "ts"},
    "C": {"name", "ph", "pid", "ts", "args"},
}
Event = dict[str, Any]


def strict_json(text: str) -> Any:
    """NaN and Infinity are no JSON; Python reads them all the same."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in the trace")

    return json.loads(text, parse_constant=refuse)


def imported(text: str) -> dict[str, list[Event]]:
    """Events by phase, with every rule checked."""
    document = strict_json(text)
    by_phase: dict[str, list[Event]] = {phase: [] for phase in KEYS}
    for event in document["traceEvents"]:
        assert event.keys() == KEYS[event["ph"]], event
        assert type(event["pid"]) is int and event["pid"] > 0
        for key in {"ts", "dur"} & event.keys():
            assert type(event[key]) in (int, float) and event[key] >= 0.0
        by_phase[event["ph"]].append(event)
    check_threads(by_phase)
    check_arrows(by_phase)
    for event in by_phase["C"]:
        assert event["args"]
        assert all(type(value) in (int, float) and math.isfinite(value) for value in event["args"].values())
    return by_phase


def nanoseconds(event: Event) -> tuple[set[int], set[int]]:
    """Start and duration as importers may make them of microseconds: cut off, or rounded."""
    start, seconds = event["ts"] * 1000.0, event["dur"] * 1000.0
    return {int(start), round(start)}, {int(seconds), round(seconds)}


def check_threads(found: dict[str, list[Event]]) -> None:
    named = {(e["pid"], e["tid"]) for e in found["M"] if e["name"] == "thread_name"}
    assert len({tid for _, tid in named}) == len(named), "a thread id in two processes"
    assert all(tid > 0 for _, tid in named), "thread 0 is the idle thread of all processes"
    processes = {e["pid"] for e in found["M"] if e["name"] == "process_name"}
    assert processes == {pid for pid, _ in named}
    assert all((pid, pid) in named for pid in processes), "a process without a main thread"
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in found["X"]:
        starts, lengths = nanoseconds(event)
        span = (min(starts), max(starts) + max(lengths))
        threads.setdefault((event["pid"], event["tid"]), []).append(span)
    assert threads.keys() <= named
    for spans in threads.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert end <= start, "overlapping slices of a thread: importers drop the second"


def check_arrows(found: dict[str, list[Event]]) -> None:
    """Each has one start and one end, not before it, and each lies in a slice of its thread."""
    starts, ends = ({e["id"]: e for e in found[phase]} for phase in ("s", "f"))
    assert len(starts) == len(found["s"]) == len(found["f"])
    assert starts.keys() == ends.keys()
    assert all(event["bp"] == "e" for event in found["f"])
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in found["X"]:
        spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        for place in (start, end):
            around = spans[place["pid"], place["tid"]]
            assert any(since <= place["ts"] <= until for since, until in around)
