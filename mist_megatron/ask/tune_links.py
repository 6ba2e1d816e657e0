"""The fastest plan of a job on nodes whose links were measured: its shape and its place together.

A search prices all nodes alike. With the best that a group of so many nodes can have (`best_rates`) it proves
what no plan is faster than, wherever it is placed, and gives the shapes worth placing; with the links that a
plan has where it was placed it gives plans that suit them better. Each is placed and priced as `place` does,
and the fastest is told. The bound is of the best links, so that a plan on slow ones is told with a gap.

Only the search for the bound looks at stages of unequal sizes and at every fraction of what may be offloaded.
The others look for shapes, at the ends of these fractions, and what is best for a shape is asked of it alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mist_megatron.ask.evaluators import (
    SourcedEvaluator,
    evaluator_for,
    kept_programs,
    learned_of,
    prices_for,
)
from mist_megatron.ask.on_links import OnLinks
from mist_megatron.ask.place import PlacedPlan, place_on
from mist_megatron.ask.tune import Means, Tuned, provenances, searched
from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.placed import placed_stages
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.price.wrappers import LinkedPrices
from mist_megatron.search.pipelines import EqualPipeline, MixedPipeline
from mist_megatron.search.place import best_rates
from mist_megatron.search.search import SearchResult, Settings, Status, StoppedEmpty
from mist_megatron.search.solution import Solution, plan_of
from mist_megatron.search.space import Limits, Space
from mist_megatron.spec.job import Job
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.plan import Plan

SHAPES, BOUND_SHAPES = 8, 4
"""Of each search that are placed; fixed numbers, so that how many are told does not change the best."""
MORE_SHAPES = 32
"""Of the search with the best links, where more shapes than those may be faster than what was found."""
ENDS = 1.0
"""Step of offload fractions where shapes are looked for."""
ROUNDS = 3
"""Searches with the links of the plan that was found, at most."""
BETTER = 1e-4
QUICKLY, AT_LAST = 20_000, 200_000
"""Orders that are priced of each plan, and of those that are told."""
FORMS_APART = 1e-3
"""By so much, at most, a plan can be faster by its ranks' own links than by a search's uniform ones: sends of
chunks (0.02 % at most, of 211 plans on equal links)."""

Rates = tuple[float, ...]
_Found = tuple[Solution, PlacedPlan | None]


@dataclass
class _Tried:
    """Plans that were placed, by what they are."""

    matrix: LinkMatrix
    by_plan: dict[object, tuple[Solution, PlacedPlan]] = field(default_factory=dict)
    refused: InputError | None = None

    def add(self, evaluator: StageEvaluator, solution: Solution) -> PlacedPlan | None:
        """Places it; None where no order of nodes can run it."""
        plan = plan_of(evaluator, solution)
        key = (plan.stages, plan.grad_accum, plan.vpp, plan.sequence_parallel, plan.execution)
        if key not in self.by_plan:
            try:
                placed = place_on(plan, self.matrix, evaluations=QUICKLY)
            except InputError as error:
                self.refused = error
                return None
            self.by_plan[key] = solution, placed
        return self.by_plan[key][1]

    @property
    def best_s(self) -> float:
        return min((placed.iteration_s for _, placed in self.by_plan.values()), default=float("inf"))

    @property
    def best(self) -> PlacedPlan:
        return min((placed for _, placed in self.by_plan.values()), key=lambda one: one.iteration_s)

    def fastest(self, top: int) -> list[tuple[Solution, PlacedPlan]]:
        """At most one of each shape."""
        ranked = sorted(self.by_plan.values(), key=lambda pair: pair[1].iteration_s)
        told = {solution.shape: (solution, placed) for solution, placed in reversed(ranked)}
        return sorted(told.values(), key=lambda pair: pair[1].iteration_s)[:top]


@dataclass(frozen=True)
class Asked:
    """A search, as it was asked for."""

    job: Job
    space: Space
    settings: Settings


def tune_on(asked: Asked, matrix: LinkMatrix, means: Means, notes: Sequence[str] = ()) -> Tuned:
    """The fastest plans found on nodes of the matrix, and by how much none can be faster."""
    started = time.monotonic()
    job, space, settings = asked.job, asked.space, asked.settings
    alike_sizes = replace(space, unequal=False)
    tried = _Tried(matrix)

    def look(rates: Rates, how: Settings, within: Space = space) -> tuple[SearchResult, list[_Found]]:
        def evaluator_of(choice: Job) -> SourcedEvaluator:
            return _evaluator(choice, matrix, rates)

        result, priced = searched(job, within, how, means, evaluator_of)
        wanted = (one for one in result.solutions if rates is not best or one.value_s < tried.best_s)
        return result, [(one, tried.add(priced[one.execution].evaluator, one)) for one in wanted]

    def quick_look(rates: Rates, how: Settings) -> list[_Found]:
        try:
            return look(rates, how, alike_sizes)[1]
        except StoppedEmpty:
            raise
        except NoFeasiblePlan:  # none that is faster, or only of unequal sizes or between the ends
            return []

    def look_well(rates: Rates) -> PlacedPlan | None:
        """Shapes first, then each of these by itself; the best where nodes have such rates, placed."""
        found = quick_look(rates, rough)
        if offloads:
            alone = [replace(settings, top=1, limits=_only(one.shape, settings.limits)) for one, _ in found]
            found = [pair for how in alone for pair in quick_look(rates, how)]
        return min(found, key=lambda pair: pair[0].value_s)[1] if found else None

    best = _loaded(best_rates(matrix), job, matrix)
    bound, _ = look(best, replace(settings, top=BOUND_SHAPES))
    offloads = "any" in dict(bound.space.offload.items()).values()
    rough = replace(settings, top=SHAPES, step=ENDS if offloads else settings.step)
    alike, status = None, bound.status
    try:
        alike = look_well((matrix.median_bytes_per_s,) * 2)
        if len(bound.solutions) == BOUND_SHAPES and bound.solutions[-1].value_s < tried.best_s:
            quick_look(best, replace(rough, top=MORE_SHAPES, below_s=tried.best_s))
        for _ in range(ROUNDS if tried.by_plan else 0):
            before_s = tried.best_s
            look_well(_seen(tried.best.plan, best))
            if tried.best_s > before_s * (1.0 - BETTER):
                break
    except (StoppedEmpty, KeyboardInterrupt):
        # Ended by its watch: what was placed until then is told.
        ended = means.watch.stop()
        if ended is None or not tried.by_plan:
            raise
        status = ended
    bound = replace(bound, status=status)
    if not tried.by_plan:
        assert tried.refused is not None
        raise tried.refused
    return _told(asked, bound, tried, alike, tuple(notes), time.monotonic() - started)


def _only(shape: EqualPipeline | MixedPipeline, limits: Limits) -> Limits:
    """What the user fixed, and as much of a shape as can be."""
    fixed = {**limits.fixed, "pp": shape.stages, "grad_accum": shape.grad_accum, "vpp": shape.vpp}
    if isinstance(shape, EqualPipeline):
        fixed |= {"dp": shape.dp, "tp": shape.tp, "micro_batch": shape.micro_batch}
    return replace(limits, fixed=fixed)


def _evaluator(job: Job, matrix: LinkMatrix, rates: Rates) -> SourcedEvaluator:
    """Of a job that knows nothing of links, by prices that do."""
    links = replace(job.cluster.links, matrix=matrix.take(range(job.cluster.nodes)))
    prices, origin = prices_for(replace(job, cluster=replace(job.cluster, links=links)))
    linked = LinkedPrices(prices=prices, bytes_per_s=rates)
    made = make_evaluator(job, linked, cache=kept_programs(), learned=learned_of(job))
    return SourcedEvaluator(made, origin)


def _loaded(rates: Rates, job: Job, matrix: LinkMatrix) -> Rates:
    """Where fewer GPUs were measured at once than send, what each of them gets is a share that depends on the
    nodes that are chosen (`LinkMatrix.loaded_share`): the bound takes the greatest."""
    nodes, a_node = job.cluster.nodes, job.cluster.gpus_per_node
    if matrix.gpus_at_once >= a_node or nodes == len(matrix.hosts):
        return rates
    usual, slowest = matrix.take(range(nodes)).median_bytes_per_s, min(matrix.rates)
    return tuple(rate * max(usual / slowest, 1.0) for rate in rates)


def _seen(plan: Plan, best: Rates) -> Rates:
    """By the number of nodes, what the groups of a placed plan have at worst; the best for others."""
    rates = list(best)
    rate_of_size: dict[int, float] = {}
    for placed in placed_stages(plan):
        assert placed is not None
        spans = [*(span for _, spans in placed.groups for span in spans), *placed.tied]
        for span in [*spans, *(span for border in placed.every_border for span in border)]:
            if span.bytes_per_s is not None:
                rate_of_size[span.nodes] = min(span.bytes_per_s, rate_of_size.get(span.nodes, float("inf")))
    for nodes, rate in rate_of_size.items():
        rates[nodes] = rate
    return tuple(rates)


def _told(
    asked: Asked,
    bound: SearchResult,
    tried: _Tried,
    alike: PlacedPlan | None,
    notes: tuple[str, ...],
    seconds: float,
) -> Tuned:
    """The fastest, placed once more with all care."""
    job, space, settings = asked.job, asked.space, asked.settings
    told = []
    for solution, quick in tried.fastest(settings.top):
        placed = quick
        if bound.status is Status.OPTIMAL:  # else its time is over
            plain = replace(quick.plan, cluster=job.cluster, rank_map=None)
            sure = place_on(plain, tried.matrix, evaluations=AT_LAST)
            placed = min((sure, quick), key=lambda one: one.iteration_s)
        told.append(
            (replace(solution, value_s=placed.iteration_s), replace(placed, notes=(*notes, *placed.notes)))
        )
    told.sort(key=lambda pair: pair[1].iteration_s)
    placed_plans = [placed for _, placed in told]
    best_s = placed_plans[0].iteration_s
    result = replace(
        bound,
        solutions=tuple(solution for solution, _ in told),
        objective_s=best_s,
        bound_s=min(bound.bound_s * (1.0 - FORMS_APART), best_s),
    )
    priced = [evaluator_for(job_of(placed.plan)) for placed in placed_plans]
    abouts = provenances(job, space, settings, result, priced[0][1])
    plans = tuple(
        replace(placed.plan, provenance={**(placed.plan.provenance or {}), **about})
        for placed, about in zip(placed_plans, abouts, strict=True)
    )
    return Tuned(
        job=job,
        plans=plans,
        predictions=tuple(predict(plan, one) for plan, (one, _) in zip(plans, priced, strict=True)),
        result=result,
        evaluators=tuple(one for one, _ in priced),
        seconds=seconds,
        settings=settings,
        asked=space,
        on_links=OnLinks(
            placed=tuple(replace(one, plan=plan) for one, plan in zip(placed_plans, plans, strict=True)),
            alike=alike,
            tried=len(tried.by_plan),
            complete=bound.status is Status.OPTIMAL,
            of_any_sizes=bound.space.unequal,
        ),
    )
