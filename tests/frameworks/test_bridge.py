"""bridge.yaml against the configuration classes of Megatron-Bridge.

bridge_fields.json holds the fields of ConfigContainer's sections and of MixedPrecisionConfig in
Megatron-Bridge 0.3.1, written out by its own `dataclasses.fields`.
"""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from test_launch import PLANS, SOURCES
from test_round_trip import PLANS as MORE

from mist_megatron.frameworks.folder import artifacts
from mist_megatron.spec.plan import Plan

FIELDS = json.loads(Path(__file__).with_name("bridge_fields.json").read_text(encoding="utf-8"))
MEGATRON = {name: plan for name, plan in {**PLANS, **MORE}.items() if plan.target.startswith("megatron")}
SECTIONS = ("model", "train", "dataset", "ddp", "optimizer")


def written(plan: Plan) -> dict:
    return yaml.safe_load(artifacts(plan, SOURCES)["bridge.yaml"])


@pytest.mark.parametrize("name", MEGATRON)
def test_every_key_is_a_field(name: str) -> None:
    """Megatron-Bridge passes over a key that it does not know with a warning in the log."""
    found = written(MEGATRON[name])
    assert set(found) == {*SECTIONS, "mixed_precision"}
    for section in SECTIONS:
        assert set(found[section]) <= set(FIELDS[section]), section
    assert set(found["mixed_precision"]) <= {"_target_", *FIELDS["mixed_precision"]}


@pytest.mark.parametrize("name", MEGATRON)
def test_it_says_the_same_as_the_arguments(name: str) -> None:
    plan, found = MEGATRON[name], written(MEGATRON[name])
    said = yaml.safe_load(artifacts(plan, SOURCES)["args.yaml"])
    model = found["model"]
    for key, flag in {
        "num_layers": "num-layers", "hidden_size": "hidden-size", "ffn_hidden_size": "ffn-hidden-size",
        "num_attention_heads": "num-attention-heads", "layernorm_epsilon": "norm-epsilon",
        "hidden_dropout": "hidden-dropout", "attention_dropout": "attention-dropout",
        "init_method_std": "init-method-std", "rotary_base": "rotary-base", "seq_length": "seq-length",
        "rotary_percent": "rotary-percent", "pipeline_model_parallel_size": "pipeline-model-parallel-size",
    }.items():  # fmt: skip
        if key in model:
            assert float(model[key]) == float(said[flag]), key
    precision = found["mixed_precision"]
    assert precision["bf16"] == ("bf16" in said)
    assert (precision["fp8"], precision["fp4"]) == (said.get("fp8-format"), said.get("fp4-format"))
    assert precision.get("fp8_recipe") == said.get("fp8-recipe")
    assert precision["grad_reduce_in_fp32"] == (plan.execution.grad_bytes != 2)
    # What Bridge's precisions by name switch on, and no flag here does.
    alone = "fp8-param-gather" in said
    assert precision["fp8_param_gather"] == precision["fp8_param"] == alone
    assert precision["reuse_grad_buf_for_mxfp8_param_ag"] == ("reuse-grad-buf-for-mxfp8-param-ag" in said)
    assert not precision["first_last_layers_bf16"]
    assert model["rope_scaling"] == ("use-rope-scaling" in said) if plan.model.rotary else True
    window = ",".join(map(str, model["window_size"] or ()))
    assert window == said.get("window-size", "")
    assert found["dataset"]["sequence_length"] == found["dataset"]["seq_length"] == plan.training.seq_len
    assert model["pipeline_model_parallel_layout"] == said.get("pipeline-model-parallel-layout")


def test_what_a_recipe_says_and_the_plan_does_not_is_taken_back() -> None:
    """A recipe's interleaving, layout and recomputation must not stay underneath."""
    model = written(PLANS["one node"])["model"]
    for key in ("virtual_pipeline_model_parallel_size", "recompute_granularity", "recompute_modules"):
        assert key in model and model[key] is None
    recomputed = replace(PLANS["one node"].stages[0], ckpt=3)
    model = written(replace(PLANS["one node"], stages=(recomputed,)))["model"]
    assert (model["recompute_granularity"], model["recompute_num_layers"]) == ("full", 3)


def test_the_script_is_python_that_names_the_file() -> None:
    files = artifacts(PLANS["one node"], SOURCES)
    ast.parse(files["bridge.py"])
    assert "bridge.yaml" in files["bridge.py"]
