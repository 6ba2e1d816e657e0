"""The queues of all ways of execution as one order of promise: which item is next, and of which way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from mist_megatron.search.known import Item
from mist_megatron.search.queue import DIVE, MOST_DIVES, Order, Pair, Queue


class Orders:
    """Those of all ways. Equal stages go before unequal ones: they are the quicker to solve, and what they
    find prunes the others."""

    def __init__(self, orders: list[Order], *, dives: bool = False) -> None:
        self.orders = orders
        self._levels = [list(queues) for queues in zip(*(order.queues for order in orders), strict=True)]
        self._level = 0
        """Of the queues that gave the last item."""
        self._told_s = 0.0
        self._dives = MOST_DIVES if dives else 0
        """That are left."""

    def __len__(self) -> int:
        return sum(map(len, self.orders))

    def append(self, order: Order) -> None:
        """One more way, for what was found not to fit in another."""
        self.orders.append(order)
        for queues, queue in zip(self._levels, order.queues, strict=True):
            queues.append(queue)

    def next(self, limit_s: float) -> tuple[int, Pair] | None:
        """The next item whose bound is below a limit, and which way it is of."""
        for level, queues in enumerate(self._levels):
            least = self._promising(queues) if limit_s == math.inf else None
            if least is None:
                least = self._least(queues, limit_s)
            if least is None:
                least = self._least(queues, limit_s, patient=False)
            if least is not None:
                self._level = level
                pair = queues[least].next(limit_s)
                assert pair is not None
                return least, pair
        self._level = len(self._levels)
        return None

    def besides(self, way: int, wanted: Callable[[Item], bool], limit_s: float, most: int) -> list[Pair]:
        """More of the queue that gave the last item, which is of that way."""
        queue: Queue = self._levels[self._level][way]
        return queue.besides(wanted, limit_s, most)

    def _promising(self, queues: Sequence[Queue]) -> int | None:
        """Which queue to ask first, while there is no plan."""
        if not self._dives or len(queues) == 1:
            return None
        self._dives -= 1
        promises_s = [queue.promise_s() for queue in queues]
        limit_s = DIVE * min(promises_s)
        for way in sorted(range(len(queues)), key=promises_s.__getitem__)[:MOST_DIVES]:
            if queues[way].head(limit_s, limit_s) is not None:
                return way
        return None

    @staticmethod
    def _least(queues: Sequence[Queue], limit_s: float, *, patient: bool = True) -> int | None:
        """Which queue has the next item below a limit; patient ones only where it is far below others'."""
        least: int | None = None
        least_s = limit_s
        for way, queue in enumerate(queues):
            pair = queue.head(least_s / queue.patience if patient else least_s, limit_s)
            if pair is not None:
                least, least_s = way, pair[0].value_s
        return least

    def tell(self, progress: Callable[[int, int, float], None], solved: int, best_s: float) -> None:
        """How many items were given or passed over, of how many: when there is a better plan, and else as
        often as is no burden, since those of many ways take long to count."""
        if best_s != self._told_s or solved % (1 + len(self.orders) // 32) == 0:
            self._told_s = best_s
            done = sum(len(queue) for queues in self._levels[: self._level] for queue in queues)
            for queues in self._levels[self._level : self._level + 1]:
                done += sum(queue.given for queue in queues)
            progress(done, len(self), best_s)

    def __iter__(self) -> Iterator[tuple[int, Pair]]:
        """All that may fit, none of them given. Ways that begin with nothing better are not looked at."""
        for queues in self._levels:
            positions, heads_s = [0] * len(queues), [0.0] * len(queues)
            while True:
                best: tuple[int, Pair] | None = None
                least_s = math.inf
                for way, queue in enumerate(queues):
                    if heads_s[way] >= least_s:
                        continue
                    pair = queue.at(positions[way], least_s)
                    heads_s[way] = max(heads_s[way], least_s if pair is None else pair[0].value_s)
                    if pair is not None:
                        best, least_s = (way, pair), pair[0].value_s
                if best is None:
                    break
                positions[best[0]] += 1
                yield best

    def left_s(self) -> list[float]:
        return [value_s for order in self.orders for value_s in order.left_s()]
