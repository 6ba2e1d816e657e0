"""The fastest plan of a job with its proof, under every way of execution that the job leaves open."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mist_megatron import __version__
from mist_megatron.ask.baselines import best_by_hand
from mist_megatron.ask.emit import framework_files
from mist_megatron.ask.evaluators import evaluator_for, profile_hash
from mist_megatron.ask.plan_words import (
    faster_words,
    lines_repr,
    reasons,
    shape_words,
    speed_words,
    stage_lines,
    title_words,
)
from mist_megatron.ask.simulate import play
from mist_megatron.ask.verify import Verification
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import Prediction, predict, prediction_document
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.formats.files import write_artifacts
from mist_megatron.formats.plan_yaml import plan_to_mapping, plan_to_yaml
from mist_megatron.search.execution import ExecutionChoice, execution_choices
from mist_megatron.search.search import (
    NoneFaster,
    SearchResult,
    Settings,
    Status,
    StoppedEmpty,
    Watch,
    search,
)
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import Space, space_named
from mist_megatron.search.stage_fronts import Tally
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan
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
    """What the searches of all ways of execution found and proved together."""
    evaluator: StageEvaluator
    """Prices of the plans' way of execution."""
    seconds: float
    """What the search took."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Options that were not given -> what was taken for them."""
    verification: Verification | None = None
    """What the events say of the plans, where that was asked for."""
    files: tuple[str, ...] = ()
    """Names of what was written."""

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
        return best_by_hand(self.job, self.result)

    def verified(self, watch: Watch | None = None) -> Tuned:
        """The same plans in the order of the events, which play each of them."""

        def progress(done: int, total: int) -> None:
            if watch is not None:
                watch.progress(done, total, math.inf)
                if watch.stop() is Status.INTERRUPTED and not self.interrupted:
                    raise KeyboardInterrupt

        played = [play(plan, self.evaluator, progress=progress) for plan in self.plans]
        ranks = tuple(sorted(range(len(played)), key=lambda rank: played[rank].iteration_s))
        return replace(
            self,
            plans=tuple(self.plans[rank] for rank in ranks),
            predictions=tuple(self.predictions[rank] for rank in ranks),
            verification=Verification(ranks, tuple(played[rank] for rank in ranks)),
        )

    def written(self, out: str | Path, *, force: bool = False) -> Tuned:
        """Writes plan.yaml and, where the target has files, those: all or nothing."""
        texts = {"plan.yaml": plan_to_yaml(self.plan)}
        if TARGETS[self.plan.target].framework is not None:
            texts = {**framework_files(self.plan), **texts}
        write_artifacts(Path(out), texts, force=force)
        return replace(self, files=tuple(sorted(texts)))

    def to_dict(self) -> dict[str, Any]:
        """What `tune --json` prints; its `gain` takes the searches of `baselines`."""
        best_s = self.iteration_s
        gain = {
            name: {"iteration_s": time_s, "speedup": time_s / best_s}
            for name, time_s in self.baselines().items()
        }
        return {
            **plan_to_mapping(self.plan),
            "search": asdict(self.proof),
            "others": [plan_to_mapping(plan) for plan in self.plans[1:]],
            **({} if self.verification is None else {"verify": self.verification.to_dict()}),
            "gain": gain,
            "defaults": dict(self.defaults),
            "files": list(self.files),
        }

    def __repr__(self) -> str:
        lines = [
            f"{title_words(self.plan)}: {shape_words(self.plan)}",
            speed_words(self.prediction),
            *stage_lines(self.plan, self.prediction),
            *reasons(self.prediction),
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
    """The fastest plans of a space that fit, best first, proved as far as the least proved of the searches.

    `executor` and `at_once` are those of `search`. Raises NoFeasiblePlan where nothing fits; where
    the watch ended it before a plan was found, KeyboardInterrupt after an interrupt, StoppedEmpty after a
    limit of time.
    """
    started = time.monotonic()
    ways = _Ways(job, space, settings)
    choices = execution_choices(job, space, settings.limits)
    for choice in choices:
        try:
            evaluator, origin = evaluator_for(choice.job)
            result = search(evaluator, space, ways.settings_of(choice), watch, executor, at_once)
            ways.answers.append(_Answer(evaluator, origin, result))
        except NoneFaster as none:
            ways.none_faster.append(none)
        except NoFeasiblePlan as error:
            ways.refused.append(error)
        except InputError:
            if choice is choices[0]:
                raise  # else limits leave nothing for this way
        if ways.interrupted:
            break
    if not ways.answers:
        # What is said where nothing fits is said of the way that keeps most on the host.
        stopped = [error for error in ways.refused if isinstance(error, StoppedEmpty)]
        if ways.interrupted:
            raise KeyboardInterrupt
        raise stopped[-1] if stopped else ways.refused[-1 if choices[-1].job is job else 0]
    return ways.best(time.monotonic() - started)


@dataclass(frozen=True)
class _Answer:
    """What the search of one way of execution found."""

    evaluator: StageEvaluator
    origin: str
    result: SearchResult

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(plan_of(self.evaluator, solution) for solution in self.result.solutions)

    @cached_property
    def predictions(self) -> tuple[Prediction, ...]:
        return tuple(predict(plan, self.evaluator) for plan in self.plans)


@dataclass
class _Ways:
    """The searches of a job under one way of execution after another."""

    job: Job
    space: Space
    settings: Settings
    answers: list[_Answer] = field(default_factory=list)
    none_faster: list[NoneFaster] = field(default_factory=list)
    refused: list[NoFeasiblePlan] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """Whether the last search ended by an interrupt, with a plan or without."""
        last = self.refused[-1] if self.refused else None
        empty = isinstance(last, StoppedEmpty) and last.status is Status.INTERRUPTED
        return empty or bool(self.answers and self.answers[-1].result.status is Status.INTERRUPTED)

    def settings_of(self, choice: ExecutionChoice) -> Settings:
        """With what earlier searches learnt, and what is to be beaten."""
        known = tuple(known for answer in self.answers for known in answer.result.known)
        return replace(
            self.settings,
            limits=choice.limits,
            below_s=self._to_beat(choice),
            known=(*self.settings.known, *known),
        )

    def _to_beat(self, choice: ExecutionChoice) -> float:
        """What other ways have to beat. Where several plans are asked for, they are of one way."""
        if not choice.must_win or (self.settings.top > 1 and choice.job is not self.job):
            return math.inf
        return min((answer.result.objective_s for answer in self.answers), default=math.inf)

    def best(self, seconds: float) -> Tuned:
        """The fastest, which is proved as far as the least proved of them."""
        fastest = min(self.answers, key=lambda answer: answer.predictions[0].iteration_s)
        results, tally = [answer.result for answer in self.answers], Tally()
        searches: Sequence[SearchResult | NoneFaster] = [*results, *self.none_faster]
        for one in searches:
            tally.add(one.tally)
        open_: list[Status] = [result.status for result in results if result.status is not Status.OPTIMAL]
        open_ += [error.status for error in self.refused if isinstance(error, StoppedEmpty)]
        result = replace(
            fastest.result,
            status=open_[-1] if open_ else Status.OPTIMAL,
            objective_s=min(result.objective_s for result in results),
            bound_s=min(one.bound_s for one in searches),
            shapes=sum(one.shapes for one in searches),
            shapes_solved=sum(one.shapes_solved for one in searches),
            tally=tally,
            known=tuple(known for result in results for known in result.known),
        )
        about = {
            "version": __version__,
            "profile": fastest.origin,
            "profile_hash": profile_hash(self.job),
            "space": self.space.name,
            "grid": self.settings.step,
            "solver": self.settings.solver,
        }
        proof = asdict(_proof(result, seconds))
        told = [
            replace(
                plan,
                prediction=prediction_document(prediction),
                provenance={**about, "rank": rank, **proof},
            )
            for rank, (plan, prediction) in enumerate(zip(fastest.plans, fastest.predictions, strict=True), 1)
        ]
        return Tuned(
            job=self.job,
            plans=tuple(told),
            predictions=fastest.predictions,
            result=result,
            evaluator=fastest.evaluator,
            seconds=seconds,
        )


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
    """Status, gap, and what it took."""
    result = tuned.result
    if result.status is Status.OPTIMAL:
        stages = "stages of any sizes" if result.space.unequal else "stages of equal sizes"
        pipelines = f", {stages}," if result.space.pipeline else ""
        space = f"plan of space {result.space.name} on this target{pipelines}"
        proof = f"proved: no {space} is {faster_words(result.gap)}"
    else:
        proof = f"{result.status.value}: within {result.gap:.1%} of the bound {result.bound_s:.4g} s"
    return (
        f"{proof} ({result.tally.priced:,} configurations priced, {result.shapes_solved} of "
        f"{result.shapes} shapes solved, {tuned.seconds:.1f} s)"
    )
