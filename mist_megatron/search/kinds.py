"""Shapes of models whose layers differ: which run of layers each stage has, exactly.

Where layers differ, a stage's time and memory follow from its place in the model as well as from its size, so
that slots are pairs (first layer, number of layers). Only targets whose stages run one configuration run such
models (`layer_kinds` in `targets/facts.py`), so a shape is solved configuration by configuration: all slots
are priced at once, stages of one role and with the same kinds at their ends in one grid, and a dynamic
program over the borders finds the split with the least step. It goes from the last stage to the first and
keeps, of all ends of the model from a layer on, those that no other beats in all that stages before add to:
their time, their steady part, their second part and their step (`points.parts_of`). Every stage recomputes as
many layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.chunk_ends import ends_of
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.predict import (
    StagePrediction,
    grids_of,
    iteration_of,
    predicted_stage,
    priced_stages,
)
from mist_megatron.cost.terms import ZERO
from mist_megatron.search.borders import crossings_s
from mist_megatron.search.bounds import EqualBound, SearchProblem
from mist_megatron.search.choices import AXES, Array, Choices, Ints, slot_at
from mist_megatron.search.kind_bounds import once_of, others_of
from mist_megatron.search.kind_room import ckpt_axes
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.points import Ends, path_s, steady_s
from mist_megatron.search.slots import Slot, groups_of, slots_at, slots_grid, slots_of
from mist_megatron.search.solution import Solution, Solved, StageChoice, plan_of, told
from mist_megatron.search.space import Space
from mist_megatron.search.stage_fronts import Tally
from mist_megatron.search.stage_prices import Times
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import STAYS
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import RECOMPUTE_KINDS, Recompute
from mist_megatron.targets.table import TARGETS

Number = TypeVar("Number", np.float64, np.bool_)


def cut_to_kinds(runnable: Space, space: Space, job: Job) -> Space:
    """What of a space is searched where layers differ: of stages of one configuration all splits of the
    layers too, and offloading where all of them are trained."""
    if len(job.model.kinds) > 1:
        able = TARGETS[job.target].capability.uneven_layers
        runnable = replace(runnable, uneven_layers=space.uneven_layers and able, near_even=False)
    return replace(runnable, offload=STAYS) if any(kind.still for kind in job.model.kinds) else runnable


def solve_kinds(question: SearchProblem, shape: EqualPipeline, bound: EqualBound, best_s: float) -> Solved:
    """The best plan of a shape if it beats `best_s`."""
    tally = Tally()
    best = Solved(tally=tally)
    for recompute in question.space.recompute:
        priced = _priced(question, (shape, bound.layers_s), recompute, tally)
        for config in priced.promising():
            question.tick()
            beat_s = min(best_s, best.left_s)
            split = _split(priced, config, beat_s) if priced.bound_s[config] < beat_s else None
            if split is not None:
                value_s, slots = split
                stage = {**priced.choice(config), "recompute": float(RECOMPUTE_KINDS.index(recompute))}
                stages: list[StageChoice] = [{"layers": float(count), **stage} for _, count in slots]
                solution = told(question.evaluator, shape, stages)
                solution = _Balancing(question, priced, config).of(solution, value_s)
                if best.solution is not None and best.solution.value_s <= solution.value_s:
                    solution = best.solution
                best = Solved(solution, value_s, tally)
    return best


class _Balancing:
    """Moves of layers over borders of pipelines that are alike but for these."""

    def __init__(self, question: SearchProblem, priced: _Priced, config: int) -> None:
        self._question, self._priced, self._config = question, priced, config
        self._alone: dict[tuple[int, Slot], StagePrediction] = {}
        """By position and layers, as each stage is for itself: a move changes two of them."""

    def of(self, solution: Solution, least_s: float) -> Solution:
        """Splits are ranked by a time that warm-up passes may miss: where they do, layers move over borders,
        one at a time, while the step itself gets shorter."""
        question = self._question
        fixed = solution.shape.vpp > 1 or not question.space.uneven_layers
        whole = question.space.ckpt != "any" and solution.stages[0]["ckpt"] > 0.0
        if fixed or whole:
            return solution
        while solution.value_s > least_s * (1.0 + 1e-6):
            question.tick()
            moved = self._moved(solution)
            better = [one for one in moved if one.value_s < solution.value_s * (1.0 - 1e-9)]
            if not better:
                break
            solution = min(better, key=lambda one: one.value_s)
        return solution

    def _moved(self, solution: Solution) -> Iterator[Solution]:
        """With one layer on the other side of a border, where that fits and may be faster."""
        evaluator = self._question.evaluator
        for left in range(len(solution.stages) - 1):
            for more in (1.0, -1.0):
                stages = [dict(stage) for stage in solution.stages]
                stages[left]["layers"] += more
                stages[left + 1]["layers"] -= more
                if any(stage["layers"] < max(stage["ckpt"], 1.0) for stage in stages):
                    continue
                counts = [int(stage["layers"]) for stage in stages]
                slots = tuple(zip(accumulate(counts, initial=0), counts, strict=False))
                if _in_slots(self._priced, self._config, slots, solution.value_s) is None:
                    continue
                made = replace(solution, stages=tuple(stages))
                plan = plan_of(evaluator, made)
                grids = grids_of(plan)
                alone = [self._stage(key, grid) for key, grid in zip(enumerate(slots), grids, strict=True)]
                priced = priced_stages(plan, grids, evaluator, alone)
                if all(stage.fits for stage in priced):
                    time = iteration_of(plan, grids, priced, evaluator, plan.grad_accum)
                    yield replace(made, value_s=time.total_s)

    def _stage(self, key: tuple[int, Slot], grid: StageGrid) -> StagePrediction:
        if key not in self._alone:
            self._alone[key] = predicted_stage(grid, self._question.evaluator)
        return self._alone[key]


@dataclass(frozen=True)
class _Slots:
    """All stages of one role that are priced, a row each, by configuration."""

    place: dict[Slot, int]
    t_s: Array
    longer_s: Array
    d_s: Array
    step_s: Array
    in_turn_s: Array
    first_s: Array
    """The first chunk ..."""
    last_s: Array
    """... and the last one, there and back."""
    fits: dict[int, NDArray[np.bool_]]
    """By position in the pipeline, where slots of this role may stand."""


@dataclass(frozen=True)
class _Priced:
    shape: EqualPipeline
    layers: int
    slots: dict[StageRole, _Slots]
    axes: dict[str, Array]
    least_s: float
    """Of t of all stages together."""
    crossed_s: list[tuple[float, float]]
    """By position: what its own borders take beyond the least (`borders.crossings_s`)."""
    most: tuple[Mapping[int, Sequence[Slot]], ...]
    """By position and first layer: slots that leave layers for the other stages."""

    def choice(self, config: int) -> dict[str, float]:
        """Value of each axis."""
        index = np.unravel_index(config, tuple(self.axes[name].size for name in AXES))
        return {name: float(self.axes[name].reshape(-1)[k]) for name, k in zip(AXES, index, strict=True)}

    @cached_property
    def rest_s(self) -> Array:
        """By configuration: least of all but what the slowest stage takes for the other micro-batches."""
        first = self.slots[role_of(0, self.shape.stages)]
        sums_s = once_of(self.shape) * self.least_s + np.min(first.d_s, axis=0)
        return np.asarray(sums_s, dtype=np.float64)

    @cached_property
    def bound_s(self) -> Array:
        """By configuration: no split is faster."""
        return np.asarray(
            self.rest_s + others_of(self.shape) * self.least_s / self.shape.stages, dtype=np.float64
        )

    def promising(self) -> list[int]:
        """Configurations, those with the least bound first."""
        order: list[int] = np.argsort(self.bound_s, kind="stable").tolist()
        return [config for config in order if np.isfinite(self.bound_s[config])]

    def allowed(self, position: int, config: int, best_s: float) -> dict[int, list[Slot]]:
        """Slots of a stage with which a split may beat that."""
        slots = self.slots[role_of(position, self.shape.stages)]
        fits = slots.fits[position][:, config]
        least_s = self.rest_s[config] + others_of(self.shape) * np.where(fits, slots.t_s[:, config], 0.0)
        fast: list[bool] = (fits & (least_s < best_s)).tolist()
        here = {
            first: [slot for slot in some if fast[slots.place[slot]]]
            for first, some in self.most[position].items()
        }
        return {first: some for first, some in here.items() if some}

    def even(self) -> Iterator[tuple[Slot, ...]]:
        """Splits into stages with as many layers, or one more: the last, or the first of them."""
        stages, (each, more) = self.shape.stages, divmod(self.layers, self.shape.stages)
        for start in (0, stages - more) if more else (0,):
            counts = [each + (start <= position < start + more) for position in range(stages)]
            yield tuple(zip(accumulate(counts, initial=0), counts, strict=False))


def _priced(
    question: SearchProblem, known: tuple[EqualPipeline, float], recompute: Recompute, tally: Tally
) -> _Priced:
    """Every slot of a shape, whose layers take so long at least, in every configuration."""
    (shape, least_s), layers = known, question.evaluator.job.model.layers
    axes = ckpt_axes(question, shape, recompute)
    starts = tuple(slots_of(question, shape, position) for position in range(shape.stages))
    held: dict[StageRole, _Held] = {}
    for role in dict.fromkeys(role_of(position, shape.stages) for position in range(shape.stages)):
        positions = [k for k in range(shape.stages) if role_of(k, shape.stages) is role]
        every = slots_at(question, shape, positions)
        held[role] = _held(question, shape, (positions, every), axes, recompute)
        for fits in held[role].fits.values():
            tally.priced += fits.size
            tally.over_memory += int((~fits).sum())
    # Where no split of the layers fits no time is asked for.
    some = _may_fit(held.values(), layers)
    by_role = {role: _times(question, shape, each, axes, asked=some) for role, each in held.items()}
    return _Priced(shape, layers, by_role, axes, least_s, crossings_s(question.evaluator, shape), starts)


@dataclass(frozen=True)
class _Held:
    """Which slots of one role fit, before any time is asked for."""

    every: Sequence[Slot]
    parts: list[tuple[Ints, StageGrid, Ints, NDArray[np.bool_]]]
    """Slots with the same kinds at their ends: their rows, their grid, which of its stages each is, and
    which of its configurations there are."""
    fits: dict[int, NDArray[np.bool_]]
    """By position: by slot and configuration."""


def _may_fit(held: Iterable[_Held], layers: int) -> bool:
    """Whether, in some configuration, all positions together may have so many layers."""
    most = fewest = np.zeros(1)
    for role in held:
        counts = np.array([float(count) for _, count in role.every]).reshape(-1, 1)
        for fits in role.fits.values():
            most = most + np.where(fits, counts, -np.inf).max(axis=0, initial=-np.inf)
            fewest = fewest + np.where(fits, counts, np.inf).min(axis=0, initial=np.inf)
    return bool(((fewest <= layers) & (layers <= most)).any())


def _held(
    question: SearchProblem,
    shape: EqualPipeline,
    slots: tuple[Sequence[int], Sequence[Slot]],
    axes: dict[str, Array],
    recompute: Recompute,
) -> _Held:
    """Slots of one role: those with the same kinds at their ends in one grid."""
    positions, every = slots
    fits = _that_fit(question, shape, slots, axes, recompute)
    choices = Choices(space=question.space, shape=shape, step=question.step)
    parts = []
    for alike, rows in groups_of(question, shape, every):
        question.tick()
        grid, places = slots_grid(question, shape, alike, axes, positions[0], recompute)
        count = len(grid.layers)
        valid = _flat(choices.valid(0, {**axes, "ckpt": axes["ckpt"] - grid.layers}), axes, count)
        valid = valid & _flat(axes["ckpt"] <= grid.layers, axes, count)
        for here in fits.values():
            here[rows] &= valid[places]
        parts.append((rows, grid, places, valid))
    return _Held(every, parts, fits)


def _that_fit(
    question: SearchProblem,
    shape: EqualPipeline,
    slots: tuple[Sequence[int], Sequence[Slot]],
    axes: dict[str, Array],
    recompute: Recompute,
) -> dict[int, NDArray[np.bool_]]:
    """By position, slot and configuration. What a stage holds follows from its layers, whatever kinds are at
    its ends."""
    evaluator, (positions, every) = question.evaluator, slots
    grid, places = slots_grid(question, shape, (every, ((), None)), axes, positions[0], recompute)
    fits = {}
    for position in positions:
        held = slot_at(shape, position, 1).held
        peaks = evaluator.peak_bytes(replace(grid, in_flight=np.full_like(grid.in_flight, held)))
        fits[position] = _flat(peaks <= evaluator.limit_bytes, axes, len(grid.layers))[places]
    return fits


def _flat(values: NDArray[Number], axes: Mapping[str, Array], rows: int) -> NDArray[Number]:
    """By row and by configuration."""
    whole = np.broadcast_to(values, (rows, *(axes[name].size for name in AXES)))
    return whole.reshape(rows, -1)


def _times(
    question: SearchProblem, shape: EqualPipeline, held: _Held, axes: Mapping[str, Array], *, asked: bool
) -> _Slots:
    """The same slots with what they take, where that is asked and any of those that are alike fits."""
    names = ("t", "longer", "d", "step", "in_turn", "first", "last")
    size = next(iter(held.fits.values())).shape
    parts = {name: np.full(size, np.inf) for name in names}
    for rows, grid, places, valid in held.parts:
        if not (asked and any(fits[rows].any() for fits in held.fits.values())):
            continue
        for name, values in _seconds(question, shape, grid).items():
            whole = _flat(values, axes, len(grid.layers))
            parts[name][rows] = np.where(valid, whole, np.inf)[places]
    place = {slot: row for row, slot in enumerate(held.every)}
    t_s, longer_s, d_s, step_s, in_turn_s, first_s, last_s = (parts[name] for name in names)
    return _Slots(place, t_s, longer_s, d_s, step_s, in_turn_s, first_s, last_s, held.fits)


def _seconds(question: SearchProblem, shape: EqualPipeline, grid: StageGrid) -> dict[str, Array]:
    """What the value of a split is made of, all of it linear: targets that run such models offload no
    activations."""
    evaluator = question.evaluator
    times = Times.of(evaluator, grid)
    t_s = (times.stable.at(grid) - times.in_turn_s) / shape.vpp
    backward_s: Array = np.zeros(())
    for count, load in zip(grid.by_kind, evaluator.loads(grid).blocks, strict=True):
        backward_s = backward_s + count.layers * load.backward_s
    ends = (ZERO, ZERO) if shape.vpp == 1 else ends_of(grid, times.stable, times.edge_s, ZERO)
    return {
        "t": t_s,
        "longer": np.maximum(0.5 * t_s, backward_s / shape.vpp),
        "d": times.delta.at(grid),
        "step": times.step.at(grid),
        "in_turn": times.in_turn_s,
        **dict(zip(("first", "last"), ends, strict=True)),
    }


class _End(NamedTuple):
    """The stages from a layer to the end of the model; their step takes the sum of all but the first."""

    behind_s: float
    """t, or the last chunks of each where chunks take turns."""
    steady_s: float
    second_s: float
    step_s: float
    slots: tuple[Slot, ...]

    def beats(self, other: _End) -> bool:
        """Whether no stages before make this one slower than the other. More behind a stage never makes a
        step shorter."""
        longer = self.behind_s > other.behind_s or self.steady_s > other.steady_s
        return not (longer or self.second_s > other.second_s or self.step_s > other.step_s)


NOTHING_BEHIND = _End(0.0, -np.inf, -np.inf, 0.0, ())


def _split(priced: _Priced, config: int, best_s: float) -> tuple[float, tuple[Slot, ...]] | None:
    """The least value that beats `best_s`, and the slots that give it."""
    best: tuple[float, tuple[Slot, ...]] | None = None
    for slots in priced.even():
        whole = _in_slots(priced, config, slots, best_s)
        if whole is not None:
            best_s = _value_s(whole)
            best = best_s, slots
    ends: dict[int, list[_End]] = {priced.layers: [NOTHING_BEHIND]}
    for position in reversed(range(priced.shape.stages)):
        allowed = priced.allowed(position, config, best_s)
        ends = {
            first: _kept(priced, (position, config), slots, ends, best_s) for first, slots in allowed.items()
        }
    least = min(ends.get(0, ()), key=_value_s, default=None)
    return best if least is None else (_value_s(least), least.slots)


def _in_slots(priced: _Priced, config: int, slots: tuple[Slot, ...], limit_s: float) -> _End | None:
    """The whole model on these; None where one does not fit, or where that takes as long as the limit."""
    end = NOTHING_BEHIND
    for position in reversed(range(priced.shape.stages)):
        last = _with_stage(priced, (position, config), [(slots[position], end)])
        if not last or _value_s(last[0]) >= limit_s:
            return None
        end = last[0]
    return end


def _value_s(end: _End) -> float:
    return end.steady_s + end.second_s + end.step_s


def _kept(
    priced: _Priced,
    stage: tuple[int, int],
    slots: Sequence[Slot],
    ends: Mapping[int, Sequence[_End]],
    best_s: float,
) -> list[_End]:
    """Ends of the model from a layer on that may be part of something better."""
    pairs = [(slot, end) for slot in slots for end in ends.get(sum(slot), ())]
    longer = [end for end in _with_stage(priced, stage, pairs) if _value_s(end) < best_s]
    kept: list[_End] = []
    for end in sorted(longer):
        if not any(other.beats(end) for other in kept):
            kept.append(end)
    return kept


def _with_stage(priced: _Priced, stage: tuple[int, int], pairs: Sequence[tuple[Slot, _End]]) -> list[_End]:
    """Ends of the model with one more stage, at a position and in a configuration, before each of them."""
    (position, config), shape = stage, priced.shape
    slots = priced.slots[role_of(position, shape.stages)]
    fits = slots.fits[position][:, config]
    pairs = [(slot, end) for slot, end in pairs if fits[slots.place[slot]]]
    if not pairs:
        return []
    rows = np.array([slots.place[slot] for slot, _ in pairs], dtype=np.intp)
    behind_s, steady, second, step = np.array([end[:4] for _, end in pairs]).T
    t_s, d_s = slots.t_s[rows, config], slots.d_s[rows, config]
    ends = Ends.of(shape.grad_accum * shape.vpp, shape.stages - 1 - position, shape.stages, shape.vpp)
    more_s, more_in_turn_s = priced.crossed_s[position]
    t_s, in_turn_s = t_s + more_s, slots.in_turn_s[rows, config] + more_in_turn_s
    longer_s = np.maximum(slots.longer_s[rows, config], 0.5 * t_s)
    if shape.vpp > 1:
        first_s, last_s = slots.first_s[rows, config], slots.last_s[rows, config]
        path = path_s(t_s, longer_s, ends, behind_s)
        hides_s = np.minimum(first_s, t_s)
        parts = behind_s + last_s, np.maximum(steady + first_s, path), np.maximum(second - hides_s, d_s)
    else:
        own = steady_s(t_s, longer_s, in_turn_s, ends, behind_s)
        behind_s = behind_s + t_s
        parts = behind_s, np.maximum(steady, own), np.maximum(second, d_s + behind_s)
    sums = np.stack([*parts, np.maximum(step, slots.step_s[rows, config])], axis=1)
    summed = zip(sums.tolist(), pairs, strict=True)
    return [
        _End(behind, most, late, last, (slot, *end.slots))
        for (behind, most, late, last), (slot, end) in summed
    ]
