"""A replayed timeline as a Chrome trace with correlations, which Perfetto opens and `replay` reads again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from mist_megatron.events.chrome_trace import EVENTS_PER_PIECE
from mist_megatron.recorded.engine import Played
from mist_megatron.recorded.graph import Role
from mist_megatron.recorded.recording import Recording
from mist_megatron.traces.columns import Kind

CATEGORIES = {
    Kind.KERNEL: "kernel",
    Kind.COPY: "gpu_memcpy",
    Kind.FILL: "gpu_memset",
    Kind.CALL: "cuda_runtime",
}
_PROCESS = 1000
"""Streams of rank r are threads of process r, its host's those of process 1000 + r."""


def timeline_pieces(recording: Recording, played: Played) -> Iterator[str]:
    """The text of the file, piece by piece."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    events = _events(recording, played)
    yield '{"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": ['
    before = "\n"
    while piece := list(islice(events, EVENTS_PER_PIECE)):
        yield before + encode(piece)[1:-1]
        before = ",\n"
    yield "\n]}\n"


def _events(recording: Recording, played: Played) -> Iterator[dict[str, Any]]:
    nodes = recording.graph.nodes
    first = float(played.start_ns.min()) if len(nodes) else 0.0
    for place in range(len(recording.parts)):
        rank = recording.rank_name(place)
        yield _named("process_name", rank, {"name": f"rank {rank}, GPU"})
        yield _named("process_name", _PROCESS + rank, {"name": f"rank {rank}, host"})
    shown = np.flatnonzero(np.isin(nodes.role, (Role.LAUNCH, Role.SYNC, Role.GPU)) & (nodes.event >= 0))
    for node in shown.tolist():
        place, event = int(nodes.rank[node]), int(nodes.event[node])
        trace = recording.traces[place]
        kind = Kind(int(trace.kind[event]))
        thread = trace.places[int(nodes.place[node])][1]
        on_gpu = kind >= Kind.KERNEL
        start, end = played.start_ns[node] - first, played.end_ns[node] - first
        said: dict[str, Any] = {"correlation": int(trace.correlation[event])}
        if trace.after:
            said |= {"event": event, "after": list(trace.after.get(event, ()))}
        if on_gpu:
            said["stream"] = int(trace.stream[event])
        yield {
            "ph": "X", "cat": CATEGORIES[kind], "name": trace.name_of(event),
            "pid": recording.rank_name(place) + (0 if on_gpu else _PROCESS), "tid": thread,
            "ts": round(start / 1e3, 3), "dur": round((end - start) / 1e3, 3), "args": said,
        }  # fmt: skip
    for (step, begin, end), place in zip(recording.steps, recording.step_rank, strict=True):
        at, until = played.start_ns[begin] - first, played.start_ns[end] - first
        yield {
            "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step.number}",
            "pid": _PROCESS + recording.rank_name(place),
            "tid": recording.traces[place].places[step.place][1],
            "ts": round(at / 1e3, 3), "dur": round((until - at) / 1e3, 3), "args": {},
        }  # fmt: skip


def _named(name: str, process: int, said: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": 0, "args": said}
