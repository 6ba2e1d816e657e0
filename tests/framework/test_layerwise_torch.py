"""Plans of target torch on four real processes (gloo): as the same model in one piece."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import warm_start_server
from short_form import some_of

import mist_megatron as mm
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import grids_of, job_of
from mist_megatron.errors import InputError
from mist_megatron.spec.entry import Entry
from mist_megatron.spec.group_presets import swin_groups, t5_groups, with_groups
from mist_megatron.spec.layer import LayerGroup
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.presets import preset
from tests.cost.test_layerwise import as_today, plan_of, stage

CASE = Path(__file__).with_name("layerwise_case.py")
SEQ = 128
SHAPE = {"hidden": 64, "ffn_hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 64}
GPT = replace(preset("gpt3-1.3b"), layers=4, attention="full", learned_positions=0, **SHAPE)
SHORT = replace(GPT, name="t5", norm="rmsnorm", linear_bias=False, rotary=False, tied_embeddings=True)
"""Steps are compared without ReLU: where rounding turns a sign, its gradient is another."""


def seeing() -> ModelSpec:
    """A frozen tower of 64 patches, merged by fours, before a language model."""
    tower = GPT.kind("tower", hidden=32, ffn_hidden=128, heads=2, kv_heads=2, tokens=64, frozen=True)
    entry = Entry(hidden=32, tokens=64, merged=4, norm=True, inner=128, bias=True, table="own")
    return with_groups(
        replace(GPT, patch_elements=12),
        LayerGroup(layers=2, pattern=(tower,)),
        LayerGroup(layers=1, pattern=(GPT.kind("projector", entry=entry),)),
        LayerGroup(layers=3, pattern=(GPT.kind("text"),)),
    )


MODELS = {
    "gpt": GPT,
    "tied": replace(GPT, tied_embeddings=True),
    "seeing": seeing(),
    "t5": t5_groups(SHORT, 2, 2, decoder_tokens=32),
    "relu-t5": t5_groups(replace(SHORT, activation="relu"), 2, 2, decoder_tokens=32),
    "swin": swin_groups("swin", (32, 16, 4, 4), ((2, 2), (2, 4)), vocab=10, patch_elements=48),
}
MIXED = {
    "gpt two": [stage(2, 2, "sdp2+ckpt", "tp2"), stage(2, 2, "dp2", "sdp2")],
    "gpt edges": [replace(stage(4, 4, "sdp4+ckpt", *["dp2-tp2"] * 3), embedding="tp4", head="dp4")],
    "tied layouts": [stage(4, 4, "sdp4+ckpt", "dp2-tp2", "tp4", "tp2-sdp2")],
    "tied two": [stage(2, 2, "sdp2+ckpt", "tp2"), stage(2, 2, "dp2", "tp2")],
    "seeing one": [stage(4, 4, "sdp4", "dp2-tp2+ckpt", "tp4", "tp2-sdp2", "dp4", "sdp4+ckpt")],
    "seeing two": [stage(2, 2, "tp2"), stage(2, 2, "tp2+ckpt", "sdp2", "tp2", "dp2", "sdp2+ckpt")],
    "t5 one": [stage(4, 4, "sdp4+ckpt", "dp2-tp2", "sdp4", "sdp4", "tp4")],
    "t5 two": [stage(2, 2, "sdp2+ckpt", "tp2", "dp2"), stage(2, 2, "dp2", "tp2+ckpt")],
    "swin one": [stage(4, 4, "dp4+ckpt", "sdp4", "dp2-tp2", "sdp2-tp2", "sdp2-tp2+ckpt")],
    "swin two": [stage(2, 2, "dp2+ckpt", "sdp2", "tp2"), stage(2, 2, "tp2", "sdp2")],
}
EXACT = {
    "gpt replicas": [stage(4, 2, "dp2+ckpt", "sdp2"), replace(stage(4, 2, "dp2", "sdp2+ckpt"), head="dp2")],
    "tied alone": [stage(4, 1, "serial+ckpt") for _ in range(4)],
    "tied shared": [stage(4, 2, "sdp2+ckpt", "sdp2"), stage(4, 2, "dp2", "sdp2+ckpt")],
    "seeing replicas": [stage(4, 2, "dp2+ckpt"), stage(4, 2, "sdp2", "dp2", "sdp2", "dp2+ckpt", "sdp2")],
    "t5 replicas": [stage(4, 2, "dp2+ckpt", "sdp2"), stage(4, 2, "sdp2", "dp2", "sdp2+ckpt")],
    "swin replicas": [stage(4, 2, "dp2+ckpt", "sdp2", "dp2"), stage(4, 2, "sdp2", "dp2")],
}
"""Nothing is split and at most two ranks add up, so that the order of every sum is known. Tensor parallelism
adds partial products where the whole model has one, and more ranks add as gloo pleases."""
KEPT = {
    "gpt one": [stage(4, 4, "sdp4", "dp2-tp2", "tp4", "tp2-sdp2")],
    "tied two": [stage(4, 2, "sdp2", "tp2"), stage(4, 2, "dp2", "sdp2")],
    "seeing one": [stage(4, 4, "sdp4", "dp2-tp2", "tp4", "tp2-sdp2", "dp4", "sdp4+ckpt")],
    "relu-t5 one": [stage(4, 4, "sdp4+ckpt", "dp2-tp2", "sdp4", "sdp4", "tp4")],
    "relu-t5 two": [stage(4, 2, "tp2", "sdp2", "tp2"), stage(4, 2, "tp2", "sdp2")],
    "swin one": [stage(4, 4, "dp4+ckpt", "sdp4", "dp2-tp2", "sdp2-tp2", "sdp2-tp2")],
}


def plan_for(name: str, stages: list[StagePlan], seq_len: int = 32) -> Plan:
    """Of the model that the name begins with; without a pipeline two micro-steps, of which the last sums."""
    model = MODELS[name.split()[0]]
    layers = sum(one.layers for one in stages)
    model = replace(model, layers=layers) if not model.groups else model
    plan = plan_of(model, *stages, seq_len=model.tokens or seq_len)
    if len(stages) > 1:
        return plan
    half = replace(plan.training, global_batch=plan.training.global_batch // 2)
    return replace(plan, training=half, grad_accum=plan.grad_accum // 2)


def expected_bytes(plan: Plan) -> list[float]:
    """By stage, what autograd keeps at its most but for embedding, head and loss: the latter keep what the
    head is given, logarithms of logits and targets until the backward pass begins, which is a moment of its
    own in what is predicted."""
    evaluator, found, head = evaluator_for(job_of(plan))[0], [], plan.model.head_shape
    rows = head.sequence(plan.training.seq_len)
    for own, grid in zip(plan.stages, grids_of(plan), strict=True):
        kept = float(evaluator.memory_moments(grid)["activations"])
        if own is plan.stages[-1]:
            samples = own.micro_batch * own.dp / own.layer_strategies[-1].layout.dp
            kept += samples * rows * (2 * head.hidden + 2 * plan.model.vocab + 8)
        found.append(kept)
    return found


def told_by(plans: dict[str, Plan], folder: Path) -> list[dict[str, Any]]:
    """What four processes say of them."""
    for name, plan in plans.items():
        mm.emit(plan, out=folder / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, str(CASE), *(str(folder / name) for name in plans)],
        capture_output=True,
        text=True,
        timeout=900,
        env=warm_start_server.environment(OMP_NUM_THREADS="1"),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    # Lines of several processes may run into each other.
    told = [json.loads("{" + part) for part in done.stdout.replace("\n", "").split("{")[1:]]
    assert sorted(rank["plan"] for rank in told) == sorted([*plans] * 4)
    return told


def test_two_steps_as_the_model_in_one_piece_and_what_they_keep(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plans = {name: plan_for(name, stages) for name, stages in MIXED.items()}
    plans |= {f"exact {name}": plan_for(name, stages) for name, stages in EXACT.items()}
    plans |= {f"kept {name}": plan_for(name, stages, SEQ) for name, stages in KEPT.items()}
    plans = some_of(5, {name.replace(" ", "-"): plan for name, plan in plans.items()})
    told = told_by(plans, tmp_path)
    trained = [rank for rank in told if not rank["plan"].startswith("kept")]
    # All sums of replicas are under way when a step's last backward pass ends, pipelined or not.
    assert all(rank["steps"] == 2 and rank["late"] == 0 for rank in trained), trained
    assert any(rank["messages"] > 0 and len(plans[rank["plan"]].stages) > 1 for rank in trained)
    for rank in told:
        if rank["plan"].startswith("exact"):
            assert rank["furthest"] == 0.0, rank
            assert all(parallel == alone for parallel, alone in rank["losses"]), rank
        elif rank["plan"].startswith("kept"):
            kept = expected_bytes(plans[rank["plan"]])[rank["stage"]]
            assert rank["most"] == pytest.approx(kept, rel=0.03), rank
        else:
            assert rank["furthest"] < 5e-6, rank
            for parallel, alone in rank["losses"]:
                assert parallel == pytest.approx(alone, rel=1e-6)
            assert rank["still"], rank


def test_what_it_cannot_run_is_refused() -> None:
    whole = plan_of("gpt3-1.3b", stage(16, 8, *["sdp8"] * 24))
    with pytest.raises(InputError, match="no strategies of their own"):
        mm.emit(as_today(whole))
    plan = plan_for("t5 two", MIXED["t5 two"])
    encoder, *others = plan.model.layer_groups
    still = LayerGroup(layers=encoder.layers, pattern=(replace(encoder.pattern[0], frozen=True),))
    with pytest.raises(InputError, match="the embedding of t5 is frozen and its table is shared"):
        mm.emit(replace(plan, model=replace(plan.model, groups=(still, *others))))
    entry, decoder = others
    seen = Entry(hidden=64, tokens=32)
    both = LayerGroup(layers=1, pattern=(replace(entry.pattern[0], name="both", entry=seen),))
    fewer = replace(encoder, layers=1), entry, both, decoder
    with pytest.raises(InputError, match="has an entry that projects, and attends to an encoder"):
        mm.emit(replace(plan, model=replace(plan.model, groups=fewer)))
