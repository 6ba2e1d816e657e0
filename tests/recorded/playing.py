"""Hand-made traces, read and played."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hand_made import HandMade

from mist_megatron.recorded.engine import Change, Played, play
from mist_megatron.recorded.graph import Edge, Role
from mist_megatron.recorded.recording import Recording, record
from mist_megatron.traces.columns import Trace
from mist_megatron.traces.reader import Reading, read_trace


def trace_of(made: HandMade, reading: Reading | None = None, **header: Any) -> Trace:
    text = json.dumps(made.document(**header)).encode()
    return read_trace(io.BytesIO(text), "made.json", reading)


def recording_of(*made: HandMade, step: int | None = None, waits: str = "known") -> Recording:
    return record([trace_of(one) for one in made], step, waits)


def played_with(
    recording: Recording, lengths_us: dict[str, float], *, without: Sequence[Edge] = ()
) -> Played:
    """Kernels of these names take so long; edges of some kinds count no more."""
    graph = recording.graph
    own, lag = graph.nodes.own_ns.copy(), graph.edges.lag_ns.copy()
    for node in kernels(recording, lambda name: name in lengths_us):
        own[node] = lengths_us[name_of(recording, node)] * 1e3
    for kind in without:
        lag[graph.edges.kind == kind] = -1e18
    return play(graph, Change(own_ns=own, lag_ns=lag))


def name_of(recording: Recording, node: int) -> str:
    nodes = recording.graph.nodes
    return recording.traces[int(nodes.rank[node])].name_of(int(nodes.event[node]))


def kernels(recording: Recording, matches: Callable[[str], bool]) -> list[int]:
    gpu = np.flatnonzero(recording.graph.nodes.role == Role.GPU).tolist()
    return [node for node in gpu if matches(name_of(recording, node))]


def times_of(recording: Recording, played: Played, name: str) -> list[tuple[float, float]]:
    """Start and end of every kernel of a name, in microseconds."""
    return [
        (float(played.start_ns[node]) / 1e3, float(played.end_ns[node]) / 1e3)
        for node in kernels(recording, lambda one: one == name)
    ]


def end_us(played: Played) -> float:
    return float(played.end_ns.max()) / 1e3
