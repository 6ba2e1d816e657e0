"""The traces of one or more ranks as one graph, on one clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mist_megatron.errors import InputError
from mist_megatron.recorded.build import Parts, own_waits, rank_parts
from mist_megatron.recorded.graph import EXPLAINED_NS, Edge, Edges, Graph, Ints, Nodes, Role, assemble
from mist_megatron.recorded.inferred import inferred_waits
from mist_megatron.recorded.steps import Step, steps_of
from mist_megatron.traces.collectives import Meeting, aligned, meetings
from mist_megatron.traces.columns import Trace

WAITS = ("known", "inferred")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What was recorded, ready to be played."""

    traces: tuple[Trace, ...]
    parts: tuple[Parts, ...]
    graph: Graph
    meetings: tuple[Meeting, ...]
    """Collectives that several of the ranks have."""
    shifts_ns: tuple[float, ...]
    steps: tuple[tuple[Step, int, int], ...]
    """Of all ranks: the step, and the nodes of its begin and end in the graph."""
    step_rank: tuple[int, ...]
    """Whose step each of these is."""
    node_of: tuple[Ints, ...]
    """Per rank: node of every event on the GPU; what is none's is -1."""
    notes: tuple[str, ...]

    @property
    def counts(self) -> Counter[str]:
        """Evidence of all ranks together."""
        return sum((part.counts for part in self.parts), Counter())

    @property
    def explained(self) -> float:
        """Share of what ran on the GPU whose start edges explain; to keep a distance explains nothing."""
        nodes, edges = self.graph.nodes, self.graph.edges
        starts = ~edges.at_end & (edges.kind != Edge.NEIGHBOUR)
        known = np.zeros(len(nodes), np.bool_)
        known[edges.target[starts]] = True
        known &= self.graph.rest_ns <= EXPLAINED_NS
        arrive = np.flatnonzero(starts & (edges.kind == Edge.COLLECTIVE))
        known[edges.target[arrive]] &= known[edges.source[arrive] // 2]
        gpu = nodes.role == Role.GPU
        return float(known[gpu].mean()) if gpu.any() else 1.0

    def rank_name(self, position: int) -> int:
        """The number of a rank as the run counts them."""
        rank = self.traces[position].rank
        return position if rank is None else rank


def record(traces: Sequence[Trace], step: int | None = None, waits: str = WAITS[0]) -> Recording:
    """The graph of a whole run, or of one of its steps."""
    notes: list[str] = []
    units = [(trace, device) for trace in traces for device in _devices(trace)]
    traces = [trace for trace, _ in units]
    parts = [
        rank_parts(rank, trace, _window(trace, step), device) for rank, (trace, device) in enumerate(units)
    ]
    notes += [
        f"{part.trace.where}: {len(part.backlog):,} kernels of earlier steps had still to run when step "
        f"{step} began"
        for part in parts if len(part.backlog)
    ]  # fmt: skip
    chosen = [part.played for part in parts]
    links = [part.links for part in parts]
    met, shifts = aligned(traces, meetings(traces, links, chosen, notes), notes)
    for part, shift in zip(parts, shifts, strict=True):
        part.shift_ns = shift
    nodes, edges, offsets = _together(parts)
    edges = _joined([edges, own_waits(parts, offsets)])
    nodes, edges = _meet(
        nodes, edges, met, [part.node_of + by for part, by in zip(parts, offsets, strict=True)]
    )
    graph, order = assemble(nodes, edges)
    if waits == "inferred":
        more = inferred_waits(graph, parts)
        parts[0].counts["waits inferred from collectives and what had just ended"] += len(more)
        joined = _joined([edges, _in_old_numbers(more, order)])
        graph, order = assemble(nodes, joined)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return Recording(
        traces=tuple(traces), parts=tuple(parts), graph=graph, meetings=tuple(met), shifts_ns=tuple(shifts),
        steps=tuple(
            (each, int(place[begin + by]), int(place[end + by]))
            for part, by in zip(parts, offsets, strict=True) for each, begin, end in part.steps
        ),
        step_rank=tuple(part.rank for part in parts for _ in part.steps),
        node_of=tuple(
            np.where(part.node_of >= 0, np.append(place, -1)[part.node_of + by], -1)
            for part, by in zip(parts, offsets, strict=True)
        ),
        notes=tuple(notes),
    )  # fmt: skip


def _devices(trace: Trace) -> list[int | str | None]:
    """A trace of one of our own simulations has all devices in it."""
    return list(dict.fromkeys(place[0] for place in trace.places)) if trace.after else [None]


def _window(trace: Trace, step: int | None) -> Step | None:
    if step is None:
        return None
    steps = {one.number: one for one in steps_of(trace)}
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none: record with a schedule, and call profiler.step()"
        raise InputError(f"{trace.where}: no step {step}; steps in it: {there}")
    return steps[step]


def _together(parts: Sequence[Parts]) -> tuple[Nodes, Edges, list[int]]:
    """Nodes and edges of all ranks under common numbers."""
    every_node, every_edge, offsets, count = [], [], [], 0
    for part in parts:
        nodes, edges = part.finished()
        offsets.append(count)
        every_node.append(nodes)
        every_edge.append(replace(edges, source=edges.source + 2 * count, target=edges.target + count))
        count += len(nodes)
    return _all_nodes(every_node), _joined(every_edge), offsets


def _all_nodes(parts: Sequence[Nodes]) -> Nodes:
    names = ("rank", "role", "event", "place", "start_ns", "end_ns", "own_ns")
    return Nodes(*_columns(parts, names))


def _joined(parts: Sequence[Edges]) -> Edges:
    names = ("source", "target", "kind", "at_end", "lag_ns")
    return Edges(*_columns(parts, names))


def _columns(parts: Sequence[Nodes] | Sequence[Edges], names: Sequence[str]) -> Iterator[NDArray[Any]]:
    """Each as narrow as that of the first, which is the largest."""
    for name in names:
        columns = [getattr(part, name) for part in parts]
        yield np.concatenate(columns, dtype=columns[0].dtype)


def _in_old_numbers(edges: Edges, order: Ints) -> Edges:
    """Edges of an ordered graph in the numbers that its nodes had before."""
    source = 2 * order[edges.source // 2] + edges.source % 2
    return replace(edges, source=source, target=order[edges.target])


def _meet(nodes: Nodes, edges: Edges, met: Sequence[Meeting], node_of: Sequence[Ints]) -> tuple[Nodes, Edges]:
    """Members of a collective arrive one by one, and end when the transfer is over that begins with the
    last."""
    if not met:
        return nodes, edges
    count = len(nodes)
    sources, targets, ends = list[int](), list[int](), list[bool]()
    rows: list[tuple[int, Role, float]] = []
    arrive_of: dict[int, int] = {}
    for meeting in met:
        meet = count + len(rows)
        rows.append((meeting.members[0].rank, Role.MEET, meeting.last_start_ns))
        for member in meeting.members:
            node = node_of[member.rank][member.event]
            arrive = arrive_of[node] = count + len(rows)
            rows.append((member.rank, Role.ARRIVE, float(nodes.start_ns[node])))
            sources += [2 * arrive, 2 * arrive, 2 * meet]
            targets += [node, meet, node]
            ends += [False, False, True]
    moved = edges.target.copy()
    starts = np.flatnonzero(~edges.at_end)
    table = np.arange(count)
    table[list(arrive_of)] = list(arrive_of.values())
    moved[starts] = table[moved[starts]]
    at = np.array([row[2] for row in rows])
    whole = [np.array([int(row[column]) for row in rows], np.int64) for column in (0, 1)]
    none = np.full(len(rows), -1, np.int64)
    nodes.own_ns[list(arrive_of)] = 0.0
    more = Nodes(whole[0], whole[1], none, none, at, at, np.zeros(len(rows)))
    kinds = np.full(len(sources), int(Edge.COLLECTIVE))
    # Who arrives is there at once; the end follows when the transfer is over, as it was seen.
    at_end = np.array(ends)
    links = Edges(
        np.array(sources, np.int64),
        np.array(targets, np.int64),
        kinds,
        at_end,
        np.where(at_end, np.nan, 0.0),
    )
    return _all_nodes([nodes, more]), _joined([replace(edges, target=moved), links])
