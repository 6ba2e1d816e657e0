"""Layers of distinct sizes, each priced once, and how they spread over the axes of a grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.compile import Program
from mist_megatron.cost.grid import Array
from mist_megatron.cost.stage import PassTime
from mist_megatron.cost.terms import ZERO, LayerLoad
from mist_megatron.price.prices import any_of
from mist_megatron.spec.recompute import Recompute


class Pairs:
    """Prices of distinct pairs, one number a pair, or one for all of them."""

    def __init__(
        self,
        passes: Mapping[tuple[str, str], PassTime],
        sizes: Mapping[str, Array],
        host_s: tuple[float, float],
        recompute: Recompute,
    ) -> None:
        self.passes, self.sizes, self.host_s, self.recompute = passes, sizes, host_s, recompute
        """Of the host: per launch, and per other rank of a collective."""
        self._rows: dict[str, tuple[list[str], Array, dict[str, Array]]] = {}

    def joined(self, other: Pairs) -> Pairs:
        """These pairs, then the other ones."""

        def both(one: Array, two: Array) -> Array:
            return np.concatenate([one, two]) if np.ndim(one) else one

        passes = {
            name: PassTime(
                *(both(*parts) for parts in zip(_parts(one), _parts(other.passes[name]), strict=True))
            )
            for name, one in self.passes.items()
        }
        sizes = {name: both(size, other.sizes[name]) for name, size in self.sizes.items()}
        return Pairs(passes, sizes, self.host_s, self.recompute)

    def load(self, layer: str, positions: NDArray[np.intp], shape: tuple[int, ...]) -> LayerLoad:
        """One layer of a kind, of the pairs at these positions. What is nothing of all pairs has no axes."""
        if layer not in self._rows:
            self._rows[layer] = _by_pair(self._load(layer))
        names, rows, others = self._rows[layer]
        if not names:
            return LayerLoad(**others)
        each = rows[:, positions].reshape(len(names), *shape)
        return LayerLoad(**dict(zip(names, each, strict=True)), **others)

    def _load(self, layer: str) -> LayerLoad:
        forward, backward = self.passes[layer, "forward"], self.passes[layer, "backward"]
        still = self.sizes.get(f"{layer}_still", ZERO)
        unneeded, dropped = self.passes[layer, "unneeded"], self.passes.get((layer, self.recompute))
        host_s = self.host_s
        if any_of(still) and not any_of(backward.compute_s):
            unneeded, dropped = forward, None  # nothing is run again for a pass that there is not
        again = forward.without(unneeded)
        forward_s = forward.compute_s + forward.waiting_s(*host_s)
        return LayerLoad(
            forward_s=forward_s,
            backward_s=backward.compute_s + backward.waiting_s(*host_s),
            forward_collective_s=forward.stopping_s,
            backward_collective_s=backward.stopping_s,
            parameters=self.sizes[f"{layer}_parameters"],
            expert_parameters=self.sizes.get(f"{layer}_expert_parameters", ZERO),
            narrow=self.sizes.get(f"{layer}_narrow", ZERO),
            narrow_experts=self.sizes.get(f"{layer}_narrow_experts", ZERO),
            forward_exchange_s=forward.exchange_s,
            backward_exchange_s=backward.exchange_s,
            dropped_exchange_s=ZERO if dropped is None else dropped.exchange_s,
            forward_context_s=forward.exposed_context_s,
            backward_context_s=backward.exposed_context_s,
            dropped_context_s=ZERO if dropped is None else dropped.exposed_context_s,
            unneeded_context_s=forward.exposed_context_s - again.exposed_context_s,
            forward_inside_s=forward.inside_s,
            backward_inside_s=backward.inside_s,
            forward_beside_s=forward.beside_s,
            backward_beside_s=backward.beside_s,
            saved_bytes=self.sizes.get(f"{layer}_saved_bytes", np.zeros(())),
            moved_bytes=self.sizes.get(f"{layer}_moved_bytes", ZERO),
            dropped_s=ZERO if dropped is None else dropped.compute_s + dropped.waiting_s(*host_s),
            dropped_collective_s=ZERO if dropped is None else dropped.stopping_s,
            weight_grad_s=backward.weight_grad_s,
            inside_weight_grad_s=backward.inside_weight_grad_s,
            unneeded_s=forward_s - again.compute_s - again.waiting_s(*host_s),
            unneeded_collective_s=forward.stopping_s - again.stopping_s,
            still=still,
        )


def _by_pair(load: LayerLoad) -> tuple[list[str], Array, dict[str, Array]]:
    """What differs between pairs, a row each, by name; and all else."""
    values = {name: getattr(load, name) for name in LayerLoad.__dataclass_fields__}
    names = [name for name, value in values.items() if np.ndim(value) and any_of(value)]
    others = {name: ZERO if np.ndim(value) else value for name, value in values.items() if name not in names}
    rows = np.array([values[name] for name in names], dtype=np.float64)
    return names, rows, others


def _parts(passed: PassTime) -> list[Array]:
    return [getattr(passed, name) for name in PassTime.__dataclass_fields__]


@dataclass(frozen=True)
class PricedPairs:
    """Prices of pairs, spread over the axes of a grid on demand."""

    pairs: Pairs
    positions: NDArray[np.intp]
    shape: tuple[int, ...]

    def spread(self, values: Array) -> Array:
        if np.ndim(values) == 0:
            return values
        return np.asarray(values[self.positions].reshape(self.shape), dtype=np.float64)

    def size(self, name: str) -> Array:
        return self.spread(self.pairs.sizes[name])

    def load(self, layer: str) -> LayerLoad:
        return self.pairs.load(layer, self.positions, self.shape)


MOST_BOUND = 256
"""Programs that are kept: each takes about as much memory as its source."""


@dataclass(frozen=True)
class Memo:
    """What an evaluator has priced already."""

    pairs: dict[tuple[object, ...], tuple[dict[complex, int], Pairs]] = field(default_factory=dict)
    """Passes of layers."""
    least_memory: dict[tuple[object, ...], Any] = field(default_factory=dict)
    bound: dict[tuple[object, ...], tuple[Program, Program]] = field(default_factory=dict)
    """Programs of memory, and the same with what a search asks again and again fixed."""
