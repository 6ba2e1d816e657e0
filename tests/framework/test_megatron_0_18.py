"""The patches on megatron-core 0.18.0, which tests/setup_frameworks.sh lays beside the newest one."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")
from test_megatron_patches import Runs, assert_same, run_all
from test_megatron_steps_and_states import ALL, BUSY, HALF, SHARDED, STEPS, with_patches

OTHER = Path(sys.prefix) / "megatron-0.18.0"
pytestmark = pytest.mark.skipif(
    not (OTHER / "megatron").is_dir(), reason=f"no {OTHER.name} beside the tests; run setup_frameworks.sh"
)
EXACT = {"optimizer_fraction": [0.5]}
HOST = replace(HALF, **SHARDED, **BUSY, optimizer_fraction=[0.5])


@cache
def runs() -> Runs:
    base = replace(HALF, **SHARDED, **BUSY)
    cases = {
        **with_patches({"device": base}, all=ALL),
        ("host", "plain"): replace(HOST, patches=EXACT),
        ("host", "all"): replace(HOST, patches={**ALL, **EXACT}, streams="late"),
        ("mutant", "no_hooks"): replace(base, patches=STEPS, mutate="no_hooks"),
    }
    return run_all(cases, 1, str(OTHER))


@pytest.mark.parametrize("name", ["device", "host"])
def test_training_is_the_same_with_all_patches(name: str) -> None:
    """With an optimizer on the host on streams whose copies are late; evaluated, resumed, a step skipped."""
    assert_same(runs()[name, "plain"], runs()[name, "all"])
    (plain,) = runs()[name, "plain"]
    assert plain["losses"][-1] < plain["losses"][0] - 0.3 and plain["skipped"] == [3]
    assert runs()[name, "all"][0].get("violations", []) == []


def test_an_essential_line() -> None:
    (plain,), (mutant,) = runs()["device", "plain"], runs()["mutant", "no_hooks"]
    assert "failed" in mutant or mutant["digest"] != plain["digest"]
