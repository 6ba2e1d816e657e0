"""The short form of reliability/sweep.py: one strange value at a time, in every reader."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reliability"))
from readers import READERS, Reader
from sweep import RUN, RUNS, STRANGE, sweep, swept

from mist_megatron.errors import InputError

EACH = 61


@pytest.mark.parametrize("name", READERS)
def test_strange_values_are_read_or_refused(name: str) -> None:
    outcome = sweep(READERS[name], EACH)
    assert not outcome.failed, outcome.failed[0]
    assert outcome.answers and outcome.refusals


def test_what_fails_is_noticed(tmp_path: Path) -> None:
    """A reader that divides by one of its figures, and one that goes by the others' lengths."""

    def read(text: str) -> None:
        try:
            document = json.loads(text)
            rows, by = document["rows"], document["by"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError("not so") from None
        if by == 0 or (isinstance(rows, list) and len(rows) == 2 and rows[0] == rows[1]):
            raise ZeroDivisionError(by)

    sample = tmp_path / "sample.json"
    sample.write_text('{"by": 2, "rows": [{"a": 1}, {"a": 2}]}')
    failed = [json.loads(text) for _, text in sweep(Reader(read, (sample,))).failed]
    zeros = [one["by"] for one in failed if one["rows"] == [{"a": 1}, {"a": 2}]]
    assert zeros == [0, 0, 0] and zeros[0] is False
    alike = [one["rows"][0] for one in failed if one["by"] == 2]
    assert {"a": "x"} in alike and {} in alike and "x" in alike and {"a": 3} in alike


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a: 1\nb: [2, 3]\n", {"a": None, "b": [2, 3]}),
        ('{"a": 1, "b": [2, 3]}', {"a": 1, "b": [None, 3]}),
        ('{"a": 1, "b": [2, 3]}', {"a": 1, "b": [None, None]}),
        ('{"a": 1, "b": [2, 3]}', {"ax": 1, "b": [2, 3]}),
        ('{"a": 1, "b": [2, 3]}', {"b": [2, 3]}),
        ('{"a": 1, "b": [2, 3]}', {"a": 1, "b": [3]}),
    ],
)
def test_each_place_has_each_value(text: str, wanted: object) -> None:
    made = [one() for one in swept(text)]
    places = 3 * (len(STRANGE) + 1) + 2 + len(STRANGE) + 1  # a, b and an entry; both entries together
    assert len(made) == places + 3 * len(RUNS)
    told = [one for one in made if len(one) < RUN and "[[[" not in one and "9999" not in one]
    assert wanted in [yaml.safe_load(one) for one in told if ".nan" not in one and "1e999" not in one]


def test_lines_and_words() -> None:
    lines = [one().strip("\n") for one in swept('{"a": 1}\n{"b": 2}\n')]
    assert '{"a": null}\n{"b": 2}' in lines and '{"a": 1}\n{"bx": 2}' in lines
    words = [one() for one in swept("size 12, time=3\n")]
    assert "size nan, time=3\n" in words and "size 12, time=N/A\n" in words
    assert all(len(one) > RUN for one in words[-3 * len(RUNS) :])
