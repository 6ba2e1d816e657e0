"""Files that commands write beside their answer: what cannot be is told before the work, not after it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from mist_megatron.errors import InputError


def check_output_file(option: str, path: Path, *, read: Iterable[Path], example: str) -> None:
    """What was there before is replaced, unless it is one of the files that the command reads, or where the
    answer goes."""
    if str(path) == "-" or _is_answer(path):
        raise InputError(f"{option} {path}: the answer goes there; wanted a file, such as {example}")
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; wanted a file, such as {path / example}")
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{option} {path} cannot be written: no permission")
    if path.exists() and any(path.samefile(source) for source in read if source.exists()):
        raise InputError(f"{option} {path} is what the command reads; wanted another file")


def _is_answer(path: Path) -> bool:
    """/dev/stdout, or the file or pipe that it stands for; a device (/dev/null) mixes nothing up."""
    try:
        answer, there = os.fstat(1), path.stat()
    except OSError:
        return False
    return os.path.samestat(answer, there) and not stat.S_ISCHR(answer.st_mode)
