"""Shapes and mixed families in order of promise, bounded as far as they are asked for.

Where a search before this one left bounds, an item is first at its place by these; only when its turn comes
is it looked at: whether it may fit at all, and what its own bound is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import merge

import numpy as np

from mist_megatron.search import node_groups
from mist_megatron.search.bounds import EqualBound, LeastTimes, SearchProblem, shape_bounds
from mist_megatron.search.families import MixedFamily, possible_mixtures
from mist_megatron.search.infeasible import possible_of
from mist_megatron.search.kinds import least_step_s
from mist_megatron.search.known import Item, Known, floors
from mist_megatron.search.mixed import MixedBound, mixture_bounds
from mist_megatron.search.pipelines import EqualPipeline, Family
from mist_megatron.search.room import with_room
from mist_megatron.search.spread import SpreadShapes

Bound = EqualBound | MixedBound
Pair = tuple[Bound, Item]
Bounded = Callable[[Sequence[Item]], Sequence[Pair]]
"""Items that may fit, with their bounds."""

AT_ONCE = 1.02
"""Items whose floors are so near the least are looked at in one batch."""


class Queue:
    """Items of one kind."""

    at_once = AT_ONCE

    def __init__(self, items: Sequence[Item], least_s: Sequence[float], bounded: Bounded) -> None:
        self._bounded = bounded
        self._floors = dict(zip(items, least_s, strict=True))
        self._place = {item: index for index, item in enumerate(items)}
        self._open = sorted(items, key=lambda item: -self._floors[item])
        """Not looked at yet, the least floor last."""
        self._ready: list[tuple[float, int, Pair]] = []
        self.given = 0
        self._look(0.0)

    def __len__(self) -> int:
        """Items that are not known not to fit."""
        return len(self._open) + len(self._ready)

    def _floor_s(self) -> float | None:
        """The least floor of what was not looked at; None where that is all."""
        return self._floors[self._open[-1]] if self._open else None

    def _look(self, limit_s: float) -> None:
        """At all items whose floors are no larger than that."""
        count = 0
        while count < len(self._open) and self._floors[self._open[-1 - count]] <= limit_s:
            count += 1
        if not count:
            return
        batch = sorted(self._open[-count:], key=self._place.__getitem__)
        for bound, item in self._bounded(batch):
            entry = bound.value_s, self._place[item], (bound, item)
            insort(self._ready, entry, key=lambda entry: entry[:2])
        # Not before: what ends the search in between leaves them open.
        del self._open[-count:]

    def at(self, position: int, limit_s: float = float("inf")) -> Pair | None:
        """The item at a place of the order; None where it, or what might be there, is not below the limit."""
        while (floor_s := self._floor_s()) is not None:
            known = position < len(self._ready) and self._ready[position][0] < floor_s
            if known or floor_s >= limit_s:
                break
            self._look(min(floor_s * self.at_once, limit_s))
        if position < len(self._ready) and self._ready[position][0] < limit_s:
            return self._ready[position][2]
        return None

    def next(self, limit_s: float) -> Pair | None:
        """The most promising item that was not given yet."""
        pair = self.at(self.given, limit_s)
        self.given += pair is not None
        return pair

    def below(self, limit_s: float) -> list[Pair]:
        """All items below a limit, given or not."""
        self._look(limit_s)
        return [pair for _, _, pair in self._ready[: bisect_left(self._ready, limit_s, key=lambda e: e[0])]]

    def left_s(self) -> list[float]:
        """Bounds of what was not given yet."""
        return [value_s for value_s, _, _ in self._ready[self.given :]] + [
            self._floors[i] for i in self._open
        ]

    def known(self) -> Mapping[Item, float]:
        """Seconds that no plan of an item beats."""
        return {**self._floors, **{item: value_s for value_s, _, (_, item) in self._ready}}


class SpreadQueue(Queue):
    """Shapes of models with experts, which are made when their bound is the least."""

    at_once = 1.1

    def __init__(self, shapes: SpreadShapes, bounded: Bounded) -> None:
        self._shapes = shapes
        super().__init__([], [], bounded)

    def __len__(self) -> int:
        return len(self._shapes) + len(self._ready)

    def _floor_s(self) -> float | None:
        left_s = self._shapes.left_s
        return float(left_s[0]) if len(left_s) else None

    def _look(self, limit_s: float) -> None:
        batch = self._shapes.below(limit_s)
        least_s = {shape: floor_s for floor_s, shape in batch}
        for bound, item in self._bounded([shape for _, shape in batch]):
            assert isinstance(item, EqualPipeline)
            pair = replace(bound, value_s=max(bound.value_s, least_s[item])), item
            insort(self._ready, (pair[0].value_s, len(self._ready), pair), key=lambda entry: entry[:2])
        self._shapes.take(limit_s)

    def left_s(self) -> list[float]:
        return [value_s for value_s, _, _ in self._ready[self.given :]] + list(self._shapes.left_s)

    def known(self) -> Mapping[Item, float]:
        return {item: value_s for value_s, _, (_, item) in self._ready}


class Order:
    """The items of one way of execution: shapes, and mixed families."""

    def __init__(self, *queues: Queue) -> None:
        self.queues = queues

    def __len__(self) -> int:
        return sum(map(len, self.queues))

    def below(self, limit_s: float) -> list[Pair]:
        return [pair for queue in self.queues for pair in queue.below(limit_s)]

    def left_s(self) -> list[float]:
        return [value_s for queue in self.queues for value_s in queue.left_s()]

    def known(self, question: SearchProblem, solved: Mapping[Item, float] | None = None) -> Known:
        """For searches after this one."""
        bounds: dict[Item, float] = {}
        for queue in self.queues:
            bounds.update(queue.known())
        job, space = question.evaluator.job, question.space
        return Known(job=job, space=space, step=question.step, bounds=bounds, solved=solved or {})


class Orders:
    """Those of all ways. Equal stages go before unequal ones: they are the quicker to solve, and what they
    find prunes the others."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self.orders = orders
        self._levels = list(zip(*(order.queues for order in orders), strict=True))
        self.done = 0
        """Items that were given or passed over."""

    def __len__(self) -> int:
        return sum(map(len, self.orders))

    def next(self, limit_s: float) -> tuple[int, Pair] | None:
        """The next item whose bound is below a limit, and which way it is of."""
        self.done = 0
        for queues in self._levels:
            found: int | None = None
            least_s = limit_s
            for way, queue in enumerate(queues):
                pair = queue.at(queue.given, least_s)
                if pair is not None:
                    found, least_s = way, pair[0].value_s
            self.done += sum(queue.given for queue in queues)
            if found is not None:
                pair = queues[found].next(limit_s)
                assert pair is not None
                return found, pair
            self.done += sum(len(queue) - queue.given for queue in queues)
        return None

    def __iter__(self) -> Iterator[tuple[int, Pair]]:
        """All that may fit."""

        def each(way: int, queue: Queue) -> Iterator[tuple[int, Pair]]:
            position = 0
            while (pair := queue.at(position)) is not None:
                yield way, pair
                position += 1

        for queues in self._levels:
            yield from merge(
                *(each(way, queue) for way, queue in enumerate(queues)), key=lambda found: found[1][0].value_s
            )

    def left_s(self) -> list[float]:
        return [value_s for order in self.orders for value_s in order.left_s()]


def _of_shapes(question: SearchProblem, items: Sequence[Item]) -> list[Pair]:
    fit = possible_of(question, [item for item in items if isinstance(item, EqualPipeline)])
    return list(zip(shape_bounds(question, fit), fit, strict=True))


def _of_alike(question: SearchProblem, items: Sequence[Item]) -> list[Pair]:
    """Of models with experts, with what must be recomputed where stages are alike."""
    pairs = _of_shapes(question, items)
    if question.space.per_stage:
        return pairs
    alike = [(bound, item) for bound, item in pairs if isinstance(item, EqualPipeline)]
    return list(with_room(question, [(b, item) for b, item in alike if isinstance(b, EqualBound)]))


def _of_kinds(question: SearchProblem, items: Sequence[Item]) -> list[Pair]:
    """Shapes of a model whose layers differ: whether they fit is seen when they are solved."""
    nothing = LeastTimes(np.zeros(1), np.zeros(1), np.zeros(1))
    equal = [item for item in items if isinstance(item, EqualPipeline)]
    return [
        (EqualBound(least_step_s(question, item), 0.0, 0.0, (nothing, nothing, nothing)), item)
        for item in equal
    ]


def _of_groups(question: SearchProblem, items: Sequence[Item]) -> list[Pair]:
    """Shapes on nodes of several kinds."""
    shapes = [item for item in items if isinstance(item, EqualPipeline)]
    fit = node_groups.possible_of(question, shapes)
    return list(zip(node_groups.bounds_of(question, fit), fit, strict=True))


def ordered_spread(
    question: SearchProblem, found: Sequence[Family], keeps: Callable[[EqualPipeline], bool]
) -> Order:
    """The same of models with experts, spread in every way."""
    bounded = partial(_of_kinds if len(question.evaluator.job.model.kinds) > 1 else _of_alike, question)
    shapes = SpreadShapes(question, [family for family in found if keeps(family[0])], keeps)
    return Order(SpreadQueue(shapes, bounded), Queue([], [], bounded))


def ordered(
    question: SearchProblem,
    found: Sequence[EqualPipeline],
    mixed: Sequence[MixedFamily],
    known: Sequence[Known],
) -> Order:
    """All of these that may fit."""
    if question.evaluator.groups:
        bounded = partial(_of_groups, question)
        return Order(Queue(found, [0.0] * len(found), bounded), Queue([], [], bounded))
    if len(question.evaluator.job.model.kinds) > 1:
        bounded = partial(_of_kinds, question)
        return Order(Queue(found, [0.0] * len(found), bounded), Queue([], [], bounded))

    def of_mixtures(items: Sequence[Item]) -> list[Pair]:
        fit = [item for item in items if isinstance(item, MixedFamily)]
        return list(zip(mixture_bounds(question, fit), fit, strict=True))

    equal = Queue(found, floors(question, found, known), partial(_of_shapes, question))
    if not len(equal):
        mixed = possible_mixtures(question, mixed)
    return Order(equal, Queue(mixed, floors(question, mixed, known), of_mixtures))
