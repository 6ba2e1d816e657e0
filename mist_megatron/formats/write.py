"""The only writer of the package: a folder of texts appears whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from mist_megatron.errors import InputError

Artifacts = Mapping[str, str]
"""Relative POSIX path -> text. Scripts (.sh, .sbatch) are written executable."""

EXECUTABLE_SUFFIXES = frozenset({".sh", ".sbatch"})


def write_artifacts(out: Path, artifacts: Artifacts, *, force: bool = False) -> tuple[Path, ...]:
    """Write the folder `out`; returns the files written.

    All files are written aside first and put in place by renaming, so that an interrupt, a full disk or a
    bad path leaves what was there before. A new folder appears in one step. One that is there stays the same
    folder, which may be a shell's current one or where a disk is mounted: with `force` each file replaces its
    namesake in one step; other files (checkpoints, say) stay untouched.
    """
    _check_paths(artifacts)
    out = _resolved(out)
    taken = out.exists() and any(out.iterdir())
    if taken and not force:
        raise InputError(
            f"output folder {out} is not empty",
            details=("nothing was written", "try: --force to replace the files in it, or another folder"),
        )
    _make_parent(out)
    aside = _aside(out)
    try:
        for name, text in artifacts.items():
            _write_one(aside / name, text)
        if out.exists():
            _put_in_place(aside, out, artifacts, empty=not taken)
        else:
            aside.rename(out)
    except OSError as error:
        raise InputError(
            f"cannot write {out}: {error.strerror or error}", details=("nothing was written",)
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return tuple(out / name for name in artifacts)


def write_file(path: Path, text: str, *, force: bool = False) -> Path:
    """Write one file whole or not at all; an existing one needs `force`."""
    if path.exists() and not path.is_dir() and not force:
        raise InputError(f"{path} exists", details=("nothing was written", "try: --force, or another name"))
    _make_parent(path)
    return write_pieces(path, (text,))


def write_pieces(path: Path, pieces: Iterable[str]) -> Path:
    """Write one file from pieces of text, whole or not at all; a name that ends in .gz is compressed.

    What is there is replaced in one step, unless it is no plain file (/dev/stdout, a named pipe): that is
    written to, never replaced.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder, wanted a file name")
    try:
        if path.exists() and not path.is_file():
            _pour(path, pieces, compressed=False)
            return path
        real = path.resolve()  # a link stays a link
        handle, name = tempfile.mkstemp(prefix=f".{real.name[:200]}.", dir=real.parent)
        os.close(handle)
        aside = Path(name)
        try:
            _pour(aside, pieces, compressed=path.suffix == ".gz")
            aside.chmod((0o777 if path.suffix in EXECUTABLE_SUFFIXES else 0o666) & ~_umask())
            aside.replace(real)
        finally:
            aside.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}", details=("nothing was written",)
        ) from error
    return path


def _check_paths(artifacts: Artifacts) -> None:
    """A name from outside must never leave the folder; ours never do, and this keeps it so."""
    for name in artifacts:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"artifact path {name!r} is not inside the output folder")


def _resolved(out: Path) -> Path:
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"cannot write the folder {out}: it is a file", details=("try: another folder",))
        return out.resolve()
    except (OSError, RuntimeError) as error:  # a name that is too long; links in a circle (RuntimeError)
        raise InputError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from None


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"cannot make the folder {path.parent}: a part of it is a file") from None
    except OSError as error:
        raise InputError(f"cannot make the folder {path.parent}: {error.strerror or error}") from error


def _aside(out: Path) -> Path:
    """On the disk of the folder: inside it where it is there, beside it where it is not."""
    parent = out if out.exists() else out.parent
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name[:200]}.", dir=parent))
        aside.chmod(0o777 & ~_umask())
        return aside
    except OSError as error:
        raise InputError(f"cannot write in {parent}: {error.strerror or error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _pour(path: Path, pieces: Iterable[str], *, compressed: bool) -> None:
    with contextlib.ExitStack() as stack:
        if compressed:
            # The fastest level: a trace shrinks to an 18th with it, to a 25th with gzip's own level 6.
            file: IO[str] = stack.enter_context(
                gzip.open(path, "wt", compresslevel=1, encoding="utf-8", newline="\n")
            )
        else:
            file = stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
        for piece in pieces:
            file.write(piece)


def _write_one(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    path.chmod((0o777 if path.suffix in EXECUTABLE_SUFFIXES else 0o666) & ~_umask())


def _put_in_place(aside: Path, out: Path, artifacts: Artifacts, *, empty: bool) -> None:
    """Files of a folder that is there, by one rename each; one that was empty is so again if that fails."""
    for name in artifacts:  # all that may be refused is refused before the first file is replaced
        if (out / name).is_dir():
            raise IsADirectoryError(f"{name} is a folder there")
    try:
        for name in artifacts:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
        for name in artifacts:
            (aside / name).replace(out / name)
    except BaseException:
        if empty:
            for name in {PurePosixPath(name).parts[0] for name in artifacts}:
                shutil.rmtree(out / name, ignore_errors=True)
                with contextlib.suppress(OSError):
                    (out / name).unlink()
        raise
