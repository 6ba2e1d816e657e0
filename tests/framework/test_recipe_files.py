"""Files of the recipes before the parsers of Megatron and DeepSpeed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

import warm_start_server

from mist_megatron.ask.drop_ins import read_cases
from mist_megatron.formats.files import load_plan

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TARGETS = {
    path.parent.name: re.findall("^target: (.+)$", path.read_text("utf-8"), re.MULTILINE)[0]
    for path in sorted(RECIPES.glob("*/plan.yaml"))
}
USER_ARGS = """
    --train-iters 10 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --eval-interval 1000 --eval-iters 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000
"""


@pytest.fixture(scope="module")
def parser():
    pytest.importorskip("megatron", reason="megatron-core is not installed")
    module = importlib.import_module("megatron_parser")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shim = module.shim()
        shim.import_megatron()
        importlib.import_module("megatron.training.training")  # loaded before it is patched
        shim.pretend_transformer_engine()
        yield module


def different_stages(plan):
    """Equal neighbours have equal arguments: the first and last of the pipeline, and where it changes."""
    kept = {0, len(plan.stages) - 1}
    kept |= {k for k in range(1, len(plan.stages)) if plan.stages[k] != plan.stages[k - 1]}
    return sorted(kept)


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.startswith("megatron")])
def test_megatron_takes_the_arguments(name, parser):
    plan = load_plan(RECIPES / name / "plan.yaml")
    folder = json.loads((RECIPES / name / "stages.json").read_text("utf-8"))
    assert folder["world_size"] == plan.gpus
    for index in different_stages(plan):
        argv = parser.rank_arguments(plan, index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(
                argv + USER_ARGS.split(), world=plan.gpus, environment=folder["environment"]
            )
        stage, args = plan.stages[index], parsed.args
        assert args.data_parallel_size == stage.dp
        assert args.global_batch_size == plan.training.global_batch
        assert args.micro_batch_size * stage.dp * plan.grad_accum == plan.training.global_batch
        assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (
            stage.tp,
            len(plan.stages),
        )
        assert args.num_layers == plan.model.layers


def test_deepspeed_takes_every_json():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    asked = {
        str(path.parent.name): [
            json.loads(path.read_text("utf-8")),
            load_plan(path.with_name("plan.yaml")).gpus,
        ]
        for path in sorted(RECIPES.glob("*/ds_config.json"))
    }
    for name, case in read_cases(RECIPES / "deepspeed").items():
        config = json.loads((RECIPES / "deepspeed" / name / "ds_config.json").read_text("utf-8"))
        if config.get("train_micro_batch_size_per_gpu") != "auto":
            asked[f"deepspeed/{name}"] = [config, case.gpus]
    assert len(asked) >= 20
    verdicts = deepspeed_verdicts(list(asked.values()))
    for (name, (config, gpus)), verdict in zip(asked.items(), verdicts, strict=True):
        assert "error" not in verdict, (name, verdict)
        total, micro, steps = verdict["batch"]
        assert total == micro * steps * gpus
        assert verdict["stage"] == config["zero_optimization"]["stage"]


def deepspeed_verdicts(asked):
    script = Path(__file__).with_name("deepspeed_cpu.py")
    done = subprocess.run(
        [sys.executable, str(script), "parse"],
        env=warm_start_server.environment("deepspeed"),
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].partition("RESULT ")[2])
