"""Stages whose layers have strategies of their own: priced as today where all are alike, as the events play
them where they are not."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.simulate import play
from mist_megatron.cost.predict import Prediction, grids_of, job_of, predict
from mist_megatron.cost.reshard import Gather, gather_between
from mist_megatron.errors import InputError
from mist_megatron.formats.plan_yaml import plan_from_text, plan_to_yaml
from mist_megatron.price.prices import Collective
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.strategies import LayerRun, Layout, strategy_of
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations


def stage(samples: int, gpus: int, *strategies: str) -> StagePlan:
    """So many samples a micro-step, a strategy a layer."""
    first = strategy_of(strategies[0])
    return StagePlan(
        layers=len(strategies),
        nodes=max(1, gpus // 8),
        gpus_per_node=min(gpus, 8),
        dp=first.layout.dp,
        tp=first.layout.tp,
        micro_batch=samples // first.layout.dp,
        zero=first.zero,
        ckpt=sum(strategy_of(text).ckpt for text in strategies),
        strategies=tuple(LayerRun(count=len(list(run)), strategy=text) for text, run in groupby(strategies)),
    )


def plan_of(model: str | ModelSpec, *stages: StagePlan, seq_len: int = 1024) -> Plan:
    """Four micro-steps on A100s."""
    samples = stages[0].micro_batch * stages[0].dp
    return Plan(
        model=preset(model) if isinstance(model, str) else model,
        training=TrainingSpec(global_batch=4 * samples, seq_len=seq_len),
        cluster=cluster_of(gpu("a100-sxm-40gb"), sum(one.gpus for one in stages)),
        target="torch",
        grad_accum=4,
        stages=stages,
    )


def told(plan: Plan) -> Prediction:
    return predict(plan, evaluator_for(job_of(plan))[0])


def as_today(plan: Plan) -> Plan:
    """The same without strategies, where all layers run alike."""
    return replace(plan, stages=tuple(replace(one, strategies=()) for one in plan.stages))


@pytest.mark.parametrize("strategy", ["dp8", "sdp8", "tp8", "sdp2-tp4", "dp4-tp2", "tp2-dp4", "sdp8+ckpt"])
def test_layers_that_run_alike_cost_what_they_cost_today(strategy: str) -> None:
    plan = plan_of("gpt3-1.3b", stage(16, 8, *[strategy] * 24))
    now, today = told(plan), told(as_today(plan))
    assert now.iteration_s == pytest.approx(today.iteration_s, rel=1e-12)
    assert now.stages[0].memory_terms_bytes == pytest.approx(today.stages[0].memory_terms_bytes, rel=1e-12)
    assert now.stages[0].stable_terms_s == pytest.approx(
        {**today.stages[0].stable_terms_s, "resharding": 0.0}, rel=1e-12
    )


def test_some_recomputed_layers_hold_what_they_hold_today() -> None:
    plan = plan_of("gpt3-1.3b", stage(16, 8, *["sdp8+ckpt"] * 7, *["sdp8"] * 17))
    now, today = told(plan), told(as_today(plan))
    assert now.stages[0].peak_memory_bytes == pytest.approx(today.stages[0].peak_memory_bytes, rel=1e-12)
    # The update of two runs starts two kernels.
    assert now.iteration_s == pytest.approx(today.iteration_s, rel=1e-4)


JOINED = ["dp2-tp2"] * 4 + ["tp4"] * 12
GPT, DECODER = ["sdp4"] * 6 + ["dp2-tp2"] * 8, ["sdp4+ckpt"] * 8 + ["dp2-tp2"] * 9
EDGES = ("tp8", "dp2-tp4")


def edged(plan: Plan, position: int, **edges: object) -> Plan:
    """With a stage that says something else of embedding or head."""
    stages = list(plan.stages)
    stages[position] = replace(stages[position], **edges)
    return replace(plan, stages=tuple(stages))


MIXED = {
    "one stage": plan_of("gpt3-1.3b", stage(16, 8, *["sdp8+ckpt"] * 8, *["dp2-tp4"] * 8, *["sdp2-tp4"] * 8)),
    "two nodes": plan_of("gpt3-1.3b", stage(16, 16, *["sdp16+ckpt"] * 8, *["tp4-dp4"] * 8, *["dp2-tp8"] * 8)),
    "two stages": plan_of("gpt3-1.3b", stage(8, 4, *GPT), stage(8, 4, *["tp4"] * 10)),
    "decoder": plan_of("t5-large-32", stage(8, 4, *DECODER), stage(8, 4, *JOINED), seq_len=512),
    "windows": plan_of("swin-huge-32", stage(16, 8, *["dp8"] * 6, *["dp2-tp4"] * 29), seq_len=3136),
}
MIXED["edges"] = edged(MIXED["one stage"], 0, embedding="tp8", head="dp8")
MIXED["edges of two stages"] = edged(edged(MIXED["two stages"], 0, embedding="tp4"), 1, head="sdp4")


@pytest.mark.parametrize("plan", MIXED.values(), ids=MIXED)
def test_the_events_play_what_is_predicted(plan: Plan) -> None:
    evaluator, _ = evaluator_for(job_of(plan))
    assert play(plan, evaluator).iteration_s == pytest.approx(predict(plan, evaluator).iteration_s, rel=0.01)


@pytest.mark.parametrize("plan", MIXED.values(), ids=MIXED)
def test_such_plans_come_back(plan: Plan) -> None:
    assert plan_from_text(plan_to_yaml(plan)) == plan
    assert "strategies" not in plan_to_yaml(as_today(MIXED["one stage"]))


def test_an_embedding_and_a_head_of_their_own_cost_what_a_run_of_no_layers_would() -> None:
    """As layers run is as today but for the update's two kernels more; elsewhere each is paid where it is."""
    plan = plan_of("gpt3-1.3b", stage(16, 8, *["sdp2-tp4"] * 24))
    same, apart = (edged(plan, 0, embedding=one, head=other) for one, other in (("sdp2-tp4",) * 2, EDGES))
    now, today, own = told(same), told(plan), told(apart)
    assert now.iteration_s == pytest.approx(today.iteration_s, rel=1e-4)
    assert now.stages[0].memory_terms_bytes == pytest.approx(today.stages[0].memory_terms_bytes, rel=1e-12)
    # 50,304 x 2,048 weights of two bytes: an eighth of the embedding's on each rank in both, a quarter of the
    # head's where dp2 replicates; of 2,048 positions sdp2 has half, tp8 all of them.
    table, positions = 50304 * 2048 * 2, 2048 * 2048 * 2
    more = own.stages[0].memory_terms_bytes["weights"] - today.stages[0].memory_terms_bytes["weights"]
    assert more == pytest.approx(table / 4 - table / 8 + positions / 2, rel=1e-3)
    assert own.stages[0].stable_terms_s["resharding"] > 0.0 == now.stages[0].stable_terms_s["resharding"]


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ({"embedding": "sdp4"}, r"embedding is sdp4; wanted one of the stage's 8 GPUs"),
        ({"head": "sdp8+ckpt"}, r"head is sdp8\+ckpt; wanted .* not recomputed"),
        ({"head": "sdp8", "strategies": (), "ckpt": 0}, "beside strategies of its layers"),
        ({"embedding": "tp3"}, "stages\\[0\\].embedding is 'tp3'"),
    ],
)
def test_edges_that_a_plan_cannot_have(edges: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        edged(MIXED["one stage"], 0, **edges)


def test_edges_stand_at_the_ends_and_tied_weights_have_one_strategy() -> None:
    with pytest.raises(InputError, match="wanted it in the first stage only"):
        edged(MIXED["two stages"], 1, embedding="tp4")
    bert = plan_of("bert-huge-32", stage(16, 8, *["sdp8"] * 32), seq_len=512)
    with pytest.raises(InputError, match="the embedding runs tp8 and the head sdp8; bert-huge-32 ties"):
        edged(bert, 0, embedding="tp8")
    assert edged(bert, 0, embedding="tp8", head="tp8").stages[0].head == "tp8"


def test_a_layer_waits_for_what_its_rank_lacks() -> None:
    """By hand: of eight samples on two nodes of four GPUs."""
    dp8, dp2, tp8 = Layout(8, 1), Layout(2, 4), Layout(1, 8)
    assert gather_between(dp2, dp8, 4) is None  # a rank's one sample is among its four
    assert gather_between(dp8, dp2, 4) == Gather(nodes=1, ranks=4)
    assert gather_between(dp8, tp8, 4) == Gather(nodes=2, ranks=8)
    # Rank 0 has samples 0 to 3 in both; rank 1 has them but needs the others, which rank 4 and further have.
    assert gather_between(dp2, Layout(2, 4, tp_outside=True), 4) == Gather(nodes=2, ranks=2)


def test_gradients_of_a_shared_out_layer_are_reduced_at_once_and_replicas_in_buckets() -> None:
    """foreach_reduce of FSDP2 has one reduce-scatter for a layer's group; DDP has buckets of 25 MiB."""
    plan = plan_of("gpt3-1.3b", stage(16, 16, *["sdp16"] * 24))
    evaluator, _ = evaluator_for(job_of(plan))
    layer = evaluator.work(grids_of(plan)[0]).kept
    counts = [np.asarray(number) for number in (4.0 * layer.load.parameters, 16.0, 2.0)]
    whole = float(evaluator.prices.of(Collective("reduce_scatter", *counts)).seconds)
    assert float(layer.backward.reduce_s) == pytest.approx(whole, rel=1e-12)
    replicas = as_today(plan_of("gpt3-1.3b", stage(16, 16, *["dp16"] * 24)))
    last = evaluator.work(grids_of(replicas)[0]).kept.last
    all_reduce = float(evaluator.prices.of(Collective("all_reduce", *counts)).seconds)
    assert float(last.reduce_s) > 1.01 * all_reduce


def test_resharding_is_paid_between_layouts_only() -> None:
    seconds = [
        told(plan).stages[0].stable_terms_s["resharding"]
        for plan in (
            plan_of("gpt3-1.3b", stage(16, 8, *["dp8"] * 12, *["sdp8+ckpt"] * 12)),
            plan_of("gpt3-1.3b", stage(16, 8, *["dp8"] * 12, *["tp8"] * 12)),
            plan_of("gpt3-1.3b", stage(16, 8, *["dp8", "tp8"] * 12)),
        )
    ]
    assert seconds[0] == 0.0 < seconds[1]
    assert seconds[2] == pytest.approx(23 * seconds[1])


def test_other_frameworks_refuse_by_their_table() -> None:
    plan = MIXED["one stage"]
    assert not violations(plan)
    for target in ("megatron", "deepspeed", "mist"):
        assert any("strategies" in words for words in violations(replace(plan, target=target)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategies": (LayerRun(count=9, strategy="sdp8+ckpt"),)}, r"layers is 24; its strategies say 9"),
        ({"ckpt": 3}, r"ckpt is 3; its strategies say 8"),
        ({"zero": 0}, r"zero is 0; its strategies say 3"),
        ({"strategies": (LayerRun(count=24, strategy="sdp4"),)}, r"wanted one of the stage's 8 GPUs"),
        (
            {"strategies": (LayerRun(count=24, strategy="sdp4-sdp2"),)},
            "strategy is 'sdp4-sdp2'; wanted",
        ),
    ],
)
def test_strategies_that_say_something_else(changes: dict[str, object], words: str) -> None:
    plan = MIXED["one stage"]
    with pytest.raises(InputError, match=words):
        replace(plan, stages=(replace(plan.stages[0], **changes),))


@pytest.mark.parametrize(("entry", "share"), [("sdp4", 0.0), ("dp4", 1.0), ("sdp4+ckpt", 0.25)])
def test_a_decoder_that_runs_otherwise_has_a_copy_of_the_token_table(entry: str, share: float) -> None:
    """32,128 rows of 1,024: two bytes of a weight, four of its gradient, twelve of its optimizer's."""
    alike, own = (
        told(plan_of("t5-large-32", stage(8, 4, *["sdp4"] * 16, kind, *["sdp4"] * 16), seq_len=512))
        for kind in ("sdp4", entry)
    )
    more = {
        name: own.stages[0].memory_terms_bytes[name] - alike.stages[0].memory_terms_bytes[name]
        for name in ("weights", "grads", "optimizer")
    }
    table = 32128 * 1024
    norm = 1024 * (0.0 if entry.startswith("sdp") else 0.75)
    for name, width in (("weights", 2), ("grads", 4), ("optimizer", 12)):
        assert more[name] == pytest.approx(width * (share * table + norm), rel=1e-9)


def test_an_encoders_output_is_kept_once_in_each_layout() -> None:
    """Replicated and shared-out layers of a decoder lie alike, in turns or not."""
    decoders = ["sdp4"] * 14
    runs, turns = (
        told(plan_of("t5-large-32", stage(8, 4, *["sdp4"] * 17, *decoders, *pair), seq_len=512))
        for pair in (("dp4", "dp4"), ("dp4", "sdp4"))
    )
    kept = [one.stages[0].memory_terms_bytes["activations"] for one in (runs, turns)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-12)
