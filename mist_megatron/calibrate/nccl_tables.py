"""What nccl-tests prints, of every age, as tables: one per program that ran.

    #  Rank  0 Group  0 Pid   4242 on     node-1 device  0 [0x1b] NVIDIA H100 80GB HBM3
    #       size         count      type   redop    root     time   algbw   busbw #wrong  ...
         8388608       2097152     float     sum      -1    94.41   88.85  155.49      0  ...

Logs of clusters hold more than that: tags of mpirun, srun or a log collector before (and inside) lines,
lines of NCCL_DEBUG between rows, several programs in a row, the end of one that failed. A table begins with
the lines that only a program's start prints and takes in the remark `Collective test concluded` that newer
versions print behind its average.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from mist_megatron.errors import InputError

PROGRAMS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "sendrecv": "send_recv",
}  # fmt: skip
"""Programs `NAME_perf` that tell something a plan uses."""
OTHERS = ("alltoall", "broadcast", "reduce", "gather", "scatter", "hypercube")
MOST_DIGITS = 9
"""Of a rank or a count of devices."""
_RANK_LINE = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d+)\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)\s+"
    r"device\s+(?P<device>\d+)\s+\[[^\]]*\]\s+(?P<name>.+?)\s*$"
)
_COLUMNS = ("size", "type", "time", "algbw", "busbw")
_NUMBER = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?$")
_START = re.compile(r"\bnThread\s+\d+\s+nGpus\s+\d+|Collective test starting|nccl-tests version")
_FAILURE = re.compile(r"Test (?:NCCL |CUDA )?failure|NCCL failure|Segmentation fault|srun: error|MPI_ABORT")
TAGS = re.compile(
    r"\x1b\[[0-9;]{0,99}[A-Za-z]|\[[^\[\]<>]{0,300}?\b\d{1,9} ?, ?\d{1,9}\] ?<std(?:out|err|diag)> ?:"
)
"""Colours, and mpirun's --tag-output, which stands wherever a program flushed. Repeats have limits here and
below: a long line would otherwise be gone through once from each of its places."""
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_LABEL = (
    r"(?:\[[^\[\]\n]{1,100}\]|[\w./-]{1,100}(?::\d+)?:|[\w./-]{1,100} *\||>"
    rf"|\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?|{_CLOCK}|\d{{9,10}}\.\d+|std(?:out|err) [FP]"
    rf"|[A-Z][a-z][a-z] [ \d]\d {_CLOCK} \S+ \S+:)"
)
"""Before lines: srun --label, pdsh, Hydra, kubectl logs --prefix, containers, clocks, syslog, `>`."""
_PREFIX = re.compile(rf"^\s*(?:{_LABEL}\s+)*(?=#|Rank\s+\d|\d+\s+\d+\s)")
_LABELS = re.compile(rf"^[ \t]*(?:{_LABEL}[ \t]+)+", re.M)
_DEBUG = re.compile(r"(-1)?[^\s:]{1,255}:\d{1,9}:\d{1,9} \[\d+\] NCCL (?:INFO|WARN|TRACE|ABORT).*$")
"""The root's -1 is the last cell that a program flushes before it has measured."""


class Rank(NamedTuple):
    """A line `# Rank`."""

    number: int
    group: int
    host: str


@dataclass(frozen=True)
class Row:
    """One size."""

    place: str
    line: int
    size: float
    type: str
    time_us: float
    algbw: float
    busbw: float
    wrong: str


@dataclass
class Table:
    """One program's output; filled while it is read."""

    where: str
    ranks: list[Rank] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    program: str = ""
    date: str = ""
    threads: int = 1
    gpus: int = 0
    columns: list[str] | None = None
    rows: list[Row] = field(default_factory=list)
    empty_rows: int = 0
    """Of 0 bytes."""
    finished: bool = False
    failure: str = ""
    torn: str = ""
    """What is wrong with the last row, if something is."""

    def members(self) -> list[Rank]:
        """Ranks of the first group; all groups run at once and look alike."""
        first = min(rank.group for rank in self.ranks)
        return [rank for rank in self.ranks if rank.group == first]

    def size(self) -> int:
        """Ranks that talk to each other."""
        return len(self.members()) if self.ranks else self.threads * self.gpus

    def hosts(self) -> tuple[str, ...]:
        """In the order of ranks."""
        return tuple(dict.fromkeys(rank.host for rank in self.members())) if self.ranks else ()

    def nodes(self) -> int:
        return max(len(self.hosts()), 1)

    def strided(self) -> bool:
        numbers = sorted(rank.number for rank in self.members()) if self.ranks else []
        return any(b - a != 1 for a, b in pairwise(numbers))

    def what(self) -> str:
        """Its name in messages."""
        return f"{self.program}_perf" if self.program else "a table"


def text_tables(text: str, where: str) -> list[Table]:
    """Those of a log, in order, programs that died before their first row among them."""
    tables = [Table(where=where)]
    reader = _Reader(where)
    for number, raw in enumerate(text.splitlines(), start=1):
        if _begins(tables[-1], raw):
            reader.end(tables[-1], whole=tables[-1].finished)
            tables.append(Table(where=where))
        reader.line(tables[-1], raw, number)
    reader.end(tables[-1], whole=tables[-1].finished)
    return [table for table in tables if table.columns or table.ranks]


def _begins(table: Table, raw: str) -> bool:
    """Whether the next program's output begins with a line: what stands behind a closing line is a remark
    about the table, or already about the next one."""
    if _START.search(raw):
        return bool(table.columns or table.ranks or table.failure)
    remark = _cleaned(raw).strip(" #\t")
    return table.finished and bool(remark) and "concluded" not in remark


def _cleaned(raw: str) -> str:
    """Without what others than the program wrote into the line."""
    return _PREFIX.sub("", _DEBUG.sub(lambda cut: cut.group(1) or "", TAGS.sub("", raw)))


def without_labels(text: str) -> str:
    """An output whose every line was labelled by what collected it, as its program wrote it."""
    lines = [line for line in text.splitlines() if line.strip()]
    return _LABELS.sub("", text) if all(_LABELS.match(line) for line in lines) else text


class _Reader:
    """Lines into tables; rows may go on in the line after next, where NCCL_DEBUG wrote in between."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._begun: list[str] = []
        self._begun_at = 0

    def line(self, table: Table, raw: str, number: int) -> None:
        """One more line of a table."""
        line = _cleaned(raw).strip()
        if _FAILURE.search(line):
            table.failure = table.failure or line[:160]
        version = re.search(r"nccl-library=(\d+)", line) or re.search(r"\bNCCL version (\S+)", raw)
        if version:
            table.versions.setdefault("nccl", version.group(1))
        if not table.finished and self._row(table, line, number):
            return
        header = _header(line)
        table.columns = header or table.columns
        table.finished = table.finished or (line.startswith("#") and "bus bandwidth" in line)
        _setting_line(table, line)

    def _row(self, table: Table, line: str, number: int) -> bool:
        cells = line.split()
        if table.columns is None or not cells:
            return False
        if self._begun and all(_NUMBER.match(cell) or cell == "N/A" for cell in cells):
            cells = [*self._begun, *cells]
        elif not (len(cells) > 1 and cells[0].isdigit() and cells[1].isdigit()) and not re.match(
            r"-?\d+\s", line
        ):
            return False
        else:
            self.end(table, whole=True)
            self._begun_at = number
        place = f"{self.where}, line {self._begun_at}"
        need = _needed(table.columns, place)
        if len(cells) < need:
            self._begun = cells
            return True
        self._begun = []
        row = _text_row(cells, table.columns, place, self._begun_at)
        if row is None:
            table.empty_rows += 1
        else:
            table.rows.append(row)
        return True

    def end(self, table: Table, *, whole: bool) -> None:
        """A row that was begun is not gone on with: a fault, unless the whole output ends there."""
        if not self._begun or table.columns is None:
            return
        torn = f"{self.where}, line {self._begun_at}: {len(self._begun)} columns; wanted {len(table.columns)}"
        self._begun = []
        if whole or not table.rows:
            raise InputError(f"{torn}: cut off?")
        table.torn = torn


def _header(line: str) -> list[str] | None:
    names = line.lstrip("# ").split()
    return names if names[:2] == ["size", "count"] and "time" in names and "algbw" in names else None


def _setting_line(table: Table, line: str) -> None:
    rank = _RANK_LINE.match(line)
    if rank:
        number, group = (_count(rank[name] or "0", name, table.where) for name in ("rank", "group"))
        table.ranks.append(Rank(number, group, rank["host"]))
        table.devices.append(rank["name"])
    for name, pattern in (("threads", r"nThread\s+(\d+)"), ("gpus", r"nGpus\s+(\d+)")):
        match = re.search(pattern, line)
        if match:
            setattr(table, name, _count(match.group(1), name, table.where))
    table.program = table.program or program_in(line)


def _count(digits: str, name: str, where: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise InputError(f"{where}: {name} has {len(digits)} digits; wanted a count: damaged?")
    return int(digits)


def program_in(line: str) -> str:
    """`all_reduce_perf -b 8 -e 8G` in a log, or the name of a file."""
    program = re.search(r"(?<![A-Za-z0-9])(" + "|".join((*PROGRAMS, *OTHERS)) + r")_perf\b", line)
    return program.group(1) if program else ""


def program_of_file(where: str) -> str:
    """What a file's name says in a looser spelling, such as superbench_allgather.log: one program or none."""
    name = re.sub(r"[^a-z]", "_", where.replace("\\", "/").rsplit("/", 1)[-1].lower())
    named = program_in(name)
    if named:
        return named
    spelled = {program.replace("_", ""): program for program in (*PROGRAMS, *OTHERS)}
    name = re.sub(r"(all|send|reduce)_(?=reduce|gather|recv|scatter|to_?all)", r"\1", name)
    programs = {spelled[word] for word in name.split("_") if word in spelled}
    return programs.pop() if len(programs) == 1 else ""


def _needed(columns: Sequence[str], place: str) -> int:
    """Cells of a row up to its first side's last one."""
    last = next((name for name in ("#wrong", "error", "busbw") if name in columns), columns[-1])
    need = columns.index(last) + 1
    missing = [name for name in _COLUMNS if name not in columns[:need]]
    if missing:
        raise InputError(
            f"{place}: the header above has no column {missing[0]}; wanted {', '.join(_COLUMNS)}"
        )
    return need


def _text_row(cells: Sequence[str], columns: Sequence[str], place: str, number: int) -> Row | None:
    """None of 0 bytes, which tells nothing."""
    need = _needed(columns, place)
    value = dict(zip(columns[:need], cells[:need], strict=True))
    size = number_in(value["size"], "size", place)
    if size == 0.0:
        return None
    return Row(
        place=place, line=number, size=size, type=value["type"],
        time_us=positive(value["time"], "time", place),
        algbw=number_in(value["algbw"], "algbw", place), busbw=number_in(value["busbw"], "busbw", place),
        wrong=value.get("#wrong", "0"),
    )  # fmt: skip


def number_in(text: object, name: str, place: str) -> float:
    """A finite number from 0."""
    if not _NUMBER.match(str(text)):
        raise InputError(f"{place}: {name} is {text!r}; wanted a number from 0")
    number = float(str(text))
    if not math.isfinite(number):
        raise InputError(f"{place}: {name} is {text!r}; wanted a finite number")
    return number


def positive(text: object, name: str, place: str) -> float:
    """A finite number above 0."""
    number = number_in(text, name, place)
    if number <= 0.0:
        raise InputError(f"{place}: {name} is {text}; wanted above 0")
    return number


def missing_ranks(table: Table) -> Iterator[int]:
    """Numbers without a line, up to the largest that has one."""
    numbers = {rank.number for rank in table.ranks}
    return (number for number in range(max(numbers, default=-1) + 1) if number not in numbers)
