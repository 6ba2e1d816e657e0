"""What recipes promise by the closed form, played event by event: the second opinion on numbers that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.files import load_plan

RECIPES = Path(__file__).parents[2] / "recipes"
PLAYED = (
    "gpt3-13b-4x8-a100-80gb",
    "gpt3-13b-4x8-l4",
    "gpt3-22b-4x8-a100-40gb",
    "gpt3-22b-4x8-h100",
    "gpt3-7b-2x8-l4",
    "gpt3-7b-4x8-a100-40gb",
    "llama2-13b-4x8-h100",
    "llama3-405b-128x8-h100",
)
"""Interleaved, on networks that do and do not hide sends, and with every kind of offload that recipes use."""


@pytest.mark.parametrize("name", PLAYED)
def test_recipes_hold_by_events(name: str) -> None:
    plan = load_plan(RECIPES / name / "plan.yaml")
    found = simulate(plan, evaluator_for(job_of(plan))[0])
    assert plan.prediction is not None
    assert plan.prediction["iteration_s"] == pytest.approx(found.iteration_s, rel=0.03)
