"""Runs the command line in this process: as a user sees it, at a tenth of the time of a new process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import run


@dataclass(frozen=True)
class RanHere:
    """What a command printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def ran_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., RanHere]:
    """The command line in an empty folder, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def command(*arguments: str) -> RanHere:
        capsys.readouterr()
        code = run(list(arguments))
        said = capsys.readouterr()
        return RanHere(code, said.out, said.err)

    return command
