"""A recording on another GPU: what every kernel would take there.

What was measured is scaled by the ratio of what is known of both GPUs, so that what a kernel loses to its own
faults it loses there too. Products, attention and collectives are priced by their sizes, copies to the host
by their bytes. Products of another vendor's GPU are of another library, which has faults of its own: they get
the price itself. All other kernels move memory, and go by its rate but for the time that any kernel takes.
What has no price keeps its time, and is told.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.price.prices import Attention, Collective, Gemm, HostCopy, MemoryPass, Prices, Work
from mist_megatron.recorded.engine import Change
from mist_megatron.recorded.graph import Role
from mist_megatron.recorded.recording import Recording
from mist_megatron.recorded.what_if import Retimed, changed_of, scale_work, work_ns
from mist_megatron.traces.collectives import POINT_TO_POINT, communicates, message_of
from mist_megatron.traces.columns import NS_PER_S, Kind, Message, Trace
from mist_megatron.traces.nesting import Links
from mist_megatron.traces.sizes import COLLECTIVES, TYPES, OperatorWork, knows_sizes_of, listed, work_of

_PRODUCT = re.compile(r"gemm|xmma|nvjet|^Cijk_|flash|fmha|attention", re.IGNORECASE)
"""Kernels that compute more than they move, by their names."""
LARGE_BYTES = 1e9
"""A pass over memory at its full rate."""


@dataclass(frozen=True)
class Device:
    """Prices of one GPU, by the precision of what is computed."""

    name: str
    by_precision: dict[str, Prices]
    gpus_per_node: int
    source: str
    """Which profile or datasheet speaks of it."""
    products_by: str
    """The library that computes products on it."""

    def seconds(self, work: Work, precision: str | None = None) -> float | None:
        """None where the device has no such arithmetic."""
        prices = self.by_precision.get(precision) if precision else next(iter(self.by_precision.values()))
        return None if prices is None else float(np.asarray(prices.of(work).seconds))

    def operator_s(self, recorded: OperatorWork) -> float | None:
        """Of one call."""
        return self.seconds(operator_work(recorded), recorded.precision)


def on_device(recording: Recording, here: Device, there: Device) -> tuple[Change, list[Retimed]]:
    """The recording's graph with times of another GPU."""
    graph = recording.graph
    own, lag = graph.nodes.own_ns.copy(), graph.edges.lag_ns.copy()
    before: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    after: dict[str, float] = defaultdict(float)
    for part in recording.parts:
        nodes = np.flatnonzero((graph.nodes.role == Role.GPU) & (graph.nodes.rank == part.rank))
        events = graph.nodes.event[nodes]
        ways, factors = _ways(part.trace, part.links, events, here, there)
        was = work_ns(graph, own, lag, nodes)
        scale_work(graph, own, lag, nodes, factors)
        now = work_ns(graph, own, lag, nodes)
        for index, way in enumerate(ways):
            counted[way] += 1
            before[way] += round(was[index])
            after[way] += float(now[index])
    source = f"{here.source} to {there.source}"
    told = [
        Retimed(
            "kept" if way.startswith("kept") else source,
            way.removeprefix("kept: "), counted[way], before[way] / NS_PER_S, after[way] / NS_PER_S,
        )
        for way in sorted(counted, key=lambda way: -before[way])
    ]  # fmt: skip
    return Change(own_ns=own, lag_ns=lag), told


def on_more_ranks(
    recording: Recording, ranks: int, device: Device, change: Change | None = None
) -> tuple[Change, list[Retimed]]:
    """Collectives among so many data-parallel ranks; the work of each rank stays. Where groups of several
    sizes communicate, which of them are data-parallel is not said: refused."""
    graph = recording.graph
    own, lag = changed_of(graph, change)
    messages: list[tuple[int, Message]] = []
    for part in recording.parts:
        nodes = np.flatnonzero((graph.nodes.role == Role.GPU) & (graph.nodes.rank == part.rank))
        for node in nodes[communicates(part.trace)[graph.nodes.event[nodes]]].tolist():
            said = message_of(part.trace, part.links, int(graph.nodes.event[node]))
            if said is not None and said.collective.lower() not in POINT_TO_POINT:
                messages.append((node, said))
    sizes = {said.group_size for _, said in messages}
    if len(sizes) != 1 or min(sizes) < 2:
        told = (
            f"groups of {', '.join(map(str, sorted(sizes)))} ranks" if max(sizes, default=0) else "no group"
        )
        raise InputError(f"--dp {ranks}: collectives name {told}; wanted one size, of 2 or more")
    chosen = np.array([node for node, _ in messages], np.int64)
    factors = np.array([_grown(said, ranks, device) for _, said in messages])
    before = float(work_ns(graph, own, lag, chosen).sum()) / NS_PER_S
    scale_work(graph, own, lag, chosen, factors)
    after = float(work_ns(graph, own, lag, chosen).sum()) / NS_PER_S
    what = f"collectives of {sizes.pop()} -> {ranks} ranks" + (
        "" if recording.meetings else ", waits with them"
    )
    return Change(own_ns=own, lag_ns=lag), [Retimed(device.source, what, len(chosen), before, after)]


def _grown(said: Message, ranks: int, device: Device) -> float:
    """Ranks fill one node after the other, as those that were recorded did."""
    known = COLLECTIVES.get(said.collective.lower())
    if known is None or said.dtype not in TYPES:
        return 1.0
    kind, side = known
    moved = float((said.sent if side == "In" else said.received) * TYPES[said.dtype][1])
    seconds = []
    for size in (said.group_size, ranks):
        nodes = -(-size // device.gpus_per_node)
        sizes = (np.array(moved), np.array(float(size)), np.array(float(nodes)))
        seconds.append(device.seconds(Collective(kind, *sizes)))  # type: ignore[arg-type]
    before, after = seconds
    return after / before if before and after is not None else 1.0


def _ways(
    trace: Trace, links: Links, events: np.ndarray, here: Device, there: Device
) -> tuple[list[str], np.ndarray]:
    """How each of these events is re-timed, and by which factor."""
    comm, product = communicates(trace), trace.names_that(_PRODUCT.search)
    memory = _ratio(MemoryPass(np.array(LARGE_BYTES)), here, there) or 1.0
    kernels = trace.length_ns[events][(trace.kind[events] == Kind.KERNEL) & (trace.length_ns[events] > 0)]
    least_ns = float(kernels.min()) if len(kernels) else 0.0
    launched = links.launch[events]
    called = np.where(launched >= 0, links.operator[np.maximum(launched, 0)], -1)
    call_ns = np.bincount(called + 1, trace.length_ns[events])
    known: dict[tuple[int, int], tuple[str, float, float]] = {}
    ways, factors = [], np.ones(len(events))
    for index, event in enumerate(events.tolist()):
        if comm[event]:
            way, factor = _collective(message_of(trace, links, event), here, there)
        elif trace.kind[event] == Kind.COPY and "DtoD" not in trace.name_of(event):
            way, factor = _copy(trace.name_of(event), int(trace.size[event]), here, there)
        else:
            operator = int(called[index])
            name = trace.name_of(operator) if operator >= 0 else ""
            key = (int(trace.name[operator]), int(trace.shapes[operator])) if operator >= 0 else (-1, -1)
            if operator < 0 or not knows_sizes_of(name):
                way, factor = (
                    f"{'products without sizes' if product[event] else 'other kernels'}, by memory rate",
                    moved(float(trace.length_ns[event]), least_ns, memory),
                )
            else:
                if key not in known:
                    known[key] = _sized(trace, name, key[1], here, there)
                way, factor, whole_s = known[key]
                if whole_s > 0.0:
                    factor = whole_s * NS_PER_S / max(float(call_ns[operator + 1]), 1.0)
        ways.append(way)
        factors[index] = factor
    return ways, factors


def moved(length_ns: float, least_ns: float, ratio: float) -> float:
    """Factor of a kernel that moves memory: what the shortest kernel takes, any kernel takes on any GPU."""
    return (min(length_ns, least_ns) + max(length_ns - least_ns, 0.0) * ratio) / max(length_ns, 1.0)


def _sized(trace: Trace, name: str, shapes: int, here: Device, there: Device) -> tuple[str, float, float]:
    """Products and attention: way, factor, and seconds of the whole call where those replace the factor."""
    work = work_of(name, trace.shape_table[shapes]) if shapes >= 0 else None
    if work is None:
        return "kept: products and attention without usual sizes", 1.0, 0.0
    what = "products" if work.kind == "gemm" else "attention"
    slow, fast = here.operator_s(work), there.operator_s(work)
    if slow is None or fast is None or slow <= 0.0:
        return f"kept: {what} of {work.precision}, which have no price", 1.0, 0.0
    if what == "products" and here.products_by != there.products_by:
        return f"products, {here.products_by} to {there.products_by}", 1.0, fast
    return what, fast / slow, 0.0


def operator_work(recorded: OperatorWork) -> Work:
    """What prices are asked for."""
    sizes = [np.array(size) for size in recorded.sizes]
    if recorded.kind == "gemm":
        m, n, k, batch = sizes
        return Gemm(m, n, k, batch)
    b, seq, heads, kv_heads, dim = sizes
    return Attention(b, seq, heads, kv_heads, dim, recorded.kind == "attention_backward")


def _ratio(work: Work, here: Device, there: Device) -> float | None:
    slow, fast = here.seconds(work), there.seconds(work)
    return None if slow is None or fast is None or slow <= 0.0 else fast / slow


def _collective(said: Message | None, here: Device, there: Device) -> tuple[str, float]:
    known = COLLECTIVES.get(said.collective.lower()) if said is not None else None
    if said is None or known is None or said.dtype not in TYPES or said.group_size < 2:
        return "kept: collectives without sizes, or of kinds that have no price", 1.0
    kind, side = known
    moved = (said.sent if side == "In" else said.received) * TYPES[said.dtype][1]
    ranks = [rank for rank in listed(said.ranks.encode()) or [] if isinstance(rank, int)]
    size = float(said.group_size)
    ratios = []
    for device in (here, there):
        nodes = len({rank // device.gpus_per_node for rank in ranks}) if len(ranks) == size else 1
        work = Collective(kind, np.array(float(moved)), np.array(size), np.array(float(nodes)))  # type: ignore[arg-type]
        ratios.append(device.seconds(work))
    if ratios[0] is None or ratios[1] is None or ratios[0] <= 0.0:
        return "kept: collectives without sizes, or of kinds that have no price", 1.0
    return "collectives", ratios[1] / ratios[0]


def _copy(name: str, moved: int, here: Device, there: Device) -> tuple[str, float]:
    if moved <= 0 or "Pageable" in name or not ("HtoD" in name or "DtoH" in name):
        return "kept: copies without bytes, of pageable memory, or between GPUs", 1.0
    work = HostCopy(np.array(float(moved)), "h2d" if "HtoD" in name else "d2h")
    ratio = _ratio(work, here, there)
    return (
        ("copies", ratio)
        if ratio is not None
        else ("kept: copies without bytes, of pageable memory, or between GPUs", 1.0)
    )
