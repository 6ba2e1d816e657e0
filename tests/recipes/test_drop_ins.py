"""Replacements for hand-written DeepSpeed files: current, and they change nothing but what is tuned."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import run

from mist_megatron.ask.drop_ins import BEFORE, read_cases
from mist_megatron.frameworks.deepspeed.convert import flat
from mist_megatron.frameworks.loose_json import read_loose

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "deepspeed"
CASES = read_cases(FOLDER)
TUNED = ("train_", "gradient_accumulation_steps", "zero_optimization")


def both(name):
    old = read_loose((FOLDER / name / BEFORE).read_text("utf-8"), name)
    return old, json.loads((FOLDER / name / "ds_config.json").read_text("utf-8"))


def test_they_are_current():
    assert run(["recipes", "rebuild", "deepspeed", "--check"]) == 0


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_tuned_differs(name):
    old, new = (flat(config) for config in both(name))
    for key in old.keys() | new.keys():
        if not key.startswith(TUNED) and old.get(key) != new.get(key):
            assert key == "gradient_clipping" and key not in old, key


@pytest.mark.parametrize("name", CASES)
def test_the_batch_is_the_same(name):
    """As DeepSpeed multiplies it; a trainer that fills in "auto" is told what to say."""
    old, new = both(name)
    gpus = CASES[name].gpus
    changes = (FOLDER / name / "CHANGES.md").read_text("utf-8")
    if old["train_micro_batch_size_per_gpu"] == "auto":
        micro, steps = map(
            int, re.search(r"size=(\d+) and gradient_accumulation_steps=(\d+)", changes).groups()
        )
        assert new["train_micro_batch_size_per_gpu"] == new["gradient_accumulation_steps"] == "auto"
        assert micro * steps == 8, "8 a GPU and one step is what TrainingArguments takes when nobody says"
        return
    before = old["train_micro_batch_size_per_gpu"] * old["gradient_accumulation_steps"] * gpus
    assert new["train_micro_batch_size_per_gpu"] * new["gradient_accumulation_steps"] * gpus == before
    assert new["train_batch_size"] == before


@pytest.mark.parametrize("name", CASES)
def test_each_changed_key_is_explained(name):
    old, new = (flat(config) for config in both(name))
    rows = re.findall(r"^\| `([^`]+)` \| .* \| ([^|]+) \|$", (FOLDER / name / "CHANGES.md").read_text(), re.M)
    explained = {key: reason.strip() for key, reason in rows}
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    assert changed <= explained.keys()
    assert all(explained[key] and explained[key] != "new" for key in changed)


def test_each_is_predicted_to_fit_and_to_gain():
    page = (FOLDER / "README.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| [")]
    assert len(rows) == len(CASES) == 6
    for row in rows:
        faster = row[-1].rstrip(" |")
        assert faster == "now fits" or float(faster.rstrip("x")) >= 1.0


def test_the_commands_of_the_page_make_these_files(tmp_path, monkeypatch):
    page = (FOLDER / "README.md").read_text("utf-8")
    commands = [line for line in page.splitlines() if line.startswith("mist-megatron convert")]
    assert len(commands) == len(CASES)
    words = shlex.split(commands[0])
    monkeypatch.chdir(FOLDER)
    assert run([*words[1:-1], str(tmp_path / "new")]) == 0
    name = words[2].partition("/")[0]
    assert (tmp_path / "new" / "CHANGES.md").read_text() == (FOLDER / name / "CHANGES.md").read_text()
