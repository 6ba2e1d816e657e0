"""Per communicator: how long data moved, how long ranks waited for others, and for whom."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from mist_megatron.recorded.engine import Played
from mist_megatron.recorded.graph import Role
from mist_megatron.recorded.recording import Recording
from mist_megatron.recorded.usage import CommunicatorTime, Window
from mist_megatron.traces.collectives import Meeting, Member, communicates, message_of
from mist_megatron.traces.columns import NS_PER_S, Message
from mist_megatron.traces.sizes import TYPES


def communicators(
    recording: Recording, played: Played, told: tuple[Window, ...]
) -> tuple[CommunicatorTime, ...]:
    """Of what begins in the windows; longest first."""
    matched: dict[tuple[str, str], list[Meeting]] = defaultdict(list)
    inside: set[tuple[int, int]] = set()
    for meeting in recording.meetings:
        moved = _as_played(meeting, recording, played)
        inside.update((member.rank, member.event) for member in meeting.members)
        if any(_within(member, told) for member in moved.members):
            matched[meeting.group, meeting.name].append(moved)
    times = [_of_meetings(key, met, recording) for key, met in matched.items()]
    times += _alone(recording, played, told, inside)
    return tuple(sorted(times, key=lambda one: -(one.transfer_s + one.waited_s)))


def size_of(message: Message | None) -> int:
    """Bytes of the larger side; 0 where it is not said."""
    if message is None or message.dtype not in TYPES:
        return 0
    return max(message.sent, message.received) * TYPES[message.dtype][1]


def _as_played(meeting: Meeting, recording: Recording, played: Played) -> Meeting:
    members = []
    for member in meeting.members:
        node = recording.node_of[member.rank][member.event]
        members.append(
            Member(member.rank, member.event, float(played.start_ns[node]), float(played.end_ns[node]))
        )
    return Meeting(meeting.group, meeting.name, meeting.message, tuple(members))


def _within(member: Member, told: tuple[Window, ...]) -> bool:
    window = told[member.rank]
    return window.start_ns <= member.start_ns < window.end_ns


def _of_meetings(key: tuple[str, str], met: list[Meeting], recording: Recording) -> CommunicatorTime:
    waited_for: Counter[int] = Counter()
    mean_s = 0.0
    for meeting in met:
        waits = [meeting.last_start_ns - member.start_ns for member in meeting.members]
        waited_for[recording.rank_name(meeting.last_rank)] += round(sum(waits))
        mean_s += sum(waits) / len(waits) / NS_PER_S
    return CommunicatorTime(
        group=key[0], collective=key[1], calls=len(met),
        size_bytes=sum(size_of(meeting.message) for meeting in met),
        transfer_s=sum(meeting.transfer_ns for meeting in met) / NS_PER_S,
        waited_s=mean_s,
        waited_for=tuple((rank, waited / NS_PER_S) for rank, waited in waited_for.most_common()),
        matched=True,
    )  # fmt: skip


def _alone(
    recording: Recording, played: Played, told: tuple[Window, ...], matched: set[tuple[int, int]]
) -> list[CommunicatorTime]:
    """Collectives whose partners are not in the traces: how long they waited cannot be told."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    nodes = recording.graph.nodes
    for window in told:
        part = recording.parts[window.rank]
        comm = communicates(part.trace)
        mine = np.flatnonzero((nodes.role == Role.GPU) & (nodes.rank == window.rank))
        for node in mine[comm[nodes.event[mine]]].tolist():
            event, start = int(nodes.event[node]), float(played.start_ns[node])
            if (window.rank, event) in matched or not window.start_ns <= start < window.end_ns:
                continue
            said = message_of(part.trace, part.links, event)
            stream = part.trace.places[int(part.trace.place[event])][1]
            group = f"{said.group} {said.ranks}" if said is not None and said.group else f"stream {stream}"
            name = said.collective if said is not None else part.trace.name_of(event).split("(")[0]
            seconds[group, name] += float(played.end_ns[node] - played.start_ns[node]) / NS_PER_S
            calls[group, name] += 1
            sizes[group, name] += size_of(said)
    return [
        CommunicatorTime(
            group=group, collective=name, calls=calls[group, name], size_bytes=sizes[group, name],
            transfer_s=total, waited_s=0.0, waited_for=(), matched=False,
        )
        for (group, name), total in seconds.items()
    ]  # fmt: skip
