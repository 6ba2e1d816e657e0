"""nccl-tests: its text tables and its JSON (`-J FILE`).

    #  Rank  0 Group  0 Pid   4242 on     node-1 device  0 [0x1b] NVIDIA H100 80GB HBM3
    #       size         count      type   redop    root     time   algbw   busbw #wrong  ...
         8388608       2097152     float     sum      -1    94.41   88.85  155.49      0  ...

Out-of-place times are taken. `size` is the whole message, as ours is. Which collective ran is in the first
lines of newer versions only; else in the command that a log repeats, in the file name, or in `--collective`.
Bandwidths are printed too, so a time in other units or another number of ranks contradicts them: refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from mist_megatron.calibrate.fit_collectives import passes
from mist_megatron.calibrate.imported import UNKNOWN_DEVICE, Hints, Imported, identity_of, text_of
from mist_megatron.calibrate.measurements import Conditions, Measurement, checked
from mist_megatron.errors import InputError

PROGRAMS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "sendrecv": "send_recv",
}  # fmt: skip
"""Programs `NAME_perf` that tell something a plan uses."""
OTHERS = ("alltoall", "broadcast", "reduce", "gather", "scatter", "hypercube")
TYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "f8e4m3": "fp8", "f8e5m2": "fp8"}
MOST_DIGITS = 9
"""Of a rank or a count of devices."""
AGREEMENT = 0.05
"""Relative: printed figures have three or four digits."""

_RANK_LINE = re.compile(
    r"#\s+Rank\s+(?P<rank>\d+)\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)\s+"
    r"device\s+(?P<device>\d+)\s+\[[^\]]*\]\s+(?P<name>.+?)\s*$"
)
_COLUMNS = ("size", "type", "redop", "time", "algbw", "busbw")
_NUMBER = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?$")


class _Rank(NamedTuple):
    number: int
    group: int
    host: str


@dataclass
class _Setting:
    """What the lines before the table say; filled while they are read."""

    where: str
    ranks: list[_Rank] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    program: str = ""
    date: str = ""
    threads: int = 1
    gpus: int = 0

    def members(self) -> list[_Rank]:
        """Ranks of the first group; all groups run at once and look alike."""
        first = min(rank.group for rank in self.ranks)
        return [rank for rank in self.ranks if rank.group == first]

    def size(self) -> int:
        if self.ranks:
            return len(self.members())
        return self.threads * self.gpus

    def nodes(self) -> int:
        return len({rank.host for rank in self.members()}) if self.ranks else 1

    def strided(self) -> bool:
        numbers = sorted(rank.number for rank in self.members()) if self.ranks else []
        return any(b - a != 1 for a, b in pairwise(numbers))


@dataclass(frozen=True)
class _Row:
    place: str
    line: int
    size: float
    type: str
    redop: str
    time_us: float
    algbw: float
    busbw: float
    wrong: str


def read_nccl_text(text: str, where: str, hints: Hints) -> Imported:
    """The tables of one or of several programs, one after the other."""
    lines = text.splitlines()
    ends = [at + 1 for at, line in enumerate(lines) if line.startswith("#") and "bus bandwidth" in line]
    starts = [0, *ends]
    parts = list(zip(starts, [*ends, len(lines)], strict=True))
    # What follows the last closing line is a remark, unless another table begins there.
    parts = [(a, b) for a, b in parts if a == 0 or any(_header(line.strip()) for line in lines[a:b])]
    found = [_section(lines[a:b], a, where, hints, alone=len(parts) == 1) for a, b in parts]
    conditions = {item.identity: item for part in found for item in part.conditions}
    points = tuple(point for part in found for point in part.points)
    notes = tuple(note for part in found for note in part.notes)
    return Imported(kind="nccl-tests", conditions=tuple(conditions.values()), points=points, notes=notes)


def _section(lines: Sequence[str], before: int, where: str, hints: Hints, *, alone: bool) -> Imported:
    """The table of one program; `before` lines stand above it."""
    setting = _Setting(where=where)
    rows: list[_Row] = []
    columns: list[str] | None = None
    finished = False
    for number, line in enumerate(lines, start=before + 1):
        stripped = line.strip()
        if stripped.startswith("#"):
            columns = _header(stripped) or columns
            finished = finished or "bus bandwidth" in stripped
            _setting_line(setting, stripped)
        elif columns and re.match(r"-?\d+\s", stripped):
            rows.append(_text_row(stripped.split(), columns, f"{where}, line {number}", number))
        else:
            _program(setting, stripped)
    if columns is None:
        raise InputError(
            f"{where}: no line `# size count type redop root time ...`; wanted nccl-tests' table"
        )
    # The name of a file says nothing about the second of its tables.
    _program(setting, where.replace("/", " ") if alone else "")
    notes = () if finished else ("no closing line `Avg bus bandwidth`: the sweep was cut short",)
    return _imported(setting, rows, hints, notes)


def _header(line: str) -> list[str] | None:
    names = line.lstrip("# ").split()
    return names if names[:2] == ["size", "count"] and "time" in names and "algbw" in names else None


def _setting_line(setting: _Setting, line: str) -> None:
    rank = _RANK_LINE.match(line)
    if rank:
        number, group = (_count(rank[name] or "0", name, setting.where) for name in ("rank", "group"))
        setting.ranks.append(_Rank(number, group, rank["host"]))
        setting.devices.append(rank["name"])
    for name, pattern in (("threads", r"nThread\s+(\d+)"), ("gpus", r"nGpus\s+(\d+)")):
        found = re.search(pattern, line)
        if found:
            setattr(setting, name, _count(found.group(1), name, setting.where))
    version = re.search(r"nccl-library=(\d+)", line) or re.search(r"NCCL version (\S+)", line)
    if version:
        setting.versions["nccl"] = version.group(1)
    if "Collective test starting" in line or not setting.program:
        _program(setting, line)


def _count(digits: str, name: str, where: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise InputError(f"{where}: {name} has {len(digits)} digits; wanted a count: damaged?")
    return int(digits)


def _program(setting: _Setting, line: str) -> None:
    """`all_reduce_perf -b 8 -e 8G` in a log, or the name of a file."""
    if setting.program:
        return
    program = re.search(r"\b(" + "|".join((*PROGRAMS, *OTHERS)) + r")_perf\b", line)
    if program:
        setting.program = program.group(1)


def _text_row(cells: Sequence[str], columns: Sequence[str], place: str, number: int) -> _Row:
    last = next((name for name in ("#wrong", "busbw") if name in columns), columns[-1])
    need = columns.index(last) + 1
    missing = [name for name in _COLUMNS if name not in columns[:need]]
    if missing:
        raise InputError(
            f"{place}: the header above has no column {missing[0]}; wanted {', '.join(_COLUMNS)}"
        )
    if len(cells) < need:
        raise InputError(f"{place}: {len(cells)} columns; wanted {len(columns)}: cut off?")
    value = dict(zip(reversed(columns[:need]), reversed(cells[:need]), strict=True))
    return _Row(
        place=place, line=number, size=_positive(value["size"], "size", place), type=value["type"],
        redop=value["redop"], time_us=_positive(value["time"], "time", place),
        algbw=_number(value["algbw"], "algbw", place), busbw=_number(value["busbw"], "busbw", place),
        wrong=value.get("#wrong", "0"),
    )  # fmt: skip


def _number(text: object, name: str, place: str) -> float:
    if not _NUMBER.match(str(text)):
        raise InputError(f"{place}: {name} is {text!r}; wanted a number from 0")
    found = float(str(text))
    if not math.isfinite(found):
        raise InputError(f"{place}: {name} is {text!r}; wanted a finite number")
    return found


def _positive(text: object, name: str, place: str) -> float:
    found = _number(text, name, place)
    if found <= 0.0:
        raise InputError(f"{place}: {name} is {text}; wanted above 0")
    return found


def read_nccl_json(document: object, where: str, hints: Hints) -> Imported:
    """What `-J FILE` writes; keys by the names of nccl-tests 2.16 and later."""
    if not isinstance(document, dict):
        raise InputError(f"{where}: holds {type(document).__name__}; wanted one object with results")
    setting = _Setting(where=where, date=text_of(document, "start_time", "date")[:10])
    arguments = document.get("args") or document.get("argv") or []
    words = " ".join(map(str, arguments)) if isinstance(arguments, list) else str(arguments)
    named = text_of(document, "test_name", "name", "collective")
    _program(setting, f"{words} {named} {where}".replace("/", " "))
    version = text_of(document, "nccl_version", "nccl_library")
    if version:
        setting.versions["nccl"] = version
    devices = document.get("devices") or []
    if not isinstance(devices, list):
        raise InputError(f"{where}: devices is {devices!r}; wanted a list")
    for index, device in enumerate(devices):
        place = f"{where}: devices[{index}]"
        if not isinstance(device, dict):
            raise InputError(f"{place} is {device!r}; wanted an object")
        rank = int(_number(device.get("rank", index), "rank", place))
        group = int(_number(device.get("group", 0), "group", place))
        setting.ranks.append(_Rank(rank, group, text_of(device, "hostname", "host") or "?"))
        setting.devices.append(text_of(device, "device_info", "device_name", "name") or UNKNOWN_DEVICE)
    results = document.get("results")
    if not isinstance(results, list) or not results:
        raise InputError(
            f"{where}: results is {type(results).__name__}; wanted a list with entries: cut off?"
        )
    rows = [_json_row(entry, f"{where}: results[{index}]", index + 1) for index, entry in enumerate(results)]
    return replace(_imported(setting, rows, hints, ()), kind="nccl-tests-json")


def _json_row(entry: object, place: str, number: int) -> _Row:
    side = entry.get("out_of_place") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(side, dict):
        raise InputError(f"{place}: no out_of_place; wanted size and out_of_place with time, alg_bw, bus_bw")
    return _Row(
        place=place, line=number, size=_positive(entry.get("size"), "size", place),
        type=text_of(entry, "type"), redop=text_of(entry, "redop"),
        time_us=_positive(side.get("time"), "time", place),
        algbw=_number(side.get("alg_bw", side.get("algbw")), "alg_bw", place),
        busbw=_number(side.get("bus_bw", side.get("busbw")), "bus_bw", place),
        wrong=text_of(side, "nwrong", "wrong") or "0",
    )  # fmt: skip


def _imported(setting: _Setting, rows: Sequence[_Row], hints: Hints, notes: tuple[str, ...]) -> Imported:
    where = setting.where
    if not rows:
        raise InputError(f"{where}: no measured size; the output ends before its first row")
    label = _collective(setting, hints)
    ranks = setting.size()
    if ranks < 2:
        raise InputError(
            f"{where}: {ranks} ranks; wanted the lines `# Rank ...`, or nGpus of 2 or more",
            details=("a collective of one rank moves nothing",),
        )
    device = _device(setting, hints)
    points: list[Measurement] = []
    conditions: dict[str, Conditions] = {}
    for row in rows:
        _agree(row, label, ranks)
        precision = TYPES.get(row.type, row.type or "unknown")
        if precision not in conditions:
            conditions[precision] = Conditions(
                identity=identity_of(where, precision, label, str(ranks)), device=device,
                backend="nccl-tests", precision=precision, date=setting.date or hints.date,
                versions=setting.versions, note=f"{label} of {ranks} ranks on {setting.nodes()} nodes",
            )  # fmt: skip
        point = Measurement(
            kind="collective", label=label, seconds=row.time_us * 1e-6, line=row.line,
            sizes={"bytes": row.size, "ranks": float(ranks), "nodes": float(setting.nodes())},
            strided=setting.strided(), conditions=conditions[precision].identity,
        )  # fmt: skip
        points.append(checked(point, row.place))
    return Imported(
        kind="nccl-tests", conditions=tuple(conditions.values()), points=tuple(points), notes=notes
    )


def _collective(setting: _Setting, hints: Hints) -> str:
    named = hints.collective or PROGRAMS.get(setting.program)
    if named:
        return named
    if setting.program:
        raise InputError(
            f"{setting.where}: {setting.program}_perf: no plan uses it; "
            f"wanted {', '.join(f'{name}_perf' for name in PROGRAMS)}"
        )
    raise InputError(
        f"{setting.where}: which collective ran is not said",
        details=("try: --collective all_reduce, or a file name such as all_reduce_perf.txt",),
    )


def _device(setting: _Setting, hints: Hints) -> str:
    found = sorted(set(setting.devices))
    if len(found) > 1:
        raise InputError(
            f"{setting.where}: ranks have different devices: {', '.join(found)}; wanted one kind"
        )
    return hints.device or (found[0] if found else UNKNOWN_DEVICE)


def _agree(row: _Row, label: str, ranks: int) -> None:
    if row.wrong not in ("0", "N/A"):
        raise InputError(
            f"{row.place}: {row.wrong} wrong elements; a link or GPU that corrupts is not measured"
        )
    if row.algbw < 1.0:  # too few digits to compare
        return
    rate = row.size / row.time_us * 1e-3
    if abs(rate / row.algbw - 1.0) > AGREEMENT:
        raise InputError(
            f"{row.place}: {row.size:g} bytes in {row.time_us:g} us are {rate:.4g} GB/s, "
            f"but algbw is {row.algbw:g}; wanted time in us and GB/s"
        )
    factor = passes(label, ranks)  # type: ignore[arg-type]
    if abs(row.busbw / row.algbw / factor - 1.0) > AGREEMENT:
        raise InputError(
            f"{row.place}: busbw / algbw is {row.busbw / row.algbw:.3f}; {label} of {ranks} ranks has "
            f"{factor:.3f}: another collective, or other ranks"
        )
