"""Waits that nothing in the trace says, guessed: only where they are asked for.

torch.distributed makes a collective's stream wait for what its thread launched before, and streams that use
a result for the collective. Which calls wait is in the trace, for what is not: what recorded times contradict
is left out. Other kernels that start late for no known reason wait for what had just ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from mist_megatron.recorded.build import Parts
from mist_megatron.recorded.graph import EXPLAINED_NS, Edge, Edges, Graph, Ints, Role
from mist_megatron.recorded.waits import ROUNDING_NS, WAITS, called
from mist_megatron.traces.collectives import communicates
from mist_megatron.traces.columns import Whole, distinct

NEAR_NS = 10_000.0
"""A kernel starts so soon after what it waited for."""


_NCCL = re.compile(r"nccl|rccl", re.IGNORECASE)
_MOST_TRIES = 64


def inferred_waits(graph: Graph, parts: Sequence[Parts]) -> Edges:
    """Between nodes of the graph: of collectives with what asks for them, and of kernels that start late, on
    a stream that was told to wait since its last launch, with what ended just before on another stream."""
    nodes = graph.nodes
    begins = _begins(graph)
    sources, targets = [], []
    for part in parts:
        gpu = np.flatnonzero((nodes.role == Role.GPU) & (nodes.rank == part.rank))
        by_end = gpu[np.argsort(nodes.end_ns[gpu], kind="stable")]
        ends = nodes.end_ns[by_end]
        calls = called(part.trace, WAITS, 0, int(part.trace.end_ns.max(initial=0)))
        told = part.trace.start_ns[calls]
        node_of = np.full(len(part.trace), -1)
        node_of[nodes.event[gpu]] = gpu
        for source, target in _of_collectives(part, set(calls.tolist())):
            sources.append(2 * int(node_of[source]) + 1)
            targets.append(int(begins[node_of[target]]))
        for node in gpu[graph.rest_ns[gpu] > EXPLAINED_NS].tolist():
            if not _was_told(part, int(nodes.event[node]), told):
                continue
            start = nodes.start_ns[node]
            low, high = np.searchsorted(ends, [start - NEAR_NS, start + ROUNDING_NS])
            others = [one for one in by_end[low:high].tolist() if nodes.place[one] != nodes.place[node]]
            if others:
                sources.append(2 * others[-1] + 1)
                targets.append(node)
    count = len(sources)
    kind = np.full(count, int(Edge.INFERRED))
    return Edges(
        np.array(sources, np.int64),
        np.array(targets, np.int64),
        kind,
        np.zeros(count, np.bool_),
        np.full(count, np.nan),
    )


def _begins(graph: Graph) -> Ints:
    """The node that waits before each node: of members of collectives their arrival."""
    begins = np.arange(len(graph.nodes))
    edges = graph.edges
    arrive = (edges.kind == Edge.COLLECTIVE) & ~edges.at_end
    arrive &= graph.nodes.role[edges.target] == Role.GPU
    begins[edges.target[arrive]] = edges.source[arrive] // 2
    return begins


def _of_collectives(part: Parts, waiting: set[int]) -> Iterator[tuple[int, int]]:
    """What ran on the GPU -> what waits for it, by the order of a thread's calls; nothing where the trace
    itself says what waits for what."""
    trace, launch = part.trace, part.links.launch
    ran = part.played[trace.on_gpu[part.played]]
    ran = ran[launch[ran] >= 0]
    if not waiting or any(sync.waits_on_stream >= 0 for sync in trace.syncs.values()):
        return
    comm = communicates(trace) & trace.names_that(_NCCL.search)
    first = dict(zip(launch[ran[::-1]].tolist(), ran[::-1].tolist(), strict=True))
    last = dict(zip(launch[ran].tolist(), ran.tolist(), strict=True))
    moved = ran[comm[ran]]
    moved = moved[np.argsort(trace.end_ns[moved], kind="stable")]
    order = np.array(sorted({*first, *waiting}), np.int64)
    for place in distinct(trace.place[order]).tolist():
        before, asked, source = -1, -1, -1
        for call in order[trace.place[order] == place].tolist():
            if call in waiting:
                if asked < 0:
                    asked, source = call, before
                continue
            target = first[call]
            if asked >= 0 and not comm[target]:
                source = _ended(part, moved, asked, target)
            apart = asked >= 0 and source >= 0 and trace.place[source] != trace.place[target]
            if apart and trace.end_ns[source] <= trace.start_ns[target] + ROUNDING_NS:
                yield source, target
            before, asked = before if comm[last[call]] else last[call], -1


def _ended(part: Parts, moved: Whole, asked: int, target: int) -> int:
    """The last collective that was launched before a wait and had ended when the waiting kernel began."""
    trace, launch = part.trace, part.links.launch
    until = int(np.searchsorted(trace.end_ns[moved], trace.start_ns[target] + ROUNDING_NS, "right"))
    for event in moved[max(until - _MOST_TRIES, 0) : until][::-1].tolist():
        if trace.start_ns[launch[event]] < trace.start_ns[asked]:
            return int(event)
    return -1


def _was_told(part: Parts, event: int, told_ns: np.ndarray) -> bool:
    """Whether a thread made streams wait between the launch before on this stream and this one."""
    launch = int(part.links.launch[event])
    if launch < 0:
        return False
    at = int(part.trace.start_ns[launch])
    before = part.launch_before(event)
    low, high = np.searchsorted(told_ns, [before, at])
    return bool(high > low)
