"""The short form of reliability/fuzz.py: all readers, their samples, what once failed, and damaged inputs."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reliability"))
from fuzz import Outcome, Watch, corpus, damaged, fuzz, try_one
from readers import READERS, Reader

from mist_megatron.errors import InputError

INPUTS = 2000
FEWER = {"plan": 300, "profile": 500, "script": 1000, "deepspeed": 1000}
"""Of readers that take long for one: so many take as long as all of most others."""


@pytest.mark.parametrize("name", READERS)
def test_samples_are_read(name: str) -> None:
    assert READERS[name].samples
    for path in READERS[name].samples:
        READERS[name].read(path.read_text("utf-8"))


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name: str) -> None:
    inputs = FEWER.get(name, INPUTS)
    outcome = fuzz(name, inputs, seed=7, guided=False)
    assert not outcome.failed, outcome.failed[0]
    assert outcome.answers > len(READERS[name].samples) and outcome.refusals > inputs // 10


def test_what_fails_is_noticed() -> None:
    def read(text: str) -> None:
        if "9" in text:
            raise KeyError(text)
        raise InputError("no \N{LINE SEPARATOR} nine") if "8" in text else InputError("nothing")

    outcome = Outcome()
    for text in ("9", "8", "7"):
        try_one(Reader(read, ()), text, outcome)
    assert [text for _, text in outcome.failed] == ["9"]
    assert (outcome.inputs, outcome.answers, outcome.refusals) == (3, 0, 2)


def test_guidance_tells_lines_apart() -> None:
    reader, outcome, watch = READERS["model"], Outcome(), Watch()
    text = reader.samples[0].read_text("utf-8")
    assert watch.new_lines(reader, "a: [", outcome) and watch.new_lines(reader, text, outcome)
    assert not watch.new_lines(reader, text, outcome) and not watch.new_lines(reader, "a: [", outcome)
    assert outcome.inputs == 4 and damaged(text, random.Random(1)) != text
    assert list(corpus("no such reader")) == []
