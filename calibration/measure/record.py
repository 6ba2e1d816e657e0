"""The file of results: one JSON object a line, written out after each point, taken up again after a stop.

    {"conditions": {"id": "7f3a09c1", "device": "NVIDIA H200", "backend": "cuda", "precision": "bf16", ...}}
    {"kind": "gemm", "of": "7f3a09c1", "point": "gemm nt 4096x4096x1024", "m": 4096, ..., "seconds": 6.1e-5}

`point` names what was measured: a point that the file holds under the same conditions is not measured again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


class Refused(Exception):
    """Something that the user can mend: shown as one line, exit code 2."""


@dataclass(frozen=True)
class Conditions:
    """What a series of points has in common; the same conditions have the same id on every day."""

    device: str
    backend: str
    precision: str
    date: str
    versions: dict[str, str]
    clock_mhz: float | None = None
    note: str = ""

    @property
    def identity(self) -> str:
        """Of what decides times; date, clock and note do not."""
        what = [self.device, self.backend, self.precision, sorted(self.versions.items())]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]

    def line(self) -> dict[str, Any]:
        body = {
            "id": self.identity, "device": self.device, "backend": self.backend, "precision": self.precision,
            "date": self.date, "versions": self.versions, "clock_mhz": self.clock_mhz, "note": self.note,
        }  # fmt: skip
        return {"conditions": {key: value for key, value in body.items() if value not in (None, "")}}


@dataclass
class Recorder:
    """An open file of results; one process writes, others find it locked."""

    path: Path
    conditions: Conditions
    file: TextIO
    done: set[str] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)

    def write(self, kind: str, point: str, values: dict[str, Any]) -> None:
        """On the disk when this returns: a killed run keeps every point before the last."""
        line = {"kind": kind, "of": self.conditions.identity, "point": point, **values}
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self._settle()
        self.done.add(point)

    def _settle(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


BEGINNING = b'{"conditions": {'
"""Of every file that these programs write."""


def open_record(path: Path, conditions: Conditions, *, append: bool = False) -> Recorder:
    """Opens a new file, or takes one up: cuts off a half-written last line, refuses other conditions."""
    notices: list[str] = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Refused(f"{path}: another run writes to it; wait for it, or choose another --out") from None
    except OSError:
        # Network file systems of clusters often have no locks.
        notices.append(f"{path}: its file system has no locks; let one run at a time write to it")
    try:
        found = _lines(path, notices)
        done = _done(found, path, conditions, append)
        known = any(conditions.identity == line["conditions"].get("id") for line in found if _heads(line))
        recorder = Recorder(path, conditions, file, done, notices)
        if not known:
            file.write(json.dumps(conditions.line(), allow_nan=False) + "\n")
            recorder._settle()
        return recorder
    except BaseException:
        file.close()
        raise


def _heads(line: dict[str, Any]) -> bool:
    return isinstance(line.get("conditions"), dict)


def _lines(path: Path, notices: list[str]) -> list[dict[str, Any]]:
    """All whole lines. What follows the last line end is a point whose writing was cut short."""
    data = path.read_bytes()
    whole, end, rest = data.rpartition(b"\n")
    found = []
    for number, text in enumerate(whole.split(b"\n") if whole else (), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise Refused(
                f"{path}, line {number}: not a JSON object; wanted a file of this program"
            ) from None
        found.append(line)
    if rest:
        # Only of a file that is ours: any other keeps its last line, which may be all there is of it.
        begun = BEGINNING.startswith(rest) or rest.startswith(BEGINNING)
        if not (_heads(found[0]) if found else begun):
            raise Refused(f"{path}: no file of this program; wanted one, or a new name")
        notices.append(f"{path}: dropped its last line, which was cut off after {len(rest)} bytes")
        os.truncate(path, len(whole) + len(end))
    return found


def _done(found: list[dict[str, Any]], path: Path, conditions: Conditions, append: bool) -> set[str]:
    others = [
        line["conditions"]
        for line in found
        if _heads(line) and line["conditions"].get("id") != conditions.identity
    ]
    if others and not append:
        differs = _difference(others[0], conditions)
        raise Refused(
            f"{path} holds measurements under other conditions ({differs}); "
            "try another --out, or --append to keep both in one file"
        )
    if found and not any(_heads(line) for line in found):
        raise Refused(f"{path}: no conditions line; wanted a new file or one of this program")
    return {str(line["point"]) for line in found if line.get("of") == conditions.identity and "point" in line}


def _difference(other: dict[str, Any], conditions: Conditions) -> str:
    """The first thing in which they differ, both values."""
    here = conditions.line()["conditions"]
    for name in ("device", "backend", "precision"):
        if other.get(name) != here[name]:
            return f"{name} is {other.get(name)!r} there, {here[name]!r} here"
    there = other.get("versions")
    there = there if isinstance(there, dict) else {}
    for name in sorted({*there, *conditions.versions}):
        if there.get(name) != conditions.versions.get(name):
            return f"{name} is {there.get(name)} there, {conditions.versions.get(name)} here"
    return "another id"
