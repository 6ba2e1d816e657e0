"""Lower bounds of all shapes at once: what sorts them, and what prunes nearly all of them unseen.

The bound of a shape is its time were memory unlimited: nothing recomputed, nothing offloaded. Everything
that a plan adds to that costs time, so no plan of the shape is faster. Of a stage two numbers are known then:
the least t, and the least t + d, its first forward and last backward pass and all that it does once a step.
(d alone may shrink where copies hide what only the first pass would have to wait for; t grows by more.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid
from mist_megatron.search.borders import all_crossings_s
from mist_megatron.search.choices import Ints, fractions
from mist_megatron.search.pipelines import EqualPipeline, slices_alike
from mist_megatron.search.points import Ends, Front
from mist_megatron.search.points import steady_s as steady_of
from mist_megatron.search.space import Space
from mist_megatron.search.splits import first_chunk_shares, split_rows, splits_layers
from mist_megatron.search.stage_prices import Times
from mist_megatron.spec.kinds import alike
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import PARTIAL, Recompute
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
    in_turn_s: float = 0.0
    """Part of t that is not there while the pipeline fills and drains."""
    layer_backward_s: float = 0.0
    """No backward pass of a layer takes less."""

    @property
    def ramp_s(self) -> Array:
        """t while the pipeline fills and drains."""
        return self.t_s - self.in_turn_s

    @property
    def d_s(self) -> Array:
        """With the least t: a configuration with a smaller d than this has so much larger a t."""
        return self.both_s - self.t_s

    def shifted(self, less_s: float) -> LeastTimes:
        """With so much more or less of t."""
        return replace(self, t_s=self.t_s + less_s, both_s=self.both_s + less_s) if less_s else self

    def front(self, layers: int) -> Front:
        """As if one configuration were the least in all."""
        row = slice(layers - 1, layers)
        backward_s = layers * self.layer_backward_s
        return Front(self.ramp_s[row], self.d_s[row], self.step_s[row], self.in_turn_s, backward_s)


NOTHING = LeastTimes(np.zeros(1), np.zeros(1), np.zeros(1))
"""Where nothing is known of one stage alone."""
Crossed = Sequence[tuple[float, float]]
"""By position, what is not said of the role of a stage (`borders.crossings_s`); empty where it is nothing."""


@dataclass(frozen=True)
class EqualBound:
    """The least times of one shape."""

    value_s: float
    """No plan of the shape is faster."""
    rest_s: float
    """Least of all but what the slowest stage takes for the other micro-batches."""
    both_s: float
    """Least t + d of a first stage, and the step."""
    stages: tuple[LeastTimes, LeastTimes, LeastTimes]
    """A first, middle and last stage."""
    crossed: Crossed = ()
    """What borders take of stages that share nodes."""
    layers_s: float = 0.0
    """Of a model whose layers differ: what all of them take of t of all stages at least."""

    def cap_s(self, shape: EqualPipeline, role: StageRole, best_s: float) -> float:
        """No stage of a plan that beats `best_s` has a larger t.

        It computes all micro-batches but one besides `rest_s`, less what warm-up passes fill of its waits,
        half of a pass each at most. And nothing is there twice of its own G micro-batches, what a first stage
        adds, and before another the first stage's t; of chunks no more than all but one are the first
        stage's."""
        others, stages = shape.grad_accum - 1, shape.stages
        if not np.isfinite(best_s) or not others:
            return float(np.inf)
        if shape.vpp > 1:
            caps = [(best_s - self.both_s) / others]
        else:
            following = {StageRole.FIRST: stages - 1, StageRole.MIDDLE: stages - 2}.get(role, 0)
            caps = [
                (best_s - self.rest_s) / (others - 0.5 * min(following, others)),
                (best_s - self.both_s) / (others if role.has_embedding else others + 1),
            ]
        return float(min(caps) * (1 + 1e-9)) + max(stage.in_turn_s for stage in self.stages)


AT_ONCE = 128
"""Shapes in one call: with all numbers of layers and the optimizer's fractions its arrays fit a cache."""


def shape_bounds(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[EqualBound]:
    """Bounds of all shapes, priced in one batch per kind of schedule: of one stage, two, or more."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        counts = layer_counts(question, shape)
        pipeline = min(shape.stages, 3), shape.bridged, slices_alike(shape), shape.vpp > 1
        groups.setdefault((*pipeline, None if counts is None else len(counts)), []).append(index)
    bounds: list[EqualBound | None] = [None] * len(shapes)
    for members in groups.values():
        for begin in range(0, len(members), AT_ONCE):
            question.tick()
            some = members[begin : begin + AT_ONCE]
            for index, bound in zip(some, _group(question, [shapes[k] for k in some]), strict=True):
                bounds[index] = bound
    return [bound for bound in bounds if bound is not None]


def _group(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[EqualBound]:
    stages = min(shapes[0].stages, 3)
    counts = [each for shape in shapes if (each := layer_counts(question, shape)) is not None]
    positions = (0, min(1, stages - 1), stages - 1)
    priced = {
        k: least_times(question, shapes, role_of(k, stages), counts or None) for k in sorted(set(positions))
    }
    crossed = all_crossings_s(question.evaluator, shapes)
    return [
        bound_of(question, shape, (priced[0][row], priced[positions[1]][row], priced[stages - 1][row]), each)
        for row, (shape, each) in enumerate(zip(shapes, crossed, strict=True))
    ]


def layer_counts(question: SearchProblem, shape: EqualPipeline) -> list[int] | None:
    """Numbers of layers for which a shape's bound wants the least times, equally many for shapes of equally
    many stages that all have one chunk, or all several; None for every one."""
    stages, layers = shape.stages, question.evaluator.job.model.layers
    if splits_layers(question.space, stages, shape.vpp):
        # t is linear in layers, and d does not fall.
        table = split_rows(question.space, layers, stages, shape.vpp)
        return [int(table.min()), -(-layers // stages), int(table.max())]
    return [layers // stages] if _is_even(question, shape) else None


def _is_even(question: SearchProblem, shape: EqualPipeline) -> bool:
    """Whether all stages of a shape have equally many layers."""
    if splits_layers(question.space, shape.stages, shape.vpp):
        return False
    return shape.stages == 1 or shape.vpp > 1 or not question.space.uneven_layers


def bound_of(
    question: SearchProblem,
    shape: EqualPipeline,
    stages: tuple[LeastTimes, LeastTimes, LeastTimes],
    crossed: Crossed = (),
) -> EqualBound:
    """From the least times of a first, a middle and a last stage, and what their borders add to these."""
    layers, count = question.evaluator.job.model.layers, shape.stages
    if _is_even(question, shape):
        return _even_bound(shape, stages, crossed)
    if splits_layers(question.space, count, shape.vpp):
        table = split_rows(question.space, layers, count, shape.vpp)
        values_s = split_bounds(shape, stages, table, crossed)
        return EqualBound(float(values_s.min()), 0.0, 0.0, stages, crossed)
    used = (stages[0], stages[2]) if count == 2 else stages
    counts = (1, 1) if count == 2 else (1, count - 2, 1)
    # All layers at the least price per layer, and each stage's fixed part.
    slope = min(float(stage.t_s[1] - stage.t_s[0]) for stage in used)
    fixed = sum(n * (float(stage.ramp_s[0]) - slope) for n, stage in zip(counts, used, strict=True))
    sum_s = fixed + slope * layers + sum(more_s for more_s, _ in crossed)
    most = layers - count + 1
    # Some stage has its even share or more.
    share = -(-layers // count)
    step_s = min(float(stage.step_s[share - 1 : most].min()) for stage in used)
    in_turn_s = _in_turn_times(shape) * min(stage.in_turn_s for stage in used)
    rest_s = sum_s + float(stages[0].d_s[:most].min()) + step_s + in_turn_s
    both_s = float(stages[0].both_s[:most].min()) + step_s
    slope = min(slope, *(float(stage.ramp_s[0]) for stage in used))
    steady_s = _least_steady_s(shape, sum_s, slope, layers, used)
    if crossed:
        # Every stage has a layer.
        ramp_s = [float(stage.ramp_s[0]) for stage in stages]
        t_s = np.array([[ramp_s[0], *[ramp_s[1]] * (count - 2), ramp_s[2]]])
        steady_s = max(steady_s, float(crossing_s(shape, t_s, crossed)[0]))
    return EqualBound((steady_s + rest_s) * (1 - 1e-9), rest_s, both_s, stages, crossed)


def crossing_s(shape: EqualPipeline, t_s: Array, crossed: Crossed) -> Array:
    """u of the slowest of the stages that have borders of nodes, by row of stages that take so long but for
    these, and without what all send in turn."""
    more_s, in_turn_s = np.array(crossed).T
    t_s = t_s + more_s
    behind_s = t_s[:, ::-1].cumsum(axis=1)[:, ::-1] - t_s
    steady_s = np.full(len(t_s), -np.inf)
    for position in np.flatnonzero(more_s):
        own_s, following = t_s[:, position], shape.stages - 1 - int(position)
        ends = Ends.of(shape.grad_accum, following, shape.stages)
        u_s = steady_of(own_s, 0.5 * own_s, in_turn_s[position], ends, behind_s[:, position])
        steady_s = np.maximum(steady_s, u_s)
    return steady_s


def _in_turn_times(shape: EqualPipeline) -> float:
    """How often a stage sends in turn at least, beyond what its neighbours count too (`points.steady_s`)."""
    return max(shape.grad_accum - 1.5, 0.0)


def _least_steady_s(
    shape: EqualPipeline, sum_s: float, slope_s: float, layers: int, used: Sequence[LeastTimes]
) -> float:
    """U of any split of a pipeline's layers. With more micro-batches than stages the mean of all u_b, each
    weighted with what makes every t count alike, is (G - 1) times the mean t. With fewer, the warm-up passes
    of early stages fill all waits: u is (G - 1) of the longer pass, of which more fits below a cap."""
    others, count = shape.grad_accum - 1, shape.stages
    early = max(count - others, 0)
    if not early:
        return others * sum_s / count
    layer_backward_s = min(stage.layer_backward_s for stage in used)
    longer = min(max(0.5, layer_backward_s / slope_s), 1.0) if slope_s > 0.0 else 0.5
    return others * slope_s * layers / (count - early + early / longer)


def _even_bound(
    shape: EqualPipeline, stages: tuple[LeastTimes, LeastTimes, LeastTimes], crossed: Crossed
) -> EqualBound:
    """With the number of layers known."""
    count, others = shape.stages, shape.grad_accum - 1
    if shape.vpp > 1:
        return _even_chunks_bound(shape, stages)
    t_s, both_s, step_s = (
        [float(part[0]) for part in parts]
        for parts in zip(*((stage.ramp_s, stage.both_s, stage.step_s) for stage in stages), strict=True)
    )
    sum_s = t_s[0] if count == 1 else t_s[0] + (count - 2) * t_s[1] + t_s[2]
    sum_s += sum(more_s for more_s, _ in crossed)
    hidden = (0.0, t_s[0], sum_s - t_s[2])
    in_turn_s = [stage.in_turn_s for stage in stages]
    second_s = max(
        sum_s - t + both - in_turn - before
        for t, both, in_turn, before in zip(t_s, both_s, in_turn_s, hidden, strict=True)
    )
    rest_s = max(step_s) + second_s + _in_turn_times(shape) * min(in_turn_s)
    if count == 1:
        steady_s = others * max(t_s)
    else:
        # Of a middle stage u is the same wherever it stands, unless its warm-up passes fill every wait.
        behind = [(count - 2) * t_s[1] + t_s[2], t_s[2], 0.0]
        following = [count - 1, 1 if others > 1 else count - 2, 0]
        steady_s = max(
            float(steady_of(t, 0.5 * t, 0.0, Ends.of(shape.grad_accum, after, count), rest))
            for t, after, rest in zip(t_s, following, behind, strict=True)
        )
    if crossed:
        every_s = np.array([[t_s[0], *[t_s[1]] * (count - 2), t_s[2]]])
        steady_s = max(steady_s, float(crossing_s(shape, every_s, crossed)[0]))
    value_s = (steady_s + rest_s) * (1 - 1e-9)
    return EqualBound(value_s, rest_s, both_s[0] + max(step_s), stages, crossed)


def _even_chunks_bound(shape: EqualPipeline, stages: tuple[LeastTimes, LeastTimes, LeastTimes]) -> EqualBound:
    """The same of chunks that are alike."""
    roles = [0, *[1] * (shape.stages - 2), 2]
    t_s, both_s = (
        np.array([[float(getattr(stages[role], name)[0]) for role in roles]]) for name in ("t_s", "both_s")
    )
    step_s = max(float(stage.step_s[0]) for stage in stages)
    value_s = chunks_s(shape.grad_accum, t_s, both_s, np.full_like(t_s, 1.0 / shape.vpp))[0] + step_s
    return EqualBound(float(value_s) * (1 - 1e-9), 0.0, float(both_s[0, 0]) + step_s, stages)


def chunks_s(grad_accum: int | Array, t_s: Array, both_s: Array, shares: Array) -> Array:
    """No step of pipelines whose chunks take turns is shorter, steps that wait for all stages aside; stages
    are the last axis. `both_s` are t + d, `shares` what first chunks take of t.

    Passes take max_b (first chunks of those before b + G t_b) at least, and what a stage i adds to that
    counts but for the first chunks before it. It may have a t larger by x with a d smaller by x, of which
    paths that stand still behind it have no more than its first chunk: at worst until its own is as long."""
    first_s, stages = shares * t_s, t_s.shape[-1]
    before_s = np.cumsum(first_s, axis=-1) - first_s
    paths_s = before_s + grad_accum * t_s
    passes = grad_accum if isinstance(grad_accum, int) else grad_accum[..., 0]
    values = []
    for stage in sorted({0, min(1, stages - 1), stages - 1}):
        share = shares[..., stage]
        longest_s = paths_s[..., stage:].max(axis=-1)
        most_s = (longest_s - paths_s[..., stage]) / (passes - share)
        passes_s = longest_s - before_s[..., stage] - (1.0 - share) * most_s
        values.append(passes_s + both_s[..., stage] - t_s[..., stage])
    return np.asarray(np.max(values, axis=0))


def split_bounds(
    shape: EqualPipeline,
    stages: tuple[LeastTimes, LeastTimes, LeastTimes],
    table: NDArray[np.intp],
    crossed: Crossed = (),
) -> Array:
    """The same of splits of the layers over stages that are alike in all else, one a row."""
    if shape.vpp > 1:
        return _chunked_bounds(shape, stages, table)
    ramp_s = _by_position([stage.ramp_s for stage in stages], table)
    more_s = np.array([more_s for more_s, _ in crossed] or [0.0] * shape.stages)
    in_turn_s = [stage.in_turn_s for stage in stages]
    # Some stage has its even share or more, which was priced between the two.
    step_s = min(float(stage.step_s[len(stage.step_s) // 2]) for stage in stages)
    t_s = ramp_s + more_s
    left_s = t_s[:, ::-1].cumsum(axis=1)[:, ::-1]
    # Of all but t what the fewest layers have.
    extra_s = [float((stage.both_s - stage.t_s).min()) for stage in stages]
    second_s = np.max([left_s[:, k] + extra_s[min(k, 1)] for k in (0, 1)], axis=0)
    second_s = np.maximum(second_s, left_s[:, -1] + extra_s[2])
    rest_s = step_s + second_s + _in_turn_times(shape) * min(in_turn_s)
    steady = [_least_waiting_s(shape, t_s, left_s - t_s)]
    if crossed:
        steady.append(crossing_s(shape, ramp_s, crossed))
    return np.asarray((np.max(steady, axis=0) + rest_s) * (1 - 1e-9))


def _by_position(parts: Sequence[Array], table: NDArray[np.intp]) -> Array:
    """Seconds of a first, a middle and a last stage with the fewest, the mean and the most layers of a table,
    by row and stage of it."""
    low, high, last = int(table.min()), int(table.max()), table.shape[1] - 1
    roles = [0, *[1] * (last - 1), 2]
    begin, end = np.array([[parts[role][0], parts[role][-1]] for role in roles]).T
    return np.asarray(begin + (table - low) / max(high - low, 1) * (end - begin))


def _least_waiting_s(shape: EqualPipeline, t_s: Array, behind_s: Array) -> Array:
    """U by row of stages that take so long, but for what they send in turn."""
    count, steady_s = shape.stages, np.full(len(t_s), -np.inf)
    ends = [Ends.of(shape.grad_accum, count - 1 - k, count) for k in range(count)]
    for twice in (False, True):
        here = [k for k, each in enumerate(ends) if each.waits_twice is twice]
        if here:
            filling = np.array([ends[k].filling for k in here])
            own_s, alike = t_s[:, here], Ends(shape.grad_accum, filling, twice)
            each_s = steady_of(own_s, 0.5 * own_s, 0.0, alike, behind_s[:, here])
            steady_s = np.maximum(steady_s, each_s.max(axis=1))
    return steady_s


def _chunked_bounds(
    shape: EqualPipeline, stages: tuple[LeastTimes, LeastTimes, LeastTimes], table: NDArray[np.intp]
) -> Array:
    """The same where chunks take turns."""
    roles = [0, *[1] * (shape.stages - 2), 2]
    t_s = _by_position([stage.t_s for stage in stages], table)
    # Of all but t what the fewest layers have.
    extra_s = np.array([float((stages[role].both_s - stages[role].t_s).min()) for role in roles])
    # Some stage has its even share or more, which was priced between the two.
    step_s = min(float(stage.step_s[len(stage.step_s) // 2]) for stage in stages)
    shares = first_chunk_shares(int(table[0].sum()), shape.stages, shape.vpp)
    return np.asarray((chunks_s(shape.grad_accum, t_s, t_s + extra_s, shares) + step_s) * (1 - 1e-9))


@lru_cache(maxsize=256)
def least_passes(gpus: int, grad_accum: int, lengths: tuple[int, ...]) -> float:
    """Of any pipeline of these numbers of stages, whatever their sizes: U and all t, for each GPU-second of a
    micro-batch. Each stage but the slowest has one GPU at least. With t = 1 of the slowest, those before it
    take A and those behind it D; U and what they take are linear in A and D but for where U turns, so that
    their ratio is least where each is at an end."""
    others = grad_accum - 1
    stages = np.array(lengths, dtype=np.float64).reshape(-1, 1, 1, 1)
    following = np.arange(float(lengths[-1])).reshape(-1, 1, 1)
    behind = following * np.array([0.0, 0.5, 1.0]).reshape(-1, 1)
    before = np.maximum(stages - 1.0 - following, 0.0) * np.array([0.0, 1.0])
    full = np.where((following > 0.0) & (following < others), behind - following, -np.inf)
    waits = np.maximum(-0.5 * np.minimum(following, others), full)
    taken = 1.0 + before + behind
    ratio = (others + waits + taken) / (taken + gpus - stages)
    return float(np.where(following < stages, ratio, np.inf).min())


def _column(meshes: Sequence[EqualPipeline], size: str) -> Array:
    """A size of all meshes, along the first of four axes."""
    return np.array([getattr(mesh, size) for mesh in meshes], dtype=np.float64).reshape(-1, 1, 1, 1)


def least_recompute(space: Space) -> Recompute:
    """The kind that takes least time: of whole layers none is among `full`."""
    partial = [kind for kind in space.recompute if kind in PARTIAL]
    return partial[0] if len(space.recompute) == 1 and partial else "full"


def _shared(meshes: Sequence[EqualPipeline], size: str) -> int | Array:
    """A size of all meshes where they have the same, and else a column."""
    sizes = {getattr(mesh, size) for mesh in meshes}
    return int(sizes.pop()) if len(sizes) == 1 else _column(meshes, size)


def _with_instances(meshes: Sequence[EqualPipeline]) -> tuple[list[EqualPipeline], Array, Ints]:
    """Each mesh once for each number of sub-groups of its replicas, these numbers, and where the rows of each
    begin."""
    counts = [len(mesh.instances) for mesh in meshes]
    rows = [mesh for mesh, count in zip(meshes, counts, strict=True) for _ in range(count)]
    column = np.array([float(each) for mesh in meshes for each in mesh.instances]).reshape(-1, 1, 1, 1)
    return rows, column, np.cumsum([0, *counts[:-1]], dtype=np.intp)


def least_times(
    question: SearchProblem,
    meshes: Sequence[EqualPipeline],
    role: StageRole,
    counts: Sequence[Sequence[int]] | None = None,
) -> list[LeastTimes]:
    """Of stages of a role on meshes alike in sequence parallelism (`slices_alike`), in having several chunks,
    and in having one stage, two or more; by mesh, so many layers each, None is every number."""
    evaluator, first = question.evaluator, meshes[0]
    levels, zero = sorted({level for mesh in meshes for level in mesh.zero}), np.zeros((1, 1, 1, 1))
    shares = fractions(question.space.offload.optimizer, question.step)
    counts = counts or [range(1, evaluator.job.model.layers + 1)] * len(meshes)
    layers = np.repeat(np.array(counts, dtype=np.float64), [len(mesh.instances) for mesh in meshes], axis=0)
    own, (meshes, instances, starts) = meshes, _with_instances(meshes)
    grid = StageGrid(
        role=role,
        nodes=_shared(meshes, "nodes"),
        gpus_per_node=_shared(meshes, "gpus_per_node"),
        sequence_parallel=any(mesh.sequence_parallel for mesh in meshes),
        recompute=least_recompute(question.space),
        layers=layers.reshape(*layers.shape, 1, 1),
        ckpt=zero,
        in_flight=zero + 1.0,
        micro_batch=_column(meshes, "micro_batch"),
        dp=_column(meshes, "dp"),
        tp=_column(meshes, "tp"),
        zero=np.array(levels, dtype=np.float64).reshape(1, 1, -1, 1),
        grad_accum=_column(meshes, "grad_accum"),
        ep=_column(meshes, "ep"),
        etp=_column(meshes, "etp"),
        instances=instances,
        # The optimizer's share may make d smaller.
        offload=replace(alike(zero), optimizer=shares.reshape(1, 1, 1, -1)),
        stages=_shared(meshes, "stages"),
        vpp=_column(meshes, "vpp"),
        bridged=first.bridged,
    )
    # Gradients that are on the host already need not be copied there for the update.
    times = Times.of(evaluator, grid, without=(Term.HOST_ADAM_COPIES,))
    stable, extra, step = (part.at(grid) for part in (times.stable, times.delta, times.step))
    facts = evaluator.time_context.facts
    if facts.step.in_first_forward and facts.step.by_place:
        # Offloaded weights save copies of a step between forward passes.
        extra = np.minimum(extra, 0.0)
    size, one = (len(meshes), layers.shape[1], len(levels)), (len(meshes), 1, 1, 1)
    parts = [
        np.minimum.reduceat(np.broadcast_to(part.min(axis=-1) if np.ndim(part) else part, size), starts)
        for part in (stable, stable + extra, step)
    ]
    of_levels = {}
    for zero_levels in {mesh.zero for mesh in own}:
        mine = [levels.index(level) for level in zero_levels]
        of_levels[zero_levels] = [part[:, :, mine].min(axis=-1) for part in parts]
    once_s = times.in_turn_s, evaluator.loads(grid).block.backward_s
    in_turn_s, backward_s = (np.broadcast_to(part, one).reshape(-1)[starts] for part in once_s)
    least = []
    for row, mesh in enumerate(own):
        t_s, both_s, step_s = (part[row] for part in of_levels[mesh.zero])
        least.append(LeastTimes(t_s, both_s, step_s, float(in_turn_s[row]), float(backward_s[row])))
    return least
