"""Plans of target torch on four real processes (gloo): as the same model in one piece."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mist_megatron as mm
from mist_megatron.errors import InputError
from mist_megatron.spec.presets import preset
from tests.cost.test_layerwise import MIXED, as_today, plan_of, stage

CASE = Path(__file__).with_name("layerwise_case.py")
STAGES = {
    "one": [stage(4, 4, "sdp4+ckpt", "dp2-tp2", "tp4", "tp2-sdp2")],
    "two": [stage(2, 2, "sdp2+ckpt", "tp2"), stage(2, 2, "dp2", "sdp2")],
}


def test_three_steps_as_the_model_in_one_piece(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name, stages in STAGES.items():
        mm.emit(plan_of(replace(preset("gpt3-1.3b"), layers=4), *stages, seq_len=128), out=tmp_path / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, str(CASE), *(str(tmp_path / name) for name in STAGES)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(rank["plan"] for rank in told) == ["one"] * 4 + ["two"] * 4
    for rank in told:
        assert rank["furthest"] < 5e-6
        for parallel, alone in rank["losses"]:
            assert parallel == pytest.approx(alone, rel=1e-6)


def test_what_it_cannot_run_is_refused() -> None:
    with pytest.raises(InputError, match="hands one tensor of one shape"):
        mm.emit(MIXED["decoder"])
    with pytest.raises(InputError, match="no strategies of their own"):
        mm.emit(as_today(MIXED["one stage"]))
