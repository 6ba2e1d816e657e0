"""Plays a graph: every node starts when all that it waits for has happened, and takes what it takes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from mist_megatron.recorded.graph import Floats, Graph, Ints

AT_ONCE = 1 << 16
"""Nodes whose numbers are Python's at the same time."""


@dataclass(frozen=True, slots=True)
class Played:
    """When every node ran, and what it waited for last."""

    start_ns: Floats
    end_ns: Floats
    cause: Ints
    """Number of the edge that a start waited for; -1 where it waited for nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is different from the recording; None for what is not."""

    own_ns: Floats | None = None
    lag_ns: Floats | None = None
    rest_ns: Floats | None = None
    end_rest_ns: Floats | None = None


def play(graph: Graph, change: Change | None = None) -> Played:
    """One walk through the nodes."""
    made = change or Change()
    edges = graph.edges
    count = len(graph.nodes)
    by_node = (
        graph.floor_ns, np.searchsorted(edges.target, np.arange(count), "right"),
        graph.rest_ns if made.rest_ns is None else made.rest_ns,
        graph.nodes.own_ns if made.own_ns is None else made.own_ns,
        graph.end_rest_ns if made.end_rest_ns is None else made.end_rest_ns,
    )  # fmt: skip
    by_edge = (edges.source, edges.lag_ns if made.lag_ns is None else made.lag_ns, edges.at_end)
    times, cause = array("d", bytes(16 * count)), np.empty(count, np.int64)
    edge = slot = 0
    for begin in range(0, count, AT_ONCE):
        columns = [column[begin : begin + AT_ONCE].tolist() for column in by_node]
        until = columns[1][-1]
        source, lag, at_end = (column[edge:until].tolist() for column in by_edge)
        before, causes = edge, []
        for start, bound, rest, own, end_rest in zip(*columns, strict=True):
            last, late = -1, float("-inf")
            while edge < bound:
                at = times[source[edge - before]] + lag[edge - before]
                if at_end[edge - before]:
                    if at > late:
                        late = at
                elif at > start:
                    start, last = at, edge
                edge += 1
            start += rest
            end = start + own
            times[slot] = start
            times[slot + 1] = (late if late > end else end) + end_rest
            slot += 2
            causes.append(last)
        cause[begin : begin + AT_ONCE] = causes
    played = np.frombuffer(times)
    return Played(played[0::2], played[1::2], cause)
