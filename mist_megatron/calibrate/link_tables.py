"""Bandwidths of pairs of nodes as tables of figures: a square matrix with names, or a pair a line; and joined
to a profile.

The unit is read off the header, the corner or the file's name; where nobody says it, it is asked for: MB/s
for Gb/s is a factor of 125. A profile holds one figure for what nodes reach between them, of any cluster.
Once the links of one's own cluster are measured, the usual one of them is that figure; which pair is slow the
profile cannot hold, `links.yaml` does.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mist_megatron.errors import InputError
from mist_megatron.formats.profile_yaml import check_units
from mist_megatron.spec.cluster import GpuSpec
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.profile import Profile, Quantity, Source, sources_used

UNITS = {
    "GB/s": 1e9, "GiB/s": 2.0**30, "Gb/s": 1e9 / 8, "MB/s": 1e6, "MiB/s": 2.0**20, "Mb/s": 1e6 / 8,
    "B/s": 1.0,
}  # fmt: skip
_SPELLED = re.compile(
    r"(?<![A-Za-z])([GM]?)(i?)([Bb])(?:it|yte)?s?(?:/s|ps|/sec|[ _]per[ _]s(?:ec)?)(?![A-Za-z])"
)
_SENDERS = ("sender", "src", "source", "from", "node_row", "host_a", "node_a", "a", "row")
_RECEIVERS = ("receiver", "dst", "destination", "to", "node_col", "host_b", "node_b", "b", "column", "col")
_GAPS = ("", "-", "nan", "na", "n/a", "null", "none", "?")
_RUNS = ("snapshot", "run", "repeat", "repetition", "iteration", "time", "date")
Figure = tuple[str, str, float, str]
"""Sender, receiver, bytes per second, and which run it is of."""


def read_table(text: str, where: str, unit: str | None = None) -> tuple[list[Figure], list[str]]:
    """Of each pair that has a figure; and what is worth telling."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise InputError(f"{where}: no lines of figures; wanted a table with names")
    comments = " ".join(line for line in text.splitlines() if line.lstrip().startswith("#"))
    separator = max(",;\t", key=lines[0].count)
    cells = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=separator)]
    columns = [name.lower() for name in cells[0]]
    # A square matrix names before its rows what stands above its columns; its nodes may be called a and b.
    square = {row[0] for row in cells[1:]} <= set(cells[0][1:])
    said = _unit_in(cells[0][0] if square else " ".join(cells[0]))
    against = [f"{where}: the table says {said}; read as {unit}, as asked"] if said and unit else []
    if not square and any(name in _SENDERS for name in columns) and any(n in _RECEIVERS for n in columns):
        figures, notes = _pairs(cells, where, unit)
    else:
        named = unit or said or _unit_in(comments) or _unit_in(where.rsplit("/", 1)[-1])
        figures, notes = _square(cells, where, _factor(named, where))
    return figures, [*notes, *(against if said != unit else ())]


def _unit_in(text: str) -> str | None:
    """GBps, Gb/s, MiB/s, mpigraph_MBps as its usual spelling; names of files join words with underlines."""
    match = _SPELLED.search(text.replace("_", " ")) if text else None
    if match is None:
        return None
    return f"{match[1]}{match[2]}{match[3]}/s"


def _factor(named: str | None, where: str) -> float:
    if named is None:
        raise InputError(
            f"{where}: which unit its figures have is not said",
            details=(f"try: --unit with one of {', '.join(UNITS)}",),
        )
    if named not in UNITS:
        raise InputError(f"{where}: unit {named!r}; known: {', '.join(UNITS)}")
    return UNITS[named]


def _square(cells: list[list[str]], where: str, factor: float) -> tuple[list[Figure], list[str]]:
    names, rows = cells[0][1:], cells[1:]
    while names and not names[-1]:
        names = names[:-1]
    given = [row[0] for row in rows]
    if sorted(names) != sorted(given):
        odd = sorted(set(names) ^ set(given))
        raise InputError(
            f"{where}: {len(given)} rows and {len(names)} columns"
            + (f", {odd[0]!r} in one of them alone" if odd else "")
            + "; wanted a square matrix with the same names above and before it"
        )
    figures = []
    for number, row in enumerate(rows, start=2):
        values = row[1 : 1 + len(names)]
        if len(values) < len(names):
            raise InputError(f"{where}, row {number}: {len(values)} figures; wanted {len(names)}: cut off?")
        for name, text in zip(names, values, strict=True):
            rate = None if name == row[0] else _rate(text, f"{where}, row {number}, {name}")
            if rate is not None:
                figures.append((row[0], name, rate * factor, ""))
    return figures, []


def _rate(text: str, place: str) -> float | None:
    """None for a gap."""
    if text.lower() in _GAPS:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0.0:
        raise InputError(f"{place}: {text!r}; wanted a rate from 0, or nothing for a pair without one")
    return value


def _pairs(cells: list[list[str]], where: str, unit: str | None) -> tuple[list[Figure], list[str]]:
    header = cells[0]
    columns = [name.lower() for name in header]
    sender = next(at for at, name in enumerate(columns) if name in _SENDERS)
    receiver = next(at for at, name in enumerate(columns) if name in _RECEIVERS)
    said = {at: named for at, name in enumerate(header) if (named := _unit_in(name)) is not None}
    rate_at = next(iter(said), None)
    if rate_at is None:
        rate_at = next((at for at, name in enumerate(columns) if re.search("bandwidth|rate|bw", name)), None)
    if rate_at is None:
        raise InputError(f"{where}: no column of rates such as GB/s in {', '.join(header)[:100]}")
    factor = _factor(unit or said.get(rate_at) or _unit_in(where.rsplit("/", 1)[-1]), where)
    direction = columns.index("direction") if "direction" in columns else None
    run_at = next((at for at, name in enumerate(columns) if name in _RUNS), None)
    read = max(at for at in (sender, receiver, rate_at, direction, run_at) if at is not None)
    figures, gaps, lines = [], 0, Counter[tuple[str, str]]()
    for number, row in enumerate(cells[1:], start=2):
        if len(row) <= read:
            raise InputError(f"{where}, row {number}: {len(row)} columns; wanted {len(header)}: cut off?")
        rate = _rate(row[rate_at], f"{where}, row {number}, {header[rate_at]}")
        if rate is None:
            gaps += 1
            continue
        one, other = row[sender], row[receiver]
        if direction is not None and row[direction].lower().startswith("re"):
            one, other = other, one
        if one != other:
            lines[one, other] += direction is None  # else both ends may tell of one transfer
            run = str(lines[one, other]) if run_at is None else row[run_at]
            figures.append((one, other, rate * factor, run))
    notes = [f"{where}: {gaps} lines without a figure"] if gaps else []
    return figures, notes


FASTEST = 4.0
"""Times the GPU's usual network: a node's may be better, never by more (as in `check_units`)."""
KEY = "links"


def join_links(
    profile: Profile, gpu: GpuSpec, matrices: Sequence[LinkMatrix], where: str
) -> tuple[Profile, tuple[str, ...]]:
    """The profile with the usual link of a cluster, and what about it is worth telling."""
    matrix = max(matrices, key=lambda one: one.gpus_at_once)
    if matrix.gpus_at_once < gpu.usual_gpus_per_node:
        raise InputError(
            f"{where}: of {matrix.gpus_at_once} GPUs of a node at once, which does not say what the "
            f"{gpu.usual_gpus_per_node} of a node of {gpu.name} have together",
            details=("try: calibrate run --links, which measures with all GPUs of a node, too",),
        )
    node = matrix.median_bytes_per_s * matrix.gpus_at_once
    usual = gpu.inter_bytes_per_s.value
    if node > FASTEST * usual:
        raise InputError(
            f"{where}: a node sends {node / 1e9:.3g} GB/s, the usual network of {gpu.name} "
            f"({gpu.usual_network}) carries {usual / 1e9:.3g}: check the units"
        )
    said = [matrix.source or "links between nodes", matrix.date, f"{len(matrix.hosts)} nodes, the median of"]
    text = ", ".join([*filter(None, said[:2]), f"{said[2]} {len(matrix.rates)} links"])
    source = Source(origin="measured", text=text, uncertainty=round(matrix.variation, 4))
    pairs = len(matrix.rates)
    fraction = Quantity(value=float(f"{node / usual:.5g}"), source=KEY, points=pairs, error=None)
    kept = tuple(curve for curve in profile.collectives if curve.nodes == 1)
    dropped = len(profile.collectives) - len(kept)
    notes = [
        f"links: nodes send {node / 1e9:.3g} GB/s, {node / usual:.0%} of {gpu.usual_network}, median of "
        f"{pairs} links that vary by {matrix.variation:.0%}; which of them is slow: calibrate show {where}"
    ]
    if dropped:
        notes.append(f"links: {dropped} curves of collectives between other nodes left out")
    joined = replace(
        profile,
        sources={**profile.sources, KEY: source},
        links=replace(profile.links, inter_fraction=fraction),
        collectives=kept,
    )
    return joined, tuple(notes)


def as_it_is(base: Profile, name: str) -> Profile:
    """A profile by another name, where links between nodes are all that was measured."""
    used = {source for _, source in sources_used(base)}
    sources = {key: source for key, source in base.sources.items() if key in used}
    note = f"what was not measured is of {base.name} {base.content_hash}".rstrip()
    made = replace(base, name=name, note=note, sources=sources)
    check_units(made)
    return made
