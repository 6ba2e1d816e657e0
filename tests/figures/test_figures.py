"""What is told and written of some hundred plans, drawn from all that targets can run: that nothing moved.

The figures say that nothing moved, not that they are right: that other tests hold, of plans whose figures
are known from elsewhere. Where they are meant to move:

    PYTHONPATH=.:tests:tests/figures python tests/figures/test_figures.py

and the difference of figures.json shows of how many plans, and how far.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from legal_plans import legal_plans
from short_form import one_of

from mist_megatron.ask.emit import launch_sources
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of, predict, prediction_document
from mist_megatron.errors import MistError
from mist_megatron.events.iteration import simulate
from mist_megatron.events.report import simulation_document
from mist_megatron.formats.plan_yaml import plan_to_yaml
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.spec.plan import TARGET_NAMES, Execution, Plan

HOME = Path(__file__).with_name("figures.json")
SEED, PLANS, TOGETHER = 20261129, 160, 16
DIGITS, OF_ALL, DECIMALS = 8, 6, 10
"""Told of each figure, and those that count in a digest, of seconds no less than a tenth of a nanosecond:
sums of floats differ in the last digits from machine to machine, and differences of sums in more."""
PLANS_DRAWN = tuple(legal_plans(SEED, PLANS))


def figures(plan: Plan) -> dict[str, Any]:
    """Of one plan: what is predicted, played and written; or what is refused, in its words."""
    try:
        evaluator = evaluator_for(job_of(plan))[0]
        told = prediction_document(predict(plan, evaluator))
        played = simulate(plan, evaluator)
        events = {**simulation_document(played), "ends_s": float(played.timeline.end_s.sum())}
    except MistError as refused:
        return {"refused": digest(refused.message)}
    return {
        "iteration_s": rounded(told["iteration_s"]),
        "peak_gib": rounded(max(stage.peak_memory_bytes for stage in played.prediction.stages) / 2**30),
        "told": digest(told),
        "played_s": rounded(played.iteration_s),
        "events": digest(events),
        **written(plan),
    }


def written(plan: Plan) -> dict[str, str]:
    try:
        texts = {"plan.yaml": plan_to_yaml(plan), **artifacts(plan, sources())}
    except MistError as refused:
        return {"files": digest(refused.message)}
    return {"files": digest(texts)}


@cache
def sources() -> Any:
    return launch_sources(probe=False)


def rounded(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else value


def digest(value: Any) -> str:
    """Of a document, its figures rounded."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:10]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return repr(rounded(round(value, DECIMALS), OF_ALL) + 0.0) if isinstance(value, float) else value


@pytest.mark.parametrize("first", one_of(2, range(0, PLANS, TOGETHER)))
def test_nothing_moved(first: int) -> None:
    known = json.loads(HOME.read_text("utf-8"))
    for number in range(first, first + TOGETHER):
        assert figures(PLANS_DRAWN[number]) == known[number], (number, PLANS_DRAWN[number])


def test_plans_are_of_all_kinds() -> None:
    """A rule that refuses more takes kinds of plans away from here."""
    assert {plan.target for plan in PLANS_DRAWN} == set(TARGET_NAMES)
    assert sum(not plan.model.plain for plan in PLANS_DRAWN) >= 10, "of several widths"
    usual = vars(Execution())
    switched = {key for plan in PLANS_DRAWN for key in usual if vars(plan.execution)[key] != usual[key]}
    assert switched == set(usual)


if __name__ == "__main__":
    lines = [json.dumps(figures(plan)) for plan in PLANS_DRAWN]
    HOME.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
