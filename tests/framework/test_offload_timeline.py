"""What the patches hide behind compute, on streams with the cost model's seconds, is what `predict` says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from short_form import long_form

pytest.importorskip("megatron", reason="needs the test framework environment")
import warm_start_server

ROOT = Path(__file__).parents[2]


def printed(*words: str) -> str:
    program = str(ROOT / "benchmarks" / "offload_timeline.py")
    environment = warm_start_server.environment(PYTHONPATH=f"{ROOT}:{ROOT / 'patches'}")
    done = subprocess.run(
        [sys.executable, program, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@long_form
def test_two_stages_step_on_the_host_at_the_same_time() -> None:
    assert printed("--stages", "2", "optimizer 1, steps").count(" ms ") == 2


def test_all_kinds_of_offload_take_what_predict_says_and_run_where_the_table_says() -> None:
    cases, _, table = printed("nothing", "all four 0.5", "grads").partition("\n\n")
    assert cases.count(" ms ") == 10, "by the clock and by predict, of all kinds and of gradients"
    assert table.strip() in (ROOT / "patches" / "README.md").read_text("utf-8")
