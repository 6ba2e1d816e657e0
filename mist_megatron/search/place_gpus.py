"""Which GPU of its node each rank gets, where somebody measured the links inside: pairs that a bridge joins
beside pairs that talk over PCIe. Each node for itself, since what its ranks do there is what the others do on
theirs; all orders of up to eight GPUs are priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.placed import Spans
from mist_megatron.cost.predict import grids_of
from mist_megatron.search.place import DEAD, Array, Curve, Places, Use, best_order
from mist_megatron.search.place_costs import AFTER, BEFORE, Part, times_of, with_part
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.mesh import neighbours
from mist_megatron.spec.plan import Plan

ALIKE = 0.95
"""Of the fastest pair, what the slowest of a node has where the order of its GPUs is not worth a thought."""
KNOTS = 3


def gpus_in_order(plan: Plan, evaluator: StageEvaluator, *, seed: int, evaluations: int) -> Plan:
    """The plan with the GPUs of each node in the best order that was found; `evaluator` is of its job."""
    matrix, a_node = plan.cluster.links.matrix, plan.cluster.gpus_per_node
    assert matrix is not None
    alike = replace(plan.cluster.links, matrix=replace(matrix, inside=()))
    plain = replace(plan, cluster=replace(plan.cluster, links=alike))
    gpu_of = list(plan.gpu_of)
    rank_at = {gpu: rank for rank, gpu in enumerate(gpu_of)}
    found: dict[object, tuple[int, ...]] = {}
    for node in range(plan.cluster.nodes if matrix.inside else 0):
        links = _slowness(matrix, node)
        if links.max() <= 1.0 / ALIKE:
            continue
        places = _places(plain, evaluator, node, float(links[links < DEAD].max()))
        key = places.uses, tuple(curve.stage for curve in places.curves), links.tobytes()
        if key not in found:
            start = range(a_node)
            found[key] = best_order(places, links, start=start, seed=seed, evaluations=evaluations).nodes
        for place, gpu in enumerate(found[key]):
            gpu_of[rank_at[node * a_node + place]] = node * a_node + gpu
    same = gpu_of == list(range(plan.gpus))
    return replace(plan, rank_map=None if same else tuple(gpu_of))


def _slowness(matrix: LinkMatrix, node: int) -> Array:
    """Of each pair of GPUs, by how many times it is slower than the fastest."""
    shares = np.array(matrix.inside_shares(node))
    return np.asarray(np.where(shares > 0.0, 1.0 / np.where(shares > 0.0, shares, 1.0), DEAD))


def _places(plan: Plan, evaluator: StageEvaluator, node: int, slowest: float) -> Places:
    grids = grids_of(plan)
    asked = [
        (stage, part, Use(tuple(sorted(pairs))))
        for stage in range(len(grids))
        for part, pairs in _pairs(plan, stage, node)
        if pairs
    ]
    base = [times_of(grid, evaluator) for grid in grids]
    knots = np.geomspace(1.0, slowest, KNOTS)
    curves = []
    for number, (stage, part, _) in enumerate(asked):
        times = [times_of(_at_share(grids[stage], part, 1.0 / knot), evaluator) for knot in knots]
        stable_s, delta_s = (np.array([one[k] - base[stage][k] for one in times]) for k in range(2))
        curves.append(
            Curve(stage=stage, use=number, seconds_per_byte=knots, stable_s=stable_s, delta_s=delta_s)
        )
    return Places(
        places=plan.cluster.gpus_per_node,
        uses=tuple(use for *_, use in asked),
        stable_s=np.array([stable for stable, _ in base]),
        delta_s=np.array([delta for _, delta in base]),
        curves=tuple(curves),
        grad_accum=plan.grad_accum,
        chunks=plan.vpp,
    )


def _pairs(plan: Plan, stage: int, node: int) -> Iterable[tuple[Part, set[tuple[int, int]]]]:
    """GPUs of one node, by their place on it, that talk to each other in groups and borders that do not leave
    it."""
    a_node, last = plan.cluster.gpus_per_node, len(plan.stages) - 1

    def places(ranks: Sequence[int]) -> list[int]:
        gpus = [plan.gpu_of[rank] for rank in ranks]
        return [gpu % a_node for gpu in gpus] if all(gpu // a_node == node for gpu in gpus) else []

    for group in plan.kinds_of_groups:
        rings = [here for ranks in plan.groups(stage, group) if len(here := places(ranks)) > 1]
        yield group, {(a, b) for ring in rings for a, b in pairwise([*ring, ring[0]])}
    for part, other in ((BEFORE, stage - 1), (AFTER, stage + 1)):
        if last and (plan.vpp > 1 or 0 <= other <= last):
            sends = neighbours(plan.ranks(stage), plan.ranks(other % (last + 1)))
            yield part, {(here[0], here[1]) for pair in sends if (here := places(pair))}


def _at_share(grid: StageGrid, part: Part, share: float) -> StageGrid:
    assert grid.placed is not None
    return replace(grid, placed=with_part(grid.placed, part, lambda spans: _shared(spans, share)))


def _shared(spans: Spans, share: float) -> Spans:
    return tuple(replace(span, share=share) if span.nodes == 1 else span for span in spans)
