"""What is printed where: JSON alone on stdout, colours on terminals only."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from mist_megatron.cli.expand import expand_groups
from mist_megatron.cli.options import JobOptions
from mist_megatron.cli.output import OutputOptions, console, emit_json, table

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]")


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a terminal receives."""
    parent, child = pty.openpty()
    settings = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "CI"}} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "mist_megatron", *arguments]
    done = subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env={**settings, **environment})
    os.close(child)
    received = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # Linux says so when the last writer has gone
            break
        if not part:
            break
        received += part
    os.close(parent)
    done.wait(timeout=60)
    return received.decode()


def test_terminals_get_colour_unless_told_otherwise() -> None:
    assert COLOUR.search(on_a_terminal("nonsense"))
    assert not COLOUR.search(on_a_terminal("nonsense", NO_COLOR="1"))
    assert not COLOUR.search(on_a_terminal("nonsense", TERM="dumb"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_has_not_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        emit_json({"iteration_s": value})


def test_people_read_stderr_when_json_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    output = OutputOptions(json=True)
    output.people.print("for people")
    output.finish({"answer": 1})
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"answer": 1}
    assert printed.err == "for people\n"


def test_people_read_stdout_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    output = OutputOptions()
    output.people.print("for people")
    output.finish({"answer": 1})
    assert capsys.readouterr() == ("for people\n", "")


def test_groups_of_options_become_single_options() -> None:
    seen = {}

    def command(name: str, *, job: JobOptions, output: OutputOptions) -> None:
        """What it does."""
        seen.update(name=name, job=job, output=output)

    flat = expand_groups(command)
    names = list(inspect.signature(flat).parameters)
    assert names[:3] == ["name", "model", "gpus"]
    assert names[-1] == "json"
    assert flat.__doc__ == "What it does."
    values = dict.fromkeys(names[1:], None) | {"model": "gpt2", "json": True}
    flat(name="x", **values)
    assert (seen["name"], seen["job"].model, seen["output"].json) == ("x", "gpt2", True)


@pytest.mark.parametrize("said", [lambda text: table(("what",), [(text,)]), lambda text: text])
def test_words_of_files_command_no_terminal(capsys, said):
    """Whatever a table or a sentence quotes: no escape, no change of direction reaches the terminal."""
    console().print(said("run\x1b[2J of\u202e node\x1b]0;title\x9d\nnext"), markup=False)
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "run\\x1b[2J of\\u202e node\\x1b]0;title\\x9d" in out
    assert out.rstrip().endswith("next")
