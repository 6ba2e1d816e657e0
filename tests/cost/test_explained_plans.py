"""What `explain` prints, evaluated by other code than ours, is what `predict` says."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from closed_form_against_events import random_interleaved, random_sharing, random_unequal
from closed_form_against_events import random_plan as random_pipeline
from printed_expressions import Scope
from short_form import one_of

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.explain import explain
from mist_megatron.cost.borders import busiest_link_s
from mist_megatron.cost.predict import Prediction, grids_of, job_of, predict
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import PerKind
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec
from tests.cost.test_layerwise import MIXED
from tests.cost.test_offload_modules import of_queued_copies
from tests.cost.test_offload_modules import plan as offloaded

PLANS = 54


CLASSES = {
    **{name: partial(random_pipeline, kind=name) for name in ("balanced", "uneven", "traffic", "overlapped")},
    "interleaved": random_interleaved,
    "unequal": random_unequal,
}


def with_stages(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, stages=tuple(replace(stage, **changes) for stage in plan.stages))


def on_one_stage(plan: Plan, rng: random.Random) -> Plan:
    """ZeRO on DeepSpeed, without a pipeline."""
    gpus, training = plan.cluster.gpus, plan.training
    stage = replace(
        plan.stages[0],
        layers=plan.model.layers,
        nodes=plan.cluster.nodes,
        tp=1,
        dp=gpus,
        micro_batch=1,
        gpus_per_node=plan.cluster.gpus_per_node,
        ckpt=rng.choice((0, plan.model.layers)),
        zero=rng.choice((1, 2, 3)),
        offload=PerKind(weights=0.0, grads=0.0, optimizer=rng.choice((0.0, 1.0)), activations=0.0),
    )
    return replace(
        plan,
        target=rng.choice(("deepspeed", "deepspeed+patches")),
        grad_accum=training.global_batch,
        training=replace(training, global_batch=training.global_batch * gpus),
        execution=Execution(overlap_grad_reduce=rng.random() < 0.5, decoupled_step=rng.random() < 0.3),
        stages=(stage,),
        schedule="1f1b",
        vpp=1,
    )


def random_plan(seed: int) -> Plan:
    """Of all targets, schedules and kinds of traffic; some of these no target could run."""
    rng = random.Random(seed)
    name = list(CLASSES)[seed % len(CLASSES)]
    plan: Plan = CLASSES[name](rng)
    turn = seed // len(CLASSES)
    if name == "balanced" and turn % 3 == 0:
        plan = with_stages(plan, ckpt=0, recompute="selective")
        execution = Execution(deterministic=turn % 2 == 0, tp_comm_overlap=turn % 2 == 1)
        return replace(plan, execution=execution, sequence_parallel=plan.stages[0].tp > 1)
    if name == "balanced" and turn % 3 == 1:
        return replace(plan, training=replace(plan.training, flash_attention=False), schedule="gpipe")
    if name == "uneven" and turn % 3 == 0:
        offload = PerKind(weights=0.25, grads=0.5, optimizer=0.5, activations=rng.choice((0.0, 0.25)))
        plan = replace(with_stages(plan, zero=1, offload=offload), target="megatron+patches")
        return replace(plan, execution=Execution(decoupled_step=turn % 2 == 0))
    if name == "uneven" and turn % 3 == 1:
        offload = PerKind(weights=0.0, grads=0.0, optimizer=0.5, activations=rng.choice((0.0, 0.25)))
        execution = Execution(decoupled_step=turn % 2 == 0)
        return replace(
            with_stages(plan, zero=1, offload=offload), target="deepspeed+patches", execution=execution
        )
    return on_one_stage(plan, rng) if name == "overlapped" and turn % 2 else plan


def printed(plan: Plan) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(explain(plan).to_dict()))
    return document


def close(value: float, truth: float, scale: float) -> bool:
    """To 1e-9 of the truth, or of what it is a part of."""
    return abs(value - truth) <= 1e-9 * max(abs(truth), scale)


def check_stages(scopes: list[Mapping[str, float]], prediction: Prediction) -> None:
    for values, stage in zip(scopes, prediction.stages, strict=True):
        for part, terms in (("t", stage.stable_terms_s), ("d", stage.delta_terms_s)):
            for term, seconds in terms.items():
                assert close(values[f"{part}.{term.value}"], seconds, stage.stable_s), term
        for name, size in stage.memory_terms_bytes.items():
            assert close(values[f"memory.{name}"], size, stage.peak_memory_bytes), name
        assert close(values["t"], stage.stable_s, 0.0)
        assert close(values["d"], stage.delta_s, stage.stable_s)
        assert close(values["peak_bytes"], stage.peak_memory_bytes, 0.0)


@pytest.mark.parametrize("seed", one_of(2, range(PLANS)))
def test_printed_expressions_come_to_what_predict_says(seed: int) -> None:
    check_plan(random_plan(seed))


@pytest.mark.parametrize(
    ("name", "layers", "seq_len", "target"),
    [
        ("t5-512/4-32", (9, 7, 8, 9), 512, "torch"),
        ("qwen2.5-vl-7b-frozen-vision", (61,), 1024, "deepspeed"),
    ],
)
def test_expressions_of_unlike_layers_come_to_what_predict_says(name, layers, seq_len, target) -> None:
    gpus = 8 // len(layers)
    stage = StagePlan(layers=1, nodes=1, gpus_per_node=gpus, dp=gpus, tp=1, micro_batch=1, zero=3, ckpt=1)
    if target == "deepspeed":
        stage = replace(stage, ckpt=0)
    plan = Plan(
        model=preset(name),
        training=TrainingSpec(seq_len=seq_len, global_batch=4 * gpus),
        cluster=ClusterSpec(gpu=gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=8),
        target=target,
        grad_accum=4,
        stages=tuple(replace(stage, layers=count) for count in layers),
    )
    check_plan(plan)


@pytest.mark.parametrize(("name", "leave"), [("llama-7b", ("qkv_linear",)), ("qwen3-30b-a3b", ("moe_act",))])
def test_expressions_of_modules_that_leave_come_to_what_predict_says(name: str, leave) -> None:
    """The README's own job has such a plan; `explain` of it once ended with a traceback."""
    check_plan(offloaded(leave, preset(name)))


def test_expressions_come_to_what_the_slowest_border_makes_of_a_step() -> None:
    """Of stages that share nodes; `explain` once told a step without it."""
    binds = 0
    for seed in range(6):
        plan = random_sharing(random.Random(seed))
        check_plan(plan)
        grids, evaluator = grids_of(plan), evaluator_for(job_of(plan))[0]
        told = predict(plan, evaluator).time
        link_s = busiest_link_s(plan, grids, evaluator, told.behind_s)
        binds += told.total_s == pytest.approx(link_s + told.passed_s, rel=1e-9)
    assert binds, "in none of them the link is busy throughout"


def test_expressions_of_chunks_whose_copies_queue_come_to_what_predict_says() -> None:
    check_plan(of_queued_copies())


@pytest.mark.parametrize("name", ["one stage", "two stages", "decoder"])
def test_expressions_of_layers_with_strategies_come_to_what_predict_says(name: str) -> None:
    plan = MIXED[name]
    check_plan(plan)
    told = explain(plan)
    assert told.values["l_0"] == plan.stages[0].strategies[0].count
    assert told.values["dp_0"] == plan.stages[0].dp
    assert {symbol for symbol, _, _ in told.symbol_rows} >= {"b_0", "b_1", "tp_1"}


def check_plan(plan: Plan) -> None:
    """Every term of every stage, and the iteration."""
    evaluator = evaluator_for(job_of(plan))[0]
    document, prediction = printed(plan), predict(plan, evaluator)
    factors = document["interference"]
    whole = dict(document["iteration"]["values"])
    scopes = []
    for position, stage in enumerate(document["stages"]):
        scope = Scope(stage["values"], evaluator.prices, factors)
        scope.run(stage["steps"])
        scopes.append(scope.values)
        whole.update({f"stage{position}.{name}": value for name, value in scope.values.items()})
    check_stages(scopes, prediction)
    scope = Scope(whole, evaluator.prices, factors)
    scope.run(document["iteration"]["steps"])
    assert close(scope.values["iteration_s"], prediction.iteration_s, 0.0)


@pytest.mark.parametrize("seed", range(0, PLANS, 9))
def test_sections_can_be_read_from_the_top(seed: int) -> None:
    """The command line and the page tell a stage's time, then its memory: no line needs a later one."""
    plan = random_plan(seed)
    document = printed(plan)
    scope = Scope(
        document["stages"][0]["values"], evaluator_for(job_of(plan))[0].prices, document["interference"]
    )
    for section in ("time", "memory"):
        scope.run(document["sections"][section])
    assert scope.values["memory.transient"] <= scope.values["peak_bytes"]


def test_all_targets_are_among_the_plans() -> None:
    plans = [random_plan(seed) for seed in range(PLANS)]
    targets = {"mist", "megatron", "megatron+patches", "deepspeed", "deepspeed+patches"}
    assert {plan.target for plan in plans} == targets
    assert {plan.schedule for plan in plans} >= {"1f1b", "interleaved", "gpipe"}


def test_expressions_go_down_to_prices_and_symbols() -> None:
    """No line is a bare number but for nothing and what a framework allocates once."""
    document = printed(random_plan(2))
    for stage in document["stages"]:
        names = [step["name"] for step in stage["steps"]]
        assert len(names) == len(set(names))
        numbers = {step["name"] for step in stage["steps"] if step["formula"].replace(".", "").isdigit()}
        assert all(
            name == "memory.framework" or not stage["steps"][names.index(name)]["value"] for name in numbers
        )
        assert any("gemm(m=b * s / cp" in step["formula"] for step in stage["steps"])
        assert any("overlap(" in step["formula"] for step in stage["steps"])


def test_a_changed_line_is_noticed() -> None:
    """The evaluation reads the text: with another number in it, it comes to something else."""
    plan = random_plan(0)
    evaluator = evaluator_for(job_of(plan))[0]
    document = printed(plan)
    stage = document["stages"][0]
    step = next(step for step in stage["steps"] if step["name"] == "t.forward")
    step["formula"] = f"2 * ({step['formula']})"
    scope = Scope(stage["values"], evaluator.prices, document["interference"])
    scope.run(stage["steps"])
    assert scope.values["t.forward"] == pytest.approx(2 * step["value"])
