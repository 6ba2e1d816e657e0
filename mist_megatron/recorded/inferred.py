"""Waits that nothing in the trace says, guessed from what had just ended: only where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mist_megatron.recorded.build import Parts
from mist_megatron.recorded.graph import EXPLAINED_NS, Edge, Edges, Graph, Role
from mist_megatron.recorded.waits import ROUNDING_NS, WAITS, called

NEAR_NS = 10_000.0
"""A kernel starts so soon after what it waited for."""


def inferred_waits(graph: Graph, parts: Sequence[Parts]) -> Edges:
    """For kernels that start late for no known reason, on a stream that was told to wait since its last
    launch: what ended just before on another stream of the same rank."""
    nodes = graph.nodes
    sources, targets = [], []
    for part in parts:
        gpu = np.flatnonzero((nodes.role == Role.GPU) & (nodes.rank == part.rank))
        by_end = gpu[np.argsort(nodes.end_ns[gpu], kind="stable")]
        ends = nodes.end_ns[by_end]
        calls = called(part.trace, WAITS, 0, int(part.trace.end_ns.max(initial=0)))
        told = part.trace.start_ns[calls]
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


def _was_told(part: Parts, event: int, told_ns: np.ndarray) -> bool:
    """Whether a thread made streams wait between the launch before on this stream and this one."""
    launch = int(part.links.launch[event])
    if launch < 0:
        return False
    at = int(part.trace.start_ns[launch])
    before = part.launch_before(event)
    low, high = np.searchsorted(told_ns, [before, at])
    return bool(high > low)
