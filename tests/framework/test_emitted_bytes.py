"""Bytes of all four kinds on device and host in Megatron's own pretrain(), started from the emitted folder,
against the terms of `predict` for the very plan that was emitted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("megatron", reason="megatron-core is not installed")

from local_layers import local_differences
from plain_values import value_of
from test_emitted_megatron_training import MODEL, TRAINING, plan, stage, train

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost import symbols as s
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.cost.shapes import ACTIVATION
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.schedule import in_flight


def shares(weights: float, grads: float, optimizer: float, activations: float) -> Offload:
    return Offload(weights=weights, grads=grads, optimizer=optimizer, activations=activations)


MANY, FEW = shares(0.5, 0.75, 0.5, 0.5), shares(1.0, 0.25, 0.75, 0.25)
SHAPES = {
    "two stages": (stage(3, ckpt=1, offload=MANY), stage(1, ckpt=0, offload=FEW)),
    "tied, one stage": (stage(4, ckpt=2, offload=FEW),),
    "tied, two stages": (stage(2, ckpt=1, offload=FEW), stage(2, ckpt=0, offload=MANY)),
}


def planned(name: str) -> Plan:
    found = plan(*SHAPES[name])
    model = replace(MODEL, tied_embeddings=name.startswith("tied"))
    return replace(found, model=model, execution=replace(found.execution, decoupled_step=True))


@pytest.fixture(scope="module", params=SHAPES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, list[dict]]:
    found = planned(request.param)
    folder = tmp_path_factory.mktemp("watched")
    losses = train(folder, found, half=True, steps=3, more=("--train-iters", "3"), watched=True)
    assert losses[-1] < losses[0], "it trains"
    files = [folder / f"rank{k}.json" for k in range(len(found.stages))]
    return found, [json.loads(file.read_text()) for file in files]


def terms(asked: Plan) -> list[dict[str, float]]:
    prediction = predict(asked, evaluator_for(job_of(asked))[0])
    return [dict(one.memory_terms_bytes) for one in prediction.stages]


def with_offload(asked: Plan, **fractions: float) -> Plan:
    stages = [replace(one, offload=replace(one.offload, **fractions)) for one in asked.stages]
    return replace(asked, stages=tuple(stages))


LAYER = 4 * MODEL.hidden**2 + 3 * MODEL.hidden * MODEL.ffn_hidden + 2 * MODEL.hidden
"""Parameters of the largest bucket: attention, gated MLP, two norms."""


@pytest.mark.parametrize(("kind", "width"), [("weights", 2), ("grads", 4)])
def test_weights_and_gradients(run, kind, width):
    asked, found = run
    expected, whole = terms(asked), terms(with_offload(asked, **{kind: 0.0}))
    for number, bytes_of in enumerate(found):
        slack = width * (LAYER / 2 + 128 * (asked.stages[number].layers + 3))
        away = whole[number][kind] - expected[number][kind]
        assert abs(bytes_of[f"{kind}_device"] - expected[number][kind]) <= slack
        assert abs(bytes_of[f"{kind}_host"] - away) <= slack
        assert away > 0


def test_optimizer_states(run):
    """To within half a parameter's shard."""
    asked, found = run
    expected, whole = terms(asked), terms(with_offload(asked, optimizer=0.0))
    for number, bytes_of in enumerate(found):
        slack = bytes_of["optimizer_shard"] / 2
        assert abs(bytes_of["optimizer_device"] - expected[number]["optimizer"]) <= slack
        away = whole[number]["optimizer"] - expected[number]["optimizer"]
        assert abs(bytes_of["optimizer_host"] - away) <= slack
        assert away > 0


MICRO_BATCH = 2
NUMBERS = {
    s.B: MICRO_BATCH, s.S: TRAINING.seq_len, s.TP: 1, s.CP: 1, s.SP: 0, s.HIDDEN: MODEL.hidden,
    s.FFN: MODEL.ffn_hidden, s.HEADS: MODEL.heads, s.KV_HEADS: MODEL.kv_heads, s.HEAD_DIM: MODEL.head_dim,
}  # fmt: skip
TENSOR = 2 * TRAINING.seq_len * MICRO_BATCH * 2 * MODEL.ffn_hidden
"""Bytes of the largest saved tensor, gate and up of the MLP: the share is right to within one."""
KEPT_INPUT = float(value_of(ACTIVATION, NUMBERS))
IDS = 8 * TRAINING.seq_len * MICRO_BATCH


def unfused_bytes() -> float:
    """What a layer without Transformer Engine keeps beyond the layer of the cost model."""
    found = local_differences(MODEL, recompute="full")
    del found["softmax_in_fp32"]  # pretrain's default is not to
    return float(sum(value_of(one, NUMBERS) for one in found.values()))


def test_activations(run):
    """The most that a stage keeps over its micro-batches in flight, with its first layers recomputed."""
    asked, found = run
    everything = replace(asked, stages=tuple(replace(one, ckpt=one.layers) for one in asked.stages))
    kept, stay, recomputed = (
        terms(one) for one in (asked, *(with_offload(o, activations=0.0) for o in (asked, everything)))
    )
    for number, bytes_of in enumerate(found):
        one, share = asked.stages[number], asked.stages[number].offload.activations
        flying = float(in_flight(asked.schedule, number, len(asked.stages), asked.grad_accum, asked.vpp))
        layers = flying * (one.layers - one.ckpt)
        dropped = stay[number]["activations"] - recomputed[number]["activations"]
        layer = dropped / layers + KEPT_INPUT
        # One layer's offloaded tensors pass through the device, which is the host here.
        here = kept[number]["activations"] - share * layer + (1 - share) * layers * unfused_bytes()
        assert abs(bytes_of["activations_device"] - here) <= TENSOR + flying * IDS
        assert abs(bytes_of["activations_host"] - share * layers * (layer + unfused_bytes())) <= TENSOR
        assert bytes_of["activations_left"] == 0, "nothing is left when training is over"
