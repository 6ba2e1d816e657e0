"""The command line as a user meets it: a process, its streams and its exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mist_megatron import __version__
from mist_megatron.cli import app, commands
from mist_megatron.errors import EmitError, InputError, MistError, NoFeasiblePlan, ProfileError

NAMES = [entry.name for entry in commands.COMMANDS]
LISTS = ["models", "gpus", "spaces", "recipes"]


def test_version(mist_process) -> None:
    ran = mist_process("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"mist-megatron {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_lists_every_command(mist_process, arguments: list[str]) -> None:
    ran = mist_process(*arguments)
    assert ran.code == 0
    assert ran.err == ""
    assert all(re.search(rf"^  {name} ", ran.out, re.MULTILINE) for name in NAMES)
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_first_answer_is_quick(arguments: list[str], tmp_path: Path) -> None:
    """Under 0.5 s of CPU, importing nothing heavy. The best of three: others use the CPU too."""
    script = (
        "import resource, sys; from mist_megatron.cli.app import run; code = run(sys.argv[1:]);"
        "use = resource.getrusage(resource.RUSAGE_SELF);"
        "heavy = {'numpy', 'pulp', 'yaml', 'jinja2', 'torch'} & set(sys.modules);"
        "print(code, use.ru_utime + use.ru_stime, sorted(heavy), file=sys.stderr)"
    )
    spent = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        code, seconds, heavy = done.stderr.strip().split(" ", 2)
        assert (code, heavy) == ("0", "[]")
        spent.append(float(seconds))
    assert min(spent) < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_within_80_columns(mist, name: str) -> None:
    ran = mist(name, "--help")
    assert ran.code == 0, ran.err
    assert f"mist-megatron {name}" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("name", sorted(set(NAMES) & set(LISTS)))
def test_lists_give_one_json_document(mist, name: str) -> None:
    ran = mist(name, "--json")
    assert ran.code == 0, ran.err
    assert isinstance(json.loads(ran.out)[name], list)


@pytest.mark.parametrize("name", sorted(set(NAMES) & set(LISTS)))
def test_lists_fit_80_columns_and_have_no_colour_codes(mist, name: str) -> None:
    ran = mist(name)
    assert ran.code == 0, ran.err
    assert "\x1b" not in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["modles"], ["no such command 'modles'", "models"]),
        (
            ["models", "--jsn"],
            ["no such option: --jsn", "did you mean --json?", "mist-megatron models --help"],
        ),
        (["--verison"], ["no such option: --verison", "did you mean --version?"]),
        (["tune", "--verify"], ["option '--verify' requires an argument", "mist-megatron tune --help"]),
        (["models", "extra"], ["extra"]),
        (["tune", "--tp", "2"], ["did you mean --fix tp=N?"]),
        (["tune", "--batch_size", "2"], ["did you mean --global-batch, or --per-device-batch?"]),
        (["convert", "x.json", "--tp", "2"], ["no such option: --tp\n  try: mist-megatron convert --help"]),
        (["tune", "llama3-8b"], ["did you mean --model llama3-8b?"]),
        (["predict"], ["missing argument 'plan': plan.yaml"]),
        (["tune", "--model", "sd", "--gpus", "2"], ["are known", "mist-megatron reference model"]),
        (["tune", "--model", "./sd.bin", "--gpus", "2"], ["sd.bin does not exist"]),
        (["recipes", "lst"], ["no such command 'lst'"]),
        (["what-if"], ["no such command 'what-if'", "simulate PLAN --scale"]),
        (["what-if", "plan.yaml", "--scale", "op=matmul:2"], ["simulate PLAN --scale"]),
    ],
)
def test_usage_errors_are_short_and_exit_2(mist, arguments: list[str], wanted: list[str]) -> None:
    ran = mist(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ")
    assert "Traceback" not in ran.err
    assert len(ran.err.splitlines()) <= 3
    for text in wanted:
        assert text in ran.err


@pytest.mark.parametrize("kind", [InputError, NoFeasiblePlan, ProfileError, EmitError])
def test_failures_become_one_line_and_their_exit_code(
    kind: type[MistError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise kind("what happened", details=("closest: this", "try: that"))

    monkeypatch.setattr(app, "load_command", fail)
    assert app.run(["models"]) == kind.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "error: what happened\n  closest: this\n  try: that\n"


def test_exit_codes_are_the_documented_ones() -> None:
    codes = [kind.exit_code for kind in (InputError, NoFeasiblePlan, ProfileError, EmitError)]
    assert codes == [2, 3, 4, 5]


def test_a_bug_shows_its_traceback_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "load_command", lambda name: 1 / 0)
    assert app.run(["models"]) == 1
    printed = capsys.readouterr().err
    assert "ZeroDivisionError" in printed
    assert "please report" in printed


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "load_command", interrupted)
    assert app.run(["models"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "mist_megatron", "models", "--json"],
        stdout=write,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_refusal_that_nobody_reads_is_one_all_the_same(more: tuple[str, ...], tmp_path: Path) -> None:
    """`... 2>&1 | head -1` ended with 1, and with --json in a traceback."""
    read, write = os.pipe()
    os.close(read)
    job = ("tune", "--model", "gpt3-7b", "--gpus", "1", "--gpu", "l4-24gb", *more)
    command = [sys.executable, "-m", "mist_megatron", *job]
    done = subprocess.run(command, stdout=write, stderr=write, cwd=tmp_path, check=False)
    os.close(write)
    assert done.returncode == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"], ["--help"]])
def test_an_answer_on_a_full_disk_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mist_megatron", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "error: cannot write the answer: No space left on device\n")


def complete(words: str, shell: str, folder: Path) -> str:
    settings = {
        **os.environ,
        "_MIST_MEGATRON_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    command = [sys.executable, "-c", "from mist_megatron.cli.app import main; main()"]
    done = subprocess.run(command, env=settings, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_knows_commands(shell: str, tmp_path: Path) -> None:
    assert "models" in complete("mist-megatron mod", shell, tmp_path)


@pytest.mark.skipif("tune" not in NAMES, reason="no command with job options yet")
def test_shell_completion_knows_presets(tmp_path: Path) -> None:
    assert "gpt3-7b" in complete("mist-megatron tune --model gpt3-7", "bash", tmp_path).split()
    assert "h100-sxm-80gb" in complete("mist-megatron tune --gpu h1", "bash", tmp_path).split()
