"""Prices of a search over nodes whose links were measured: what a group of nodes may have at best, or has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.price.prices import Array, Collective, Priced, Prices, Work


@dataclass(frozen=True, kw_only=True)
class LinkedPrices:
    """As told, but for collectives and sends between nodes: each GPU has so much of a link there."""

    prices: Prices
    bytes_per_s: tuple[float, ...]
    """By the number of nodes that a group touches, from 0 on; of more nodes the last."""

    def of(self, work: Work) -> Priced:
        """What a piece of work takes with the device for itself."""
        if isinstance(work, Collective) and work.bytes_per_s is None:
            nodes = np.minimum(np.asarray(work.nodes, dtype=np.intp), len(self.bytes_per_s) - 1)
            work = replace(work, bytes_per_s=np.asarray(self.bytes_per_s)[nodes])
        return self.prices.of(work)

    def interference(self) -> Array:
        """Links change nothing of it."""
        return self.prices.interference()
