"""Where the ranks of a plan's stages really are: how many nodes each group touches, and over which links.

Without a map of ranks and without measured links, groups lie as their numbers say (`Mesh.nodes`) and every
link is as fast as the cluster's. A map may tear a group apart, or bring two stages together, and a matrix of
links makes it matter which nodes they are on. One device stands for a stage, so the slowest of its groups of
a kind stands for all of them, as in Pipette's T_PP = max over (y, z).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.price.prices import AllToAll, Array, Collective, Priced, Prices
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.mesh import SUB_GROUPS, WHOLE, Group, Ranks, neighbours
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.strategies import Layout


@dataclass(frozen=True)
class Span:
    """What ranks that talk to each other have between them."""

    nodes: int
    """Or domains of nodes that fast links join."""
    fewest: int
    """Ranks on that node which has fewest of them: so many share what enters and leaves it."""
    bytes_per_s: float | None = None
    """Of one GPU over the slowest link that a ring over the nodes uses; None for the cluster's."""
    share: float = 1.0
    """Of ranks on one node: of what the best links inside it carry, what the ring's slowest does."""


Spans = tuple[Span, ...]


@dataclass(frozen=True)
class Placed:
    """The ranks of one stage."""

    groups: tuple[tuple[Group, Spans], ...]
    """Of each kind of group, those that differ."""
    before: Spans
    """Sends between the stage before and this one; empty where there is none."""
    after: Spans
    every_border: tuple[Spans, ...]
    """All that a micro-batch passes on its way; with chunks, from the last stage to the first too."""
    tied: Spans
    """Of the first and the last stage, where they hold the same embedding; else empty."""

    def of(self, group: Group) -> Spans:
        """Of one kind of group."""
        spans = dict(self.groups)
        return spans[group] if group in spans else spans[WHOLE[group]]

    def nodes(self, group: Group) -> int:
        """Most that a group of a kind touches."""
        return max(span.nodes for span in self.of(group))


def placed_stages(plan: Plan) -> tuple[Placed | None, ...]:
    """Of each stage; None where numbers say it all: no links were measured, and no group or border of the
    plan's map touches other nodes than without a map."""
    nowhere: tuple[Placed | None, ...] = (None,) * len(plan.stages)
    if plan.cluster.links.matrix is None:
        if plan.rank_map is None or plan.rank_map == tuple(range(plan.gpus)):
            return nowhere
        mapped = tuple(_placed(plan, position) for position in range(len(plan.stages)))
        plain = replace(plan, rank_map=tuple(range(plan.gpus)))
        if mapped == tuple(_placed(plain, position) for position in range(len(plan.stages))):
            return nowhere
        return mapped
    return tuple(_placed(plan, position) for position in range(len(plan.stages)))


def _placed(plan: Plan, position: int) -> Placed:
    last = len(plan.stages) - 1
    borders = [_border(plan, left, left + 1) for left in range(last)]
    every = [*borders, _border(plan, last, 0)] if plan.vpp > 1 and last else borders
    around = plan.vpp > 1
    return Placed(
        groups=tuple(
            (group, _spans(plan.cluster, plan.gpu_of, plan.groups(position, group)))
            for group in plan.kinds_of_groups
        ),
        before=every[position - 1] if (position or around) and last else (),
        after=every[position] if (position < last or around) and last else (),
        every_border=tuple(every),
        tied=_border(plan, last, 0) if plan.model.tied_embeddings else (),
    )


def placed_layout(
    cluster: ClusterSpec, gpu_of: Sequence[int], ranks: Sequence[int], layout: Layout
) -> Placed | None:
    """Of layers whose strategy numbers the ranks of a stage otherwise; None where `Mesh` says it all. What
    crosses the stage's borders is the stage's own."""
    plain = not layout.tp_outside and cluster.links.matrix is None
    if plain and all(gpu_of[rank] == rank for rank in ranks):
        return None
    places = range(len(ranks))
    apart = [layout.dp if layout.tp_outside else 1, 1 if layout.tp_outside else layout.tp]
    sizes = {Group.TENSOR: (apart[0], layout.tp), Group.DATA: (apart[1], layout.dp)}
    groups = []
    for group in (each for each in Group if each not in SUB_GROUPS):
        step, size = sizes.get(group, (1, 1))
        first = [k for k in places if k // step % size == 0]
        alike = [tuple(ranks[k + step * each] for each in range(size)) for k in first]
        groups.append((group, _spans(cluster, gpu_of, alike)))
    tied = Span(min(len({gpu // cluster.linked_gpus for gpu in gpu_of}), 2), 1)
    return Placed(groups=tuple(groups), before=(), after=(), every_border=(), tied=(tied,))


def _border(plan: Plan, one: int, other: int) -> Spans:
    return _spans(plan.cluster, plan.gpu_of, neighbours(plan.ranks(one), plan.ranks(other)))


def _spans(cluster: ClusterSpec, gpu_of: Sequence[int], groups: Iterable[Ranks]) -> Spans:
    """Of groups of logical ranks, the slowest of those that are spread alike."""
    a_node, a_domain = cluster.gpus_per_node, cluster.linked_gpus
    matrix = cluster.links.matrix
    spans: dict[tuple[int, int], float | None] = {}
    shares: dict[tuple[int, int], float] = {}
    seen: set[tuple[int, ...]] = set()
    for ranks in groups:
        gpus = tuple(gpu_of[rank] for rank in ranks)
        nodes = tuple(gpu // a_node for gpu in gpus)
        where = gpus if matrix is not None and matrix.inside else nodes
        if where in seen:
            continue
        seen.add(where)
        domains = [node * a_node // a_domain for node in nodes]
        count = len(set(domains))
        key = count, min(domains.count(domain) for domain in set(domains))
        rate = None if count == 1 else _ring_bytes_per_s(nodes, domains, matrix)
        if matrix is not None and matrix.inside and len(set(nodes)) == 1:
            share = _ring_share(matrix, nodes[0], [gpu % a_node for gpu in gpus])
            shares[key] = min(share, shares.get(key, share))
        before = spans.get(key)
        spans[key] = rate if before is None or rate is None else min(rate, before)
    return tuple(Span(*key, spans[key], shares.get(key, 1.0)) for key in sorted(spans))


def _ring_share(matrix: LinkMatrix, node: int, gpus: Sequence[int]) -> float:
    shares = matrix.inside_shares(node)
    return min((shares[a][b] for a, b in pairwise([*gpus, gpus[0]])), default=1.0)


def _ring_bytes_per_s(
    nodes: Sequence[int], domains: Sequence[int], matrix: LinkMatrix | None
) -> float | None:
    """Of the slowest link of a ring in the order of ranks, each domain entered once, either way round."""
    if matrix is None:
        return None
    first = {domain: node for node, domain in zip(reversed(nodes), reversed(domains), strict=True)}
    order = [first[domain] for domain in dict.fromkeys(domains)]
    links = [link for a, b in pairwise([*order, order[0]]) for link in ((a, b), (b, a))]
    slow = min(links, key=lambda link: matrix.rate(*link))
    if matrix.rate(*slow) <= 0.0:
        one, other = (matrix.hosts[node] for node in slow)
        raise InputError(
            f"links: {one} to {other} carries nothing, and the plan sends over it",
            details=("try: mist-megatron place, which avoids dead links",),
        )
    return matrix.rate(*slow)


def slowest(work: Collective | AllToAll, spans: Spans, prices: Prices) -> Priced:
    """A collective, or tokens that change ranks, over the slowest of these groups."""
    priced = [_priced(work, span, prices) for span in spans]
    return max(priced, key=lambda one: float(np.max(one.seconds)))


def _priced(work: Collective | AllToAll, span: Span, prices: Prices) -> Priced:
    """With its latency, where links inside a node are slow: they are others, whose latency is more too."""
    usual = prices.of(_over(work, span))
    if span.share <= 0.0:
        raise InputError(
            "links: two GPUs inside a node that the plan has talk to each other have a dead link",
            details=("try: mist-megatron place, which avoids dead links",),
        )
    return usual if span.share == 1.0 else usual.times(1.0 / span.share)


def _over(work: Collective | AllToAll, span: Span) -> Collective | AllToAll:
    rate = None if span.bytes_per_s is None else np.asarray(span.bytes_per_s)
    if isinstance(work, AllToAll):
        return replace(work, nodes=np.asarray(float(span.nodes)), bytes_per_s=rate)
    nodes, fewest = np.asarray(float(span.nodes)), np.asarray(float(span.fewest))
    return replace(work, nodes=nodes, fewest=fewest, bytes_per_s=rate)


def send_seconds(message_bytes: Array, spans: Spans, prices: Prices) -> Array:
    """One transfer between the neighbours that are farthest apart."""
    work = Collective("send_recv", message_bytes, np.asarray(2.0), np.asarray(1.0))
    return slowest(work, spans, prices).seconds
