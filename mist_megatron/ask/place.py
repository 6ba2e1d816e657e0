"""Which node of a cluster goes where in a plan, by measured links: what it gains, and how sure that is.

The order of nodes is judged by `predict` with that map. Links are known with an error, and an order that was
chosen for its good figures owes some of them to luck. So the gain is told with an interval: rates are drawn
from what the figures and their noise leave possible - shrunk towards the median by as much of their variation
as noise explains (an empirical-Bayes estimate of normally distributed logarithms) - and the default order is
kept where the interval holds 0. A pair that was never measured may have any rate that others have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, pvariance
from typing import Any, TypedDict, Unpack

import numpy as np

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.links import (
    STALE_DAYS,
    age_days,
    load_links,
    matrix_for,
    mean_rate,
    slow_links,
    slow_nodes,
)
from mist_megatron.ask.plan_words import lines_repr, title_words
from mist_megatron.ask.plans import PlanLike, load_plan
from mist_megatron.ask.words import texts, with_words
from mist_megatron.cost.predict import job_of, prediction_document
from mist_megatron.cost.predict import predict as predict_plan
from mist_megatron.errors import InputError
from mist_megatron.search.place import DEAD, Array, Order, Places, best_order, seconds_per_byte
from mist_megatron.search.place_costs import places_of
from mist_megatron.search.place_gpus import gpus_in_order
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.plan import Plan

DRAWS = 400
"""Of rates that the figures leave possible."""
SURE = 0.95
EVALUATIONS = 200_000
LEAST_GAIN = 0.001
"""Below a thousandth an iteration's own jitter hides it."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PlacedPlan:
    """A plan on named nodes."""

    plan: Plan
    """With the links of its nodes, the map of its ranks, and its prediction."""
    hosts: tuple[str, ...]
    """By logical node: the name of the node that it is."""
    left_out: tuple[str, ...]
    """Nodes that were measured and are not used."""
    iteration_s: float
    default_iteration_s: float
    """Of the order as given."""
    interval: tuple[float, float]
    """Of the gain that was found, in 95 of 100 draws."""
    found_gain: float
    """Of the best order that was found, whether it is taken or not."""
    kept_default: bool
    matrix: LinkMatrix
    """All nodes that could be chosen."""
    unmeasured_used: tuple[tuple[str, str], ...]
    """Pairs that the plan's nodes talk over and nobody measured."""
    proved: bool
    """All orders were priced."""
    evaluations: int
    evaluations_per_cpu_s: float
    seed: int
    notes: tuple[str, ...]

    @property
    def gain(self) -> float:
        """How much faster than the order as given: 0.1 is a tenth more steps an hour."""
        return self.default_iteration_s / self.iteration_s - 1.0

    def to_dict(self) -> dict[str, Any]:
        """What `place --json` prints."""
        return {
            "kept_default": self.kept_default,
            "iteration_s": self.iteration_s,
            "default_iteration_s": _finite(self.default_iteration_s),
            "gain": _finite(self.gain),
            "found_gain": _finite(self.found_gain),
            "gain_interval": [_finite(end) for end in self.interval],
            "hosts": list(self.hosts),
            "rank_map": None if self.plan.rank_map is None else list(self.plan.rank_map),
            "left_out": list(self.left_out),
            "slow_nodes": [host for host, _ in slow_nodes(self.matrix)],
            "slow_links": [[a, b] for a, b, _ in slow_links(self.matrix)],
            "unmeasured_used": [list(pair) for pair in self.unmeasured_used],
            "gpus_at_once": self.matrix.gpus_at_once,
            "proved": self.proved,
            "evaluations": self.evaluations,
            "evaluations_per_cpu_s": self.evaluations_per_cpu_s,
            "seed": self.seed,
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        low, high = self.interval
        lines = [
            title_words(self.plan),
            f"{self.iteration_s:.4g} s per step on {', '.join(self.hosts)}",
            f"the order as given takes {self.default_iteration_s:.4g} s: found {self.found_gain:+.1%} "
            f"({low:+.1%} to {high:+.1%})" + (", kept as given" if self.kept_default else ""),
            *self.notes,
        ]
        return lines_repr(self, lines)


def _finite(value: float) -> float | None:
    """None of an order that dead links forbid."""
    return value if math.isfinite(value) else None


class PlaceWords(TypedDict, total=False):
    """What may be chosen, by the names of the options of `place`."""

    avoid: str | Sequence[str]
    """Nodes that are left out."""
    spare: int | None
    """Choose among so many nodes more than the plan needs; all that were measured by default."""
    gpus_at_once: int | None
    """Take figures of so many GPUs of a node sending at once; as many as a node has, or the next fewer."""
    seed: int
    """Of the annealing: the same seed, the same answer."""
    evaluations: int
    """Orders to price, where not all can be."""


@with_words
def place(plan: PlanLike, *, links: str | Path, **words: Unpack[PlaceWords]) -> PlacedPlan:
    """The best map of a plan's nodes to those of links.yaml, and its gain over the order as given."""
    plan = load_plan(plan)
    matrix, notes = nodes_to_choose(plan.cluster, load_links(links), words)
    seed, evaluations = words.get("seed", 0), words.get("evaluations", EVALUATIONS)
    return place_on(plan, matrix, notes, seed=seed, evaluations=evaluations)


def place_on(
    plan: Plan,
    matrix: LinkMatrix,
    notes: Sequence[str] = (),
    *,
    seed: int = 0,
    evaluations: int = EVALUATIONS,
) -> PlacedPlan:
    """The same, on some nodes of a matrix of those that may be chosen: nodes first, then GPUs inside them."""
    every, matrix = matrix, replace(matrix, inside=())
    start = range(len(matrix.hosts))
    first = tuple(start)[: plan.cluster.nodes]
    evaluator, _ = evaluator_for(job_of(on_nodes(plan, matrix, first)))
    places = places_of(plan, evaluator, matrix)
    rates, started = seconds_per_byte(matrix), time.process_time()
    order = best_order(places, rates, start=start, seed=seed, evaluations=evaluations)
    spent_s = max(time.process_time() - started, 1e-9)
    usual = on_nodes(plan, matrix, first)
    usual_s = math.inf if _uses_dead(places, rates, first) else _seconds(usual)
    moved_s, chosen = _fastest(plan, matrix, order)
    gain = usual_s / moved_s - 1.0
    priced = places.cost(np.array([first, chosen]), rates)
    interval = _as_predicted(_interval(places, matrix, chosen, seed), priced, gain)
    kept = math.isfinite(usual_s) and (interval[0] <= 0.0 or gain < LEAST_GAIN)
    taken, nodes = (usual, first) if kept else (on_nodes(plan, matrix, chosen), chosen)
    taken_s, inside = usual_s if kept else moved_s, tuple[str, ...]()
    if every.inside:
        usual_s = _seconds_or_dead(_with_inside(usual, every))
        taken, taken_s, inside = _gpus_placed(_with_inside(taken, every), seed, evaluations)
    hosts = tuple(matrix.hosts[node] for node in nodes)
    unmeasured = _unmeasured(places, matrix, nodes)
    return PlacedPlan(
        plan=_told(taken, hosts, matrix),
        hosts=hosts,
        left_out=tuple(host for host in matrix.hosts if host not in hosts),
        iteration_s=taken_s,
        default_iteration_s=usual_s,
        interval=interval,
        found_gain=gain,
        kept_default=kept and taken.rank_map == usual.rank_map,
        matrix=every,
        unmeasured_used=unmeasured,
        proved=order.proved,
        evaluations=order.evaluations,
        evaluations_per_cpu_s=order.evaluations / spent_s,
        seed=seed,
        notes=(*notes, *inside, *_warnings(plan, places, matrix, unmeasured)),
    )


def _check(cluster: ClusterSpec) -> None:
    if cluster.nodes < 2:
        raise InputError("place: the plan has one node; wanted two or more, whose order can matter")
    if cluster.linked_gpus > cluster.gpus_per_node:
        raise InputError(
            f"place: fast links join nodes of {cluster.gpu.name} into domains of {cluster.linked_gpus} GPUs; "
            "wanted nodes that stand alone: placing whole domains is not built"
        )


def nodes_to_choose(
    cluster: ClusterSpec, matrices: Sequence[LinkMatrix], words: PlaceWords
) -> tuple[LinkMatrix, list[str]]:
    """The matrix whose traffic is that of a cluster, of the nodes that may be used, with notes."""
    _check(cluster)
    avoid, spare, gpus_at_once = texts(words.get("avoid")), words.get("spare"), words.get("gpus_at_once")
    notes = []
    if gpus_at_once is None:
        matrix = matrix_for(matrices, cluster.gpus_per_node)
    else:
        counts = [one.gpus_at_once for one in matrices]
        if gpus_at_once not in counts:
            raise InputError(f"--gpus-at-once is {gpus_at_once}; measured were {', '.join(map(str, counts))}")
        matrix = matrices[counts.index(gpus_at_once)]
    if matrix.gpus_at_once < cluster.gpus_per_node:
        notes.append(
            f"the figures are of {matrix.gpus_at_once} at once of the GPUs of a node, the plan's "
            f"{cluster.gpus_per_node} send together: measured so, links may differ less"
        )
    missing = [host for host in avoid if matrix.index(host) is None]
    if missing:
        raise InputError(f"--avoid {missing[0]}: no such node; measured are {', '.join(matrix.hosts)[:200]}")
    out = {matrix.index(host) for host in avoid}
    left = [node for node in range(len(matrix.hosts)) if node not in out]
    needed = cluster.nodes + (spare or 0)
    if len(left) < needed:
        more = f" and {spare} spare ones" if spare else ""
        raise InputError(
            f"place: the plan needs {cluster.nodes} nodes{more}; links are known of {len(left)}"
            + (f" without {', '.join(avoid)}" if avoid else "")
        )
    return matrix.take(left if spare is None else left[:needed]), notes


def on_nodes(plan: Plan, matrix: LinkMatrix, nodes: Sequence[int]) -> Plan:
    """The plan with its nodes on these. The cluster lists them as the matrix does, which is how schedulers
    list an allocation; the map says the rest."""
    listed = sorted(nodes)
    position = {node: at for at, node in enumerate(listed)}
    a_node = plan.cluster.gpus_per_node
    rank_map = tuple(position[nodes[gpu // a_node]] * a_node + gpu % a_node for gpu in plan.gpu_of)
    cluster = replace(plan.cluster, links=replace(plan.cluster.links, matrix=matrix.take(listed)))
    same = rank_map == tuple(range(plan.gpus))
    return replace(plan, cluster=cluster, rank_map=None if same else rank_map)


def _with_inside(plan: Plan, matrix: LinkMatrix) -> Plan:
    """The plan with what was measured between the GPUs of its nodes."""
    links = plan.cluster.links
    assert links.matrix is not None
    nodes = [matrix.hosts.index(host) for host in links.matrix.hosts]
    return replace(plan, cluster=replace(plan.cluster, links=replace(links, matrix=matrix.take(nodes))))


def _seconds_or_dead(plan: Plan) -> float:
    try:
        return _seconds(plan)
    except InputError:
        return math.inf


def _gpus_placed(plan: Plan, seed: int, evaluations: int) -> tuple[Plan, float, tuple[str, ...]]:
    """With the GPUs of its nodes in another order where that is faster, and what that gained."""
    evaluator, _ = evaluator_for(job_of(plan))
    ordered = gpus_in_order(plan, evaluator, seed=seed, evaluations=evaluations)
    before_s, ordered_s = _seconds_or_dead(plan), _seconds(ordered)
    if before_s / ordered_s - 1.0 < LEAST_GAIN:
        return plan, before_s, ("GPUs inside nodes stay in their order: no other that was found is faster",)
    matrix, a_node = plan.cluster.links.matrix, plan.cluster.gpus_per_node
    assert matrix is not None
    moved = {gpu // a_node for gpu, other in zip(ordered.gpu_of, plan.gpu_of, strict=True) if gpu != other}
    named = ", ".join(matrix.hosts[node] for node in sorted(moved))
    gained = f"{before_s / ordered_s - 1.0:+.1%}" if math.isfinite(before_s) else "a dead link is avoided"
    return ordered, ordered_s, (f"GPUs inside {named} in another order: {gained}",)


def _seconds(plan: Plan) -> float:
    evaluator, _ = evaluator_for(job_of(plan))
    return predict_plan(plan, evaluator).iteration_s


def _fastest(plan: Plan, matrix: LinkMatrix, order: Order) -> tuple[float, tuple[int, ...]]:
    """By `predict`, of the best order and those close to it by the formula that ranked them."""
    tried = [(_seconds(on_nodes(plan, matrix, order.nodes)), order.nodes)]
    for nodes in order.close:
        seconds = _seconds(on_nodes(plan, matrix, nodes))
        if seconds < tried[-1][0] * (1.0 - LEAST_GAIN):
            tried.append((seconds, nodes))
    return tried[-1]


def _told(plan: Plan, hosts: Sequence[str], matrix: LinkMatrix) -> Plan:
    evaluator, _ = evaluator_for(job_of(plan))
    spares = [node for node, host in enumerate(matrix.hosts) if host not in hosts]
    spares.sort(key=lambda node: -mean_rate(matrix, node))
    placement = {
        "hosts": list(hosts),
        "spares": [matrix.hosts[node] for node in spares],
        "links": matrix.source,
        "date": matrix.date,
    }
    return replace(
        plan,
        prediction=prediction_document(predict_plan(plan, evaluator)),
        provenance={**(plan.provenance or {}), "placement": placement},
    )


def _uses_dead(places: Places, rates: Array, nodes: Sequence[int]) -> bool:
    order = np.array([nodes], dtype=np.intp)
    alive = rates[rates < DEAD / 2 * rates[rates > 0.0].min()]
    return bool(places.slowest(order, rates).max() > alive.max()) if places.uses else False


def _used(places: Places, nodes: Sequence[int]) -> set[frozenset[int]]:
    return {frozenset((nodes[a], nodes[b])) for use in places.uses for a, b in use.pairs}


def _unmeasured(places: Places, matrix: LinkMatrix, nodes: Sequence[int]) -> tuple[tuple[str, str], ...]:
    used = _used(places, nodes)
    pairs = ((pair, [matrix.index(host) for host in pair]) for pair in matrix.unmeasured)
    return tuple(pair for pair, at in pairs if frozenset(at) in used)


def _interval(places: Places, matrix: LinkMatrix, nodes: Sequence[int], seed: int) -> tuple[float, float]:
    """Of the gain over the order as given."""
    random = np.random.default_rng(seed)
    orders = np.array([range(places.places), nodes], dtype=np.intp)
    gains = []
    for _ in range(DRAWS):
        costs = places.cost(orders, _drawn(matrix, random))
        gains.append(float(costs[0] / costs[1]) - 1.0)
    low, high = np.quantile(gains, [0.5 - SURE / 2, 0.5 + SURE / 2])
    return float(low), float(high)


def _as_predicted(interval: tuple[float, float], costs: Array, gain: float) -> tuple[float, float]:
    """The interval as `predict` would say it of both orders: draws are priced by the formula that ranked
    them, which may count a slow link more often than it stops a step. What noise alone explains is no gain by
    either."""
    priced = float(costs[0] / costs[1]) - 1.0
    if not (math.isfinite(gain) and priced > LEAST_GAIN):
        return interval
    low, high = (end * gain / priced for end in interval)
    return low, high


def _drawn(matrix: LinkMatrix, random: np.random.Generator) -> Array:
    """Seconds per byte of each pair, as the figures and their noise leave possible."""
    logs = [math.log(rate) for rate in matrix.rates]
    middle, noise = median(logs), matrix.noise
    true = max(pvariance(logs) - noise**2, 0.0)
    kept = true / (true + noise**2) if noise > 0.0 else 1.0
    usual = seconds_per_byte(matrix)
    count = len(matrix.hosts)
    shaken = random.normal(0.0, math.sqrt(kept) * noise, (count, count))
    shaken = np.triu(shaken, 1) + np.triu(shaken, 1).T
    drawn = np.where(usual > 0.0, np.exp(-(middle + kept * (-np.log(np.where(usual > 0, usual, 1.0)) - middle)
                                           + shaken)), 0.0)  # fmt: skip
    drawn = np.where(usual >= DEAD * 1e-3 / min(matrix.rates), usual, drawn)
    for pair in matrix.unmeasured:
        a, b = (matrix.hosts.index(host) for host in pair)
        drawn[a, b] = drawn[b, a] = math.exp(-float(random.choice(logs)))
    return np.asarray(drawn)


def _warnings(
    plan: Plan, places: Places, matrix: LinkMatrix, unmeasured: Sequence[tuple[str, str]]
) -> list[str]:
    told = []
    if not places.uses:
        told.append("no group and no send of this plan leaves its node: no order is better than another")
    if any(kind.experts for kind in plan.model.kinds):
        told.append("what experts exchange is priced by the cluster's network, not by these links")
    age = age_days(matrix, datetime.now(tz=UTC).date())
    if age is None:
        told.append("when the links were measured is not said: stale figures are worse than none")
    elif age > STALE_DAYS:
        told.append(f"the links were measured {age} days ago: stale figures are worse than none")
    if matrix.spread is None:
        told.append(
            f"no pair was measured twice: an error of {matrix.noise:.0%} is assumed, that of two published "
            "snapshots; a second measurement would say"
        )
    default = _unmeasured(places, matrix, tuple(range(places.places)))
    for pairs, which in ((unmeasured, "the plan uses"), (default, "the order as given uses")):
        if pairs:
            named = ", ".join(f"{a} - {b}" for a, b in pairs)
            told.append(f"{which} {len(pairs)} links that nobody measured, taken for the slowest: {named}")
    return told
