"""Slowdown factors of streams that run together, fitted to measured co-runs.

28 factors: for each of the 11 sets of two to four streams, one for each stream of the set. How factors
become a time is the cost model's `overlapped_time`, which comes in as an argument, so that what is fitted
is what is used. Factors are at least 1, and all sets are fitted together under the condition that more work
never ends sooner (`monotone`): a tuner would else add copies for their own sake. Where the points do not
determine a factor it is that of the nearest subset, and is marked so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.calibrate.monotone import broken_sets, excess, monotone
from mist_megatron.errors import InputError
from mist_megatron.spec.profile import STREAMS, InterferenceSet, slowdowns

Array = NDArray[np.float64]
Overlap = Callable[[Sequence[Array], Array], Array]
"""(times alone of the four streams, table of 16 sets by 4 streams) -> time together."""

LARGEST = 50.0
"""A factor beyond this means that a stream stands still: nothing tells 50 from 500."""
MOST_SPREAD = 0.2
"""Relative spread of repeats from which on a measurement says nothing about effects of some percent."""
LEAST_SHARE = 0.9
"""Of the longest stream alone. A co-run that took less contradicts one of the two measurements: together
nothing gets faster; a tenth is left for noise."""
SURE = 0.1
"""A factor is identified when its one-sigma error is at most this, relative, or the points refute the
nearest subset's factor in its place."""
NO_WORSE = 5e-4
"""Mean relative error that a factor's replacement by the nearest subset's may add unrefuted."""
FOLDS = 5
_SOFT = 0.01
"""Errors well above this count linearly: a few wrong points must not bend the fit."""
_PRIOR = 1e-4
"""Weight of the pull to the nearest subset: per point and squared logarithm, in units of relative error."""
BEARABLE = 1.02
"""Errors may grow by this for the condition on collectives that wait. The streams of most machines fulfil it
at no cost; where some together take longer than one after the other (A10G, GPU-GPU beside device-to-host:
1.7 times the sum) it would say of the measurements that they are wrong."""
_STIFFNESS = ((0.0, 1e-6), (1.0, 1e-5), (30.0, 1e-5), (1000.0, 1e-6))
"""Of each turn of the fit, the weight of what the condition is broken by, per point and squared speed, and
the relative gain at which the turn ends. Stiff from the start it ends in a corner (A10G: 11 % instead of
6 %). At the last weight 1e-4 of it costs as much as it can gain; `monotone` takes away what is left."""

_SETS = tuple(bits for bits in range(16) if bits.bit_count() >= 2)
_PLACES = tuple((bits, stream) for bits in _SETS for stream in range(4) if bits >> stream & 1)


@dataclass(frozen=True, kw_only=True)
class CoRuns:
    """Measured co-runs, one a row."""

    alone_s: Array
    """(rows, 4): time of each stream alone, 0 where it takes no part."""
    together_s: Array
    spread: Array
    """Largest relative spread of repeats among the measurements behind a row; 0 where unknown."""
    group: NDArray[np.int64]
    """Rows of one amount of work (compute size and bytes): these are held out together."""

    def __len__(self) -> int:
        return len(self.together_s)

    def part(self, rows: NDArray[np.bool_]) -> CoRuns:
        return CoRuns(
            alone_s=self.alone_s[rows],
            together_s=self.together_s[rows],
            spread=self.spread[rows],
            group=self.group[rows],
        )

    @property
    def active(self) -> NDArray[np.int64]:
        """Bit set of the streams that take part, row by row."""
        return np.asarray((self.alone_s > 0.0) @ np.array([1, 2, 4, 8]), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class InterferenceFit:
    """Factors with what is known about each; errors are means of |predicted / measured - 1|."""

    factors: Array
    """(16, 4): row is the bit set of streams, 1 where a stream is not in it."""
    relative_sigma: Array
    """One sigma of each factor, relative; infinite where nothing was measured."""
    identified: NDArray[np.bool_]
    points: NDArray[np.int64]
    """(16,): co-runs of exactly these streams."""
    set_error: Array
    """(16,): cross-validated, NaN where there are no points."""
    error: float
    """Cross-validated over groups, of all points used."""
    maximum_error: float
    """Of a model in which streams do not disturb each other."""
    sum_error: float
    """Of a model in which they run one after the other."""
    error_of_all: float
    """Of these factors over every point that was given, those left out too."""
    left_out: Mapping[str, int]
    """Reason -> points that were not used."""


def fit_interference(
    runs: CoRuns, overlap: Overlap, told: Callable[[str], None] = lambda text: None
) -> InterferenceFit:
    """Factors of the points that can be trusted, their errors by cross-validation over groups."""
    used, left_out = trusted(runs)
    if len(used) < FOLDS:
        raise InputError(
            f"interference: {len(used)} usable co-runs of {len(runs)}; wanted at least {FOLDS}",
            details=tuple(f"{reason}: {count}" for reason, count in left_out.items() if count),
        )
    waiting = True
    fitted, sigma = _solve(used, overlap, waiting=True)
    less, less_sigma = _solve(used, overlap, waiting=False)
    if _errors(used, fitted, overlap).mean() > BEARABLE * _errors(used, less, overlap).mean():
        waiting, fitted, sigma = False, less, less_sigma
    factors, identified = _with_fallback(used, overlap, (fitted, sigma), waiting=waiting)
    errors = np.full(len(used), np.nan)
    fold = _folds(used.group)
    for number in range(FOLDS):
        held = fold == number
        if not held.any() or held.all():
            continue
        told(f"interference: fold {number + 1} of {FOLDS}")
        rest = used.part(~held)
        others, _ = _with_fallback(rest, overlap, _solve(rest, overlap, waiting=waiting), waiting=waiting)
        errors[held] = _errors(used.part(held), others, overlap)
    active = used.active
    return InterferenceFit(
        factors=factors,
        relative_sigma=sigma,
        identified=identified,
        points=np.bincount(active, minlength=16),
        set_error=np.array([_mean(errors[active == bits]) for bits in range(16)]),
        error=_mean(errors),
        maximum_error=_mean(np.abs(used.alone_s.max(axis=1) / used.together_s - 1.0)),
        sum_error=_mean(np.abs(used.alone_s.sum(axis=1) / used.together_s - 1.0)),
        error_of_all=_mean(_errors(runs, factors, overlap)),
        left_out=left_out,
    )


def trusted(runs: CoRuns) -> tuple[CoRuns, dict[str, int]]:
    """Points without those that tell more about noise than about interference, counted by reason.

    The rules look at measurements only, never at what a model makes of them."""
    noisy = runs.spread > MOST_SPREAD
    impossible = ~noisy & (runs.together_s < LEAST_SHARE * runs.alone_s.max(axis=1, initial=0.0))
    alone = ~noisy & ~impossible & ((runs.alone_s > 0.0).sum(axis=1) < 2)
    return runs.part(~(noisy | impossible | alone)), {
        f"repeats differ by more than {MOST_SPREAD:.0%}": int(noisy.sum()),
        f"took less than {LEAST_SHARE:.0%} of the longest stream alone": int(impossible.sum()),
        "fewer than two streams": int(alone.sum()),
    }


def interference_sets(fit: InterferenceFit, source: str) -> tuple[InterferenceSet, ...]:
    """As a profile holds them: pairs first; sets without any identified factor or point are left out,
    since readers of a profile then take the largest factor of the subsets, as the fit does."""
    sets = []
    for bits in sorted(_SETS, key=lambda bits: (bits.bit_count(), bits)):
        members = [stream for stream in range(4) if bits >> stream & 1]
        if not fit.points[bits] and not fit.identified[bits, members].any():
            continue
        error = fit.set_error[bits]
        sets.append(
            InterferenceSet(
                streams=tuple(STREAMS[stream] for stream in members),
                factors=tuple(float(f"{fit.factors[bits, stream]:.4g}") for stream in members),
                identified=tuple(bool(fit.identified[bits, stream]) for stream in members),
                sigma=tuple(round(min(float(fit.relative_sigma[bits, s]), 10.0), 4) for s in members),
                source=source,
                points=int(fit.points[bits]),
                error=None if math.isnan(error) else round(float(error), 4),
            )
        )
    return tuple(sets)


def with_base(
    own: Sequence[InterferenceSet], base: Sequence[InterferenceSet]
) -> tuple[tuple[InterferenceSet, ...], str]:
    """Measured sets with the base's of those that no point had, and what there is to tell of it. More work
    must not end sooner in the mixture either: the base's factors are raised to what that takes, and where
    measured ones would have to be, this fit's own estimates take the base's place."""
    measured = [item for item in own if item.points]
    known = {frozenset(item.streams) for item in measured}
    rest = [item for item in base if frozenset(item.streams) not in known]
    both = sorted([*measured, *rest], key=lambda item: len(item.streams))
    table = np.array(slowdowns(both))
    if not broken_sets(table, waiting=False):
        return tuple(both), ""
    table = monotone(table, waiting=False)
    raised = [item if item in measured else replace(item, factors=_factors(item, table)) for item in both]
    if not broken_sets(np.array(slowdowns(raised)), waiting=False):
        return tuple(raised), "interference: factors of the base raised to fit those measured"
    return tuple(own), "interference: the base's factors contradict those measured and are left out"


def _factors(item: InterferenceSet, table: Array) -> tuple[float, ...]:
    bits = sum(1 << STREAMS.index(stream) for stream in item.streams)
    return tuple(float(table[bits, STREAMS.index(stream)]) for stream in item.streams)


@dataclass(frozen=True, kw_only=True)
class _Objective:
    """What is minimised over the logarithms of the factors."""

    runs: CoRuns
    overlap: Overlap
    stiffness: float
    waiting: bool

    def residuals(self, many: Array) -> Array:
        """Errors of the points, then what the condition is broken by; one row for each row of logarithms."""
        tables = [_table(logs) for logs in many]
        streams = [self.runs.alone_s[:, index] for index in range(4)]
        wanted = np.log(self.runs.together_s)
        errors = np.array([np.log(self.overlap(streams, table)) - wanted for table in tables])
        if self.stiffness == 0.0:
            return errors
        broken = np.maximum(excess(np.array(tables), waiting=self.waiting), 0.0)
        return np.concatenate([errors, broken], axis=1)

    def residual(self, logs: Array) -> Array:
        return np.asarray(self.residuals(logs[None])[0])

    def jacobian(self, logs: Array, here: Array) -> Array:
        step = 1e-4
        moved = self.residuals(logs + step * np.eye(len(logs)))
        return np.ascontiguousarray(((moved - here) / step).T)

    def weights(self, residual: Array) -> Array:
        """Of each squared residual in a Gauss-Newton step."""
        count = len(self.runs)
        weights = np.full(len(residual), self.stiffness * count)
        weights[:count] = 1.0 / np.sqrt(residual[:count] ** 2 + _SOFT**2)
        return weights

    def cost(self, residual: Array, logs: Array) -> float:
        count = len(self.runs)
        pull, broken = logs - _nearest(logs), residual[count:]
        penalty = 0.5 * count * (_PRIOR * pull @ pull + self.stiffness * broken @ broken)
        return float(np.sqrt(residual[:count] ** 2 + _SOFT**2).sum() + penalty)


def _solve(runs: CoRuns, overlap: Overlap, *, waiting: bool) -> tuple[Array, Array]:
    """Factors and their relative sigmas, on logarithms of factors and times."""
    logs = np.full(len(_PLACES), 0.3)
    for stiffness, least_gain in _STIFFNESS:
        objective = _Objective(runs=runs, overlap=overlap, stiffness=stiffness, waiting=waiting)
        logs = _minimised(objective, logs, least_gain)
    table = monotone(_table(logs), waiting=waiting)
    logs = np.log([table[place] for place in _PLACES])
    error = objective.residual(logs)
    jacobian = objective.jacobian(logs, error)
    return table, _sigma(jacobian[: len(runs)], error[: len(runs)])


def _minimised(objective: _Objective, logs: Array, least_gain: float) -> Array:
    """By projected Gauss-Newton: factors stay at least 1, what else is wanted costs."""
    count, prior = len(logs), _PRIOR * len(objective.runs)
    error = objective.residual(logs)
    best, damping = objective.cost(error, logs), 1e-2
    for _ in range(40):
        jacobian = objective.jacobian(logs, error)
        weight = objective.weights(error)
        slope = jacobian.T @ (weight * error) + prior * (logs - _nearest(logs))
        curve = jacobian.T @ (jacobian * weight[:, None]) + prior * np.eye(count)
        moved = False
        for _ in range(8):
            tried = _step(logs, slope, curve, damping)
            tried_error = objective.residual(tried)
            now = objective.cost(tried_error, tried)
            if now < best:
                moved = best - now > least_gain * best
                logs, error, best, damping = tried, tried_error, now, damping / 3.0
                break
            damping *= 4.0
        if not moved:
            break
    return logs


def _step(logs: Array, slope: Array, curve: Array, damping: float) -> Array:
    """One damped step within the bounds; factors that push against 1 stay there."""
    free = np.flatnonzero(~((logs <= 1e-9) & (slope > 0.0)))
    move = np.zeros_like(logs)
    if free.size:
        damped = curve[np.ix_(free, free)]
        damped = damped + damping * np.diag(np.diag(damped))
        move[free] = np.linalg.solve(damped, -slope[free])
    return np.clip(logs + np.clip(move, -0.5, 0.5), 0.0, math.log(LARGEST))


def _sigma(jacobian: Array, error: Array) -> Array:
    """Relative sigma of each factor from the curvature of the data alone, without the pull."""
    weight = 1.0 / np.sqrt(error**2 + _SOFT**2)
    weight = weight / weight.max()
    scale = float((weight * error**2).sum() / max(len(error) - jacobian.shape[1], 1))
    # A trace of curvature keeps what nothing measured invertible: its sigma comes out huge.
    curve = jacobian.T @ (jacobian * weight[:, None]) + 1e-9 * np.eye(jacobian.shape[1])
    variance = scale * np.diag(np.linalg.inv(curve))
    seen = np.asarray(np.abs(jacobian).max(axis=0) > 1e-9)
    table = np.zeros((16, 4))
    for place, value, known in zip(_PLACES, variance, seen, strict=True):
        table[place] = math.sqrt(max(float(value), 0.0)) if known else math.inf
    return table


def _with_fallback(
    runs: CoRuns, overlap: Overlap, fitted: tuple[Array, Array], *, waiting: bool
) -> tuple[Array, NDArray[np.bool_]]:
    """Factors that the points do not determine become the nearest subset's; small sets first.

    A wide sigma alone is no reason: of two streams that share one link only the sum of 1/factor is
    determined, so each sigma is wide, and yet the points refute that they run at full speed."""
    (factors, sigma), identified = fitted, np.ones((16, 4), dtype=bool)
    error = float(_errors(runs, factors, overlap).mean())
    for bits, stream in sorted(_PLACES, key=lambda place: place[0].bit_count()):
        if sigma[bits, stream] <= SURE and factors[bits, stream] < 0.99 * LARGEST:
            continue
        tried = factors.copy()
        tried[bits, stream] = max(factors[smaller, stream] for smaller in _subsets(bits, stream))
        tried = monotone(tried, waiting=waiting)
        then = float(_errors(runs, tried, overlap).mean())
        if then <= error + NO_WORSE:
            factors, error, identified[bits, stream] = tried, then, False
    return factors, identified


def _subsets(bits: int, stream: int) -> list[int]:
    """The set without one other stream, each way; of a pair, the stream alone."""
    return [bits & ~(1 << other) for other in range(4) if other != stream and bits >> other & 1]


def _nearest(logs: Array) -> Array:
    """To what each factor is pulled: the largest of its nearest subsets; pairs to no slowdown."""
    table = np.log(_table(logs))
    return np.array([max(table[smaller, stream] for smaller in _subsets(bits, stream))
                     for bits, stream in _PLACES])  # fmt: skip


def _table(logs: Array) -> Array:
    table = np.ones((16, 4))
    for place, value in zip(_PLACES, logs, strict=True):
        table[place] = math.exp(value)
    return table


def _errors(runs: CoRuns, factors: Array, overlap: Overlap) -> Array:
    streams = [runs.alone_s[:, index] for index in range(4)]
    return np.abs(overlap(streams, factors) / runs.together_s - 1.0)


def _folds(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Fold of each row: groups in an order that is random, but the same in every run."""
    _, index = np.unique(group, return_inverse=True)
    order = np.random.default_rng(0).permutation(int(index.max()) + 1)
    return np.asarray(order[index] % FOLDS, dtype=np.int64)


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


_G2G, _H2D, _D2H = ("g2g_mbytes", "all_gather"), ("h2d_mbytes", "h2d"), ("d2h_mbytes", "d2h")


@dataclass(frozen=True, kw_only=True)
class PublishedRows:
    """Rows of interference_raw.csv, collective_raw.csv and gemm_raw.csv, as text."""

    together: Sequence[Mapping[str, str]]
    transfers: Sequence[Mapping[str, str]]
    products: Sequence[Mapping[str, str]]


def published_coruns(rows: PublishedRows, hardware: str) -> CoRuns:
    """Co-runs of one machine with each stream's time alone, which was measured on the same ranks with the
    same sizes; co-runs without such a measurement are left out."""
    alone: dict[tuple[str, ...], tuple[float, float]] = {}
    for row in rows.transfers:
        alone.setdefault((*_ranks(row), row["op"], row["mbytes"]), _timing(row))
    for row in rows.products:
        alone.setdefault((*_ranks(row), "gemm", row["M"]), _timing(row))
    coruns = []
    for row in rows.together:
        if row["hardware"] != hardware:
            continue
        parts = [("gemm", row["compute_M"])]
        parts += [(op, row[column]) for column, op in (_G2G, _H2D, _D2H)]
        known = [(0.0, 0.0) if float(size) == 0.0 else alone.get((*_ranks(row), op, size))
                 for op, size in parts]  # fmt: skip
        if any(timing is None for timing in known):
            continue
        seconds, spread = _timing(row)
        timings = [timing for timing in known if timing is not None]
        work = tuple(float(size) for _, size in parts)
        coruns.append(([t for t, _ in timings], seconds, max(spread, *(s for _, s in timings)), work))
    if not coruns:
        return CoRuns(
            alone_s=np.zeros((0, 4)), together_s=np.zeros(0), spread=np.zeros(0),
            group=np.zeros(0, dtype=np.int64),
        )  # fmt: skip
    works = {work: number for number, work in enumerate(sorted({item[3] for item in coruns}))}
    return CoRuns(
        alone_s=np.array([item[0] for item in coruns]),
        together_s=np.array([item[1] for item in coruns]),
        spread=np.array([item[2] for item in coruns]),
        group=np.array([works[item[3]] for item in coruns], dtype=np.int64),
    )


def _ranks(row: Mapping[str, str]) -> tuple[str, ...]:
    return (row["hardware"], row["world_size"], row["intra_size"], row["inter_size"])


def _timing(row: Mapping[str, str]) -> tuple[float, float]:
    return float(row["latency_s"]), float(row["std_over_mean"] or 0.0)
