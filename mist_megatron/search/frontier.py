"""Exact Pareto fronts of (t, d) inside a stage, over the whole grid of its configurations.

For one stage slot (role, position, layers) all combinations of recomputed layers, ZeRO level and offload
fractions are priced in one batched call; what does not fit or is slower than a cap is dropped, and the
non-dominated rest is the front. Nothing is sampled.

Offloading optimizer states touches only d and frees memory linearly, so where no rule couples it to other
choices, and d is seen to grow with it, only the least fraction that fits can be on the front.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.evaluate import StageEvaluator, StageFactors
from mist_megatron.cost.grid import StageGrid, StageRole, role_of
from mist_megatron.cost.terms import Linear
from mist_megatron.search.assign import Front, pareto
from mist_megatron.search.shapes import Shape
from mist_megatron.search.space import Space
from mist_megatron.spec.layout import in_flight
from mist_megatron.spec.plan import Schedule
from mist_megatron.spec.target import Range

Array = NDArray[np.float64]
AXES = ("ckpt", "zero", "weights", "grads", "activations", "optimizer")


@dataclass(frozen=True)
class StageConfigs:
    """Configurations of one stage slot with their cost: the rows of a front."""

    t_s: Array
    d_s: Array
    columns: dict[str, Array]
    """One array per name of AXES, and `selective` (0 or 1)."""

    @property
    def front(self) -> Front:
        return Front(self.t_s, self.d_s)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a stage stands and how many layers it has."""

    position: int
    layers: int


@dataclass
class Tally:
    """What a search has priced and dropped."""

    priced: int = 0
    over_memory: int = 0
    nearest_bytes: float = np.inf
    """Least peak of a configuration that did not fit."""

    def add(self, other: Tally) -> None:
        self.priced += other.priced
        self.over_memory += other.over_memory
        self.nearest_bytes = min(self.nearest_bytes, other.nearest_bytes)


def fractions(allowed: Range, step: float) -> Array:
    """Values of one offload fraction."""
    if allowed == "none":
        return np.zeros(1)
    if allowed == "all_or_nothing":
        return np.array([0.0, 1.0])
    return np.linspace(0.0, 1.0, round(1.0 / step) + 1)


def ckpt_counts(space: Space, layers: int, vpp: int) -> Array:
    """Numbers of fully recomputed layers; per chunk, so multiples of the number of chunks."""
    if space.ckpt == "none":
        return np.zeros(1)
    if space.ckpt == "none_or_all":
        return np.array([0.0, float(layers)])
    return np.arange(0, layers + 1, vpp, dtype=np.float64)


@dataclass(frozen=True)
class _Block:
    """One batched call: axes in the order of AXES, and the grid they make."""

    axes: dict[str, Array]
    grid: StageGrid
    valid: NDArray[np.bool_]


@dataclass(frozen=True)
class _Times:
    """t and d of a slot over the axes that they depend on."""

    t_s: Array
    d_s: Array
    grows: bool
    """d never falls when more of the optimizer is offloaded."""


def stage_grid(shape: Shape, slot: Slot, values: dict[str, Array], *, selective: bool) -> StageGrid:
    """The evaluator's grid for these values, each broadcast as it comes."""
    schedule: Schedule = "interleaved" if shape.vpp > 1 else "1f1b"
    held = in_flight(schedule, slot.position, shape.stages, shape.grad_accum, shape.vpp)

    def one(value: float) -> Array:
        return np.full((1,) * len(AXES), float(value))

    return StageGrid(
        role=role_of(slot.position, shape.stages),
        nodes=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
        sequence_parallel=shape.sequence_parallel,
        selective=selective,
        layers=one(slot.layers),
        ckpt=values["ckpt"],
        in_flight=one(held),
        micro_batch=one(shape.micro_batch),
        dp=one(shape.dp),
        tp=one(shape.tp),
        zero=values["zero"],
        grad_accum=one(shape.grad_accum),
        weights_offload=values["weights"],
        grads_offload=values["grads"],
        optimizer_offload=values["optimizer"],
        activations_offload=values["activations"],
        stages=shape.stages,
        vpp=shape.vpp,
    )


def _block(space: Space, shape: Shape, slot: Slot, step: float, *, selective: bool) -> _Block:
    counts = np.zeros(1) if selective else ckpt_counts(space, slot.layers, shape.vpp)
    flat = {
        "ckpt": counts,
        "zero": np.array(shape.zero, dtype=np.float64),
        **{kind: fractions(getattr(space.offload, kind), step) for kind in AXES[2:]},
    }
    axes = {
        name: flat[name].reshape([-1 if k == axis else 1 for k in range(len(AXES))])
        for axis, name in enumerate(AXES)
    }
    grid = stage_grid(shape, slot, axes, selective=selective)
    return _Block(axes, grid, _valid(space, slot, axes))


def _valid(space: Space, slot: Slot, axes: dict[str, Array]) -> NDArray[np.bool_]:
    """Combinations that the target's rules allow (`spec/target.py`), over all axes."""
    valid = np.ones(np.broadcast_shapes(*(a.shape for a in axes.values())), dtype=bool)
    # With every layer recomputed there is nothing left to offload.
    valid &= (axes["activations"] == 0.0) | (axes["ckpt"] < slot.layers)
    valid &= (axes["optimizer"] == 0.0) | (axes["zero"] >= space.optimizer_offload_least_zero)
    if space.grads_follow_optimizer:
        wanted = (axes["optimizer"] > 0.0) & (axes["zero"] >= 2)
        valid &= (axes["grads"] > 0.0) == wanted
        valid &= (axes["weights"] == 0.0) | (axes["zero"] >= 3)
    return valid


class StageTimes:
    """t and d of the stages of one shape. They depend on a stage's role and layers, not on its position, and
    their streams do not depend on the layers: each role is priced once, for a window of layers at a time."""

    def __init__(
        self,
        evaluator: StageEvaluator,
        space: Space,
        shape: Shape,
        step: float,
        windows: Mapping[StageRole, range],
    ) -> None:
        self.evaluator, self.space, self.shape, self.step = evaluator, space, shape, step
        self._windows = windows
        self._factors: dict[tuple[StageRole, bool], StageFactors] = {}
        self._times: dict[tuple[StageRole, int, bool], _Times] = {}

    def of(self, slot: Slot, block: _Block, *, selective: bool) -> _Times:
        role = block.grid.role
        key = (role, slot.layers, selective)
        if key not in self._times:
            factors = self._role_factors(slot, block, selective=selective)
            row = self._windows[role].index(slot.layers)
            counts = block.axes["ckpt"].size
            t_s, d_s = (
                _row(linear, row, counts).at(block.grid.layers, block.grid.ckpt)
                for linear in (factors.stable, factors.delta)
            )
            self._times[key] = _Times(t_s, d_s, bool(np.all(np.diff(d_s, axis=-1) >= 0.0)))
        return self._times[key]

    def _role_factors(self, slot: Slot, block: _Block, *, selective: bool) -> StageFactors:
        role = block.grid.role
        if (role, selective) not in self._factors:
            window = self._windows[role]
            counts = [
                np.zeros(1) if selective else ckpt_counts(self.space, k, self.shape.vpp) for k in window
            ]
            equal = len(counts[0]) == len(counts[-1])
            one = (1,) * (len(AXES) - 1)
            grid = replace(
                block.grid,
                layers=np.array(window, dtype=np.float64).reshape(-1, 1, *one),
                ckpt=np.stack(counts).reshape(len(window), -1, *one)
                if equal
                else counts[-1].reshape(-1, *one),
            )
            self._factors[role, selective] = self.evaluator.factors(grid)
        return self._factors[role, selective]


def _row(linear: Linear, row: int, counts: int) -> Linear:
    """One number of layers of a window: its row, and as many recomputed layers as it can have."""

    def cut(array: Array) -> Array:
        if np.ndim(array) > len(AXES):
            array = array[row if array.shape[0] > 1 else 0]
        if np.ndim(array) == len(AXES) and array.shape[0] > counts:
            array = array[:counts]
        return array

    return Linear(cut(linear.fixed), cut(linear.per_layer), cut(linear.per_ckpt))


def stage_configs(
    evaluator: StageEvaluator, space: Space, shape: Shape, slot: Slot, step: float, cap_s: float
) -> tuple[StageConfigs | None, Tally]:
    """The exact front of one stage slot among configurations with t up to `cap_s`."""
    window = {role_of(slot.position, shape.stages): range(slot.layers, slot.layers + 1)}
    return slot_configs(StageTimes(evaluator, space, shape, step, window), slot, cap_s)


def slot_configs(times: StageTimes, slot: Slot, cap_s: float) -> tuple[StageConfigs | None, Tally]:
    """The exact front of one slot of a shape whose times are shared with other slots."""
    tally = Tally()
    parts = []
    for selective in (False, True) if times.space.selective else (False,):
        block = _block(times.space, times.shape, slot, times.step, selective=selective)
        part = _front_of(times, slot, block, cap_s, tally, selective=selective)
        if part is not None:
            flags = np.full(len(part.t_s), float(selective))
            parts.append(StageConfigs(part.t_s, part.d_s, {**part.columns, "selective": flags}))
    if not parts:
        return None, tally
    t_s = np.concatenate([part.t_s for part in parts])
    d_s = np.concatenate([part.d_s for part in parts])
    keep = pareto(t_s, d_s)
    columns = {
        name: np.concatenate([part.columns[name] for part in parts])[keep] for name in parts[0].columns
    }
    return StageConfigs(t_s[keep], d_s[keep], columns), tally


def _front_of(
    times: StageTimes, slot: Slot, block: _Block, cap_s: float, tally: Tally, *, selective: bool
) -> StageConfigs | None:
    evaluator, timed = times.evaluator, times.of(slot, block, selective=selective)
    t_s = timed.t_s
    full = block.valid.shape
    tally.priced += int(block.valid.sum())
    fast = t_s <= cap_s
    if not fast.any():
        return None
    d_full = np.broadcast_to(timed.d_s, full)
    coupled = times.space.grads_follow_optimizer
    if full[-1] > 1 and timed.grows and not coupled and np.ndim(t_s) == len(full) and t_s.shape[-1] == 1:
        index, usable = _least_optimizer_offload(evaluator, block, tally)
        usable &= fast[..., 0]
        picked = np.nonzero(usable)
        rows = (*picked, index[picked])
    else:
        peak = evaluator.peak_bytes(block.grid)
        fits = np.broadcast_to(peak <= evaluator.limit_bytes, full)
        _count_misses(block.valid, np.broadcast_to(peak, full), fits, tally)
        rows = np.nonzero(block.valid & fits & np.broadcast_to(fast, full))
    if not len(rows[0]):
        return None
    t_rows, d_rows = np.broadcast_to(t_s, full)[rows], d_full[rows]
    keep = pareto(t_rows, d_rows)
    columns = {name: block.axes[name].reshape(-1)[rows[axis][keep]] for axis, name in enumerate(AXES)}
    return StageConfigs(t_rows[keep], d_rows[keep], columns)


def _least_optimizer_offload(
    evaluator: StageEvaluator, block: _Block, tally: Tally
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Per combination of the other axes: position of the least optimizer fraction that fits, and whether
    one does. Peaks are linear in the fraction: two ends give all."""
    oo = block.axes["optimizer"].reshape(-1)
    shape = block.valid.shape[:-1]

    def peak_at(value: float) -> Array:
        end = np.full((1,) * len(AXES), value)
        peak = evaluator.peak_bytes(replace(block.grid, optimizer_offload=end))
        return np.broadcast_to(peak[..., 0], shape)

    none, all_of = peak_at(0.0), peak_at(float(oo[-1]))
    freed = (none - all_of) / oo[-1]
    over = none - evaluator.limit_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.where(over <= 0.0, 0.0, np.where(freed > 0.0, over / freed, np.inf))
    # A hair below the grid value counts as reaching it, as the check peak <= limit does.
    index = np.searchsorted(oo, needed * (1 - 1e-12), side="left")
    usable = index < len(oo)
    index = np.minimum(index, len(oo) - 1)
    usable &= np.take_along_axis(block.valid, index[..., None], axis=-1)[..., 0]
    _count_misses(block.valid[..., -1], all_of, index < len(oo), tally, usable)
    return index, usable


def _count_misses(
    valid: NDArray[np.bool_],
    peak: Array,
    fits: NDArray[np.bool_],
    tally: Tally,
    usable: NDArray[np.bool_] | None = None,
) -> None:
    missed = valid & ~(fits if usable is None else usable)
    tally.over_memory += int(missed.sum())
    if missed.any():
        tally.nearest_bytes = min(tally.nearest_bytes, float(peak[missed].min()))
