"""Recordings made here, before and after a change: what the first predicts is what the second is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from short_form import one_of

pytest.importorskip("torch")

import live_ranks
import live_training
import warm_start_server

from mist_megatron.ask.replay import replay
from mist_megatron.recorded.report import Page

CHANGES: list[tuple[str, dict[str, Any]]] = one_of(
    2,
    [
        ("layers", {"layers": 8}),
        ("micro_batches", {"micro_batches": 4}),
        ("load", {"scale": "op=^load$:4"}),
    ],
)
OF_RANKS: list[tuple[str, dict[str, Any], str]] = one_of(
    3,
    [
        ("pipeline", {"micro_batches": 8}, "pipeline of more micro-batches"),
        ("pipeline", {"layers": 8}, "pipeline of more layers"),
        ("pipeline", {"scale": "op=^Layer$:2"}, "slower pipeline"),
        ("replicas", {"layers": 4}, "replicas of more layers"),
        ("two replicas", {"scale": "op=^Layer$:2"}, "two slower replicas"),
    ],
)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    return recorded_by("live_training.py", folder, ["base", *(name for name, _ in CHANGES)])


def recorded_by(program: str, folder: Path, names: Collection[str]) -> Path:
    path = Path(__file__).with_name(program)
    environment = warm_start_server.environment(PYTHONPATH=str(path.parent))
    subprocess.run(
        [sys.executable, path, folder, *names], check=True, capture_output=True, timeout=300, env=environment
    )
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = dict.fromkeys(name for before, _, after in OF_RANKS for name in (before, after))
    return recorded_by("live_ranks.py", tmp_path_factory.mktemp("ranks"), names)


MOST_LATE = 1.04
"""A step that takes so many times as long as its sleeps, on a machine that is busy with other things, tells
nothing."""


@pytest.mark.parametrize(("name", "question"), CHANGES)
def test_a_change_is_predicted(recordings: Path, name: str, question: dict[str, Any]) -> None:
    files = [recordings / f"{one}.json" for one in ("base", name)]
    asleep = [
        batches
        * (layers * (live_training.FORWARD_S + live_training.BACKWARD_S) + live_training.LOAD_S * slower)
        for layers, batches, slower in (live_training.RECORDINGS[one] for one in ("base", name))
    ]
    predicted, measured = both(files[0], files[1], asleep, question)
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("before", "question", "after"), OF_RANKS)
def test_several_processes(ranks: Path, before: str, question: dict[str, Any], after: str) -> None:
    """Two stages in the order of 1F1B, and replicas that reduce beside the backward pass."""
    asleep = []
    for name in (before, after):
        count, stages, layers, batches, slower, _ = live_ranks.RECORDINGS[name]
        passes = batches + (count - 1 if stages else 0)
        asleep.append(passes * layers * (live_ranks.FORWARD_S * slower + live_ranks.BACKWARD_S))
    predicted, measured = both(ranks / before, ranks / after, asleep, question)
    assert predicted == pytest.approx(measured, rel=0.05)


def both(before: Path, after: Path, asleep: list[float], question: dict[str, Any]) -> tuple[float, float]:
    """The shortest step after a change, as it is predicted of the shortest one before, and as it was
    recorded."""
    steps = [shortest(replay(path).recorded) for path in (before, after)]
    for (_, seconds), least in zip(steps, asleep, strict=True):
        if seconds > MOST_LATE * least:
            pytest.skip(f"a step of {least:.3f} s asleep took {seconds:.3f} s: this machine is too busy")
    assert abs(steps[1][1] / steps[0][1] - 1.0) > 0.1
    answer = replay(before, step=steps[0][0], **question)
    assert answer.changed is not None
    predicted = shortest(answer.changed)[1] if answer.changed.steps else answer.changed.step_s
    return predicted, steps[1][1]


def shortest(page: Page) -> tuple[int, float]:
    """The step that took least on the rank that took longest: others had to wait for whatever else this
    machine was doing."""
    longest: dict[int, float] = {}
    for steps in page.steps.values():
        for number, seconds in steps:
            longest[number] = max(longest.get(number, 0.0), seconds)
    return min(longest.items(), key=lambda one: one[1])
