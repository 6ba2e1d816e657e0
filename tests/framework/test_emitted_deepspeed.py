"""Emitted DeepSpeed files before DeepSpeed, Hugging Face Trainer and Accelerate, and training with them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

import warm_start_server

from mist_megatron.ask.emit import _probed, deepspeed_schema
from mist_megatron.frameworks.deepspeed import write as deepspeed
from mist_megatron.frameworks.deepspeed.convert import replacement
from mist_megatron.frameworks.deepspeed.read import read_config
from mist_megatron.frameworks.deepspeed.schema import schema_from_text
from mist_megatron.frameworks.flags import arguments
from mist_megatron.frameworks.loose_json import read_loose
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.deepspeed import BUCKET_ELEMENTS
from mist_megatron.targets.rules import require_runnable

SCRIPT = Path(__file__).with_name("deepspeed_cpu.py")
SCHEMA = deepspeed_schema(probe=False)
OFFLOADS = {
    # name: ZeRO level -> what DeepSpeed moves
    "none": lambda zero: Offload(),
    "states": lambda zero: Offload(optimizer=1.0, grads=1.0 if zero >= 2 else 0.0),
    "all": lambda zero: Offload(optimizer=1.0, grads=1.0, weights=1.0),
}


def plan(zero: int, offload: str = "none", *, gpus: int = 2, micro_batch: int = 2, **more: object) -> Plan:
    model = presets.PRESETS["llama2-7b"]
    accumulate = more.pop("grad_accum", 2)
    return Plan(
        model=model,
        training=TrainingSpec(
            global_batch=gpus * micro_batch * accumulate,
            seq_len=2048,
            precision=more.pop("precision", "bf16"),
        ),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=gpus),
        target="deepspeed",
        grad_accum=accumulate,
        stages=(
            StagePlan(
                layers=32,
                nodes=1,
                gpus_per_node=gpus,
                dp=gpus,
                tp=1,
                micro_batch=micro_batch,
                zero=zero,
                ckpt=more.pop("ckpt", 0),
                offload=OFFLOADS[offload](zero),
            ),
        ),
        **more,
    )


def explicit(planned: Plan) -> dict:
    require_runnable(planned)
    config = deepspeed.explicit_config(planned, SCHEMA, deepspeed.OptimizerChoice())
    deepspeed.check_against_schema(config, SCHEMA)
    return json.loads(deepspeed.config_text(config))


def run(*words: str, stdin: str | None = None, timeout_s: float = 600) -> list:
    """The results that the program printed, one per process."""
    environment = warm_start_server.environment("deepspeed")
    environment = {k: v for k, v in environment.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        words, input=stdin, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False
    )
    found = [
        json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT " in line
    ]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    return found


def alone(*words: str, stdin: str | None = None):
    return run(sys.executable, str(SCRIPT), *words, stdin=stdin)[0]


def grid() -> list[Plan]:
    plans = []
    for zero, offload, precision, gpus in itertools.product(range(4), OFFLOADS, ("bf16", "fp16"), (1, 8, 64)):
        if (offload == "states" and zero == 0) or (offload == "all" and zero < 3):
            continue
        for ckpt, grad_bytes, overlap in ((0, None, None), (32, 4, True)):
            if grad_bytes and zero == 0:
                continue  # DeepSpeed refuses it when the engine is built, and so does the target
            plans.append(
                plan(
                    zero,
                    offload,
                    gpus=gpus,
                    precision=precision,
                    ckpt=ckpt,
                    grad_accum=3,
                    execution=Execution(grad_bytes=grad_bytes, overlap_grad_reduce=overlap),
                )
            )
    return plans


def test_every_emitted_json_parses_for_its_world_size() -> None:
    plans = grid()
    assert len(plans) >= 80
    for planned, verdict in zip(plans, parsed()["grid"], strict=True):
        stage = planned.stages[0]
        assert "error" not in verdict, (planned, verdict)
        assert verdict["batch"] == [planned.training.global_batch, stage.micro_batch, planned.grad_accum]
        assert verdict["stage"] == stage.zero
        assert (verdict["offload_optimizer"] == "cpu") == (stage.offload.optimizer == 1.0)
        assert (verdict["offload_param"] == "cpu") == (stage.offload.weights == 1.0)
        assert verdict["clipping"] == 1.0
        assert (verdict["bf16"], verdict["fp16"]) == (
            planned.training.precision == "bf16",
            planned.training.precision == "fp16",
        )
        if planned.execution.overlap_grad_reduce is None and stage.zero:
            assert verdict["overlap_comm"] == (stage.zero == 3)


def wild_files() -> dict[str, str]:
    """The hand-written files of tests/frameworks/test_convert.py."""
    path = SCRIPT.parent.parent / "frameworks" / "test_convert.py"
    spec = importlib.util.spec_from_file_location("wild_files", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FILES


def converted() -> list[list]:
    """Ten files from the wild; the tuned plan is given here, its choice is tested elsewhere."""
    tuned, configs = plan(3, "states", gpus=8, grad_accum=4), []
    for name, text in wild_files().items():
        reading = read_config(read_loose(text, name), SCHEMA)
        config = replacement(reading, tuned, SCHEMA, ())
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            if config[key] == "auto":  # what a trainer fills in
                config[key] = 2
        configs.append([{k: v for k, v in config.items() if v != "auto"}, 8])
    return configs


def raw_files() -> dict[str, dict]:
    raw = {name: read_loose(text, name) for name, text in wild_files().items()}
    return {name: config for name, config in raw.items() if config.get("train_batch_size") != "auto"}


def refusable() -> list[list]:
    wrong = explicit(plan(3))
    wrong["zero_optimization"]["stage4_key"] = 1
    batch = explicit(plan(3)) | {"train_batch_size": 50}
    return [[wrong, 2], [batch, 2], [explicit(plan(3)), 4]]


@cache
def parsed() -> dict[str, list[dict]]:
    """What DeepSpeed says of all files, asked in one start."""
    asked = {
        "grid": [[explicit(p), p.gpus] for p in grid()],
        "converted": converted(),
        "raw": [[config, 8] for config in raw_files().values()],
        "refusable": refusable(),
    }
    said = iter(alone("parse", stdin=json.dumps(list(itertools.chain(*asked.values())))))
    return {name: list(itertools.islice(said, len(files))) for name, files in asked.items()}


def test_converted_files_parse() -> None:
    verdicts = parsed()["converted"]
    assert len(verdicts) >= 8
    assert [v for v in verdicts if "error" in v] == []
    assert all(v["stage"] == 3 and v["offload_optimizer"] == "cpu" for v in verdicts)


def test_what_we_call_rejected_is_what_deepspeed_rejects() -> None:
    verdicts = parsed()["raw"]
    for (name, config), verdict in zip(raw_files().items(), verdicts, strict=True):
        said = [f.key for f in read_config(config, SCHEMA).findings if f.level == "rejected"]
        assert bool(said) == ("error" in verdict), (name, said, verdict)
    assert any("error" in verdict for verdict in verdicts)


def test_the_parser_can_refuse() -> None:
    assert all("error" in verdict for verdict in parsed()["refusable"])


def test_shipped_schema_is_what_the_probe_prints() -> None:
    """Only where that version is installed; elsewhere the probe itself must work."""
    probed = schema_from_text(_probed())
    assert {"zero_optimization", "train_batch_size", "flops_profiler"} <= probed.top_level
    if probed.version == SCHEMA.version:
        assert probed == SCHEMA


TRAINED = [(0, "none"), (1, "none"), (2, "states"), (3, "none"), (3, "states"), (3, "all")]


def test_steps_equal_plain_torch(tmp_path: Path) -> None:
    """Two processes on gloo; all six in one start, since most of the time goes into importing."""
    paths = [tmp_path / f"zero{zero}-{offload}.json" for zero, offload in TRAINED]
    for path, (zero, offload) in zip(paths, TRAINED, strict=True):
        path.write_text(json.dumps(explicit(plan(zero, offload))))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    results = run(*torchrun, str(SCRIPT), "train", *map(str, paths))
    first = next(found for found in results if found[0]["rank"] == 0)
    for (zero, offload), found in zip(TRAINED, first, strict=True):
        assert found["losses"] == pytest.approx(found["plain"], abs=1e-6), (zero, offload, found)
        assert found["losses"][-1] < found["losses"][0]


AUTO = {
    "trainer": [(2, "states"), (3, "none")],
    "accelerate": [(1, "none"), (3, "states")],
}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, dict]:
    """What Trainer and Accelerate made of each file: one start, most of which is importing them."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder, asked = tmp_path_factory.mktemp("trainers"), {}
    for program, zero, offload in ((name, *words) for name, all_words in AUTO.items() for words in all_words):
        planned = plan(zero, offload, gpus=1)
        path = folder / f"{program}{zero}.json"
        path.write_text(deepspeed.config_text(deepspeed.auto_config(planned, SCHEMA)))
        launch = folder / f"{program}{zero}.yaml"
        launch.write_text(deepspeed.accelerate_text(planned))
        flags = arguments(deepspeed.huggingface_flags(planned))
        flags = flags if program == "trainer" else ("2", "2", str(launch))
        asked[program, zero, offload] = [program, str(path), *flags]
    path = folder / "ds_config.json"
    path.write_text(json.dumps(explicit(plan(2, gpus=1))))
    flags = ["--bf16", "True", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2"]
    asked["other settings",] = ["trainer", str(path), *flags]
    nodes = replace(plan(3, gpus=16).cluster, nodes=2, gpus_per_node=8)
    (stage,) = plan(3, gpus=16).stages
    stage = replace(stage, nodes=2, gpus_per_node=8)
    path = folder / "two_nodes.yaml"
    path.write_text(deepspeed.accelerate_text(replace(plan(3, gpus=16), cluster=nodes, stages=(stage,))))
    told = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29501"]
    asked["two nodes",] = ["launched", str(path), *told]
    return dict(zip(asked, alone("each", stdin=json.dumps(list(asked.values()))), strict=True))


@pytest.mark.parametrize(("zero", "offload"), AUTO["trainer"])
def test_trainer_accepts_the_auto_flavour(zero: int, offload: str, trainers: dict[tuple, dict]) -> None:
    found = trainers["trainer", zero, offload]
    assert "error" not in found, found
    assert found["engine"] == "DeepSpeedEngine"
    assert found["batch"] == [4, 2, 2]
    assert found["stage"] == zero
    assert found["bf16"]
    assert found["reduce_bucket_size"] == BUCKET_ELEMENTS  # a tuned number, not an "auto"
    assert found["offload_optimizer"] == (offload == "states")


def test_trainer_rejects_other_settings_than_the_explicit_flavour(trainers: dict[tuple, dict]) -> None:
    found = trainers["other settings",]
    assert "mismatch TrainingArguments" in found["error"]
    assert "train_micro_batch_size_per_gpu" in found["error"]


@pytest.mark.parametrize(("zero", "offload"), AUTO["accelerate"])
def test_accelerate_accepts_the_auto_flavour(zero: int, offload: str, trainers: dict[tuple, dict]) -> None:
    found = trainers["accelerate", zero, offload]
    assert "error" not in found, found
    assert found["batch"] == [4, 2, 2]
    assert found["stage"] == zero
    assert found["bf16"], "trained in fp32"


def test_accelerate_starts_each_node_by_itself(trainers: dict[tuple, dict]) -> None:
    """torchrun on this node, of two; by default DeepSpeed's launcher would start all over ssh from each."""
    found = trainers["two nodes",]
    assert "error" not in found, found
    assert found["command"] is None
    assert (found["nnodes"], found["nproc_per_node"], found["node_rank"]) == ("2", "8", "1")


def asked_of_trainers() -> list[tuple[str, list[str], list[str]]]:
    """Each hand-written file before and after its conversion, with the arguments that agree with each."""
    tuned, rows = plan(3, "states", gpus=1, micro_batch=2, grad_accum=4), []
    for name, text in wild_files().items():
        reading = read_config(read_loose(text, name), SCHEMA)
        half = next((k for k in ("bf16", "fp16") if reading.config.get(k, {}).get("enabled") is True), "")
        made = replacement(reading, tuned, SCHEMA, ())
        words = []
        for config in (reading.config, made):
            told = (
                config.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            )
            sizes = [str(size) if isinstance(size, int) else "1" for size in told]
            words.append(["trusted", json.dumps(config), *sizes, half])
        rows.append((name, *words))
    return rows


def test_trainer_and_accelerate_take_what_was_converted() -> None:
    """No key that they object to but what they objected to before: a rate or a batch that the user wrote."""
    rows = asked_of_trainers()
    asked = [words for _, before, after in rows for words in (before, after)]
    found = alone("each", stdin=json.dumps(asked))
    batch = {"ds train_batch_size", "ds train_micro_batch_size_per_gpu", "ds gradient_accumulation_steps"}
    for (name, *_), before, after in zip(rows, found[::2], found[1::2], strict=True):
        assert "error" not in after, (name, after)
        assert set(after["wrong"]) - set(before["wrong"]) - batch == set(), name
    assert any(verdict.get("wrong") for verdict in found), "the check can fail: a user's rate differs"
