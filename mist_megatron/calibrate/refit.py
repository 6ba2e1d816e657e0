"""Fits physical parameters to measured iterations, and judges such fits on groups that they have not seen.

Parameters are positive and fitted as logarithms, by damped Gauss-Newton on the logarithm of predicted over
measured time, with weights that keep single odd rows from pulling, and a weak pull towards the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.calibrate.validate import Outcome, Predicted, folds_of

Array = NDArray[np.float64]
Parameters = Mapping[str, float]
Predict = Callable[[MeasuredRow], Predicted]
Model = Callable[[Parameters], Predict]
"""What predicts a row under given parameters."""

OUTLIER = 0.05
"""Log error from which a row's pull stops growing: the size of a good model's errors."""
PULL = 1e-4
"""Of the start, per row and squared logarithm: a factor of e costs each row as much as 1 % of error."""
STEP = 1e-3


@dataclass(frozen=True, kw_only=True)
class FitLimits:
    """How long a fit may take."""

    iterations: int = 4
    rows: int = 120
    """Rows that are fitted to, spread evenly over those given; the rest only judges."""
    told: Callable[[str], None] = lambda text: None
    held: Mapping[str, float] = field(default_factory=dict)
    """Parameters that are pulled towards their start more than others, and how much."""


def fit(model: Model, start: Parameters, rows: Sequence[MeasuredRow], limits: FitLimits) -> dict[str, float]:
    """Parameters that fit the rows best."""
    timed = [row for row in rows if row.plan is not None and row.measured_s is not None]
    chosen = spread(timed, limits.rows)
    names = list(start)
    origin = np.log([start[name] for name in names])
    measured = np.log([row.measured_s or 1.0 for row in chosen])

    def residual(at: Array) -> Array:
        predict = model(dict(zip(names, np.exp(at).tolist(), strict=True)))
        return np.log([predict(row).iteration_s for row in chosen]) - measured

    def cost(at: Array, errors: Array) -> float:
        away = at - origin
        return float(np.sum(np.sqrt(1.0 + (errors / OUTLIER) ** 2)) + 0.5 * away @ pull @ away / OUTLIER**2)

    pull = len(chosen) * np.diag([limits.held.get(name, PULL) for name in names])
    theta, damping = origin.copy(), 1e-2
    errors = residual(theta)
    for turn in range(limits.iterations):
        columns = [(residual(theta + STEP * unit) - errors) / STEP for unit in np.eye(len(names))]
        jacobian = np.stack(columns, axis=1)
        weights = 1.0 / np.sqrt(1.0 + (errors / OUTLIER) ** 2)
        normal = (jacobian.T * weights) @ jacobian + pull
        slope = (jacobian.T * weights) @ errors + pull @ (theta - origin)
        for _ in range(4):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope)
            tried = theta + np.clip(move, -1.0, 1.0)
            tried_errors = residual(tried)
            if cost(tried, tried_errors) < cost(theta, errors):
                theta, errors, damping = tried, tried_errors, damping * 0.3
                break
            damping *= 10.0
        limits.told(f"turn {turn + 1}: mean error {np.mean(np.abs(np.expm1(errors))):.2%}")
    return dict(zip(names, np.exp(theta).tolist(), strict=True))


def spread(rows: Sequence[MeasuredRow], most: int) -> list[MeasuredRow]:
    """At most so many rows, evenly over their order."""
    if len(rows) <= most:
        return list(rows)
    return [rows[int(index)] for index in np.linspace(0, len(rows) - 1, most)]


Learn = Callable[[Sequence[MeasuredRow]], Predict]
"""From rows that may be learnt from, what predicts others."""


def cross_validated(
    outcomes: Sequence[Outcome], learn: Learn, told: Callable[[str], None], *, folds: int = 5
) -> tuple[Outcome, ...]:
    """The same rows, each predicted by what was learnt without its group."""
    fold_of = folds_of([outcome.row for outcome in outcomes], folds)
    result = list(outcomes)
    for fold in sorted(set(fold_of)):
        told(f"fold {fold + 1} of {folds}")
        learnt = [o.row for o, own in zip(outcomes, fold_of, strict=True) if own != fold]
        predict = learn(learnt)
        for index, outcome in enumerate(outcomes):
            if fold_of[index] == fold and outcome.predicted is not None:
                result[index] = replace(outcome, predicted=predict(outcome.row))
    return tuple(result)
