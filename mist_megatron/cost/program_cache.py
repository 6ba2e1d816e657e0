"""Keeps compiled stage programs, by the hash of all that they were made from.

What is kept is data, never code (see `compile`), and is only believed when its name, its inner key and its
checksum are right; anything else is treated as absent and made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from mist_megatron.cost.stage import StageProgram, stage_program_from_document

_FORMAT = 3
_LARGEST_BYTES = 8 * 1024 * 1024
"""A real program is some 60 kB; a file far beyond that is not ours."""
SOURCES = ("cost", "spec", "targets")
"""Rooms from whose sources a program follows."""


class Store(Protocol):
    """Where programs are kept, such as `formats.files.CacheFolder`."""

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """What is kept under a name; None where nothing sound is."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Keeps it, if that is possible."""
        ...


def program_key(description: str) -> str:
    """Hash of a description of the model and target, and of the sources that turn it into a program."""
    digest = hashlib.sha256(f"{_FORMAT}\n{description}\n".encode())
    digest.update(_sources())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _sources() -> bytes:
    """Of this process: what was imported does not change."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in sorted(path for room in SOURCES for path in (package / room).rglob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.digest()


def load_or_build(store: Store | None, description: str, build: Callable[[], StageProgram]) -> StageProgram:
    """The program of `description`, from the store when a sound copy is there; None keeps nothing."""
    if store is None:
        return build()
    key = program_key(description)
    name = f"stage-{key[:32]}.json"
    program = _sound(store.read(name, _LARGEST_BYTES), key)
    if program is None:
        program = build()
        body = program.to_document()
        text = json.dumps({"key": key, "checksum": _checksum(key, body), "stage": body})
        store.write(name, text.encode())
    return program


def _sound(data: bytes | None, key: str) -> StageProgram | None:
    if data is None:
        return None
    try:
        document = json.loads(data)
        body = document["stage"]
        if document["key"] != key or document["checksum"] != _checksum(key, body):
            return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return stage_program_from_document(body)


def _checksum(key: str, body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{key}{text}".encode()).hexdigest()
