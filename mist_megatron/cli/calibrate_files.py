"""Files of `calibrate`: raw measurements in, profiles by name or path, a profile with its tables out."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mist_megatron.ask.evaluators import load_profile
from mist_megatron.errors import InputError, ProfileError
from mist_megatron.resources import data_folder

if TYPE_CHECKING:
    from mist_megatron.spec.cluster import GpuSpec
    from mist_megatron.spec.profile import Profile

MOST_TRACE_BYTES = 1 << 30
"""A trace of one iteration has some 100 MB; more does not fit in a laptop's memory once it is parsed."""
GZIP = b"\x1f\x8b"


def read_output_text(path: Path) -> str:
    """Text of a tool's output, unpacked when it is compressed."""
    from mist_megatron.formats.files import read_text

    try:
        if not path.is_file():
            return read_text(path)  # which tells what is wrong with it
        with path.open("rb") as file:
            packed = file.read(2) == GZIP
        if not packed:
            return read_text(path, most_bytes=MOST_TRACE_BYTES)
        with gzip.open(path, "rb") as stream:
            data = stream.read(MOST_TRACE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: cut off or damaged: {error}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} cannot be read: {reason}") from None
    if len(data) > MOST_TRACE_BYTES:
        raise InputError(f"{path} unpacks to more than {MOST_TRACE_BYTES} bytes; wanted fewer iterations")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file (not UTF-8)") from None


def date_of(path: Path) -> str:
    """When a file was last written: what is known of an output that names no date."""
    return datetime.fromtimestamp(path.stat().st_mtime, tz=UTC).date().isoformat()


def shipped_profiles() -> tuple[Path, ...]:
    """The profiles that come with the package."""
    return tuple(sorted((data_folder("calibration") / "profiles").glob("*.yaml")))


def profile_named(named: str) -> Profile:
    """A shipped profile by name, or a file."""
    shipped = {path.stem: path for path in shipped_profiles()}
    if named in shipped:
        return load_profile(shipped[named])
    if "/" not in named and not Path(named).exists() and not named.endswith((".yaml", ".yml", ".json")):
        raise ProfileError(
            f"no profile {named!r}", details=(f"known: {', '.join(shipped)}", "or a path to a profile.yaml")
        )
    return load_profile(Path(named))


def base_profile(gpu: GpuSpec, named: str | None) -> Profile:
    """The profile that fills what was not measured: the one named, the GPU's own, or typical figures."""
    from mist_megatron.price.datasheet import datasheet_profile

    if named is not None:
        return profile_named(named)
    shipped = {path.stem: path for path in shipped_profiles()}
    return load_profile(shipped[gpu.name]) if gpu.name in shipped else datasheet_profile(gpu)


def write_profile(profile: Profile, out: Path, *, force: bool) -> list[Path]:
    """The YAML and its tables beside it; tables first, so that no YAML names a table that is not there."""
    from mist_megatron.formats.profile_yaml import profile_to_files

    if out.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out is {out}; wanted a name that ends in .yaml")
    count = Counter(table.operator for table in profile.tables)
    names = {
        index: f"{out.stem}.{table.operator}{f'.{table.precision}' * (count[table.operator] > 1)}.csv.gz"
        for index, table in enumerate(profile.tables)
    }
    files = profile_to_files(profile, names)
    body = files.pop(f"{profile.name}.yaml")
    paths = {out.parent / name: data for name, data in files.items()} | {out: body}
    taken = [path for path in paths if path.exists()]
    if taken and not force:
        raise InputError(
            f"{taken[0]} exists", details=("nothing was written", "try: --force, or another --out")
        )
    _write_together(paths)
    return list(paths)


def _write_together(paths: dict[Path, bytes]) -> None:
    """Everything is written aside first; then each file takes its place in one step, in this order."""
    aside: list[tuple[Path, Path]] = []
    try:
        for path, data in paths.items():
            if path.is_dir():
                raise InputError(f"cannot write {path}: it is a folder", details=("nothing was written",))
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            aside.append((Path(name), path))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).chmod(0o644)
        for written, path in aside:
            written.replace(path)
    except OSError as error:
        raise InputError(
            f"cannot write {error.filename or 'the profile'}: {error.strerror or error}",
            details=("nothing was written",),
        ) from error
    finally:
        for written, _ in aside:
            written.unlink(missing_ok=True)
