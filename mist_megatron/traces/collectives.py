"""Collectives in traces: which kernels they are, what they say of themselves, and who meets whom.

A collective's kernel runs from the moment its own rank comes until the last rank has come and the data have
moved. Only all ranks together tell the one from the other: the transfer is what lies between the last start
and the end. Members find each other by the name of their communicator and the number in it, else by their
order.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mist_megatron.traces.columns import Kind, Mask, Message, Trace, Whole
from mist_megatron.traces.nesting import Links

_KERNEL = re.compile(
    r"nccl|rccl|\bep::(inter|intra)node|deep_ep|cross_device_reduce|AllReduceKernel|userbuffers|nvshmem",
    re.IGNORECASE,
)
_ANNOTATION = re.compile(r"^(?:nccl|gloo|rccl):(\w+)$")
POINT_TO_POINT = frozenset({"send", "recv"})
MOST_APART_NS = 1e6
"""Ends of one collective; what ends further apart is not the same one ..."""
GLOO, GROUP_OF_GLOO = "gloo:", "gloo"
GLOO_APART_NS = 2e7
"""... but for those that threads of a host run, which stand still for as long as others have its cores."""
_ROUNDS = 50
"""Clocks of ranks that meet only through others settle in as many rounds as there are others between."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's kernel of a collective."""

    rank: int
    """Position among the traces."""
    event: int
    start_ns: float
    end_ns: float
    """On the common clock."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective, with all members that are in the traces."""

    group: str
    """Communicator as it is called, or the stream that stands for it."""
    name: str
    message: Message | None
    members: tuple[Member, ...]

    @property
    def last_start_ns(self) -> float:
        return max(member.start_ns for member in self.members)

    @property
    def transfer_ns(self) -> float:
        """From when all are there until the last has ended."""
        return max(max(member.end_ns for member in self.members) - self.last_start_ns, 0.0)

    @property
    def last_rank(self) -> int:
        """For whom the others waited."""
        return max(self.members, key=lambda member: member.start_ns).rank


def communicates(trace: Trace) -> Mask:
    """Kernels of collectives, by their names or by what they say of themselves."""
    mask = (trace.kind == Kind.KERNEL) & trace.names_that(_KERNEL.search)
    said = [event for event in trace.messages if trace.kind[event] == Kind.KERNEL]
    mask[said] = True
    return np.asarray(mask)


def message_of(trace: Trace, links: Links, event: int) -> Message | None:
    """What a kernel says of its message, or else what its launch lies in."""
    if event in trace.messages:
        return trace.messages[event]
    host = int(links.launch[event])
    host = int(links.parent[host]) if host >= 0 else -1
    while host >= 0:
        if host in trace.messages:
            return trace.messages[host]
        named = _ANNOTATION.match(trace.name_of(host))
        if named is not None:
            return _from_annotation(trace, host, named.group(1))
        host = int(links.parent[host])
    return None


def gloo_message(name: str) -> Message | None:
    """Gloo names a collective, and neither its sizes nor its ranks."""
    if not name.startswith(GLOO):
        return None
    return Message(
        collective=name.removeprefix(GLOO), dtype="", sent=0, received=0, group_size=0, group="", ranks="",
        sequence=-1,
    )  # fmt: skip


def _from_annotation(trace: Trace, event: int, collective: str) -> Message | None:
    """Older traces say the shape of what is sent on the annotation around it, and no group."""

    shapes = int(trace.shapes[event])
    if shapes < 0:
        return None
    entry = trace.shape_table[shapes]
    try:
        dims, types = json.loads(entry.dims), json.loads(entry.types or b"[]")
        count = sum(
            int(np.prod([int(size) for size in one])) for one in dims if isinstance(one, list) and one
        )
    except (ValueError, TypeError):
        return None
    kind = str(types[0]) if isinstance(types, list) and types else ""
    return Message(
        collective=collective, dtype=kind, sent=count, received=count, group_size=0, group="", ranks="",
        sequence=-1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Call:
    event: int
    message: Message | None
    name: str


def meetings(
    traces: Sequence[Trace], links: Sequence[Links], chosen: Sequence[Whole], notes: list[str]
) -> list[Meeting]:
    """All collectives that at least two of the traces have, on clocks that their files give."""
    groups: dict[tuple[str, str], dict[int, list[_Call]]] = defaultdict(dict)
    for rank, (trace, linked, events) in enumerate(zip(traces, links, chosen, strict=True)):
        for key, calls in _by_group(trace, linked, events).items():
            groups[key][rank] = calls
    meetings_of_all: list[Meeting] = []
    for (group, kind), by_rank in groups.items():
        if len(by_rank) > 1:
            meetings_of_all += _matched(group, kind, by_rank, traces, notes)
    return meetings_of_all


def _by_group(trace: Trace, links: Links, events: Whole) -> dict[tuple[str, str], list[_Call]]:
    """A rank's collectives by communicator, in order; where none is named, by stream."""
    of_gloo = trace.names_that(lambda name: name.startswith(GLOO))
    comm = events[(communicates(trace) | of_gloo)[events]]
    # Two of gloo's threads begin with what was asked for one after the other at once.
    begun = np.where(of_gloo[comm], links.launch[comm], comm)
    comm = comm[np.argsort(trace.start_ns[begun], kind="stable")]
    streams: dict[int, int] = {}
    by_group: dict[tuple[str, str], list[_Call]] = defaultdict(list)
    for event in comm.tolist():
        said = message_of(trace, links, event)
        name = trace.name_of(event)
        if said is not None and said.group and said.collective.lower() in POINT_TO_POINT:
            ends = sorted((said.source, said.target)) if said.source >= 0 and said.target >= 0 else []
            key = (f"{said.group} {said.ranks}", "p2p " + "-".join(map(str, ends)))
        elif said is not None and said.group:
            key = (f"{said.group} {said.ranks}", "")
        elif of_gloo[event]:
            key = (GROUP_OF_GLOO, "")
        else:
            number = streams.setdefault(int(trace.place[event]), len(streams))
            key = (f"stream {number}", "")
        by_group[key].append(_Call(event, said, name))
    return by_group


def _matched(
    group: str, kind: str, by_rank: Mapping[int, list[_Call]], traces: Sequence[Trace], notes: list[str]
) -> list[Meeting]:
    sides: dict[int, dict[object, _Call]] = {}
    for rank, calls in by_rank.items():
        numbered = all(call.message is not None and call.message.sequence >= 0 for call in calls)
        if numbered and not kind and len({_sequence(call) for call in calls}) == len(calls):
            sides[rank] = {_sequence(call): call for call in calls}
        else:
            sides[rank] = dict(enumerate(calls))
    if not all(_sequence_keys(side) for side in sides.values()):
        sides = {rank: dict(enumerate(calls)) for rank, calls in by_rank.items()}
        names = {tuple(_plain(call.name) for call in calls) for calls in by_rank.values()}
        if kind == "" and len(names) > 1:
            counts = sorted({len(calls) for calls in by_rank.values()})
            notes.append(
                f"collectives of {group} differ between ranks ({'/'.join(map(str, counts))} of them): "
                "not matched"
            )
            return []
    matched = []
    for key in dict.fromkeys(key for side in sides.values() for key in side):
        there = {rank: side[key] for rank, side in sides.items() if key in side}
        if len(there) < 2:
            continue
        first = next(iter(there.values()))
        members = tuple(
            Member(rank, call.event, _absolute(traces[rank], call.event), _ended(traces[rank], call.event))
            for rank, call in there.items()
        )
        label = first.message.collective if first.message is not None else _plain(first.name)
        matched.append(Meeting(group, label, first.message, members))
    return matched


def _sequence_keys(side: Mapping[object, _Call]) -> bool:
    return all(isinstance(key, tuple) for key in side)


def _sequence(call: _Call) -> tuple[str, int]:
    assert call.message is not None
    return call.message.collective, call.message.sequence


def _plain(name: str) -> str:
    return name.split("(")[0].removeprefix("void ")


def _absolute(trace: Trace, event: int) -> float:
    return float(trace.start_ns[event])


def _ended(trace: Trace, event: int) -> float:
    return float(trace.start_ns[event] + trace.length_ns[event])


def clock_shifts(traces: Sequence[Trace], met: Sequence[Meeting]) -> list[float]:
    """Nanoseconds to add to each trace's times so that collectives end together; a collective ends on all its
    ranks within a few microseconds, whatever their clocks say."""
    first = min((trace.origin_ns for trace in traces), default=0)
    shifts = [float(trace.origin_ns - first) for trace in traces]
    for _ in range(_ROUNDS):
        off: dict[int, list[float]] = defaultdict(list)
        for meeting in met:
            ends = {member.rank: member.end_ns + shifts[member.rank] for member in meeting.members}
            middle = float(np.median(list(ends.values())))
            for rank, end in ends.items():
                off[rank].append(middle - end)
        moved = {rank: float(np.median(values)) for rank, values in off.items()}
        if not moved or max(map(abs, moved.values())) < 1.0:
            break
        for rank, by in moved.items():
            shifts[rank] += by
    lowest = min(shifts, default=0.0)
    return [shift - lowest for shift in shifts]


def on_common_clock(met: Sequence[Meeting], shifts: Sequence[float]) -> list[Meeting]:
    """The same collectives with their members' times moved."""
    return [
        Meeting(
            meeting.group, meeting.name, meeting.message,
            tuple(
                Member(
                    member.rank, member.event, member.start_ns + shifts[member.rank],
                    member.end_ns + shifts[member.rank],
                )
                for member in meeting.members
            ),
        )
        for meeting in met
    ]  # fmt: skip


def aligned(
    traces: Sequence[Trace], met: Sequence[Meeting], notes: list[str]
) -> tuple[list[Meeting], list[float]]:
    """Collectives on a common clock, and what it adds to each trace's; those whose ends disagree were matched
    wrongly (a sampled trace, say) and are left alone."""
    shifts = clock_shifts(traces, met)
    same = [meeting for meeting in on_common_clock(met, shifts) if _ends_together(meeting)]
    if len(same) < len(met):
        notes.append(
            f"{len(met) - len(same)} of {len(met)} collectives end more than {MOST_APART_NS / 1e6:.0f} ms "
            "apart on their ranks: taken for different ones, and left as they are"
        )
        kept = {tuple((one.rank, one.event) for one in meeting.members) for meeting in same}
        met = [meeting for meeting in met if tuple((one.rank, one.event) for one in meeting.members) in kept]
        shifts = clock_shifts(traces, met)
    return on_common_clock(met, shifts), shifts


def _ends_together(meeting: Meeting) -> bool:
    ends = [member.end_ns for member in meeting.members]
    return max(ends) - min(ends) <= (GLOO_APART_NS if meeting.group == GROUP_OF_GLOO else MOST_APART_NS)


def waited_for(met: Sequence[Meeting]) -> Counter[int]:
    """Rank -> nanoseconds that others waited for it."""
    counts: Counter[int] = Counter()
    for meeting in met:
        last = meeting.last_start_ns
        waited = sum(last - member.start_ns for member in meeting.members)
        counts[meeting.last_rank] += round(waited)
    return counts
