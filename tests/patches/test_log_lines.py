"""What a user sees of the patches: every rank's lines, and a refusal as one line."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mist_patches.core import hooking
from mist_patches.core.hooking import PatchRefused

PATCHES = Path(__file__).parents[2] / "patches"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nobody has set logging up."""
    monkeypatch.setattr(hooking.log, "handlers", [])
    monkeypatch.setattr(hooking.log, "level", logging.NOTSET)
    monkeypatch.setattr(hooking.log, "disabled", False)
    monkeypatch.setattr(hooking.log, "_cache", {})
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    monkeypatch.setenv("RANK", "3")


def put_a_hook() -> None:
    def build(original: object) -> object:
        return original

    owner = SimpleNamespace(work=lambda one: one)
    hooking.replace(owner, "work", ("one",), build)()


def test_lines_are_seen_where_nobody_set_logging_up(
    fresh: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    hooking.log.info("dropped, as Python does")
    for _ in range(2):
        put_a_hook()
    hooking.log.info("asked %.1f", 0.5)
    assert capsys.readouterr().err == "mist, rank 3: asked 0.5\n"


def test_lines_go_where_logging_was_set_up_and_only_there(
    fresh: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    put_a_hook()
    hooking.log.info("asked %.1f", 0.5)
    assert caplog.messages == ["asked 0.5"] and capsys.readouterr().err == ""


def test_a_level_that_somebody_chose_stays(fresh: None, caplog: pytest.LogCaptureFixture) -> None:
    hooking.log.setLevel(logging.ERROR)
    put_a_hook()
    hooking.log.info("unseen")
    assert not caplog.messages


def test_a_refusal_that_nobody_catches_is_one_line() -> None:
    program = "from mist_patches.core.hooking import check_fraction as c; c('weight offload fraction', 1.5)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(PATCHES)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "mist: weight offload fraction is 1.5; wanted a fraction from 0 to 1\n"


@pytest.mark.parametrize("kind", [Exception, RuntimeError, SystemExit])
def test_a_refusal_is_caught_as(kind: type[BaseException]) -> None:
    with pytest.raises(kind, match=r"^no$"):
        raise PatchRefused("no")
