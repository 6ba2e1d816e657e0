"""Builds the evaluator of a job: which prices, and where compiled programs are kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mist_megatron.calibrate.profiles import profile_of
from mist_megatron.errors import InputError
from mist_megatron.formats.files import CacheFolder
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.term import SWITCHABLE

if TYPE_CHECKING:
    from mist_megatron.calibrate.error_bars import ErrorBar
    from mist_megatron.cost.evaluate import StageEvaluator
    from mist_megatron.price.prices import Prices
    from mist_megatron.spec.cluster import ClusterSpec
    from mist_megatron.spec.job import Job
    from mist_megatron.spec.learned_memory import LearnedMemory
    from mist_megatron.spec.plan import Execution
    from mist_megatron.spec.profile import Profile
    from mist_megatron.spec.training import Precision

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


def kept_programs() -> CacheFolder | None:
    """Where compiled programs are kept; None where nothing is."""
    folder = cache_directory()
    return None if folder is None else CacheFolder(folder)


class SourcedPrices(NamedTuple):
    """Prices of a cluster."""

    prices: Prices
    origin: str
    """The profile or datasheet that they are of, in words."""


class SourcedEvaluator(NamedTuple):
    """What prices the stages of a job."""

    evaluator: StageEvaluator
    origin: str
    """Where its prices come from, in words."""


def prices_for(job: Job) -> SourcedPrices:
    """The calibrated profile of the job's cluster, or its datasheet; and in words which."""
    return _priced_by(job, profile_of(job.cluster))


def _priced_by(job: Job, profile: Profile | None) -> SourcedPrices:
    """The same, given the profile that its cluster has."""
    from mist_megatron.price.datasheet import datasheet_prices
    from mist_megatron.price.profile_prices import prices_of

    precision = job.training.precision
    if profile is None:
        return SourcedPrices(datasheet_prices(job.cluster, precision), f"datasheet of {job.cluster.gpu.name}")
    key = job.cluster, precision
    if key not in _PRICES or _PRICES[key][0] is not profile:
        _PRICES.clear()
        _PRICES[key] = profile, prices_of(profile, job.cluster, precision)
    described = f"profile {profile.name} ({profile.content_hash})"
    learned = _learned_by(job, profile)
    if learned is not None:
        described += f", memory learned of {learned.rows} runs of {learned.program}"
    elif _part_trained(job) and profile.learned_memory:
        described += ", without the memory learned of runs that train all weights"
    return SourcedPrices(_PRICES[key][1], described)


_PRICES: dict[tuple[ClusterSpec, Precision], tuple[Profile, Prices]] = {}
"""The last ones: a search asks for the same in each way of execution."""


def _part_trained(job: Job) -> bool:
    """Whether weights stand still, so that a program keeps other things than it was measured with."""
    return any(kind.frozen or kind.adapter is not None for kind in job.model.kinds)


def learned_of(job: Job) -> LearnedMemory | None:
    """What the profile of a job's cluster learned of its program's memory; runs that train all weights tell
    nothing of one that trains a part."""
    return None if _part_trained(job) else _learned_by(job, profile_of(job.cluster))


def _learned_by(job: Job, profile: Profile | None) -> LearnedMemory | None:
    """The same, given that profile."""
    learned = () if profile is None or _part_trained(job) else profile.learned_memory or ()
    return next((one for one in learned if one.target == job.target), None)


def profile_hash(job: Job) -> str | None:
    """Of the content of the calibrated profile; None where a datasheet stands in."""
    profile = profile_of(job.cluster)
    return None if profile is None else profile.content_hash


def error_bar_of(job: Job) -> ErrorBar:
    """How far what is said of a job may be off."""
    from mist_megatron.calibrate.error_bars import bar_of

    kinds = [replace(job, cluster=kind) for kind in job.cluster.kinds]
    bars = [bar_of(kind, profiled=profile_of(kind.cluster) is not None) for kind in kinds]
    return max(bars, key=lambda bar: bar.share)


def by_kind(job: Job, build: Callable[[Job], SourcedEvaluator]) -> SourcedEvaluator:
    """What `build` makes of a job; of a mixed cluster an evaluator of each of its kinds of nodes."""
    if not job.cluster.groups:
        return build(job)
    kinds, origins = zip(*(build(replace(job, cluster=kind)) for kind in job.cluster.kinds), strict=True)
    first = copy(kinds[0])
    first.job, first.groups = job, tuple(one.among(kinds) for one in kinds)
    return SourcedEvaluator(first, " and ".join(dict.fromkeys(origins)))


def evaluator_for(job: Job, *, without: frozenset[str] = frozenset()) -> SourcedEvaluator:
    """The evaluator of a job, and where its prices come from."""
    return evaluators(without=without)(job)


def evaluators(*, without: frozenset[str] = frozenset()) -> Callable[[Job], SourcedEvaluator]:
    """The same for many jobs, which are on the same nodes: a profile is looked for once on each kind."""
    from mist_megatron.cost.evaluate import make_evaluator

    unknown = sorted(without - SWITCHABLE)
    if unknown:
        raise InputError(f"--without: no term {unknown[0]!r}; known: {', '.join(sorted(SWITCHABLE))}")
    left_out = frozenset(term for term in SWITCHABLE if term in without)
    profiles: dict[int, tuple[ClusterSpec, Profile | None]] = {}
    programs = kept_programs()

    def build(one: Job) -> SourcedEvaluator:
        cluster = one.cluster
        if id(cluster) not in profiles:
            profiles[id(cluster)] = cluster, profile_of(cluster)
        profile = profiles[id(cluster)][1]
        prices, origin = _priced_by(one, profile)
        learned = _learned_by(one, profile)
        made = make_evaluator(one, prices, cache=programs, without=left_out, learned=learned)
        return SourcedEvaluator(made, origin)

    return lambda job: by_kind(job, build)


class Sharing:
    """Evaluators of the ways in which a job is executed, each made once; those whose layers do the same share
    what was priced of them."""

    def __init__(self, evaluator_of: Callable[[Job], SourcedEvaluator] | None = None) -> None:
        self._evaluator_of = evaluator_of or evaluators()
        self.made: dict[Execution, SourcedEvaluator] = {}
        self._alike: dict[Execution, StageEvaluator] = {}

    def of(self, job: Job) -> StageEvaluator:
        """The evaluator of a way; jobs differ in nothing else."""
        execution = job.execution
        if execution not in self.made:
            self.made[execution] = self._evaluator_of(job)
            evaluator = self.made[execution].evaluator
            beside = varied(execution, tp_comm_overlap=None, overlap_param_gather=None, expert_overlap=None)
            evaluator.share(self._alike.setdefault(beside, evaluator))
        return self.made[execution].evaluator
