"""The fastest plan of a job with its proof, under every way of execution that the job leaves open."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mist_megatron import __version__
from mist_megatron.ask.baselines import best_by_hand
from mist_megatron.ask.evaluators import Sharing, SourcedEvaluator, error_bar_of, evaluator_for, profile_hash
from mist_megatron.ask.left_out import left_out_words
from mist_megatron.ask.on_links import OnLinks
from mist_megatron.ask.plan_words import (
    faster_words,
    lines_repr,
    reasons,
    shape_words,
    speed_words,
    stage_lines,
    title_words,
)
from mist_megatron.ask.second_opinion import opinion_words
from mist_megatron.ask.simulate import play
from mist_megatron.ask.verify import Verification
from mist_megatron.calibrate.error_bars import ErrorBar
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import Prediction, predict, prediction_document
from mist_megatron.errors import InputError
from mist_megatron.events.iteration import played_s
from mist_megatron.formats.files import write_artifacts
from mist_megatron.formats.plan_yaml import plan_to_mapping, plan_to_yaml
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.galvatron import LayerwiseResult, search_layerwise
from mist_megatron.search.search import (
    SearchResult,
    Settings,
    Status,
    StoppedEmpty,
    Watch,
    search_ways,
)
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import Limits, Space, space_named
from mist_megatron.search.stage_fronts import Tally
from mist_megatron.search.ways import ways_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution, Plan
from mist_megatron.targets.rules import violations
from mist_megatron.targets.table import TARGETS

FULL = space_named("full")
SETTINGS = Settings()
SILENT = Watch()


def silently() -> AbstractContextManager[Watch]:
    """How a search is watched that is only a part of what was asked: it tells nothing and goes on."""
    return nullcontext(SILENT)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How much is known of plans that were not told: `search` of `tune --json`."""

    status: str
    """optimal, time limit or interrupted."""
    gap: float
    """How far the plan told may be from the fastest, relative; 0 where it is proved to be that."""
    objective_s: float
    """What was minimised: seconds per step of the plan told."""
    plan_objective_s: float
    """The same: one figure since what is told is what is proved."""
    bound_s: float
    """No plan of the space is faster than this."""
    configs: int
    """Configurations of stages that were priced."""
    over_memory: int
    """Of these, what did not fit."""
    shapes: int
    milp_solved: int
    """Of the shapes, what had to be solved."""
    seconds: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuned:
    """The answer of a search: plans with prediction and provenance, best first, and the proof."""

    job: Job
    """What was asked."""
    plans: tuple[Plan, ...]
    """The fastest first; at most one of each shape."""
    predictions: tuple[Prediction, ...]
    """What each plan costs."""
    result: SearchResult
    """What the search over all ways of execution found and proved."""
    evaluators: tuple[StageEvaluator, ...]
    """Prices of each plan's way of execution."""
    seconds: float
    """What the search took."""
    settings: Settings = SETTINGS
    """How it was searched."""
    asked: Space = FULL
    """The space that was asked for."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Options that were not given -> what was taken for them."""
    verification: Verification | None = None
    """What the events say of the plans, where that was asked for."""
    on_links: OnLinks | None = None
    """Which node goes where, where measured links were given."""
    on_fewer: bool = False
    """Whether fewer of the GPUs were tried too."""
    notes: tuple[str, ...] = ()
    """What else was found, such as how many GPUs are the fewest that will do."""
    files: tuple[str, ...] = ()
    """Names of what was written ..."""
    out: Path | None = None
    """... and the folder."""

    @property
    def plan(self) -> Plan:
        """The fastest plan."""
        return self.plans[0]

    @property
    def prediction(self) -> Prediction:
        """What the fastest plan costs."""
        return self.predictions[0]

    @property
    def iteration_s(self) -> float:
        """Seconds per step of the fastest plan."""
        return self.prediction.iteration_s

    @cached_property
    def error_bar(self) -> ErrorBar:
        """How far that may be off."""
        return error_bar_of(self.job)

    @property
    def space(self) -> Space:
        """What was searched: the space asked for, cut to what the target runs and the limits leave."""
        return self.result.space

    @property
    def tally(self) -> Tally:
        """What was priced and dropped."""
        return self.result.tally

    @property
    def interrupted(self) -> bool:
        """Whether the search was ended before it was done, by hand."""
        return self.result.status is Status.INTERRUPTED

    @property
    def proof(self) -> Proof:
        """How much is known of plans that were not told."""
        return _proof(self.result, self.seconds)

    def baselines(self) -> Mapping[str, float]:
        """Hand-made space -> seconds per step of its best plan; a search of its own, made once."""
        return self._by_hand

    @cached_property
    def _by_hand(self) -> Mapping[str, float]:
        # By hand nobody places: with measured links the plan for equal links stands for it.
        if self.on_links is not None:
            return {}
        best = self.result.solutions[0].execution
        alike = (one for one in self.evaluators if one.job.execution == best)
        whole = self.asked == FULL and self.settings.limits == Limits()
        return best_by_hand(self.job, self.result, next(alike, None) if whole else None)

    def first(self, count: int) -> Tuned:
        """Only so many plans, the fastest."""
        return replace(
            self,
            plans=self.plans[:count],
            predictions=self.predictions[:count],
            evaluators=self.evaluators[:count],
            on_links=self.on_links and self.on_links.ranked(range(len(self.plans[:count]))),
        )

    def played(self) -> Tuned:
        """With a note where the events, which play each plan, say another thing than `predict`."""
        pairs = zip(self.plans, self.evaluators, strict=True)
        seconds = [played_s(plan, evaluator) for plan, evaluator in pairs]
        words = opinion_words([one.iteration_s for one in self.predictions], seconds)
        return replace(self, notes=(*self.notes, *words))

    def verified(self, watch: Watch | None = None) -> Tuned:
        """The same plans in the order of the events, which play each of them."""

        def progress(done: int, total: int) -> None:
            if watch is not None:
                watch.progress(done, total, math.inf)
                if watch.stop() is Status.INTERRUPTED and not self.interrupted:
                    raise KeyboardInterrupt

        pairs = zip(self.plans, self.evaluators, strict=True)
        played = [play(plan, evaluator, progress=progress) for plan, evaluator in pairs]
        ranks = tuple(sorted(range(len(played)), key=lambda rank: played[rank].iteration_s))
        return replace(
            self,
            plans=tuple(self.plans[rank] for rank in ranks),
            predictions=tuple(self.predictions[rank] for rank in ranks),
            evaluators=tuple(self.evaluators[rank] for rank in ranks),
            on_links=self.on_links and self.on_links.ranked(ranks),
            verification=Verification(ranks, tuple(played[rank] for rank in ranks)),
        )

    def written(self, out: str | Path, *, force: bool = False) -> Tuned:
        """Writes plan.yaml and, where the target has files, those: all or nothing. A target that runs layers
        one by one is a model of costs besides, and says so where nothing else is written."""
        # Imported late: most searches are only read.
        from mist_megatron.ask.emit import framework_files

        texts, notes = {"plan.yaml": plan_to_yaml(self.plan)}, self.notes
        target = TARGETS[self.plan.target]
        by_layer = target.can(self.plan.training.precision, self.plan.execution).layer_strategies
        if target.framework is not None:
            try:
                texts = {**framework_files(self.plan), **texts}
            except InputError as error:
                if not by_layer:
                    raise
                notes = (*notes, f"plan.yaml alone was written: {error.message.removeprefix('plan: ')}")
        write_artifacts(Path(out), texts, force=force)
        return replace(self, files=tuple(sorted(texts)), out=Path(out), notes=notes)

    def to_dict(self) -> dict[str, Any]:
        """What `tune --json` prints; its `gain` takes the searches of `baselines`."""
        best_s = self.iteration_s
        gain = {
            name: {"iteration_s": time_s, "speedup": time_s / best_s}
            for name, time_s in self.baselines().items()
        }
        return {
            **plan_to_mapping(self.plan),
            "error_bar": self.error_bar.to_dict(),
            "search": asdict(self.proof),
            "others": [plan_to_mapping(plan) for plan in self.plans[1:]],
            **({} if self.verification is None else {"verify": self.verification.to_dict()}),
            **({} if self.on_links is None else {"placement": self.on_links.to_dict()}),
            **({"notes": list(self.notes)} if self.notes else {}),
            "gain": gain,
            "defaults": dict(self.defaults),
            "files": list(self.files),
        }

    def __repr__(self) -> str:
        lines = [
            f"{title_words(self.plan)}: {shape_words(self.plan)}",
            speed_words(self.prediction, self.error_bar),
            *stage_lines(self.plan, self.prediction),
            *reasons(self.plan, self.prediction),
            *self.notes,
            proof_words(self),
        ]
        return lines_repr(self, lines)


def tune(
    job: Job,
    *,
    space: Space = FULL,
    settings: Settings = SETTINGS,
    watch: Watch = SILENT,
    executor: Executor | None = None,
    at_once: int = 8,
) -> Tuned:
    """The fastest plans of a space that fit, best first, over all ways of execution that the job leaves open.

    `executor` and `at_once` are those of `search`. Raises NoFeasiblePlan where nothing fits; where
    the watch ended it before a plan was found, KeyboardInterrupt after an interrupt, StoppedEmpty after a
    limit of time.
    """
    started = time.monotonic()
    result, origins = searched(job, space, settings, Means(watch, executor, at_once))
    return _told(job, space, settings, result, origins, time.monotonic() - started)


@dataclass(frozen=True)
class Means:
    """Who watches a search, and where shapes are solved."""

    watch: Watch = SILENT
    executor: Executor | None = None
    at_once: int = 8


Priced = Mapping[Execution, SourcedEvaluator]
"""By way of execution: prices, and where they are from."""


def searched(
    job: Job,
    space: Space,
    settings: Settings,
    means: Means,
    evaluator_of: Callable[[Job], SourcedEvaluator] | None = None,
) -> tuple[SearchResult, Priced]:
    """One search over all ways of execution, and what each was priced by."""
    if space.layerwise is not None:
        sourced = (evaluator_of or evaluator_for)(job)
        layerwise = search_layerwise(sourced.evaluator, space, settings, means.watch)
        return layerwise, {job.execution: sourced}
    sharing = Sharing(evaluator_of)
    ways = ways_of(execution_choices(job, space, settings.limits), lambda choice: sharing.of(choice.job))
    try:
        result = search_ways(ways, space, settings, means.watch, means.executor, means.at_once)
    except StoppedEmpty as stopped:
        if stopped.status is Status.INTERRUPTED:
            raise KeyboardInterrupt from None
        raise
    return result, sharing.made


def _told(
    job: Job, space: Space, settings: Settings, result: SearchResult, priced: Priced, seconds: float
) -> Tuned:
    """What a search found, as plans with prediction and provenance."""
    evaluators = tuple(priced[one.execution].evaluator.in_order(one.shape.order) for one in result.solutions)
    plans = [plan_of(*pair) for pair in zip(evaluators, result.solutions, strict=True)]
    if settings.limits.offload_modules and (broken := [why for plan in plans for why in violations(plan)]):
        raise InputError(f"--fix offload_modules: {broken[0]}")
    predictions = tuple(predict(*pair) for pair in zip(plans, evaluators, strict=True))
    abouts = provenances(job, space, settings, result, priced[result.solutions[0].execution].origin)
    told = [
        replace(plan, prediction=prediction_document(prediction), provenance=about)
        for plan, prediction, about in zip(plans, predictions, abouts, strict=True)
    ]
    return Tuned(
        job=job,
        plans=tuple(told),
        predictions=predictions,
        result=result,
        evaluators=evaluators,
        seconds=seconds,
        settings=settings,
        asked=space,
        notes=(result.words(),) if isinstance(result, LayerwiseResult) else (),
    )


def provenances(
    job: Job, space: Space, settings: Settings, result: SearchResult, prices: str
) -> list[dict[str, Any]]:
    """How each plan of a search was found, the fastest first. What the search took is not in it: that depends
    on the machine and on how many processes there are, and a plan's file does not."""
    about = {
        "version": __version__,
        "profile": prices,
        "profile_hash": profile_hash(job),
        "space": space.name,
        "grid": settings.step,
        "solver": settings.solver,
    }
    proof = {key: value for key, value in asdict(_proof(result, 0.0)).items() if key not in EFFORT}
    return [{**about, "rank": rank, **proof} for rank in range(1, len(result.solutions) + 1)]


EFFORT = ("configs", "over_memory", "shapes", "milp_solved", "seconds")
"""Of a proof, what it took: also how many shapes were seen to be possible, of those that were looked at."""


def _proof(result: SearchResult, seconds: float) -> Proof:
    return Proof(
        status=result.status.value,
        gap=result.gap,
        objective_s=result.objective_s,
        plan_objective_s=result.solutions[0].value_s,
        bound_s=result.bound_s,
        configs=result.tally.priced,
        over_memory=result.tally.over_memory,
        shapes=result.shapes,
        milp_solved=result.shapes_solved,
        seconds=seconds,
    )


def proof_words(tuned: Tuned) -> str:
    """Status, gap, what was left out, and what it took."""
    result = tuned.result
    if result.status is Status.OPTIMAL:
        stages = "stages of any sizes" if result.space.unequal else "stages of equal sizes"
        pipelines = f", {stages}," if result.space.pipeline else ""
        space = f"plan of space {result.space.name} on this target{pipelines}"
        proof = f"proved: no {space} is {faster_words(result.gap)}"
    else:
        proof = f"{result.status.value}: within {result.gap:.1%} of the bound {result.bound_s:.4g} s"
    return (
        f"{proof} ({left_out_words(tuned)}{result.tally.priced:,} configurations priced, "
        f"{result.shapes_solved:,} of {result.shapes:,} shapes solved, {tuned.seconds:.1f} s)"
    )
