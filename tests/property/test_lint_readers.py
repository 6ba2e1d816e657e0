"""Launch scripts and DeepSpeed configurations that would take long or break a reader: only a refusal may come
out, within bounded work. Damaged ones are in tests/reliability."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reliability"))
from readers import KNOWN, SAMPLES, SCHEMA, deepspeed, script

from mist_megatron.errors import InputError
from mist_megatron.frameworks.deepspeed.read import read_config
from mist_megatron.frameworks.file_kinds import mapping_of
from mist_megatron.frameworks.loose_json import read_loose
from mist_megatron.frameworks.megatron.command import read_command_line
from mist_megatron.frameworks.megatron.lint import lint_command
from mist_megatron.frameworks.megatron.read import parse_layout


@pytest.mark.parametrize(
    "text",
    [
        "E(t)*99999999999L",
        "E" + "(" * 5000 + "t" + ")*9" * 5000 + "L",
        "E" + "t*9" * 9000 + "L",
        "E(t*9)*" + "9" * 5000 + "L",
    ],
)
def test_layouts_are_bounded(text: str) -> None:
    with pytest.raises(InputError, match="layout"):
        parse_layout(text, "x")


@pytest.mark.parametrize(
    "value", ["9" * 5000, "1e9999", "[" * 500, '{"a":' * 500, '"\\ud800"', "1" + "0" * 400]
)
def test_absurd_values_are_refused_in_one_line(value: str) -> None:
    with suppress(InputError):
        deepspeed(f'{{"train_batch_size": {value}}}')
    with suppress(InputError):
        script(f"torchrun pretrain_gpt.py --num-layers {value} --pipeline-model-parallel-size 1{0:012d}")


def test_the_sample_itself_is_read() -> None:
    command = read_command_line((SAMPLES / "script.sh").read_text("utf-8"), "run.sh")
    assert command.program == "pretrain_gpt.py" and command.options["tensor-model-parallel-size"] == ("2",)
    assert command.maybe["recompute-method"] == "$1"
    assert [f.level for f in lint_command(command, "run.sh", KNOWN)].count("open") == 1
    assert read_config(read_loose((SAMPLES / "deepspeed.json").read_text("utf-8"), "x"), SCHEMA).ratio == 0.5


def test_large_files_are_refused_at_once() -> None:
    start = time.process_time()
    for text in ("x" * 60_000_000, "{" + " " * 60_000_000, "a: 1\n" * 12_000_000):
        with pytest.raises(InputError, match="characters"):
            (read_loose if text[0] == "{" else mapping_of if text[0] == "a" else read_command_line)(text, "x")
    assert time.process_time() - start < 5.0
