"""Predictions of whole plans: the search's own numbers, their sums, and published runs as sanity."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from kept_programs import KEPT

from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.flops import model_flops
from mist_megatron.cost.predict import grid_of, job_of, predict, prediction_document, recomputed_layers
from mist_megatron.formats.plan_yaml import plan_from_text
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

PLAN = """
schema: 1
model: gpt3-7b
training: {global_batch: 64, seq_len: 2048, precision: fp16, flash_attention: false, dropout: 0.0}
cluster: {gpu: l4-24gb, nodes: 1, gpus_per_node: 8}
target: mist
grad_accum: 32
stages:
  - {layers: 7, nodes: 1, gpus_per_node: 2, dp: 2, tp: 1, micro_batch: 1, zero: 1, ckpt: 5,
     offload: {optimizer: 0.125}}
  - {layers: 8, nodes: 1, gpus_per_node: 2, dp: 2, tp: 1, micro_batch: 1, zero: 2, ckpt: 1,
     offload: {optimizer: 0.875}}
  - {layers: 9, nodes: 1, gpus_per_node: 2, dp: 2, tp: 1, micro_batch: 1, zero: 3, ckpt: 0,
     offload: {optimizer: 0.875}}
  - {layers: 8, nodes: 1, gpus_per_node: 2, dp: 1, tp: 2, micro_batch: 2, zero: 1, ckpt: 0,
     offload: {activations: 0.5}}
"""


def evaluator_of(plan: Plan) -> StageEvaluator:
    job = job_of(plan)
    return make_evaluator(job, datasheet_prices(job.cluster, job.training.precision), cache=KEPT)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_from_text(PLAN)


@pytest.fixture(scope="module")
def evaluator(plan: Plan) -> StageEvaluator:
    return evaluator_of(plan)


def test_one_cost_path(plan: Plan, evaluator: StageEvaluator) -> None:
    """What the search reads off an open grid is what `predict` says of the plan that it picks."""
    prediction = predict(plan, evaluator)
    ratios = np.linspace(0.0, 1.0, 9)
    times = []
    for position, stage in enumerate(plan.stages):
        grid = replace(
            grid_of(plan, position),
            ckpt=np.arange(0.0, 8.0).reshape(-1, 1, 1, 1),
            zero=np.arange(0.0, 4.0).reshape(1, -1, 1, 1),
        ).offloading(optimizer=ratios.reshape(1, 1, -1, 1), activations=ratios.reshape(1, 1, 1, -1))
        cost = evaluator(grid)
        at = (
            stage.ckpt,
            stage.zero,
            round(8 * stage.offload.optimizer),
            round(8 * stage.offload.activations),
        )
        found = [
            float(np.broadcast_to(values, (8, 4, 9, 9))[at])
            for values in (cost.stable_s, cost.delta_s, cost.peak_bytes)
        ]
        said = prediction.stages[position]
        assert found == pytest.approx([said.stable_s, said.delta_s, said.peak_memory_bytes], rel=1e-12)
        times.append(found)
    t, d, _ = zip(*times, strict=True)
    exposed = max(d[i] - sum(t[:i]) for i in range(4))
    assert prediction.time.first_and_last_s == pytest.approx(exposed)
    # Between the busiest stage alone and eq. 1, which leaves out what warm-up passes fill.
    eq1 = 31 * max(t) + sum(t) + exposed
    assert max(32 * mine + sum(t[:i]) for i, mine in enumerate(t)) + exposed <= prediction.iteration_s <= eq1
    assert prediction.iteration_s > 0.98 * eq1


def test_terms_add_up_to_their_totals(plan: Plan, evaluator: StageEvaluator) -> None:
    for stage in predict(plan, evaluator).stages:
        assert sum(stage.stable_terms_s.values()) == pytest.approx(stage.stable_s)
        assert sum(stage.delta_terms_s.values()) == pytest.approx(stage.delta_s)
        assert sum(stage.memory_terms_bytes.values()) == pytest.approx(stage.peak_memory_bytes)


def test_document_has_the_promised_keys(plan: Plan, evaluator: StageEvaluator) -> None:
    document = json.loads(json.dumps(prediction_document(predict(plan, evaluator)), allow_nan=False))
    assert {"iteration_s", "samples_per_s", "tflops_per_gpu", "mfu", "fits", "stages"} <= document.keys()
    for stage in document["stages"]:
        assert {"stable_s", "delta_s", "peak_memory_bytes", "limit_bytes", "memory"} <= stage.keys()
        wanted = {"weights", "grads", "optimizer", "activations", "transient", "framework"}
        assert wanted <= stage["memory"].keys()
    assert document["samples_per_s"] == pytest.approx(64 / document["iteration_s"])


def test_model_flops_of_gpt3_175b_match_the_published_step() -> None:
    # Narayanan et al. 2021 count 96 B s l h^2 (1 + s / 6h + V / 16 l h) with a fourth pass of recomputation;
    # three quarters of the layer part of it is what the model itself needs.
    model, training = presets.preset("gpt3-175b"), TrainingSpec(global_batch=1, seq_len=2048)
    s, layers, h, v = 2048, 96, 12288, model.vocab
    published = 72 * s * layers * h * h * (1 + s / (6 * h)) + 6 * s * h * v
    assert model_flops(model, training) == pytest.approx(published, rel=1e-3)


def test_korthikanti_table_5_within_a_tenth_even_from_the_datasheet() -> None:
    """GPT-22B on 8 A100, TP 8: 1.42 s with full, 1.10 s with selective recompute and SP."""
    text = """
schema: 1
model: {family: gpt, name: gpt-22b, layers: 48, hidden: 6144, ffn_hidden: 24576, heads: 64, kv_heads: 64,
        vocab: 51200, gated_mlp: false, norm: layernorm, linear_bias: true, rotary: false,
        learned_positions: 2048, tied_embeddings: true}
training: {global_batch: 4, seq_len: 2048, precision: bf16, flash_attention: false, dropout: 0.1}
cluster: {gpu: a100-sxm-80gb, nodes: 1, gpus_per_node: 8}
target: megatron
grad_accum: 1
stages:
  - {layers: 48, nodes: 1, gpus_per_node: 8, dp: 1, tp: 8, micro_batch: 4, zero: 0, ckpt: 48}
"""
    full = plan_from_text(text)
    stage = replace(full.stages[0], ckpt=0, recompute="selective")
    light = replace(full, sequence_parallel=True, stages=(stage,))
    for found, measured in ((full, 1.42), (light, 1.10)):
        assert predict(found, evaluator_of(found)).iteration_s == pytest.approx(measured, rel=0.10)


def test_interleaving_shortens_the_bubble_and_holds_more(evaluator: StageEvaluator) -> None:
    stage = StagePlan(
        layers=8, nodes=1, gpus_per_node=2, dp=2, tp=1, micro_batch=1, zero=1, offload=Offload()
    )
    base = replace(plan_from_text(PLAN), target="megatron", stages=(stage,) * 4)
    plain = predict(base, evaluator_of(base))
    chunked = replace(base, schedule="interleaved", vpp=2)
    woven = predict(chunked, evaluator_of(chunked))
    assert woven.time.bubble_fraction < 0.6 * plain.time.bubble_fraction
    assert woven.stages[0].peak_memory_bytes > plain.stages[0].peak_memory_bytes


def test_roles() -> None:
    assert [role_of(i, 2) for i in range(2)] == [StageRole.FIRST, StageRole.LAST]


def test_command_refuses_what_the_target_cannot_run(mist, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace("target: mist", "target: deepspeed"))
    cache = {"MIST_MEGATRON_CACHE": str(tmp_path / "cache")}
    refused = mist("predict", str(path), **cache)
    assert refused.code == 5
    assert refused.err.startswith("error: target deepspeed cannot run this plan: ")
    assert refused.err.count("\n") == 1
    allowed = mist("predict", str(path), "--what-if", "--json", **cache)
    assert allowed.code == 0
    assert json.loads(allowed.out)["violations"]


def test_command_prints_one_document_or_tables(mist, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    cache = {"MIST_MEGATRON_CACHE": str(tmp_path / "cache")}
    shown = mist("predict", str(path), **cache)
    assert shown.code == 0
    for part in ("iteration", "optimizer compute", "activations", "slowest stage", "extrapolated"):
        assert part in shown.out
    document = json.loads(mist("predict", str(path), "--json", **cache).out)
    bare = json.loads(mist("predict", str(path), "--json", "--without", "optimizer_compute", **cache).out)
    assert bare["iteration_s"] < document["iteration_s"]
    wrong = mist("predict", str(path), "--without", "gravity", **cache)
    assert wrong.code == 2
    assert "pipeline_p2p" in wrong.err


def test_command_explains_in_symbols(mist, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    shown = mist("explain", str(path))
    assert shown.code == 0
    assert "micro-batch: sequences per GPU" in shown.out
    assert "M=b*s/cp" in shown.out
    document = json.loads(mist("predict", str(path), "--symbols", "--json").out)
    assert document["values"]["l"] == 7
    assert document["symbols"]["wo"] == "fraction of weights kept in host memory"
    assert mist("explain", str(path), "--stage", "9").code == 2


def test_a_damaged_cache_changes_nothing(mist, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    cache = tmp_path / "cache"
    first = mist("predict", str(path), "--json", MIST_MEGATRON_CACHE=str(cache))
    files = list(cache.glob("stage-*"))
    assert files
    for file in files:
        file.write_text(file.read_text()[:-40] + "}" * 40)
    assert mist("predict", str(path), "--json", MIST_MEGATRON_CACHE=str(cache)).out == first.out
    assert mist("predict", str(path), "--json", MIST_MEGATRON_CACHE="").out == first.out


def test_depths_of_multi_token_prediction_are_counted_each() -> None:
    """Each is a layer of experts, a projection from two hidden states to one, and an output layer
    (DeepSeek-V3, arXiv:2412.19437, equation 21 to 24)."""
    model, training = presets.PRESETS["deepseek-v3"], TrainingSpec(global_batch=1, seq_len=4096)
    none, one, two = (model_flops(replace(model, mtp_layers=depths), training) for depths in (0, 1, 2))
    (kind,) = model.mtp_kinds
    latent = kind.latent_attention
    columns = kind.heads * (latent.qk_head_dim + latent.v_head_dim) / 2
    weights = kind.active_block_parameters + 2 * 7168**2 + 7168 * model.vocab
    per_token = 6.0 * weights + 12.0 * columns * training.seq_len
    assert one - none == pytest.approx(4096 * per_token, rel=1e-9)
    assert two - one == pytest.approx(one - none, rel=1e-9)


@pytest.mark.parametrize(("target", "wanted"), [
    ("megatron", ((0, 1), (0,))), ("mist", ((2, 3), (3,))),
])  # fmt: skip
def test_what_does_not_divide_over_chunks_is_recomputed_in_the_first(
    target: str, wanted: tuple[tuple[int, ...], ...]
) -> None:
    stage = StagePlan(layers=8, nodes=1, gpus_per_node=4, dp=4, tp=1, micro_batch=1, ckpt=3)
    cluster = ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=2, gpus_per_node=4)
    model = replace(presets.PRESETS["gpt3-1.3b"], layers=16)
    plan = Plan(model=model, training=TrainingSpec(global_batch=32, seq_len=2048), cluster=cluster, vpp=2,
                schedule="interleaved",
                target=target, grad_accum=8, stages=(stage, stage))  # fmt: skip
    layers = recomputed_layers(plan, 0)
    assert [len(chunk) for chunk in layers] == [2, 1]
    assert tuple(tuple(layer % 8 for layer in chunk) for chunk in layers) == wanted
