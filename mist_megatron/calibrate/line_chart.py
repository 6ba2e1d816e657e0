"""Curves and bars as SVG documents, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Line = Sequence[tuple[float, float]]
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, told apart by people with any colour vision."""
_WIDTH, _HEIGHT, _MARGIN, _LEGEND = 560, 340, 64, 230
_DASHES = ("", "6 3", "2 2")
"""A second and third round through the palette."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Words around a picture."""

    title: str
    across: str
    upwards: str
    upwards_logarithmic: bool = False


def svg_lines(lines: Mapping[str, Line], dots: Mapping[str, Line], labels: Labels) -> str:
    """Lines and single points over a logarithmic axis; every x must be above zero."""
    pairs = [pair for series in (*lines.values(), *dots.values()) for pair in series]
    xs = [math.log10(x) for x, _ in pairs] or [0.0]
    left, right = min(xs), max(max(xs), min(xs) + 1e-6)
    rise = _log if labels.upwards_logarithmic else float
    ys = [rise(y) for _, y in pairs] or [0.0]
    low = min(ys) if labels.upwards_logarithmic else 0.0
    high = max(max(ys) * (1.0 if labels.upwards_logarithmic else 1.05), low + 1e-9)

    def place(pair: tuple[float, float]) -> tuple[float, float]:
        across = (math.log10(pair[0]) - left) / (right - left) * _WIDTH
        return across, _HEIGHT - (rise(pair[1]) - low) / (high - low) * _HEIGHT

    parts = _frame(labels)
    for power in range(math.ceil(left), math.floor(right) + 1):
        at = (power - left) / (right - left) * _WIDTH
        parts.append(_text(at, _HEIGHT + 18, f"1e{power}", "middle"))
        parts.append(f'<line x1="{at:.1f}" y1="0" x2="{at:.1f}" y2="{_HEIGHT}" stroke="#eee"/>')
    for step in range(5):
        level = low + (high - low) * step / 4.0
        shown = 10.0**level if labels.upwards_logarithmic else level
        parts.append(_text(-8, _HEIGHT - _HEIGHT * step / 4.0 + 4, f"{shown:.3g}", "end"))
    for index, (name, series) in enumerate(lines.items()):
        colour, dash = _style(index)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, series))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"'
            f' stroke-dasharray="{dash}"/>'
        )
        parts += _entry(index, name, f'<line x1="{_WIDTH + 14}" x2="{_WIDTH + 34}" y1="{{y}}" y2="{{y}}" '
                        f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')  # fmt: skip
    for index, (name, series) in enumerate(dots.items(), start=len(lines)):
        colour, _ = _style(index)
        for x, y in map(place, series):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}" fill-opacity="0.6"/>')
        parts += _entry(index, name, f'<circle cx="{_WIDTH + 24}" cy="{{y}}" r="4" fill="{colour}"/>')
    return "\n".join([*parts, "</g></svg>\n"])


def svg_bars(bars: Mapping[str, Sequence[tuple[str, float, bool]]], labels: Labels) -> str:
    """Groups of named bars from a base of 1; bars that are not sure are drawn hollow."""
    parts = _frame(labels)
    values = [value for group in bars.values() for _, value, _ in group]
    high = max([*values, 1.1])
    names = list(dict.fromkeys(name for group in bars.values() for name, _, _ in group))
    slot = _WIDTH / max(len(bars), 1)
    for step in range(5):
        level = 1.0 + (high - 1.0) * step / 4.0
        parts.append(_text(-8, _HEIGHT - _HEIGHT * step / 4.0 + 4, f"{level:.3g}", "end"))
    for at, (title, group) in enumerate(bars.items()):
        wide = slot * 0.8 / max(len(group), 1)
        for position, (name, value, sure) in enumerate(group):
            colour, _ = _style(names.index(name))
            tall = (value - 1.0) / (high - 1.0) * _HEIGHT
            parts.append(
                f'<rect x="{at * slot + slot * 0.1 + position * wide:.1f}" y="{_HEIGHT - tall:.1f}" '
                f'width="{wide:.1f}" height="{max(tall, 0.5):.1f}" stroke="{colour}" '
                f'fill="{colour if sure else "none"}"/>'
            )
        place = f"{(at + 0.5) * slot:.1f} {_HEIGHT + 12}"
        parts.append(f'<text transform="translate({place}) rotate(30)" font-size="10">{escape(title)}</text>')
    for index, name in enumerate(names):
        colour, _ = _style(index)
        parts += _entry(index, name, f'<circle cx="{_WIDTH + 24}" cy="{{y}}" r="4" fill="{colour}"/>')
    return "\n".join([*parts, "</g></svg>\n"])


def _frame(labels: Labels) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _MARGIN + _LEGEND + 20}" '
        f'height="{_HEIGHT + 2 * _MARGIN}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<g transform="translate({_MARGIN},{_MARGIN - 16})">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>',
        f'<text x="0" y="-24" font-size="14">{escape(labels.title)}</text>',
        _text(0, -8, labels.upwards, "start"),
        _text(_WIDTH / 2, _HEIGHT + 66, labels.across, "middle"),
    ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _entry(index: int, name: str, mark: str) -> list[str]:
    """A line of the legend; what is below the picture's foot is left to the curves themselves."""
    y = 10 + 16 * index
    if y > _HEIGHT + _MARGIN:
        return []
    return [mark.replace("{y}", str(y - 4)), _text(_WIDTH + 40, y, name, "start")]


def _style(index: int) -> tuple[str, str]:
    return _COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)]


def _log(value: float) -> float:
    return math.log10(max(value, 1e-12))
