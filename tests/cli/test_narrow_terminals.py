"""On terminals of 20 to 80 columns nothing is lost: no word is cut in two, none replaced by dots."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mist_megatron.cli.app import run

COMMANDS = [
    ("models",),
    ("gpus",),
    ("spaces",),
    ("recipes", "show", "gpt3-7b-2x8-l4"),
    ("calibrate", "list"),
    ("reference",),
    *((name, "--help") for name in ("tune", "convert", "lint", "emit", "compare", "validate")),
    ("calibrate", "run", "--help"),
    ("--help",),
]

LONG = 20
"""Characters from which a word may be longer than the column that help pages leave it."""


def words(text: str) -> set[str]:
    """Without what holds a narrow page together: colons of blocks, commas, boxes, bullets."""
    return {word for word in re.split(r"[\s:,/│╭╮╰╯─━]+", text) if word}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_word_of_a_wide_page_stands_on_a_narrow_one(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert run(list(command)) == 0
    wide = words(capsys.readouterr().out)
    for columns in (40, 60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run(list(command)) == 0
        narrow = capsys.readouterr().out
        assert "…" not in narrow
        missing = wide - words(narrow)
        # Help pages of the two kinds name values differently; a hyphenated word may end a line at its hyphen.
        missing = {w for w in missing if "-" not in w and "<" not in w and w[0] not in "[*"}
        missing = {w for w in missing if "--help" not in command or len(w) < LONG}
        assert not missing, (columns, missing)


@pytest.mark.parametrize("columns", [20, 40])
def test_lines_fit_but_for_words_that_are_longer(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in (("models",), ("gpus",), ("spaces",)):
        assert run(list(command)) == 0
        for line in capsys.readouterr().out.splitlines():
            pairs = line.strip().split("  ")
            assert len(line.rstrip()) <= columns or len(pairs) == 1, line


def test_no_colour_says_so_and_pipes_get_none(mist_process):
    for environment in ({}, {"NO_COLOR": "1"}, {"COLUMNS": "40"}):
        assert "\x1b" not in mist_process("gpus", **environment).out


def test_answers_of_many_stages_are_80_columns_wide(ran_here, tmp_path):
    """Also in a pipe, which is what README and logs show."""
    recipes = Path(__file__).parents[2] / "recipes"
    before = recipes / "deepspeed" / "7b-accelerate-8xa100-80gb" / "before.json"
    large = str(recipes / "llama3-405b-128x8-h100" / "plan.yaml")
    small = str(recipes / "gpt3-7b-2x8-l4" / "plan.yaml")
    job = ("--model", "llama2-7b", "--gpus", "8", "--gpu", "a100-sxm-80gb")
    for command in (
        ("predict", large),
        ("simulate", small),
        ("convert", str(before), *job),
    ):
        ran = ran_here(*command)
        assert ran.code == 0, ran.err
        assert [line for line in ran.out.splitlines() if len(line) > 80] == []
