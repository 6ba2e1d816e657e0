"""Stages that are alike in all but their layers: all configurations of several splits of the layers at once.

A call costs more than the arithmetic on a grid as small as that of one split, so splits are an axis of their
own, the first. Memory is asked first: where nothing fits, no time is priced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.grid import StageGrid
from mist_megatron.search.borders import crossings_s
from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.choices import AXES, Array, Choices, Ints, per_chunk_counts, slot_at, stage_grid
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.points import Ends, steady_s
from mist_megatron.search.solution import StageChoice
from mist_megatron.search.stage_fronts import Tally
from mist_megatron.search.stage_prices import Times, beyond_linear, with_axes
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import RECOMPUTE_KINDS, RECOMPUTES, Recompute
from mist_megatron.spec.schedule import chunk_layers

MOST_TOLD = 64
"""Configurations of one batch of splits that are told exactly, the fastest first."""
AT_ONCE = 50_000
"""Configurations of one call, of all splits together: the arrays of one fit a cache."""

Split = tuple[int, ...]
_ONE = (1,) * (len(AXES) - 1)


class _Stage(NamedTuple):
    """What the times of a stage depend on, given its role."""

    chunks: tuple[int, ...]
    ckpt: tuple[float, ...]
    """Recomputed layers, by choice."""


class _StageTimes(NamedTuple):
    """Of all configurations of stages, a row each, over AXES."""

    t_s: Array
    """Per chunk, without what is in turn."""
    d_s: Array
    step_s: Array
    in_turn_s: Array

    def of(self, rows: Ints) -> _StageTimes:
        """Of these rows."""
        return _StageTimes(*(part[rows] if part.shape[0] > 1 else part for part in self))


class SplitGrids:
    """All configurations that the stages of some splits may have alike."""

    def __init__(
        self, question: SearchProblem, shape: EqualPipeline, splits: Sequence[Split], recompute: Recompute
    ) -> None:
        self.question, self.shape, self.recompute = question, shape, recompute
        self.choices = Choices(space=question.space, shape=shape, step=question.step)
        self.axes = self.choices.axes(np.zeros(1))
        each = math.prod(self.axes[name].size for name in AXES)
        if RECOMPUTES[recompute].whole_layers:
            each *= 1 + max(max(splits[0]) // shape.vpp, 1)
        self.splits = list(splits[: max(1, AT_ONCE // each)])
        chunks = [chunk_layers(split, shape.vpp) for split in self.splits]
        counts = [self._counts(of_stages) for of_stages in chunks]
        most = max(map(len, counts))
        self.own = np.array([[k < len(own) for k in range(most)] for own in counts])
        """By split: numbers of recomputed layers that are not there only because others have more."""
        self.stages = [
            [_Stage(each, _recomputed(each, own, most)) for each in of_stages]
            for own, of_stages in zip(counts, chunks, strict=True)
        ]
        """By split and position."""

    def _counts(self, chunks: Sequence[tuple[int, ...]]) -> Array:
        whole = RECOMPUTES[self.recompute].whole_layers
        return per_chunk_counts(self.question.space, chunks) if whole else np.zeros(1)

    def least(self, wanted_s: float, tally: Tally) -> list[tuple[float, list[StageChoice]]]:
        """The fastest that fit and take less than that, the first of all of them, and their stages; what is
        not among `MOST_TOLD` is slower than all of these."""
        valid = self._valid()
        fits = valid & self._fitting()
        tally.priced += int(valid.sum())
        tally.over_memory += int((valid & ~fits).sum())
        some = np.flatnonzero(fits.reshape(len(self.splits), -1).any(axis=1))
        if not len(some):
            return []
        fits = fits[some]
        value_s = np.where(fits, np.broadcast_to(self._values_s(some), fits.shape), np.inf)
        below = np.flatnonzero(value_s < wanted_s)
        below = below[np.argsort(value_s.reshape(-1)[below], kind="stable")[:MOST_TOLD]]
        found = []
        for flat in below:
            place, *index = (int(k) for k in np.unravel_index(flat, value_s.shape))
            found.append((float(value_s[(place, *index)]), self._rows(int(some[place]), index)))
        return found

    def _rows(self, split: int, index: Sequence[int]) -> list[StageChoice]:
        """The stages of one configuration."""
        alike = {
            name: float(self.axes[name].reshape(-1)[k]) for name, k in zip(AXES[1:], index[1:], strict=True)
        }
        alike["recompute"] = float(RECOMPUTE_KINDS.index(self.recompute))
        return [
            {"layers": float(sum(stage.chunks)), "ckpt": stage.ckpt[index[0]], **alike}
            for stage in self.stages[split]
        ]

    def _valid(self) -> NDArray[np.bool_]:
        """By split and configuration: whether all stages may have it."""
        size = (len(self.splits), self.own.shape[1], *(self.axes[name].size for name in AXES[1:]))
        valid = np.broadcast_to(self.own.reshape(*self.own.shape, *_ONE), size).copy()
        for split, stages in enumerate(self.stages):
            for stage in set(stages):
                axes = {**self.axes, "ckpt": np.array(stage.ckpt).reshape(-1, *_ONE)}
                valid[split] &= self.choices.valid(sum(stage.chunks), axes)
        return valid

    def _grid(self, position: int, stages: Sequence[_Stage]) -> StageGrid:
        """Of stages with the role of a position, a row each."""
        self.question.tick()
        slot = slot_at(self.shape, position, 1)
        grid = stage_grid(self.shape, slot, self.axes, recompute=self.recompute)
        layers = np.array([float(sum(stage.chunks)) for stage in stages]).reshape(-1, 1, *_ONE)
        ckpt = np.array([stage.ckpt for stage in stages]).reshape(len(stages), -1, *_ONE)
        return replace(grid, layers=layers, ckpt=ckpt)

    def _fitting(self) -> NDArray[np.bool_]:
        """By split and configuration: whether all stages fit. Of stages that are alike the first holds
        most."""
        rows: dict[StageRole, dict[tuple[_Stage, float], list[int]]] = {}
        some: dict[StageRole, int] = {}
        for split, stages in enumerate(self.stages):
            seen: set[tuple[StageRole, _Stage]] = set()
            for position, stage in enumerate(stages):
                role = role_of(position, self.shape.stages)
                if (role, stage) not in seen:
                    seen.add((role, stage))
                    held = self._held(position, stage)
                    rows.setdefault(role, {}).setdefault((stage, held), []).append(split)
                    some[role] = position
        fits = np.ones((len(self.splits), self.own.shape[1], *(self.axes[n].size for n in AXES[1:])), bool)
        for role, here in rows.items():
            grid = self._grid(some[role], [stage for stage, _ in here])
            in_flight = np.array([held for _, held in here]).reshape(-1, 1, *_ONE)
            fitting = self.question.evaluator.fits(replace(grid, in_flight=in_flight))
            by_row = np.broadcast_to(fitting, (len(here), *fits.shape[1:]))
            for row, splits in zip(by_row, here.values(), strict=True):
                fits[splits] &= row
        return fits

    def _held(self, position: int, stage: _Stage) -> float:
        chunks = stage.chunks if self.shape.vpp > 1 else None
        return slot_at(self.shape, position, sum(stage.chunks), chunks).held

    def _times(self, position: int, stages: Sequence[_Stage]) -> _StageTimes:
        evaluator, vpp = self.question.evaluator, self.shape.vpp
        grid = self._grid(position, stages)
        times = Times.of(evaluator, grid)
        beyond_t, beyond_d = beyond_linear(evaluator, grid)
        parts = (
            (times.stable.at(grid) - times.in_turn_s + beyond_t) / vpp,
            times.delta.at(grid) + beyond_d,
            times.step.at(grid),
            times.in_turn_s,
        )
        return _StageTimes(*(with_axes(np.asarray(part), len(AXES) + 1) for part in parts))

    def _values_s(self, some: Ints) -> Array:
        """What every configuration of these splits takes."""
        shape, evaluator = self.shape, self.question.evaluator
        splits = [self.stages[split] for split in some]
        priced: dict[StageRole, tuple[dict[_Stage, int], _StageTimes]] = {}
        behind = step = np.zeros(())
        steady = second = np.full((), -np.inf)
        crossed = crossings_s(evaluator, shape)
        layer_backward_s = evaluator.loads(self._grid(0, splits[0][:1])).block.backward_s
        for position in reversed(range(shape.stages)):
            role = role_of(position, shape.stages)
            if role not in priced:
                positions = [k for k in range(shape.stages) if role_of(k, shape.stages) is role]
                kinds = dict.fromkeys(stages[k] for stages in splits for k in positions)
                places = {stage: place for place, stage in enumerate(kinds)}
                priced[role] = places, self._times(position, list(kinds))
            places, times = priced[role]
            here = [stages[position] for stages in splits]
            t_s, d_s, step_s, in_turn_s = times.of(np.array([places[stage] for stage in here], dtype=np.intp))
            t_s, in_turn_s = (
                part + more for part, more in zip((t_s, in_turn_s), crossed[position], strict=True)
            )
            layers = np.array([float(sum(stage.chunks)) for stage in here]).reshape(-1, 1, *_ONE)
            following = 0 if shape.vpp > 1 else shape.stages - 1 - position
            ends = Ends(shape.grad_accum * shape.vpp, following)
            longer_s = np.maximum(0.5 * t_s, layers * layer_backward_s)
            steady = np.maximum(steady, steady_s(t_s, longer_s, in_turn_s, ends, behind))
            behind = behind + t_s
            second = np.maximum(second, d_s + behind)
            step = np.maximum(step, step_s)
        return np.asarray(steady + second + step)


def _recomputed(chunks: tuple[int, ...], counts: Array, size: int) -> tuple[float, ...]:
    """Recomputed layers of a stage by number per chunk; the last again where there are fewer numbers."""
    recomputed = np.minimum(counts[:, None], np.array(chunks)).sum(axis=1)
    return tuple(float(recomputed[min(k, len(recomputed) - 1)]) for k in range(size))
