"""Exact Pareto fronts of (t, d) inside a stage, over the whole grid of its configurations.

For one stage slot (role, position, layers) all combinations of recomputed layers, ZeRO level and offload
fractions are priced in one batched call; what does not fit or is slower than a cap is dropped, and the
non-dominated rest is the front. Nothing is sampled.

Offloading optimizer states touches only d and frees memory linearly, so where no rule couples it to other
choices, and d is seen to grow with it, only the least fraction that fits can be on the front.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid, role_of
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


def stage_configs(
    evaluator: StageEvaluator, space: Space, shape: Shape, slot: Slot, step: float, cap_s: float
) -> tuple[StageConfigs | None, Tally]:
    """The exact front of one stage slot among configurations with t up to `cap_s`."""
    tally = Tally()
    parts = []
    for selective in (False, True) if space.selective else (False,):
        block = _block(space, shape, slot, step, selective=selective)
        part = _front_of(evaluator, space, block, cap_s, tally)
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
    evaluator: StageEvaluator, space: Space, block: _Block, cap_s: float, tally: Tally
) -> StageConfigs | None:
    factors = evaluator.factors(block.grid)
    t_s = factors.stable.at(block.grid.layers, block.grid.ckpt)
    d_s = factors.delta.at(block.grid.layers, block.grid.ckpt)
    full = block.valid.shape
    tally.priced += int(block.valid.sum())
    oo = block.axes["optimizer"].reshape(-1)
    d_full = np.broadcast_to(d_s, np.broadcast_shapes(d_s.shape, full))
    grows = len(oo) > 1 and bool(np.all(np.diff(d_full, axis=-1) >= 0.0))
    coupled = space.grads_follow_optimizer
    if grows and not coupled and np.ndim(t_s) == len(full) and t_s.shape[-1] == 1:
        index, usable = _least_optimizer_offload(evaluator, block, tally)
        usable &= t_s[..., 0] <= cap_s
        picked = np.nonzero(usable)
        chosen = index[picked]
        rows = (*picked, chosen)
    else:
        peak = evaluator.peak_bytes(block.grid)
        fits = np.broadcast_to(peak <= evaluator.limit_bytes, full)
        _count_misses(block.valid, np.broadcast_to(peak, full), fits, tally)
        rows = np.nonzero(block.valid & fits & np.broadcast_to(t_s <= cap_s, full))
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
    from dataclasses import replace

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
