"""The same graph with other durations: kernels or operators faster, slower, or gone.

A scaled operator takes so much of its host time, with everything that it calls, and so do the kernels that it
launched. Waiting is no work: what a synchronisation waits for is not scaled, only moved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.recorded.build import Parts
from mist_megatron.recorded.engine import Change
from mist_megatron.recorded.graph import Edge, Floats, Graph, Ints, Role
from mist_megatron.recorded.recording import Recording
from mist_megatron.recorded.repeats import Stretch
from mist_megatron.traces.collectives import communicates
from mist_megatron.traces.columns import NS_PER_S, Kind, Mask, distinct

WANTED = "wanted kernel=REGEX:FACTOR or op=REGEX:FACTOR"


@dataclass(frozen=True, slots=True)
class Scale:
    """`kernel=REGEX:F` or `op=REGEX:F`."""

    what: str
    pattern: re.Pattern[str]
    factor: float
    text: str


class Retimed(NamedTuple):
    """What of a recording got another time, and from where."""

    how: str
    """The profile or datasheet, its curve (collectives), scaled, stretched, host time, gone, or kept."""
    what: str
    kernels: int
    before_s: float
    after_s: float


def parse_scale(text: str) -> Scale:
    """One `--scale`; the factor follows the last colon."""
    what, _, rest = text.partition("=")
    pattern, colon, number = rest.rpartition(":")
    if what not in ("kernel", "op") or not colon or not pattern:
        raise InputError(f"--scale {text}: {WANTED}", details=("try: --scale 'kernel=gemm:0.5'",))
    try:
        factor = float(number)
    except ValueError:
        raise InputError(f"--scale {text}: factor is {number!r}; wanted a number") from None
    if not 0.0 <= factor <= 1e6:
        raise InputError(f"--scale {text}: factor is {number}; wanted 0 or more, at most a million")
    try:
        return Scale(what, re.compile(pattern), factor, text)
    except re.error as error:
        raise InputError(f"--scale {text}: {pattern!r} is no regular expression: {error}") from None


def scaled(
    recording: Recording, scales: Sequence[Scale], change: Change | None = None
) -> tuple[Change, list[Retimed]]:
    """All scales together, of what a change has left; one that meets nothing is refused."""
    graph = recording.graph
    own, lag = changed_of(graph, change)
    told: list[Retimed] = []
    for scale in scales:
        if scale.what == "kernel":
            chosen = _kernels(recording, partial(_named, scale))
            if not len(chosen):
                raise InputError(
                    f"--scale {scale.text}: no kernel of that name", details=_some(recording, Kind.KERNEL)
                )
            told.append(_times(recording, own, lag, chosen, scale))
            continue
        host = _scale_host(recording, own, lag, scale)
        chosen = _kernels(recording, partial(_launched_by, scale))
        if host is None and not len(chosen):
            raise InputError(
                f"--scale {scale.text}: no operator of that name", details=_some(recording, Kind.OPERATOR)
            )
        if host is not None:
            told.append(host)
        if len(chosen):
            told.append(_times(recording, own, lag, chosen, scale))
    return Change(own_ns=own, lag_ns=lag), told


def stretched(
    recording: Recording, stretches: Sequence[Sequence[Stretch]], what: str, change: Change | None = None
) -> tuple[Change, list[Retimed]]:
    """What repeats takes so many times as long, host and kernels, but for collectives; per rank."""
    graph = recording.graph
    own, lag = changed_of(graph, change)
    host_s, after_s, moved_s, moved_after_s, kernels = 0.0, 0.0, 0.0, 0.0, 0
    for part, shift, mine in zip(recording.parts, recording.shifts_ns, stretches, strict=True):
        nodes = np.flatnonzero((graph.nodes.role == Role.GPU) & (graph.nodes.rank == part.rank))
        events = graph.nodes.event[nodes]
        launch = part.links.launch[events]
        at, place = part.trace.start_ns[np.maximum(launch, 0)], part.trace.place[np.maximum(launch, 0)]
        works = (launch >= 0) & ~communicates(part.trace)[events]
        for one in mine:
            inside = works & (place == one.place) & (at >= one.start_ns) & (at < one.end_ns)
            chosen = nodes[inside]
            was = float(work_ns(graph, own, lag, chosen).sum()) / NS_PER_S
            scale_work(graph, own, lag, chosen, np.full(len(chosen), one.factor))
            kernels, moved_s, moved_after_s = (
                kernels + len(chosen),
                moved_s + was,
                moved_after_s + was * one.factor,
            )
            span = np.array([one.start_ns + shift]), np.array([one.end_ns + shift])
            changed = _thread(graph, own, lag, (part.rank, one.place), Covered(*span), one.factor) / NS_PER_S
            host_s, after_s = host_s + changed, after_s + changed * one.factor
    told = [Retimed("host time stretched", what, 0, host_s, after_s)]
    if kernels:
        told.append(Retimed("stretched", what, kernels, moved_s, moved_after_s))
    return Change(own_ns=own, lag_ns=lag), told


def _some(recording: Recording, kind: Kind) -> tuple[str, ...]:
    """Names that are there."""
    names: dict[str, None] = {}
    for trace in recording.traces:
        for event in np.flatnonzero(trace.kind == kind)[:2000].tolist():
            names.setdefault(trace.name_of(event)[:50])
    return (f"some that are there: {', '.join(list(names)[:6])}",) if names else ()


def _kernels(recording: Recording, matches: Callable[[Parts], Mask]) -> Ints:
    """What runs on the GPU, and collectives of gloo, whose event matches."""
    nodes = recording.graph.nodes
    kernels = [np.empty(0, np.int64)]
    for part in recording.parts:
        mine = np.flatnonzero(np.isin(nodes.role, (Role.GPU, Role.HOST)) & (nodes.rank == part.rank))
        kernels.append(mine[matches(part)[nodes.event[mine]]])
    return np.concatenate(kernels)


def _named(scale: Scale, part: Parts) -> Mask:
    return part.trace.names_that(scale.pattern.search)


def _launched_by(scale: Scale, part: Parts) -> Mask:
    """What ran on the GPU for operators of a name, or for what they call."""
    trace = part.trace
    named = trace.names_that(scale.pattern.search) & (trace.kind <= Kind.ANNOTATION)
    inside = named | _inside(part.links.parent, named)
    launch = part.links.launch
    return np.asarray((launch >= 0) & inside[np.maximum(launch, 0)])


def _inside(parent: Ints, named: Mask) -> Mask:
    """Host events that one of these encloses."""
    inside = np.zeros(len(parent), np.bool_)
    above = parent.copy()
    while (above >= 0).any():
        inside |= (above >= 0) & named[np.maximum(above, 0)]
        above = np.where(above >= 0, parent[np.maximum(above, 0)], -1)
    return inside


def _times(recording: Recording, own: Floats, lag: Floats, chosen: Ints, scale: Scale) -> Retimed:
    graph = recording.graph
    before = work_ns(graph, own, lag, chosen)
    scale_work(graph, own, lag, chosen, np.full(len(chosen), scale.factor))
    after = work_ns(graph, own, lag, chosen)
    seconds = float(before.sum()) / NS_PER_S, float(after.sum()) / NS_PER_S
    return Retimed("scaled", scale.text, len(chosen), *seconds)


def changed_of(graph: Graph, change: Change | None) -> tuple[Floats, Floats]:
    """What nodes and edges take after a change, to be changed further."""
    made = change or Change()
    own = graph.nodes.own_ns if made.own_ns is None else made.own_ns
    lag = graph.edges.lag_ns if made.lag_ns is None else made.lag_ns
    return own.copy(), lag.copy()


def transfers(graph: Graph) -> Ints:
    """Node -> the edge that is its transfer, where it is a member of a collective; -1 elsewhere."""
    meeting = np.full(len(graph.nodes), -1, np.int64)
    mine = np.flatnonzero(graph.edges.at_end & (graph.edges.kind == Edge.COLLECTIVE))
    meeting[graph.edges.target[mine]] = mine
    return meeting


def work_ns(graph: Graph, own: Floats, lag: Floats, chosen: Ints) -> Floats:
    """What kernels take: of collectives with known partners the transfer, not the waiting."""
    edge = transfers(graph)[chosen]
    return np.where(edge >= 0, lag[np.maximum(edge, 0)], own[chosen])


def scale_work(graph: Graph, own: Floats, lag: Floats, chosen: Ints, factors: Floats) -> None:
    """Multiplies what kernels take."""
    edge = transfers(graph)[chosen]
    met = edge >= 0
    own[chosen[~met]] *= factors[~met]
    lag[edge[met]] *= factors[met]


def _scale_host(recording: Recording, own: Floats, lag: Floats, scale: Scale) -> Retimed | None:
    """Host time inside operators of a name, on every thread."""
    graph = recording.graph
    before = after = 0.0
    calls = 0
    for part, shift in zip(recording.parts, recording.shifts_ns, strict=True):
        trace = part.trace
        named = trace.names_that(scale.pattern.search) & (trace.kind <= Kind.ANNOTATION)
        calls += int(named.sum())
        for place in distinct(trace.place[named]).tolist():
            mine = np.flatnonzero(named & (trace.place == place))
            covered = Covered(*(at[mine].astype(np.float64) + shift for at in (trace.start_ns, trace.end_ns)))
            changed = _thread(graph, own, lag, (part.rank, place), covered, scale.factor)
            before += changed
            after += changed * scale.factor
    if not calls or before == 0.0:
        return None
    return Retimed("host time scaled", scale.text, 0, before / NS_PER_S, after / NS_PER_S)


class Covered:
    """How much of the time up to a moment lies in some intervals."""

    def __init__(self, start: Floats, end: Floats) -> None:
        order = np.argsort(start, kind="stable")
        low, high = start[order], np.maximum.accumulate(end[order])
        fresh = np.flatnonzero(np.concatenate([[True], low[1:] > high[:-1]]))
        low, high = low[fresh], np.append(high[fresh[1:] - 1], high[-1])
        total = np.cumsum(high - low)
        self._at = np.stack([low, high], 1).ravel()
        self._sum = np.stack([total - (high - low), total], 1).ravel()

    def until(self, at: Floats) -> Floats:
        return np.interp(at, self._at, self._sum, left=0.0)


def _thread(
    graph: Graph, own: Floats, lag: Floats, of: tuple[int, int], covered: Covered, factor: float
) -> float:
    """Shortens what a thread does between its nodes; gives back how long that was."""
    nodes, edges = graph.nodes, graph.edges
    host = (nodes.rank == of[0]) & (nodes.place == of[1]) & (nodes.role <= Role.MARK)
    kinds = (edges.kind == Edge.THREAD) | (edges.kind == Edge.HAND_OVER)
    mine = np.flatnonzero(kinds & host[edges.target] & (lag > 0.0))
    source = edges.source[mine]
    left = np.where(source % 2 == 1, nodes.end_ns[source // 2], nodes.start_ns[source // 2])
    reached = nodes.start_ns[edges.target[mine]]
    inside = np.maximum(covered.until(reached) - covered.until(left), 0.0)
    # A hand-over's time belongs to the thread that it ends on.
    inside = np.minimum(inside, lag[mine])
    lag[mine] -= (1.0 - factor) * inside
    within = np.flatnonzero(host & (nodes.role == Role.SYNC))
    part = covered.until(nodes.end_ns[within]) - covered.until(nodes.start_ns[within])
    part = np.minimum(part, own[within])
    own[within] -= (1.0 - factor) * part
    return float(inside.sum() + part.sum())
