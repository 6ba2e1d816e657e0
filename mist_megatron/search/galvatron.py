"""The search of spaces with a strategy per layer: every pipeline by eq. 1, the promising ones by `predict`.

It is no proof: stages are solved one for one, as if each were the slowest, and layers move as the heuristic
(or the exact solver over these stages) moves them. What is told besides is a bound that no plan of the space
beats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import Array
from mist_megatron.cost.predict import predict
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.balance import NEAR, Candidate, Stages, candidates, pipelines
from mist_megatron.search.layer_rules import LayerRules
from mist_megatron.search.layerwise import StagePoint
from mist_megatron.search.pipelines import EqualPipeline, MixedPipeline
from mist_megatron.search.search import SearchResult, Settings, Status, StoppedEmpty, Watch
from mist_megatron.search.solution import Solution, StageChoice, plan_of
from mist_megatron.search.space import WORDS, Limits, Space, cut_to_target, space_named
from mist_megatron.search.stage_fronts import Tally
from mist_megatron.search.strategy_prices import StrategyPrices
from mist_megatron.spec.kinds import KINDS
from mist_megatron.spec.recompute import RECOMPUTE_KINDS
from mist_megatron.spec.strategies import LayerRun
from mist_megatron.targets.rules import require_job

KNOWN_LIMITS = ("pp", "grad_accum", "dp", "tp", "micro_batch", "zero")
MOST_PREDICTED = 12
"""Pipelines of a space."""


def search_layerwise(
    evaluator: StageEvaluator, space: Space, settings: Settings, watch: Watch | None = None
) -> LayerwiseResult:
    """The best plans of such a space, best first."""
    job = evaluator.job
    require_job(job.model, job.training.precision, job.target)
    cut_to_target(space, job.target, job.training.precision, job.execution)
    _require_plain(evaluator, settings.limits)
    search = _Search(evaluator, settings, watch or Watch(), one_space=True)
    try:
        solutions = search.best_of(space.name)
    except _Stopped as stopped:
        solutions = search.found()
        if not solutions:
            raise StoppedEmpty(stopped.status) from None
        search.status = stopped.status
    if not solutions and not np.isfinite(search.bound_s(space)):
        raise NoFeasiblePlan(
            f"no strategy of space {space.name} shares out every layer of {job.model.name} over "
            f"{job.cluster.gpus} GPUs under these limits, whatever their memory",
            details=("try: GPUs that divide heads and --global-batch" + _wider(space),),
        )
    if not solutions:
        least = evaluator.limit_bytes / 2**30
        raise NoFeasiblePlan(
            f"no plan of space {space.name} fits {job.model.name} on {job.cluster.gpus} GPUs",
            details=(f"{search.tally.priced} stages were solved; each GPU may hold {least:.1f} GiB",
                     "try: more GPUs, a smaller --global-batch" + _wider(space)),
        )  # fmt: skip
    best = solutions[0]
    return LayerwiseResult(
        full_s=search.full_s(),
        most=settings.per_layer.most,
        solutions=tuple(solutions[: settings.top]),
        status=search.status,
        objective_s=best.value_s,
        bound_s=min(best.value_s, search.bound_s(space)),
        space=space,
        shapes=search.tally.priced,
        shapes_solved=len(solutions),
        tally=search.tally,
        known=(),
    )


def _wider(space: Space) -> str:
    return "" if space.name == "galvatron-bmw" else ", or --space galvatron-bmw"


def best_of_each(
    evaluator: StageEvaluator, names: Sequence[str], settings: Settings, watch: Watch
) -> dict[str, Solution]:
    """The best of several such spaces, those that have a plan that fits; what one knows serves all."""
    job = evaluator.job
    require_job(job.model, job.training.precision, job.target)
    for name in names:
        cut_to_target(space_named(name), job.target, job.training.precision, job.execution)
    _require_plain(evaluator, settings.limits)
    search = _Search(evaluator, settings, watch, one_space=False)
    try:
        solutions = {name: search.best_of(name) for name in names}
    except _Stopped:
        raise KeyboardInterrupt from None
    return {name: plans[0] for name, plans in solutions.items() if plans}


def _require_plain(evaluator: StageEvaluator, limits: Limits) -> None:
    job = evaluator.job
    odd = sorted({*limits.fixed, *limits.most} - set(KNOWN_LIMITS))
    words = [name for name in WORDS if getattr(limits, name) is not None]
    said = [*odd, *sorted(limits.forbidden), *words, *(f"offload.{kind}" for kind in limits.offload)]
    if said:
        raise InputError(f"spaces with a strategy per layer know no limit of {said[0]}; wanted {', '.join(KNOWN_LIMITS)}")  # fmt: skip  # noqa: E501
    if job.cluster.groups:
        raise InputError(
            f"spaces with a strategy per layer are not searched on {job.cluster.words}; wanted one kind"
        )
    if job.cluster.links.matrix is not None:
        raise InputError("cluster: spaces with a strategy per layer price all nodes alike; wanted no links")
    if job.model.routed is not None or job.model.mtp_layers or job.execution.context_parallel > 1:
        raise InputError(
            f"model {job.model.name}: experts, multi-token prediction and context parallelism are not "
            "modelled beside strategies per layer"
        )


@dataclass(frozen=True, kw_only=True)
class LayerwiseResult(SearchResult):
    """With what more strategies per stage are worth."""

    full_s: float
    """The best that was found with any number of strategies per stage."""
    most: int | None

    def words(self) -> str:
        """The gap."""
        if self.most is None:
            return "each stage has as many strategies as it wants"
        gap = 1.0 - self.full_s / self.objective_s
        return f"at most {self.most} strategies per stage; with any number {gap:.1%} less time was found"


class _Stopped(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class _Search:
    """What one search knows."""

    def __init__(
        self, evaluator: StageEvaluator, settings: Settings, watch: Watch, *, one_space: bool
    ) -> None:
        self.evaluator, self.settings, self.watch = evaluator, settings, watch
        self.one_space = one_space
        """What is asked for is the best of a space, not of each within it too."""
        self.tally, self.status = Tally(), Status.FOUND
        self.priced = cache(lambda stages, grad_accum: StrategyPrices(evaluator, stages, grad_accum))
        self.best_of = cache(self._best_of)
        self._told: dict[tuple[object, ...], Solution] = {}

    def found(self) -> list[Solution]:
        """All plans that fit so far, best first."""
        return sorted(self._told.values(), key=lambda one: one.value_s)

    def _best_of(self, name: str) -> list[Solution]:
        """Plans of a space and of the spaces within it, best first, each shape once."""
        rules = space_named(name).layerwise
        assert rules is not None
        made: list[tuple[Stages, Candidate]] = []
        per_layer = self.settings.per_layer
        exactly = per_layer.balance == "exact"
        faster = [one for one in self._pipelines(rules) if one[0] <= self._worth_s()]
        for stages, candidate in candidates(faster, rules, solve_exactly=exactly):
            self._tick()
            made.append((stages, candidate))
            self.tally.priced += 1
        least = min((candidate.value_s for _, candidate in made), default=0.0)
        near = sorted(
            ((s, c) for s, c in made if c.value_s <= NEAR * least), key=lambda pair: pair[1].value_s
        )
        solutions: list[Solution] = []
        for stages, candidate in _apart(near):
            self._tick()
            full = self._solution(candidate)
            solutions += [] if full is None else [full]
            if per_layer.most is not None:
                few = stages.with_few(candidate, per_layer.most)
                solutions += [one for one in [few and self._solution(few)] if one]
        solutions += [one for inner in rules.within for one in self.best_of(inner)]
        kept = [one for one in solutions if self._few_enough(one)]
        return sorted({id(one): one for one in kept}.values(), key=lambda one: one.value_s)

    def _worth_s(self) -> float:
        """No pipeline that takes longer can be among what is told of a space and of those within it."""
        times = sorted(one.value_s for one in self._told.values() if self._few_enough(one))
        most = self.settings.top
        return times[most - 1] if self.one_space and len(times) >= most else np.inf

    def _few_enough(self, solution: Solution) -> bool:
        most = self.settings.per_layer.most
        return most is None or all(
            len({run.strategy for run in runs}) <= most for runs in solution.strategies
        )

    def _tick(self) -> None:
        status = self.watch.stop()
        if status is not None:
            raise _Stopped(status)
        told = min((one.value_s for one in self._told.values()), default=float("inf"))
        self.watch.progress(len(self._told), self.tally.priced, told)

    def _solution(self, candidate: Candidate) -> Solution | None:
        """With the time that is told of it; None where `predict` finds no room for it."""
        prices = candidate.prices
        cells = tuple(point.cells for point in candidate.points)
        key = prices.stages, prices.grad_accum, cells
        if key not in self._told:
            solution = _made(self.evaluator, prices, candidate.points)
            prediction = predict(plan_of(self.evaluator, solution), self.evaluator)
            if not prediction.fits:
                self.tally.over_memory += 1
                return None
            self._told[key] = replace(solution, value_s=prediction.iteration_s)
        return self._told[key]

    def full_s(self) -> float:
        """The best time with any number of strategies per stage."""
        return min(one.value_s for one in self._told.values())

    def bound_s(self, space: Space) -> float:
        """No plan is faster."""
        assert space.layerwise is not None
        return min((least_s for least_s, _, _ in self._pipelines(space.layerwise)), default=np.inf)

    def _pipelines(self, rules: LayerRules) -> list[tuple[float, StrategyPrices, Array]]:
        return pipelines(self.evaluator, rules, self.settings.limits.allows, self.priced)


def _apart(near: Sequence[tuple[Stages, Candidate]]) -> list[tuple[Stages, Candidate]]:
    """The first of each number of stages and micro-batches, then others."""
    firsts: dict[tuple[int, int], tuple[Stages, Candidate]] = {}
    for pair in near:
        firsts.setdefault((pair[1].prices.stages, pair[1].prices.grad_accum), pair)
    first = list(firsts.values())
    return [*first, *(pair for pair in near if pair not in first)][:MOST_PREDICTED]


def _made(evaluator: StageEvaluator, prices: StrategyPrices, points: Sequence[StagePoint]) -> Solution:
    meshes, stages, strategies = [], [], []
    edges = []
    for point in points:
        each = [prices.strategy(cell) for cell in point.of_layers]
        edges.append(_own_edges(prices, point))
        first = each[0]
        meshes.append(
            EqualPipeline(
                grad_accum=prices.grad_accum,
                stages=prices.stages,
                nodes=prices.nodes,
                gpus_per_node=prices.gpus_per_node,
                dp=first.layout.dp,
                tp=first.layout.tp,
                micro_batch=prices.samples // first.layout.dp,
                sequence_parallel=False,
                vpp=1,
                zero=(first.zero,),
            )
        )
        choice: StageChoice = {
            "layers": float(len(each)),
            "zero": float(first.zero),
            "ckpt": float(sum(strategy.ckpt for strategy in each)),
            "recompute": float(RECOMPUTE_KINDS.index("full")),
            **dict.fromkeys(KINDS, 0.0),
        }
        stages.append(choice)
        runs = groupby(map(str, each))
        strategies.append(tuple(LayerRun(count=len(list(run)), strategy=text) for text, run in runs))
    shape = MixedPipeline(grad_accum=prices.grad_accum, meshes=tuple(meshes))
    execution, of_layers = evaluator.job.execution, tuple(strategies)
    return Solution(shape, tuple(stages), 0.0, execution, of_layers, tuple(edges))


def _own_edges(prices: StrategyPrices, point: StagePoint) -> tuple[str | None, str | None]:
    """What embedding and head run, where that is not what the layers beside them run."""
    before, behind = point.edges
    pairs = ((before, point.cells[0], point.of_layers[0]), (behind, point.cells[-1], point.of_layers[-1]))
    own = []
    for there, cell, beside in pairs:
        edge, layer = prices.strategy(cell), prices.strategy(beside)
        own.append(str(edge) if there and edge != replace(layer, ckpt=False) else None)
    return own[0], own[1]
