"""Bounds of shapes of models whose layers differ: what all layers take, and what stages add to that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.grid import StageGrid
from mist_megatron.search.borders import all_crossings_s
from mist_megatron.search.bounds import NOTHING, EqualBound, SearchProblem, crossing_s, least_recompute
from mist_megatron.search.choices import AXES, Array, Ints
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.slots import Alike, Slot, groups_of, slots_at, slots_grid
from mist_megatron.search.stage_prices import Times, with_axes
from mist_megatron.spec.kinds import STAYS


def sum_of_layers(question: SearchProblem, slopes: Sequence[Array]) -> Array:
    """Of all layers of the model in one micro-batch, of which one of each kind takes so long."""
    kinds = question.evaluator.job.model.kind_of_layer
    return np.asarray(sum((slopes[place] for place in kinds), start=np.zeros(())), dtype=np.float64)


def _least(values: Array, count: int, there: NDArray[np.bool_] | None = None) -> Array:
    """Along all axes but the last, which is of shapes; of the slots, the first axis, that are there."""
    if there is not None:
        values = with_axes(np.asarray(values), len(AXES) + 1)
        values = np.where(there.reshape(len(there), *(1,) * (len(AXES) - 1), -1), values, np.inf)
    whole = np.broadcast_to(values, (*np.shape(values)[:-1], count))
    return np.asarray(whole.reshape(-1, count).min(axis=0), dtype=np.float64)


def _with_nothing(
    question: SearchProblem, shapes: Sequence[EqualPipeline], position: int, alike: Alike
) -> tuple[StageGrid, Ints]:
    """Stages that run nothing again, by slot, by level and sub-groups of replicas, and by shape; and which of
    them each slot is."""
    axes = {name: np.zeros((1,) * len(AXES)) for name in AXES}
    grid, places = slots_grid(question, shapes[0], alike, axes, position, least_recompute(question.space))
    return replace(across(grid, shapes), in_flight=np.ones(1)), places


def across(grid: StageGrid, shapes: Sequence[EqualPipeline]) -> StageGrid:
    """The same stages of many shapes, along the last axes: levels and sub-groups of replicas, then shapes."""
    choices = [list(product(shape.zero, shape.instances)) for shape in shapes]
    most = max(map(len, choices))
    padded = [[each[min(k, len(each) - 1)] for k in range(most)] for each in choices]
    levels, instances = np.array(padded, dtype=np.float64).transpose(2, 1, 0)

    def column(name: str) -> Array:
        return np.array([getattr(shape, name) for shape in shapes], dtype=np.float64)

    return replace(
        grid,
        nodes=column("nodes"),
        gpus_per_node=column("gpus_per_node"),
        stages=column("stages"),
        micro_batch=column("micro_batch"),
        dp=column("dp"),
        tp=column("tp"),
        zero=levels,
        instances=instances,
        grad_accum=column("grad_accum"),
        ep=column("ep"),
        etp=column("etp"),
    )


class _Beyond(NamedTuple):
    """What a stage takes beyond its layers at least, by shape."""

    ramp_s: Array
    both_s: Array
    """With d."""
    step_s: Array
    slopes: Sequence[Array]
    """By kind: what was taken for a layer's time. Of all stages together any will do, since each layer is on
    one of them."""


_SomeSlots = dict[int, frozenset[Slot]]
"""By stages of a pipeline: those of some of its stages."""


def _slots(
    question: SearchProblem, shapes: Sequence[EqualPipeline], positions: Callable[[int], Iterable[int]]
) -> _SomeSlots:
    """Of the stages at these positions of pipelines of so many stages."""
    one_of = {shape.stages: shape for shape in shapes}
    return {
        stages: frozenset(slots_at(question, shape, positions(stages))) for stages, shape in one_of.items()
    }


def _beyond_layers(
    question: SearchProblem,
    shapes: Sequence[EqualPipeline],
    position: int,
    of_stages: _SomeSlots,
    slopes: Sequence[Array] | None,
) -> _Beyond:
    """Of a stage that may have these slots, with the role of that position of the first shape, whatever its
    layers are, which take so long; None has them from these stages."""
    first = shapes[0]
    least: list[tuple[Array, ...]] = []
    stays = question.space.offload == STAYS
    slots = sorted(frozenset().union(*of_stages.values()))
    for (some, here), _ in groups_of(question, first, slots):
        question.tick()
        grid, places = _with_nothing(question, shapes, position, (some, here))
        times = Times.of(question.evaluator, grid)
        if slopes is None:
            slopes = [_least(slope.per_layer, len(shapes)) for slope in times.stable.slopes]
        layers_s = sum(
            (n.layers * each_s for n, each_s in zip(grid.by_kind, slopes, strict=True)), np.zeros(1)
        )
        ramp_s = (times.stable.at(grid) - times.in_turn_s - layers_s) / first.vpp
        # What leaves for host memory may make d shorter than it is here.
        both_s = ramp_s + times.delta.at(grid) if stays else ramp_s
        step_s = times.step.at(grid) if stays else np.zeros(1)
        each = {stages: [slot in found for slot in some] for stages, found in of_stages.items()}
        there = np.zeros((len(grid.layers), len(shapes)), dtype=bool)
        np.logical_or.at(there, places, np.array([each[shape.stages] for shape in shapes]).T)
        least.append(tuple(_least(part, len(shapes), there) for part in (ramp_s, both_s, step_s)))
    ramp_s, both_s, step_s = (np.minimum.reduce(some) for some in zip(*least, strict=True))
    return _Beyond(ramp_s, both_s, step_s, slopes or ())


def bounds_of_kinds(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[EqualBound]:
    """Of each shape: no plan is faster."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        key = min(shape.stages, 3), shape.sequence_parallel, shape.vpp, shape.bridged
        groups.setdefault(key, []).append(index)
    least = np.zeros((2, len(shapes)))
    for members in groups.values():
        least[:, members] = _least_steps_s(question, [shapes[index] for index in members])
    nothing = NOTHING, NOTHING, NOTHING
    return [EqualBound(step_s, 0.0, 0.0, nothing, layers_s=layers_s) for step_s, layers_s in least.T.tolist()]


def _least_steps_s(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> tuple[Array, Array]:
    """The same of shapes that differ in what a grid has axes for: what layers take, and what stages of each
    role take beyond that at least; and what layers take alone."""
    first, last = shapes[0], shapes[0].stages - 1
    stages = np.array([shape.stages for shape in shapes], dtype=np.float64)
    front = _beyond_layers(question, shapes, 0, _slots(question, shapes, lambda _: [0]), None)

    def beyond(position: int, positions: Callable[[int], Iterable[int]]) -> _Beyond:
        of_stages = _slots(question, shapes, positions)
        return _beyond_layers(question, shapes, position, of_stages, front.slopes)

    layers_s = sum_of_layers(question, front.slopes) / first.vpp
    ends = [front, beyond(last, lambda count: [count - 1]) if last else front]
    crossed_s = np.zeros((2, len(shapes)))
    ramp_s = layers_s + ends[0].ramp_s + (ends[1].ramp_s if last else 0.0)
    if last > 1:
        middle_s = beyond(1, lambda count: range(1, count - 1)).ramp_s
        crossed_s = _crossed(question, shapes, (ends[0].ramp_s, middle_s, ends[1].ramp_s), front.slopes)
        ramp_s = ramp_s + (stages - 2.0) * middle_s + crossed_s[0]
    second_s = once_of(first) * ramp_s - ends[0].ramp_s + ends[0].both_s
    steady_s = np.array([others_of(shape) for shape in shapes]) * np.maximum(ramp_s, 0.0) / stages
    steady_s = np.maximum(steady_s, crossed_s[1])
    step_s = np.maximum(ends[0].step_s, ends[1].step_s)
    return np.asarray((steady_s + second_s + step_s) * (1 - 1e-9)), layers_s


def _crossed(
    question: SearchProblem,
    shapes: Sequence[EqualPipeline],
    beyond_s: tuple[Array, Array, Array],
    slopes: Sequence[Array],
) -> Array:
    """By shape: what borders of stages that share nodes add to t of all stages, and what the slowest of the
    stages at them takes in all passes but one. By role, stages take so much beyond their layers, of which
    every one has one."""
    crossed_s = np.zeros((2, len(shapes)))
    layer_s = np.minimum.reduce(slopes)
    for row, (shape, each) in enumerate(
        zip(shapes, all_crossings_s(question.evaluator, shapes), strict=True)
    ):
        if each:
            first_s, middle_s, last_s = (float(part[row] + layer_s[row]) for part in beyond_s)
            t_s = np.array([[first_s, *[middle_s] * (shape.stages - 2), last_s]])
            crossed_s[:, row] = sum(more_s for more_s, _ in each), crossing_s(shape, t_s, each)[0]
    return crossed_s


def others_of(shape: EqualPipeline) -> float:
    """Times that the slowest stage's t is in a step at least, besides once with all others: warm-up passes
    fill half a pass of its waits each at most. Where chunks take turns the first ones may be of small layers:
    of these the slowest stage's passes are all that is sure."""
    if shape.vpp > 1:
        return shape.grad_accum * shape.vpp
    others = shape.grad_accum - 1
    return others - 0.5 * min(shape.stages - 1, others)


def once_of(shape: EqualPipeline) -> float:
    """How often the t of all stages are in a step besides."""
    return 0.0 if shape.vpp > 1 else 1.0
