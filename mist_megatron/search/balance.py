"""Which layers each stage of equally many GPUs has, and in how many micro-batches: Galvatron-BMW's algorithms
1 and 2, with the strategies of `layerwise` inside.

Splits begin even, balanced in time and balanced in memory; the slowest stage gives a layer at its border to a
neighbour while no stage gets as slow as it was, all fit, and none holds more than the fullest of the split
that is balanced in time. `exact` solves over all splits instead, stages being what the dynamic program found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import Array
from mist_megatron.search.layer_rules import LayerRules
from mist_megatron.search.layerwise import Allowed, Cell, StagePoint, few_strategies, solve_stage
from mist_megatron.search.strategy_prices import StrategyPrices

NEAR = 1.05
"""Eq. 1 and `predict` differ by borders between layouts and by warm-up passes: what is within this of the
best by eq. 1 may be the best."""
Split = tuple[int, ...]
"""Layers of each stage."""
NOWHERE = StagePoint(np.inf, np.inf, np.inf, ())
"""A stage that does not fit."""


@dataclass(frozen=True)
class Candidate:
    """A pipeline whose stages are solved."""

    value_s: float
    """By eq. 1."""
    prices: StrategyPrices
    split: Split
    points: tuple[StagePoint, ...]
    border: int | None
    """Row of the layout in which activations cross all borders, where that was asked for."""


def eq1_s(points: Sequence[StagePoint], grad_accum: int) -> float:
    """Seconds of a step."""
    times = [point.t_s for point in points]
    before = accumulate(times, initial=0.0)
    extra_s = max(point.d_s - earlier for point, earlier in zip(points, before, strict=False))
    return (grad_accum - 1) * max(times) + sum(times) + extra_s


class Stages:
    """Solved stages of a number of stages and micro-batches, each once."""

    def __init__(self, prices: StrategyPrices, allowed: Array, border: int | None) -> None:
        self.prices, self.allowed, self.border = prices, allowed, border
        self.weight = float(prices.grad_accum)
        self._known: dict[tuple[object, ...], StagePoint | None] = {}
        self.solved = 0

    def point(self, position: int, first: int, count: int) -> StagePoint | None:
        """The best way to run these layers there."""
        model = self.prices.evaluator.job.model
        before = model.kind_of_layer[first - 1] if first else None
        key = position, model.kind_of_layer[first : first + count], before
        if key not in self._known:
            self.solved += 1
            problem = self.prices.problem(position, first, count, self.border)
            self._known[key] = solve_stage(problem, self.weight, Allowed(self.allowed, self.allowed))
        return self._known[key]

    def points(self, split: Split) -> tuple[StagePoint, ...] | None:
        """Of all stages; None where one fits nowhere."""
        of_stages = []
        for position, (first, count) in enumerate(zip(accumulate(split, initial=0), split, strict=False)):
            point = self.point(position, first, count)
            if point is None:
                return None
            of_stages.append(point)
        return tuple(of_stages)

    def candidate(self, split: Split) -> Candidate | None:
        """With its time."""
        points = self.points(split)
        if points is None:
            return None
        edges = {cell for point in points for cell in point.of_edges}
        if len(edges) > 1 and self.prices.evaluator.job.model.tied_embeddings:
            return self._tied(split, points, sorted(edges))
        return Candidate(eq1_s(points, self.prices.grad_accum), self.prices, split, points, self.border)

    def _tied(self, split: Split, points: tuple[StagePoint, ...], edges: Sequence[Cell]) -> Candidate | None:
        """With one strategy of embedding and head, whose weights are one: the better of those that the two
        have on their own."""
        found = []
        for cell in edges:
            only = np.full_like(self.allowed, np.inf)
            only[cell] = 0.0
            allowed, ends = Allowed(self.allowed, only), list(points)
            for position in {0, len(split) - 1}:
                problem = self.prices.problem(position, sum(split[:position]), split[position], self.border)
                ends[position] = solve_stage(problem, self.weight, allowed) or NOWHERE
            if NOWHERE not in ends:
                value_s = eq1_s(ends, self.prices.grad_accum)
                found.append(Candidate(value_s, self.prices, split, tuple(ends), self.border))
        return min(found, key=lambda one: one.value_s, default=None)

    def with_few(self, candidate: Candidate, most: int) -> Candidate | None:
        """With at most so many strategies on each stage."""
        of_stages = []
        starts = accumulate(candidate.split, initial=0)
        tied, allowed = self.prices.evaluator.job.model.tied_embeddings, Allowed(self.allowed, self.allowed)
        for position, (first, count, point) in enumerate(
            zip(starts, candidate.split, candidate.points, strict=False)
        ):
            if tied and point.of_edges:
                only = np.full_like(self.allowed, np.inf)
                only[point.of_edges[0]] = 0.0
                allowed = Allowed(self.allowed, only)
            problem = self.prices.problem(position, first, count, self.border)
            few = few_strategies(problem, self.weight, point, most, allowed)
            if few is None:
                return None
            of_stages.append(few)
        value_s = eq1_s(of_stages, self.prices.grad_accum)
        return Candidate(value_s, self.prices, candidate.split, tuple(of_stages), self.border)


def allowed_cells(prices: StrategyPrices, rules: LayerRules, allows: Callable[[str, int], bool]) -> Array:
    """Infinity at strategies that are not searched."""
    allowed = np.full((len(prices.rows), 4), np.inf)
    for cell in np.ndindex(*allowed.shape):
        strategy, row = prices.strategy((cell[0], cell[1])), prices.rows[cell[0]]
        sizes = {"dp": row.dp, "tp": row.tp, "zero": strategy.zero, "micro_batch": prices.samples // row.dp}
        runs = all(axis in rules.axes for axis, _ in strategy.order) and rules.ckpt >= strategy.ckpt
        runs = runs and (rules.fixed is None or row.tp == rules.fixed[1])
        if runs and all(allows(key, size) for key, size in sizes.items()):
            allowed[cell] = 0.0
    return allowed


def even(layers: int, stages: int) -> Split:
    """As many layers on all stages; what is left over on the last ones, which hold fewest micro-batches."""
    each, more = divmod(layers, stages)
    return tuple(each + (position >= stages - more) for position in range(stages))


def balanced(sizes: Callable[[int, int, int], float], layers: int, stages: int) -> Split:
    """The split whose largest stage is least; `sizes` are by position, first layer and the layer behind."""
    least: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(np.inf, 0)] * layers]
    for position in range(stages):
        row = [(np.inf, 0)] * (layers + 1)
        for end in range(position + 1, layers - (stages - 1 - position) + 1):
            starts = range(position, end) if position else range(1)
            row[end] = min((max(least[-1][start][0], sizes(position, start, end)), start) for start in starts)
        least.append(row)
    counts, end = [], layers
    for row in reversed(least[1:]):
        start = row[end][1]
        counts.append(end - start)
        end = start
    return tuple(reversed(counts))


def starts(stages: Stages) -> list[Split]:
    """Even, balanced in memory and balanced in time, all layers with one strategy."""
    prices, layers = stages.prices, stages.prices.evaluator.job.model.layers
    kinds = prices.evaluator.job.model.kind_of_layer
    alone = [
        [prices.choices(position, kind, False, False, None) for kind in kinds]
        for position in range(prices.stages)
    ]
    runs = sum(np.where(np.isfinite(one.t_s), 0.0, np.inf) for one in alone[0]) + stages.allowed
    cells = [tuple(cell) for cell in np.argwhere(np.isfinite(runs)).tolist()]
    if not cells:
        return [even(layers, prices.stages)]
    cell = min(cells, key=lambda one: (one[1], -prices.rows[one[0]].dp))
    first, last = (
        prices.choices(position, kinds[at], begins, not begins, None)
        for position, at, begins in ((0, 0, True), (prices.stages - 1, -1, False))
    )
    splits = [even(layers, prices.stages)]
    for name in ("forward_bytes", "t_s"):
        sums = [[0.0, *accumulate(float(getattr(one, name)[cell]) for one in position)] for position in alone]
        ends = [
            float(getattr(end, name)[cell] - getattr(alone[place][at], name)[cell])
            for end, place, at in ((first, 0, 0), (last, -1, -1))
        ]

        def size(
            position: int, start: int, end: int, sums: list[list[float]] = sums, ends: list[float] = ends
        ) -> float:
            edges = ends[0] * (position == 0) + ends[1] * (position == prices.stages - 1)
            return sums[position][end] - sums[position][start] + edges

        splits.append(balanced(size, layers, prices.stages))
    return splits


def moved(split: Split, slowest: int) -> Iterator[Split]:
    """One layer of the slowest stage on a neighbour."""
    for neighbour in (slowest - 1, slowest + 1):
        if 0 <= neighbour < len(split) and split[slowest] > 1:
            counts = list(split)
            counts[slowest] -= 1
            counts[neighbour] += 1
            yield tuple(counts)


def heuristic(stages: Stages) -> Iterator[Candidate]:
    """Every split that the queue comes to."""
    even_split, by_memory, by_time = (*starts(stages), *starts(stages))[:3]
    queue = list(dict.fromkeys((even_split, by_memory, by_time)))
    seen = set(queue)
    timed = stages.candidate(by_time)
    most_bytes = max((point.peak_bytes for point in timed.points), default=np.inf) if timed else np.inf
    while queue:
        split = queue.pop(0)
        candidate = stages.candidate(split)
        if candidate is None:
            continue
        yield candidate
        times = [point.t_s for point in candidate.points]
        slowest = int(np.argmax(times))
        for other in moved(split, slowest):
            if other in seen:
                continue
            seen.add(other)
            points = stages.points(other)
            if points is None or max(point.t_s for point in points) > times[slowest]:
                continue
            if max(point.peak_bytes for point in points) <= most_bytes:
                queue.append(other)


@dataclass(frozen=True)
class _End:
    """Stages from one on to the last: their time, eq. 1's second part, and their slowest."""

    sum_s: float
    late_s: float
    slowest_s: float
    split: Split


def exact(stages: Stages) -> Candidate | None:
    """The best of all splits by eq. 1, from the last stage to the first: of all ends from a layer on those
    are kept that no other beats in all that stages before add to."""
    prices = stages.prices
    layers, others = prices.evaluator.job.model.layers, prices.grad_accum - 1
    nothing = _End(
        sum_s=0.0,
        late_s=-np.inf,
        slowest_s=0.0,
        split=(),
    )
    ends: dict[int, list[_End]] = {layers: [nothing]}
    for position in reversed(range(prices.stages)):
        behind = prices.stages - 1 - position
        made: dict[int, list[_End]] = {}
        firsts = range(position, layers - behind) if position else range(1)
        for first in firsts:
            reached: list[_End] = []
            for after in range(first + 1, layers - behind + 1):
                if after not in ends:
                    continue
                point = stages.point(position, first, after - first)
                if point is None:
                    continue
                for end in ends[after]:
                    sum_s = point.t_s + end.sum_s
                    late_s = max(point.d_s + sum_s, end.late_s)
                    split = (after - first, *end.split)
                    reached.append(_End(sum_s, late_s, max(point.t_s, end.slowest_s), split))
            made[first] = _front(reached)
        ends = made
    best = min(ends[0], key=lambda end: others * end.slowest_s + end.late_s, default=None)
    return None if best is None else stages.candidate(best.split)


def _front(ends: list[_End]) -> list[_End]:
    """Those that no other beats."""
    kept: list[_End] = []
    for end in sorted(ends, key=lambda one: (one.slowest_s, one.late_s, one.sum_s)):
        if not any(other.late_s <= end.late_s and other.sum_s <= end.sum_s for other in kept):
            kept.append(end)
    return kept


def pipelines(
    evaluator: StageEvaluator,
    rules: LayerRules,
    allows: Callable[[str, int], bool],
    priced: Callable[[int, int], StrategyPrices],
) -> list[tuple[float, StrategyPrices, Array]]:
    """Numbers of stages and of micro-batches of a space, with what no plan of them beats, the least first."""
    job, kept = evaluator.job, []
    for count in rules.stages(job.cluster.gpus):
        if count > job.model.layers or not allows("pp", count):
            continue
        for grad_accum in range(1, job.training.global_batch + 1):
            if job.training.global_batch % grad_accum or not allows("grad_accum", grad_accum):
                continue
            prices = priced(count, grad_accum)
            allowed = allowed_cells(prices, rules, allows)
            if np.isfinite(allowed).any():
                kept.append((prices.least_s(allowed), prices, allowed))
    return sorted(kept, key=lambda one: one[0])


def candidates(
    ordered: Sequence[tuple[float, StrategyPrices, Array]],
    rules: LayerRules,
    *,
    solve_exactly: bool,
) -> Iterator[tuple[Stages, Candidate]]:
    """Solved pipelines of a space, but for those that cannot be near the best."""
    best_s = np.inf
    for least_s, prices, allowed in ordered:
        if least_s > NEAR * best_s:
            break
        rows = [row for row in range(len(prices.rows)) if np.isfinite(allowed[row]).any()]
        joined = rows if prices.stages > 1 and len(rows) > 1 else []
        # Borders between layouts are not priced where layers differ in what they give.
        free = [None] if prices.evaluator.job.model.alike or not joined else []
        least_free_s = 0.0
        for border in (*free, *joined):
            if border is not None and least_free_s > NEAR * best_s:
                break
            stages = Stages(prices, allowed, border)
            if prices.stages == 1 or not rules.balanced:
                one = stages.candidate(even(prices.evaluator.job.model.layers, prices.stages))
                splits = [one] if one else []
            else:
                splits = list(heuristic(stages))
                best = exact(stages) if solve_exactly else None
                splits += [best] if best else []
            for candidate in splits:
                best_s = min(best_s, candidate.value_s)
                yield stages, candidate
            if border is None:
                # With one layout at all borders no split takes less.
                least_free_s = min((candidate.value_s for candidate in splits), default=np.inf)
