"""Builds the evaluator of a job: which prices, and where compiled programs are kept."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mist_megatron.errors import InputError, ProfileError
from mist_megatron.formats.files import is_there
from mist_megatron.resources import data_folder
from mist_megatron.spec.term import SWITCHABLE

if TYPE_CHECKING:
    from mist_megatron.cost.evaluate import StageEvaluator
    from mist_megatron.price.prices import Prices
    from mist_megatron.spec.cluster import ClusterSpec
    from mist_megatron.spec.job import Job
    from mist_megatron.spec.profile import Profile

CACHE_VARIABLE = "MIST_MEGATRON_CACHE"
"""Names another cache folder; empty switches the cache off."""


def cache_directory() -> Path | None:
    """Where each system keeps caches, unless the variable says otherwise."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "mist-megatron"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home)) / "mist-megatron" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "mist-megatron"


def prices_for(job: Job) -> tuple[Prices, str]:
    """The calibrated profile of the job's cluster, or its datasheet; and in words which."""
    from mist_megatron.price.datasheet import datasheet_prices
    from mist_megatron.price.profile_prices import prices_of

    precision = job.training.precision
    profile = profile_of(job.cluster)
    if profile is None:
        return datasheet_prices(job.cluster, precision), f"datasheet of {job.cluster.gpu.name}"
    described = f"profile {profile.name} ({profile.content_hash})"
    return prices_of(profile, job.cluster, precision), described


def profile_hash(job: Job) -> str | None:
    """Of the content of the calibrated profile; None where a datasheet stands in."""
    profile = profile_of(job.cluster)
    return None if profile is None else profile.content_hash


def profile_of(cluster: ClusterSpec) -> Profile | None:
    """The profile that a cluster names (a shipped one, or a file), or else the one of its GPU, if any."""
    shipped = data_folder("calibration") / "profiles"
    named = cluster.profile
    if named is None:
        path = shipped / f"{cluster.gpu.name}.yaml"
        return load_profile(path) if path.is_file() else None
    path = shipped / f"{named}.yaml"
    if not is_there(path) and not is_there(Path(named)):
        known = ", ".join(sorted(found.stem for found in shipped.glob("*.yaml")))
        raise InputError(
            f"cluster: profile is {named!r}; wanted a file that is there, or a shipped profile: {known}"
        )
    return load_profile(path if is_there(path) else Path(named))


def read_profile_text(path: str | Path) -> str:
    """The text of a profile. One that is not there was mistyped; one that cannot be read is a bad profile."""
    from mist_megatron.formats.files import read_text

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
            return (path.parent / name).read_bytes()
        except OSError as error:
            raise ProfileError(f"{path}: table {name} cannot be read: {error.strerror or error}") from None

    return profile_from_text(read_profile_text(path), str(path), table)


def evaluator_for(job: Job, *, without: frozenset[str] = frozenset()) -> tuple[StageEvaluator, str]:
    """The evaluator of a job, and where its prices come from."""
    from mist_megatron.cost.evaluate import make_evaluator

    unknown = sorted(without - SWITCHABLE)
    if unknown:
        raise InputError(f"--without: no term {unknown[0]!r}; known: {', '.join(sorted(SWITCHABLE))}")
    prices, origin = prices_for(job)
    left_out = frozenset(term for term in SWITCHABLE if term in without)
    return make_evaluator(job, prices, cache=cache_directory(), without=left_out), origin
