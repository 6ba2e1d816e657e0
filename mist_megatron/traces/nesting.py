"""What belongs to what in one rank's trace: kernels to launches, launches to operators.

A kernel names the call that launched it. Which operator made the call is told by its `External id`, where the
call carries one of its own; older versions write the number of the call there, and then equal numbers are
other operators: the operator is the innermost one that encloses the call on its thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mist_megatron.traces.columns import Kind, Trace, Whole, distinct

ROUNDED_NS = 1_000
"""Older traces have whole microseconds."""
AT_ONCE = 1 << 16
"""Events that are Python's numbers at the same time."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Per event of a trace: -1 where there is none."""

    launch: Whole
    """Of what ran on the GPU: the call that launched it. Of a collective of gloo: what asked for it."""
    parent: Whole
    """Of what ran on the host: the innermost operator or annotation that encloses it."""
    operator: Whole
    """Of calls: the operator that made it."""
    by_external: int
    """Launches whose operator is told by External id ..."""
    by_nesting: int
    """... by enclosure in time ..."""
    without: int
    """... and by nothing."""
    unlaunched: int
    """Kernels and copies whose launch is not in the trace."""


def link(trace: Trace) -> Links:
    """All links of one rank."""
    launch = launches(trace)
    parent = enclosing(trace)
    called = distinct(launch[launch >= 0])
    operator, by_external = _operators(trace, parent, called)
    linked = operator[called] >= 0
    unlaunched = int((trace.on_gpu & (launch < 0)).sum())
    moved, asked = gloo_calls(trace)
    launch[moved] = asked
    return Links(
        launch=launch,
        parent=parent,
        operator=operator,
        by_external=by_external,
        by_nesting=int(linked.sum()) - by_external,
        without=int((~linked).sum()),
        unlaunched=unlaunched,
    )


def launches(trace: Trace) -> Whole:
    """The call of the same correlation; where numbers came round, the last one before."""
    launch_of = np.full(len(trace), -1, np.int64)
    calls = np.flatnonzero((trace.kind == Kind.CALL) & (trace.correlation > 0))
    ran = np.flatnonzero(trace.on_gpu & (trace.correlation > 0))
    if not len(calls) or not len(ran):
        return launch_of
    order = np.lexsort((trace.start_ns[calls], trace.correlation[calls]))
    calls = calls[order]
    numbers = trace.correlation[calls]
    first = np.searchsorted(numbers, trace.correlation[ran], "left")
    last = np.searchsorted(numbers, trace.correlation[ran], "right") - 1
    there = first <= last
    chosen = calls[np.maximum(last, 0)]
    for index in np.flatnonzero(there & (last > first)):
        same = calls[first[index] : last[index] + 1]
        before = same[trace.start_ns[same] <= trace.start_ns[ran[index]]]
        chosen[index] = before[-1] if len(before) else same[0]
    launch_of[ran[there]] = chosen[there]
    return launch_of


def gloo_calls(trace: Trace) -> tuple[Whole, Whole]:
    """Collectives of gloo and what asked for each: gloo's threads take them in the order in which they were
    asked for. Where there are not as many of both, nothing is told; sends and receipts are no collectives."""
    named = trace.names_that(lambda name: _plain_name(name, "gloo:") not in ("", "send", "recv"))
    moved = np.flatnonzero((trace.kind == Kind.ANNOTATION) & named)
    if not len(moved):
        return moved, moved
    asks = trace.names_that(lambda name: name.startswith("c10d::")) & (trace.kind == Kind.OPERATOR)
    moved, asked = (
        events[np.argsort(trace.start_ns[events], kind="stable")] for events in (moved, np.flatnonzero(asks))
    )
    kinds = [_plain_name(trace.name_of(event), "gloo:") for event in moved.tolist()]
    wanted = [_plain_name(trace.name_of(event), "c10d::") for event in asked.tolist()]
    found: list[tuple[int, int]] = []
    for kind in sorted(set(kinds)):
        ran = [event for event, name in zip(moved.tolist(), kinds, strict=True) if name == kind]
        calls = [event for event, name in zip(asked.tolist(), wanted, strict=True) if name == kind]
        if len(ran) == len(calls) and (trace.start_ns[ran] + ROUNDED_NS >= trace.start_ns[calls]).all():
            found += zip(ran, calls, strict=True)
    pairs = np.array(found, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _plain_name(name: str, prefix: str) -> str:
    """The same name for an operator (allreduce_) and what it asks for (all_reduce)."""
    return name.removeprefix(prefix).replace("_", "") if name.startswith(prefix) else ""


def enclosing(trace: Trace) -> Whole:
    """The innermost operator or annotation around every host event, by time on its thread."""
    parent = np.full(len(trace), -1, np.int64)
    host = np.flatnonzero(trace.kind <= Kind.CALL)
    order = host[np.argsort(trace.place[host], kind="stable")]
    bounds = np.flatnonzero(np.diff(trace.place[order], prepend=-1)).tolist()
    for low, high in pairwise([*bounds, len(order)]):
        stack: list[tuple[int, int]] = []
        for first in range(low, high, AT_ONCE):
            events = order[first : min(first + AT_ONCE, high)]
            parent[events] = _enclosing(trace, events, stack)
    return parent


def _enclosing(trace: Trace, events: Whole, stack: list[tuple[int, int]]) -> list[int]:
    """Of the next events of a thread; `stack` holds what is open, with its end."""
    found: list[int] = []
    kinds = trace.kind[events]
    start, length = trace.start_ns[events], trace.length_ns[events]
    columns = (events, start, start + length, kinds <= Kind.ANNOTATION, kinds == Kind.ANNOTATION)
    for event, at, end, opens, names in zip(*(column.tolist() for column in columns), strict=True):
        while stack and stack[-1][1] <= at:
            stack.pop()
        inside = len(stack) - 1
        # What is named until something has been done (gloo's sends) outlives the call that began it.
        while names and inside > 0 and stack[inside][1] + ROUNDED_NS < end:
            inside -= 1
        found.append(stack[inside][0] if stack else -1)
        if opens:
            stack.append((event, end))
    return found


def _operators(trace: Trace, parent: Whole, calls: Whole) -> tuple[Whole, int]:
    """The operator of every call; of the launches among them, how many are told by External id."""
    operator_of = np.full(len(trace), -1, np.int64)
    every = np.flatnonzero(trace.kind == Kind.CALL)
    host = parent[every]
    for _ in range(64):  # annotations enclose operators, and are enclosed by few others
        above = (host >= 0) & (trace.kind[np.maximum(host, 0)] == Kind.ANNOTATION)
        if not above.any():
            break
        host = np.where(above, parent[np.maximum(host, 0)], host)
    operator_of[every] = host
    if not _external_is_own(trace, calls):
        return operator_of, 0
    numbered = np.flatnonzero((trace.kind == Kind.OPERATOR) & (trace.external > 0))
    if not len(numbered):
        return operator_of, 0
    numbered = numbered[np.argsort(trace.external[numbered], kind="stable")]
    ids = trace.external[numbered]
    at = np.minimum(np.searchsorted(ids, trace.external[every]), len(ids) - 1)
    said = (ids[at] == trace.external[every]) & (trace.external[every] > 0)
    operator_of[every[said]] = numbered[at[said]]
    return operator_of, int(np.isin(calls, every[said]).sum())


def _external_is_own(trace: Trace, calls: Whole) -> bool:
    """Whether the calls' External id is anything but the number of the call itself."""
    external = trace.external[calls]
    carried = external > 0
    return bool(carried.any() and (external[carried] != trace.correlation[calls][carried]).any())


def streams_of(trace: Trace) -> NDArray[np.int64]:
    """Places on which something ran on the GPU."""
    return distinct(trace.place[trace.on_gpu])
