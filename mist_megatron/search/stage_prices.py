"""Times and peaks of all configurations of a stage slot, kept in the parts that they are sums of.

t and d of a stage depend on its role and layers, not on its position; they are linear in recomputed layers
but for what the last layer that is not recomputed changes, and peaks are linear, moment by moment, in
micro-batches in flight and optimizer offload. So a role is priced once for a window of layers, with two
numbers of recomputed layers and at three corners of the latter two, and slots read theirs off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mist_megatron.cost.chunk_ends import edges_s
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import ON_HOST, StageGrid
from mist_megatron.cost.predict import in_turn_share, refined
from mist_megatron.cost.terms import Linear, first_terms, steps_of, totals
from mist_megatron.search.choices import (
    AXES,
    Array,
    Choices,
    Ints,
    Rows,
    StageSlot,
    stage_grid,
)
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.recompute import Recompute
from mist_megatron.spec.term import Term


@dataclass(frozen=True)
class Times:
    """t, d without the step that waits for all stages, and that step; d is all of it where none waits. What a
    first forward pass stands still for counts on the first stage only: it delays others by what is not known
    of one alone."""

    stable: Linear
    delta: Linear
    step: Linear
    in_turn_s: Array
    """Part of t that is not there while the pipeline fills and drains."""
    sent_s: Array
    """Part of t: what a stage without chunks sends to its neighbours."""
    tied_s: Array
    """Part of d: gradients of a token table that two stages share."""
    edge_s: Array
    """Part of t that is of embedding and head."""

    @staticmethod
    def of(evaluator: StageEvaluator, grid: StageGrid, without: tuple[Term, ...] = ()) -> Times:
        """Prices of a grid, some terms of d left out."""
        terms = evaluator.terms(grid)
        context = evaluator.time_context
        waits = () if context.facts.step.hides else steps_of(terms.delta, context.facts)
        if not grid.role.has_embedding:
            without = (*without, *first_terms(context.facts))
        delta = {name: term for name, term in terms.delta.items() if name not in without}
        sent = Linear() if grid.interleaved else terms.stable.get(Term.PIPELINE_P2P, Linear())
        turn = in_turn_share(context.facts)
        return Times(
            totals(terms.stable),
            totals({name: term for name, term in delta.items() if name not in waits}),
            totals({name: term for name, term in delta.items() if name in waits}),
            turn * sent.fixed if turn else np.zeros(()),
            sent.fixed,
            delta.get(Term.TIED_EMBEDDINGS, Linear()).fixed,
            edges_s(terms.stable),
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
        times = Times.of(evaluator, self._ends)
        self.stable = _padded(times.stable)
        self.extras = _padded(times.delta), _padded(times.step)
        """d without the step that waits for all stages, and that step."""
        if len({len(c) for c in counts}) == 1:
            ckpt = np.stack(counts).reshape(len(window), -1, *one)
        else:
            ckpt = counts[-1].reshape(1, -1, *one)
        self._counted = replace(self.grid, layers=layers, ckpt=ckpt)
        self._moments = corner_moments(evaluator, self._counted)
        self.in_turn_s = float(np.max(times.in_turn_s))
        self.layer_backward_s = float(np.max(evaluator.loads(self.grid).block.backward_s))
        self._fine = _not_linear(evaluator, replace(self.grid, layers=layers))

    @cached_property
    def beyond(self) -> Beyond | None:
        """What t and d are not linear in."""
        if self._fine is None:
            return None
        delta, layers = self.extras[0], self._ends.layers
        fixed, per_layer, per_ckpt = (part[:, :1] for part in _parts(delta))

        def least(fine: tuple[Array, Array], ckpt: Array) -> Array:
            """Of this and larger fractions of the optimizer, beyond what is linear."""
            linear = fixed + layers * per_layer + ckpt * per_ckpt
            whole = linear + fine[1]
            after = np.minimum.accumulate(whole[..., ::-1], axis=-1)[..., ::-1]
            return np.asarray(after - linear)

        none, *some = (least(fine, ckpt) for ckpt, fine in self._fine)
        return Beyond(none, *(some or [np.zeros_like(none)] * 2))

    @cached_property
    def _host(self) -> dict[str, tuple[Array, Array]]:
        """Of each kind of bytes, were all of it in host memory: what is there with nothing in flight, and
        more with each micro-batch, over layers, recomputed layers, levels and sub-groups."""
        in_flight = np.array([0.0, 1.0]).reshape(2, *(1,) * (len(AXES) + 1))
        parts = self.evaluator.host_parts(replace(self._counted, in_flight=in_flight))
        ends = {kind: with_axes(part, len(AXES) + 2) for kind, part in parts.items()}
        flat = {kind: end.reshape(end.shape[:5]) for kind, end in ends.items()}
        return {kind: (end[0], end[-1] - end[0]) for kind, end in flat.items()}

    def host_bytes(self, slot: StageSlot, rows: Rows) -> Array:
        """What configurations of a slot keep in host memory."""
        row, total = self.window.index(slot.layers), np.zeros(len(rows[0]))
        for kind, ends in self._host.items():
            none, each = (
                end[
                    row if end.shape[0] > 1 else 0,
                    rows[0] if end.shape[1] > 1 else 0,
                    rows[1] if end.shape[2] > 1 else 0,
                    rows[2] if end.shape[3] > 1 else 0,
                ]
                for end in ends
            )
            share = 1.0 if kind == ON_HOST else self.axes[kind].reshape(-1)[rows[AXES.index(kind)]]
            total = total + share * (none + slot.held * each)
        return total

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
            beyond=lambda: self.beyond.row(row) if self.beyond else None,
            beyond_t_s=None if self._fine is None else self._beyond_t_s(row),
            in_turn_s=self.in_turn_s,
            backward_s=layers * self.layer_backward_s,
            memory=HeldMemory(axes["optimizer"].reshape(-1), self.evaluator.limit_bytes, moments),
        )

    def _beyond_t_s(self, row: int) -> Array:
        """What t lacks where no layer is recomputed."""
        assert self._fine is not None
        stable_s = with_axes(self._fine[0][1][0], len(AXES) + 1).min(axis=-1, keepdims=True)
        return np.asarray(stable_s[row if stable_s.shape[0] > 1 else 0])


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
    beyond: Callable[[], Beyond | None] = lambda: None
    beyond_t_s: Array | None = None
    """What t lacks where no layer is recomputed."""
    in_turn_s: float = 0.0
    """Part of t that is not there while the pipeline fills and drains."""
    backward_s: float = 0.0
    """No backward pass takes less."""

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
        t_s = self._table(self.stable, np.arange(len(self.counts)))
        if self.beyond_t_s is None or self.counts[0] != 0.0:
            return t_s
        t_s = np.array(np.broadcast_to(t_s, np.broadcast_shapes(t_s.shape, self.beyond_t_s.shape)))
        t_s[:1] += self.beyond_t_s
        return t_s

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
                if array.size == 1:
                    return array.reshape(-1)
                kind = self._all_recomputed(array.shape[0])[rows[0]]
                spread = np.broadcast_to(array, (array.shape[0], *self.size[1:]))
                return np.asarray(spread[(kind, *rows[1:])], dtype=np.float64)

            value = part(linear.fixed) + self.layers * part(linear.per_layer)
            if np.any(linear.per_ckpt):
                value = value + self.counts[rows[0]] * part(linear.per_ckpt)
            return np.broadcast_to(np.asarray(value, dtype=np.float64), rows[0].shape)

        delta, step = self.extras()
        d_s = priced(delta)
        beyond = self.beyond()
        if beyond is not None:
            d_s = d_s + beyond.of(rows, self.counts[rows[0]], self.size)
        return d_s, priced(step)

    def extras_grow(self) -> bool:
        """Whether neither falls when more of the optimizer is offloaded: they are linear in recomputed
        layers, so the ends of their two pieces tell."""
        last = len(self.counts) - 1
        ends = np.array(sorted({0, max(last - 1, 0), last}), dtype=np.intp)
        return all(
            bool(np.all(np.diff(self._table(linear, ends), axis=-1) >= 0.0)) for linear in self.extras()
        )


@dataclass(frozen=True)
class Beyond:
    """What d lacks that is not linear in recomputed layers, axes as of `SlotPrices` but for the first, which
    is of one row; of this and all larger fractions of the optimizer at least."""

    none_s: Array
    """Where no layer is recomputed ..."""
    one_s: Array
    """... where one is ..."""
    last_s: Array
    """... and where all but one are: in between no less than on the line from one to the other."""

    def row(self, row: int) -> Beyond:
        """One number of layers of a window."""
        parts = (self.none_s, self.one_s, self.last_s)
        return Beyond(*(part[row if part.shape[0] > 1 else 0] for part in parts))

    def of(self, rows: Rows, counts: Array, size: tuple[int, ...]) -> Array:
        """Of some configurations with so many recomputed layers."""

        def taken(part: Array) -> Array:
            return np.asarray(np.broadcast_to(part, (1, *size[1:]))[(0, *rows[1:])])

        if not np.any(self.one_s) and not np.any(self.last_s):
            return np.where(counts == 0.0, taken(self.none_s), 0.0)
        along = (counts - 1.0) / max(size[0] - 3.0, 1.0)
        one_s, last_s = taken(self.one_s), taken(self.last_s)
        some_s = one_s + np.clip(along, 0.0, 1.0) * (last_s - one_s)
        return np.where(counts == 0.0, taken(self.none_s), some_s)


def _is_linear(evaluator: StageEvaluator, grid: StageGrid) -> bool:
    """Whether t and d lack nothing."""
    context = evaluator.time_context
    ends_alike = context.recomputes_first_layers and context.facts.step.taken == "at_end"
    return ends_alike or not np.any(grid.offload.activations)


def beyond_linear(evaluator: StageEvaluator, grid: StageGrid) -> tuple[Array, Array]:
    """What t and d lack of configurations, activations that leave late aside."""
    if _is_linear(evaluator, grid):
        return np.zeros(()), np.zeros(())
    fine = refined(evaluator, grid)
    return fine.stable_s, fine.delta_s - fine.late_s


_Fine = list[tuple[Array, tuple[Array, Array]]]
"""Numbers of recomputed layers - none, or none, one and all but one - with what t and d lack."""


def _not_linear(evaluator: StageEvaluator, grid: StageGrid) -> _Fine | None:
    """Where something is not linear: what that is. Activations that leave late are left out: they are late by
    what a stage waits for its first micro-batch, which is not known of it alone, or not at all."""
    if _is_linear(evaluator, grid):
        return None
    one = np.ones((1,) * (len(AXES) + 1))
    window = grid.layers
    ends = window if len(window) < 3 else window[[0, -1] if window[0] > 1.0 else [0, 1, -1]]
    none = refined(evaluator, replace(grid, layers=ends, ckpt=0.0 * one))
    stable_s, extra_s = (_along(part, ends, window) for part in (none.stable_s, none.delta_s - none.late_s))
    fine: _Fine = [(0.0 * one, (stable_s, extra_s))]
    if np.any(none.late_s):
        # Of layers that are not recomputed, however many others are.
        kept = np.concatenate([one, np.maximum(window[-1:] - 1.0, 1.0)])
        late_s = refined(evaluator, replace(grid, layers=kept + 1.0, ckpt=one)).late_s
        for ckpt in (one, np.maximum(window - 1.0, 1.0)):
            fine.append((ckpt, (stable_s, -_along(late_s, kept, window - ckpt))))
    return fine


def _along(values: Array, ends: Array, wanted: Array) -> Array:
    """Between two numbers of layers, or at the one or two that there are; a single layer, which no other is
    beside, may be apart."""
    whole = with_axes(np.asarray(values), len(AXES) + 1)
    if whole.shape[0] == 1 or ends[-1] == ends[0]:
        return whole[:1]
    along = np.clip((wanted - ends[-2]) / (ends[-1] - ends[-2]), 0.0, 1.0)
    between = whole[-2:-1] + along * (whole[-1:] - whole[-2:-1])
    return np.asarray(between if len(whole) == 2 else np.where(wanted == ends[0], whole[:1], between))


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
        """Micro-batches in flight that fit with as much of the optimizer offloaded as suits each moment."""
        most: Array = np.full((), np.inf)
        for members, freed in self.groups:
            base = self.held_bytes - self.offloads[-1] * np.maximum(freed, 0.0)
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
