"""Every command line that README.md and the other documents show is run.

A `bash` block is a list of commands; a `console` block is a transcript: after `$` a command, then what it
printed. Blocks of one document run in order in one folder, so a later command can use what an earlier one
wrote. Numbers in transcripts may move with the cost model; words may not.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cost_model_page import PAGE, page

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/answer.md")
PROGRAM = re.compile(r"^(\.venv/bin/)?mist-megatron\b")
# What sets up an environment or runs these tests; .ci/run runs such lines of the README for real.
SET_UP = re.compile(
    r"python3 -m venv|^bash tests/run_all\.sh|^bash \.ci/run|^\.venv/bin/(pip|pytest|pre-commit)\b"
)


@dataclass
class Shown:
    """One command of a document, with the output shown for it."""

    command: str
    output: list[str] = field(default_factory=list)


def shown_in(text: str) -> list[Shown]:
    found: list[Shown] = []
    for language, block in re.findall(r"^```(bash|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if language == "console" and not line.startswith("$ "):
                found[-1].output.append(line)
            elif line.strip():
                found.append(Shown(line.removeprefix("$ ").split("  #")[0].strip()))
    return found


def words(line: str) -> list[str]:
    """What must not change: words of three letters or more, without numbers, bars and paths."""
    return [word for word in re.findall(r"(?<![\w/.-])[A-Za-z]{3,}(?![\w/.-])", line) if not word.isdigit()]


def parts(command: str) -> list[str]:
    return [part.strip() for part in command.split("&&")]


def test_the_first_command_is_the_whole_set_up() -> None:
    first, *_, last = shown_in((ROOT / "README.md").read_text("utf-8"))
    assert parts(first.command)[:2] == ["python3 -m venv .venv", ".venv/bin/pip install ."]
    assert last.command == "bash tests/run_all.sh"


@pytest.mark.skipif(not os.environ.get("CI"), reason="installs from the network: set CI=1 to try it")
def test_the_first_command_on_a_fresh_clone(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], check=True)
    first = shown_in((ROOT / "README.md").read_text("utf-8"))[0].command
    settings = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    done = subprocess.run(
        ["bash", "-c", first],
        cwd=tmp_path / "clone",
        env={**settings, "MIST_MEGATRON_CACHE": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_shown_command_works(name: str, tmp_path: Path) -> None:
    shown = shown_in((ROOT / name).read_text("utf-8"))
    assert shown
    for item in shown:
        printed = ""
        for part in parts(item.command):
            if not SET_UP.search(part):
                printed += run(part if item.output else in_a_small_space(part), tmp_path)
        missing = [word for line in item.output for word in words(line) if word not in printed]
        assert not missing, f"{item.command}: the transcript shows {missing}, printed was:\n{printed}"


def in_a_small_space(command: str) -> str:
    """Where no answer is shown the whole space need not be searched: minutes of a run of all tests."""
    return f"{command} --space megatron" if re.search(r"mist-megatron tune\b", command) else command


def run(command: str, folder: Path) -> str:
    """Runs one line of a document: our program, or `cd` and `ls` and their like in a shell."""
    python = f"{shlex.quote(sys.executable)} -m mist_megatron"
    line = PROGRAM.sub(python, command)
    assert line != command or command.split()[0] in {"ls", "cat", "head"}, f"not run by any test: {command}"
    settings = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        line, shell=True, cwd=folder, env=settings, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_page_of_the_cost_model_is_current() -> None:
    """Its symbols, terms and worked plan are those of the product; each function that it names exists."""
    assert PAGE.read_text("utf-8") == page(), "write it anew: python tests/refresh_documents.py"
