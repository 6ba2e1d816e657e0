"""docs/accuracy.md says what the program prints today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mist_megatron.ask.validate import predictor
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.calibrate.validate import outcomes_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["accuracy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["mist_l4", "nvidia_gb200", "zerobubble_a100", "runs.mt-nlg.a100-sxm-80gb"])
def test_the_page_has_what_is_computed(accuracy: ModuleType, name: str) -> None:
    path = accuracy.RUNS / f"{name}.csv"
    outcomes = outcomes_of(read_rows(path.read_text("utf-8"), path.name), path.name, predictor())
    line = accuracy.dense_table({path: outcomes}).splitlines()[-1]
    assert line in (ROOT / "docs" / "accuracy.md").read_text("utf-8").splitlines()


def test_every_source_has_a_name_and_marks_are_needed(accuracy: ModuleType) -> None:
    sources = {accuracy.source_of(path) for path in accuracy.RUNS.glob("*.csv")}
    assert sources - {accuracy.MIXTURES} == set(accuracy.NAMES)
    with pytest.raises(SystemExit, match="the page has no"):
        accuracy.written("no marks", "dense", "text")
