"""Lower bounds of all shapes at once: what sorts them, and what prunes nearly all of them unseen.

The bound of a shape is its time were memory unlimited: nothing recomputed, nothing offloaded. Everything
that a plan adds to that costs time, so no plan of the shape is faster. Of a stage two numbers are known then:
the least t, and the least t + d, its first forward and last backward pass and all that it does once a step.
(d alone may shrink where copies hide what only the first pass would have to wait for; t grows by more.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid, StageRole, role_of
from mist_megatron.search.assign import Front
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.space import Space
from mist_megatron.search.stage_prices import Times, fractions
from mist_megatron.spec.kinds import alike
from mist_megatron.spec.term import Term

Array = NDArray[np.float64]
Solver = Literal["exact", "milp"]


def nothing() -> None:
    """A tick that never ends the search."""


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """What does not change from shape to shape."""

    evaluator: StageEvaluator
    space: Space
    step: float
    solver: Solver = "exact"
    climb: bool = False
    """Whether the best plan of a shape by eq. 1 is where a climb by the closed form begins (`finer`)."""
    tick: Callable[[], None] = nothing
    """Called every few milliseconds of work: what it raises ends the search."""


@dataclass(frozen=True)
class LeastTimes:
    """Of one stage on one mesh with 1, 2, ... layers, or the only number it may have; memory unlimited."""

    t_s: Array
    both_s: Array
    """t + d, steps that wait for all stages aside."""
    step_s: Array
    """Of such steps."""

    @property
    def d_s(self) -> Array:
        """With the least t: a configuration with a smaller d than this has so much larger a t."""
        return self.both_s - self.t_s

    def front(self, layers: int) -> Front:
        """As if one configuration were the least in all."""
        row = slice(layers - 1, layers)
        return Front(self.t_s[row], self.d_s[row], self.step_s[row])


@dataclass(frozen=True)
class EqualBound:
    """The least times of one shape."""

    value_s: float
    """No plan of the shape is faster."""
    rest_s: float
    """Least of what is added to (G - 1) max t."""
    stages: tuple[LeastTimes, LeastTimes, LeastTimes]
    """A first, middle and last stage."""


def shape_bounds(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[EqualBound]:
    """Bounds of all shapes, priced in one batch per pipeline size and kind of schedule."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        key = (shape.stages, shape.nodes, shape.sequence_parallel, shape.vpp)
        groups.setdefault(key, []).append(index)
    found: list[EqualBound | None] = [None] * len(shapes)
    for members in groups.values():
        question.tick()
        for index, bound in zip(members, _group(question, [shapes[k] for k in members]), strict=True):
            found[index] = bound
    return [bound for bound in found if bound is not None]


def _group(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[EqualBound]:
    stages, layers = shapes[0].stages, question.evaluator.job.model.layers
    counts = range(layers // stages, layers // stages + 1) if _is_even(question, shapes[0]) else None
    positions = (0, min(1, stages - 1), stages - 1)
    priced = {k: least_times(question, shapes, role_of(k, stages), counts) for k in sorted(set(positions))}
    return [
        _bound(question, shape, (priced[0][row], priced[positions[1]][row], priced[stages - 1][row]))
        for row, shape in enumerate(shapes)
    ]


def _is_even(question: SearchProblem, shape: EqualPipeline) -> bool:
    """Whether all stages of a shape have equally many layers."""
    return shape.stages == 1 or shape.vpp > 1 or not question.space.uneven_layers


def _bound(
    question: SearchProblem, shape: EqualPipeline, stages: tuple[LeastTimes, LeastTimes, LeastTimes]
) -> EqualBound:
    layers, count = question.evaluator.job.model.layers, shape.stages
    if _is_even(question, shape):
        return _even_bound(shape, stages)
    used = (stages[0], stages[2]) if count == 2 else stages
    counts = (1, 1) if count == 2 else (1, count - 2, 1)
    # All layers at the least price per layer, and each stage's fixed part.
    slope = min(float(stage.t_s[1] - stage.t_s[0]) for stage in used)
    fixed = sum(n * (float(stage.t_s[0]) - slope) for n, stage in zip(counts, used, strict=True))
    sum_s = fixed + slope * layers
    most = layers - count + 1
    # Some stage has its even share or more.
    share = -(-layers // count)
    step_s = min(float(stage.step_s[share - 1 : most].min()) for stage in used)
    rest_s = sum_s + float(stages[0].d_s[:most].min()) + step_s
    value_s = (shape.grad_accum - 1) * sum_s / count + rest_s
    return EqualBound(value_s * (1 - 1e-9), rest_s, stages)


def _even_bound(shape: EqualPipeline, stages: tuple[LeastTimes, LeastTimes, LeastTimes]) -> EqualBound:
    """With the number of layers known.

    With v chunks the objective is (G v - 1) max t / v + sum t / v + d of some stage (less what hides it). A
    larger t with an equally smaller d does not pay even on a stage that is not the slowest: at worst it gets
    as slow as that, which leaves (G - 1) max t + t + d and t / v of the other stages."""
    vpp, count = shape.vpp, shape.stages
    t_s, both_s, step_s = (
        [float(part[0]) for part in parts]
        for parts in zip(*((stage.t_s, stage.both_s, stage.step_s) for stage in stages), strict=True)
    )
    sum_s = t_s[0] / vpp if count == 1 else (t_s[0] + (count - 2) * t_s[1] + t_s[2]) / vpp
    hidden = (0.0, t_s[0] / vpp, sum_s - t_s[2] / vpp)
    rest_s = max(step_s) + max(
        sum_s - t / vpp + both - before for t, both, before in zip(t_s, both_s, hidden, strict=True)
    )
    return EqualBound(((shape.grad_accum - 1) * max(t_s) + rest_s) * (1 - 1e-9), rest_s, stages)


def least_passes_s(work_s: float, gpus: int, grad_accum: int, lengths: Sequence[int]) -> float:
    """Of any pipeline of these numbers of stages, whatever their sizes, for so many GPU-seconds of a
    micro-batch: some k stages are as slow as the slowest, and each other has one GPU at least."""
    return min(
        (grad_accum - 1 + slow) * work_s / (gpus - stages + slow)
        for stages in lengths
        for slow in range(1, stages + 1)
    )


def least_times(
    question: SearchProblem, meshes: Sequence[EqualPipeline], role: StageRole, counts: range | None = None
) -> list[LeastTimes]:
    """Of a role's stages on all these meshes, which are alike in nodes, sequence parallelism and chunks, with
    so many layers each; None is every number."""
    evaluator, first = question.evaluator, meshes[0]
    levels = sorted({level for mesh in meshes for level in mesh.zero})
    layers = np.array(counts or range(1, evaluator.job.model.layers + 1), dtype=np.float64)

    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=np.float64).reshape(-1, 1, 1, 1)

    zero = np.zeros((1, 1, 1, 1))
    shares = fractions(question.space.offload.optimizer, question.step)
    grid = StageGrid(
        role=role,
        nodes=max(mesh.nodes for mesh in meshes),
        gpus_per_node=first.gpus_per_node,
        sequence_parallel=first.sequence_parallel,
        recompute="full",
        layers=layers.reshape(1, -1, 1, 1),
        ckpt=zero,
        in_flight=zero + 1.0,
        micro_batch=column([mesh.micro_batch for mesh in meshes]),
        dp=column([mesh.dp for mesh in meshes]),
        tp=column([mesh.tp for mesh in meshes]),
        zero=np.array(levels, dtype=np.float64).reshape(1, 1, -1, 1),
        grad_accum=column([mesh.grad_accum for mesh in meshes]),
        # The optimizer's share may make d smaller.
        offload=replace(alike(zero), optimizer=shares.reshape(1, 1, 1, -1)),
        stages=first.stages,
        vpp=first.vpp,
        bridged=first.bridged,
    )
    # Gradients that are on the host already need not be copied there for the update.
    times = Times.of(evaluator, grid, without=(Term.HOST_ADAM_COPIES,))
    stable, extra, step = (
        part.at(grid.layers, grid.ckpt) for part in (times.stable, times.delta, times.step)
    )
    facts = evaluator.time_context.facts
    if facts.step.in_first_forward and facts.step.by_place:
        # Offloaded weights save copies of a step between forward passes.
        extra = np.minimum(extra, 0.0)
    size = (len(meshes), len(layers), len(levels))
    parts = [
        np.broadcast_to(part.min(axis=-1) if np.ndim(part) else part, size)
        for part in (stable, stable + extra, step)
    ]
    of_levels = {}
    for zero_levels in {mesh.zero for mesh in meshes}:
        mine = [levels.index(level) for level in zero_levels]
        of_levels[zero_levels] = [part[:, :, mine].min(axis=-1) for part in parts]
    return [LeastTimes(*(part[row] for part in of_levels[mesh.zero])) for row, mesh in enumerate(meshes)]
