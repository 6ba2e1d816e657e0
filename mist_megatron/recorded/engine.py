"""Plays a graph: every node starts when all that it waits for has happened, and takes what it takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mist_megatron.recorded.graph import Floats, Graph, Ints


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
    own = (graph.nodes.own_ns if made.own_ns is None else made.own_ns).tolist()
    lag = (edges.lag_ns if made.lag_ns is None else made.lag_ns).tolist()
    rest = (graph.rest_ns if made.rest_ns is None else made.rest_ns).tolist()
    end_rest = (graph.end_rest_ns if made.end_rest_ns is None else made.end_rest_ns).tolist()
    floor, source, at_end = graph.floor_ns.tolist(), edges.source.tolist(), edges.at_end.tolist()
    bounds = np.searchsorted(edges.target, np.arange(count + 1)).tolist()
    times = [0.0] * (2 * count)
    cause = [-1] * count
    edge = 0
    for node in range(count):
        start, last, late, bound = floor[node], -1, float("-inf"), bounds[node + 1]
        while edge < bound:
            at = times[source[edge]] + lag[edge]
            if at_end[edge]:
                if at > late:
                    late = at
            elif at > start:
                start, last = at, edge
            edge += 1
        start += rest[node]
        end = start + own[node]
        if late > end:
            end = late
        times[2 * node] = start
        times[2 * node + 1] = end + end_rest[node]
        cause[node] = last
    played = np.array(times)
    return Played(played[0::2], played[1::2], np.array(cause, np.int64))
