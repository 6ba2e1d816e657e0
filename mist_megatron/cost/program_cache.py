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

from mist_megatron.cost.narrow import weight_beyond_bytes
from mist_megatron.cost.stage import StageProgram, stage_program_from_document
from mist_megatron.price.compiled_kernels import compiled_slowdown
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.job import Job
from mist_megatron.targets.table import TARGETS

_FORMAT = 4
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


def stage_program(job: Job, store: Store | None) -> StageProgram:
    """The program of a job's stages, from the store or compiled anew."""

    def build() -> StageProgram:
        # Imported late: a cached program needs none of it.
        from mist_megatron.cost.symbolic import stage_program_of

        return stage_program_of(job)

    if store is None:
        return build()
    training = job.training
    # Sizes that are symbols in the program.
    sizes = {
        "expert_parallel": None,
        "expert_tensor_parallel": None,
        "expert_imbalance": None,
        "context_inner": None,
        "optimizer_instances": None,
        "hpz_size": None,
    }
    # When weights are gathered changes neither what a layer does nor what a stage holds.
    execution = varied(job.execution, context_parallel=1, overlap_param_gather=None, **sizes)
    eight_bit = training.precision == "fp8"
    described = repr(
        (
            *(job.model, training.flash_attention, training.dropout, eight_bit, execution, job.target),
            TARGETS[job.target].memory(job.execution),
            compiled_slowdown(job.cluster.gpu.name),
            weight_beyond_bytes(job),
        )
    )
    if (store, described) not in _READ:
        while len(_READ) >= MOST_READ:
            del _READ[next(iter(_READ))]
        _READ[store, described] = load_or_build(store, described, build)
    return _READ[store, described]


_READ: dict[tuple[Store, str], StageProgram] = {}
"""Programs that this process has from a cache: a search asks for the same in each way of execution."""
MOST_READ = 256


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
    name = f"stage-{key[:32]}.jsonl"
    program = _sound(store.read(name, _LARGEST_BYTES), key)
    if program is None:
        program = build()
        body = json.dumps(program.to_document()).encode()
        store.write(name, _checked(key, body) + body)
    return program


def _sound(data: bytes | None, key: str) -> StageProgram | None:
    head, _, body = (data or b"").partition(b"\n")
    if head + b"\n" != _checked(key, body):
        return None
    try:
        return stage_program_from_document(json.loads(body))
    except (ValueError, RecursionError):
        return None


def _checked(key: str, body: bytes) -> bytes:
    """The line before a program: what it is of, and a checksum of both."""
    return f"{json.dumps([key, hashlib.sha256(key.encode() + body).hexdigest()])}\n".encode()
