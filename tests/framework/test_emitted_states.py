"""A plan with offloaded weights and gradients and decoupled steps, from plan to trained: emitted folder, its
train.sh as written, Megatron's own pretrain() on CPU and gloo."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron", reason="megatron-core is not installed")

from test_emitted_megatron_training import plan, stage, train

from mist_megatron.spec.kinds import Offload


def test_trains_as_plain_megatron(tmp_path: Path) -> None:
    planned = plan(
        stage(3, ckpt=1, offload=Offload(weights=0.5, grads=0.75, activations=0.5)),
        stage(1, ckpt=0, offload=Offload(weights=1.0, grads=0.25)),
    )
    planned = replace(planned, execution=replace(planned.execution, decoupled_step=True))
    for name in ("plain", "planned"):
        (tmp_path / name).mkdir()
    plain = train(tmp_path / "plain", plan(stage(4, zero=0)))
    losses = train(tmp_path / "planned", planned)
    assert plain[-1] < plain[0] - 0.3, f"the tiny model does not learn: {plain}"
    assert losses == pytest.approx(plain, abs=2e-5)
    written = json.loads((tmp_path / "planned" / "emitted" / "stages.json").read_text())
    assert written["patches"] == ["decoupled_steps", "activation_offload", "state_offload"]
