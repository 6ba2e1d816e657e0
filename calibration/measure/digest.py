"""What a file of results says at a glance: the best that each kind of work reached."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def digest(path: Path) -> list[str]:
    """One line for each kind of work in the file."""
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(text) for text in file if text.strip()]
    points = [line for line in lines if "kind" in line]
    found = []
    for title, kind, rate, unit in (
        ("matrix products", "gemm", _gemm_flops, 1e12),
        ("attention forward", "attention_forward", _attention_flops, 1e12),
        ("attention backward", "attention_backward", _attention_flops, 1e12),
        ("memory", "memory", lambda p: p["moved_bytes"], 1e9),
        ("device Adam", "device_adam", lambda p: p["parameters"], 1e9),
        ("host Adam", "host_adam", lambda p: p["parameters"], 1e9),
    ):
        chosen = [p for p in points if p["kind"] == kind]
        if chosen:
            best = max(chosen, key=lambda p: rate(p) / p["seconds"])
            name = {1e12: "TFLOP/s", 1e9: "GB/s" if kind == "memory" else "G parameters/s"}[unit]
            found.append(_row(title, rate(best) / best["seconds"] / unit, name, chosen, best["point"]))
    found += _copies(points) + _collectives(points)
    launches = sorted(p["seconds"] for p in points if p["kind"] == "launch")
    if launches:
        found.append(f"{'launch':<24}{launches[len(launches) // 2] * 1e6:10.2f} us")
    overlaps = [p for p in points if p["kind"] == "overlap"]
    if overlaps:
        found.append(f"{'streams at once':<24}{len(overlaps):10d} points")
    doubtful = sum("wide_spread" in p or "overheated" in p for p in points)
    found.append(f"{len(points)} points, {doubtful} of them marked as unsteady")
    return found


def _gemm_flops(point: Line) -> float:
    return float(2.0 * point["m"] * point["n"] * point["k"] * point["batch"])


def _attention_flops(point: Line) -> float:
    """Of the causal half; backward runs five products for two."""
    pairs = point["batch"] * point["heads"] * point["seq"] ** 2 * point["head_dim"]
    return float(2.0 * pairs * (2.5 if point["kind"].endswith("backward") else 1.0))


def _copies(points: Iterable[Line]) -> list[str]:
    found = []
    for direction in ("h2d", "d2h", "both"):
        chosen = [p for p in points if p["kind"] == "copy" and p["direction"] == direction]
        if chosen:
            best = max(chosen, key=lambda p: p["bytes"] / p["seconds"])
            rate = best["bytes"] / best["seconds"] / 1e9
            title = f"copy {direction}" + (", each way" if direction == "both" else "")
            found.append(_row(title, rate, "GB/s", chosen, best["point"]))
    return found


def _collectives(points: Iterable[Line]) -> list[str]:
    groups: dict[tuple[str, int, int, bool], list[Line]] = {}
    for point in points:
        if point["kind"] == "collective":
            key = (point["collective"], point["ranks"], point["nodes"], bool(point.get("strided")))
            groups.setdefault(key, []).append(point)
    found = []
    for (kind, ranks, _, strided), chosen in sorted(groups.items()):
        best = max(chosen, key=lambda p: p["bytes"] / p["seconds"])
        title = f"{kind} of {ranks}" + (" apart" if strided else "")
        found.append(_row(title, best["bytes"] / best["seconds"] / 1e9, "GB/s", chosen, best["point"]))
    return found


def _row(title: str, value: float, unit: str, chosen: list[Line], where: str) -> str:
    return f"{title:<24}{value:10.2f} {unit:<16}{len(chosen):5d} points, best: {where}"
