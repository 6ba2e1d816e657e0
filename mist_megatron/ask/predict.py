"""What a given plan costs in time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mist_megatron.ask.evaluators import error_bar_of, evaluator_for
from mist_megatron.ask.latency import FORMULAS, Latencies, latencies
from mist_megatron.ask.links import load_links, on_first_nodes
from mist_megatron.ask.plan_words import (
    lines_repr,
    reasons,
    shape_words,
    speed_words,
    stage_lines,
    title_words,
)
from mist_megatron.ask.plans import PlanLike, load_plan
from mist_megatron.ask.words import texts, with_words
from mist_megatron.calibrate.error_bars import ErrorBar
from mist_megatron.cost.predict import Prediction, job_of, prediction_document
from mist_megatron.cost.predict import predict as predict_plan
from mist_megatron.spec import check
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.rules import require_runnable, violations


@dataclass(frozen=True, kw_only=True, repr=False)
class Predicted:
    """One optimizer step of a plan: its time, its memory, and all terms of both."""

    plan: Plan
    prediction: Prediction
    """Seconds and bytes, stage by stage and term by term."""
    prices: str
    """Which profile or datasheet the prices are of."""
    violations: tuple[str, ...] = ()
    """Why its target cannot run the plan; empty where it can."""
    latency: Latencies | None = None
    """By published formulas and by the events, where one was asked for."""

    @property
    def iteration_s(self) -> float:
        """Seconds per step."""
        return self.prediction.iteration_s

    @cached_property
    def error_bar(self) -> ErrorBar:
        """How far that may be off."""
        return error_bar_of(job_of(self.plan))

    @property
    def fits(self) -> bool:
        """Whether every stage fits into its memory."""
        return self.prediction.fits

    def to_dict(self) -> dict[str, Any]:
        """What `predict --json` prints."""
        return {
            **prediction_document(self.prediction),
            "error_bar": self.error_bar.to_dict(),
            "profile": self.prices,
            "violations": list(self.violations),
            **({} if self.latency is None else {"latency": self.latency.to_dict()}),
        }

    def __repr__(self) -> str:
        lines = [
            f"{title_words(self.plan)}: {shape_words(self.plan)}",
            f"{speed_words(self.prediction, self.error_bar)}{'' if self.fits else '; does NOT fit'}",
            *stage_lines(self.plan, self.prediction),
            *reasons(self.plan, self.prediction),
            f"of {self.prices}",
            *(f"cannot run: {rule}" for rule in self.violations),
        ]
        return lines_repr(self, lines)


@with_words
def predict(
    plan: PlanLike,
    *,
    what_if: bool = False,
    without: str | Sequence[str] = (),
    links: str | Path | None = None,
    latency: str | None = None,
) -> Predicted:
    """Time and memory of a plan, with every term, and what binds it.

    `what_if` prices it even if its target cannot run it; `without` leaves named terms out; `links` prices
    it on the first nodes of a links.yaml; `latency` (pipette, eq1, amp or events) tells what published
    formulas and the events say beside it.
    """
    plan = load_plan(plan)
    if latency is not None:
        check.known("--latency", "formula", latency, FORMULAS)
    if links is not None:
        plan = on_first_nodes(plan, load_links(links))
    if not what_if:
        require_runnable(plan)
    evaluator, prices = evaluator_for(job_of(plan), without=frozenset(texts(without)))
    return Predicted(
        plan=plan,
        prediction=predict_plan(plan, evaluator),
        prices=prices,
        violations=violations(plan),
        latency=None if latency is None else latencies(plan),
    )
