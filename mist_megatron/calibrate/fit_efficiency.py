"""What kernels reach of a device's peak, fitted to sweeps over shapes.

The curves are those of the price engine; nothing takes less than one launch. The error is that of shapes
held out together with all others of the same K (products), sequence (attention) or size (copies in device
memory).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mist_megatron.calibrate.measurements import Measurement
from mist_megatron.errors import InputError
from mist_megatron.price.attention_kernels import narrow_heads
from mist_megatron.price.prices import BACKWARD_KERNELS, BACKWARD_WORK, causal_flops, products_s
from mist_megatron.price.profile_prices import attention_s

Array = NDArray[np.float64]
Curve = Callable[[Array, Array], Array]
"""(parameters, rows) -> seconds."""
FOLDS = 5
GEMM_START = (0.7, 5e5, 60.0)
"""Where fits begin and to where a weak prior holds what a narrow sweep does not determine: the middle of
the published tables of L4, A10G, V100, A100 and B200."""
ATTENTION_START = (0.5, 512.0)
SEEN = 0.02
"""A parameter is determined when its doubling changes the times by more than about this, on average."""
_PULL = 0.03
"""A factor e away from the start costs as much as an error of 3 % on every row."""


@dataclass(frozen=True, kw_only=True)
class CurveFit:
    """Parameters by name, and how far they are off."""

    values: dict[str, float]
    points: int
    error: float | None
    """Mean relative error of held-out groups; None where there are too few groups."""
    open: tuple[str, ...] = ()
    """Parameters that the points do not determine: shapes too large, too small, or all alike in one size."""


def fit_gemm(points: Sequence[Measurement], peak_flops_per_s: float, launch_s: float) -> CurveFit:
    """Peak share, half area and half depth of single products; small ones are floored by the launch."""
    rows = _rows(points, "gemm", ("m", "n", "k", "batch"))

    def seconds(theta: Array, at: Array) -> Array:
        m, n, k, batch = at[:, 0], at[:, 1], at[:, 2], at[:, 3]
        share, half_area, half_depth = np.exp(theta)
        busy = products_s(m * n * batch, k, peak_flops_per_s * share, half_area, half_depth)
        return np.asarray(np.maximum(busy, launch_s))

    names = ("gemm_peak_fraction", "gemm_half_area", "gemm_half_depth")
    return _fit(rows, rows[:, 2], seconds, dict(zip(names, GEMM_START, strict=True)))


def fit_batched_gemm(
    points: Sequence[Measurement], peak_flops_per_s: float, launch_s: float, half_depth: float
) -> CurveFit:
    """Share and half area of many small products at once, with the depth of single ones."""
    rows = _rows(points, "gemm", ("m", "n", "k", "batch"))

    def seconds(theta: Array, at: Array) -> Array:
        area, k = at[:, 0] * at[:, 1] * at[:, 3], at[:, 2]
        share, half_area = np.exp(theta)
        busy = products_s(area, k, peak_flops_per_s * share, half_area, np.asarray(half_depth))
        return np.asarray(np.maximum(busy, launch_s))

    names = ("batched_gemm_peak_fraction", "batched_gemm_half_area")
    return _fit(rows, rows[:, 2], seconds, dict(zip(names, GEMM_START, strict=False)))


def fit_attention(
    points: Sequence[Measurement], gpu: str, peak_flops_per_s: float, launch_s: float
) -> CurveFit:
    """Shares of the peak that causal attention reaches forward and backward, and the half sequence."""
    columns = ("batch", "seq", "heads", "head_dim")
    parts = []
    for kind, backward in (("attention_forward", 0.0), ("attention_backward", 1.0)):
        if any(point.kind == kind for point in points):
            part = _rows(points, kind, columns)
            parts.append(np.insert(part, 4, backward, axis=1))
    if not parts:
        raise InputError("attention: no measured shape")
    rows = np.concatenate(parts)

    def seconds(theta: Array, at: Array) -> Array:
        batch, seq, heads, head_dim, backward = at[:, 0], at[:, 1], at[:, 2], at[:, 3], at[:, 4]
        forward_share, backward_share, half_seq = np.exp(theta)
        flops = causal_flops(batch, seq, heads, head_dim) * np.where(backward > 0.0, BACKWARD_WORK, 1.0)
        flops = flops * narrow_heads(gpu, head_dim)
        share = np.where(backward > 0.0, backward_share, forward_share)
        busy = attention_s(flops, seq, peak_flops_per_s * share, half_seq)
        return np.asarray(np.maximum(busy, launch_s * np.where(backward > 0.0, BACKWARD_KERNELS, 1.0)))

    share, half_seq = ATTENTION_START
    start = {
        "attention_forward_fraction": share, "attention_backward_fraction": share,
        "attention_half_seq": half_seq,
    }  # fmt: skip
    return _fit(rows, rows[:, 1], seconds, start)


def fit_memory(points: Sequence[Measurement], peak_bytes_per_s: float) -> CurveFit:
    """Share of the datasheet's memory bandwidth, and the latency of one memory-bound kernel."""
    rows = _rows(points, "memory", ("moved_bytes",))

    def seconds(theta: Array, at: Array) -> Array:
        share, latency = np.exp(theta)
        return np.asarray(at[:, 0] / (peak_bytes_per_s * share) + latency)

    latency = max(float(rows[:, -1].min()) / 2.0, 1e-7)
    start = {"memory_fraction": 0.8, "memory_latency_s": latency}
    return _fit(rows, rows[:, 0], seconds, start)


def launch_seconds(points: Sequence[Measurement]) -> float | None:
    """Median time of an empty kernel."""
    times = [point.seconds for point in points if point.kind == "launch"]
    return float(np.median(times)) if times else None


def rate_of(points: Sequence[Measurement], kind: str) -> float | None:
    """Units per second of the larger half of a sweep, where start-up no longer counts."""
    members = sorted((p for p in points if p.kind == kind), key=lambda p: p.sizes["parameters"])
    if not members:
        return None
    large = members[len(members) // 2 :]
    return float(np.median([p.sizes["parameters"] / p.seconds for p in large]))


def _rows(points: Sequence[Measurement], kind: str, columns: tuple[str, ...]) -> Array:
    """Sizes and, last, seconds."""
    rows = [[*(p.sizes[name] for name in columns), p.seconds] for p in points if p.kind == kind]
    if not rows:
        raise InputError(f"{kind}: no measured shape")
    return np.array(rows, dtype=np.float64)


def _fit(rows: Array, group: Array, curve: Curve, start: Mapping[str, float]) -> CurveFit:
    """Parameters over all rows, and the mean relative error of groups that took no part in a fit."""
    theta = _solve(rows, curve, start)
    values = {name: float(f"{math.exp(at):.5g}") for name, at in zip(start, theta, strict=True)}
    here = np.log(curve(theta, rows))
    moved = [np.log(curve(theta + math.log(2.0) * unit, rows)) - here for unit in np.eye(len(theta))]
    unseen = tuple(
        name for name, change in zip(start, moved, strict=True) if float(np.abs(change).mean()) < SEEN
    )
    return CurveFit(values=values, points=len(rows), error=_held_out(rows, group, curve, start), open=unseen)


def _held_out(rows: Array, group: Array, curve: Curve, start: Mapping[str, float]) -> float | None:
    groups, index = np.unique(group, return_inverse=True)
    if groups.size < 3:
        return None
    fold = index % min(FOLDS, groups.size)
    missed = np.empty(len(rows))
    for number in range(int(fold.max()) + 1):
        held = fold == number
        there = _solve(rows[~held], curve, start)
        missed[held] = np.abs(curve(there, rows[held]) / rows[held, -1] - 1.0)
    return float(missed.mean())


def _solve(rows: Array, curve: Curve, start: Mapping[str, float]) -> Array:
    """Damped Gauss-Newton on logarithms of parameters and times, with a weak pull to the start."""
    first = np.log(np.array(list(start.values())))
    # No share of a peak is above 1, whatever a few small shapes suggest.
    most = np.array([0.0 if name.endswith("fraction") else np.inf for name in start])
    wanted = np.log(rows[:, -1])
    pull = _PULL * math.sqrt(len(rows)) * np.array([0.0, *(1.0 for _ in range(len(start) - 1))])

    def residual(theta: Array) -> Array:
        return np.asarray(np.concatenate([np.log(curve(theta, rows)) - wanted, pull * (theta - first)]))

    theta: Array = first.copy()
    damping, best = 1e-2, residual(theta)
    for _ in range(80):
        columns = [(residual(theta + step) - best) / 1e-5 for step in 1e-5 * np.eye(len(theta))]
        jacobian: Array = np.asarray(np.stack(columns, axis=1), dtype=np.float64)
        normal = jacobian.T @ jacobian
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -jacobian.T @ best)
        tried: Array = np.minimum(theta + np.clip(move, -1.0, 1.0), most)
        then = residual(tried)
        if then @ then < best @ best:
            theta, best, damping = tried, then, damping / 3.0
        else:
            damping *= 4.0
    return theta
