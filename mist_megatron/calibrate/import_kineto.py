"""Traces of the PyTorch profiler (Kineto): products, attention, copies and collectives with their sizes.

A kernel belongs to the operator that made its launch; with `record_shapes=True` the operator carries its
sizes. NCCL's kernels carry message size, type and group themselves, copies their bytes. All kernels of one
call are one measurement; calls of one shape become one point with their spread.

A collective's kernel also waits until the last rank arrives: what it takes is known only from the traces of
all its ranks together, from when the last one came.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, NoReturn

import numpy as np

from mist_megatron.calibrate.imported import UNKNOWN_DEVICE, Hints, Imported, identity_of, text_of
from mist_megatron.calibrate.measurements import SIZES, Conditions, Measurement, checked
from mist_megatron.errors import InputError
from mist_megatron.traces.collectives import Meeting, aligned, communicates, meetings
from mist_megatron.traces.columns import NS_PER_S, Kind, Message, Shapes, Trace
from mist_megatron.traces.nesting import Links, link
from mist_megatron.traces.sizes import COLLECTIVES, TYPES, is_count, knows_sizes_of, listed, work_of

Shape = tuple[float, ...]

_COPIES = (("Memcpy HtoD (Pinned", "h2d"), ("Memcpy DtoH (Device -> Pinned", "d2h"))


@dataclass(frozen=True)
class _Key:
    kind: str
    label: str
    precision: str
    shape: Shape
    strided: bool = False


@dataclass
class _Found:
    """Durations in seconds by what ran, and what could not be used."""

    seconds: dict[_Key, list[float]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, key: _Key, seconds: float) -> None:
        self.seconds.setdefault(key, []).append(seconds)

    def skip(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def read_kineto(traces: Sequence[Trace], hints: Sequence[Hints]) -> list[Imported]:
    """All that a profile can use of the traces, each on its own but for collectives."""
    links = [link(trace) for trace in traces]
    kept = [_Found() for _ in traces]
    for trace, linked, work in zip(traces, links, kept, strict=True):
        _copies(trace, work)
        _operators(trace, linked, work)
    for group in _runs(traces):
        _collectives([(traces[k], links[k], kept[k], hints[k]) for k in group])
        if not any(kept[k].seconds for k in group):
            _nothing(traces[group[0]], kept[group[0]])
    return [
        _imported(work, trace.header, trace.where, hint)
        for trace, work, hint in zip(traces, kept, hints, strict=True)
    ]  # fmt: skip


def _missing(trace: Trace) -> str:
    """What would have had to be recorded."""
    if trace.other_devices and not trace.on_gpu.any():
        return (
            f"it is of a device that is not known here ({', '.join(trace.other_devices[:3])}); wanted a GPU's"
        )
    if not trace.on_gpu.any():
        return "nothing in it ran on a GPU"
    return "none of them has usual sizes" if trace.shape_table else "shapes were not recorded"


def _nothing(trace: Trace, work: _Found) -> NoReturn:
    """No rank of a run measures anything; a collective counts for one of its ranks."""
    raise InputError(
        f"{trace.where}: {trace.events_read} events, but no product, attention, copy or "
        f"collective with its size: {_missing(trace)}",
        details=(
            *(f"{reason}: {count}" for reason, count in work.left_out.items()),
            "try: torch.profiler with CUDA activities and record_shapes=True",
        ),
    )


def _runs(traces: Sequence[Trace]) -> list[list[int]]:
    """Traces that are ranks of one run: of one size, each of another rank."""
    by_world: dict[int | None, list[int]] = defaultdict(list)
    for place, trace in enumerate(traces):
        by_world[trace.world].append(place)
    runs: list[list[int]] = []
    for world, places in by_world.items():
        ranks = [traces[place].rank for place in places]
        if world is not None and world > 1 and None not in ranks and len(set(ranks)) == len(ranks):
            runs.append(places)
        else:
            runs += [[place] for place in places]
    return runs


def _operators(trace: Trace, links: Links, kept: _Found) -> None:
    """Every call of an operator with all kernels that it launched itself."""
    ran = np.flatnonzero((trace.kind == Kind.KERNEL) & ~communicates(trace))
    launch = links.launch[ran]
    operator = np.where(launch >= 0, links.operator[np.maximum(launch, 0)], -1)
    lost = int((operator < 0).sum())
    if lost:
        kept.left_out["kernels that no recorded operator launched"] = lost
    seconds = np.bincount(operator[operator >= 0], trace.length_ns[ran][operator >= 0] / NS_PER_S, len(trace))
    for event in np.unique(operator[operator >= 0]).tolist():
        name = trace.name_of(event)
        if knows_sizes_of(name):
            shapes = int(trace.shapes[event])
            _operator(name, trace.shape_table[shapes] if shapes >= 0 else None, float(seconds[event]), kept)


def _operator(name: str, shapes: Shapes | None, seconds: float, kept: _Found) -> None:
    """One call with all its kernels."""
    if seconds <= 0.0:
        return
    if shapes is None or not shapes.types:
        kept.skip(f"{name} without shapes (record_shapes was off)")
        return
    work = work_of(name, shapes)
    if work is None or (work.kind != "gemm" and not work.causal):
        kept.skip(f"{name} of unusual shape, type or mask")
    else:
        kept.add(_Key(work.kind, "", work.precision, work.sizes), seconds)


def _copies(trace: Trace, kept: _Found) -> None:
    for event in np.flatnonzero(trace.kind == Kind.COPY).tolist():
        name, moved = trace.name_of(event), int(trace.size[event])
        seconds = float(trace.length_ns[event]) / NS_PER_S
        direction = next((way for start, way in _COPIES if name.startswith(start)), None)
        if direction is None:
            if "HtoD" in name or "DtoH" in name:
                kept.skip("copies of pageable host memory")
        elif not is_count(moved) or not seconds:
            kept.skip("copies without bytes or duration")
        else:
            kept.add(_Key("copy", direction, "bytes", (float(moved),)), seconds)


def _collectives(run: Sequence[tuple[Trace, Links, _Found, Hints]]) -> None:
    """Transfers of collectives whose ranks are all there; those of others are left out and told."""
    traces, links = [one[0] for one in run], [one[1] for one in run]
    comm = [np.flatnonzero(communicates(trace)) for trace in traces]
    notes: list[str] = []
    met, _ = aligned(traces, meetings(traces, links, comm, notes), notes)
    for note in notes:
        run[0][2].skip(note)
    used = [0] * len(traces)
    for meeting in met:
        for member in meeting.members:
            used[member.rank] += 1
        _, _, kept, hints = run[meeting.members[0].rank]
        _collective(meeting, traces, kept, hints)
    for place, events in enumerate(comm):
        alone = len(events) - used[place]
        if alone:
            reason = (
                "collectives of one rank alone, which also wait for the others (give the traces of all ranks)"
            )
            run[place][2].left_out[reason] = alone


def _collective(meeting: Meeting, traces: Sequence[Trace], kept: _Found, hints: Hints) -> None:
    said = meeting.message
    known = COLLECTIVES.get(said.collective.lower()) if said is not None else None
    if known is None or said is None:
        kept.skip("NCCL kernels without message size, or of a collective that no plan uses")
        return
    kind, side = known
    width = TYPES.get(said.dtype)
    count = said.sent if side == "In" else said.received
    size = said.group_size or len(meeting.members)
    # Where no group is named, sizes are of what a rank gives: all that can be told of is what keeps its size.
    if not is_count(count) or width is None or size < 2 or (not said.group and kind != "all_reduce"):
        kept.skip("NCCL kernels without message size or group")
        return
    members = _members(said, size) or _numbers(meeting, traces, size)
    if len(meeting.members) < size or members is None:
        kept.skip("collectives of which not all ranks are here (give the traces of all ranks)")
        return
    nodes, strided = _placed(members, hints.gpus_per_node, traces[meeting.members[0].rank].where)
    ranks = 2.0 if kind == "send_recv" else float(size)
    shape = (float(count * width[1]), ranks, float(min(nodes, ranks)))
    if meeting.transfer_ns > 0.0:
        kept.add(_Key("collective", kind, "bytes", shape, strided), meeting.transfer_ns / NS_PER_S)


def _numbers(meeting: Meeting, traces: Sequence[Trace], size: int) -> list[int] | None:
    """Ranks of all members, where the group does not list them."""
    ranks = [traces[member.rank].rank for member in meeting.members]
    known = [rank for rank in ranks if rank is not None]
    return sorted(known) if len(known) == size else None


def _members(said: Message, size: int) -> list[int] | None:
    """Global ranks of the group; long lists are printed with dots."""
    ranks = listed(said.ranks.encode()) if said.ranks.startswith("[") else None
    if ranks is None or len(ranks) != size or not all(isinstance(rank, int) for rank in ranks):
        return None
    return sorted(rank for rank in ranks if isinstance(rank, int))


class _Placement(NamedTuple):
    nodes: int
    strided: bool


def _placed(members: Sequence[int], per_node: int | None, where: str) -> _Placement:
    """Where the ranks of a group lie."""
    strided = any(b - a != 1 for a, b in pairwise(members))
    if per_node is not None:
        return _Placement(len({rank // per_node for rank in members}), strided)
    if members[-1] >= 8:
        raise InputError(
            f"{where}: a group has ranks {members[0]} to {members[-1]}; which share a node is not said",
            details=("try: --gpus-per-node 8",),
        )
    return _Placement(1, strided)


def _imported(kept: _Found, header: Mapping[str, object], where: str, hints: Hints) -> Imported:
    conditions: dict[str, Conditions] = {}
    points = []
    for key, seconds in sorted(kept.seconds.items(), key=lambda item: repr(item[0])):
        if key.precision not in conditions:
            conditions[key.precision] = Conditions(
                identity=identity_of(where, key.precision), device=_device(header, hints),
                backend="kineto", precision=key.precision, date=_date(header) or hints.date,
                versions=_versions(header),
            )  # fmt: skip
        times = np.array(seconds)
        point = Measurement(
            kind=key.kind, label=key.label, strided=key.strided,
            sizes=dict(zip(SIZES[key.kind], key.shape, strict=True)),
            seconds=float(np.median(times)), spread=float(times.std() / times.mean()),
            conditions=conditions[key.precision].identity,
        )  # fmt: skip
        points.append(checked(point, f"{where}: {key.kind} {key.label} {key.shape}"))
    notes = tuple(f"{reason}: {count} left out" for reason, count in kept.left_out.items())
    return Imported(kind="kineto", conditions=tuple(conditions.values()), points=tuple(points), notes=notes)


def _device(header: Mapping[str, object], hints: Hints) -> str:
    properties = header.get("deviceProperties")
    names = {
        text_of(item, "name") for item in (properties if isinstance(properties, list) else [])
        if isinstance(item, dict)
    } - {""}  # fmt: skip
    return hints.device or (names.pop() if len(names) == 1 else UNKNOWN_DEVICE)


def _date(header: Mapping[str, object]) -> str:
    match = re.search(r"\d{4}-\d{2}-\d{2}", text_of(header, "date"))
    return match.group(0) if match else ""


def _versions(header: Mapping[str, object]) -> dict[str, str]:
    named = {"cuda_driver": "cuda_driver_version", "cuda": "cuda_runtime_version"}
    versions = {ours: text_of(header, theirs) for ours, theirs in named.items()}
    distributed = header.get("distributedInfo")
    versions["nccl"] = text_of(distributed, "nccl_version") if isinstance(distributed, dict) else ""
    return {name: value for name, value in versions.items() if value}
