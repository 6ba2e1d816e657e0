"""What `tune` says where the events do not say what it was told by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mist_megatron as mm
from mist_megatron.ask import tune as tuning
from mist_megatron.ask.second_opinion import opinion_words

JOB = {
    "model": "gpt3-1.3b",
    "gpus": 2,
    "gpus_per_node": 2,
    "gpu": "a100-sxm-40gb",
    "global_batch": 8,
    "seq": 1024,
    "space": "3d",
}


def test_small_differences_are_nothing_to_tell() -> None:
    assert opinion_words([1.0, 1.1], [1.029, 1.1]) == ()
    assert opinion_words([1.0], [0.971]) == ()


def test_both_figures_are_told() -> None:
    (words,) = opinion_words([1.0, 2.0], [None, 1.5])
    assert words.startswith("not played")
    (words,) = opinion_words([1.0, 1.2], [1.25, 1.3])
    assert "takes 1.25 s" in words and "1 s (-20.0%)" in words
    (words,) = opinion_words([1.0], [0.8])
    assert "takes 0.8 s" in words and "(+25.0%)" in words


def test_a_rival_that_is_faster_is_named() -> None:
    """Plan 3 of three; one that was not played is none."""
    (words,) = opinion_words([1.0, 1.01, 1.02, 1.03], [1.02, 1.02, 1.0, None])
    assert "plan 3 is faster: 1 s against 1.02 s" in words and "--verify simulate" in words


@pytest.fixture
def slower_when_played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Events of which every third second is no closed form's."""
    asked: list[float] = []
    usual = tuning.played_s

    def slower(plan, evaluator):
        seconds = usual(plan, evaluator)
        asked.append(seconds)
        return 1.5 * seconds

    monkeypatch.setattr(tuning, "played_s", slower)
    yield asked


def test_tune_plays_all_that_it_tells(slower_when_played: list[float]) -> None:
    told = mm.tune(**JOB, top=2)
    assert len(slower_when_played) == len(told.plans) == 2
    (note,) = told.notes
    assert f"takes {1.5 * slower_when_played[0]:.4g} s" in note and f"{told.iteration_s:.4g} s" in note
    assert "-33.3%" in note or "-33.4%" in note
    assert note in told.to_dict()["notes"]
    assert " ".join(note.split()) in " ".join(repr(told).split())


def test_what_was_verified_is_not_played_again(slower_when_played: list[float]) -> None:
    told = mm.tune(**JOB, top=1, verify="simulate")
    assert not slower_when_played and told.notes == () and told.verification is not None
