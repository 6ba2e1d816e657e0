"""Groups of layers whose strategy numbers the ranks of a stage in its own way, against sets of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from mist_megatron.cost.placed import Placed, Span, placed_layout
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides, cluster_of
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.strategies import Layout

RANKS = 8
ALONE = (Span(1, 1),)
LAYOUTS = [Layout(dp, RANKS // dp, outside) for dp, outside in product((1, 2, 4, 8), (False, True))]


def clusters() -> list[ClusterSpec]:
    """Of four nodes; two of them share fast links in the second."""
    plain = cluster_of(gpu("a100-sxm-80gb"), 16, 4)
    domains = replace(plain, gpu=replace(plain.gpu, linked_gpus=8))
    rows = tuple(tuple(None if a == b else (1.0 + a + b) * 1e9 for b in range(4)) for a in range(4))
    matrix = LinkMatrix(hosts=tuple("abcd"), bytes_per_s=rows, gpus_at_once=4)
    return [plain, domains, replace(plain, links=LinkOverrides(matrix=matrix))]


def plain_spans(cluster: ClusterSpec, groups: Iterable[list[int]]) -> tuple[Span, ...]:
    """Of groups of GPUs: how many nodes or domains each touches, the fewest on one of them, and the slowest
    link of a ring that enters each node once, in the order of ranks."""
    found = dict[tuple[int, int], float | None]()
    matrix = cluster.links.matrix
    for group in groups:
        nodes = Counter(gpu // cluster.linked_gpus for gpu in group)
        key, ring = (len(nodes), min(nodes.values())), [*nodes, next(iter(nodes))]
        if matrix is None or len(nodes) == 1:
            found[key] = None
        else:
            slowest = min(matrix.rate(a, b) for a, b in pairwise(ring))
            found[key] = min(slowest, found.get(key) or slowest)
    return tuple(Span(*key, found[key]) for key in sorted(found))


@pytest.mark.parametrize("cluster", clusters(), ids=["nodes", "domains", "links"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_are_the_ranks_that_share_samples_or_matrices(cluster, layout):
    random = np.random.default_rng(RANKS)
    orders = [list(range(16)), *(random.permutation(16).tolist() for _ in range(6))]
    for gpu_of, first in product(orders, (0, 8)):
        ranks = range(first, first + RANKS)
        found = placed_layout(cluster, gpu_of, ranks, layout)
        if found is None:
            assert not layout.tp_outside
            assert cluster.links.matrix is None
            assert [gpu_of[rank] for rank in ranks] == list(ranks)
            continue
        split, alike = dict[int, list[int]](), dict[int, list[int]]()
        for place, rank in enumerate(ranks):
            own = split.setdefault(layout.replica(place), [])
            alike.setdefault(len(own), []).append(gpu_of[rank])  # the n-th of each replica has the n-th part
            own.append(gpu_of[rank])
        assert found.of(Group.TENSOR) == plain_spans(cluster, split.values())
        assert found.of(Group.DATA) == plain_spans(cluster, alike.values())
        assert {found.of(group) for group in (Group.CONTEXT, Group.EXPERT, Group.EXPERT_DATA)} == {
            (Span(1, 1),)
        }
        assert found.tied == (
            Span(2, 1),
        )  # the first and the last stage lie on two nodes, where there are two


def test_one_node_ties_nothing_to_another():
    cluster = cluster_of(gpu("a100-sxm-80gb"), 4, 4)
    found = placed_layout(cluster, range(4), range(4), Layout(2, 2, tp_outside=True))
    assert isinstance(found, Placed)
    assert found.tied == ALONE
