"""The closed form of `predict` among the priced configurations of a shape: finer than eq. 1, and no sum.

Eq. 1 is what a search can minimise exactly. Where early stages are slower than late ones it counts waits that
their warm-up passes fill (`cost/iteration.py`), so that a plan a little behind by eq. 1 may be ahead by the
closed form. From the best plan by eq. 1 this climbs: one stage takes another of its configurations, a layer
moves from one stage to another, or two stages change GPUs, as long as the closed form falls. That proves
nothing and loses nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid, role_of
from mist_megatron.cost.iteration import NEVER_LATE, Late, StageTiming, iteration_time
from mist_megatron.cost.predict import finer_parts
from mist_megatron.search.assign import Assignment, Pipelines, Size, may_stand, value_of
from mist_megatron.search.crossings import Crossings
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.stage_fronts import StageConfigs
from mist_megatron.search.stage_prices import AXES, Array, StageSlot, stage_grid
from mist_megatron.spec.recompute import RECOMPUTE_KINDS

PASSES = 6_000
"""Stages that are gone through per shape, of all plans together: some 30 ms."""

Pick = tuple[Size, int]
"""Size of a stage, and position in its front."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What the stages of a pipeline may be, first to last."""

    evaluator: StageEvaluator
    grad_accum: int
    configs: Sequence[Mapping[Size, StageConfigs]]
    meshes: Sequence[EqualPipeline]
    """Those that a column `mesh` counts; one where there is none."""
    pipelines: Pipelines
    """What may stand beside what."""


def finer(stages: Stages, start: Assignment, tick: Callable[[], None]) -> tuple[tuple[Pick, ...], float]:
    """The plan of an assignment, or a faster one that was found from there, with its eq. 1."""
    climb = _Climb(stages)
    picks = tuple(zip(start.sizes, start.choice, strict=True))
    climb.best_s = climb.seconds(picks)
    better = True
    while better:
        tick()
        better = False
        for changed in climb.neighbours(picks):
            if climb.left <= 0:
                break
            seconds = climb.seconds(changed)
            if seconds < climb.best_s * (1 - 1e-12):
                picks, climb.best_s, better = changed, seconds, True
                break
    return picks, climb.eq1(picks)


class _Climb:
    """Prices of picks, each stage's read once."""

    def __init__(self, stages: Stages) -> None:
        self.stages, self.left, self.best_s = stages, PASSES, np.inf
        self._timings: dict[tuple[int, Size], list[StageTiming]] = {}
        self._crossings = Crossings(stages.evaluator, stages.meshes)

    def seconds(self, picks: Sequence[Pick]) -> float:
        self.left -= len(picks)
        timings = [self._timing(position, pick) for position, pick in enumerate(picks)]
        if self._crossings.known:
            timings = self._between_meshes(picks, timings)
        hides = self.stages.evaluator.time_context.facts.step.hides
        return iteration_time(timings, self.stages.grad_accum, step_hides=hides).total_s

    def _between_meshes(self, picks: Sequence[Pick], timings: Sequence[StageTiming]) -> list[StageTiming]:
        """With what crosses the borders of these stages."""
        columns = [self._configs(position, size).columns["mesh"] for position, (size, _) in enumerate(picks)]
        which = tuple(int(column[row]) for column, (_, row) in zip(columns, picks, strict=True))
        found = zip(timings, self._crossings.beyond(which), strict=True)
        return [_longer(timing, *more) if more[0] else timing for timing, more in found]

    def eq1(self, picks: Sequence[Pick]) -> float:
        found = [(self._configs(position, size), row) for position, (size, row) in enumerate(picks)]
        t_s, d_s, step_s = ([float(getattr(c, name)[row]) for c, row in found] for name in _TIMES)
        return value_of(t_s, d_s, self.stages.grad_accum, step_s)

    def neighbours(self, picks: tuple[Pick, ...]) -> Iterator[tuple[Pick, ...]]:
        """Plans one change away, those that move a layer first."""
        stages = range(len(picks))
        for giver, taker in (
            (one, two) for gap in stages for one in stages for two in (one - gap, one + gap)
        ):
            if giver != taker and taker in stages:
                yield from self._resized(picks, giver, taker, _a_layer_moved)
        if self.stages.pipelines.gpus:
            for one, other in itertools.combinations(stages, 2):
                yield from self._resized(picks, one, other, _gpus_changed)
                yield from self._resized(picks, one, other, _all_changed)
        for position, (size, _) in enumerate(picks):
            yield from self._others(picks, position, size)

    def _resized(
        self, picks: tuple[Pick, ...], one: int, other: int, resize: Callable[[Size, Size], tuple[Size, Size]]
    ) -> Iterator[tuple[Pick, ...]]:
        """Two stages of other sizes, each then in the configuration that is best beside the others."""
        sizes = resize(picks[one][0], picks[other][0])
        if sizes == (picks[one][0], picks[other][0]):
            return
        for position, size in zip((one, other), sizes, strict=True):
            if size not in self.stages.configs[position]:
                return
            picks = _with(picks, position, (size, 0))
        if not may_stand(self.stages.pipelines, [size for size, _ in picks]):
            return
        for position in (one, other):
            others = self._others(picks, position, picks[position][0])
            picks = min([picks, *others], key=self.seconds)
        yield picks

    def _others(self, picks: tuple[Pick, ...], position: int, size: Size) -> Iterator[tuple[Pick, ...]]:
        # A stage that takes so long for its own micro-batches alone is no part of a faster plan.
        cap_s = self.best_s / self.stages.grad_accum
        for row in range(int(np.searchsorted(self._configs(position, size).t_s, cap_s))):
            if (size, row) != picks[position]:
                yield _with(picks, position, (size, row))

    def _configs(self, position: int, size: Size) -> StageConfigs:
        return self.stages.configs[position][size]

    def _timing(self, position: int, pick: Pick) -> StageTiming:
        size, row = pick
        if (position, size) not in self._timings:
            self._timings[position, size] = self._read(position, size)
        return self._timings[position, size][row]

    def _read(self, position: int, size: Size) -> list[StageTiming]:
        """All configurations of one slot."""
        configs = self._configs(position, size)
        columns = np.empty((9, len(configs.t_s)))
        for place in range(len(RECOMPUTE_KINDS)):
            rows = np.flatnonzero(configs.columns["recompute"] == place)
            if len(rows):
                grid = self._grid(position, size, {k: v[rows] for k, v in configs.columns.items()})
                found = finer_parts(self.stages.evaluator, grid)
                parts = (*found.more_s, found.forward_s, found.first_s, found.in_turn_s, *found.late)
                for row, column in enumerate(parts):
                    columns[row, rows] = column
        more_t, more_d, forward_s, first_s, in_turn_s, *late = columns
        late_in_d = late[0]
        return [
            StageTiming(
                stable_s=float(configs.t_s[row] + more_t[row]),
                delta_s=float(configs.d_s[row] + configs.step_s[row] + more_d[row]),
                forward_s=float(min(forward_s[row], configs.t_s[row] + more_t[row])),
                first_s=float(first_s[row]),
                in_turn_s=float(in_turn_s[row]),
                step_s=float(configs.step_s[row]),
                late=Late(*(float(part[row]) for part in late)) if late_in_d[row] > 0.0 else NEVER_LATE,
            )
            for row in range(len(configs.t_s))
        ]

    def _grid(self, position: int, size: Size, columns: Mapping[str, Array]) -> StageGrid:
        """The evaluator's grid of some configurations, along one axis."""
        count, meshes = len(self.stages.configs), self.stages.meshes
        which = columns.get("mesh", np.zeros(len(columns["ckpt"]))).astype(np.intp)
        mine = [meshes[k] for k in which]
        values = {name: columns[name] for name in AXES}
        slot = StageSlot(role=role_of(position, count), layers=size[0], held=1.0)
        grid = stage_grid(mine[0], slot, values, recompute=RECOMPUTE_KINDS[int(columns["recompute"][0])])
        return replace(
            grid,
            stages=count,
            micro_batch=np.array([float(mesh.micro_batch) for mesh in mine]),
            dp=np.array([float(mesh.dp) for mesh in mine]),
            tp=np.array([float(mesh.tp) for mesh in mine]),
            layers=np.full(len(mine), float(size[0])),
            in_flight=np.ones(len(mine)),
            grad_accum=np.full(len(mine), float(self.stages.grad_accum)),
        )


def _longer(timing: StageTiming, stable_s: float, forward_s: float) -> StageTiming:
    whole_s = timing.stable_s + stable_s
    return replace(timing, stable_s=whole_s, forward_s=min(timing.split_s[0] + forward_s, whole_s))


def _a_layer_moved(one: Size, other: Size) -> tuple[Size, Size]:
    return (one[0] - 1, *one[1:]), (other[0] + 1, *other[1:])


def _gpus_changed(one: Size, other: Size) -> tuple[Size, Size]:
    return (one[0], *other[1:]), (other[0], *one[1:])


def _all_changed(one: Size, other: Size) -> tuple[Size, Size]:
    return other, one


_TIMES = ("t_s", "d_s", "step_s")


def _with(picks: tuple[Pick, ...], position: int, pick: Pick) -> tuple[Pick, ...]:
    return (*picks[:position], pick, *picks[position + 1 :])
