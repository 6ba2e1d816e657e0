"""What 8-bit products keep: bytes counted by hand from Transformer Engine's modules, and runs that fitted."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
ONE_WAY = {"delayed": 1, "tensorwise": 1, "blockwise": Fraction(33, 32), "mxfp8": Fraction(33, 32)}
ONE_WAY["nvfp4"] = Fraction(9, 16)


def plan(recipe=None, gpu="h100-sxm-80gb", *, zero=1, dp=8, model="llama3-8b", **execution) -> Plan:
    fp8 = recipe is not None
    stage = StagePlan(layers=32, nodes=1, gpus_per_node=dp, dp=dp, tp=1, micro_batch=1, zero=zero)
    return Plan(
        model=PRESETS[model],
        training=TrainingSpec(global_batch=8 * dp, seq_len=4096, precision="fp8" if fp8 else "bf16"),
        cluster=cluster_of(CATALOGUE[gpu], dp, dp),
        target="megatron",
        grad_accum=8,
        stages=(stage,),
        execution=Execution(quantization=recipe, **execution),
    )


def terms(made: Plan):
    (stage,) = predict(made, evaluator_for(job_of(made))[0]).stages
    return stage.memory_terms_bytes


def kept(made: Plan) -> float:
    """Bytes that a layer keeps for one token, and what all layers keep beside them."""
    return terms(made)["activations"] / made.training.seq_len


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dense_layer_keeps_cast_inputs_of_its_products(recipe):
    """QKV, both of the MLP and, by delayed scaling, the output projection beside the core of attention, which
    keeps its result anyhow; by other recipes that projection keeps the same (set_save_original_input)."""
    gpu = "gb200-186gb"
    (kind,) = PRESETS["llama3-8b"].kinds
    less = (2 - ONE_WAY[recipe]) * (2 * kind.hidden + kind.ffn_hidden)
    more = ONE_WAY[recipe] * kind.query_width if recipe == "delayed" else 0
    gained = kept(plan(gpu=gpu)) - kept(plan(recipe, gpu))
    assert gained == pytest.approx(32 * float(less - more), rel=1e-9)


def test_an_attention_core_that_runs_again_leaves_one_cast_result():
    """By delayed scaling: 1 byte of it where 16-bit training keeps 2, as only its reader keeps it."""

    def selective(recipe):
        made = plan(recipe)
        return replace(made, stages=(replace(made.stages[0], recompute="selective"),))

    (kind,) = PRESETS["llama3-8b"].kinds
    cast = 2 * kind.hidden + kind.ffn_hidden + kind.query_width
    assert kept(selective(None)) - kept(selective("delayed")) == pytest.approx(32 * cast, rel=1e-9)


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_keep_cast_inputs_and_a_router_its_own(recipe):
    """Of Qwen3-30B's layer: QKV's input, tokens as they came for each of eight experts, and what these read
    before their second product; the norm before them is kept by the router in 16 bits."""
    made = replace(
        plan(gpu="gb200-186gb", dp=4),
        model=PRESETS["qwen3-30b-a3b"],
        stages=(replace(plan(dp=4).stages[0], layers=48),),
        execution=Execution(expert_parallel=1),
    )
    narrow = replace(
        made,
        training=replace(made.training, precision="fp8"),
        execution=replace(made.execution, quantization=recipe),
    )
    (kind,) = made.model.kinds
    less = (2 - ONE_WAY[recipe]) * (kind.hidden + 8 * (kind.hidden + kind.experts.ffn_hidden))
    more = ONE_WAY[recipe] * kind.query_width if recipe == "delayed" else 0
    assert kept(made) - kept(narrow) == pytest.approx(48 * float(less - more), rel=1e-9)


COPIES = {
    # recipe: bytes a weight of the copies on Hopper, on Blackwell
    "delayed": (2, 1), "tensorwise": (2, 1), "blockwise": (2 + Fraction(8, 128 * 128),) * 2,
    "mxfp8": (None, Fraction(66, 32)), "nvfp4": (None, Fraction(18, 16)),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("number", [0, 1])
def test_weights_have_cast_copies_or_are_these(recipe, number):
    """Of all matrices of the layers: norms, embedding and output layer stay as they are."""
    copies, gpu = COPIES[recipe][number], ("h100-sxm-80gb", "gb200-186gb")[number]
    if copies is None:
        assert any("no such products" in why for why in violations(plan(recipe, gpu)))
        return
    (kind,) = PRESETS["llama3-8b"].kinds
    attention = kind.hidden * (2 * kind.query_width + 2 * kind.kv_width)
    cast = 32 * (attention + 3 * kind.hidden * kind.ffn_hidden)
    wide, narrow = terms(plan(gpu=gpu))["weights"], terms(plan(recipe, gpu))["weights"]
    assert narrow - wide == pytest.approx(float(copies * cast), rel=1e-9)
    if recipe != "nvfp4":
        alone = terms(plan(recipe, gpu, fp8_param_gather=True))["weights"]
        assert alone - wide == pytest.approx(float((copies - 2) * cast), rel=1e-9)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (plan(fp8_param_gather=True), "wanted precision fp8"),
        (plan("nvfp4", "gb200-186gb", fp8_param_gather=True), "--fp4-param-gather"),
        (plan("tensorwise", zero=0, fp8_param_gather=True), "needs zero 1"),
        (plan("delayed", fp8_param_gather=True, optimizer_bytes=6), "wanted optimizer_bytes 12"),
    ],
)
def test_8_bit_weights_alone_are_refused_with_the_rule(made, why):
    assert any(why in told for told in violations(made))
    assert not any("fp8_param_gather" in told for told in violations(plan("delayed", fp8_param_gather=True)))


CONTRADICTED = {"MBR-265", "MBR-165"}
"""Rows whose table differs from every recipe: other rows of the first run shard by Megatron-FSDP and send
40 layers' activations away, of the second none says what else it did."""


def test_published_runs_of_8_bits_fit(runs_dir):
    """They ran. With 16 bits for all that products keep, 23 of them were told not to."""
    refused, told = set(), 0
    for path in sorted(runs_dir.glob("runs.megatron-bridge.*.csv")):
        for row in read_rows(path.read_text("utf-8"), path.name):
            if row.plan is not None and row.plan.training.precision == "fp8":
                told += 1
                if not predict(row.plan, evaluator_for(job_of(row.plan))[0]).fits:
                    refused.add(row.row_id)
    assert told >= 60
    assert refused == CONTRADICTED
