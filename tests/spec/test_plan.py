"""plan.yaml: exact round trip, strict reading, derived quantities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from plans import valid_plans

from mist_megatron.errors import EmitError, InputError
from mist_megatron.formats.plan_yaml import plan_from_text, plan_to_mapping, plan_to_yaml
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.schedule import in_flight
from mist_megatron.targets.rules import require_runnable, runnable_on, violations
from mist_megatron.targets.table import TARGETS

TEXT = """
schema: 1
model: gpt3-1.3b
training: {global_batch: 32, seq_len: 2048, precision: fp16, flash_attention: false, dropout: 0.0}
cluster: {gpu: l4-24gb, nodes: 1, gpus_per_node: 4}
target: mist
grad_accum: 8
stages:
  - {layers: 13, nodes: 1, gpus_per_node: 2, dp: 2, tp: 1, micro_batch: 2, zero: 1, ckpt: 5,
     offload: {weights: 0.0, grads: 0.0, optimizer: 0.5, activations: 0.0}}
  - {layers: 11, nodes: 1, gpus_per_node: 2, dp: 2, tp: 1, micro_batch: 2, zero: 1}
"""


@settings(max_examples=150, deadline=None)
@given(valid_plans())
def test_round_trip_is_exact(plan):
    assert plan_from_text(plan_to_yaml(plan)) == plan
    assert plan_from_text(json.dumps(plan_to_mapping(plan))) == plan


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ckpt: 5", "ckpt: 14", r"stages\[0\].ckpt is 14; wanted 0..13"),
        ("ckpt: 5", "ckpt: -1", r"stages\[0\].ckpt"),
        ("ckpt: 5", "cpkt: 5", r"unknown key stages\[0\].cpkt; did you mean ckpt.$"),
        ("ckpt: 5", "ckpt: 2.5", r"stages\[0\].ckpt"),
        ("layers: 11", "layers: 12", "25 layers together; model gpt3-1.3b has 24"),
        ("grad_accum: 8", "grad_accum: 4", r"micro_batch \* dp \* grad_accum = 2 \* 2 \* 4 = 16"),
        ("gpus_per_node: 4", "gpus_per_node: 8", "4 GPUs together; the cluster has 8"),
        ("gpus_per_node: 4", "gpus_per_node: 0", "gpus_per_node is 0"),
        ("optimizer: 0.5", "optimizer: 1.5", "fraction from 0 to 1"),
        ("optimizer: 0.5", "optimizer: .nan", "fraction from 0 to 1"),
        ("tp: 1", "tp: 3", "dp . tp . context_parallel"),
        ("zero: 1", "zero: 4", r"stages\[0\].zero"),
        ("zero: 1", "zero: true", r"stages\[0\].zero"),
        ("target: mist", "target: mega", "target is 'mega'"),
        ("gpt3-1.3b", "gpt3-1.3", "yaml: model: unknown model preset 'gpt3-1.3'; did you mean gpt3-1.3b"),
        ("gpt3-1.3b", "my.yaml", "model is 'my.yaml'; wanted a preset's name, or the mapping"),
        ("l4-24gb", "l4", "yaml: cluster.gpu: unknown GPU 'l4'; did you mean l4-24gb"),
        ("grad_accum: 8", "grad_acum: 8", "yaml: unknown key grad_acum; did you mean grad_accum.$"),
        ("grad_accum: 8", "grad_accum: 8\nshedule: 1f1b", "unknown key shedule; did you mean schedule.$"),
        ("optimizer: 0.5", "optimiser: 0.5", r"stages.0..offload.optimiser; did you mean optimizer.$"),
        ("l4-24gb", "{name: x}", "yaml: key cluster.gpu.bf16_flops_per_s is missing .and 11 more"),
        ("grad_accum: 8", "grad_accum: .nan", "grad_accum is nan; wanted a whole number$"),
        ("schema: 1", "schema: 2", "reads schema 1"),
        ("schema: 1", "schema: 2\nof_another_time: 1", "reads schema 1"),
        ("schema: 1", "schema: 1\nschema: 1", "stands twice"),
        ("seq_len: 2048", "seq_len: 0", "seq_len is 0"),
        ("grad_accum: 8", "grad_accum: 8\nvpp: 2", "go together"),
        ("grad_accum: 8", "grad_accum: 8\nrank_map: [0, 1, 2, 2]", "rank_map"),
        ("dp: 2, tp: 1", "dp: &a 2, tp: *a", "alias"),
    ],
)
def test_errors_name_stage_and_key(old, new, words):
    with pytest.raises(InputError, match=words) as caught:
        plan_from_text(TEXT.replace(old, new, 1), "plan.yaml")
    assert caught.value.message.startswith("plan.yaml: ")
    assert "\n" not in caught.value.message


def test_ranks_follow_megatron():
    """Tensor parallel fastest, then data parallel, then stages."""
    text = TEXT.replace("gpus_per_node: 4", "gpus_per_node: 8").replace(
        "gpus_per_node: 2", "gpus_per_node: 4"
    )
    plan = plan_from_text(text.replace("tp: 1", "tp: 2"))
    assert list(plan.ranks(1)) == [4, 5, 6, 7]
    assert plan.groups(1, Group.TENSOR) == ((4, 5), (6, 7))
    assert plan.groups(0, Group.DATA) == ((0, 2), (1, 3))
    assert plan.nodes_of((0, 7)) == {0}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8]), ("zb-h1", [4, 4, 4, 4])],
)
def test_in_flight(schedule, expected):
    assert [in_flight(schedule, k, 4, 8) for k in range(4)] == expected


def test_in_flight_interleaved():
    """Rank 0 of 4 with 2 chunks warms up 2 * 3 + 1 * 4 = 10 chunk passes and holds one more."""
    assert in_flight("interleaved", 0, 4, 8, 2) == 11 / 2
    assert in_flight("interleaved", 3, 4, 8, 2) == 5 / 2


def test_violations_name_the_rule_and_who_could():
    plan = plan_from_text(TEXT.replace("target: mist", "target: megatron"))
    assert any("ckpt and recompute must be the same" in rule for rule in violations(plan))
    with pytest.raises(EmitError, match=r"targets that can: megatron\+patches, deepspeed\+patches, mist"):
        require_runnable(plan)
    assert "deepspeed" not in runnable_on(plan)


@settings(max_examples=60, deadline=None)
@given(valid_plans())
def test_a_plan_is_runnable_exactly_where_it_breaks_no_rule(plan):
    able = runnable_on(plan)
    assert (plan.target in able) == (violations(plan) == ())
    assert set(able) <= set(TARGETS)


def test_a_plan_of_the_first_release_of_schema_1_is_still_read() -> None:
    """As it was written then, with a prediction and provenance that have fewer keys than today's: whoever
    changes what schema 1 means breaks plans that people keep, and needs a schema 2 and a way there."""
    text = (Path(__file__).parent / "first_schema_1.yaml").read_text("utf-8")
    plan = plan_from_text(text)
    assert (plan.gpus, plan.vpp, plan.grad_accum, plan.schedule) == (16, 8, 64, "interleaved")
    assert [stage.offload.optimizer for stage in plan.stages] == [0.875, 0.5, 0.375, 0.75]
    assert plan.prediction is not None
    assert plan.prediction["iteration_s"] == 36.97
    assert plan_from_text(plan_to_yaml(plan)) == plan
    with pytest.raises(InputError, match="schema is 2; this version reads schema 1"):
        plan_from_text(text.replace("schema: 1", "schema: 2", 1))
