"""Which node goes where: orders of a cluster's nodes, each priced by the links that it uses.

What a plan asks of its nodes is told once, as the pairs of places that talk to each other and what each
stage's time becomes when the slowest of them gets slower (`Places`). Then an order costs a look-up per pair,
so that hundreds of chains of simulated annealing are priced together: a few numpy calls over all of them take
about a microsecond an order, less than an incremental price would take of one at a time in Python.

Turning a ring round, or along, changes nothing: of orders that cost the same the one nearest to the order as
given is kept, so an answer names no exchange that gains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from mist_megatron.spec.links import LinkMatrix

Array = NDArray[np.float64]
Orders = NDArray[np.intp]
"""Orders of nodes, one a row: the place's node, and behind the plan's places those that are spare."""
DEAD = 1e6
"""A dead link counts as so many times the slowest that works: never worth using, and still comparable."""
KEPT = 2_000
"""Orders that are kept of each piece of all of them."""
MOST_EXACT = 400_000
"""Orders up to which all of them are priced: 8 nodes have 40,320."""
CHAINS = 256
"""Of annealing, side by side."""
HOTTEST, COLDEST = 0.3, 1e-4
"""Temperatures as shares of the first cost: at first a step up by a third is taken, at last hardly one."""
EXCHANGES = 12
"""Times at which the worse half of the chains begin anew from the better half."""
SAME = 1e-9
CLOSE, MOST_CLOSE = 1.05, 6
"""Up to which times the least cost, and how many, orders are told besides the best."""


@dataclass(frozen=True)
class Use:
    """Places that talk to each other, the slowest of them making all wait."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a use adds to a stage's t and d, by seconds per byte of its slowest link."""

    stage: int
    use: int
    seconds_per_byte: Array
    """Increasing."""
    stable_s: Array
    delta_s: Array


@dataclass(frozen=True, kw_only=True)
class Places:
    """What a plan asks of the nodes that it lies on."""

    places: int
    uses: tuple[Use, ...]
    stable_s: Array
    """By stage, without what the curves add."""
    delta_s: Array
    curves: tuple[Curve, ...]
    grad_accum: int
    chunks: int = 1
    busy_bytes: tuple[tuple[int, float], ...] = ()
    """Uses whose slowest link is busy all the time where it is slow enough, and what it then carries."""

    def slowest(self, orders: Orders, seconds_per_byte: Array) -> Array:
        """Of each use, in each order."""
        one = np.array([a for use in self.uses for a, _ in use.pairs], dtype=np.intp)
        other = np.array([b for use in self.uses for _, b in use.pairs], dtype=np.intp)
        starts = np.cumsum([0, *(len(use.pairs) for use in self.uses[:-1])])
        each = seconds_per_byte[orders[:, one], orders[:, other]]
        return np.asarray(np.maximum.reduceat(each, starts, axis=1))

    def cost(self, orders: Orders, seconds_per_byte: Array) -> Array:
        """Seconds of an iteration: Mist's eq. 1, which `predict` refines."""
        if not self.uses:
            return np.zeros(len(orders))
        slow = self.slowest(orders, seconds_per_byte)
        stable = np.tile(self.stable_s, (len(orders), 1))
        delta = np.tile(self.delta_s, (len(orders), 1))
        for curve in self.curves:
            asked = slow[:, curve.use]
            stable[:, curve.stage] += _along(asked, curve.seconds_per_byte, curve.stable_s)
            delta[:, curve.stage] += _along(asked, curve.seconds_per_byte, curve.delta_s)
        ramp = stable / self.chunks
        before = np.cumsum(ramp, axis=1) - ramp
        extra = np.max(delta - before, axis=1)
        total = self.grad_accum * stable.max(axis=1) + ramp.sum(axis=1) - ramp.max(axis=1) + extra
        for use, carried in self.busy_bytes:
            total = np.maximum(total, carried * slow[:, use] + ramp.sum(axis=1))
        return np.asarray(total)


def _along(asked: Array, at: Array, values: Array) -> Array:
    """Between the knots as they say, beyond the last one on as it went: time is linear in a link's slowness
    once nothing hides it."""
    inside = np.interp(asked, at, values)
    slope = (values[-1] - values[-2]) / (at[-1] - at[-2]) if len(at) > 1 else 0.0
    return np.asarray(inside + slope * np.maximum(asked - at[-1], 0.0))


def chain_places(count: int) -> Places:
    """A pipeline over so many nodes: its hops add up."""
    uses = tuple(Use(((place, place + 1),)) for place in range(count - 1))
    unit = np.array([0.0, 1.0])
    curves = tuple(
        Curve(stage=0, use=use, seconds_per_byte=unit, stable_s=unit, delta_s=0.0 * unit)
        for use in range(len(uses))
    )
    return Places(
        places=count, uses=uses, stable_s=np.zeros(1), delta_s=np.zeros(1), curves=curves, grad_accum=1
    )


def ring_places(count: int) -> Places:
    """A ring over so many nodes: as slow as its slowest link."""
    pairs = tuple(pairwise([*range(count), 0]))
    unit = np.array([0.0, 1.0])
    curve = Curve(stage=0, use=0, seconds_per_byte=unit, stable_s=unit, delta_s=0.0 * unit)
    return Places(
        places=count, uses=(Use(pairs),), stable_s=np.zeros(1), delta_s=np.zeros(1), curves=(curve,),
        grad_accum=1,
    )  # fmt: skip


def seconds_per_byte(matrix: LinkMatrix) -> Array:
    """Of each pair the slower way, an unmeasured one as the slowest that was; nothing to itself."""
    count = len(matrix.hosts)
    slowest = 1.0 / min(matrix.rates)
    per_byte = np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            if a != b:
                rate = min(matrix.rate(a, b), matrix.rate(b, a))
                per_byte[a, b] = 1.0 / rate if rate > 0.0 else DEAD * slowest
    return per_byte


def best_rates(matrix: LinkMatrix) -> tuple[float, ...]:
    """By a number of nodes, from 0 on: what the slowest link of a ring over so many of them has at best,
    bytes per second of a GPU. No group of so many nodes has more, whichever they are.

    Every node of a ring over three or more has two links in it, so that as many nodes have a second-best link
    of that rate; and links of that rate join so many nodes, which a spanning tree of best links tells.
    """
    links = seconds_per_byte(matrix)
    count = len(links)
    ways = np.where(links > 0.0, 1.0 / np.where(links > 0.0, links, 1.0), 0.0)
    second = np.sort(np.sort(ways, axis=1)[:, -2])[::-1]
    joined = _joining_rates(ways)
    best = float(ways.max())
    rings = [min(float(second[nodes - 1]), joined[nodes]) for nodes in range(3, count + 1)]
    return (best, best, best, *rings)


def _joining_rates(ways: Array) -> list[float]:
    """By a number of nodes: the greatest rate whose links join so many. Prim's tree, cut at each rate."""
    count = len(ways)
    reached, begun, edges = ways[0].copy(), np.zeros(count, dtype=np.intp), []
    inside = np.zeros(count, dtype=bool)
    inside[0] = True
    for _ in range(count - 1):
        node = int(np.argmax(np.where(inside, -1.0, reached)))
        edges.append((float(reached[node]), int(begun[node]), node))
        inside[node] = True
        nearer = ways[node] > reached
        reached, begun = np.where(nearer, ways[node], reached), np.where(nearer, node, begun)
    part, rates, largest = list(range(count)), [math.inf, math.inf], 1
    for rate, one, other in sorted(edges, reverse=True):
        keep, gone = part[one], part[other]
        part = [keep if label == gone else label for label in part]
        size = part.count(keep)
        rates += [rate] * max(size - largest, 0)
        largest = max(size, largest)
    return rates


@dataclass(frozen=True, kw_only=True)
class Order:
    """What was found."""

    nodes: tuple[int, ...]
    """By place: the node."""
    close: tuple[tuple[int, ...], ...]
    """Others that cost hardly more, or as much over other links."""
    cost: float
    first_cost: float
    """Of the order as given."""
    proved: bool
    """All orders were priced."""
    evaluations: int


def best_order(
    places: Places, links: Array, *, start: Sequence[int], seed: int = 0, evaluations: int = 200_000
) -> Order:
    """The cheapest order found. `start` is the order as given, of all nodes that may be used: those behind
    the plan's places are spare."""
    first = np.array([start], dtype=np.intp)
    nodes, taken = len(start), places.places
    if math.perm(nodes, taken) <= MOST_EXACT:
        orders, count = _all_orders(places, links, first)
        return _answer(places, links, orders, first, count, proved=True)
    starts = np.concatenate([first, _greedy(links, first)])
    orders, count = _annealed(places, links, starts, seed, evaluations)
    return _answer(places, links, orders, first, count, proved=False)


def _answer(
    places: Places, links: Array, orders: Orders, first: Orders, count: int, *, proved: bool
) -> Order:
    """Of the cheapest the one that moves the fewest nodes, unless none is cheaper than the first."""
    both = np.concatenate([first[:, : places.places], orders[:, : places.places]])
    costs = places.cost(both, links)
    least = costs.min()
    cheapest = np.flatnonzero(costs <= least * (1.0 + SAME) + 1e-300)
    moved = (both[cheapest] != both[0]).sum(axis=1)
    best = cheapest[int(np.argmin(moved))]
    nodes = tuple(int(node) for node in both[best])
    return Order(
        nodes=nodes,
        close=_close(places, links, both, int(best)),
        cost=float(costs[best]),
        first_cost=float(costs[0]),
        proved=proved,
        evaluations=count,
    )


def _close(places: Places, links: Array, orders: Orders, best: int) -> tuple[tuple[int, ...], ...]:
    """The cheapest but the best, one of those that use links which are alike."""
    costs = places.cost(orders, links)
    near = np.flatnonzero(costs <= costs.min() * CLOSE)
    near = near[np.argsort(costs[near], kind="stable")]
    if not places.uses:
        return ()
    used = places.slowest(orders[np.append(best, near)], links)
    _, first = np.unique(used, axis=0, return_index=True)
    others = [int(near[at - 1]) for at in sorted(first) if at][:MOST_CLOSE]
    return tuple(tuple(int(node) for node in orders[at]) for at in others)


def _all_orders(places: Places, links: Array, first: Orders) -> tuple[Orders, int]:
    """The cheapest ones of each few thousand."""
    every: Iterator[tuple[int, ...]] = permutations(first[0].tolist(), places.places)
    kept, count = [], 0
    while piece := list(islice(every, 20_000)):
        orders = np.array(piece, dtype=np.intp)
        costs = places.cost(orders, links)
        count += len(orders)
        near = np.flatnonzero(costs <= costs.min() * CLOSE)
        kept.append(orders[near[np.argsort(costs[near], kind="stable")][:KEPT]])
    return np.concatenate(kept), count


def _greedy(links: Array, first: Orders) -> Orders:
    """From each node on: the next place goes to the node with the best link to the last one."""
    orders = []
    for begin in range(first.size):
        left: list[int] = first[0].tolist()
        order = [left.pop(begin)]
        while left:
            nearest = min(range(len(left)), key=lambda at: links[order[-1], left[at]])
            order.append(left.pop(nearest))
        orders.append(order)
    return np.array(orders, dtype=np.intp)


def _annealed(
    places: Places, links: Array, starts: Orders, seed: int, evaluations: int
) -> tuple[Orders, int]:
    """Chains side by side; what each has seen that was best."""
    random = np.random.default_rng(seed)
    costs = places.cost(starts, links)
    ranked = starts[np.argsort(costs, kind="stable")]
    orders = ranked[np.arange(CHAINS) % len(ranked)].copy()
    costs = places.cost(orders, links)
    best, best_costs = orders.copy(), costs.copy()
    steps = max(evaluations // CHAINS, 1)
    scale = float(np.median(costs)) or 1.0
    for step in range(steps):
        warm = scale * HOTTEST * (COLDEST / HOTTEST) ** (step / steps)
        tried = _moved(orders, places.places, random)
        tried_costs = places.cost(tried, links)
        worse = np.maximum(tried_costs - costs, 0.0)
        taken = random.random(CHAINS) < np.exp(-worse / warm)
        orders[taken], costs[taken] = tried[taken], tried_costs[taken]
        better = costs < best_costs
        best[better], best_costs[better] = orders[better], costs[better]
        if step % max(steps // EXCHANGES, 1) == 0 and step:
            ranks = np.argsort(best_costs, kind="stable")
            good, bad = ranks[: CHAINS // 2], ranks[CHAINS // 2 :]
            orders[bad], costs[bad] = best[good], best_costs[good]
    return best, steps * CHAINS + len(starts)


def _moved(orders: Orders, places: int, random: np.random.Generator) -> Orders:
    """Each order with one of four moves: two places exchanged, a place exchanged with a spare node, a node
    moved elsewhere, a stretch turned round."""
    chains, nodes = orders.shape
    at = np.arange(nodes)[None, :]
    one = random.integers(0, places, size=(chains, 1))
    other = random.integers(0, places, size=(chains, 1))
    kind = random.integers(0, 4 if nodes > places else 3, size=(chains, 1))
    spare = random.integers(places, nodes, size=(chains, 1)) if nodes > places else other
    with_one = np.where(kind == 3, spare, other)
    low, high = np.minimum(one, other), np.maximum(one, other)
    exchanged = np.where(at == one, with_one, np.where(at == with_one, one, at))
    turned = np.where((at >= low) & (at <= high), low + high - at, at)
    later = np.where((at >= one) & (at < other), at + 1, at)
    earlier = np.where((at > other) & (at <= one), at - 1, at)
    shifted = np.where(at == other, one, np.where(one < other, later, earlier))
    index = np.where(kind == 1, turned, np.where(kind == 2, shifted, exchanged))
    return np.take_along_axis(orders, index, axis=1)


def best_chain_gain(matrix: LinkMatrix) -> float:
    """How many times as fast a chain over all nodes but one can be, over the first of them as given."""
    count = len(matrix.hosts)
    return _gain(chain_places(max(count - 1, 2)), matrix)


def best_ring_gain(matrix: LinkMatrix) -> float:
    """The same of a ring's slowest link."""
    count = len(matrix.hosts)
    return _gain(ring_places(max(count - 1, 2)), matrix)


def _gain(places: Places, matrix: LinkMatrix) -> float:
    order = best_order(places, seconds_per_byte(matrix), start=range(len(matrix.hosts)), evaluations=60_000)
    return order.first_cost / order.cost if order.cost > 0.0 else 1.0
