"""Bounds of shapes of models whose layers differ: what all layers take, and what stages add to that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.search.bounds import SearchProblem, least_recompute
from mist_megatron.search.choices import AXES, Array, slot_at
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.slots import Alike, around_of, slots_grid, slots_of
from mist_megatron.search.stage_prices import Times
from mist_megatron.spec.kinds import STAYS


def sum_of_layers(question: SearchProblem, slopes: Sequence[Array]) -> Array:
    """Of all layers of the model in one micro-batch, of which one of each kind takes so long."""
    kinds = question.evaluator.job.model.kind_of_layer
    return np.asarray(sum((slopes[place] for place in kinds), start=np.zeros(())), dtype=np.float64)


def least_slopes(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[Array]:
    """Of a layer of each kind, by shape, memory unlimited: recomputation and offloading only add to that.
    Shapes differ in what a grid has axes for."""
    vpp = shapes[0].vpp
    grid = _with_nothing(question, shapes, 0, ([(0, vpp)], (((0, 0),) * vpp, None)))
    slopes = Times.of(question.evaluator, grid).stable.slopes
    return [_least(slope.per_layer, len(shapes)) for slope in slopes]


def _least(values: Array, count: int) -> Array:
    """Along all axes but the last, which is of shapes."""
    whole = np.broadcast_to(values, (*np.shape(values)[:-1], count))
    return np.asarray(whole.reshape(-1, count).min(axis=0), dtype=np.float64)


def _with_nothing(
    question: SearchProblem, shapes: Sequence[EqualPipeline], position: int, alike: Alike
) -> StageGrid:
    """Stages that run nothing again, by slot, by level and sub-groups of replicas, and by shape."""
    axes = {name: np.zeros((1,) * len(AXES)) for name in AXES}
    grid = slots_grid(question, shapes[0], alike, axes, position, least_recompute(question.space))
    choices = [list(product(shape.zero, shape.instances)) for shape in shapes]
    most = max(map(len, choices))
    padded = [[each[min(k, len(each) - 1)] for k in range(most)] for each in choices]
    levels, instances = np.array(padded, dtype=np.float64).transpose(2, 1, 0)

    def column(name: str) -> Array:
        return np.array([getattr(shape, name) for shape in shapes], dtype=np.float64)

    return replace(
        grid,
        in_flight=np.array([slot_at(shape, position, 1).held for shape in shapes]),
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


def _beyond_layers(
    question: SearchProblem,
    shapes: Sequence[EqualPipeline],
    positions: Sequence[int],
    slopes: Sequence[Array],
) -> _Beyond:
    """Of a stage at one of these positions, of one role, whatever its layers are, which take at least so
    long."""
    first = shapes[0]
    least: list[tuple[Array, ...]] = []
    stays = question.space.offload == STAYS
    slots = sorted(
        {slot for k in positions for some in slots_of(question, first, k).values() for slot in some}
    )
    around = [around_of(question, first, slot) for slot in slots]
    for here in dict.fromkeys(around):
        question.tick()
        alike = [slot for slot, kinds in zip(slots, around, strict=True) if kinds == here], here
        grid = _with_nothing(question, shapes, positions[0], alike)
        times = Times.of(question.evaluator, grid)
        layers_s = sum(
            (n.layers * each_s for n, each_s in zip(grid.by_kind, slopes, strict=True)), np.zeros(1)
        )
        ramp_s = (times.stable.at(grid) - times.in_turn_s - layers_s) / first.vpp
        # What leaves for host memory may make d shorter than it is here.
        both_s = ramp_s + times.delta.at(grid) if stays else ramp_s
        step_s = times.step.at(grid) if stays else np.zeros(1)
        least.append(tuple(_least(part, len(shapes)) for part in (ramp_s, both_s, step_s)))
    return _Beyond(*(np.minimum.reduce(parts) for parts in zip(*least, strict=True)))


def least_steps_s(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[float]:
    """No plan of each shape is faster."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        key = shape.stages, shape.nodes, shape.gpus_per_node, shape.sequence_parallel, shape.vpp
        groups.setdefault((*key, shape.bridged), []).append(index)
    steps = np.zeros(len(shapes))
    for members in groups.values():
        steps[members] = _least_steps_s(question, [shapes[index] for index in members])
    return [float(step_s) for step_s in steps]


def _least_steps_s(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> Array:
    """The same of shapes that differ in what a grid has axes for: the least of the layers, and what stages
    of each role take beyond these at least."""
    first, last = shapes[0], shapes[0].stages - 1
    slopes = least_slopes(question, shapes)
    layers_s = sum_of_layers(question, slopes) / first.vpp
    ends = [_beyond_layers(question, shapes, positions, slopes) for positions in ([0], [last])]
    ramp_s = layers_s + ends[0].ramp_s + (ends[1].ramp_s if last else 0.0)
    if last > 1:
        ramp_s = ramp_s + (last - 1) * _beyond_layers(question, shapes, range(1, last), slopes).ramp_s
    second_s = once_of(first) * ramp_s - ends[0].ramp_s + ends[0].both_s
    steady_s = np.array([others_of(shape) for shape in shapes]) * np.maximum(ramp_s, 0.0) / first.stages
    return np.asarray((steady_s + second_s + np.maximum(ends[0].step_s, ends[1].step_s)) * (1 - 1e-9))


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
