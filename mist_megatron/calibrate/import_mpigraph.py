"""mpiGraph: bandwidth of every pair of processes, one process a node, as a matrix for each direction.

    Send	node-a:0	node-b:1
    node-a:0	0.000	19204.908
    node-b:1	19310.400	0.000

Figures are MB/s of 1e6 bytes. A pair's latency is not in it: each pair becomes one transfer of the message
size of the header (or 1 MiB) at that rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mist_megatron.calibrate.imported import NO_DEVICE, Hints, Imported, identity_of
from mist_megatron.calibrate.measurements import Conditions, Measurement, checked
from mist_megatron.calibrate.nccl_tables import TAGS
from mist_megatron.errors import InputError

USUAL_BYTES = float(1 << 20)
_DIRECTIONS = {"send": "send", "recv": "recv", "receive": "recv"}


class Cell(NamedTuple):
    """One pair of one direction's matrix."""

    direction: str
    names: Sequence[str]
    row: int
    column: int
    bytes_per_s: float
    line: int


def read_mpigraph(text: str, where: str, hints: Hints) -> Imported:
    """All pairs, both directions."""
    size = _message_bytes(text, where)
    condition = Conditions(
        identity=identity_of(where, "mpigraph"), device=NO_DEVICE, backend="mpigraph", precision="bytes",
        date=hints.date, versions={},
    )  # fmt: skip
    points: list[Measurement] = []
    dead = 0
    for cell in _cells(text, where):
        if cell.bytes_per_s == 0.0:
            dead += 1
            continue
        point = Measurement(
            kind="link", label=cell.direction, seconds=size / cell.bytes_per_s, line=cell.line,
            sizes={"bytes": size, "row": float(cell.row), "column": float(cell.column)},
            conditions=condition.identity,
        )  # fmt: skip
        points.append(checked(point, f"{where}, line {cell.line}"))
    if not points:
        raise InputError(f"{where}: no bandwidth matrix; wanted a line `Send NODE NODE ...` and one a node")
    notes = (f"{dead} pairs of 0 MB/s: dead links, left out",) if dead else ()
    return Imported(kind="mpigraph", conditions=(condition,), points=tuple(points), notes=notes)


def named_pairs(text: str, where: str) -> tuple[list[tuple[str, str, float]], float]:
    """Sender, receiver and bytes per second of each pair, both matrices; and the size of the messages. A row
    of the Recv matrix is a receiver's."""
    pairs = []
    for cell in _cells(text, where):
        row, column = cell.names[cell.row], cell.names[cell.column]
        one, other = (row, column) if cell.direction == "send" else (column, row)
        pairs.append((one, other, cell.bytes_per_s))
    return pairs, _message_bytes(text, where)


def _message_bytes(text: str, where: str) -> float:
    message = re.search(r"(?im)^[ \t]*msgsize[ \t]+(\d+)", TAGS.sub("", text))
    size = float(message.group(1)) if message else USUAL_BYTES
    if size <= 0.0:
        raise InputError(f"{where}: MsgSize is {size:g}; wanted above 0")
    return size


def _cells(text: str, where: str) -> Iterator[Cell]:
    names: list[str] = []
    direction, row = "", 0
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        place = f"{where}, line {number}"
        cells = TAGS.sub("", line).split()
        if cells and cells[0].lower() in _DIRECTIONS and len(cells) > 2 and not _is_number(cells[-1]):
            _whole(direction, names, row, place)
            direction, names, row = _DIRECTIONS[cells[0].lower()], _names(cells[1:], place), 0
            continue
        if not direction or not cells or (names and row >= len(names)):
            continue
        if not names:  # `Send Bandwidth (MB/s)`: they have a line of their own
            names = _names(cells, place)
            continue
        for column, rate in enumerate(_row(cells, names, row, place)):
            if column != row:
                yield Cell(direction, names, row, column, rate, number)
        row += 1
    _whole(direction, names, row, f"{where}, line {len(lines)}")


def _names(cells: Sequence[str], place: str) -> list[str]:
    names = [cell for cell in cells if cell.lower() not in ("bandwidth", "(mb/s)", "mb/s", "to", "from")]
    if len(set(names)) != len(names):
        raise InputError(f"{place}: a node is named twice: {', '.join(names)[:80]}")
    return names


def _whole(direction: str, names: Sequence[str], row: int, place: str) -> None:
    if direction and row < len(names):
        raise InputError(f"{place}: the {direction} matrix has {row} of {len(names)} rows: cut off?")


def _row(cells: Sequence[str], names: Sequence[str], row: int, place: str) -> list[float]:
    values = [cell for cell in cells[1:] if cell.lower() not in ("to", "from")]
    if cells[0].rstrip(":") != names[row].rstrip(":"):
        raise InputError(f"{place}: row {cells[0]!r}; wanted {names[row]!r}, in the order of the columns")
    if len(values) != len(names):
        raise InputError(f"{place}: {len(values)} figures; wanted {len(names)}, one a node: cut off?")
    rates = []
    for column, text in enumerate(values):
        rate = _rate(text)
        if column == row:
            rates.append(0.0)
            continue
        if rate is None or rate < 0.0:
            raise InputError(f"{place}: {names[row]} to {names[column]} is {text!r}; wanted MB/s from 0")
        rates.append(rate * 1e6)
    return rates


def _rate(text: str) -> float | None:
    try:
        rate = float(text)
    except ValueError:
        return None
    return rate if math.isfinite(rate) else None


def _is_number(text: str) -> bool:
    return _rate(text) is not None
