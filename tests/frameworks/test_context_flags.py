"""Exchanges of ranks that split sequences in command lines: read, and what is said about them."""

from __future__ import annotations

import pytest

from mist_megatron.errors import InputError
from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.context import context_findings, with_exchange
from mist_megatron.frameworks.megatron.flag_classes import unpriced_flags
from mist_megatron.frameworks.megatron.reader import Reader
from mist_megatron.spec.plan import Execution

LEVELS = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"


def read(flags: str, cp: int = 4) -> tuple[str | None, int | None]:
    said = Reader(options=options_of(flags.split()), where="x")
    execution = with_exchange(said, Execution(context_parallel=cp))
    return execution.context_exchange, execution.context_inner


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", (None, None)),
        ("--cp-comm-type p2p", (None, None)),
        ("--cp-comm-type all_gather", ("all_gather", None)),
        (f"{LEVELS} 2 2", ("a2a+p2p", 2)),
        (f"{LEVELS} 1 4", (None, None)),
        (f"{LEVELS} 4 1", ("a2a", None)),
        ("--cp-comm-type a2a --hierarchical-context-parallel-sizes 2 2", ("a2a", None)),
    ],
)
def test_what_a_command_line_says(flags: str, told: tuple[str | None, int | None]) -> None:
    assert read(flags) == told
    assert read("--cp-comm-type a2a", cp=1) == (None, None)


@pytest.mark.parametrize("sizes", ["", "2", "2 4", "2 2 1", "two 2", "-2 -2"])
def test_levels_that_are_none(sizes: str) -> None:
    with pytest.raises(InputError, match="wanted two numbers whose product is the 4 ranks") as raised:
        read(f"{LEVELS} {sizes}")
    assert "\n" not in str(raised.value.message)


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (f"{LEVELS} 2 2", []),
        ("--cp-comm-type a2a+p2p", ["cp-comm-type"]),
        (f"{LEVELS} 2 4", ["hierarchical-context-parallel-sizes"]),
        (f"{LEVELS} 2 2 1", ["hierarchical-context-parallel-sizes"]),
        ("--cp-comm-type allgather", ["cp-comm-type"]),
        ("--num-layers 4 --cp-comm-type a2a p2p", ["cp-comm-type"]),
        ("--num-layers 2 --cp-comm-type a2a p2p", []),
    ],
)
def test_findings(flags: str, keys: list[str]) -> None:
    said = Reader(options=options_of(f"--context-parallel-size 4 {flags}".split()), where="x")
    assert [found.key.removeprefix("--") for found in context_findings(said)] == keys


def test_layers_that_exchange_in_different_ways_have_no_price() -> None:
    said = dict(unpriced_flags(options_of(["--cp-comm-type", "a2a", "p2p"])))
    assert said == {"cp-comm-type": "layers that exchange in different ways"}
    assert not dict(unpriced_flags(options_of(["--cp-comm-type", "a2a", "a2a"])))
    assert not dict(unpriced_flags(options_of(f"{LEVELS} 2 2".split())))
