"""Splits of layers over stages that are alike in all else: as even as they go, the ends shorter.

The first and the last stage may have fewer layers than those between, for embedding and head; those between
differ by one at most, the later ones, which hold fewer micro-batches, having more.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mist_megatron.search.space import Space
from mist_megatron.spec.schedule import INTERLEAVED, chunk_layers, in_flight, usual_schedule

FEWER = 10
"""Layers that the first or last stage may have less than the largest: the head of a small model with a large
vocabulary takes as long as eight of its layers (256k rows of 2,304 beside 26 layers)."""


def splits_layers(space: Space, stages: int, vpp: int) -> bool:
    """Whether stages may have different numbers of layers while they are alike in all else."""
    return space.near_even and stages > 1 and (vpp > 1 or not space.per_stage)


@lru_cache(maxsize=4096)
def layer_splits(layers: int, stages: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """All of them. Of chunks only those next to embedding and head may be smaller than those of the same
    place on other stages, and every chunk has a layer, or embedding or head."""
    splits: list[tuple[int, ...]] = []
    share = -(-layers // stages)
    near = range(max(1, share - FEWER), min(share + 2 * FEWER, layers - stages + 1) + 1)
    for first in near:
        if stages == 2:
            splits.append((first, layers - first))
            continue
        for last in near:
            if first + last > layers - stages + 2:
                break
            whole, rest = divmod(layers - first - last, stages - 2)
            if max(first, last) <= whole + (rest > 0) + (vpp == 1):
                splits.append((first, *[whole] * (stages - 2 - rest), *[whole + 1] * rest, last))
    return tuple(split for split in splits if _is_near(split) and (vpp == 1 or _meets(split, vpp)))


def _is_near(split: tuple[int, ...]) -> bool:
    return max(split) - min(split) <= FEWER


def _meets(split: tuple[int, ...], vpp: int) -> bool:
    """Whether what a stage lacks is in one chunk, which embedding or head may have for themselves where all
    others have one layer."""
    most = max(split)
    whole, rest = divmod(most, vpp)
    if whole == 1 and not rest:
        return all(n == most for n in split[1:-1]) and most - min(split) <= 1
    of_first = whole + (rest > 0) - 1
    return whole >= 1 and most - split[0] <= of_first and all(most - n <= whole - 1 for n in split[1:])


def chunk_counts(layers: int, stages: int) -> tuple[int, ...]:
    """Numbers of chunks per stage: of each size of the largest chunk the least number that takes all layers;
    those that divide an even share are among them."""
    share = -(-layers // stages)
    least = {-(-share // size) for size in range(1, share)}
    return tuple(sorted(v for v in least if v > 1 and layer_splits(layers, stages, v)))


@lru_cache(maxsize=4096)
def split_table(layers: int, stages: int, vpp: int) -> NDArray[np.intp]:
    """The same as rows of an array."""
    return np.array(layer_splits(layers, stages, vpp), dtype=np.intp).reshape(-1, stages)


@lru_cache(maxsize=4096)
def first_chunk_shares(layers: int, stages: int, vpp: int) -> NDArray[np.float64]:
    """By split and stage, what the first chunk takes of a stage's t at least: it has its share of what is not
    of layers, and all of what embedding or head add to it."""
    rows = [
        [min(1.0 / vpp, chunks[0] / sum(chunks)) for chunks in chunk_layers(split, vpp)]
        for split in layer_splits(layers, stages, vpp)
    ]
    return np.array(rows).reshape(-1, stages)


@lru_cache(maxsize=4096)
def least_held(layers: int, stages: int, vpp: int, grad_accum: int) -> tuple[float, ...]:
    """By stage: micro-batches in flight at least, whatever the split."""
    if vpp == 1:
        return tuple(in_flight(usual_schedule(1), k, stages, grad_accum) for k in range(stages))
    held = np.full(stages, np.inf)
    for split in layer_splits(layers, stages, vpp):
        for position, chunks in enumerate(chunk_layers(split, vpp)):
            now = in_flight(INTERLEAVED, position, stages, grad_accum, vpp, chunks)
            held[position] = min(held[position], now)
    return tuple(float(value) for value in held)
