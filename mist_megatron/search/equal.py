"""One shape: the best assignment of layers and configurations to its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.search.assign import Assignment, Pipelines, assign, improves, in_line
from mist_megatron.search.borders import ROLES
from mist_megatron.search.bounds import EqualBound, SearchProblem, split_bounds
from mist_megatron.search.choices import (
    AXES,
    Array,
    Choices,
    StageSlot,
    per_chunk_counts,
    slot_at,
    stage_grid,
)
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.points import Ends, steady_s
from mist_megatron.search.solution import Solved, StageChoice, stage_choice, told
from mist_megatron.search.splits import layer_splits, split_table, splits_layers
from mist_megatron.search.stage_fronts import StageConfigs, StageTimes, Tally, slot_configs
from mist_megatron.search.stage_prices import Times, beyond_linear
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import RECOMPUTE_KINDS, RECOMPUTES, Recompute
from mist_megatron.spec.schedule import chunk_layers, recomputed_of


def solve_equal(question: SearchProblem, shape: EqualPipeline, bound: EqualBound, best_s: float) -> Solved:
    """The best plan of a shape if it beats `best_s`."""
    space, stages = question.space, shape.stages
    if stages == 1 or (space.per_stage and not splits_layers(space, stages, shape.vpp)):
        return _solve_per_stage(question, shape, bound, best_s)
    found = Solved()
    if space.per_stage and question.evaluator.job.model.layers % (stages * shape.vpp) == 0:
        found = _solve_per_stage(question, shape, bound, best_s)
    alike = _solve_uniform(question, shape, bound, min(best_s, found.left_s))
    alike.tally.add(found.tally)
    return alike if alike.solution is not None else replace(found, tally=alike.tally)


def _solve_per_stage(
    question: SearchProblem, shape: EqualPipeline, bound: EqualBound, best_s: float
) -> Solved:
    layers = question.evaluator.job.model.layers
    caps_s = {role: bound.cap_s(shape, role, best_s) for role in StageRole}
    windows = _layer_windows(question, shape, bound, caps_s)
    if not _may_beat(question, shape, bound, windows, best_s):
        return Solved()
    tally = Tally()
    choices = Choices(space=question.space, shape=shape, step=question.step)
    times = StageTimes(question.evaluator, choices, windows)
    configs: list[dict[int, StageConfigs]] = [{} for _ in range(shape.stages)]
    for role, window in windows.items():
        positions = [k for k in range(shape.stages) if role_of(k, shape.stages) is role]
        for count in window:
            question.tick()
            slots = [slot_at(shape, position, count) for position in positions]
            found, more = slot_configs(times, slots, caps_s[role])
            tally.add(more)
            for position, here in zip(positions, found, strict=True):
                if here is not None:
                    configs[position][count] = here
    if not all(configs):
        return Solved(tally=tally)
    fronts = [{count: c.front(shape.vpp) for count, c in here.items()} for here in configs]
    pipelines = in_line(fronts, layers, chunked=shape.vpp > 1)
    answer = assign_by(question, pipelines, shape.grad_accum * shape.vpp, best_s)
    if answer is None:
        return Solved(tally=tally)
    rows = zip(answer.layers, configs, answer.choice, strict=True)
    stages = [stage_choice(count, here[count], index) for count, here, index in rows]
    return Solved(told(question.evaluator, shape, stages), answer.value_s, tally)


def _may_beat(
    question: SearchProblem,
    shape: EqualPipeline,
    bound: EqualBound,
    windows: Mapping[StageRole, range],
    best_s: float,
) -> bool:
    """Whether the best split of the layers is fast enough, memory unlimited."""
    if shape.stages == 1 or shape.vpp > 1 or not question.space.uneven_layers or not np.isfinite(best_s):
        return True
    fronts = {
        role: {count: least.front(count) for count in windows.get(role, ())}
        for role, least in zip(ROLES, bound.stages, strict=True)
    }
    stages = [fronts[role_of(position, shape.stages)] for position in range(shape.stages)]
    pipelines = in_line(stages, question.evaluator.job.model.layers)
    return improves(pipelines, shape.grad_accum, best_s, question.tick)


def assign_by(
    question: SearchProblem, pipelines: Pipelines, grad_accum: int, best_s: float
) -> Assignment | None:
    """By the solver that was asked for."""
    if question.solver == "exact":
        return assign(pipelines, grad_accum, best_s, question.tick)
    from mist_megatron.search.milp import assign_milp

    return assign_milp(pipelines, grad_accum, best_s)


def _layer_windows(
    question: SearchProblem, shape: EqualPipeline, bound: EqualBound, caps_s: Mapping[StageRole, float]
) -> dict[StageRole, range]:
    """Numbers of layers worth pricing per role: under the cap, and leaving room for the others."""
    total, stages, vpp = question.evaluator.job.model.layers, shape.stages, shape.vpp
    counts = Counter(role_of(position, stages) for position in range(stages))
    if not question.space.uneven_layers or stages == 1 or vpp > 1:
        return dict.fromkeys(counts, range(total // stages, total // stages + 1))
    most = {}
    for role in counts:
        fast = bound.stages[ROLES.index(role)].t_s[: total - (stages - 1)] <= caps_s[role]
        most[role] = int(np.flatnonzero(fast)[-1]) + 1 if fast.any() else 0
    room = sum(count * most[role] for role, count in counts.items())
    return {role: range(max(1, total - (room - most[role])), most[role] + 1) for role in counts}


def _solve_uniform(question: SearchProblem, shape: EqualPipeline, bound: EqualBound, best_s: float) -> Solved:
    """All stages with one configuration: the whole grid at once, of each split of the layers that may beat
    what there is."""
    layers, stages, vpp = question.evaluator.job.model.layers, shape.stages, shape.vpp
    splits: list[tuple[float, tuple[int, ...]]] = [(0.0, (layers // stages,) * stages)]
    if splits_layers(question.space, stages, vpp):
        bounds_s = split_bounds(shape, bound.stages, split_table(layers, stages, vpp))
        splits = sorted(zip(map(float, bounds_s), layer_splits(layers, stages, vpp), strict=True))
    tally = Tally()
    best = Solved(tally=tally)
    priced: dict[tuple[object, ...], _StageTimes] = {}
    for least_s, split in splits:
        for recompute in question.space.recompute:
            wanted_s = min(best_s, best.left_s)
            if least_s >= wanted_s:
                return best
            grid = _SplitGrid(question, shape, split, recompute, priced)
            found = grid.best(wanted_s, tally)
            if found is not None:
                value_s, rows = found
                best = Solved(told(question.evaluator, shape, rows), value_s, tally)
    return best


class _StageTimes(NamedTuple):
    """Of all configurations of one stage, over their axes."""

    t_s: Array
    """Per chunk, without what is in turn."""
    d_s: Array
    step_s: Array
    in_turn_s: Array


class _SplitGrid:
    """All configurations that the stages of one split may have alike."""

    def __init__(
        self,
        question: SearchProblem,
        shape: EqualPipeline,
        split: tuple[int, ...],
        recompute: Recompute,
        priced: dict[tuple[object, ...], _StageTimes],
    ) -> None:
        self.question, self.shape, self.split, self.recompute = question, shape, split, recompute
        self.chunks = chunk_layers(split, shape.vpp)
        self.choices = Choices(space=question.space, shape=shape, step=question.step)
        whole = RECOMPUTES[recompute].whole_layers
        counts = per_chunk_counts(question.space, self.chunks) if whole else np.zeros(1)
        self.axes = [
            self.choices.axes(np.array([float(recomputed_of(chunks, int(n))) for n in counts]))
            for chunks in self.chunks
        ]
        self.priced = priced

    def best(self, wanted_s: float, tally: Tally) -> tuple[float, list[StageChoice]] | None:
        """The fastest that fits, if it takes less than that, and its stages."""
        size = tuple(self.axes[0][name].size for name in AXES)
        value_s = np.broadcast_to(self._values_s(), size)
        wanted = value_s < wanted_s
        kinds = dict(zip(zip(self.split, self.chunks, strict=True), self.axes, strict=True))
        for (layers, _), axes in kinds.items():
            wanted = wanted & self.choices.valid(layers, axes)
        tally.priced += int(wanted.sum())
        fits = self._fitting(wanted)
        tally.over_memory += int((wanted & ~fits).sum())
        value_s = np.where(fits, value_s, np.inf)
        index = np.unravel_index(int(np.argmin(value_s)), size)
        if not fits[index]:
            return None
        rows = [
            {
                "layers": float(layers),
                **{name: float(axes[name].reshape(-1)[k]) for name, k in zip(AXES, index, strict=True)},
                "recompute": float(RECOMPUTE_KINDS.index(self.recompute)),
            }
            for layers, axes in zip(self.split, self.axes, strict=True)
        ]
        return float(value_s[index]), rows

    def _slot(self, position: int) -> StageSlot:
        chunks = self.chunks[position] if self.shape.vpp > 1 else None
        return slot_at(self.shape, position, self.split[position], chunks)

    def _times(self, position: int) -> _StageTimes:
        evaluator, vpp, axes = self.question.evaluator, self.shape.vpp, self.axes[position]
        slot = self._slot(position)
        key = slot.role, self.chunks[position], self.recompute, axes["ckpt"].size
        if key not in self.priced:
            self.question.tick()
            grid = stage_grid(self.shape, slot, axes, recompute=self.recompute)
            times = Times.of(evaluator, grid)
            beyond_t, beyond_d = beyond_linear(evaluator, grid)
            self.priced[key] = _StageTimes(
                (times.stable.at(grid) - times.in_turn_s + beyond_t) / vpp,
                times.delta.at(grid) + beyond_d,
                times.step.at(grid),
                times.in_turn_s,
            )
        return self.priced[key]

    def _values_s(self) -> Array:
        """What every configuration takes."""
        shape, evaluator = self.shape, self.question.evaluator
        behind = step = np.zeros(())
        steady = second = np.full((), -np.inf)
        grid = stage_grid(shape, self._slot(0), self.axes[0], recompute=self.recompute)
        layer_backward_s = evaluator.loads(grid).block.backward_s
        for position in reversed(range(shape.stages)):
            t_s, d_s, step_s, in_turn_s = self._times(position)
            following = 0 if shape.vpp > 1 else shape.stages - 1 - position
            ends = Ends(shape.grad_accum * shape.vpp, following)
            longer_s = np.maximum(0.5 * t_s, self.split[position] * layer_backward_s)
            steady = np.maximum(steady, steady_s(t_s, longer_s, in_turn_s, ends, behind))
            behind = behind + t_s
            second = np.maximum(second, d_s + behind)
            step = np.maximum(step, step_s)
        return np.asarray(steady + second + step)

    def _fitting(self, wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Of these, those that fit on every stage: of stages that are alike the first holds most."""
        seen: set[tuple[object, ...]] = set()
        evaluator = self.question.evaluator
        for position in range(self.shape.stages):
            slot = self._slot(position)
            key = slot.role, self.chunks[position]
            if key in seen or not wanted.any():
                continue
            seen.add(key)
            self.question.tick()
            grid = stage_grid(self.shape, slot, self.axes[position], recompute=self.recompute)
            wanted = wanted & evaluator.fits(grid)
        return wanted
