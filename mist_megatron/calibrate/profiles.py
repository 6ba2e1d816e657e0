"""Where hardware profiles are found, read and kept: those that come with this package, and files."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mist_megatron.errors import InputError, ProfileError
from mist_megatron.formats.files import is_there, read_bytes, read_text, write_together
from mist_megatron.resources import data_folder

if TYPE_CHECKING:
    from mist_megatron.spec.cluster import ClusterSpec, GpuSpec
    from mist_megatron.spec.profile import Profile


def shipped_profiles() -> dict[str, Path]:
    """The profiles that come with the package, by name, which is that of their GPU."""
    return dict(_profiles_in(data_folder("calibration") / "profiles"))


@lru_cache(maxsize=8)
def _profiles_in(folder: Path) -> tuple[tuple[str, Path], ...]:
    return tuple((path.stem, path) for path in sorted(folder.glob("*.yaml")))


def profile_of(cluster: ClusterSpec) -> Profile | None:
    """The profile that a cluster names (a shipped one, or a file), or else the one of its GPU, if any."""
    shipped, named = shipped_profiles(), cluster.profile
    if named is None:
        return load_profile(shipped[cluster.gpu.name]) if cluster.gpu.name in shipped else None
    if named not in shipped and not is_there(Path(named)):
        raise InputError(
            f"cluster: profile is {named!r}; wanted a file that is there, or a shipped profile: "
            f"{', '.join(shipped)}"
        )
    return load_profile(shipped.get(named, Path(named)))


def profile_named(named: str) -> Profile:
    """A shipped profile by name, or a file."""
    shipped = shipped_profiles()
    if named not in shipped and "/" not in named and not is_there(Path(named)) and not looks_like_file(named):
        raise ProfileError(
            f"no profile {named!r}", details=(f"known: {', '.join(shipped)}", "or a path to a profile.yaml")
        )
    return load_profile(shipped.get(named, Path(named)))


def base_profile(gpu: GpuSpec, named: str | None) -> Profile:
    """The profile that fills what was not measured: the one named, the GPU's own, or typical figures."""
    from mist_megatron.price.datasheet import datasheet_profile

    if named is not None:
        return profile_named(named)
    shipped = shipped_profiles()
    return load_profile(shipped[gpu.name]) if gpu.name in shipped else datasheet_profile(gpu)


def looks_like_file(named: str) -> bool:
    """Whether a name is one of a file that holds a profile."""
    return named.endswith((".yaml", ".yml", ".json"))


def read_profile_text(path: str | Path) -> str:
    """The text of a profile. One that is not there was mistyped; one that cannot be read is a bad profile."""
    try:
        return read_text(path)
    except InputError as error:
        if not is_there(Path(path)):
            raise
        raise ProfileError(error.message, details=error.details) from None


def load_profile(path: Path) -> Profile:
    """A profile file with its tables, which lie beside it; read once per process."""
    return _load_profile(path, path.stat().st_mtime_ns if is_there(path) else 0)


@lru_cache(maxsize=32)
def _load_profile(path: Path, _changed: int) -> Profile:
    from mist_megatron.formats.profile_yaml import profile_from_text

    def table(name: str) -> bytes:
        if Path(name).name != name:
            raise ProfileError(f"{path}: table file {name!r} is not beside the profile")
        try:
            return read_bytes(path.parent / name)
        except InputError as error:
            raise ProfileError(f"{path}: table {error.message}") from None

    return profile_from_text(read_profile_text(path), str(path), table)


def write_profile(profile: Profile, out: Path, *, force: bool) -> list[Path]:
    """The YAML and its tables beside it, which take their places together: no YAML beside others' tables."""
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
    texts = {**files, out.name: body}
    paths = [out.parent / name for name in texts]
    taken = [path for path in paths if path.exists()]
    if taken and not force:
        raise InputError(
            f"{taken[0]} exists", details=("nothing was written", "try: --force, or another --out")
        )
    write_together(out.parent, texts)
    return paths
