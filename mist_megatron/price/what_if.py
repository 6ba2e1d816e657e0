"""What would be if one kind of work were faster: prices with a factor, for everything that asks for prices.

`op=KIND:F` multiplies the time of an operator kind by F (0.5: twice as fast). `link=KIND:F` multiplies the
bandwidth of a link by F (2: twice the bandwidth); its latency stays. A collective between nodes that has
several ranks in a node uses both kinds of link, and gains by the one that holds it up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.price.prices import (
    AllToAll,
    Array,
    Attention,
    Collective,
    DeviceAdam,
    Gemm,
    GroupedGemm,
    HostAdam,
    HostCopy,
    MemoryPass,
    Priced,
    Prices,
    Work,
    any_of,
)

OPERATORS: Mapping[str, str] = MappingProxyType(
    {
        "matmul": "matrix products",
        "attention": "fused attention cores",
        "memory": "memory-bound kernels",
        "adam": "optimizer updates on the GPU",
        "host_adam": "optimizer updates on the host",
    }
)
LINKS: Mapping[str, str] = MappingProxyType(
    {
        "intra": "links inside a node, also of collectives that go on to other nodes",
        "inter": "links between nodes",
        "h2d": "copies from host to device",
        "d2h": "copies from device to host",
    }
)
SMALLEST = 1e-6
LARGEST = 1e6
"""Factors beyond these are slips of the finger."""


@dataclass(frozen=True)
class Scales:
    """Factors on the time of operators and on the bandwidth of links."""

    operators: Mapping[str, float]
    links: Mapping[str, float]

    @property
    def any(self) -> bool:
        return bool(self.operators or self.links)


def parse_scales(texts: Sequence[str]) -> Scales:
    """`op=matmul:0.5`, `link=inter:2`; every wrong one is told with what is known."""
    operators: dict[str, float] = {}
    links: dict[str, float] = {}
    for text in texts:
        what, _, rest = text.partition("=")
        kind, colon, number = rest.partition(":")
        known = {"op": OPERATORS, "link": LINKS}.get(what)
        if known is None or not colon:
            raise InputError(
                f"--scale {text!r}: wanted op=KIND:FACTOR or link=KIND:FACTOR, such as op=matmul:0.5"
            )
        if kind not in known:
            raise InputError(f"--scale {text!r}: unknown {what} {kind!r}; known: {', '.join(known)}")
        factors = operators if what == "op" else links
        if kind in factors:
            raise InputError(f"--scale {text!r}: {what} {kind} is given twice; wanted it once")
        factors[kind] = _factor(text, number)
    return Scales(MappingProxyType(operators), MappingProxyType(links))


def _factor(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not SMALLEST <= value <= LARGEST:
        raise InputError(
            f"--scale {text!r}: the factor is {number!r}; wanted a number from {SMALLEST:g} to {LARGEST:g}"
        )
    return value


def scaled_prices(prices: Prices, scales: Scales) -> Prices:
    """The same prices with the factors in."""
    return ScaledPrices(prices, scales) if scales.any else prices


@dataclass(frozen=True)
class ScaledPrices:
    """Other prices with factors on the time of operators and on the bandwidth of links."""

    usual: Prices
    scales: Scales

    def of(self, work: Work) -> Priced:
        if isinstance(work, Collective):
            return self._faster(work, self._collective_rate(work))
        if isinstance(work, AllToAll):
            inside, across = (self.scales.links.get(link, 1.0) for link in ("intra", "inter"))
            rate = np.where(np.asarray(work.nodes) > 1.0, across, inside)
            return self.usual.of(work).times(1.0 / rate)
        if isinstance(work, HostCopy):
            return self._faster(work, np.asarray(self.scales.links.get(work.direction, 1.0)))
        return self.usual.of(work).times(self.scales.operators.get(_OPERATOR_OF[type(work)], 1.0))

    def interference(self) -> Array:
        return self.usual.interference()

    def _faster(self, work: Collective | HostCopy, rate: Array) -> Priced:
        """So many times the bandwidth at the same latency: latency is what a message of one byte takes."""
        usual = self.usual.of(work)
        latency_s = np.where(work.moved_bytes > 0.0, self._latency_s(work), 0.0)
        seconds = latency_s + np.maximum(usual.seconds - latency_s, 0.0) / rate
        factor = np.where(
            usual.seconds > 0.0, seconds / np.where(usual.seconds > 0.0, usual.seconds, 1.0), 1.0
        )
        return usual.times(factor)

    def _latency_s(self, work: Collective | HostCopy) -> Array:
        return self.usual.of(replace(work, moved_bytes=np.minimum(work.moved_bytes, 1.0))).seconds

    def _collective_rate(self, work: Collective) -> Array:
        """How many times the bandwidth a collective gets. Inside a node it has one kind of link. Between
        nodes a ring runs over both kinds and is as fast as the slower of them: which one that is, before and
        after, is asked of the prices of either kind alone."""
        inside, across = (self.scales.links.get(link, 1.0) for link in ("intra", "inter"))
        ranks, nodes = (np.asarray(count, dtype=np.float64) for count in (work.ranks, work.nodes))
        mixed = (nodes > 1.0) & (ranks > nodes)
        plain = np.where(nodes > 1.0, across, inside)
        if inside == across or not any_of(mixed):
            return plain
        work = replace(work, strided=False)
        intra_s = self._transfer_s(replace(work, ranks=ranks, nodes=np.minimum(nodes, 1.0)))
        # One rank of each node moves nearly the same; the ranks of a node share what it sends.
        once = (ranks - 1.0) / ranks / np.where(nodes > 1.0, (nodes - 1.0) / nodes, 1.0)
        one_each = replace(work, ranks=nodes, nodes=nodes, fewest=None)
        inter_s = self._transfer_s(one_each) * once * nodes / ranks
        before_s, after_s = np.maximum(intra_s, inter_s), np.maximum(intra_s / inside, inter_s / across)
        return np.where(mixed & (after_s > 0.0), before_s / np.where(after_s > 0.0, after_s, 1.0), plain)

    def _transfer_s(self, work: Collective) -> Array:
        """Without latency."""
        return np.maximum(self.usual.of(work).seconds - self._latency_s(work), 0.0)


_OPERATOR_OF: Mapping[type, str] = MappingProxyType(
    {
        Gemm: "matmul",
        GroupedGemm: "matmul",
        Attention: "attention",
        MemoryPass: "memory",
        DeviceAdam: "adam",
        HostAdam: "host_adam",
    }
)
