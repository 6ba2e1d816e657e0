"""Recordings made here, before and after a change: what the first predicts is what the second is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mist_megatron.ask.replay import replay
from mist_megatron.recorded.report import Page

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    program = Path(__file__).with_name("live_training.py")
    subprocess.run([sys.executable, program, folder], check=True, capture_output=True, timeout=300)
    return folder


@pytest.mark.parametrize(
    ("name", "question"),
    [("layers", {"layers": 8}), ("micro_batches", {"micro_batches": 4}), ("load", {"scale": "op=^load$:4"})],
)
def test_a_change_is_predicted(recordings: Path, name: str, question: dict[str, Any]) -> None:
    answer, truth = replay(recordings / "base.json", **question), replay(recordings / f"{name}.json")
    assert answer.changed is not None
    before, predicted, measured = (least(page) for page in (answer.recorded, answer.changed, truth.recorded))
    assert measured > 1.1 * before
    assert predicted == pytest.approx(measured, rel=0.05)


def least(page: Page) -> float:
    """The shortest step: others had to wait for whatever else this machine was doing."""
    return min(seconds for _, seconds in page.steps[0])
