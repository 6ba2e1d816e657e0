"""Predicted against measured in a few lines of text, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Points = Mapping[str, Sequence[tuple[float, float]]]
"""By file: (measured, predicted) in seconds, both above zero."""


def text_scatter(points: Points, columns: int = 60, rows: int = 20) -> str:
    """Log-log scatter; `/` marks where predictions are right, digits count a cell's points (9 or more: 9)."""
    low, high = _range(points)
    if low is None or high is None:
        return "nothing to plot"
    counts: dict[tuple[int, int], int] = {}
    for pairs in points.values():
        for measured, predicted in pairs:
            cell = (_cell(predicted, low, high, rows), _cell(measured, low, high, columns))
            counts[cell] = counts.get(cell, 0) + 1
    lines = []
    for row in reversed(range(rows)):
        cells = []
        for column in range(columns):
            count = counts.get((row, column), 0)
            on_line = int((column + 0.5) * rows / columns) == row
            cells.append(str(min(count, 9)) if count else "/" if on_line else " ")
        lines.append(f"|{''.join(cells).rstrip()}")
    lines.append("+" + "-" * columns)
    lines.append(
        f" measured {10**low:.3g} s to {10**high:.3g} s across, predicted the same upwards, both logarithmic"
    )
    return "\n".join(lines)


def _range(points: Points) -> tuple[float | None, float | None]:
    values = [math.log10(value) for pairs in points.values() for pair in pairs for value in pair]
    if not values:
        return None, None
    low, high = min(values), max(values)
    room = 0.05 * (high - low) + 0.02
    return low - room, high + room


def _cell(value: float, low: float, high: float, cells: int) -> int:
    return min(int((math.log10(value) - low) / (high - low) * cells), cells - 1)
