"""Shapes and mixed families in order of promise, bounded as far as they are asked for.

Where a search before this one left bounds, an item is first at its place by these; only when its turn comes
is it looked at: whether it may fit at all, and what its own bound is.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from mist_megatron.search import node_groups
from mist_megatron.search.bounds import (
    EqualBound,
    SearchProblem,
    least_recompute,
    shape_bounds,
)
from mist_megatron.search.families import MixedFamily, possible_mixtures
from mist_megatron.search.infeasible import possible_of
from mist_megatron.search.kind_bounds import bounds_of_kinds
from mist_megatron.search.kind_room import may_fit
from mist_megatron.search.known import Item, Known, KnownBounds, floors
from mist_megatron.search.layer_floors import LayerFloors
from mist_megatron.search.leaders import Led
from mist_megatron.search.mixed import MixedBound, mixture_bounds
from mist_megatron.search.pipelines import EqualPipeline, Family
from mist_megatron.search.room import rooms, with_room
from mist_megatron.search.spread import Rival, SpreadShapes
from mist_megatron.spec.recompute import PARTIAL

Bound = EqualBound | MixedBound
Pair = tuple[Bound, Item]
Raised = Callable[[Sequence[Item]], Sequence[float]]
"""Seconds that no plan of each beats."""
Floored = tuple[float, Item]
Hand = Callable[[Sequence[Floored]], None]
"""What does not fit in a way, and seconds that no plan of it beats."""


class Seen(NamedTuple):
    """Items that were looked at."""

    fit: Sequence[Pair]
    """Those that may fit, with their bounds."""
    short: Sequence[Floored] = ()
    """Those of which something does not fit, and seconds that no plan of that beats."""


Bounded = Callable[[Sequence[Item]], Seen]


class Look(NamedTuple):
    """How a queue looks at items, and who takes what does not fit, if anybody does."""

    bounded: Bounded
    hand: Hand | None = None


AT_ONCE, WIDER = 1.05, 2.0
"""Items whose floors are so near the least are looked at in one batch, and further on each time that was not
enough: floors far below the bounds must not cost a call for each few of them. Not further than what is next
in another way of execution, but for the first such step: a call costs more than the items it may spare."""
MOST_DIVES, DIVE = 4, 1.25
"""Items that are given before there is a plan, each of the way that promises most, whatever others may have:
a plan spares looks at these. None that takes so many times what the first may take at least, or more. Where
there are no experts a look costs less than the plans (Llama 3 70B on 64 GPUs: 8 % of the search)."""
SURE = 1.25
"""Of models with experts most of what is so near a plan is looked at anyhow, in more and smaller calls."""
FAR = 1.5
"""Bounds are so many times floors where links are slow, which floors know nothing of."""
PATIENCE = 1.1
"""Shapes are handed on one by one: what waits for others is looked at together with them."""


class ShapeBounds:
    """Bounds of the shapes of a way, each told once, and which of them may fit."""

    def __init__(self, question: SearchProblem, known: KnownBounds | None = None) -> None:
        """`known`: what other ways of the search know by then."""
        self._question, self.known = question, known or KnownBounds()
        self._of: dict[Item, Pair] = {}

    def __call__(self, items: Sequence[Item]) -> Seen:
        """Of those that may fit."""
        fit = possible_of(self._question, [item for item in items if isinstance(item, EqualPipeline)])
        fitting = set(fit)
        return Seen(self._pairs(fit), [(0.0, item) for item in items if item not in fitting])

    def told(self, items: Sequence[Item], most_s: float) -> list[float]:
        """Seconds that no plan of each beats, whether it fits or not. Where other ways tell more than
        `most_s`, this one is not asked."""
        least_s = floors(self._question, items, self.known)
        wanted = [item for item, each_s in zip(items, least_s, strict=True) if each_s < most_s]
        bounds = {item: bound.value_s for bound, item in self._pairs(wanted)}
        return [bounds.get(item, each_s) for item, each_s in zip(items, least_s, strict=True)]

    def _pairs(self, items: Sequence[Item]) -> list[Pair]:
        new = [item for item in items if item not in self._of]
        self._of.update((item, (bound, item)) for bound, item in _of_shapes(self._question, new))
        return [self._of[item] for item in items]


class Queue:
    """Items of one kind."""

    near, at_once, wider, patience, sure = AT_ONCE, AT_ONCE, WIDER, 1.0, 1.0
    """`patience`: items of other queues go first whose bounds are less than so many times those here. `sure`:
    where a plan takes less than so many times the least floor, all that may beat it is looked at."""
    head_s = 0.0
    """The bound of the next item is no less, as far as is known: of many ways few may have the next."""

    def __init__(
        self,
        items: Sequence[Item],
        least_s: Sequence[float],
        look: Look,
        raised: Raised | None = None,
    ) -> None:
        self._bounded, self._hand, self._raised = look.bounded, look.hand, raised
        """`raised`: what is asked for better floors before anything is looked at."""
        self._floors = dict(zip(items, least_s, strict=True))
        self._place = {item: index for index, item in enumerate(items)}
        self._open = list(items)
        """Not looked at yet, the least floor last."""
        self._sort()
        self._ready: list[tuple[float, int, Pair]] = []
        self.given = 0
        if look.hand is None:
            # Else what does not fit is handed on, which a search is not ready for before it has all queues.
            self._look(0.0)

    def _sort(self) -> None:
        self._open.sort(key=lambda item: -self._floors[item])

    def _raise_of(self, items: Sequence[Item], least_s: Sequence[float]) -> None:
        for item, each_s in zip(items, least_s, strict=True):
            self._floors[item] = max(self._floors[item], each_s)

    def __len__(self) -> int:
        """Items that are not known not to fit."""
        return len(self._open) + len(self._ready)

    def _floor_s(self) -> float | None:
        """The least floor of what was not looked at; None where that is all."""
        return self._floors[self._open[-1]] if self._open else None

    def _look(self, limit_s: float, most_s: float = math.inf) -> None:
        """At all items whose floors are no larger than that. Where these are far below bounds, bounds are
        told first: few of them are as low, and to ask of all whether they fit takes longer."""
        count = 0
        while count < len(self._open) and self._floors[self._open[-1 - count]] <= limit_s:
            count += 1
        if not count:
            return
        batch = sorted(self._open[-count:], key=self._place.__getitem__)
        shapes = self._bounded if isinstance(self._bounded, ShapeBounds) else None
        if shapes is not None and shapes.known.far:
            wanted_s = most_s if most_s < math.inf else limit_s * (1 + 1e-12)
            self._raise_of(batch, shapes.told(batch, wanted_s))
            batch = [item for item in batch if self._floors[item] < wanted_s]
            self._sort()
        seen = self._bounded(batch) if batch else Seen(())
        known_s = {item: self._floors[item] for item in batch}
        for bound, item in seen.fit:
            if shapes is not None and bound.value_s > FAR * self._floors[item]:
                shapes.known.far = True
            value_s = self._floors[item] = max(self._floors[item], bound.value_s)
            entry = value_s, self._place[item], (replace(bound, value_s=value_s), item)
            insort(self._ready, entry, lo=self.given, key=lambda entry: entry[:2])
        self._hand_on(seen.short, known_s)
        # Not before: what ends the search in between leaves them open.
        looked_at = set(batch)
        self._open = [item for item in self._open if item not in looked_at]

    def _hand_on(self, short: Sequence[Floored], known_s: Mapping[Item, float]) -> None:
        """What of an item is short of memory takes no less than what was known of all of it."""
        if self._hand is not None:
            self._hand([(max(each_s, known_s[item]), item) for each_s, item in short])

    def at(self, position: int, limit_s: float = float("inf"), most_s: float = float("inf")) -> Pair | None:
        """The item at a place of the order; None where it, or what might be there, is not below the limit.
        What is not below `most_s` is of no use to anybody: more than that is never looked at."""
        while (floor_s := self._floor_s()) is not None:
            ahead_s = self._ready[position][0] if position < len(self._ready) else math.inf
            if ahead_s < floor_s or floor_s >= limit_s:
                break
            if self._raised is not None:
                self._raise_of(self._open, self._raised(self._open))
                self._sort()
                self._raised = None
                continue
            next_s = max(floor_s * self.near, min(limit_s, ahead_s))
            wide_s = math.inf if most_s <= floor_s * self.sure else min(floor_s * self.at_once, next_s)
            self._look(max(floor_s, min(wide_s, most_s)), most_s)
            self.at_once = min(self.at_once**self.wider, 2.0)
        if position < len(self._ready) and self._ready[position][0] < limit_s:
            return self._ready[position][2]
        return None

    def promise_s(self) -> float:
        """The least that anything which was not given yet may take, as far as is known."""
        ready = self._ready[self.given : self.given + 1]
        floor_s = self._floor_s()
        return min(math.inf if floor_s is None else floor_s, *(value_s for value_s, _, _ in ready), math.inf)

    def head(self, limit_s: float, most_s: float) -> Pair | None:
        """The next item, where it is below the limit."""
        if self.head_s >= limit_s:
            return None
        pair = self.at(self.given, limit_s, most_s)
        self.head_s = max(self.head_s, limit_s if pair is None else pair[0].value_s)
        return pair

    def next(self, limit_s: float) -> Pair | None:
        """The most promising item that was not given yet."""
        pair = self.at(self.given, limit_s)
        self.given += pair is not None
        return pair

    def besides(self, wanted: Callable[[Item], bool], limit_s: float, most: int) -> list[Pair]:
        """More items that were looked at, of those that are wanted and below a limit; they count as given."""
        end = bisect_left(self._ready, limit_s, lo=self.given, key=lambda entry: entry[0])
        some = [place for place in range(self.given, end) if wanted(self._ready[place][2][1])][:most]
        entries = [self._ready.pop(place) for place in reversed(some)][::-1]
        self._ready[self.given : self.given] = entries
        self.given += len(entries)
        return [pair for _, _, pair in entries]

    def below(self, limit_s: float) -> list[Pair]:
        """All items below a limit, given or not."""
        self._look(limit_s)
        return [pair for _, _, pair in self._ready[: bisect_left(self._ready, limit_s, key=lambda e: e[0])]]

    def left_s(self) -> list[float]:
        """Bounds of what was not given yet."""
        return [value_s for value_s, _, _ in self._ready[self.given :]] + [
            self._floors[i] for i in self._open
        ]

    def known(self) -> dict[Item, float]:
        """Seconds that no plan of an item beats: as they are now, and later."""
        return self._floors


class HandedQueue(Queue):
    """Shapes that did not fit in a faster way of execution, as they are found."""

    patience, sure = PATIENCE, SURE

    def __init__(self, look: Look) -> None:
        super().__init__([], [], look)

    def add(self, items: Iterable[tuple[float, Item]]) -> None:
        """Items, and seconds that no plan of each beats."""
        for floor_s, item in items:
            if item not in self._place:
                self._place[item] = len(self._place)
                self._open.append(item)
            self._floors[item] = min(floor_s, self._floors.get(item, floor_s))
            self.head_s = min(self.head_s, floor_s)
        self._sort()

    def known(self) -> dict[Item, float]:
        """Nothing: what was handed on takes so long only beside the way in which it does not fit."""
        return {}


class SpreadQueue(Queue):
    """Shapes of models with experts, which are made when their bound is the least."""

    near, at_once, wider, sure = 1.1, 1.1, 1.0, SURE

    def __init__(self, shapes: Callable[[], SpreadShapes], look: Look, count: int, led: Led | None) -> None:
        self._made, self._count = shapes, count
        self._least_s = led.computed_s if led is not None else 0.0 if count else math.inf
        self._led = led
        """None when all that it tells was asked for."""
        self._shapes: SpreadShapes | None = None
        """None until something below that least may be wanted."""
        super().__init__([], [], look)

    def __len__(self) -> int:
        return self._count if self._shapes is None else len(self._shapes) + len(self._ready)

    def _floor_s(self) -> float | None:
        if self._shapes is None:
            return self._least_s if math.isfinite(self._least_s) else None
        left_s = self._shapes.left_s
        return float(left_s[0]) if len(left_s) else None

    def _look(self, limit_s: float, most_s: float = math.inf) -> None:
        if self._shapes is None:
            if self._led is not None and limit_s >= self._least_s:
                self._least_s, self._led = max(self._least_s, self._led.least_s()), None
            if limit_s < self._least_s or math.isinf(self._least_s):
                return
            self._shapes = self._made()
            limit_s = min([limit_s, *(s * self.sure for s in self._shapes.left_s[:1])])
        batch = self._shapes.below(limit_s)
        least_s: dict[Item, float] = {shape: floor_s for floor_s, shape in batch}
        seen = self._bounded([shape for _, shape in batch])
        for bound, item in seen.fit:
            pair = replace(bound, value_s=max(bound.value_s, least_s[item])), item
            entry = pair[0].value_s, len(self._ready), pair
            insort(self._ready, entry, lo=self.given, key=lambda entry: entry[:2])
        self._hand_on(seen.short, least_s)
        self._shapes.take(limit_s)

    def left_s(self) -> list[float]:
        left_s = [self._least_s] if self._shapes is None else list(self._shapes.left_s)
        return [value_s for value_s, _, _ in self._ready[self.given :]] + left_s

    def known(self) -> dict[Item, float]:
        return {item: value_s for value_s, _, (_, item) in self._ready}


class Order:
    """The items of one way of execution: shapes, and mixed families."""

    def __init__(self, *queues: Queue) -> None:
        self.queues = queues

    def __len__(self) -> int:
        return sum(map(len, self.queues))

    def left_s(self) -> list[float]:
        return [value_s for queue in self.queues for value_s in queue.left_s()]

    def known(self, question: SearchProblem, solved: Mapping[Item, float] | None = None) -> Known:
        """For searches after this one, and other ways of this one: it grows as more is looked at."""
        bounds = ChainMap(*(queue.known() for queue in self.queues))
        job, space = question.evaluator.job, question.space
        return Known(job=job, space=space, step=question.step, bounds=bounds, solved=solved or {})


def _of_shapes(question: SearchProblem, items: Sequence[Item]) -> list[Pair]:
    """Whether they fit or not."""
    shapes = [item for item in items if isinstance(item, EqualPipeline)]
    return list(zip(shape_bounds(question, shapes), shapes, strict=True))


Bounds = dict[EqualPipeline, EqualBound]
"""Of shapes whose layers run nothing again: ways that differ in what they do run again share them."""


def _of_alike(question: SearchProblem, bounds: Bounds, handed: bool, items: Sequence[Item]) -> Seen:
    """Of models with experts, with what must be recomputed where stages are alike. `handed`: whether anything
    comes after these."""
    if question.space.per_stage:
        return ShapeBounds(question)(items)
    shapes = [item for item in items if isinstance(item, EqualPipeline)]
    added_s = rooms(question, shapes)
    if least_recompute(question.space) in PARTIAL:
        bounds = {}  # of what they run again
    if not handed:
        shapes = [shape for shape in shapes if np.isfinite(added_s[shape]).any()]
    new = [shape for shape in shapes if shape not in bounds]
    bounds.update(zip(new, shape_bounds(question, new), strict=True))
    return Seen(*with_room(question, [(bounds[shape], shape) for shape in shapes], added_s))


def _of_kinds(question: SearchProblem, items: Sequence[Item]) -> Seen:
    """Shapes of a model whose layers differ. Which of them do not fit as they are is told at once, and no
    time is asked of these: what was known of them is hardly less. Of others it is seen when they are
    solved."""
    shapes = [item for item in items if isinstance(item, EqualPipeline)]
    here = may_fit(question, shapes).tolist()
    fit = [shape for shape, fits in zip(shapes, here, strict=True) if fits]
    short = [(0.0, shape) for shape, fits in zip(shapes, here, strict=True) if not fits]
    return Seen(list(zip(bounds_of_kinds(question, fit), fit, strict=True)), short)


def _of_groups(question: SearchProblem, items: Sequence[Item]) -> Seen:
    """Shapes on nodes of several kinds."""
    shapes = [item for item in items if isinstance(item, EqualPipeline)]
    fit = node_groups.possible_of(question, shapes)
    return Seen(list(zip(node_groups.bounds_of(question, fit), fit, strict=True)))


def ordered_spread(
    question: SearchProblem,
    families: Sequence[Family],
    keeps: Callable[[EqualPipeline], bool],
    look: Look | None = None,
    rivals: Sequence[Rival] = (),
    led: Led | None = None,
) -> Order:
    """The same of models with experts, spread in every way; a leader says what no plan takes less than, and
    keeps floors."""
    floors_s = None if led is None else led.floors
    look = look or look_of(question)
    shapes = partial(SpreadShapes, question, families, keeps, rivals, floors_s)
    count = sum(len(spreads) for _, spreads in families)
    return Order(SpreadQueue(shapes, look, count, led), Queue([], [], Look(no_items)))


def of_possible(least: SearchProblem | None, look: Look) -> Look:
    """Of shapes that may fit in the way of execution that holds least, where that is asked for."""
    if least is None or len(least.evaluator.job.model.kinds) > 1:
        return look
    return look._replace(bounded=partial(_of_possible, least, look.bounded))


def _of_possible(least: SearchProblem, bounded: Bounded, items: Sequence[Item]) -> Seen:
    return bounded(possible_of(least, [item for item in items if isinstance(item, EqualPipeline)]))


def no_items(items: Sequence[Item]) -> Seen:
    """Bounds of nothing."""
    return Seen(())


def look_of(question: SearchProblem, bounds: Bounds | None = None, hand: Hand | None = None) -> Look:
    """At shapes; of models with experts `hand` takes what does not fit with nothing run again."""
    if len(question.evaluator.job.model.kinds) > 1:
        return Look(partial(_of_kinds, question), hand)
    if question.evaluator.job.model.routed is None:
        return Look(ShapeBounds(question))
    return Look(partial(_of_alike, question, {} if bounds is None else bounds, hand is not None), hand)


def ordered(
    question: SearchProblem,
    pipelines: Sequence[EqualPipeline],
    mixed: Sequence[MixedFamily],
    known: KnownBounds,
    layers: LayerFloors,
    hand: Hand | None = None,
) -> Order:
    """All of these that may fit; `hand` takes shapes that do not."""
    if question.evaluator.groups:
        look = Look(partial(_of_groups, question))
        return Order(Queue(pipelines, [0.0] * len(pipelines), look), Queue([], [], Look(no_items)))
    if len(question.evaluator.job.model.kinds) > 1:
        look = look_of(question, hand=hand)
        return Order(Queue(pipelines, [0.0] * len(pipelines), look), Queue([], [], Look(no_items)))

    def of_mixtures(items: Sequence[Item]) -> Seen:
        fit = [item for item in items if isinstance(item, MixedFamily)]
        return Seen(list(zip(mixture_bounds(question, fit), fit, strict=True)))

    least_s, of_layers = floors(question, pipelines, known), partial(_of_layers, question, layers)
    at_once = not all(least_s)
    if at_once:
        # Ways after this one know of these.
        least_s = list(map(max, least_s, of_layers(pipelines)))
    look = Look(ShapeBounds(question, known), hand)
    equal = Queue(pipelines, least_s, look, None if at_once else of_layers)
    if not len(equal):
        mixed = possible_mixtures(question, mixed)
    return Order(equal, Queue(mixed, floors(question, mixed, known), Look(of_mixtures)))


def _of_layers(question: SearchProblem, layers: LayerFloors, items: Sequence[Item]) -> list[float]:
    """What the layers of shapes take."""
    return layers.of(question, [item for item in items if isinstance(item, EqualPipeline)])
