"""Curves, bars and scatters as SVG documents, drawn by matplotlib, an extra of this package."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mist_megatron.calibrate.text_scatter import Points
from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Sequence[tuple[float, float]]
Bars = Mapping[str, Sequence[tuple[str, float, bool]]]
"""Group -> name, value, and whether it is sure."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, told apart by people with any colour vision."""
DASHES = ("-", "--", ":")
"""A second and third round through the palette."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mist-megatron",  # the same picture twice is the same file
    "axes.grid": True,
    "grid.alpha": 0.3,
}


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Words around a picture."""

    title: str
    across: str
    upwards: str
    upwards_logarithmic: bool = False


def require_matplotlib(option: str) -> None:
    """Before the work, not after it."""
    if find_spec("matplotlib") is None:
        raise InputError(
            f"{option}: matplotlib is not installed, an extra of this package",
            details=("try: pip install 'mist-megatron[plot]'",),
        )


def svg_lines(lines: Mapping[str, Line], dots: Mapping[str, Line], labels: Labels) -> str:
    """Lines and single points over a logarithmic axis; every x must be above zero."""
    with _drawing(labels) as (figure, axes, drawn):
        axes.set_xscale("log")
        for index, (name, series) in enumerate({**lines, **dots}.items()):
            colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
            xs, ys = zip(*series, strict=True) if series else ((), ())
            if name in lines:
                axes.plot(xs, ys, dash, color=colour, label=name)
            else:
                axes.plot(xs, ys, "o", markersize=3, alpha=0.6, color=colour, label=name)
        if labels.upwards_logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0.0)
        _legend(axes)
        _save(figure, drawn)
    return drawn.getvalue()


def svg_bars(bars: Bars, labels: Labels) -> str:
    """Groups of named bars from a base of 1; bars that are not sure are drawn hollow."""
    names = list(dict.fromkeys(name for group in bars.values() for name, _, _ in group))
    with _drawing(labels) as (figure, axes, drawn):
        for at, group in enumerate(bars.values()):
            wide = 0.8 / max(len(group), 1)
            for place, (name, value, sure) in enumerate(group):
                colour = COLOURS[names.index(name) % len(COLOURS)]
                left = at - 0.4 + (place + 0.5) * wide
                fill = colour if sure else "none"
                axes.bar(left, value - 1.0, wide, bottom=1.0, edgecolor=colour, facecolor=fill)
        for index, name in enumerate(names):
            axes.bar(0, 0, color=COLOURS[index % len(COLOURS)], label=name)
        axes.set_xticks(
            range(len(bars)), [_plain(name) for name in bars], rotation=30, ha="right", fontsize=8
        )
        _legend(axes)
        _save(figure, drawn)
    return drawn.getvalue()


def svg_heat(cells: Mapping[tuple[int, int], float | None], labels: Labels) -> str:
    """Figures by column and row, dark where they are large; None stands empty."""
    across, upwards = (sorted({place[side] for place in cells}) for side in (0, 1))
    with _drawing(labels) as (figure, axes, drawn):
        grid = [[cells.get((x, y)) for x in across] for y in upwards]
        shown = [[math.nan if value is None else value for value in row] for row in grid]
        axes.imshow(shown, cmap="YlOrBr", origin="lower", aspect="auto")
        axes.grid(False)
        axes.set_xticks(range(len(across)), [str(x) for x in across])
        axes.set_yticks(range(len(upwards)), [str(y) for y in upwards])
        most = max((value for value in cells.values() if value is not None), default=1.0)
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                words, dark = ("-", False) if value is None else (f"{value:.2f}", value > 0.75 * most)
                if (across[x], upwards[y]) in cells:
                    axes.text(x, y, words, ha="center", va="center", color="white" if dark else "black")
        _save(figure, drawn)
    return drawn.getvalue()


def svg_scatter(points: Points) -> str:
    """Predicted against measured, with lines at 10 % off."""
    labels = Labels(
        title="dashed lines are 10 % off", across="measured iteration, s", upwards="predicted iteration, s"
    )
    with _drawing(labels) as (figure, axes, drawn):
        axes.set_xscale("log")
        axes.set_yscale("log")
        every = [value for pairs in points.values() for pair in pairs for value in pair]
        ends = (0.9 * min(every, default=0.1), 1.1 * max(every, default=10.0))
        for factor, dash in ((1.0, "-"), (1.1, "--"), (1 / 1.1, "--")):
            axes.plot(ends, [factor * end for end in ends], dash, color="#999999", linewidth=1)
        for index, (name, pairs) in enumerate(points.items()):
            xs, ys = zip(*pairs, strict=True) if pairs else ((), ())
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(xs, ys, "o", markersize=4, alpha=0.5, color=colour, label=f"{name} ({len(pairs)})")
        _legend(axes)
        _save(figure, drawn)
    return drawn.getvalue()


@contextmanager
def _drawing(labels: Labels) -> Iterator[tuple[Figure, Axes, io.StringIO]]:
    """An empty picture with its words, in our style and nobody else's."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.8), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(_plain(labels.title), loc="left")
        axes.set_xlabel(labels.across)
        axes.set_ylabel(labels.upwards)
        yield figure, axes, io.StringIO()


def _legend(axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    if names:
        words = [_plain(name) for name in names]
        axes.legend(handles, words, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)


def _plain(name: str) -> str:
    """Names come from files: a dollar sign is one, and begins no formula."""
    return name.replace("$", r"\$")


def _save(figure: Figure, drawn: io.StringIO) -> None:
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
