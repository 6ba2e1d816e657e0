"""One rank's trace becomes nodes and edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mist_megatron.recorded.gloo import stands
from mist_megatron.recorded.graph import Edge, Edges, Ints, Nodes, Role
from mist_megatron.recorded.steps import Step, steps_of
from mist_megatron.recorded.threads import hand_overs
from mist_megatron.recorded.waits import ROUNDING_NS, Found, blocking_copies, find_syncs, find_waits, queues
from mist_megatron.traces.columns import Trace, Whole, distinct
from mist_megatron.traces.nesting import Links, link

SYNC_OWN_NS = 5_000.0
"""What a synchronisation takes at least that waits for something."""


@dataclass
class Parts:
    """Nodes and edges of one rank while they are collected; numbers of nodes are the rank's own."""

    rank: int
    trace: Trace
    links: Links
    shift_ns: float
    """The rank's clock to the common one."""
    nodes: list[tuple[Ints, ...]] = field(default_factory=list)
    edges: list[tuple[Ints, Ints, int, bool, float]] = field(default_factory=list)
    count: int = 0
    node_of: Ints = field(init=False)
    """Node of every event on the GPU and collective of gloo; -1 of all others."""
    backlog: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Events of earlier steps that were still queued or running when the played one began."""
    marks: dict[tuple[int, int], int] = field(default_factory=dict)
    """Place and moment -> node."""
    steps: list[tuple[Step, int, int]] = field(default_factory=list)
    """With the nodes of its begin and end."""
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.node_of = np.full(len(self.trace), -1, np.int64)

    @property
    def played(self) -> Whole:
        """Events that are nodes, in order of time; without the backlog."""
        own = self.node_of >= 0
        own[self.backlog] = False
        return np.flatnonzero(own)

    def add(self, role: Role, event: Ints, place: Ints, start: Ints, end: Ints) -> Ints:
        """Nodes of one role; gives back their numbers."""
        numbers = np.arange(self.count, self.count + len(event))
        self.nodes.append((np.full(len(event), int(role), np.int8), event, place, start, end))
        self.count += len(event)
        return numbers

    def join(
        self, source: Ints, target: Ints, kind: Edge, *, at_end: bool = False, lag: float = np.nan
    ) -> None:
        """Edges from slots to nodes."""
        self.edges.append((np.asarray(source, np.int64), np.asarray(target, np.int64), kind, at_end, lag))

    def columns(self) -> tuple[Ints, ...]:
        """Role, event, place, start, end."""
        if not self.nodes:
            return tuple(np.empty(0, np.int64) for _ in range(5))
        return tuple(np.concatenate(parts) for parts in zip(*self.nodes, strict=True))

    def launch_before(self, event: int) -> int:
        """When what ran before this on the same stream was launched; 0 where nothing did."""
        trace = self.trace
        same = np.flatnonzero(trace.on_gpu[:event] & (trace.place[:event] == trace.place[event]))
        launch = int(self.links.launch[same[-1]]) if len(same) else -1
        return int(trace.start_ns[launch]) if launch >= 0 else 0

    def finished(self) -> tuple[Nodes, Edges]:
        """What was collected, on the common clock; given away, for it is as large as the trace."""
        role, event, place, start, end = self.columns()
        own = (end - start).astype(np.float64)
        edges = self.flat_edges()
        self.nodes.clear()
        self.edges.clear()
        nodes = Nodes(
            np.full(len(role), self.rank, np.int32),
            role,
            event.astype(np.int32),
            place.astype(np.int32),
            start.astype(np.float64) + self.shift_ns,
            end.astype(np.float64) + self.shift_ns,
            own,
        )
        return _owned(nodes, edges)

    def flat_edges(self) -> Edges:
        if not self.edges:
            empty = np.empty(0, np.int64)
            return Edges(empty, empty, empty, np.empty(0, np.bool_), np.empty(0))
        sizes = [len(edge[0]) for edge in self.edges]
        return Edges(
            np.concatenate([edge[0] for edge in self.edges], dtype=np.int32),
            np.concatenate([edge[1] for edge in self.edges], dtype=np.int32),
            np.repeat(np.array([edge[2] for edge in self.edges], np.int8), sizes),
            np.repeat([edge[3] for edge in self.edges], sizes),
            np.repeat([edge[4] for edge in self.edges], sizes),
        )  # fmt: skip


def _owned(nodes: Nodes, edges: Edges) -> tuple[Nodes, Edges]:
    """Synchronisations that waited take next to nothing by themselves."""
    waits = edges.at_end & (edges.kind == Edge.SYNC)
    ended = nodes.end_ns[edges.source[waits] // 2]
    waited = edges.target[waits][ended > nodes.start_ns[edges.target[waits]]]
    nodes.own_ns[waited] = np.minimum(nodes.own_ns[waited], SYNC_OWN_NS)
    return nodes, edges


def rank_parts(rank: int, trace: Trace, window: Step | None, device: int | str | None = None) -> Parts:
    """Everything of one rank: the whole trace, or what one step launched; of our own traces one device."""
    parts = Parts(rank, trace, link(trace), 0.0)
    low, high = (0, int(trace.end_ns.max(initial=0))) if window is None else (window.start_ns, window.end_ns)
    chosen = _chosen(trace, parts.links, window)
    if trace.after:
        of_device = np.array([place[0] == device for place in trace.places], np.bool_)
        _own_graph(parts, chosen[of_device[trace.place[chosen]]])
        return parts
    of_host = parts.links.launch >= 0
    of_host &= ~trace.on_gpu & (trace.start_ns[parts.links.launch] >= low)
    of_host &= trace.start_ns[parts.links.launch] < high
    parts.backlog = _backlog(trace, parts.links, low)
    on_gpu = np.union1d(chosen, parts.backlog) if len(parts.backlog) else chosen
    order = np.empty(0, np.int64)
    for role, events in ((Role.GPU, on_gpu), (Role.HOST, np.flatnonzero(of_host))):
        ran = events[np.lexsort((events, trace.start_ns[events]))]
        numbers = parts.add(
            role, ran, trace.place[ran].astype(np.int64), trace.start_ns[ran], trace.end_ns[ran]
        )
        parts.node_of[ran] = numbers
        order = np.concatenate([order, ran])
    queued, edges = queues(trace, parts.links, on_gpu), Found(counts=parts.counts)
    find_waits(trace, parts.links, queued, (low, high), edges)
    syncs = find_syncs(trace, parts.links, queued, (low, high), edges)
    copies = blocking_copies(trace, parts.links, chosen)
    parts.counts["synchronisations by copies that the host waits for"] += len(copies)
    edges.syncs += list(zip(copies.tolist(), parts.links.launch[copies].tolist(), strict=True))
    launched = order[~np.isin(order, parts.backlog)] if len(parts.backlog) else order
    _host(parts, launched, np.union1d(syncs, parts.links.launch[copies]), edges, (low, high))
    _streams(parts, order)
    for source, target in edges.waits:
        slot, node = 2 * parts.node_of[source] + 1, parts.node_of[target]
        parts.join(np.array([slot]), np.array([node]), Edge.WAIT)
    return parts


def _chosen(trace: Trace, links: Links, window: Step | None) -> Whole:
    """What ran on the GPU for this window: what was launched in it, and of what no launch is known what
    ran."""
    ran = np.flatnonzero(trace.on_gpu)
    if window is None:
        return ran
    launch = links.launch[ran]
    at = np.where(launch >= 0, trace.start_ns[np.maximum(launch, 0)], trace.start_ns[ran])
    return np.asarray(ran[(at >= window.start_ns) & (at < window.end_ns)])


def _backlog(trace: Trace, links: Links, low_ns: int) -> Whole:
    """What was launched before a moment and ends after it: what comes later queues behind it."""
    ran = np.flatnonzero(trace.on_gpu & (trace.end_ns > low_ns))
    launch = links.launch[ran]
    at = np.where(launch >= 0, trace.start_ns[np.maximum(launch, 0)], trace.start_ns[ran])
    return np.asarray(ran[at < low_ns])


def _own_graph(parts: Parts, chosen: Whole) -> None:
    """A trace of our own, whose events say what they wait for, on other devices too: see `own_waits`."""
    trace = parts.trace
    numbers = parts.add(
        Role.GPU, chosen, trace.place[chosen].astype(np.int64), trace.start_ns[chosen], trace.end_ns[chosen]
    )
    parts.node_of[chosen] = numbers
    _streams(parts, chosen)


def own_waits(parts: Sequence[Parts], offsets: Sequence[int]) -> Edges:
    """Dependencies that traces of our own state, between nodes of all their devices."""
    sources: list[int] = []
    targets: list[int] = []
    node_of: dict[tuple[int, int], int] = {}
    own = [
        (part, by, part.played.tolist()) for part, by in zip(parts, offsets, strict=True) if part.trace.after
    ]
    for part, by, events in own:
        nodes = (part.node_of[events] + by).tolist()
        node_of.update({(id(part.trace), event): node for event, node in zip(events, nodes, strict=True)})
    for part, _, events in own:
        for event in events:
            for one in part.trace.after.get(event, ()):
                sources.append(2 * node_of[id(part.trace), one] + 1)
                targets.append(node_of[id(part.trace), event])
                part.counts["waits said by dependency ids"] += 1
    count = len(sources)
    return Edges(
        np.array(sources, np.int64), np.array(targets, np.int64), np.full(count, int(Edge.WAIT)),
        np.zeros(count, np.bool_), np.full(count, np.nan),
    )  # fmt: skip


def _host(parts: Parts, ran: Whole, syncs: Whole, edges: Found, window: tuple[int, int]) -> None:
    """Launches, synchronisations and hand-overs of all threads, and what they launch."""
    trace, links = parts.trace, parts.links
    launch = links.launch[ran]
    calls = distinct(launch[launch >= 0])
    start, end = trace.start_ns, trace.end_ns
    blocking = np.isin(calls, syncs)
    place = trace.place.astype(np.int64)
    # What a blocking call launches, it launches at once: its start is a node of its own.
    begins = parts.add(
        Role.LAUNCH, calls, place[calls], start[calls], np.where(blocking, start[calls], end[calls])
    )
    launch_node = np.full(len(trace), -1, np.int64)
    launch_node[calls] = begins
    sync_nodes = parts.add(Role.SYNC, syncs, place[syncs], start[syncs], end[syncs])
    sync_node = dict(zip(syncs.tolist(), sync_nodes.tolist(), strict=True))
    for source, call in edges.syncs:
        slot = 2 * parts.node_of[source] + 1
        parts.join(np.array([slot]), np.array([sync_node[call]]), Edge.SYNC, at_end=True)
    launched = launch >= 0
    gpu = parts.node_of[ran[launched]]
    parts.join(2 * launch_node[launch[launched]], gpu, Edge.LAUNCH)
    over = _hand_over_marks(parts, window)
    for step in steps_of(trace):
        if window[0] <= step.start_ns and step.end_ns <= window[1]:
            marks = mark(parts, step.place, step.start_ns), mark(parts, step.place, step.end_ns)
            parts.steps.append((step, *marks))
    chain(parts, over)


def mark(parts: Parts, place: int, at_ns: int) -> int:
    """A moment of a thread that something hangs on."""
    key = (place, at_ns)
    if key not in parts.marks:
        at = np.array([at_ns])
        parts.marks[key] = int(parts.add(Role.MARK, np.array([-1]), np.array([place]), at, at)[0])
    return parts.marks[key]


def _hand_over_marks(parts: Parts, window: tuple[int, int]) -> set[int]:
    """Nodes that wait for another thread, not for what their own did before."""
    waiting: set[int] = set()
    low, high = window
    for over in hand_overs(parts.trace, parts.links, parts.counts):
        if low <= over.from_ns and over.to_ns <= high + ROUNDING_NS:
            source, target = (
                mark(parts, over.from_place, over.from_ns),
                mark(parts, over.to_place, over.to_ns),
            )
            parts.join(np.array([2 * source]), np.array([target]), Edge.HAND_OVER)
            waiting.add(target)
    _stand_still(parts, waiting)
    return waiting


def _stand_still(parts: Parts, waiting: set[int]) -> None:
    """Threads that wait for gloo's; what ended early is waited for no longer than what ended last."""
    events = parts.played
    events = events[~parts.trace.on_gpu[events]]
    for stand in stands(parts.trace, parts.links, events) if len(events) else ():
        parts.counts["waits for collectives of gloo, by gaps"] += 1
        mark(parts, stand.place, stand.left_ns)
        target = mark(parts, stand.place, stand.returned_ns)
        ends = 2 * parts.node_of[np.array(stand.awaited)] + 1
        late = float(stand.returned_ns - stand.ended_ns)
        parts.join(ends, np.full(len(ends), target), Edge.HAND_OVER, lag=late)
        waiting.add(target)


def chain(parts: Parts, over: set[int]) -> None:
    """What a thread does one after the other. Behind a synchronisation time counts from its end."""
    role, _, place, start, end = parts.columns()
    host = np.flatnonzero(role <= Role.MARK)
    order = host[np.lexsort((role[host] != Role.MARK, start[host], place[host]))]
    places, starts, ends = place[order].tolist(), start[order].tolist(), end[order].tolist()
    roles = role[order].tolist()
    sources: list[int] = []
    targets: list[int] = []
    at_once: list[tuple[int, int]] = []
    current, before, prior, until = -1, -1, -1, 0
    for at, node in enumerate(order.tolist()):
        if places[at] != current:
            current, before, prior, until = places[at], -1, -1, 0
        inside = starts[at] < until
        source = prior if inside else before
        if source >= 0 and node in over:
            at_once.append((source, node))
        elif source >= 0:
            sources.append(source)
            targets.append(node)
        if roles[at] == Role.SYNC:
            before, prior, until = 2 * node + 1, source, max(until, ends[at])
        elif not inside:
            before = 2 * node
    parts.join(np.array(sources, np.int64), np.array(targets, np.int64), Edge.THREAD)
    if at_once:
        first, second = np.array(at_once, np.int64).T
        parts.join(first, second, Edge.THREAD, lag=0.0)


def _streams(parts: Parts, ran: Whole) -> None:
    """What one stream runs one after the other."""
    trace = parts.trace
    start, end = trace.start_ns[ran], trace.end_ns[ran]
    launched = (parts.links.launch[ran] >= 0) | bool(trace.after)
    nodes = parts.node_of[ran]
    place = trace.place[ran]
    first = np.ones(len(ran), np.bool_)
    for one in distinct(place).tolist():
        here = np.flatnonzero(place == one)
        if len(here) < 2:
            first[here[1:]] = False
            continue
        first[here[1:]] = False
        reached = np.maximum.accumulate(end[here])
        longest = np.maximum.accumulate(np.where(end[here] == reached, np.arange(len(here)), 0))[:-1]
        later, before = here[1:], here[:-1]
        beside = start[later] < reached[:-1] - ROUNDING_NS
        slots = np.where(beside, 2 * nodes[before], 2 * nodes[here[longest]] + 1)
        kept = beside | ~launched[later]
        parts.join(slots[~kept], nodes[later[~kept]], Edge.STREAM)
        parts.join(slots[kept], nodes[later[kept]], Edge.NEIGHBOUR)
    alone = np.flatnonzero(first & ~launched)
    if len(alone) and not trace.after:
        earlier = alone[alone > 0]
        parts.join(2 * nodes[earlier - 1], nodes[earlier], Edge.NEIGHBOUR)
