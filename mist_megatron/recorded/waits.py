"""Which kernel waits for which on another stream, and what a synchronisation waits for, by the best evidence
there is.

Said: `cuda_sync` events name the stream and the cudaEventRecord. Else pairs of record and wait on one thread,
where the record's stream is that of the thread's last launch. Else nothing: a wrong guess is worse than none.
Evidence that recorded times speak against (what was waited for ended later) is left out and counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from mist_megatron.traces.columns import Kind, Trace, Whole, distinct
from mist_megatron.traces.nesting import Links

RECORDS = {"cudaEventRecord", "cudaEventRecordWithFlags", "hipEventRecord", "cuEventRecord"}
WAITS = {"cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent"}
ALL_SYNCS = {"cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize", "cudaThreadSynchronize"}
STREAM_SYNCS = {"cudaStreamSynchronize", "hipStreamSynchronize", "cuStreamSynchronize"}
EVENT_SYNCS = {"cudaEventSynchronize", "hipEventSynchronize", "cuEventSynchronize"}
BLOCKING_COPIES = {"cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"}
ROUNDING_NS = 1_000
"""Older traces have whole microseconds."""
TOGETHER_NS = 50_000
"""A synchronisation returns so soon after what it waited for."""
SHORT_NS = 20_000
"""One that lasts no longer waited for nothing."""


@dataclass
class Found:
    """Pairs of events of one rank, and how they were found."""

    waits: list[tuple[int, int]] = field(default_factory=list)
    """What ran on the GPU -> what waits for it there."""
    syncs: list[tuple[int, int]] = field(default_factory=list)
    """What ran on the GPU -> the call that waits for it."""
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Queues:
    """What ran on each stream, in order of launch."""

    trace: Trace
    launched_ns: dict[int, Whole]
    events: dict[int, Whole]
    by_number: dict[int, int]
    """Stream's number -> its place."""

    def last_before(self, place: int, at_ns: int) -> int:
        """What was launched last on a stream before a moment; -1 for nothing."""
        index = int(np.searchsorted(self.launched_ns[place], at_ns, "left")) - 1
        return int(self.events[place][index]) if index >= 0 else -1

    def first_from(self, place: int, at_ns: int) -> int:
        index = int(np.searchsorted(self.launched_ns[place], at_ns, "left"))
        return int(self.events[place][index]) if index < len(self.events[place]) else -1


def queues(trace: Trace, links: Links, chosen: Whole) -> Queues:
    """Of the chosen events on the GPU."""
    launch = links.launch[chosen]
    launched = np.where(launch >= 0, trace.start_ns[np.maximum(launch, 0)], trace.start_ns[chosen])
    at, events, by_number = {}, {}, {}
    for place in distinct(trace.place[chosen]).tolist():
        here = trace.place[chosen] == place
        mine = chosen[here]
        order = np.argsort(trace.start_ns[mine], kind="stable")
        events[place] = mine[order]
        at[place] = np.maximum.accumulate(launched[here][order])
        by_number[int(trace.stream[mine[0]])] = place
    return Queues(trace, at, events, by_number)


def called(trace: Trace, names: set[str], low_ns: int, high_ns: int) -> Whole:
    """Calls of these names in a window."""
    inside = (trace.start_ns >= low_ns) & (trace.start_ns <= high_ns)
    calls = np.flatnonzero((trace.kind == Kind.CALL) & inside & trace.names_that(names.__contains__))
    return calls.astype(np.int64)


def find_waits(trace: Trace, links: Links, queued: Queues, window: tuple[int, int], edges: Found) -> None:
    """Streams that wait for streams."""
    calls = called(trace, WAITS, *window)
    said = {call: trace.syncs.get(int(trace.correlation[call])) for call in calls.tolist()}
    record_of = _by_correlation(trace, called(trace, RECORDS, 0, int(trace.end_ns.max(initial=0))))
    pairs = _pairs(trace, links, calls, window) if not any(said.values()) else {}
    for call in calls.tolist():
        about = said[call]
        if about is not None and about.waits_on_stream >= 0:
            record = record_of.get(about.record)
            if record is None:
                edges.counts["waits whose record is not in the trace"] += 1
                continue
            ends = queued.by_number.get(about.waits_on_stream), queued.by_number.get(about.stream)
            _add(queued, ends, (record, call), "waits said by cuda_sync", edges)
        elif call in pairs:
            record, source, target = pairs[call]
            _add(queued, (source, target), (record, call), "waits by pairs of record and wait", edges)
        else:
            edges.counts["waits without evidence"] += 1


def _add(
    queued: Queues, streams: tuple[int | None, int | None], calls: tuple[int, int], how: str, edges: Found
) -> None:
    trace = queued.trace
    source_stream, target_stream = streams
    if source_stream is None or target_stream is None or source_stream == target_stream:
        edges.counts["waits on streams that do nothing here"] += 1
        return
    source = queued.last_before(source_stream, int(trace.start_ns[calls[0]]))
    target = queued.first_from(target_stream, int(trace.start_ns[calls[1]]))
    if source < 0 or target < 0:
        edges.counts["waits on streams that do nothing here"] += 1
    elif trace.end_ns[source] > trace.start_ns[target] + ROUNDING_NS:
        edges.counts["waits that recorded times contradict"] += 1
    else:
        edges.counts[how] += 1
        edges.waits.append((source, target))


def _by_correlation(trace: Trace, calls: Whole) -> dict[int, int]:
    return dict(zip(trace.correlation[calls].tolist(), calls.tolist(), strict=True))


def _pairs(
    trace: Trace, links: Links, calls: Whole, window: tuple[int, int]
) -> dict[int, tuple[int, int, int]]:
    """Wait -> record, its stream, the waiting stream: the thread's last record before the wait, on the stream
    of the thread's last launch before it; and the stream of the thread's next launch."""
    records = called(trace, RECORDS, *window)
    if not len(records) or not len(calls):
        return {}
    ran = np.flatnonzero(trace.on_gpu & (links.launch >= 0))
    stream_of = dict(zip(links.launch[ran].tolist(), trace.place[ran].tolist(), strict=True))
    waiting, recording = set(calls.tolist()), set(records.tolist())
    pairs: dict[int, tuple[int, int, int]] = {}
    order = np.array(sorted({*stream_of, *waiting, *recording}), np.int64)
    for place in distinct(trace.place[order]).tolist():
        last_stream, record, open_waits = -1, (-1, -1), list[tuple[int, int, int]]()
        for call in order[trace.place[order] == place].tolist():
            if call in recording:
                record = (call, last_stream)
            elif call in waiting:
                open_waits.append((call, *record))
            else:
                last_stream = stream_of[call]
                for wait, recorded, source in open_waits:
                    if recorded >= 0 and source >= 0:
                        pairs[wait] = (recorded, source, last_stream)
                open_waits = []
    return pairs


def find_syncs(trace: Trace, links: Links, queued: Queues, window: tuple[int, int], edges: Found) -> Whole:
    """Calls that wait for the GPU, with what they wait for; gives back all such calls."""
    everything = called(trace, ALL_SYNCS, *window)
    for call in everything.tolist():
        for place in queued.events:
            _wait_of(queued, queued.last_before(place, int(trace.start_ns[call])), call, "", edges)
        edges.counts["synchronisations with the whole device"] += 1
    record_of = _by_correlation(trace, called(trace, RECORDS, 0, int(trace.end_ns.max(initial=0))))
    single = called(trace, STREAM_SYNCS | EVENT_SYNCS, *window)
    for call in single.tolist():
        about = trace.syncs.get(int(trace.correlation[call]))
        record = record_of.get(about.record) if about is not None else None
        at_ns = int(trace.start_ns[call if record is None else record])
        stream = about.waits_on_stream if about is not None and record is not None else -1
        if about is not None and stream < 0 and trace.name_of(call) in STREAM_SYNCS:
            stream = about.stream
        if stream >= 0:
            named = queued.by_number.get(stream)
            source = -1 if named is None else queued.last_before(named, at_ns)
            _wait_of(queued, source, call, "synchronisations said by cuda_sync", edges)
        elif len(queued.events) == 1 and trace.name_of(call) in STREAM_SYNCS:
            source = queued.last_before(next(iter(queued.events)), at_ns)
            _wait_of(queued, source, call, "synchronisations with the only stream", edges)
        else:
            _wait_of(queued, _ended_with(queued, call), call, "synchronisations by their common end", edges)
    return np.union1d(everything, single)


def _wait_of(queued: Queues, source: int, call: int, how: str, edges: Found) -> None:
    trace = queued.trace
    if source < 0:
        if how:
            edges.counts["synchronisations that nothing is known of"] += 1
    elif trace.end_ns[source] > trace.end_ns[call] + ROUNDING_NS:
        edges.counts["synchronisations that recorded times contradict"] += 1
    else:
        if how:
            edges.counts[how] += 1
        edges.syncs.append((source, call))


def _ended_with(queued: Queues, call: int) -> int:
    """What ended just before a long synchronisation did, and was the last on its stream."""
    trace = queued.trace
    start, end = int(trace.start_ns[call]), int(trace.end_ns[call])
    if end - start < SHORT_NS:
        return -1
    best = -1
    for place in queued.events:
        last = queued.last_before(place, start)
        if last >= 0 and start < trace.end_ns[last] <= end + ROUNDING_NS:
            near = end - int(trace.end_ns[last]) <= TOGETHER_NS
            if near and (best < 0 or trace.end_ns[last] > trace.end_ns[best]):
                best = last
    return best


def blocking_copies(trace: Trace, links: Links, chosen: Whole) -> Whole:
    """Copies that the host waits for: of pageable memory to the host, and by calls that say so."""
    launch = links.launch[chosen]
    copies = chosen[(trace.kind[chosen] == Kind.COPY) & (launch >= 0)]
    calls = links.launch[copies]
    pageable = trace.names_that(lambda name: "DtoH" in name and "Pageable" in name)[copies]
    blocks = trace.names_that(BLOCKING_COPIES.__contains__)[calls]
    ended = trace.end_ns[calls] + ROUNDING_NS >= trace.end_ns[copies]
    return np.asarray(copies[(pageable | blocks) & ended])
