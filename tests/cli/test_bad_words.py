"""Words on the command line that name nothing: one line, exit code 2, and nothing is written anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run

from mist_megatron.resources import data_folder

RECIPE = "gpt3-7b-2x8-l4"
LONG = "x" * 300
"""No file system takes a name of more than 255 bytes."""


def recipe() -> str:
    return str(data_folder("recipes") / RECIPE / "plan.yaml")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["emit", "PLAN", "--out", ""], "--out is empty"),
        (["emit", "PLAN", "--out="], "--out is empty"),
        (["emit", "PLAN", "--out", "  "], "--out is empty"),
        (["simulate", "PLAN", "--trace", ""], "--trace is empty"),
        (["recipes", "copy", RECIPE, ""], "an argument is empty"),
        (["calibrate", "show", "l4-24gb", "--plot", ""], "--plot is empty"),
        (["tune", "--model", "gpt3-1.3b", "--gpus", "2", "--gpu", ""], "--gpu is empty"),
        (["predict", ""], "an argument is empty"),
    ],
)
def test_an_empty_word_is_no_current_folder_and_no_default(mist, tmp_path: Path, words, wanted: str) -> None:  # type: ignore[no-untyped-def]
    ran = mist(*(recipe() if word == "PLAN" else word for word in words))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"error: {wanted}; wanted a value (is a variable of the shell not set?)\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "words",
    [
        ["emit", "PLAN", "--out", LONG],
        ["simulate", "PLAN", "--trace", LONG],
        ["recipes", "copy", RECIPE, LONG],
        ["calibrate", "show", "l4-24gb", "--plot", LONG],
        ["tune", "--model", "gpt3-1.3b", "--gpus", "2", "--out", LONG],
    ],
)
def test_a_name_that_is_too_long_is_one_line(mist, tmp_path: Path, words) -> None:  # type: ignore[no-untyped-def]
    ran = mist(*(recipe() if word == "PLAN" else word for word in words))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and "File name too long" in ran.err
    assert "Traceback" not in ran.err
    assert os.listdir(tmp_path) == []


def test_a_folder_below_a_file_is_told_as_that(mist, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "notes").write_text("mine", "utf-8")
    ran = mist("recipes", "copy", RECIPE, "notes/run")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"error: cannot make the folder {tmp_path / 'notes'}: a part of it is a file\n"
    ran = mist("tune", "--model", "gpt3-175b", "--gpus", "1024", "--out", "notes/run/a")  # before the search
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"error: --out notes/run/a cannot be made: {tmp_path / 'notes'} is a file\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tune", "--model", "gpt3-175b", "--gpus", "1024"], "--out x.yaml cannot be used: "),
        (["emit", "PLAN"], "cannot write x.yaml: "),
    ],
)
def test_a_working_folder_that_was_deleted_is_one_line(tmp_path: Path, words: list[str], told: str) -> None:
    """`tune` ended in a traceback."""
    words = [recipe() if word == "PLAN" else word for word in words]
    command = (
        f'mkdir gone; cd gone; rmdir ../gone; exec "{sys.executable}" -m mist_megatron "$@" --out x.yaml'
    )
    ran = subprocess.run(["sh", "-c", command, "sh", *words], cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert ran.returncode == 2 and lines[0].startswith(f"error: {told}")
    assert "Traceback" not in ran.stderr


def test_a_trace_never_replaces_the_answer(mist, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """/dev/stdout stands for the file that the shell opened for the answer: it was replaced, and lost."""
    words = ("simulate", recipe(), "--trace", "/dev/stdout", "--json")
    command = [sys.executable, "-m", "mist_megatron", *words]
    with (tmp_path / "answer.json").open("w") as answer:
        done = subprocess.run(command, stdout=answer, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    said = "error: --trace /dev/stdout: the answer goes there; wanted a file, such as trace.json\n"
    failure = json.loads((tmp_path / "answer.json").read_text("utf-8"))["error"]
    assert done.stderr == said == f"error: {failure['message']}\n"
    ran = mist("simulate", recipe(), "--trace", "-")
    assert (ran.code, ran.err) == (2, said.replace("/dev/stdout", "-"))


def test_with_json_an_error_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout, where the answer would have been; the line for people stays on stderr."""
    assert run(["tune", "--model", "no-such-model", "--gpus", "8", "--json"]) == 2
    said = capsys.readouterr()
    failure = json.loads(said.out)["error"]
    assert failure["exit_code"] == 2 and "no-such-model" in failure["message"]
    assert said.err.startswith("error: ")
    assert run(["tune", "--no-such-option", "--json"]) == 2
    assert "no such option" in json.loads(capsys.readouterr().out)["error"]["message"]
