"""Whether shapes of models whose layers differ may fit at all, of many at once.

A shape is solved configuration by configuration, and most that are looked at where memory is short fit in
none. What `kinds` asks of each before it prices any time - whether in some configuration all positions
together may have the layers of the model - is asked here of all shapes that are alike but for what a grid has
axes for, so that those which fit in another way of execution alone are handed on together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.choices import AXES, Array, Choices, slot_at
from mist_megatron.search.kind_bounds import across
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.slots import Alike, slots_at, slots_grid
from mist_megatron.spec.kinds import STAYS
from mist_megatron.spec.mesh import role_of
from mist_megatron.spec.recompute import Recompute

AT_ONCE = 1 << 16
"""Slots and numbers of recomputed layers in one call, over all shapes: arrays of that size fit a cache."""


def may_fit(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> NDArray[np.bool_]:
    """By shape; all of them where something may leave for host memory, which is not asked here."""
    fit = np.ones(len(shapes), dtype=bool)
    if question.space.offload != STAYS:
        return fit
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, shape in enumerate(shapes):
        key = shape.stages, shape.vpp, shape.sequence_parallel, shape.bridged
        groups.setdefault(key, []).append(row)
    for rows in groups.values():
        one = shapes[rows[0]]
        slots = len(slots_at(question, one, range(one.stages)))
        each = max(AT_ONCE // (slots * (1 + question.evaluator.job.model.layers // one.stages)), 1)
        for begin in range(0, len(rows), each):
            some: list[int] = rows[begin : begin + each]
            fit[some] = _some_fit(question, [shapes[row] for row in some])
    return fit


def ckpt_axes(question: SearchProblem, shape: EqualPipeline, recompute: Recompute) -> dict[str, Array]:
    """What the stages of a shape choose from. Every stage has to have as many layers as are recomputed, which
    are all of them on equal stages only."""
    layers = question.evaluator.job.model.layers
    choices = Choices(space=question.space, shape=shape, step=question.step)
    counts = choices.counts(layers // shape.stages, recompute=recompute)
    whole = question.space.ckpt != "any" and layers % shape.stages
    return choices.axes(counts[counts == 0.0] if whole else counts)


def _some_fit(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> NDArray[np.bool_]:
    """Of shapes that are alike but for what a grid has axes for."""
    fit = np.zeros(len(shapes), dtype=bool)
    for recompute in question.space.recompute:
        left: list[int] = np.flatnonzero(~fit).tolist()
        if left:
            fit[left] = _fit_with(question, [shapes[row] for row in left], recompute)
    return fit


def _fit_with(
    question: SearchProblem, shapes: Sequence[EqualPipeline], recompute: Recompute
) -> NDArray[np.bool_]:
    """Whether, in some configuration with one kind of recomputation, all positions together may have all
    layers."""
    one, layers = shapes[0], question.evaluator.job.model.layers
    axes = {**dict.fromkeys(AXES, np.zeros((1,) * len(AXES)))}
    axes["ckpt"] = ckpt_axes(question, one, recompute)["ckpt"]
    roles: dict[object, list[int]] = {}
    for position in range(one.stages):
        roles.setdefault(role_of(position, one.stages), []).append(position)
    most = fewest = np.zeros(1)
    for positions in roles.values():
        ends: dict[tuple[float, ...], tuple[Array, Array]] = {}
        for position in positions:
            held = tuple(slot_at(shape, position, 1).held for shape in shapes)
            if held not in ends:
                ends[held] = _ends(question, shapes, (positions, held), axes, recompute)
            most, fewest = most + ends[held][0], fewest + ends[held][1]
        if not np.any(np.isfinite(most)):
            return np.zeros(len(shapes), dtype=bool)
    some = (fewest <= layers) & (layers <= most)
    return np.asarray(some.reshape(-1, len(shapes)).any(axis=0))


def _ends(
    question: SearchProblem,
    shapes: Sequence[EqualPipeline],
    stages: tuple[Sequence[int], tuple[float, ...]],
    axes: dict[str, Array],
    recompute: Recompute,
) -> tuple[Array, Array]:
    """By configuration and shape: the most and the fewest layers with which a stage of one role fits that
    holds so much in flight; less than nothing, and more than all, where it fits with none."""
    evaluator, (positions, held) = question.evaluator, stages
    question.tick()
    # What a stage holds follows from its layers, whatever kinds are at its ends.
    every: Alike = slots_at(question, shapes[0], positions), ((), None)
    grid, _ = slots_grid(question, shapes[0], every, axes, positions[0], recompute)
    grid = replace(across(grid, shapes), in_flight=np.array(held))
    fits = (evaluator.peak_bytes(grid) <= evaluator.limit_bytes) & (axes["ckpt"] <= grid.layers)
    fits = np.broadcast_to(fits, (*fits.shape[:-1], len(shapes)))
    most = np.where(fits, grid.layers, -np.inf).max(axis=0)
    return most, np.where(fits, grid.layers, np.inf).min(axis=0)
