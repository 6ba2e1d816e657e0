"""Times and peaks of all configurations of a stage slot, kept in the parts that they are sums of.

t and d of a stage depend on its role and layers, not on its position; they are linear in recomputed layers
but for what the last layer that is not recomputed changes, and peaks are linear, moment by moment, in
micro-batches in flight and optimizer offload. So a role is priced once for a window of layers, with two
numbers of recomputed layers and at three corners of the latter two, and slots read theirs off.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid, StageRole, role_of
from mist_megatron.cost.terms import Linear, step_names, totals
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.space import Space
from mist_megatron.spec.kinds import KINDS, Range, per_kind
from mist_megatron.spec.recompute import RECOMPUTES, Recompute
from mist_megatron.spec.schedule import in_flight, usual_schedule
from mist_megatron.spec.term import Term
from mist_megatron.targets.facts import GradientCase, HostGradients

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Rows = tuple[Ints, ...]
"""One position per axis of AXES: which configurations."""
LINEAR = "optimizer"
"""The kind of bytes in whose fraction peaks are linear; it comes last."""
AXES = ("ckpt", "zero", *(kind for kind in KINDS if kind != LINEAR), LINEAR)


@dataclass(frozen=True, kw_only=True)
class StageSlot:
    """Where a stage stands, how many layers it has, and what it holds."""

    role: StageRole
    layers: int
    held: float
    """Micro-batches in flight at its peak."""


def slot_at(shape: EqualPipeline, position: int, layers: int) -> StageSlot:
    """The slot of a stage of a shape."""
    held = in_flight(usual_schedule(shape.vpp), position, shape.stages, shape.grad_accum, shape.vpp)
    return StageSlot(role=role_of(position, shape.stages), layers=layers, held=held)


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
    if space.ckpt == "all":
        return np.array([float(layers)])
    if space.ckpt == "none_or_all":
        return np.array([0.0, float(layers)])
    return np.arange(0, layers + 1, vpp, dtype=np.float64)


def stage_grid(
    shape: EqualPipeline, slot: StageSlot, values: Mapping[str, Array], *, recompute: Recompute
) -> StageGrid:
    """The evaluator's grid for these values, each broadcast as it comes."""

    def one(value: float) -> Array:
        return np.full((1,) * len(AXES), float(value))

    return StageGrid(
        role=slot.role,
        nodes=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
        sequence_parallel=shape.sequence_parallel,
        recompute=recompute,
        layers=one(slot.layers),
        ckpt=values["ckpt"],
        in_flight=one(slot.held),
        micro_batch=one(shape.micro_batch),
        dp=one(shape.dp),
        tp=one(shape.tp),
        zero=values["zero"],
        grad_accum=one(shape.grad_accum),
        offload=per_kind(values.__getitem__),
        stages=shape.stages,
        vpp=shape.vpp,
        bridged=shape.bridged,
    )


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the stages of one shape choose from; the fractions in steps."""

    space: Space
    shape: EqualPipeline
    step: float

    def counts(self, layers: int, *, recompute: Recompute) -> Array:
        return (
            ckpt_counts(self.space, layers, self.shape.vpp)
            if RECOMPUTES[recompute].whole_layers
            else np.zeros(1)
        )

    def axes(self, counts: Array) -> dict[str, Array]:
        """Every axis along its own dimension."""
        flat = {
            "ckpt": counts,
            "zero": np.array(self.shape.zero, dtype=np.float64),
            **{kind: fractions(allowed, self.step) for kind, allowed in self.space.offload.items()},
        }
        return {
            name: flat[name].reshape([-1 if k == axis else 1 for k in range(len(AXES))])
            for axis, name in enumerate(AXES)
        }

    def size(self, layers: int, *, recompute: Recompute) -> int:
        """Configurations of a stage with so many layers, for one optimizer offload."""
        return self.size_of(self.counts(layers, recompute=recompute))

    def size_of(self, counts: Array) -> int:
        """The same for these numbers of recomputed layers."""
        axes = self.axes(counts)
        return math.prod(axes[name].size for name in AXES[:-1])

    def valid(self, layers: int, axes: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Combinations that the target's rules allow (`targets/rules.py`); axes broadcast together."""
        # With every layer recomputed there is nothing left to offload.
        activations = (axes["activations"] == 0.0) | (axes["ckpt"] < layers)
        states = (axes["optimizer"] == 0.0) | (axes["zero"] >= self.space.optimizer_offload_least_zero)
        if self.space.grads_follow_optimizer:
            wanted = (axes["optimizer"] > 0.0) & (axes["zero"] >= 2)
            states = states & ((axes["grads"] > 0.0) == wanted)
            states = states & ((axes["weights"] == 0.0) | (axes["zero"] >= 3))
        if self.space.host_gradients is not None:
            weights = (axes["weights"] == 0.0) | (axes["zero"] >= self.space.weights_least_zero)
            states = states & weights & self._gradients(axes, self.space.host_gradients)
        return np.asarray(activations & states, dtype=bool)

    def _gradients(self, axes: Mapping[str, Array], allowed_in: HostGradients) -> NDArray[np.bool_]:
        """Where the fraction of gradients lies in the range of level, optimizer and cuts."""
        allowed = np.zeros((), dtype=bool)
        by_layer = (axes["weights"] > 0.0) | self.space.layer_steps
        for level, offloads, cut in itertools.product(self.space.zero, (False, True), (False, True)):
            case = GradientCase(
                zero=level,
                offloads=offloads,
                grad_accum=self.shape.grad_accum,
                wide=self.space.wide_grads,
                by_layer=cut,
            )
            fractions = allowed_in(case)
            here = (axes["zero"] == level) & ((axes["optimizer"] > 0.0) == offloads) & (by_layer == cut)
            within = (axes["grads"] >= fractions.least) & (axes["grads"] <= fractions.most)
            allowed = allowed | (here & within)
        return allowed


@dataclass(frozen=True)
class Times:
    """t, d without the step that waits for all stages, and that step; d is all of it where none waits."""

    stable: Linear
    delta: Linear
    step: Linear

    @staticmethod
    def of(evaluator: StageEvaluator, grid: StageGrid, without: tuple[Term, ...] = ()) -> Times:
        """Prices of a grid, some terms of d left out."""
        terms = evaluator.terms(grid)
        context = evaluator.time_context
        waits = () if context.facts.step.hides else step_names(context.facts)
        delta = {name: term for name, term in terms.delta.items() if name not in without}
        return Times(
            totals(terms.stable),
            totals({name: term for name, term in delta.items() if name not in waits}),
            totals({name: term for name, term in delta.items() if name in waits}),
        )


class RolePrices:
    """All stages of one role and mesh, for a window of layers."""

    def __init__(
        self,
        evaluator: StageEvaluator,
        choices: Choices,
        role: StageRole,
        window: range,
        *,
        recompute: Recompute,
    ) -> None:
        self.evaluator, self.choices, self.window, self.recompute = evaluator, choices, window, recompute
        counts = [choices.counts(layers, recompute=recompute) for layers in window]
        self.axes = choices.axes(counts[-1])
        slot = StageSlot(role=role, layers=window[-1], held=1.0)
        self.grid = stage_grid(choices.shape, slot, self.axes, recompute=recompute)
        one = (1,) * (len(AXES) - 1)
        layers = np.array(window, dtype=np.float64).reshape(-1, 1, *one)
        ends = [ends_of(c) for c in counts]
        self._ends = replace(self.grid, layers=layers, ckpt=np.stack(ends).reshape(len(window), -1, *one))
        # t hardly ever depends on the optimizer's fraction, and d is not always asked for: the ends tell.
        offloads = ends_of(self.axes["optimizer"])
        times = Times.of(evaluator, self._ends.offloading(optimizer=offloads))
        self._all_times = times if self.axes["optimizer"].size <= offloads.size else None
        self.stable = _padded(times.stable)
        if any(np.shape(part)[-1] > 1 for part in _parts(self.stable)):
            self.stable = _padded(Times.of(evaluator, self._ends).stable)
        if len({len(c) for c in counts}) == 1:
            ckpt = np.stack(counts).reshape(len(window), -1, *one)
        else:
            ckpt = counts[-1].reshape(1, -1, *one)
        self._moments = corner_moments(evaluator, replace(self.grid, layers=layers, ckpt=ckpt))

    @cached_property
    def extras(self) -> tuple[Linear, Linear]:
        """d without the step that waits for all stages, and that step."""
        times = self._all_times or Times.of(self.evaluator, self._ends)
        return _padded(times.delta), _padded(times.step)

    def slot(self, layers: int) -> SlotPrices:
        """What is known of slots with so many layers."""
        row = self.window.index(layers)
        counts = self.choices.counts(layers, recompute=self.recompute)
        axes = {**self.axes, "ckpt": counts.reshape(-1, *(1,) * (len(AXES) - 1))}

        def cut(array: Array) -> Array:
            array = array[row if array.shape[0] > 1 else 0]
            return array[: len(counts)] if array.shape[0] > len(counts) else array

        moments = [[cut(array) for array in corners] for corners in self._moments]
        return SlotPrices(
            layers=layers,
            counts=counts,
            axes=axes,
            stable=_row(self.stable, row),
            extras=lambda: (_row(self.extras[0], row), _row(self.extras[1], row)),
            memory=HeldMemory(axes["optimizer"].reshape(-1), self.evaluator.limit_bytes, moments),
        )


def corner_moments(evaluator: StageEvaluator, grid: StageGrid) -> list[list[Array]]:
    """What is held, then what each moment adds, each where (in flight, optimizer offload) is (0, 0), (1, 0)
    and (0, 1). Axes are layers, then AXES."""
    axes = len(AXES) + 2
    corner = (3,) + (1,) * (axes - 1)
    held, beyond = evaluator.moments(
        replace(grid, in_flight=np.array([0.0, 1.0, 0.0]).reshape(corner)).offloading(
            optimizer=np.array([0.0, 0.0, 1.0]).reshape(corner)
        )
    )
    padded = [with_axes(array, axes) for array in (held, *beyond)]
    return [[array[k if array.shape[0] > 1 else 0] for k in range(3)] for array in padded]


@dataclass(frozen=True, kw_only=True)
class SlotPrices:
    """Configurations of a stage of one role, mesh and number of layers."""

    layers: int
    counts: Array
    """Numbers of recomputed layers."""
    axes: Mapping[str, Array]
    stable: Linear
    """Parts over AXES, of which the first is (some layers kept, all recomputed)."""
    extras: Callable[[], tuple[Linear, Linear]]
    """d without the step that waits for all stages, and that step."""
    memory: HeldMemory

    @property
    def size(self) -> tuple[int, ...]:
        """Values along each of AXES."""
        return tuple(self.axes[name].size for name in AXES)

    def _all_recomputed(self, linear_parts: int) -> Ints:
        """Per number of recomputed layers: which row of parts of so many rows holds."""
        whole = self.counts >= self.layers
        return np.where(whole, linear_parts - 1, 0).astype(np.intp)

    def t_s(self) -> Array:
        """t of all configurations, over the axes that it depends on."""
        return self._table(self.stable, np.arange(len(self.counts)))

    def _table(self, linear: Linear, which: Ints) -> Array:
        counts = self.counts[which].reshape(-1, *(1,) * (len(AXES) - 1))

        def part(array: Array) -> Array:
            return array[self._all_recomputed(array.shape[0])[which]] if array.shape[0] > 1 else array

        value = part(linear.fixed) + self.layers * part(linear.per_layer)
        if np.any(linear.per_ckpt):
            value = value + counts * part(linear.per_ckpt)
        return np.asarray(value, dtype=np.float64)

    def extras_s(self, rows: Rows) -> tuple[Array, Array]:
        """d without the step that waits for all stages, and that step, of some configurations."""

        def priced(linear: Linear) -> Array:
            def part(array: Array) -> Array:
                kind = self._all_recomputed(array.shape[0])[rows[0]]
                spread = np.broadcast_to(array, (array.shape[0], *self.size[1:]))
                return np.asarray(spread[(kind, *rows[1:])], dtype=np.float64)

            value = part(linear.fixed) + self.layers * part(linear.per_layer)
            if np.any(linear.per_ckpt):
                value = value + self.counts[rows[0]] * part(linear.per_ckpt)
            return np.asarray(value, dtype=np.float64)

        delta, step = self.extras()
        return priced(delta), priced(step)

    def extras_grow(self) -> bool:
        """Whether neither falls when more of the optimizer is offloaded: they are linear in recomputed
        layers, so the ends of their two pieces tell."""
        last = len(self.counts) - 1
        ends = np.array(sorted({0, max(last - 1, 0), last}), dtype=np.intp)
        return all(
            bool(np.all(np.diff(self._table(linear, ends), axis=-1) >= 0.0)) for linear in self.extras()
        )


class HeldMemory:
    """Peaks as linear functions of micro-batches in flight and optimizer offload, moment by moment."""

    def __init__(self, offloads: Array, limit_bytes: float, moments: list[list[Array]]) -> None:
        """`moments`: what is held, then what each moment adds, each at (0, 0), (1, 0) and (0, 1)."""
        self.offloads, self.limit_bytes = offloads, limit_bytes
        (held, _, held_offloaded), *beyond = moments
        self.held_bytes = held
        freed = held - held_offloaded
        self.groups: list[tuple[list[tuple[Array, Array]], Array]] = []
        """Moments (at none in flight, per micro-batch in flight) by what offloading everything frees."""
        alike = []
        for none, one, offloaded in beyond:
            if np.any(none != offloaded):
                self.groups.append(([(none, one - none)], freed + (none - offloaded)))
            else:
                alike.append((none, one - none))
        if alike:
            self.groups.append((alike, freed))

    def least_offload(self, held: float) -> Ints:
        """Per combination of the other axes: position of the least optimizer fraction that fits, or the
        number of fractions where none does."""
        needed: Array = np.zeros(())
        for members, freed in self.groups:
            added = _largest([none + held * each for none, each in members])
            over = self.held_bytes + (added - self.limit_bytes)
            if not np.all(freed > 0.0):
                with np.errstate(divide="ignore", invalid="ignore"):
                    needed = np.maximum(needed, np.where(over <= 0.0, 0.0, _ratio(over, freed, np.inf)))
            else:
                # What is not over needs less than nothing, and `needed` begins at nothing.
                needed = np.maximum(needed, over / freed)
        # A hair below the grid value counts as reaching it, as the check peak <= limit does.
        return np.searchsorted(self.offloads, needed * (1 - 1e-12), side="left")[..., 0]

    def most_held(self) -> Array:
        """Micro-batches in flight that fit with the optimizer offloaded in full."""
        most: Array = np.full((), np.inf)
        for members, freed in self.groups:
            base = self.held_bytes - self.offloads[-1] * freed
            for none, each in members:
                room = (self.limit_bytes - none) - base
                if np.all(each > 0.0):
                    most = np.minimum(most, room / each)
                    continue
                with np.errstate(divide="ignore", invalid="ignore"):
                    held = _ratio(room, each, np.where(room >= 0.0, np.inf, -1.0))
                most = np.minimum(most, held)
        return np.asarray(most * (1 + 1e-12), dtype=np.float64)


def _ratio(of: Array, by: Array, otherwise: Array | float) -> Array:
    """Where there is something to divide by."""
    return np.asarray(np.where(by > 0.0, of / by, otherwise), dtype=np.float64)


def _largest(arrays: list[Array]) -> Array:
    """Smallest operands first, so that only the last comparison touches the full size."""
    ordered = sorted(arrays, key=np.size)
    most = ordered[0]
    for array in ordered[1:]:
        most = np.maximum(most, array)
    return most


def ends_of(values: Array) -> Array:
    """First and last along the last axis; the one where there is one."""
    return values[..., [0, -1]] if values.shape[-1] > 1 else values


def with_axes(array: Array, axes: int) -> Array:
    """The same array with so many axes."""
    return array.reshape((1,) * (axes - np.ndim(array)) + np.shape(array))


def _parts(linear: Linear) -> tuple[Array, Array, Array]:
    return linear.fixed, linear.per_layer, linear.per_ckpt


def _padded(linear: Linear) -> Linear:
    """All parts with an axis of layers before AXES."""
    fixed, per_layer, per_ckpt = (with_axes(np.asarray(part), len(AXES) + 1) for part in _parts(linear))
    return Linear(fixed, per_layer, per_ckpt)


def _row(linear: Linear, row: int) -> Linear:
    """One number of layers of a window."""
    fixed, per_layer, per_ckpt = (part[row if part.shape[0] > 1 else 0] for part in _parts(linear))
    return Linear(fixed, per_layer, per_ckpt)
