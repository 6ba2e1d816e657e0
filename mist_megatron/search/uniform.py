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

from mist_megatron.cost.chunk_ends import ends_of
from mist_megatron.cost.grid import LayerCount, StageGrid
from mist_megatron.search.borders import crossings_s
from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.choices import AXES, Array, Choices, Ints, per_chunk_counts, slot_at, stage_grid
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.points import Ends, path_s, steady_s
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
    """Recomputed layers, by choice, ..."""
    ends: tuple[tuple[float, ...], tuple[float, ...]]
    """... of the first and of the last chunk."""


class _StageTimes(NamedTuple):
    """Of all configurations of stages, a row each, over AXES."""

    t_s: Array
    """Per chunk, without what is in turn."""
    d_s: Array
    step_s: Array
    in_turn_s: Array
    first_s: Array
    """The first chunk ..."""
    last_s: Array
    """... and the last one, there and back."""

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
            [_stage(each, own, most) for each in of_stages]
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
        return replace(grid, layers=layers, ckpt=ckpt, end_chunks=self._end_chunks(stages))

    def _end_chunks(self, stages: Sequence[_Stage]) -> tuple[tuple[LayerCount, ...], ...]:
        """Layers of the first and of the last chunks."""
        if self.shape.vpp == 1:
            return ()
        layers = np.array([(stage.chunks[0], stage.chunks[-1]) for stage in stages], dtype=np.float64)
        ckpt = np.array([stage.ends for stage in stages])
        sized = [part.reshape(len(stages), 2, -1, *_ONE) for part in (layers, ckpt)]
        return tuple((LayerCount(*(part[:, end] for part in sized)),) for end in (0, 1))

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
        ends = (np.zeros(()),) * 2 if vpp == 1 else ends_of(grid, times.stable, times.edge_s, beyond_t)
        parts = (
            (times.stable.at(grid) - times.in_turn_s + beyond_t) / vpp,
            times.delta.at(grid) + beyond_d,
            times.step.at(grid),
            times.in_turn_s,
            *ends,
        )
        return _StageTimes(*(with_axes(np.asarray(part), len(AXES) + 1) for part in parts))

    def _values_s(self, some: Ints) -> Array:
        """What every configuration of these splits takes."""
        shape, evaluator = self.shape, self.question.evaluator
        splits = [self.stages[split] for split in some]
        priced: dict[StageRole, tuple[dict[_Stage, int], _StageTimes]] = {}
        reached = _NOTHING
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
            own = times.of(np.array([places[stage] for stage in here], dtype=np.intp))
            more_s, more_in_turn_s = crossed[position]
            own = own._replace(t_s=own.t_s + more_s, in_turn_s=own.in_turn_s + more_in_turn_s)
            layers = np.array([float(sum(stage.chunks)) for stage in here]).reshape(-1, 1, *_ONE)
            longer_s = np.maximum(0.5 * own.t_s, layers * layer_backward_s / shape.vpp)
            ends = Ends.of(shape.grad_accum * shape.vpp, shape.stages - 1 - position, shape.stages, shape.vpp)
            reached = (_with_chunks if shape.vpp > 1 else _with_stage)(reached, own, longer_s, ends)
        return np.asarray(reached.steady_s + reached.second_s + reached.step_s)


class _Reached(NamedTuple):
    """The stages from one on to the last; what their step takes at least is the sum of all but the first."""

    behind_s: Array
    """t, or their last chunks."""
    steady_s: Array
    second_s: Array
    step_s: Array


_NOTHING = _Reached(np.zeros(()), np.full((), -np.inf), np.full((), -np.inf), np.zeros(()))


def _with_stage(reached: _Reached, own: _StageTimes, longer_s: Array, ends: Ends) -> _Reached:
    """With a stage before them."""
    behind_s = reached.behind_s + own.t_s
    steady = steady_s(own.t_s, longer_s, own.in_turn_s, ends, reached.behind_s)
    return _Reached(
        behind_s,
        np.maximum(reached.steady_s, steady),
        np.maximum(reached.second_s, own.d_s + behind_s),
        np.maximum(reached.step_s, own.step_s),
    )


def _with_chunks(reached: _Reached, own: _StageTimes, longer_s: Array, ends: Ends) -> _Reached:
    """The same of stages whose chunks take turns: what passes take, and what comes on top of that."""
    path = path_s(own.t_s, longer_s, ends, reached.behind_s)
    hides_s = np.minimum(own.first_s, own.t_s)
    return _Reached(
        reached.behind_s + own.last_s,
        np.maximum(reached.steady_s + own.first_s, path),
        np.maximum(reached.second_s - hides_s, own.d_s),
        np.maximum(reached.step_s, own.step_s),
    )


def _stage(chunks: tuple[int, ...], counts: Array, size: int) -> _Stage:
    """A stage by its chunks; recomputed layers by number per chunk, the last again where there are fewer."""
    rows = np.minimum(np.arange(size), len(counts) - 1)
    recomputed = np.minimum(counts[rows, None], np.array(chunks, dtype=np.float64))
    sums, first, last = recomputed.sum(axis=1), recomputed[:, 0], recomputed[:, -1]
    return _Stage(chunks, tuple(sums.tolist()), (tuple(first.tolist()), tuple(last.tolist())))
