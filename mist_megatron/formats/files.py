"""The only reader and writer of files: whatever is read is limited and decoded here before the pure parsers
see it, and whatever is written appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mist_megatron.errors import InputError
from mist_megatron.formats.aside import is_aside, name_aside, recover, take_places
from mist_megatron.formats.document import parse
from mist_megatron.formats.huggingface import is_huggingface, model_from_huggingface
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.formats.plan_yaml import plan_from_text
from mist_megatron.spec import presets
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan

MOST_BYTES = 64 << 20
"""A plan has kilobytes and a measured profile a few megabytes; more is a wrong file."""
MOST_TRACE_BYTES = 1 << 30
"""A trace of one iteration has some 100 MB; more does not fit in a laptop's memory once it is parsed."""
GZIP = b"\x1f\x8b"

Artifacts = Mapping[str, str]
"""Relative POSIX path -> text. Scripts (.sh, .sbatch) are written executable."""
EXECUTABLE_SUFFIXES = frozenset({".sh", ".sbatch"})
Pour = Callable[[Path], None]
"""Writes the content of a file to the path it is given."""


def read_text(path: str | Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file, or one line on why it cannot be had."""
    return _decoded(read_bytes(path, most_bytes=most_bytes), path)


def read_bytes(path: str | Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a file, or one line on why they cannot be had."""
    if not str(path):
        raise InputError("the name of the file is empty; wanted a path")
    try:
        return _bytes_of(Path(path), most_bytes)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {_reason(error)}") from None


def read_packed_text(path: Path) -> str:
    """The text of a tool's output, unpacked when it is compressed."""
    data = read_bytes(path, most_bytes=MOST_TRACE_BYTES)
    if not data.startswith(GZIP):
        return _decoded(data, path)
    try:
        with gzip.open(io.BytesIO(data), "rb") as stream:
            data = stream.read(MOST_TRACE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: cut off or damaged: {error}") from None
    if len(data) > MOST_TRACE_BYTES:
        raise InputError(f"{path} unpacks to more than {MOST_TRACE_BYTES} bytes; wanted fewer iterations")
    return _decoded(data, path)


class PackedFile:
    """An open file, unpacked while it is read. One that ends inside gzip's data ends there: whoever reads it
    sees that the text is cut off, and may use what came before."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._packed = file.read(2) == GZIP
        file.seek(0)
        self._path = path
        self._plain = file
        self._unpacked = gzip.GzipFile(fileobj=file)
        self._ended = False

    def read(self, size: int, /) -> bytes:
        """So many bytes, or what is left."""
        if not self._packed:
            return self._plain.read(size)
        parts: list[bytes] = []
        length = 0
        while length < size and not self._ended:
            try:
                part = self._unpacked.read1(min(size - length, 1 << 20))
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                if not parts and not length and self._unpacked.tell() == 0:
                    raise InputError(f"{self._path}: cut off or damaged: {error}") from None
                self._ended = True
                break
            self._ended = not part
            parts.append(part)
            length += len(part)
        return b"".join(parts)


@contextlib.contextmanager
def open_packed(path: Path) -> Iterator[PackedFile]:
    """A large file for reading in pieces, compressed or not; or one line on why it cannot be had."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {_reason(error)}") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise InputError(f"{path} is {kind}; wanted a file")
    with os.fdopen(handle, "rb") as file:
        yield PackedFile(path, file)


def files_below(path: Path, endings: tuple[str, ...]) -> list[Path]:
    """The file itself, or of a folder the files in it with one of these endings, by name."""
    if not is_there(path):
        raise InputError(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    files = sorted(one for one in path.iterdir() if one.name.endswith(endings) and one.is_file())
    if not files:
        raise InputError(f"{path} holds no file that ends in {', '.join(endings)}")
    return files


def _decoded(data: bytes, path: str | Path) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file (not UTF-8)") from None
    if "\0" in text:
        raise InputError(f"{path} is not a text file (holds zero bytes)")
    return text


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _bytes_of(path: Path, most_bytes: int) -> bytes:
    """Opened without waiting: a pipe that nobody writes to would hold the program forever. Where a writer
    died while files took their places, they take them first."""
    recover(path.parent)
    return _bytes_there(path, most_bytes)


def _bytes_there(path: Path, most_bytes: int) -> bytes:
    """Of a file that takes its place by itself."""
    # Windows opens neither folders nor pipes this way, and has no such flag.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise InputError(f"{path} is {kind}; wanted a file")
    with os.fdopen(handle, "rb") as file:
        # Files that are made while they are read, as in /proc, give no size beforehand.
        data = file.read(most_bytes + 1)
    size = max(status.st_size, len(data))
    if size > most_bytes:
        raise InputError(f"{path} has {size} bytes; wanted at most {most_bytes}: is this the right file?")
    return data


def load_mapping(path: str | Path) -> dict[str, Any]:
    """A YAML or JSON file that is one mapping."""
    return parse(read_text(path), str(path))


def load_plan(path: str | Path) -> Plan:
    """plan.yaml, or its JSON form."""
    return plan_from_text(read_text(path), str(path))


def load_model(name_or_path: str) -> ModelSpec:
    """A preset by name, a model from a Hugging Face config.json or our own YAML/JSON mapping, or one of the
    Hub by its id: of the local cache, which is asked and nothing else, or the preset of that name."""
    if name_or_path.lower() in presets.PRESETS:
        return presets.PRESETS[name_or_path.lower()]
    path = Path(name_or_path)
    if not is_there(path):
        kept, known = _cached_config(name_or_path), presets.preset_like(name_or_path.rpartition("/")[2])
        if kept is None and known is not None:
            return known
        if kept is None and HUB_ID.fullmatch(name_or_path) and not name_or_path.endswith(FILE_ENDINGS):
            raise InputError(
                f"--model {name_or_path}: neither a file, nor in the local Hugging Face cache, nor a preset",
                details=(f"try: hf download {name_or_path} config.json, or see: mist-megatron models",),
            )
        path = kept or path
    if not _looks_like_path(name_or_path):
        presets.preset(name_or_path)
    if is_there(path / "config.json"):
        path = path / "config.json"
    values = load_mapping(path)
    if is_huggingface(values):
        return model_from_huggingface(values, str(path))
    return model_from_mapping({"name": path.stem, **values}, str(path))


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Who publishes it and what it is called there."""
LONGEST_ID = 96
"""The Hub takes no longer one."""
FILE_ENDINGS = (".json", ".yaml", ".yml")


def _cached_config(name: str) -> Path | None:
    """config.json of a Hub model that was downloaded before, where Hugging Face's own library keeps it."""
    if not HUB_ID.fullmatch(name) or ".." in name or len(name) > LONGEST_ID:
        return None
    told = os.environ.get
    home = told("HF_HOME") or f"{told('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    hub = Path(told("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    main = snapshots.parent / "refs" / "main"
    newest = read_text(main).strip() if is_there(main) else "*"
    configs = sorted(snapshots.glob(f"{newest}/config.json")) if re.fullmatch(r"\w+|\*", newest) else []
    return configs[0] if configs else None


def _looks_like_path(text: str) -> bool:
    if "/" in text or "\\" in text or text.endswith(FILE_ENDINGS):
        return True
    return bool(text) and is_there(Path(text))


def is_there(path: Path) -> bool:
    """Whether something has this name; a name that the system cannot even look up names nothing."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def written_on(path: Path) -> str:
    """The day on which a file was last written: what is known of an output that names no date."""
    return datetime.fromtimestamp(path.stat().st_mtime, tz=UTC).date().isoformat()


def write_artifacts(out: Path, artifacts: Artifacts, *, force: bool = False) -> tuple[Path, ...]:
    """Write the folder `out`; returns the files written.

    All files are written aside first, so that an interrupt, a full disk or a bad path leaves what was there
    before. A new folder appears in one step. One that is there stays the same folder, which may be a shell's
    current one or where a disk is mounted: with `force` the files take the places of their namesakes
    together (`aside.take_places`); other files (checkpoints, say) stay untouched.
    """
    _check_paths(artifacts)
    out = _resolved(out)
    recover(out if out.exists() else out.parent)
    taken = out.exists() and not all(map(is_aside, out.iterdir()))
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
            _refuse_folders(out, artifacts)
            take_places(aside, out)
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
            _pour(pieces, False, path)
        else:
            # A link stays a link.
            _replace(path.resolve(), partial(_pour, pieces, path.suffix == ".gz"))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}", details=("nothing was written",)
        ) from error
    return path


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write several files of one folder, which take their places together once all are written aside."""
    _make_parent(folder / "any")
    recover(folder)
    aside = name_aside(folder)
    try:
        for name, data in files.items():
            if (folder / name).is_dir():
                raise IsADirectoryError(None, "it is a folder", str(folder / name))
            aside.mkdir(exist_ok=True)
            (aside / name).write_bytes(data)
        take_places(aside, folder)
    except OSError as error:
        raise InputError(
            f"cannot write {error.filename or 'the files'}: {error.strerror or error}",
            details=("nothing was written",),
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@dataclass(frozen=True)
class CacheFolder:
    """Files that are a convenience: one that is not ours, too large or damaged counts as absent, and one that
    cannot be written is left out."""

    folder: Path

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """The content of a file of ours; None where there is none."""
        path = self.folder / name
        try:
            if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
                return None
            return _bytes_there(path, most_bytes)
        except (OSError, ValueError, InputError):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all, readable by its owner alone."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _replace(self.folder / name, lambda aside: _pour_bytes(data, aside), mode=0o600)


def _replace(path: Path, pour: Pour, *, mode: int | None = None) -> None:
    """The file is written aside, in the folder where it belongs; then it takes its place by renaming."""
    recover(path.parent)
    written = name_aside(path.parent)
    try:
        written.touch(0o600, exist_ok=False)
        pour(written)
        written.chmod(_usual_mode(path) if mode is None else mode)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def _usual_mode(path: Path) -> int:
    return (0o777 if path.suffix in EXECUTABLE_SUFFIXES else 0o666) & ~_umask()


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
        aside = name_aside(parent)
        aside.mkdir()
        return aside
    except OSError as error:
        raise InputError(f"cannot write in {parent}: {error.strerror or error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _pour(pieces: Iterable[str], compressed: bool, path: Path) -> None:
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


def _pour_bytes(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _write_one(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    path.chmod(_usual_mode(path))


def _refuse_folders(out: Path, artifacts: Artifacts) -> None:
    """All that may be refused is refused before the first file is replaced."""
    for name in artifacts:
        if (out / name).is_dir():
            raise IsADirectoryError(f"{name} is a folder there")
        for folder in PurePosixPath(name).parents:
            if (out / folder).exists() and not (out / folder).is_dir():
                raise NotADirectoryError(f"{folder} is a file there, wanted a folder")
