"""Schedules have one home: what is asked of them is a fact there, not a comparison of names elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

from mist_megatron.spec.schedule import SCHEDULES, ScheduleName

PACKAGE = Path(__file__).resolve().parents[2] / "mist_megatron"


def names_outside(source: str, names: set[str]) -> list[int]:
    """Lines of a program in which one of the names stands as a text of its own; docstrings may tell of it."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]


def test_plans_can_name_what_has_a_closed_form() -> None:
    assert set(get_args(ScheduleName)) == {name for name, one in SCHEDULES.items() if one.closed_form}


def test_names_of_schedules_stand_in_their_home_only() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "spec" / "schedule.py" and PACKAGE / "frameworks" not in path.parents
        for line in names_outside(path.read_text("utf-8"), set(SCHEDULES))
    ]
    assert not wrong, f"ask SCHEDULES instead: {wrong}"


def test_rule_can_fail() -> None:
    assert names_outside('held = 1 if schedule == "gpipe" else 2', set(SCHEDULES)) == [1]
