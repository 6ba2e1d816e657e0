"""Latency and bandwidth of transfers, fitted to sweeps over sizes: collectives, copies, single links.

seconds = latency_s + work / bytes_per_s, by least squares of relative errors, latency not negative. The error
is that of predicted sizes that took no part in the fit. Where that is large and interpolating between
measured sizes does better, the curve of a collective keeps what they took besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mist_megatron.calibrate.measurements import Measurement
from mist_megatron.errors import InputError
from mist_megatron.price.prices import ring_passes
from mist_megatron.spec.cluster import GpuSpec
from mist_megatron.spec.profile import CollectiveCurve, CollectiveKind

Array = NDArray[np.float64]
FOLDS = 5
STRAIGHT = 0.05
"""Error of held-out sizes up to which a line is all that is kept."""
_RING_KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class LineFit:
    """What a sweep says."""

    latency_s: float
    bytes_per_s: float
    points: int
    error: float | None
    """Mean relative error of held-out sizes; None where there are too few to hold any out."""
    steps: tuple[tuple[float, float], ...] | None = None
    """Work, and measured over the line's seconds, where no line does; the error is then that of these."""

    def seconds(self, work_bytes: Array) -> Array:
        return self.latency_s + work_bytes / self.bytes_per_s


def passes(kind: CollectiveKind, ranks: float) -> float:
    """How often the message crosses one rank's link."""
    return float(ring_passes(kind, np.asarray(ranks)))


def fit_line(
    work_bytes: Sequence[float] | Array, seconds: Sequence[float] | Array, what: str, *, stepped: bool = False
) -> LineFit:
    """Latency and bandwidth of one sweep, `stepped` with what a line misses; `what` names it in refusals."""
    work, times = np.asarray(work_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if work.size != times.size or work.size == 0:
        raise InputError(
            f"{what}: {work.size} sizes and {times.size} times; wanted as many of both, and some"
        )
    if not (np.isfinite(work).all() and np.isfinite(times).all() and (work > 0).all() and (times > 0).all()):
        raise InputError(f"{what}: sizes and times must be finite and above 0")
    latency, rate = _solve(work, times)
    distinct = np.unique(work)
    error, steps = None, None
    if distinct.size > FOLDS:
        # Neighbouring sizes go into different folds, so that each fold spans the whole sweep.
        fold = np.searchsorted(distinct, work) % FOLDS
        missed, missed_by = np.empty(work.size), {shape: np.empty(work.size) for shape in SHAPES}
        for number in range(FOLDS):
            held = fold == number
            line = _solve(work[~held], times[~held])
            said = line[0] + work[held] / line[1]
            missed[held] = np.abs(said / times[held] - 1.0)
            for shape in SHAPES:
                sizes, shares = np.log(shape(work[~held], times[~held], *line)).T
                corrected = said * np.exp(np.interp(np.log(work[held]), sizes, shares))
                missed_by[shape][held] = np.abs(corrected / times[held] - 1.0)
        error = float(missed.mean())
        best = min(SHAPES, key=lambda shape: float(missed_by[shape].mean()))
        if stepped and missed_by[best].mean() < error and error > STRAIGHT:
            error = float(missed_by[best].mean())
            steps = tuple((float(size), float(share)) for size, share in best(work, times, latency, rate))
    return LineFit(latency_s=latency, bytes_per_s=rate, points=int(work.size), error=error, steps=steps)


def _steps(work: Array, times: Array, latency_s: float, bytes_per_s: float) -> Array:
    """Each size, and the mean of what it took over what the line says."""
    sizes, which, counts = np.unique(work, return_inverse=True, return_counts=True)
    share = np.bincount(which, weights=times / (latency_s + work / bytes_per_s)) / counts
    return np.stack([sizes, share], axis=1)


def _plateaus(work: Array, times: Array, latency_s: float, bytes_per_s: float) -> Array:
    """The same with what NCCL does where few channels carry small messages: a larger one goes at the rate of
    the next smaller until it gets more channels, and then no sooner than that, so that time stands still.
    Where the next larger one has the whole link, so has this one. An octave below the smallest size its rate
    is taken for granted."""
    measured = _steps(work, times, latency_s, bytes_per_s)
    sizes, shares = measured.T
    seconds = shares * (latency_s + sizes / bytes_per_s)
    large = len(sizes) // 2
    whole_latency_s, whole = _solve(sizes[large:], seconds[large:])
    low, after, before_s, after_s = sizes[:-1], sizes[1:], seconds[:-1], seconds[1:]
    has_all = after_s < WHOLE * (whole_latency_s + after / whole)
    # Here it is as late as the next larger one; or the whole link is as late as the next smaller one was.
    turns = np.where(has_all, (before_s - whole_latency_s) * whole, low * after_s / before_s)
    turns_s = np.where(has_all, before_s, after_s)
    between = (turns > low * (1.0 + 1e-9)) & (turns < after * (1.0 - 1e-9))
    at = np.concatenate([[sizes[0] / 2.0], sizes, turns[between]])
    takes = np.concatenate([[seconds[0] / 2.0], seconds, turns_s[between]])
    order = np.argsort(at)
    return np.stack([at, takes / (latency_s + at / bytes_per_s)], axis=1)[order]


WHOLE = 1.05
"""Up to so many times what the whole link takes, a message is said to have it."""
SHAPES = (_steps, _plateaus)
"""Of what a sweep takes beside its line."""


def _solve(work: Array, times: Array) -> tuple[float, float]:
    """Each octave of sizes counts alike, however many of its sizes were measured."""
    octave = np.floor(np.log2(work))
    _, index, counts = np.unique(octave, return_inverse=True, return_counts=True)
    weight = 1.0 / np.sqrt(counts[index])
    design = np.stack([np.ones_like(work), work], axis=1) * (weight / times)[:, None]
    if np.unique(work).size > 1:
        (latency, inverse), *_ = np.linalg.lstsq(design, weight, rcond=None)
        if latency >= 0.0 and inverse > 0.0:
            return float(latency), float(1.0 / inverse)
        if inverse <= 0.0:
            # Larger messages took no longer: all that is known is that a message costs so much.
            return 0.0, float(np.max(work / times))
    # One size, or a latency below zero: bandwidth alone.
    share = work / times
    return 0.0, float((share @ share) / share.sum())


def fit_collectives(points: Sequence[Measurement], source: str) -> tuple[CollectiveCurve, ...]:
    """One curve for each (kind, group size, nodes, strided) among measured collectives."""
    groups: dict[tuple[str, int, int, bool], list[Measurement]] = {}
    for point in points:
        if point.kind == "collective":
            key = (point.label, int(point.sizes["ranks"]), int(point.sizes["nodes"]), point.strided)
            groups.setdefault(key, []).append(point)
    curves = []
    for (name, ranks, nodes, strided), members in sorted(groups.items()):
        kind = cast(CollectiveKind, name)
        once = passes(kind, ranks)
        fit = fit_line(
            [once * point.sizes["bytes"] for point in members],
            [point.seconds for point in members],
            f"{kind} of {ranks} ranks on {nodes} nodes",
            stepped=True,
        )
        curves.append(
            CollectiveCurve(
                kind=kind, ranks=ranks, nodes=nodes, strided=strided, source=source, points=fit.points,
                latency_s=rounded(fit.latency_s), bytes_per_s=rounded(fit.bytes_per_s),
                error=None if fit.error is None else round(fit.error, 4),
                steps=fit.steps and tuple((round(at / once, 1), rounded(share)) for at, share in fit.steps),
            )
        )  # fmt: skip
    return tuple(curves)


def with_missing_kinds(curves: Sequence[CollectiveCurve]) -> tuple[CollectiveCurve, ...]:
    """Gather and scatter from the all-reduce of the same group (and back) where one was not measured.

    A ring all-reduce is a reduce-scatter and an all-gather: the same rate, twice their steps of latency."""
    known = {(curve.kind, curve.ranks, curve.nodes, curve.strided) for curve in curves}
    added = []
    for curve in curves:
        for kind in _RING_KINDS:
            key = (kind, curve.ranks, curve.nodes, curve.strided)
            if curve.kind == "send_recv" or key in known:
                continue
            known.add(key)
            share = {"all_reduce": 2.0}.get(kind, 1.0) / {"all_reduce": 2.0}.get(curve.kind, 1.0)
            added.append(
                CollectiveCurve(
                    kind=key[0], ranks=curve.ranks, nodes=curve.nodes, strided=curve.strided,
                    latency_s=rounded(curve.latency_s * share), bytes_per_s=curve.bytes_per_s,
                    source=curve.source, error=curve.error,
                )
            )  # fmt: skip
    return (*curves, *added)


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """What measured collectives of one reach (inside a node, or between nodes) say about unmeasured ones."""

    fraction: float
    """Bus bandwidth over the datasheet's, median."""
    error: float
    """Mean relative distance of the curves from that median."""
    latency_s: float
    hop_latency_s: float | None
    """None where all curves have the same number of steps."""
    curves: int


def link_figures(curves: Sequence[CollectiveCurve], gpu: GpuSpec, *, across: bool) -> LinkFigures | None:
    """Over curves inside a node or between nodes, as the price engine turns them back into curves."""
    used = [curve for curve in curves if (curve.nodes > 1) == across and not curve.strided and curve.points]
    if not used:
        return None
    if across:
        per_gpu = gpu.inter_bytes_per_s.value / gpu.usual_gpus_per_node
        most = [per_gpu * max(curve.ranks / curve.nodes, 1.0) for curve in used]
        steps = [float(curve.nodes) for curve in used]
    else:
        most = [gpu.intra_bytes_per_s.value for _ in used]
        turns = {"all_reduce": 2.0, "send_recv": 0.0}
        steps = [(curve.ranks - 1.0) * turns.get(curve.kind, 1.0) for curve in used]
    shares = np.array([curve.bytes_per_s for curve in used]) / np.array(most)
    median = float(np.median(shares))
    latency = np.array([curve.latency_s for curve in used])
    start, hop = float(latency.mean()), None
    if len(set(steps)) > 1:
        slope, level = np.polyfit(np.array(steps), latency, 1)
        hop = max(float(slope), 0.0)
        start = max(float(level), 0.0) if slope >= 0.0 else start
    return LinkFigures(
        fraction=rounded(median), error=round(float(np.abs(shares / median - 1.0).mean()), 4),
        latency_s=rounded(start), hop_latency_s=None if hop is None else rounded(hop), curves=len(used),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CopyFit:
    """Pinned copies between host and device."""

    h2d: LineFit | None
    d2h: LineFit | None
    both_bytes_per_s: float | None
    """Each way with both at once."""


def fit_copies(points: Sequence[Measurement]) -> CopyFit:
    """Each direction's curve, and the rate with both at once from its largest sizes."""
    ways: dict[str, LineFit | None] = {}
    for way in ("h2d", "d2h"):
        members = [point for point in points if point.kind == "copy" and point.label == way]
        ways[way] = (
            fit_line([p.sizes["bytes"] for p in members], [p.seconds for p in members], f"copies {way}")
            if members
            else None
        )
    both = [point for point in points if point.kind == "copy" and point.label == "both"]
    rate = max((point.sizes["bytes"] / point.seconds for point in both), default=None)
    return CopyFit(h2d=ways["h2d"], d2h=ways["d2h"], both_bytes_per_s=rate)


@dataclass(frozen=True, kw_only=True)
class MatrixFigures:
    """What a matrix of pairwise bandwidths says about a network."""

    median_bytes_per_s: float
    slowest_bytes_per_s: float
    variation: float
    """Standard deviation over the mean: placement gains little where it is some percent."""
    pairs: int


def matrix_figures(points: Sequence[Measurement]) -> MatrixFigures:
    """Figures over all measured pairs."""
    rates = np.array([p.sizes["bytes"] / p.seconds for p in points if p.kind == "link"])
    if rates.size == 0:
        raise InputError("bandwidth matrix: no pair of nodes was measured")
    return MatrixFigures(
        median_bytes_per_s=float(np.median(rates)),
        slowest_bytes_per_s=float(rates.min()),
        variation=float(rates.std() / rates.mean()),
        pairs=int(rates.size),
    )


def rounded(value: float) -> float:
    """Five digits: more would only be noise."""
    return float(f"{value:.5g}") if math.isfinite(value) else value
