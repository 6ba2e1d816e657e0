"""Keeps compiled stage programs on disk, by the hash of all that they were made from.

A cache file is data, never code (see `compile`), and is only believed when its name, its inner key, its
checksum and its owner are right; anything else is treated as absent and written anew. This is an edge of the
house: it is the only module of the cost model that touches files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from mist_megatron.cost.stage import StageProgram, stage_program_from_document

_FORMAT = 1
_LARGEST_BYTES = 8 * 1024 * 1024
"""A real program is some 60 kB; a file far beyond that is not ours."""
SOURCES = ("cost", "spec", "targets")
"""Rooms from whose sources a program follows."""


def program_key(description: str) -> str:
    """Hash of a description of the model and target, and of the sources that turn it into a program."""
    digest = hashlib.sha256(f"{_FORMAT}\n{description}\n".encode())
    package = Path(__file__).parent.parent
    for path in sorted(path for room in SOURCES for path in (package / room).rglob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_or_build(
    directory: Path | None, description: str, build: Callable[[], StageProgram]
) -> StageProgram:
    """The program of `description`, from `directory` when a sound copy is there; None caches nothing."""
    if directory is None:
        return build()
    key = program_key(description)
    path = directory / f"stage-{key[:32]}.json"
    found = _read(path, key)
    if found is None:
        found = build()
        _write(path, key, found)
    return found


def _read(path: Path, key: str) -> StageProgram | None:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "getuid") and status.st_uid != os.getuid():
                return None
            if status.st_size > _LARGEST_BYTES:
                return None
            document = json.loads(file.read())
        body = document["stage"]
        if document["key"] != key or document["checksum"] != _checksum(key, body):
            return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return stage_program_from_document(body)


def _write(path: Path, key: str, stage: StageProgram) -> None:
    """Atomic, and silent when the directory cannot be written: a cache is a convenience."""
    body = stage.to_document()
    text = json.dumps({"key": key, "checksum": _checksum(key, body), "stage": body})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)


def _checksum(key: str, body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{key}{text}".encode()).hexdigest()
