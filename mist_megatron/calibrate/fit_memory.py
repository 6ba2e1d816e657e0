"""Memory beyond what is computed, learned from measured runs of one program, and how well it is known.

What is computed of tensors stays; learned is the rest alone (Pipette learns all of it, section VI): one
constant, and where held-out runs say so, slopes along eleven features, drawn towards 0. A group of runs that
was held out decides whether any of it is better than nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mist_megatron.errors import InputError
from mist_megatron.price.prices import Array
from mist_megatron.spec.learned_memory import FEATURES, LearnedMemory

LEAST_ROWS = 4
"""Fewer runs tell nothing that could be held out."""
MOST_FOLDS = 20
PENALTIES: tuple[float | None, ...] = (None, 10.0, 1.0, 0.1, 0.01)
"""On the squares of slopes, for each run; None for the constant alone. The simplest first."""
WORTH = 0.95
"""A less simple one has to have less than so much of the error."""


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """One measured stage."""

    row_id: str
    group: str
    measured_bytes: float
    computed_bytes: float
    features: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class GroupError:
    """A group that was held out: mean relative errors of its runs."""

    group: str
    runs: int
    computed: float
    learned: float


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What was learned, and how it did on what it had not seen."""

    memory: LearnedMemory
    groups: tuple[GroupError, ...]
    learned_bytes: tuple[float, ...]
    """Of each sample."""


@dataclass(frozen=True)
class _Line:
    constant: float
    slopes: Array


NOTHING = _Line(0.0, np.zeros(len(FEATURES)))


def fit_memory(
    samples: Sequence[MemorySample], *, target: str, framework: str, version: str, source: str
) -> Learned:
    """Of all samples, which are of one program; errors are of groups that were held out."""
    if len(samples) < LEAST_ROWS:
        raise InputError(
            f"{framework} {version}".rstrip() + f": memory of {len(samples)} stages was measured; "
            f"wanted at least {LEAST_ROWS}"
        )
    points = _Points(samples)
    folds = _folds(samples)
    held_out = np.empty(len(samples))
    for fold in range(folds.max() + 1):
        rest = folds != fold
        line = _chosen(points.take(rest), folds[rest])
        held_out[~rest] = points.errors(line)[~rest]
    line = _chosen(points, folds)
    computed = points.errors(NOTHING)
    groups = _groups(samples, computed, held_out)
    slopes = {name: slope for name, slope in zip(FEATURES, line.slopes.tolist(), strict=True) if slope}
    seen = {name: [sample.features[name] for sample in samples] for name in slopes}
    memory = LearnedMemory(
        target=target,
        framework=framework,
        version=version,
        constant_bytes=float(f"{line.constant:.6g}"),
        slopes_bytes={name: float(f"{slope:.6g}") for name, slope in slopes.items()},
        ranges={name: (min(sizes), max(sizes)) for name, sizes in seen.items()},
        margin=round(min(max(group.learned for group in groups), 0.99), 4),
        rows=len({sample.row_id for sample in samples}),
        groups=len(groups),
        held_out_error=round(min(float(held_out.mean()), 0.99), 4),
        analytic_error=round(min(float(computed.mean()), 0.99), 4),
        source=source,
    )
    return Learned(memory=memory, groups=groups, learned_bytes=tuple(points.bytes_of(line).tolist()))


class _Points:
    """Samples as arrays."""

    def __init__(self, samples: Sequence[MemorySample]) -> None:
        self.measured = np.array([sample.measured_bytes for sample in samples])
        self.computed = np.array([sample.computed_bytes for sample in samples])
        self.features = np.log2([[sample.features[name] for name in FEATURES] for sample in samples])

    def take(self, kept: NDArray[np.bool_]) -> _Points:
        """Some of them."""
        some = object.__new__(_Points)
        some.measured, some.computed = self.measured[kept], self.computed[kept]
        some.features = self.features[kept]
        return some

    def bytes_of(self, line: _Line) -> Array:
        """What a line adds to each."""
        return np.asarray(line.constant + self.features @ line.slopes)

    def errors(self, line: _Line) -> Array:
        """Relative ones."""
        return np.asarray(np.abs((self.computed + self.bytes_of(line)) / self.measured - 1.0))


def _chosen(points: _Points, folds: NDArray[np.intp]) -> _Line:
    """The simplest line that is about the best on held-out groups and worse than none on none of them;
    nothing where there is no such line."""
    best_error, best = float(points.errors(NOTHING).mean()), NOTHING
    names = np.unique(folds)
    if len(names) < 2:
        return best
    for penalty in PENALTIES:
        held_out = np.empty(len(folds))
        for name in names:
            rest = folds != name
            held_out[~rest] = points.errors(_line(points.take(rest), penalty))[~rest]
        none = points.errors(NOTHING)
        means = [(held_out[folds == name].mean(), none[folds == name].mean()) for name in names]
        if held_out.mean() < WORTH * best_error and all(ours <= theirs for ours, theirs in means):
            best_error, best = float(held_out.mean()), _line(points, penalty)
    return best


def _line(points: _Points, penalty: float | None) -> _Line:
    """Least squares of relative errors, slopes in units of their feature's spread drawn towards 0."""
    weights, typical = 1.0 / points.measured, float(np.median(points.measured))
    center, spread = points.features.mean(axis=0), points.features.std(axis=0)
    kept = spread > 0.0 if penalty is not None else np.zeros(len(FEATURES), dtype=bool)
    columns = np.ones((len(weights), 1 + int(kept.sum())))
    columns[:, 1:] = ((points.features - center)[:, kept]) / spread[kept]
    rows = columns * (weights * typical)[:, None]
    wanted = (points.measured - points.computed) * weights
    drawn = np.full(columns.shape[1], (penalty or 0.0) * len(weights))
    drawn[0] = 0.0
    solved = np.linalg.solve(rows.T @ rows + np.diag(drawn), rows.T @ wanted) * typical
    slopes = np.zeros(len(FEATURES))
    slopes[kept] = solved[1:] / spread[kept]
    return _Line(float(solved[0] - center @ slopes), slopes)


def _folds(samples: Sequence[MemorySample]) -> NDArray[np.intp]:
    """A number for each sample: its group's. Where fewer than three groups are told, each run is one."""
    names = [sample.group for sample in samples]
    if len(set(names)) < 3:
        names = [sample.row_id for sample in samples]
    order = {name: place % MOST_FOLDS for place, name in enumerate(sorted(set(names)))}
    return np.array([order[name] for name in names], dtype=np.intp)


def _groups(samples: Sequence[MemorySample], computed: Array, learned: Array) -> tuple[GroupError, ...]:
    names = sorted({sample.group for sample in samples})
    by_group = []
    for name in names:
        own = np.array([sample.group == name for sample in samples])
        errors = float(computed[own].mean()), float(learned[own].mean())
        by_group.append(GroupError(group=name, runs=int(own.sum()), computed=errors[0], learned=errors[1]))
    return tuple(by_group)
