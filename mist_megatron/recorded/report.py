"""A replay as one document: what `replay --json` prints and what the page is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from mist_megatron.recorded.communicators import communicators
from mist_megatron.recorded.engine import Played
from mist_megatron.recorded.graph import Role
from mist_megatron.recorded.recording import Recording
from mist_megatron.recorded.usage import (
    CommunicatorTime,
    KernelTime,
    RankTime,
    rank_times,
    step_lengths,
    top_kernels,
    windows,
)
from mist_megatron.recorded.what_if import Retimed
from mist_megatron.traces.columns import NS_PER_S

TOP_KERNELS = 12


@dataclass(frozen=True, kw_only=True)
class Page:
    """What one playing of a recording tells."""

    step: int | None
    """Number of the step that is told; None where the whole recording is."""
    step_s: float
    """Its time: the longest of the ranks'."""
    steps: dict[int, list[tuple[int, float]]]
    """Rank -> its steps by number, with seconds."""
    median_step_s: float | None
    """Of all steps of all ranks but the first, which pays for allocations."""
    span_s: dict[int, float]
    """Rank -> from the first to the last that was played."""
    ranks: tuple[RankTime, ...]
    kernels: tuple[KernelTime, ...]
    communicators: tuple[CommunicatorTime, ...]


def page_of(recording: Recording, played: Played, step: int | None) -> Page:
    """Everything that the page shows of one playing."""
    told = windows(recording, played, step)
    times = rank_times(recording, played, told)
    by_place = step_lengths(recording, played)
    later = [seconds for steps in by_place.values() for _, seconds in (sorted(steps)[1:] or steps)]
    return Page(
        step=told[0].step if told else None,
        step_s=max((one.window_s for one in times), default=0.0),
        steps={recording.rank_name(place): sorted(steps) for place, steps in by_place.items()},
        median_step_s=median(later) if later else None,
        span_s=_spans(recording, played),
        ranks=times,
        kernels=top_kernels(recording, played, told, TOP_KERNELS),
        communicators=communicators(recording, played, told),
    )


def _spans(recording: Recording, played: Played) -> dict[int, float]:
    nodes = recording.graph.nodes
    spans = {}
    for place in range(len(recording.parts)):
        mine = (nodes.rank == place) & (nodes.role != Role.MEET)
        if mine.any():
            length = float(played.end_ns[mine].max() - played.start_ns[mine].min())
            spans[recording.rank_name(place)] = length / NS_PER_S
    return spans


def page_document(page: Page) -> dict[str, Any]:
    """One playing as JSON holds it."""
    return {
        "step": page.step,
        "step_s": page.step_s,
        "median_step_s": page.median_step_s,
        "steps": {
            str(rank): [{"step": number, "seconds": seconds} for number, seconds in steps]
            for rank, steps in page.steps.items()
        },
        "span_s": {str(rank): seconds for rank, seconds in page.span_s.items()},
        "ranks": [_rank_document(one) for one in page.ranks],
        "kernels": [asdict(one) for one in page.kernels],
        "communicators": [
            {
                **{key: value for key, value in asdict(one).items() if key != "waited_for"},
                "waited_for": [{"rank": rank, "seconds": seconds} for rank, seconds in one.waited_for],
            }
            for one in page.communicators
        ],
    }  # fmt: skip


def _rank_document(one: RankTime) -> dict[str, Any]:
    usage = one.usage
    return {
        "rank": one.rank,
        "window_s": one.window_s,
        "exposed_compute_s": usage.exposed_compute_s,
        "exposed_communication_s": usage.exposed_communication_s,
        "overlapped_s": usage.overlapped_s,
        "host_bound_s": usage.host_s,
        "idle_s": usage.idle_s,
        "begins_after_s": one.begins_after_s,
        "busy_per_ms": list(one.busy_per_ms),
    }


def meetings_document(recording: Recording) -> dict[str, Any] | None:
    """How well what was matched agrees: on the common clock collectives end together, whenever their members
    began. None where no two ranks met."""
    if not recording.meetings:
        return None
    by_member = [
        ([member.start_ns for member in one.members], [member.end_ns for member in one.members])
        for one in recording.meetings
    ]
    starts = [(max(begun) - min(begun)) / NS_PER_S for begun, _ in by_member]
    transfers = [one.transfer_ns / NS_PER_S for one in recording.meetings]
    worst = recording.meetings[starts.index(max(starts))]
    return {
        "collectives": len(recording.meetings),
        "ends_apart_s": max(max(ended) - min(ended) for _, ended in by_member) / NS_PER_S,
        "starts_apart_s": max(starts),
        "last_rank": recording.rank_name(worst.last_rank),
        "transfer_s": [min(transfers), max(transfers)],
    }


def links_document(recording: Recording) -> dict[str, Any]:
    """What the graph rests on."""
    links = [part.links for part in recording.parts]
    return {
        "operators": {
            "by_external_id": sum(one.by_external for one in links),
            "by_nesting": sum(one.by_nesting for one in links),
            "none": sum(one.without for one in links),
        },
        "kernels_without_launch": sum(one.unlaunched for one in links),
        "evidence": {name: count for name, count in sorted(recording.counts.items()) if count},
        "contradicted_edges": recording.graph.contradicted,
        "explained_share": recording.explained,
    }


def retimed_document(retimed: Sequence[Retimed], recording: Recording) -> list[dict[str, Any]]:
    """What has another time, and what share of the GPU's work that was."""
    nodes = recording.graph.nodes
    gpu = nodes.role == Role.GPU
    whole_s = float(np.sum(nodes.end_ns[gpu] - nodes.start_ns[gpu])) / NS_PER_S
    return [
        {
            "how": one.how, "what": one.what, "kernels": one.kernels, "before_s": float(one.before_s),
            "after_s": float(one.after_s),
            "share_of_gpu_work": float(one.before_s) / whole_s if whole_s and one.kernels else 0.0,
        }
        for one in retimed
    ]  # fmt: skip
