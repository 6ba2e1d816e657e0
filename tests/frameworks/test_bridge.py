"""bridge.yaml against the configuration classes of Megatron-Bridge.

bridge_fields.json holds the fields of ConfigContainer's sections in Megatron-Bridge 0.3.1 and its registered
precisions, written out by its own `dataclasses.fields` and registry.
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
    assert found["mixed_precision"] in FIELDS["mixed_precision"]


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
