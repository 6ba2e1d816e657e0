"""Models whose layers differ in width, in tokens, in what they attend to, or in being trained."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.plan_words import kind_lines
from mist_megatron.cost.entries import entry_operators, frozen
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.flops import model_flops
from mist_megatron.cost.predict import Prediction, grids_of, job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.model_yaml import model_from_mapping, model_to_mapping
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.entry import EncoderOutput, Entry
from mist_megatron.spec.group_presets import group_presets
from mist_megatron.spec.job import Job
from mist_megatron.spec.model import LayerGroup, LayerKind, ModelSpec
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.term import Term
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import job_rules, violations

BY_NAME = {model.name: model for model in group_presets()}


def plan_of(
    model: ModelSpec,
    layers: tuple[int, ...],
    *,
    seq_len: int = 512,
    tp: int = 2,
    target: str = "megatron",
    **more: object,
) -> Plan:
    gpus = 8 // len(layers)
    stage = StagePlan(layers=1, nodes=1, gpus_per_node=gpus, dp=gpus // tp, tp=tp, micro_batch=2)
    stages = tuple(replace(stage, layers=count, **more) for count in layers)  # type: ignore[arg-type]
    return Plan(
        model=model,
        training=TrainingSpec(seq_len=seq_len, global_batch=16 * (gpus // tp)),
        cluster=ClusterSpec(gpu=gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=8),
        target=target,  # type: ignore[arg-type]
        grad_accum=8,
        stages=stages,
    )


@cache
def evaluator_of(job: Job) -> StageEvaluator:
    return evaluator_for(job)[0]


def predicted(plan: Plan) -> Prediction:
    return predict(plan, evaluator_of(job_of(plan)))


def plain(**changes: object) -> ModelSpec:
    fields = {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 32000, "family": "llama", "name": "plain"}
    return model_from_mapping({**fields, "ffn_hidden": 4096, **changes}, "model")


def two_groups(tokens: int, **changes: object) -> ModelSpec:
    """Four layers, an entry, four of the model's own shape; the first four read other tokens."""
    model = plain()
    first = model.kind("first", tokens=tokens, **changes)
    entry = Entry(hidden=first.hidden, tokens=tokens)
    groups = [(4, first), (1, model.kind("join", entry=entry)), (4, model.kind("second"))]
    made = tuple(LayerGroup(layers=layers, pattern=(kind,)) for layers, kind in groups)
    return replace(model, layers=9, groups=made)


@pytest.mark.parametrize("flash", [True, False])
def test_layers_that_work_on_other_tokens_are_those_of_sequences_that_long(flash):
    """A stage of layers on 256 tokens of a sample of 512 costs what it costs of a model of 256."""
    model, short = two_groups(256), plain()
    plans = [plan_of(model, (2, 2, 2, 3), ckpt=1), plan_of(short, (2, 2, 2, 2), seq_len=256, ckpt=1)]
    plans = [replace(plan, training=replace(plan.training, flash_attention=flash)) for plan in plans]
    mixed, alone = (predicted(plan).stages[1] for plan in plans)
    for term in (Term.FORWARD, Term.BACKWARD, Term.RECOMPUTE, Term.TENSOR_PARALLEL, Term.PIPELINE_P2P):
        assert mixed.stable_terms_s[term] == pytest.approx(alone.stable_terms_s[term], rel=1e-12), term
    assert dict(mixed.delta_terms_s) == pytest.approx(dict(alone.delta_terms_s), rel=1e-9, abs=1e-12)
    held, own = dict(mixed.memory_terms_bytes), dict(alone.memory_terms_bytes)
    assert held["activations"] == pytest.approx(own["activations"], rel=1e-12)
    assert held["optimizer"] == pytest.approx(own["optimizer"], rel=1e-12)


def test_windows_that_share_a_sequence_out_are_short_sequences():
    """A token of a Swin transformer sees its own window of 49 and no others: so do samples of 49 tokens, of
    which there are 64 times as many."""
    window = {"attention": "full", "window": 64, "rotary": False}
    long = plan_of(plain(**window), (2, 2, 2, 2), seq_len=512)
    stage = replace(long.stages[0], micro_batch=16)
    training = TrainingSpec(seq_len=64, global_batch=8 * 16)
    short = replace(
        plan_of(plain(**window), (2, 2, 2, 2), seq_len=64), training=training, stages=(stage,) * 4
    )
    for flash in (True, False):
        one, other = (
            predicted(replace(plan, training=replace(plan.training, flash_attention=flash))).stages[1]
            for plan in (long, short)
        )
        assert dict(one.stable_terms_s) == pytest.approx(dict(other.stable_terms_s), rel=1e-12)
        assert one.peak_memory_bytes == pytest.approx(other.peak_memory_bytes, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "layers", "seq_len"),
    [
        ("t5-512/4-32", (12, 5, 8, 8), 512),
        ("swin-huge-32", (9, 9, 9, 8), 3136),
        ("qwen2.5-vl-7b-frozen-vision", (34, 9, 9, 9), 1024),
        ("vit-huge-32", (8, 8, 8, 8), 197),
    ],
)
def test_events_play_what_the_closed_form_adds_up(name, layers, seq_len):
    plan = plan_of(preset(name), layers, seq_len=seq_len)
    played = simulate(plan, evaluator_of(job_of(plan)))
    assert played.iteration_s == pytest.approx(played.prediction.iteration_s, rel=0.01)
    assert max(curve.peak_bytes for curve in played.memory) == pytest.approx(
        max(stage.peak_memory_bytes for stage in played.prediction.stages), rel=1e-9
    )


def test_an_encoders_output_passes_every_stage_of_the_decoder():
    """Behind the encoder 512 tokens of 1,024 channels cross a boundary, between decoder layers 4 more."""
    plan = plan_of(preset("t5-512/4-32"), (12, 8, 6, 7), tp=1)
    evaluator = evaluator_of(job_of(plan))
    sides = [evaluator.loads(grid).sides for grid in grids_of(plan)]
    encoder, decoder = 2 * 2 * 512 * 1024, 2 * 2 * (512 + 4) * 1024
    assert [[float(side.sent_bytes) for side in stage] for stage in sides] == [
        [encoder], [encoder, decoder], [decoder, decoder], [decoder]
    ]  # fmt: skip
    assert all(side.returns for stage in sides for side in stage)


def test_frozen_layers_have_no_gradients_and_the_first_of_them_no_backward_pass():
    frozen, trained = (
        predicted(plan_of(preset(name), (32, 10, 9, 10), seq_len=1024, tp=1))
        for name in ("qwen2.5-vl-7b-frozen-vision", "qwen2.5-vl-7b")
    )
    tower, same = frozen.stages[0], trained.stages[0]
    elements = preset("qwen2.5-vl-7b").parameters - preset("qwen2.5-vl-7b-frozen-vision").trained_parameters
    assert tower.stable_terms_s[Term.FORWARD] == same.stable_terms_s[Term.FORWARD]
    assert tower.stable_terms_s[Term.BACKWARD] == 0.0 < same.stable_terms_s[Term.BACKWARD]
    assert tower.memory_terms_bytes["weights"] == 2.0 * elements
    assert tower.memory_terms_bytes["grads"] == tower.memory_terms_bytes["optimizer"] == 0.0
    assert tower.memory_terms_bytes["activations"] == 0.0
    # One transfer there and none back, of which each side pays half.
    send, both = (one.stages[0].stable_terms_s[Term.PIPELINE_P2P] for one in (frozen, trained))
    assert send == pytest.approx(both / 2.0, rel=1e-12)
    for stage, other in zip(frozen.stages[2:], trained.stages[2:], strict=True):
        assert stage == other


def test_a_frozen_layer_behind_a_trained_one_makes_the_gradients_of_its_inputs():
    """Two of three products of each matrix remain, and inputs of matrices are not kept."""
    model = two_groups(4096)
    frozen = model.kind("second", frozen=True)
    still = replace(model, groups=(*model.groups[:2], LayerGroup(layers=4, pattern=(frozen,))))
    plans = [plan_of(one, (3, 2, 2, 2), seq_len=4096, tp=1) for one in (model, still)]
    whole, part = (predicted(plan).stages[2] for plan in plans)
    forward_s = whole.stable_terms_s[Term.FORWARD]
    assert part.stable_terms_s[Term.FORWARD] == forward_s
    # The gradient of a weight takes about as long as the product itself, most of the forward pass.
    less_s = whole.stable_terms_s[Term.BACKWARD] - part.stable_terms_s[Term.BACKWARD]
    assert 0.6 * forward_s < less_s < forward_s
    assert 0.0 < part.memory_terms_bytes["activations"] < 0.75 * whole.memory_terms_bytes["activations"]
    assert part.memory_terms_bytes["grads"] == 0.0


def test_zero_3_shards_frozen_weights_and_gathers_them_for_forward_passes_only():
    """Where nothing before a layer is trained: of a tower, once per micro-batch."""
    found = {}
    for name in ("qwen2.5-vl-7b-frozen-vision", "qwen2.5-vl-7b"):
        plan = plan_of(preset(name), (61,), seq_len=1024, tp=1, target="deepspeed", zero=3)
        grid = grids_of(plan)[0]
        work = evaluator_of(job_of(plan)).work(grid)
        found[name] = dict(zip((kind.name for kind in plan.model.kinds), work.blocks, strict=True))
    tower, same = (blocks["vision_window"].kept for blocks in found.values())
    assert float(tower.forward.gather_s) == pytest.approx(float(same.forward.gather_s), rel=1e-12)
    assert float(tower.backward.gather_s) == 0.0 < float(same.backward.gather_s)
    assert float(tower.backward.reduce_s) == 0.0 < float(same.backward.reduce_s)


def test_flops_of_one_width_are_counted_as_before():
    """A model whose two groups are joined by nothing but a matrix has that matrix more."""
    training = TrainingSpec(seq_len=512, global_batch=4)
    joined, model = two_groups(512), plain()
    more = 6.0 * 1024 * 1024 * 512 * 4
    assert model_flops(joined, training) == pytest.approx(model_flops(model, training) + more, rel=1e-12)


def test_flops_of_cross_attention_are_those_of_its_matrices_and_pairs():
    """Of four layers with 512 own tokens each that attend to 512 of an encoder as wide as they: queries and
    what they become of the former, keys and values of the latter, three products each, and all pairs, two
    products there and four back."""
    training, model = TrainingSpec(seq_len=512, global_batch=2), encoder_decoder()
    alone = encoder_decoder(decoder=replace(model.groups[2].pattern[0], cross_attention=None))
    more = model_flops(model, training) - model_flops(alone, training)
    assert more == pytest.approx(2 * 4 * 512 * 1024 * (3 * 2 * 4 * 1024 + 12 * 512), rel=1e-12)


@pytest.mark.parametrize("name", BY_NAME)
def test_models_are_written_and_read_back(name):
    assert model_from_mapping(model_to_mapping(BY_NAME[name]), "model") == BY_NAME[name]


def encoder_decoder(**changes: object) -> ModelSpec:
    model = plain(rotary=False)
    given = EncoderOutput(hidden=1024)
    entry = Entry(hidden=1024, projects=False, table="shared")
    kinds = {
        "encoder": model.kind("encoder", attention="full"),
        "start": model.kind("start", entry=entry, cross_attention=given),
        "decoder": model.kind("decoder", cross_attention=given),
        **changes,
    }
    counts = {"encoder": 4, "start": 1, "decoder": 4}
    groups = [LayerGroup(layers=counts[name], pattern=(kind,)) for name, kind in kinds.items() if kind]
    return replace(model, layers=sum(group.layers for group in groups), groups=tuple(groups))


def test_wrong_neighbours_are_refused_by_name():
    model = plain(rotary=False)
    narrow = LayerKind(
        name="narrow", hidden=512, ffn_hidden=2048, heads=8, kv_heads=8, head_dim=64, rotary=False
    )
    cross = model.kind("decoder", cross_attention=EncoderOutput(hidden=512))
    wrong = {
        "give the sequence of width 512 and those of kind start take the sequence of width 1024": (
            {"encoder": narrow}
        ),
        "attend to the sequence of width 512, which no layer before them gives": {"decoder": cross},
        "its first layer, start, is between two groups": {"encoder": None},
        "all its layers are frozen": {
            "encoder": model.kind("encoder", frozen=True), "start": None,
            "decoder": model.kind("decoder", frozen=True),
        },
    }  # fmt: skip
    assert encoder_decoder().layers == 9
    with pytest.raises(InputError, match="start shares the embedding's token table"):
        replace(encoder_decoder(), patch_elements=48)
    for words, changes in wrong.items():
        with pytest.raises(InputError, match=words):
            encoder_decoder(**changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kinds": {"a": {"frozn": True}, "b": {}}}, "kinds.a: unknown key frozn; did you mean frozen"),
        ({"kinds": {"a": {"name": "c"}, "b": {}}}, "kinds.a: unknown key name; its name is a"),
        ({"kinds": {"a": {}, "b": {}, "c": {}}}, "kinds.c has no layer"),
        (
            {"groups": [{"layers": 1, "pattern": ["a", "b"]}, {"layers": 7, "pattern": ["a"]}]},
            "kinds.b has no",
        ),
        ({"kinds": {"a": {"entry": {"hiden": 4}}, "b": {}}}, "hiden"),
        ({"kinds": {"a": {"tokens": 0}, "b": {}}}, "tokens is 0"),
    ],
)
def test_wrong_keys_of_kinds_are_refused_in_one_line(change, words):
    written = {**model_to_mapping(plain()), "kinds": {"a": {"window": 4}, "b": {}}}
    written["groups"] = [{"layers": 8, "pattern": ["a", "b"]}]
    assert len(model_from_mapping(written, "model").kinds) == 2
    with pytest.raises(InputError, match=words) as caught:
        model_from_mapping({**written, **change}, "model.yaml")
    assert "\n" not in caught.value.message


def test_what_cannot_run_or_is_not_modelled_is_told():
    tower = preset("qwen2.5-vl-7b-frozen-vision")
    assert "begin with a token table" in job_rules(tower, "bf16", "megatron")[-1]
    assert "norms after attention" in job_rules(preset("gemma-3-4b"), "bf16", "megatron")[-1]
    assert (
        "no capped attention scores nor capped logits"
        in job_rules(preset("gemma-2-9b"), "bf16", "megatron")[-1]
    )
    assert job_rules(preset("gemma-2-9b"), "bf16", "deepspeed") == ()
    preset("llama-4-scout-17b-16e").check_sequence("training", 8192)
    with pytest.raises(InputError, match="attend in chunks of 8192 tokens"):
        preset("llama-4-scout-17b-16e").check_sequence("training", 8193)
    assert not job_rules(tower, "bf16", "deepspeed")
    plan = plan_of(tower, (61,), seq_len=1024, tp=1, target="deepspeed", zero=2)
    assert not violations(plan)
    away = replace(plan.stages[0], offload=replace(plan.stages[0].offload, optimizer=1.0, grads=1.0))
    assert "beside frozen layers" in violations(replace(plan, stages=(away,)))[0]
    for seq_len, name in ((512, "qwen2.5-vl-7b"), (200, "vit-huge-32")):
        with pytest.raises(InputError, match=f"seq(uence|_len).*{seq_len}"):
            plan_of(preset(name), (preset(name).layers,), seq_len=seq_len)


def test_groups_are_told_by_name():
    plan = plan_of(preset("t5-512/4-32"), (12, 5, 8, 8))
    assert kind_lines(plan) == [
        "layers of stage 0: 12 encoder",
        "layers of stage 1: 4 encoder, 1 decoder_embedding",
        "layers of stage 2: 8 decoder",
        "layers of stage 3: 8 decoder",
    ]
    assert not kind_lines(plan_of(plain(), (2, 2, 2, 2)))


def test_a_frozen_entry_keeps_no_input_of_its_matrix():
    """Which the gradient of a weight alone wants; a norm keeps its own for the gradient of what comes in."""
    join = two_groups(1024).groups[1].pattern[0]
    for norm, kept in ((False, []), (True, ["input", "entry_norm_statistics"])):
        operators = entry_operators(replace(join, entry=replace(join.entry, norm=norm)), 4)
        still = frozen(operators, passes_back=True)
        assert [tensor.key for operator in still for tensor in operator.saved] == kept
        assert sum(len(operator.saved) for operator in operators) == len(kept) + 1
