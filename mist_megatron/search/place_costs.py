"""What a plan asks of its nodes, as `search/place.py` wants it told: which places talk to each other, and
what a slower link between them adds to each stage's times, asked of the evaluator that `predict` asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mist_megatron.cost.borders import busy_border_s
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.placed import Placed, Spans
from mist_megatron.cost.predict import grids_of, predicted_stage
from mist_megatron.search.place import Array, Curve, Places, Use
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.mesh import Group, Ranks, neighbours
from mist_megatron.spec.plan import Plan

KNOTS = 7
"""Rates at which a stage is priced; between them its times are nearly straight lines of seconds per byte."""
BEFORE, AFTER, TIED = "before", "after", "tied"
Part = Group | str
"""What of a stage uses links: a kind of group, or its sends to either side, or the tied embedding's pair."""


@dataclass(frozen=True)
class _Asked:
    """A part of a stage and the places that it lies on."""

    stage: int
    part: Part
    use: Use


def places_of(plan: Plan, evaluator: StageEvaluator, matrix: LinkMatrix) -> Places:
    """Of a plan whose nodes may be exchanged for others of the matrix; `evaluator` is of the plan's job on
    some of them."""
    fast = max(matrix.rates)
    uniform = uniform_links(plan, matrix, fast)
    grids = grids_of(uniform)
    asked = [one for stage in range(len(plan.stages)) for one in _parts(plan, stage)]
    base = {stage: times_of(grid, evaluator) for stage, grid in enumerate(grids)}
    knots = np.geomspace(1.0 / fast, max(1.0 / min(matrix.rates), 1.1 / fast), KNOTS)
    priced: dict[object, tuple[Array, Array]] = {}
    curves = []
    for number, one in enumerate(asked):
        key = (grids[one.stage].role, plan.stages[one.stage], grids[one.stage].placed, one.part)
        if key not in priced:
            priced[key] = _curve(grids[one.stage], one.part, knots, base[one.stage], evaluator)
        stable_s, delta_s = priced[key]
        curves.append(
            Curve(
                stage=one.stage, use=number, seconds_per_byte=knots, stable_s=stable_s, delta_s=delta_s
            )
        )  # fmt: skip
    return Places(
        places=plan.cluster.nodes,
        uses=tuple(one.use for one in asked),
        stable_s=np.array([base[stage][0] for stage in range(len(grids))]),
        delta_s=np.array([base[stage][1] for stage in range(len(grids))]),
        curves=tuple(curves),
        grad_accum=plan.grad_accum,
        chunks=plan.vpp,
        busy_bytes=_busy(uniform, grids, asked, evaluator),
    )


def _busy(
    plan: Plan, grids: Sequence[StageGrid], asked: Sequence[_Asked], evaluator: StageEvaluator
) -> tuple[tuple[int, float], ...]:
    """Of the borders of an interleaved schedule."""
    busy = []
    for number, one in enumerate(asked):
        if one.part != AFTER:
            continue
        border = one.stage, (one.stage + 1) % len(grids)
        seconds = busy_border_s(plan, grids, evaluator, (min(border), max(border)))
        spans = grids[one.stage].placed
        assert spans is not None
        rate = min(span.bytes_per_s or math.inf for span in spans.after)
        busy.append((number, seconds * rate))
    return tuple((number, carried) for number, carried in busy if 0.0 < carried < math.inf)


def uniform_links(plan: Plan, matrix: LinkMatrix, bytes_per_s: float) -> Plan:
    """The plan on nodes with one rate between all of them."""
    count = plan.cluster.nodes
    rows = tuple(tuple(None if a == b else bytes_per_s for b in range(count)) for a in range(count))
    same = replace(matrix.take(range(count)), bytes_per_s=rows, inside=())
    return replace(plan, cluster=replace(plan.cluster, links=replace(plan.cluster.links, matrix=same)))


def _parts(plan: Plan, stage: int) -> Iterable[_Asked]:
    """What of a stage lies on several nodes."""
    last = len(plan.stages) - 1
    for group in plan.kinds_of_groups:
        pairs = {pair for ranks in plan.groups(stage, group) for pair in _ring(plan, ranks)}
        if pairs:
            yield _Asked(stage, group, Use(tuple(sorted(pairs))))
    if not last:
        return
    around = plan.vpp > 1
    sides = ((BEFORE, stage - 1, stage > 0 or around), (AFTER, stage + 1, stage < last or around))
    for part, other, there in sides:
        pairs = _between(plan, stage, other % (last + 1)) if there else set()
        if pairs:
            yield _Asked(stage, part, Use(tuple(sorted(pairs))))
    pairs = _between(plan, 0, last) if stage in (0, last) and plan.model.tied_embeddings else set()
    if pairs:
        yield _Asked(stage, TIED, Use(tuple(sorted(pairs))))


def _nodes(plan: Plan, ranks: Iterable[int]) -> list[int]:
    return [plan.gpu_of[rank] // plan.cluster.gpus_per_node for rank in ranks]


def _ring(plan: Plan, ranks: Ranks) -> list[tuple[int, int]]:
    """Each node entered once, in the order of ranks."""
    order = list(dict.fromkeys(_nodes(plan, ranks)))
    return [(min(a, b), max(a, b)) for a, b in pairwise([*order, order[0]]) if a != b]


def _between(plan: Plan, one: int, other: int) -> set[tuple[int, int]]:
    pairs = {tuple(sorted(_nodes(plan, pair))) for pair in neighbours(plan.ranks(one), plan.ranks(other))}
    return {(a, b) for a, b in pairs if a != b}


def _curve(
    grid: StageGrid, part: Part, knots: Array, base: tuple[float, float], evaluator: StageEvaluator
) -> tuple[Array, Array]:
    assert grid.placed is not None
    times = [
        times_of(replace(grid, placed=_slowed(grid.placed, part, 1.0 / knot)), evaluator) for knot in knots
    ]
    stable_s, delta_s = (np.array([one[k] - base[k] for one in times]) for k in range(2))
    return stable_s, delta_s


def times_of(grid: StageGrid, evaluator: StageEvaluator) -> tuple[float, float]:
    """A stage's t and d with what the iteration adds to them."""
    stage = predicted_stage(grid, evaluator)
    return stage.stable_s + stage.beyond_s[0], stage.delta_s + stage.beyond_s[1]


def _slowed(placed: Placed, part: Part, bytes_per_s: float) -> Placed:
    """With one part's links at another rate."""
    return with_part(placed, part, lambda spans: _at(spans, bytes_per_s))


def with_part(placed: Placed, part: Part, change: Callable[[Spans], Spans]) -> Placed:
    """With other links of one part."""
    if isinstance(part, Group):
        groups = tuple((group, change(spans) if group is part else spans) for group, spans in placed.groups)
        return replace(placed, groups=groups)
    if part == TIED:
        return replace(placed, tied=change(placed.tied))
    side = placed.before if part == BEFORE else placed.after
    slow = change(side)
    every = _one_changed(placed.every_border, side, slow)
    if part == BEFORE:
        return replace(placed, before=slow, every_border=every)
    return replace(placed, after=slow, every_border=every)


def _one_changed(borders: Sequence[Spans], before: Spans, after: Spans) -> tuple[Spans, ...]:
    """The first of those that are as this one."""
    changed = list(borders)
    if before in changed:
        changed[changed.index(before)] = after
    return tuple(changed)


def _at(spans: Spans, bytes_per_s: float) -> Spans:
    return tuple(replace(span, bytes_per_s=bytes_per_s) if span.nodes > 1 else span for span in spans)
