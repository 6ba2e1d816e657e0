"""Splits of layers over stages that are alike in all else: all of them where they are few, else as even as
they go but for the ends.

The first and the last stage may have fewer layers than those between, for embedding and head, or more, where
borders of nodes take long, of which those between have two. Those between differ by one at most. Of chunks
that take turns the ends have no more than those between, of which the later ones, which hold fewer
micro-batches, have more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from mist_megatron.search.space import Space
from mist_megatron.spec.job import Job
from mist_megatron.spec.schedule import INTERLEAVED, chunk_layers, in_flight, usual_schedule

FEWER = 10
"""Layers that the first or last stage may have less than those between: the head of a small model with a
large vocabulary takes as long as eight of its layers (256k rows of 2,304 beside 26 layers)."""
SOME_MORE, MORE = 2, 20
"""Layers that ends without chunks may have more than those between, where borders are quick and where they
are slow: of Llama 3 70B with 1.25 GB/s between nodes the best has 12."""
SLOW = 0.25
"""What a border takes of a layer's compute at its peak, from which on it is slow."""

MOST = 512
"""Splits of stages without chunks that are all searched."""


def splits_layers(space: Space, stages: int, vpp: int) -> bool:
    """Whether stages may have different numbers of layers while they are alike in all else."""
    return space.near_even and stages > 1 and (vpp > 1 or not space.per_stage)


def slow_borders(job: Job) -> bool:
    """Whether borders may be slow: of a dense layer of four times its width, both passes."""
    cluster, links = job.cluster, job.cluster.links
    speeds = [links.intra_bytes_per_s or cluster.gpu.intra_bytes_per_s.value]
    if cluster.nodes > 1:
        between = links.inter_bytes_per_s or cluster.gpu.inter_bytes_per_s.value
        speeds.append(between / cluster.gpus_per_node)
    sent_s, computed_s = 4.0 / min(speeds), 72.0 * job.model.hidden / cluster.gpu.fp16_flops_per_s.value
    return sent_s > SLOW * computed_s


def split_rows(space: Space, layers: int, stages: int, vpp: int) -> NDArray[np.intp]:
    """The splits that are searched, a row each."""
    return split_table(layers, stages, vpp, MORE if space.long_ends or vpp > 1 else SOME_MORE)


@lru_cache(maxsize=4096)
def layer_splits(layers: int, stages: int, vpp: int, more: int = MORE) -> tuple[tuple[int, ...], ...]:
    """All of them. Of chunks only those next to embedding and head may be smaller than those of the same
    place on other stages, and every chunk has a layer, or embedding or head."""
    if vpp == 1 and every_split(layers, stages):
        cuts = ((0, *some, layers) for some in combinations(range(1, layers), stages - 1))
        return tuple(tuple(end - begin for begin, end in pairwise(cut)) for cut in cuts)
    near = _with_ends(layers, stages, more if vpp == 1 else 0)
    return tuple(split for split in near if vpp == 1 or _meets(split, vpp))


def every_split(layers: int, stages: int) -> bool:
    """Whether all splits of the layers are searched, of stages that have one chunk each."""
    return math.comb(layers - 1, stages - 1) <= MOST


def _with_ends(layers: int, stages: int, more: int) -> Iterator[tuple[int, ...]]:
    """By the layers of the first and of the last stage, which may have so many more than those between; these
    are as even as they go."""
    share = -(-layers // stages)
    fewest = 1 if more > SOME_MORE else max(1, share - FEWER)
    near = range(fewest, min(share + MORE, layers - stages + 1) + 1)
    for first in near:
        if stages == 2:
            yield first, layers - first
            continue
        for last in near:
            if first + last > layers - stages + 2:
                break
            whole, rest = divmod(layers - first - last, stages - 2)
            between, most = [*[whole] * (stages - 2 - rest), *[whole + 1] * rest], max(first, last)
            if between[-1] - min(first, last) > FEWER or most > max(between[-1], whole + more):
                continue
            yield first, *between, last
            if more and rest and most <= whole + SOME_MORE:
                yield first, *reversed(between), last


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
def split_table(layers: int, stages: int, vpp: int, more: int = MORE) -> NDArray[np.intp]:
    """The same as rows of an array."""
    return np.array(layer_splits(layers, stages, vpp, more), dtype=np.intp).reshape(-1, stages)


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
