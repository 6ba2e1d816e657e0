"""Predictions held against measured rows: errors, bias, ranking and pick regret.

What prices a plan is handed in as a function, so that this room needs no cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.errors import MistError

Array = NDArray[np.float64]
WORST = 10


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What the cost model says of one row."""

    iteration_s: float
    stage_peak_bytes: tuple[float, ...]
    extrapolated_share: float
    fits: bool = True
    """Whether its memory is told to be enough, which it was where a time was measured."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One row with its prediction, or why there is none."""

    row: MeasuredRow
    file: str
    predicted: Predicted | None
    skipped: str | None

    @property
    def time_error(self) -> float | None:
        """predicted / measured - 1."""
        if self.predicted is None or self.row.measured_s is None:
            return None
        return self.predicted.iteration_s / self.row.measured_s - 1.0

    def memory_pairs(self) -> tuple[tuple[int, float, float], ...]:
        """(stage, predicted, measured bytes), one per measured stage, or one for the largest; none where only
        time was predicted."""
        if self.predicted is None or not self.predicted.stage_peak_bytes:
            return ()
        peaks, row = self.predicted.stage_peak_bytes, self.row
        if row.stage_peak_bytes and len(row.stage_peak_bytes) == len(peaks):
            return tuple(zip(range(len(peaks)), peaks, row.stage_peak_bytes, strict=True))
        if row.measured_peak_bytes is None:
            return ()
        fullest = max(range(len(peaks)), key=lambda stage: peaks[stage])
        stage = len(peaks) - 1 if row.peak_is_last_stage else 0 if row.peak_is_first_stage else fullest
        return ((stage, peaks[stage], row.measured_peak_bytes),)

    def memory_errors(self) -> tuple[float, ...]:
        """Of each of these pairs."""
        return tuple(predicted / measured - 1.0 for _, predicted, measured in self.memory_pairs())


def outcomes_of(
    rows: Sequence[MeasuredRow], file: str, predict: Callable[[MeasuredRow], Predicted]
) -> tuple[Outcome, ...]:
    """Every row predicted; what a row's plan cannot be is told, never dropped in silence."""
    return tuple(_outcome(row, file, predict) for row in rows)


def _outcome(row: MeasuredRow, file: str, predict: Callable[[MeasuredRow], Predicted]) -> Outcome:
    if row.plan is None:
        return Outcome(row=row, file=file, predicted=None, skipped=row.skipped)
    try:
        return Outcome(row=row, file=file, predicted=predict(row), skipped=None)
    except MistError as error:
        return Outcome(row=row, file=file, predicted=None, skipped=error.message)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The figures of one file, or of all together; fractions throughout, None where nothing tells."""
    settings = _parts(outcomes, lambda outcome: outcome.row.setting)
    sources = _parts(outcomes, lambda outcome: outcome.row.source)
    parted = {"by_setting": settings, "by_source": sources} if settings else {}
    return {**_figures(outcomes), **parted}


def _parts(outcomes: Sequence[Outcome], name_of: Callable[[Outcome], str]) -> dict[str, dict[str, object]]:
    """Figures of rows that are alike in something, by its name; nothing of rows that do not say it."""
    parts: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if name_of(outcome):
            parts.setdefault(name_of(outcome), []).append(outcome)
    kept = ("rows", "predicted", "time_mape", "time_bias", "memory_mape", "memory_bias", "too_large")
    figures = {name: _figures(parts[name]) for name in sorted(parts)}
    return {name: {key: each[key] for key in kept} for name, each in figures.items()}


def _figures(outcomes: Sequence[Outcome]) -> dict[str, object]:
    timed = [o for o in outcomes if o.time_error is not None]
    errors = np.array([o.time_error for o in timed], dtype=np.float64)
    memory = np.array([error for o in outcomes for error in o.memory_errors()], dtype=np.float64)
    shares = [o.predicted.extrapolated_share for o in outcomes if o.predicted is not None]
    ranking = _by_group(timed)
    worst = sorted(timed, key=lambda o: -abs(o.time_error or 0.0))[:WORST]
    return {
        "rows": len(outcomes),
        "predicted": sum(o.predicted is not None for o in outcomes),
        "time_mape": _mean(np.abs(errors)),
        "time_bias": _mean(errors),
        "memory_mape": _mean(np.abs(memory)),
        "memory_bias": _mean(memory),
        "too_large": sum(o.predicted is not None and not o.predicted.fits for o in timed),
        "spearman": _mean(np.array(ranking.correlations)),
        "pick_regret_mean": _mean(np.array(ranking.regrets)),
        "pick_regret_max": max(ranking.regrets) if ranking.regrets else None,
        "extrapolated_share": _mean(np.array(shares)),
        "skipped": {o.row.row_id: o.skipped for o in outcomes if o.skipped is not None},
        "worst": [_worst_document(o) for o in worst],
    }


def _worst_document(outcome: Outcome) -> dict[str, object]:
    assert outcome.predicted is not None
    return {
        "file": outcome.file,
        "id": outcome.row.row_id,
        "measured_s": outcome.row.measured_s,
        "predicted_s": outcome.predicted.iteration_s,
        "time_error": outcome.time_error,
    }


class Ranking(NamedTuple):
    """Of every group that has rows to rank: the correlation of ranks, and what picking the best predicted
    row costs over the best measured one."""

    correlations: list[float]
    regrets: list[float]


def _by_group(timed: Sequence[Outcome]) -> Ranking:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in timed:
        if outcome.row.group:
            groups.setdefault((outcome.file, outcome.row.group), []).append(outcome)
    correlations: list[float] = []
    regrets: list[float] = []
    for members in groups.values():
        if len(members) < 2:
            continue
        measured = np.array([o.row.measured_s for o in members], dtype=np.float64)
        predicted = np.array([o.predicted.iteration_s for o in members if o.predicted], dtype=np.float64)
        correlation = spearman(predicted, measured)
        if correlation is not None:
            correlations.append(correlation)
        regrets.append(float(measured[int(np.argmin(predicted))] / measured.min() - 1.0))
    return Ranking(correlations, regrets)


def spearman(left: Array, right: Array) -> float | None:
    """Correlation of ranks, ties sharing their mean rank; None when one side is all ties."""
    first, second = _ranks(left), _ranks(right)
    if np.ptp(first) == 0.0 or np.ptp(second) == 0.0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2.0)[inverse], dtype=np.float64)


def _mean(values: Array) -> float | None:
    return float(np.mean(values)) if values.size else None


def folds_of(rows: Sequence[MeasuredRow], folds: int) -> tuple[int, ...]:
    """A fold for each row: whole groups together, groups dealt out in order of their names, so that the
    split is the same on every machine; rows without a group count as a group each."""
    names = [row.group or f"row {row.row_id}" for row in rows]
    order = {name: index % folds for index, name in enumerate(sorted(set(names)))}
    return tuple(order[name] for name in names)


def document(by_file: Mapping[str, Sequence[Outcome]]) -> dict[str, object]:
    """The JSON of `validate`."""
    everything = [outcome for outcomes in by_file.values() for outcome in outcomes]
    return {
        "files": {name: summary(outcomes) for name, outcomes in by_file.items()},
        "overall": summary(everything),
    }
