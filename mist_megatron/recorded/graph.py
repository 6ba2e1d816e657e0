"""A recorded run as nodes and edges: columns that a replay walks through once.

A node is something with a start and an end on one processor, a thread of a host or a stream of a GPU. An edge
says that a node starts (or, of synchronisations, ends) no earlier than so long after another one started or
ended. What a thread does between two nodes is the length of the edge between them: only launches,
synchronisations and hand-overs between threads are nodes of a host.

Every edge has the delay that was seen where it bound, and a typical one where it did not: a kernel that
waited for its stream says nothing about how long its launch takes to arrive. What is left between the last
edge and the recorded start is kept as the node's own rest and told: a start that edges explain leaves next to
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mist_megatron.traces.columns import distinct

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]
Flags = NDArray[np.bool_]
EXPLAINED_NS = 10_000.0
"""A start that lies closer behind what it waited for is explained: launches take some 5 us to arrive."""


class Role(IntEnum):
    """What a node is."""

    LAUNCH = 0
    SYNC = 1
    MARK = 2
    """Begin or end of a step, or of what a thread does without a pause."""
    ARRIVE = 3
    """A rank is ready for a collective ..."""
    MEET = 4
    """... all are ..."""
    GPU = 5
    """Kernels and copies, of collectives too."""
    HOST = 6
    """Work of a host that others wait for: collectives of gloo."""


class Edge(IntEnum):
    """Why one thing waits for another."""

    THREAD = 0
    HAND_OVER = 1
    LAUNCH = 2
    STREAM = 3
    WAIT = 4
    SYNC = 5
    COLLECTIVE = 6
    NEIGHBOUR = 7
    """Of what no launch is known: its distance to what ran before it."""
    INFERRED = 8


@dataclass(frozen=True, slots=True)
class Edges:
    """Columns; slots are 2 * node for its start and 2 * node + 1 for its end."""

    source: Ints
    target: Ints
    """Nodes."""
    kind: Ints
    at_end: Flags
    """Whether the target's end waits, not its start."""
    lag_ns: Floats

    def __len__(self) -> int:
        return len(self.source)

    def where(self, chosen: Flags | Ints) -> Edges:
        columns = (self.source, self.target, self.kind, self.at_end, self.lag_ns)
        return Edges(*(column[chosen] for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Columns, as they were recorded; times of all ranks on one clock."""

    rank: Ints
    """Position among the ranks, not the number of the rank."""
    role: Ints
    event: Ints
    """In the trace of the rank; -1 for what is none."""
    place: Ints
    """Thread or stream, in the trace of the rank."""
    start_ns: Floats
    end_ns: Floats
    own_ns: Floats
    """What it takes when it waits for nothing."""

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in an order in which all that one waits for comes before it."""

    nodes: Nodes
    edges: Edges
    """Ordered by target."""
    rest_ns: Floats
    """Of every start: what no edge explains."""
    end_rest_ns: Floats
    floor_ns: Floats
    """Of what waits for nothing: when it started."""
    contradicted: int
    """Edges that recorded times speak against, and that were left out."""


def assemble(nodes: Nodes, edges: Edges) -> tuple[Graph, Ints]:
    """Puts nodes in order, leaves out edges that point backwards in time, and gives edges their delays; with
    the order that the nodes got."""
    key = np.where(nodes.role == Role.SYNC, nodes.end_ns, nodes.start_ns)
    later = np.isin(nodes.role, (Role.MEET, Role.GPU, Role.HOST))
    meets = edges.where(edges.kind == Edge.COLLECTIVE)
    key = _after_meeting(key, meets)
    marks_first = np.where(nodes.role == Role.MARK, -1, nodes.role)
    order = np.lexsort((np.arange(len(nodes)), marks_first, later, key))
    moved = np.empty(len(order), np.int32)
    moved[order] = np.arange(len(order))
    sorted_nodes = Nodes(*(column[order] for column in _columns(nodes)))  # type: ignore[arg-type]
    source = 2 * moved[edges.source // 2] + edges.source % 2
    target = moved[edges.target]
    forward = source // 2 < target
    by_target = np.flatnonzero(forward)
    by_target = by_target[np.argsort(target[by_target], kind="stable")]
    kept = Edges(
        source[by_target], target[by_target], edges.kind[by_target], edges.at_end[by_target],
        edges.lag_ns[by_target],
    )  # fmt: skip
    return _with_delays(sorted_nodes, kept, int((~forward).sum())), order


def _columns(nodes: Nodes) -> tuple[NDArray[np.generic], ...]:
    return (nodes.rank, nodes.role, nodes.event, nodes.place, nodes.start_ns, nodes.end_ns, nodes.own_ns)


def _after_meeting(key: Floats, meets: Edges) -> Floats:
    """What ends when all have come is told after the last of them."""
    keys = key.copy()
    np.maximum.at(keys, meets.target, key[meets.source // 2])
    np.maximum.at(keys, meets.target, keys[meets.source // 2])
    return keys


def _with_delays(nodes: Nodes, edges: Edges, contradicted: int) -> Graph:
    times = np.empty(2 * len(nodes))
    times[0::2], times[1::2] = nodes.start_ns, nodes.end_ns
    reached = np.where(edges.at_end, nodes.end_ns[edges.target], nodes.start_ns[edges.target])
    seen = reached - times[edges.source]
    lag = np.where(np.isnan(edges.lag_ns), seen, edges.lag_ns)
    _typical_starts(nodes, edges, seen, lag)
    _typical_ends(nodes, edges, seen, lag)
    starts = ~edges.at_end
    earliest = np.full(len(nodes), -np.inf)
    np.maximum.at(earliest, edges.target[starts], (times[edges.source] + lag)[starts])
    free = np.isneginf(earliest)
    rest = np.where(free, 0.0, np.maximum(nodes.start_ns - earliest, 0.0))
    end = nodes.start_ns + nodes.own_ns
    ends = edges.at_end
    np.maximum.at(end, edges.target[ends], (times[edges.source] + lag)[ends])
    end_rest = np.maximum(nodes.end_ns - end, 0.0)
    told = Edges(edges.source, edges.target, edges.kind, edges.at_end, lag)
    floor = np.where(free, nodes.start_ns, -np.inf)
    return Graph(nodes, told, rest, end_rest, floor, contradicted)


def _typical_starts(nodes: Nodes, edges: Edges, seen: Floats, lag: Floats) -> None:
    """Delays of launches, streams and waits, per rank: as seen, but no longer than is usual."""
    last = np.full(len(nodes), -np.inf)
    starts = ~edges.at_end
    arrived = nodes.start_ns[edges.target] - seen
    np.maximum.at(last, edges.target[starts], arrived[starts])
    for kind in (Edge.LAUNCH, Edge.STREAM, Edge.WAIT, Edge.INFERRED):
        mine = edges.kind == kind
        for rank in distinct(nodes.rank[edges.target[mine]]):
            here = mine & (nodes.rank[edges.target] == rank)
            bound = here & (arrived >= last[edges.target] - 1.0)
            usual = usual_delay(seen[bound] if bound.any() else seen[here])
            lag[here] = np.minimum(seen[here], usual)


def usual_delay(seen_ns: Floats) -> float:
    """The median of what binds; a long one is a wait for something else."""
    short = seen_ns[seen_ns <= 2 * EXPLAINED_NS]
    return float(np.median(short)) if len(short) else min(float(np.min(seen_ns)), EXPLAINED_NS)


def _typical_ends(nodes: Nodes, edges: Edges, seen: Floats, lag: Floats) -> None:
    """A synchronisation returns as long after the GPU as it did, where it waited for it."""
    mine = edges.at_end & (edges.kind == Edge.SYNC)
    if mine.any():
        waited = mine & (nodes.end_ns[edges.target] - seen > nodes.start_ns[edges.target])
        usual = usual_delay(seen[waited]) if waited.any() else EXPLAINED_NS
        lag[mine] = np.minimum(seen[mine], usual)
