"""Builds the evaluator of a job: which prices, and where compiled programs are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from mist_megatron.cost.evaluate import StageEvaluator
    from mist_megatron.cost.pricing import Prices
    from mist_megatron.spec.job import Job

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


def prices_for(job: Job, framework: str | None = None) -> tuple[Prices, str]:
    """The calibrated profile of the job's cluster, or its datasheet; and in words which."""
    from mist_megatron.cost.datasheet import datasheet_prices

    return datasheet_prices(job.cluster, job.training.precision), f"datasheet of {job.cluster.gpu.name}"


def evaluator_for(
    job: Job, *, without: frozenset[str] = frozenset(), framework: str | None = None
) -> tuple[StageEvaluator, str]:
    """The evaluator of a job, and where its prices come from; `framework` names a relative of the target
    whose constants hold instead, such as megatron-lm for megatron."""
    from mist_megatron.cost.evaluate import make_evaluator
    from mist_megatron.cost.terms import SWITCHABLE_TERMS

    unknown = sorted(without - SWITCHABLE_TERMS)
    if unknown:
        raise InputError(f"--without: no term {unknown[0]!r}; known: {', '.join(sorted(SWITCHABLE_TERMS))}")
    prices, origin = prices_for(job, framework)
    return make_evaluator(job, prices, cache=cache_directory(), without=without), origin
