"""Models of several kinds of layers: priced as what they are made of."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import Prediction, job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.model_yaml import model_from_mapping, model_to_mapping
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.model import LayerGroup, ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.term import Term
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import job_rules

LAYERS = 16


def one_kind(**changes: object) -> ModelSpec:
    return replace(preset("llama3-8b"), layers=LAYERS, **changes)  # type: ignore[arg-type]


def in_turns(model: ModelSpec, *pattern: str, **window: int) -> ModelSpec:
    """Layers of these kinds in turns, some with windows."""
    kinds = {name: model.kind(name, window=window.get(name)) for name in pattern}
    group = LayerGroup(layers=model.layers, pattern=tuple(kinds[name] for name in pattern))
    return replace(model, groups=(group,))


def plan_of(
    model: ModelSpec, *, ckpt: int = 2, vpp: int = 1, target: str = "megatron", **more: object
) -> Plan:
    stage = StagePlan(
        layers=LAYERS // 4, nodes=1, gpus_per_node=2, dp=1, tp=2, micro_batch=1, ckpt=ckpt, zero=1
    )
    return Plan(
        model=model,
        training=TrainingSpec(seq_len=4096, global_batch=8),
        cluster=ClusterSpec(gpu=gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=8),
        target=target,  # type: ignore[arg-type]
        grad_accum=8,
        stages=(replace(stage, **more),) * 4,  # type: ignore[arg-type]
        vpp=vpp,
        schedule="interleaved" if vpp > 1 else "1f1b",
    )


@cache
def evaluator_of(job: Job) -> StageEvaluator:
    """Compiled once for all plans of a job."""
    return evaluator_for(job)[0]


def predicted(plan: Plan) -> Prediction:
    return predict(plan, evaluator_of(job_of(plan)))


@pytest.mark.parametrize("target", ["megatron", "mist", "deepspeed+patches"])
@pytest.mark.parametrize(("ckpt", "vpp"), [(0, 1), (1, 1), (4, 1), (2, 2)])
def test_kinds_that_do_not_differ_cost_what_one_kind_costs(target, ckpt, vpp):
    """Every term of every stage, whatever else a target does beside layers."""
    model = one_kind()
    offload = replace(plan_of(model).stages[0].offload, optimizer=0.5, activations=0.3, weights=0.25)
    more = {"offload": offload} if target != "megatron" else {}
    plans = [
        plan_of(one, ckpt=ckpt, vpp=vpp, target=target, **more)
        for one in (model, in_turns(model, "one", "one", "two"))
    ]
    whole, parted = (predicted(plan) for plan in plans)
    assert parted.iteration_s == pytest.approx(whole.iteration_s, rel=1e-12)
    for stage, same in zip(parted.stages, whole.stages, strict=True):
        assert dict(stage.stable_terms_s) == pytest.approx(dict(same.stable_terms_s), rel=1e-9, abs=1e-12)
        assert dict(stage.delta_terms_s) == pytest.approx(dict(same.delta_terms_s), rel=1e-9, abs=1e-12)
        assert dict(stage.memory_terms_bytes) == pytest.approx(dict(same.memory_terms_bytes), rel=1e-9)
        assert stage.peak_memory_bytes == pytest.approx(same.peak_memory_bytes, rel=1e-9)
        assert stage.beyond_s == pytest.approx(same.beyond_s, rel=1e-9, abs=1e-12)


def test_layers_in_turns_cost_the_mean_of_their_kinds():
    """Nothing of Megatron's step runs beside single layers, so that stages of two kinds half and half take
    the mean of stages of either kind; they hold what stages of either hold, which is the same."""
    full, sliding = predicted(plan_of(one_kind())), predicted(plan_of(one_kind(window=512)))
    both = predicted(plan_of(in_turns(one_kind(), "full", "sliding", sliding=512)))
    assert both.stages[1].stable_s < full.stages[1].stable_s
    for stage, one, other in zip(both.stages, full.stages, sliding.stages, strict=True):
        assert stage.stable_s == pytest.approx((one.stable_s + other.stable_s) / 2.0, rel=1e-12)
        assert stage.delta_s == pytest.approx(one.delta_s, rel=1e-12)
        assert stage.peak_memory_bytes == one.peak_memory_bytes == other.peak_memory_bytes


def test_a_stage_has_the_layers_at_its_place():
    """Of a model whose first eight layers are twice as deep in their MLPs, the first two of four stages are
    those of a model of such layers."""
    model = one_kind()
    wide = replace(model, ffn_hidden=2 * model.ffn_hidden)
    groups = (
        LayerGroup(layers=8, pattern=(model.kind("wide", ffn_hidden=wide.ffn_hidden),)),
        LayerGroup(layers=8, pattern=(model.kind("narrow"),)),
    )
    plan = plan_of(replace(model, groups=groups), ckpt=1)
    stages, of_wide, of_narrow = (
        predicted(other).stages for other in (plan, plan_of(wide, ckpt=1), plan_of(model, ckpt=1))
    )
    for place, alike in enumerate((of_wide, of_wide, of_narrow, of_narrow)):
        assert stages[place].stable_s == pytest.approx(alike[place].stable_s, rel=1e-12)
        assert stages[place].delta_s == pytest.approx(alike[place].delta_s, rel=1e-12)
        held = {**stages[place].memory_terms_bytes}, {**alike[place].memory_terms_bytes}
        assert held[0].pop("buffers") >= held[1].pop("buffers")
        assert held[0] == pytest.approx(held[1], rel=1e-12)


def test_interleaved_chunks_have_the_layers_at_their_places():
    """With two chunks of two layers each, the first stage has layers 0, 1, 8 and 9."""
    model = one_kind()
    kinds = [model.kind(name, window=window) for name, window in (("near", 256), ("far", None))]
    groups = tuple(LayerGroup(layers=8, pattern=(kind,)) for kind in kinds)
    plan = plan_of(replace(model, groups=groups), vpp=2)
    assert plan.layers_of(0) == (range(2), range(8, 10))
    near, far = (predicted(plan_of(one_kind(window=kind.window), vpp=2)).stages[0] for kind in kinds)
    mean_s = (near.stable_s + far.stable_s) / 2.0
    assert predicted(plan).stages[0].stable_s == pytest.approx(mean_s, rel=1e-3)


@pytest.mark.parametrize("vpp", [1, 2])
def test_events_play_each_layer_as_what_it_is(vpp):
    model = in_turns(one_kind(), "full", "near", "near", near=256)
    plan = plan_of(model, ckpt=0 if vpp > 1 else 1, vpp=vpp)
    played = simulate(plan, evaluator_of(job_of(plan)))
    assert played.iteration_s == pytest.approx(played.prediction.iteration_s, rel=0.02)
    assert max(curve.peak_bytes for curve in played.memory) == pytest.approx(
        max(stage.peak_memory_bytes for stage in played.prediction.stages), rel=1e-9
    )


def test_models_with_groups_are_written_and_read_back():
    model = in_turns(one_kind(), "sliding", "full", sliding=128)
    written = model_to_mapping(model)
    assert written["kinds"] == {"sliding": {"window": 128}, "full": {}}
    assert model_from_mapping(written, "model") == model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": []}, "kinds and groups go together"),
        (
            {"groups": [{"layers": 3, "pattern": ["full", "sliding"]}]},
            "groups have 3 layers together; layers is 16",
        ),
        ({"groups": [{"layers": 16, "pattern": ["ful"]}]}, "unknown kind of layer 'ful'"),
        ({"groups": [{"layers": 16, "pattern": []}]}, "pattern is empty"),
        ({"kinds": {"full": {"heads": 7}, "sliding": {}}}, "must divide heads"),
        ({"kinds": {"full": {"window": 0}, "sliding": {}}}, "window is 0"),
        ({"kinds": {"full": {"widow": 4}, "sliding": {}}}, "unknown key widow"),
        ({"kinds": {"full": {"hidden": 64}, "sliding": {}}}, "wanted a kind with an entry between them"),
    ],
)
def test_wrong_groups_are_refused_by_name(change, words):
    written = model_to_mapping(in_turns(one_kind(), "sliding", "full", sliding=128))
    with pytest.raises(InputError, match=words):
        model_from_mapping({**written, **change}, "model.yaml")


def test_targets_refuse_by_name_what_they_do_not_run():
    turns, bert = in_turns(one_kind(), "sliding", "full", sliding=128), preset("bert-huge-32")
    assert "kinds sliding, full" in job_rules(turns, "bf16", "mist")[0]
    assert not job_rules(turns, "bf16", "megatron") and not job_rules(bert, "bf16", "deepspeed")
    assert "not causal" in job_rules(bert, "bf16", "megatron")[0]


def test_attention_to_the_whole_sequence_takes_twice_a_causal_core():
    """Of s tokens each sees s, not (s + 1) / 2; nothing else of the layer changes."""
    causal = replace(preset("bert-huge-32"), layers=LAYERS, attention="causal")

    def forward_s(model: ModelSpec, seq_len: int) -> float:
        training = TrainingSpec(seq_len=seq_len, global_batch=8)
        plan = replace(plan_of(model, ckpt=0, target="deepspeed"), training=training)
        return predicted(plan).stages[1].stable_terms_s[Term.FORWARD]

    more_s = {
        seq_len: [forward_s(model, seq_len) for model in (causal, replace(causal, attention="full"))]
        for seq_len in (512, 4096)
    }
    extra = [full - half for half, full in more_s.values()]
    assert extra[0] > 0.0 and extra[1] > 8.0 * extra[0]


@pytest.mark.parametrize("dense", [1, 2])
def test_weights_of_the_next_run_of_layers_come_in_beside_the_last_of_one(dense: int) -> None:
    """Of a dense layer and a mixture, which gathers less as ranks share out its experts: once told 5 % too
    slow of one dense layer, that as many bytes came in beside as it has itself."""
    experts = ExpertSpec(count=8, top_k=2, ffn_hidden=1024, first_dense=dense)
    model = replace(preset("llama3-8b"), layers=3, hidden=2048, ffn_hidden=8192, vocab=32000, experts=experts)
    stage = StagePlan(layers=3, nodes=1, gpus_per_node=8, dp=8, tp=1, micro_batch=1, zero=1, ckpt=0)
    plan = Plan(
        model=model,
        training=TrainingSpec(seq_len=512, global_batch=8),
        cluster=ClusterSpec(gpu=gpu("l4-24gb"), nodes=1, gpus_per_node=8),
        target="megatron",
        execution=Execution(overlap_grad_reduce=True, overlap_param_gather=True, expert_parallel=8),
        grad_accum=1,
        stages=(stage,),
    )
    played_s = simulate(plan, evaluator_of(job_of(plan))).iteration_s
    assert predicted(plan).iteration_s == pytest.approx(played_s, rel=0.002)
