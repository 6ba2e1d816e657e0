"""How files take the place of others, when the program that writes them may die at any time.

Everything is written aside first, on the disk where it belongs, under a name that tells who writes: the
machine, its process, and a mark. What several files say together they take their places together: once all
are written, one renaming says that they shall (`.mist-commit-...`); then the files that they replace go,
and then they come. So a folder holds files of the old content or of the new one, never of both; and what a
process that died has left is finished, or cleared away, by whoever next writes or reads there.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
import time
from pathlib import Path

_WRITTEN, _COMMITTED = _MARKS = ".mist-new-", ".mist-commit-"
_LONGEST_S = 24 * 3600.0
"""No writer takes a day: what is older belongs to none, whoever has its number now."""


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", platform.node())[:60] or "host"


def _mark(kind: str) -> str:
    return f"{kind}{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def name_aside(parent: Path) -> Path:
    """A name beside what it will replace, for what is written before it takes its place."""
    return parent / _mark(_WRITTEN)


def is_aside(path: Path) -> bool:
    """Whether a name is of this file's making."""
    return path.name.startswith(_MARKS)


def take_places(aside: Path, out: Path) -> None:
    """All files of a folder that was written aside take their places in `out`; an interrupt does not stop it.

    From the first renaming on it is certain: if this process dies, the next one finishes.
    """
    committed = out / _mark(_COMMITTED)
    aside.rename(committed)
    try:
        _finish(committed, out)
    except KeyboardInterrupt:
        _finish(committed, out)
        raise


def recover(folder: Path) -> None:
    """Finishes what a process that died was certain of here, and clears away what it was not."""
    try:
        # Names, not paths: a cache may hold tens of thousands.
        left = [folder / name for name in os.listdir(folder) if name.startswith(_MARKS)]
    except OSError:
        return
    for path in left:
        with contextlib.suppress(OSError):
            if not _is_dead(path):
                continue
            if path.name.startswith(_COMMITTED):
                # Of two that would finish it, the renaming lets one.
                mine = folder / _mark(_COMMITTED)
                path.rename(mine)
                _finish(mine, folder)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _finish(committed: Path, out: Path) -> None:
    """Old files go before the first new one comes; what starts a run goes first and comes last."""
    names = sorted(
        (path.relative_to(committed) for path in committed.rglob("*") if not path.is_dir()),
        key=lambda name: (os.access(committed / name, os.X_OK), str(name)),
    )
    for name in reversed(names):
        (out / name).unlink(missing_ok=True)
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (committed / name).replace(out / name)
    shutil.rmtree(committed, ignore_errors=True)


def _is_dead(path: Path) -> bool:
    """Whether it is ours and nobody works on it any more; of other machines' processes nothing is known for
    a day."""
    status = path.lstat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return False  # in a folder of all, somebody else's files would replace ours
    if time.time() - status.st_mtime > _LONGEST_S:
        return True
    writer, process, _ = path.name.rsplit("-", 2)
    if writer.rpartition("-")[2] != _host():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
