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
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import grids_of, job_of
from mist_megatron.errors import InputError
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.presets import preset
from tests.cost.test_layerwise import MIXED, as_today, plan_of, stage

CASE = Path(__file__).with_name("layerwise_case.py")
STAGES = {
    "one": [stage(4, 4, "sdp4+ckpt", "dp2-tp2", "tp4", "tp2-sdp2")],
    "two": [stage(2, 2, "sdp2+ckpt", "tp2"), stage(2, 2, "dp2", "sdp2")],
    "edges": [replace(stage(4, 4, "sdp4+ckpt", "dp2-tp2"), embedding="tp4", head="dp4")],
    "edges two": [replace(stage(2, 2, "dp2"), embedding="tp2"), replace(stage(2, 2, "tp2"), head="sdp2")],
}

EXACT = {
    "exact alone": [stage(4, 1, "serial+ckpt") for _ in range(4)],
    "exact replicas": [stage(4, 2, "dp2+ckpt", "sdp2"), replace(stage(4, 2, "dp2", "sdp2+ckpt"), head="dp2")],
}
"""Nothing is split and at most two ranks add up, so that the order of every sum is known. Tensor parallelism
adds partial products where the whole model has one, and more ranks add as gloo pleases."""

KEPT = {
    "one": [stage(4, 4, "sdp4", "dp2-tp2", "tp4", "tp2-sdp2")],
    "ckpt": [stage(4, 4, "sdp4+ckpt", "dp4+ckpt", "dp4", "tp4")],
    "two": [stage(4, 2, "sdp2", "tp2"), stage(4, 2, "dp2", "sdp2")],
}
SMALL = {"layers": 4, "hidden": 64, "ffn_hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 64}
A_TENSOR = 128 * 64 * 2
"""Bytes of a sample of 128 tokens, 64 wide; the head's output is as wide."""


def expected_bytes(plan: Plan) -> list[float]:
    """By stage, what autograd keeps at its most but for embedding, head and loss: the latter keep what the
    head is given, logits and their logarithms until the backward pass begins, which is a moment of its own in
    what is predicted."""
    evaluator, found = evaluator_for(job_of(plan))[0], []
    for position, grid in enumerate(grids_of(plan)):
        layers = plan.stages[position].layer_strategies
        # Checkpoints hold a layer's input themselves.
        inputs = sum(4 // layer.layout.dp for layer in layers if layer.ckpt)
        ends = 3 * 4 // layers[-1].layout.dp if position == len(plan.stages) - 1 else 0
        kept = float(evaluator.memory_moments(grid)["activations"])
        found.append(kept + A_TENSOR * (ends - inputs))
    return found


def test_three_steps_as_the_model_in_one_piece_and_what_they_keep(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    whole = replace(preset("gpt3-1.3b"), layers=4)
    small = replace(preset("gpt3-1.3b"), attention="full", **SMALL)
    plans = {
        name: plan_of(replace(whole, layers=sum(one.layers for one in stages)), *stages, seq_len=128)
        for name, stages in (STAGES | EXACT).items()
    }
    plans |= {f"kept-{name}": plan_of(small, *stages, seq_len=128) for name, stages in KEPT.items()}
    for name, plan in plans.items():
        mm.emit(plan, out=tmp_path / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, str(CASE), *(str(tmp_path / name) for name in plans)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Lines of several processes may run into each other.
    told = [json.loads("{" + part) for part in done.stdout.replace("\n", "").split("{")[1:]]
    assert sorted(rank["plan"] for rank in told) == sorted([*plans] * 4)
    for rank in told:
        if rank["plan"] in EXACT:
            assert rank["furthest"] == 0.0, rank
            assert all(parallel == alone for parallel, alone in rank["losses"]), rank
        elif rank["plan"] in STAGES:
            assert rank["furthest"] < 5e-6
            for parallel, alone in rank["losses"]:
                assert parallel == pytest.approx(alone, rel=1e-6)
        else:
            kept = expected_bytes(plans[rank["plan"]])[rank["stage"]]
            assert rank["most"] == pytest.approx(kept, rel=0.03), rank


def test_what_it_cannot_run_is_refused() -> None:
    with pytest.raises(InputError, match="hands one tensor of one shape"):
        mm.emit(MIXED["decoder"])
    with pytest.raises(InputError, match="no strategies of their own"):
        mm.emit(as_today(MIXED["one stage"]))
    with pytest.raises(InputError, match="ties its embedding to its output layer"):
        mm.emit(plan_of("bert-huge-32", stage(16, 8, *["sdp8"] * 32), seq_len=512))
