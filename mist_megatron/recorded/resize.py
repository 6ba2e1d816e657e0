"""A recording of a model with other widths, or shared out among other tensor-parallel ranks: what every
kernel would take.

Products, attention and collectives are scaled by the ratio of their prices at the new and the old size, all
other kernels by the bytes of the tensors that their operator was called with. What has no sizes keeps its
time, and is told; so does the host, which launches as much as before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.price.prices import Collective
from mist_megatron.recorded.build import Parts
from mist_megatron.recorded.engine import Change
from mist_megatron.recorded.graph import Role
from mist_megatron.recorded.recording import Recording
from mist_megatron.recorded.repeats import BACKWARD
from mist_megatron.recorded.retime import Device, moved
from mist_megatron.recorded.what_if import Retimed, changed_of, scale_work, work_ns
from mist_megatron.recorded.widths import Resized, split_product, tensors
from mist_megatron.traces.collectives import POINT_TO_POINT, communicates, message_of
from mist_megatron.traces.columns import NS_PER_S, Kind, Mask, Message, Trace
from mist_megatron.traces.sizes import COLLECTIVES, TYPES, OperatorWork, knows_sizes_of, listed, work_of

SUM = "ncclDevKernel_AllReduce (sum of tensor-parallel ranks)"
"""What a collective is called that was not recorded."""


_INSIDE = re.compile(r"gelu|silu|relu|glu|swish|sigmoid", re.IGNORECASE)
"""Operators of the MLP's inner width."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How a kernel is re-timed."""

    how: str
    what: str
    factor: float


class _Ratios:
    """Factors of one rank's kernels."""

    def __init__(self, part: Parts, to: Resized, device: Device) -> None:
        self.part, self.to, self.device = part, to, device
        self.parameters = _parameters(part.trace, to)
        self.known: dict[tuple[int, int], tuple[_Way, float]] = {}
        trace = part.trace
        real = (trace.kind == Kind.KERNEL) & (trace.length_ns > 0) & ~trace.names_that(SUM.__eq__)
        lengths = trace.length_ns[real]
        self.least_ns = float(lengths.min()) if len(lengths) else 0.0

    def of(self, event: int, communicates_here: bool) -> _Way:
        trace, links = self.part.trace, self.part.links
        if communicates_here:
            return self._collective(message_of(trace, links, event))
        launch = int(links.launch[event])
        operator = int(links.operator[launch]) if launch >= 0 else -1
        while operator >= 0 and trace.shapes[operator] < 0:
            operator = int(links.parent[operator])
        if operator < 0 or trace.kind[operator] != Kind.OPERATOR:
            return _Way("kept", "kernels of operators without sizes", 1.0)
        key = (int(trace.name[operator]), int(trace.shapes[operator]))
        if key not in self.known:
            self.known[key] = self._operator(trace.name_of(operator), key[1])
        way, ratio = self.known[key]
        if way.how == "scaled":
            return replace(way, factor=moved(float(trace.length_ns[event]), self.least_ns, ratio))
        return way

    def _operator(self, name: str, shapes: int) -> tuple[_Way, float]:
        entry = self.part.trace.shape_table[shapes]
        if knows_sizes_of(name):
            work = work_of(name, entry)
            return (_Way("kept", "products and attention without usual sizes", 1.0) if work is None
                    else self._sized(work)), 1.0  # fmt: skip
        sizes = list(tensors(listed(entry.dims)))
        before = sum(float(np.prod(tensor, dtype=np.float64)) for tensor in sizes)
        inside = _INSIDE.search(name) is not None
        after = sum(self.to.elements(tensor, self.parameters, inside=inside) for tensor in sizes)
        if before <= 0.0:
            return _Way("kept", "kernels of operators without sizes", 1.0), 1.0
        if after == before:
            return _Way("kept", "kernels whose tensors have none of the widths", 1.0), 1.0
        return _Way("scaled", "other kernels, by bytes", 1.0), after / before

    def _sized(self, work: OperatorWork) -> _Way:
        if work.kind == "gemm":
            what, sizes = "products", self.to.product(work)
            if sizes is None:
                return _Way("kept", "products of other widths", 1.0)
        else:
            what = "attention"
            b, seq, heads, keys, size = work.sizes
            sizes = (b, seq, heads * self.to.heads, max(keys * self.to.heads, 1.0), size)
        if sizes == work.sizes:
            return _Way("kept", f"{what} of sizes that stay", 1.0)
        before, after = (self.device.operator_s(one) for one in (work, replace(work, sizes=sizes)))
        if not before or after is None:
            return _Way("kept", f"{what} of {work.precision}, which have no price", 1.0)
        return _Way(self.device.source, what, after / before)

    def _collective(self, said: Message | None) -> _Way:
        known = COLLECTIVES.get(said.collective.lower()) if said is not None else None
        if said is None or known is None or said.dtype not in TYPES or said.group_size < 2:
            return _Way("kept", "collectives without sizes, or of kinds that have no price", 1.0)
        kind, side = known
        count = float(said.sent if side == "In" else said.received)
        old = self.to.old
        tokens = count % old.hidden == 0 and count / old.hidden in old.rows | old.local_rows
        shared = tokens and said.group_size == old.tp and said.collective.lower() not in POINT_TO_POINT
        ratio = self.to.hidden / old.hidden if tokens else self.parameters
        ranks = float(self.to.tp if shared else said.group_size)
        what = "collectives of tokens" if tokens else "collectives of parameters"
        if ranks < 2.0:
            return _Way("gone", what, 0.0)
        byte = TYPES[said.dtype][1]
        before = self.collective_s(kind, count * byte, float(said.group_size))
        after = self.collective_s(kind, count * byte * ratio, ranks)
        if not before or after is None:
            return _Way("kept", what, 1.0)
        return _Way(f"curve of {self.device.source}", what, after / before)

    def collective_s(self, kind: str, size: float, ranks: float) -> float | None:
        nodes = np.array(float(-(-int(ranks) // self.device.gpus_per_node)))
        work = Collective(kind, np.array(size), np.array(ranks), nodes)  # type: ignore[arg-type]
        return self.device.seconds(work)


def on_widths(
    recording: Recording, asked: Sequence[Resized], device: Device, change: Change | None = None
) -> tuple[Change, list[Retimed]]:
    """The recording's graph with times of other widths; per rank."""
    graph = recording.graph
    own, lag = changed_of(graph, change)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for part, to in zip(recording.parts, asked, strict=True):
        ratios, comm = _Ratios(part, to, device), communicates(part.trace)
        nodes = np.flatnonzero((graph.nodes.role == Role.GPU) & (graph.nodes.rank == part.rank))
        added = part.trace.names_that(SUM.__eq__)
        mine = nodes[~added[graph.nodes.event[nodes]]]
        ways = [ratios.of(event, bool(comm[event])) for event in graph.nodes.event[mine].tolist()]
        was = work_ns(graph, own, lag, mine)
        scale_work(graph, own, lag, mine, np.array([way.factor for way in ways]))
        now = work_ns(graph, own, lag, mine)
        for index, way in enumerate(ways):
            _count(sums[way.how, way.what], float(was[index]), float(now[index]))
        for node in nodes[added[graph.nodes.event[nodes]]].tolist():
            own[node] = NS_PER_S * _sum_s(part.trace.messages[int(graph.nodes.event[node])], to, ratios)
            _count(
                sums[f"curve of {device.source}", "collectives that were not there"], 0.0, float(own[node])
            )
    told = [
        Retimed(how, what, int(count), before / NS_PER_S, after / NS_PER_S)
        for (how, what), (count, before, after) in sorted(sums.items(), key=lambda one: -one[1][1])
    ]
    return Change(own_ns=own, lag_ns=lag), told


def _count(of: list[float], before: float, after: float) -> None:
    of[0], of[1], of[2] = of[0] + 1, of[1] + before, of[2] + after


def _sum_s(said: Message, to: Resized, ratios: _Ratios) -> float:
    size = said.sent * to.hidden / to.old.hidden * TYPES[said.dtype][1]
    return ratios.collective_s("all_reduce", size, float(to.tp)) or 0.0


def with_sums(trace: Trace, part: Parts, to: Resized) -> Trace:
    """The trace with a collective of no length behind every product that tensor-parallel ranks will sum up,
    on the product's stream, where what follows waits for it."""
    if to.old.attention == {to.old.hidden}:
        raise InputError(
            f"--tp {to.tp}: queries, keys, values and their projection are products of one size in "
            f"{trace.where}: which of them ranks would have to sum up is not said"
        )
    products = []
    backward = _backward(part)
    for event in part.played.tolist():
        launch = int(part.links.launch[event])
        operator = int(part.links.operator[launch]) if launch >= 0 else -1
        if operator < 0 or trace.kind[event] != Kind.KERNEL or trace.shapes[operator] < 0:
            continue
        name = trace.name_of(operator)
        work = work_of(name, trace.shape_table[int(trace.shapes[operator])]) if knows_sizes_of(name) else None
        if work is not None and work.kind == "gemm" and to.summed(work, back=bool(backward[operator])):
            products.append((event, work))
    # One operator may launch several kernels: the sum follows the last.
    last = {int(part.links.operator[part.links.launch[event]]): (event, work) for event, work in products}
    messages = []
    for _, work in last.values():
        count = int(work.sizes[0] * work.sizes[1])
        messages.append(
            Message(
                collective="allreduce", dtype=_DTYPES[work.precision], sent=count, received=count,
                group_size=to.tp, group="", ranks="", sequence=-1,
            )
        )  # fmt: skip
    return trace.with_events(SUM, [event for event, _ in last.values()], messages)


def _backward(part: Parts) -> Mask:
    """What lies inside an operator of autograd's backward pass, or is one."""
    named, above = part.trace.names_that(BACKWARD.search), np.arange(len(part.trace))
    backward = np.zeros(len(part.trace), np.bool_)
    while (there := above >= 0).any():
        backward |= there & named[np.maximum(above, 0)]
        above = np.where(there, part.links.parent[np.maximum(above, 0)], -1)
    return backward


_DTYPES = {"bf16": "BFloat16", "fp16": "Half", "fp32": "Float", "fp8": "BFloat16"}


def _parameters(trace: Trace, to: Resized) -> float:
    """How many times as many parameters: those of products, each counted as often as it is used."""
    before = after = 0.0
    called = np.flatnonzero((trace.kind == Kind.OPERATOR) & (trace.shapes >= 0))
    for event in called.tolist():
        name = trace.name_of(event)
        if not knows_sizes_of(name):
            continue
        work = work_of(name, trace.shape_table[int(trace.shapes[event])])
        if work is None or work.kind != "gemm":
            continue
        places, new = split_product(work, to.old.rows), to.product(work)
        if places is not None and new is not None:
            before += work.sizes[places[1]] * work.sizes[places[2]]
            after += new[places[1]] * new[places[2]]
    return after / before if before else 1.0
