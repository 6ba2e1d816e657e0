"""What it takes to bring activations from where one strategy has them to where the next one needs them.

Galvatron-BMW's Slice-Gather: a rank cuts from what it has, and gathers what it lacks from the nearest ranks
that have it. Backward, gradients go the other way. Both happen for every micro-batch and stop compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from mist_megatron.price.prices import Array, Collective, Prices
from mist_megatron.spec.profile import CollectiveKind
from mist_megatron.spec.strategies import Layout


@dataclass(frozen=True, order=True)
class Gather:
    """Of the ranks of a stage, those that wait longest for what they lack."""

    nodes: int
    """That the ranks of such a group are on."""
    ranks: int


@cache
def gather_between(have: Layout, need: Layout, gpus_per_node: int) -> Gather | None:
    """The slowest group that meets for it; None where every rank has what it needs. The stage has parts of
    one node, or whole nodes, and its ranks are numbered node by node."""
    pieces = max(have.dp, need.dp)
    worst: Gather | None = None
    for rank in range(need.dp * need.tp):
        wanted = _pieces(need, rank, pieces)
        own = _pieces(have, rank, pieces)
        lacking = [piece for piece in wanted if piece not in own]
        if not lacking:
            continue
        blocks = {piece * have.dp // pieces for piece in lacking}
        nodes = {rank // gpus_per_node} | {
            _nearest(have, block, rank, gpus_per_node) // gpus_per_node for block in blocks
        }
        group = Gather(len(nodes), len(blocks) + 1)
        worst = group if worst is None else max(worst, group)
    return worst


def _pieces(layout: Layout, rank: int, pieces: int) -> range:
    each, replica = pieces // layout.dp, layout.replica(rank)
    return range(replica * each, (replica + 1) * each)


def _nearest(have: Layout, block: int, rank: int, gpus_per_node: int) -> int:
    """A rank with that block, on the same node if there is one."""
    holders = [other for other in range(have.dp * have.tp) if have.replica(other) == block]
    return min(holders, key=lambda other: other // gpus_per_node != rank // gpus_per_node)


def gather_seconds(
    have: Layout, need: Layout, whole_bytes: Array, prices: Prices, gpus_per_node: int
) -> Array:
    """Before a layer that needs activations so, behind one that has them so; `whole_bytes` are of all
    samples of the stage."""
    group = gather_between(have, need, gpus_per_node)
    if group is None:
        return np.zeros(())
    kind: CollectiveKind = "all_gather" if have.dp > need.dp else "send_recv"
    ranks, nodes = np.asarray(float(group.ranks)), np.asarray(float(group.nodes))
    return prices.of(Collective(kind, whole_bytes / need.dp, ranks, nodes)).seconds
