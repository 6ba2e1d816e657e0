"""Stages that are alike in all but their layers: all configurations of several splits of the layers at once,
of one shape or of several.

A call costs more than the arithmetic on a grid as small as that of one split, so splits are an axis of their
own, the first. Memory is asked first: where nothing fits, no time is priced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

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

    shape: EqualPipeline
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


Row = tuple[EqualPipeline, Split]
"""A shape, and a split of the layers over its stages."""


def alike_in(question: SearchProblem, shape: EqualPipeline) -> object:
    """Shapes that have this in common can be priced together."""
    mesh = shape.stages, shape.nodes, shape.gpus_per_node, shape.sequence_parallel, shape.bridged
    levels = shape.zero, shape.instances
    rules = None if question.space.host_gradients is None else shape.grad_accum
    waits = tuple(_ends(shape, position).waits_twice for position in range(shape.stages))
    return mesh, levels, shape.vpp > 1, rules, waits


def _ends(shape: EqualPipeline, position: int) -> Ends:
    passes = shape.grad_accum * shape.vpp
    return Ends.of(passes, shape.stages - 1 - position, shape.stages, shape.vpp)


class SplitGrids:
    """All configurations that the stages of some splits may have alike, of shapes that `alike_in` says to be
    alike."""

    def __init__(self, question: SearchProblem, rows: Sequence[Row], recompute: Recompute) -> None:
        self.question, self.recompute = question, recompute
        self.shape, _ = rows[0]
        self.choices = Choices(space=question.space, shape=self.shape, step=question.step)
        self.axes = self.choices.axes(np.zeros(1))
        each = math.prod(self.axes[name].size for name in AXES)
        if RECOMPUTES[recompute].whole_layers:
            each *= 1 + max(max(max(split) // shape.vpp for shape, split in rows), 1)
        self.rows = list(rows[: max(1, AT_ONCE // each)])
        self.shapes = [shape for shape, _ in self.rows]
        chunks = [chunk_layers(split, shape.vpp) for shape, split in self.rows]
        counts = [self._counts(of_stages) for of_stages in chunks]
        most = max(map(len, counts))
        self.own = np.array([[k < len(own) for k in range(most)] for own in counts])
        """By row: numbers of recomputed layers that are not there only because others have more."""
        self.stages = [
            [_stage(shape, each, own, most) for each in of_stages]
            for shape, own, of_stages in zip(self.shapes, counts, chunks, strict=True)
        ]
        """By row and position."""

    @cached_property
    def _alone(self) -> bool:
        """Whether all rows are of one shape."""
        return all(shape is self.shapes[0] for shape in self.shapes)

    def _counts(self, chunks: Sequence[tuple[int, ...]]) -> Array:
        whole = RECOMPUTES[self.recompute].whole_layers
        return per_chunk_counts(self.question.space, chunks) if whole else np.zeros(1)

    @cached_property
    def _priced(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Array]:
        """By row and configuration: whether all stages may have it, whether they fit too, and what it takes
        then."""
        valid = self._valid()
        fits = valid & self._fitting()
        value_s = np.full(fits.shape, np.inf)
        some = np.flatnonzero(fits.reshape(len(self.rows), -1).any(axis=1))
        if len(some):
            each_s = np.broadcast_to(self._values_s(some), (len(some), *fits.shape[1:]))
            value_s[some] = np.where(fits[some], each_s, np.inf)
        return valid, fits, value_s

    def least(
        self, shape: EqualPipeline, wanted_s: float, tally: Tally
    ) -> list[tuple[float, list[StageChoice]]]:
        """The fastest of a shape that fit and take less than that, the first of all of them, and their
        stages; what is not among `MOST_TOLD` is slower than all of these."""
        mine = [row for row, other in enumerate(self.shapes) if other is shape]
        valid, fits, every_s = self._priced
        tally.priced += int(valid[mine].sum())
        tally.over_memory += int((valid[mine] & ~fits[mine]).sum())
        shown, value_s = (len(mine), *every_s.shape[1:]), every_s[mine].reshape(-1)
        below = np.flatnonzero(value_s < wanted_s)
        below = below[np.argsort(value_s[below], kind="stable")[:MOST_TOLD]]
        found = []
        for flat in below:
            place, *index = (int(k) for k in np.unravel_index(flat, shown))
            found.append((float(value_s[flat]), self._rows(mine[place], index)))
        return found

    def _rows(self, row: int, index: Sequence[int]) -> list[StageChoice]:
        """The stages of one configuration."""
        alike = {
            name: float(self.axes[name].reshape(-1)[k]) for name, k in zip(AXES[1:], index[1:], strict=True)
        }
        alike["recompute"] = float(RECOMPUTE_KINDS.index(self.recompute))
        return [
            {"layers": float(sum(stage.chunks)), "ckpt": stage.ckpt[index[0]], **alike}
            for stage in self.stages[row]
        ]

    def _valid(self) -> NDArray[np.bool_]:
        """By row and configuration: whether all stages may have it."""
        size = (len(self.rows), self.own.shape[1], *(self.axes[name].size for name in AXES[1:]))
        valid = np.broadcast_to(self.own.reshape(*self.own.shape, *_ONE), size).copy()
        for row, stages in enumerate(self.stages):
            for stage in set(stages):
                axes = {**self.axes, "ckpt": np.array(stage.ckpt).reshape(-1, *_ONE)}
                valid[row] &= self.choices.valid(sum(stage.chunks), axes)
        return valid

    def _grid(self, position: int, stages: Sequence[_Stage]) -> StageGrid:
        """Of stages with the role of a position, a row each."""
        self.question.tick()
        slot = slot_at(self.shape, position, 1)
        grid = stage_grid(self.shape, slot, self.axes, recompute=self.recompute)
        layers = _column([float(sum(stage.chunks)) for stage in stages])
        ckpt = np.array([stage.ckpt for stage in stages]).reshape(len(stages), -1, *_ONE)
        sizes = {} if self._alone else _sizes([stage.shape for stage in stages])
        return replace(grid, layers=layers, ckpt=ckpt, end_chunks=self._end_chunks(stages), **sizes)

    def _end_chunks(self, stages: Sequence[_Stage]) -> tuple[tuple[LayerCount, ...], ...]:
        """Layers of the first and of the last chunks."""
        if self.shape.vpp == 1:
            return ()
        layers = np.array([(stage.chunks[0], stage.chunks[-1]) for stage in stages], dtype=np.float64)
        ckpt = np.array([stage.ends for stage in stages])
        sized = [part.reshape(len(stages), 2, -1, *_ONE) for part in (layers, ckpt)]
        return tuple((LayerCount(*(part[:, end] for part in sized)),) for end in (0, 1))

    def _fitting(self) -> NDArray[np.bool_]:
        """By row and configuration: whether all stages fit. Of stages that are alike the first holds most."""
        rows: dict[StageRole, dict[tuple[_Stage, float], list[int]]] = {}
        some: dict[StageRole, int] = {}
        for row, stages in enumerate(self.stages):
            seen: set[tuple[StageRole, _Stage]] = set()
            for position, stage in enumerate(stages):
                role = role_of(position, self.shape.stages)
                if (role, stage) not in seen:
                    seen.add((role, stage))
                    held = _held(position, stage)
                    rows.setdefault(role, {}).setdefault((stage, held), []).append(row)
                    some[role] = position
        fits = np.ones((len(self.rows), self.own.shape[1], *(self.axes[n].size for n in AXES[1:])), bool)
        for role, here in rows.items():
            grid = self._grid(some[role], [stage for stage, _ in here])
            in_flight = _column([held for _, held in here])
            fitting = self.question.evaluator.fits(replace(grid, in_flight=in_flight))
            by_row = np.broadcast_to(fitting, (len(here), *fits.shape[1:]))
            for of_stage, mine in zip(by_row, here.values(), strict=True):
                fits[mine] &= of_stage
        return fits

    def _times(self, position: int, stages: Sequence[_Stage]) -> _StageTimes:
        evaluator = self.question.evaluator
        grid = self._grid(position, stages)
        times = Times.of(evaluator, grid)
        beyond_t, beyond_d = beyond_linear(evaluator, grid)
        chunked = self.shape.vpp > 1
        ends = ends_of(grid, times.stable, times.edge_s, beyond_t) if chunked else (np.zeros(()),) * 2
        parts = (
            (times.stable.at(grid) - times.in_turn_s + beyond_t) / grid.vpp,
            times.delta.at(grid) + beyond_d,
            times.step.at(grid),
            times.in_turn_s,
            *ends,
        )
        return _StageTimes(*(with_axes(np.asarray(part), len(AXES) + 1) for part in parts))

    def _values_s(self, some: Ints) -> Array:
        """What every configuration of these rows takes."""
        stages, evaluator = self.shape.stages, self.question.evaluator
        rows, shapes = [self.stages[row] for row in some], [self.shapes[row] for row in some]
        priced: dict[StageRole, tuple[dict[_Stage, int], _StageTimes]] = {}
        reached = _NOTHING
        crossed = {id(shape): crossings_s(evaluator, shape) for shape in {id(s): s for s in shapes}.values()}
        first = [of_stages[0] for of_stages in (rows[:1] if self._alone else rows)]
        layer_backward_s = evaluator.loads(self._grid(0, first)).block.backward_s
        vpp = self.shape.vpp if self._alone else _column([float(shape.vpp) for shape in shapes])
        for position in reversed(range(stages)):
            role = role_of(position, stages)
            if role not in priced:
                positions = [k for k in range(stages) if role_of(k, stages) is role]
                kinds = dict.fromkeys(of_stages[k] for of_stages in rows for k in positions)
                places = {stage: place for place, stage in enumerate(kinds)}
                priced[role] = places, self._times(position, list(kinds))
            places, times = priced[role]
            here = [of_stages[position] for of_stages in rows]
            own = times.of(np.array([places[stage] for stage in here], dtype=np.intp))
            more_s, more_in_turn_s = map(
                _column, zip(*(crossed[id(s)][position] for s in shapes), strict=True)
            )
            own = own._replace(t_s=own.t_s + more_s, in_turn_s=own.in_turn_s + more_in_turn_s)
            layers = _column([float(sum(stage.chunks)) for stage in here])
            longer_s = np.maximum(0.5 * own.t_s, layers * layer_backward_s / vpp)
            ends = _ends(self.shape, position)
            if not self._alone:
                passes, filling, _ = zip(*(_ends(shape, position) for shape in shapes), strict=True)
                ends = Ends(_column(passes), _column(filling), ends.waits_twice)
            reached = (_with_chunks if self.shape.vpp > 1 else _with_stage)(reached, own, longer_s, ends)
        return np.asarray(reached.steady_s + reached.second_s + reached.step_s)


def _column(values: Sequence[float]) -> Array:
    """A value by row."""
    return np.array(values, dtype=np.float64).reshape(-1, 1, *_ONE)


_SIZES = ("micro_batch", "dp", "tp", "grad_accum", "ep", "etp", "vpp")
"""What shapes that are priced together may differ in."""


def _sizes(shapes: Sequence[EqualPipeline]) -> dict[str, Any]:
    return {name: _column([float(getattr(shape, name)) for shape in shapes]) for name in _SIZES}


def _held(position: int, stage: _Stage) -> float:
    chunks = stage.chunks if stage.shape.vpp > 1 else None
    return slot_at(stage.shape, position, sum(stage.chunks), chunks).held


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


def _stage(shape: EqualPipeline, chunks: tuple[int, ...], counts: Array, size: int) -> _Stage:
    """A stage by its chunks; recomputed layers by number per chunk, the last again where there are fewer."""
    rows = np.minimum(np.arange(size), len(counts) - 1)
    recomputed = np.minimum(counts[rows, None], np.array(chunks, dtype=np.float64))
    sums, first, last = recomputed.sum(axis=1), recomputed[:, 0], recomputed[:, -1]
    return _Stage(shape, chunks, tuple(sums.tolist()), (tuple(first.tolist()), tuple(last.tolist())))
