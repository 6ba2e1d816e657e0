"""Lower bounds of all shapes at once: what sorts them, and what prunes nearly all of them unseen.

The bound of a shape is its time were memory unlimited: nothing recomputed, nothing offloaded, layers split
to a fraction. Everything that a plan adds to that costs time, so no plan of the shape is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid, role_of
from mist_megatron.cost.terms import totals
from mist_megatron.search.shapes import Shape
from mist_megatron.search.space import Space

Array = NDArray[np.float64]
Solver = Literal["exact", "milp"]


def nothing() -> None:
    """A tick that never ends the search."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What does not change from shape to shape."""

    evaluator: StageEvaluator
    space: Space
    step: float
    solver: Solver = "exact"
    tick: Callable[[], None] = nothing
    """Called every few milliseconds of work: what it raises ends the search."""

    @property
    def hides(self) -> bool:
        """Whether a stage's extra time hides behind the drain of the stages before it."""
        template = self.evaluator.time_context.template
        return template.step_in_first_forward or not template.grad_norm_pass


@dataclass(frozen=True)
class ShapeBound:
    """The least times of one shape."""

    value_s: float
    """No plan of the shape is faster."""
    sum_s: float
    """Least sum of t over the stages (of one chunk each when interleaved)."""
    least_d_s: float
    """Least d of the first stage where it is negative, else 0: t + d never falls below it and t."""
    times_s: tuple[tuple[float, float], ...]
    """t of a first, middle and last stage with one and with two layers; linear in between and beyond."""


def shape_bounds(question: Question, shapes: Sequence[Shape]) -> list[ShapeBound]:
    """Bounds of all shapes, priced in one batch per pipeline size and kind of schedule."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        key = (shape.stages, shape.nodes, shape.sequence_parallel, shape.vpp, shape.zero)
        groups.setdefault(key, []).append(index)
    found: list[ShapeBound | None] = [None] * len(shapes)
    for members in groups.values():
        question.tick()
        for index, bound in zip(members, _group(question, [shapes[k] for k in members]), strict=True):
            found[index] = bound
    return [bound for bound in found if bound is not None]


def least_times(question: Question, meshes: Sequence[Shape]) -> list[tuple[tuple[float, float], ...]]:
    """With one and with two layers, memory unlimited: t of a first, middle and last stage, and d of a first.
    The meshes are shapes of three stages."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, mesh in enumerate(meshes):
        key = (mesh.nodes, mesh.gpus_per_node, mesh.sequence_parallel, mesh.zero)
        groups.setdefault(key, []).append(index)
    found: list[tuple[tuple[float, float], ...]] = [()] * len(meshes)
    for members in groups.values():
        question.tick()
        priced = [_plain(question.evaluator, [meshes[k] for k in members], k) for k in range(3)]
        for row, index in enumerate(members):
            arrays = [*(t_s[row] for t_s, _ in priced), priced[0][1][row]]
            found[index] = tuple((float(one), float(two)) for one, two in arrays)
    return found


def _group(question: Question, shapes: Sequence[Shape]) -> list[ShapeBound]:
    layers = question.evaluator.job.model.layers
    stages = shapes[0].stages
    roles = (0, min(1, stages - 1), stages - 1)
    priced = {position: _plain(question.evaluator, shapes, position) for position in set(roles)}
    bounds = []
    for row, shape in enumerate(shapes):
        times = tuple((float(priced[k][0][row, 0]), float(priced[k][0][row, 1])) for k in roles)
        counts = (1,) if stages == 1 else (1, 1) if stages == 2 else (1, stages - 2, 1)
        used = times[:1] if stages == 1 else (times[0], times[2]) if stages == 2 else times
        # All layers at the least price per layer, and each stage's fixed part.
        slope = min(two - one for one, two in used)
        fixed = sum(count * (2 * one - two) for count, (one, two) in zip(counts, used, strict=True))
        sum_s = (fixed + slope * layers) / shape.vpp
        one, two = (float(priced[0][1][row, k]) for k in (0, 1))
        least_d = min(one, one + (two - one) * (layers - 1), 0.0)
        weight = shape.grad_accum * shape.vpp - 1
        value_s = weight * sum_s / stages + sum_s + least_d
        bounds.append(ShapeBound(value_s * (1 - 1e-9), sum_s, least_d, times))
    return bounds


def _plain(evaluator: StageEvaluator, shapes: Sequence[Shape], position: int) -> tuple[Array, Array]:
    """t and d with one and two layers, nothing recomputed or offloaded: rows are shapes."""
    first = shapes[0]

    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=np.float64).reshape(-1, 1, 1)

    zero = np.zeros((1, 1, 1))
    grid = StageGrid(
        role=role_of(position, first.stages),
        nodes=first.nodes,
        gpus_per_node=first.gpus_per_node,
        sequence_parallel=first.sequence_parallel,
        selective=False,
        layers=np.array([1.0, 2.0]).reshape(1, -1, 1),
        ckpt=zero,
        in_flight=zero + 1.0,
        micro_batch=column([shape.micro_batch for shape in shapes]),
        dp=column([shape.dp for shape in shapes]),
        tp=column([shape.tp for shape in shapes]),
        zero=np.array(first.zero, dtype=np.float64).reshape(1, 1, -1),
        grad_accum=column([shape.grad_accum for shape in shapes]),
        weights_offload=zero,
        grads_offload=zero,
        optimizer_offload=zero,
        activations_offload=zero,
        stages=first.stages,
        vpp=first.vpp,
    )
    terms = evaluator.terms(grid)
    delta = dict(terms.delta)
    template = evaluator.time_context.template
    if template.step_in_first_forward and template.adam_on_host:
        # What the host updates behind a forward pass, the device need not: all that offloading ever saves.
        delta.pop("optimizer_compute", None)
    shape = (len(shapes), 2, len(first.zero))
    t_s = np.broadcast_to(totals(terms.stable).at(grid.layers, grid.ckpt), shape).min(axis=-1)
    d_s = np.broadcast_to(totals(delta).at(grid.layers, grid.ckpt), shape).min(axis=-1)
    return t_s, d_s
