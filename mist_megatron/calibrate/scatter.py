"""Predicted against measured as a picture: an SVG file, or a few lines of text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Mapping[str, Sequence[tuple[float, float]]]
"""By file: (measured, predicted) in seconds, both above zero."""

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, told apart by people with any colour vision."""
_SIDE, _MARGIN = 520, 60


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


def svg_scatter(points: Points) -> str:
    """The same as an SVG document with a legend and lines at 10 % off."""
    low, high = _range(points)
    if low is None or high is None:
        low, high = -1.0, 1.0
    first, last = low, high

    def place(value: float) -> float:
        return (math.log10(value) - first) / (last - first) * _SIDE

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIDE + 2 * _MARGIN + 180}" '
        f'height="{_SIDE + 2 * _MARGIN}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<g transform="translate({_MARGIN},{_MARGIN})">',
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#888"/>',
    ]
    for factor, dash in ((1.0, ""), (1.1, ' stroke-dasharray="4 4"'), (1 / 1.1, ' stroke-dasharray="4 4"')):
        shift = math.log10(factor) / (last - first) * _SIDE
        parts.append(
            f'<line x1="0" y1="{_SIDE - shift:.1f}" x2="{_SIDE}" y2="{-shift:.1f}" stroke="#bbb"{dash}/>'
        )
    for power in range(math.ceil(first), math.floor(last) + 1):
        at = place(10.0**power)
        label = f"{10.0**power:g} s"
        parts.append(f'<text x="{at:.1f}" y="{_SIDE + 18}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="-8" y="{_SIDE - at:.1f}" text-anchor="end">{label}</text>')
    for index, (name, pairs) in enumerate(points.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        for measured, predicted in pairs:
            parts.append(
                f'<circle cx="{place(measured):.1f}" cy="{_SIDE - place(predicted):.1f}" r="3" '
                f'fill="{colour}" fill-opacity="0.5"/>'
            )
        y = 16 + 18 * index
        parts.append(f'<circle cx="{_SIDE + 14}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_SIDE + 24}" y="{y}">{escape(name)} ({len(pairs)})</text>')
    parts.append(f'<text x="{_SIDE / 2}" y="{_SIDE + 40}" text-anchor="middle">measured iteration</text>')
    parts.append('<text x="-20" y="-12">predicted iteration; dashed lines are 10 % off</text>')
    parts.append("</g></svg>\n")
    return "\n".join(parts)


def _range(points: Points) -> tuple[float | None, float | None]:
    values = [math.log10(value) for pairs in points.values() for pair in pairs for value in pair]
    if not values:
        return None, None
    low, high = min(values), max(values)
    room = 0.05 * (high - low) + 0.02
    return low - room, high + room


def _cell(value: float, low: float, high: float, cells: int) -> int:
    return min(int((math.log10(value) - low) / (high - low) * cells), cells - 1)
