"""What would be if one kind of work were faster: prices with a factor, for everything that asks for prices.

`op=KIND:F` multiplies the time of an operator kind by F (0.5: twice as fast). `link=KIND:F` multiplies the
bandwidth of a link by F (2: twice the bandwidth); its latency stays. A collective between nodes that has
several ranks in a node uses both kinds of link, and gains by the one that holds it up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mist_megatron.errors import InputError
from mist_megatron.price.prices import Array, Collective, LayerRatios, Priced, Prices

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
        found = operators if what == "op" else links
        if kind in found:
            raise InputError(f"--scale {text!r}: {what} {kind} is given twice; wanted it once")
        found[kind] = _factor(text, number)
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
    if not scales.any:
        return prices
    if isinstance(prices, LayerRatios):
        return _ScaledLayerPrices(prices, scales)
    return _ScaledPrices(prices, scales)


@dataclass(frozen=True)
class _ScaledPrices:
    """Implements `cost.pricing.Prices` on top of other prices."""

    prices: Prices
    scales: Scales

    def _operator(self, kind: str, priced: Priced) -> Priced:
        return _times(priced, np.asarray(self.scales.operators.get(kind, 1.0)))

    def gemm(self, m: Array, n: Array, k: Array, batch: Array, *, kernels: int = 1) -> Priced:
        return self._operator("matmul", self.prices.gemm(m, n, k, batch, kernels=kernels))

    def attention(
        self, batch: Array, seq: Array, heads: Array, kv_heads: Array, head_dim: Array, *, backward: bool
    ) -> Priced:
        found = self.prices.attention(batch, seq, heads, kv_heads, head_dim, backward=backward)
        return self._operator("attention", found)

    def memory_bound(self, moved_bytes: Array, *, kernels: int = 1) -> Priced:
        return self._operator("memory", self.prices.memory_bound(moved_bytes, kernels=kernels))

    def device_adam(self, parameters: Array) -> Priced:
        return self._operator("adam", self.prices.device_adam(parameters))

    def host_adam(self, parameters: Array) -> Priced:
        return self._operator("host_adam", self.prices.host_adam(parameters))

    def collective(
        self,
        kind: Collective,
        message_bytes: Array,
        ranks: Array,
        nodes: Array,
        *,
        strided: bool | NDArray[np.bool_] = False,
    ) -> Priced:
        def priced(moved: Array) -> Priced:
            return self.prices.collective(kind, moved, ranks, nodes, strided=strided)

        moved = np.asarray(message_bytes, dtype=np.float64)
        return _faster(priced, moved, self._rate(kind, moved, ranks, nodes))

    def _rate(self, kind: Collective, moved: Array, ranks: Array, nodes: Array) -> Array:
        """How many times the bandwidth a collective gets. Inside a node it has one kind of link. Between
        nodes a ring runs over both kinds and is as fast as the slower of them: which one that is, before and
        after, is asked of the prices of either kind alone."""
        inside, across = (self.scales.links.get(link, 1.0) for link in ("intra", "inter"))
        size, spans = np.asarray(ranks, dtype=np.float64), np.asarray(nodes, dtype=np.float64)
        mixed = (spans > 1.0) & (size > spans)
        plain = np.where(spans > 1.0, across, inside)
        if inside == across or not np.any(mixed):
            return plain
        intra_s = self._transfer_s(kind, moved, size, np.minimum(spans, 1.0))
        # One rank of each node moves nearly the same; the ranks of a node share what it sends.
        once = (size - 1.0) / size / np.where(spans > 1.0, (spans - 1.0) / spans, 1.0)
        inter_s = self._transfer_s(kind, moved, spans, spans) * once * spans / size
        before_s, after_s = np.maximum(intra_s, inter_s), np.maximum(intra_s / inside, inter_s / across)
        return np.where(mixed & (after_s > 0.0), before_s / np.where(after_s > 0.0, after_s, 1.0), plain)

    def _transfer_s(self, kind: Collective, moved: Array, ranks: Array, nodes: Array) -> Array:
        """Without latency."""
        whole, least = (
            self.prices.collective(kind, size, ranks, nodes).seconds
            for size in (moved, np.minimum(moved, 1.0))
        )
        return np.maximum(whole - least, 0.0)

    def host_copy(self, copied_bytes: Array, direction: Literal["h2d", "d2h"]) -> Priced:
        rate = np.asarray(self.scales.links.get(direction, 1.0))
        copied = np.asarray(copied_bytes, dtype=np.float64)
        if direction == "h2d":
            return _faster(lambda moved: self.prices.host_copy(moved, "h2d"), copied, rate)
        return _faster(lambda moved: self.prices.host_copy(moved, "d2h"), copied, rate)

    def interference(self) -> Array:
        return self.prices.interference()


@dataclass(frozen=True)
class _ScaledLayerPrices(_ScaledPrices):
    """The same on top of prices that know whole layers."""

    def layer_ratio(self, micro_batch: Array, seq: Array, hidden: Array, heads: Array, tp: Array) -> Array:
        assert isinstance(self.prices, LayerRatios)
        return self.prices.layer_ratio(micro_batch, seq, hidden, heads, tp)


def _times(priced: Priced, factor: Array) -> Priced:
    return Priced(
        seconds=priced.seconds * factor,
        exact_s=priced.exact_s * factor,
        interpolated_s=priced.interpolated_s * factor,
        extrapolated_s=priced.extrapolated_s * factor,
    )


def _faster(priced: Callable[[Array], Priced], moved_bytes: Array, rate: Array) -> Priced:
    """So many times the bandwidth at the same latency: latency is what a message of one byte takes."""
    found = priced(moved_bytes)
    latency_s = np.where(moved_bytes > 0.0, priced(np.minimum(moved_bytes, 1.0)).seconds, 0.0)
    seconds = latency_s + np.maximum(found.seconds - latency_s, 0.0) / rate
    factor = np.where(found.seconds > 0.0, seconds / np.where(found.seconds > 0.0, found.seconds, 1.0), 1.0)
    return _times(found, factor)
