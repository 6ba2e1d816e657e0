"""How much of the copies between host and device ran beside kernels, from a trace of torch's profiler.

    python benchmarks/gpu/trace_overlap.py trace.json

Standard library alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Span = tuple[float, float]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace; times are in microseconds."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return list(document["traceEvents"] if isinstance(document, dict) else document)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times without overlaps, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def common(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Length of the times that two merged lists share."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap_of(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds of copies to and from the host and of kernels, and the share of copies beside kernels."""
    copies: dict[str, list[Span]] = {"HtoD": [], "DtoH": []}
    kernels: list[Span] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy":
            for way, spans in copies.items():
                if way in event["name"]:
                    spans.append(span)
    busy, both = merged(kernels), merged([*copies["HtoD"], *copies["DtoH"]])
    copying = sum(end - begin for begin, end in both)
    return {
        "copies_s": copying / 1e6,
        "to_device_s": sum(end - begin for begin, end in merged(copies["HtoD"])) / 1e6,
        "to_host_s": sum(end - begin for begin, end in merged(copies["DtoH"])) / 1e6,
        "kernels_s": sum(end - begin for begin, end in busy) / 1e6,
        "beside_compute": common(both, busy) / copying if copying else 0.0,
    }


if __name__ == "__main__":
    print(json.dumps(overlap_of(read_trace(Path(sys.argv[1]))), indent=2))
