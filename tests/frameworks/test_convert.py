"""Hand-written DeepSpeed configurations of the kinds found in the wild, converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run

import mist_megatron as mm
from mist_megatron.ask.emit import deepspeed_schema
from mist_megatron.errors import InputError
from mist_megatron.frameworks.deepspeed.convert import Batch, batch_of
from mist_megatron.frameworks.deepspeed.read import read_config
from mist_megatron.frameworks.loose_json import read_loose

SCHEMA = deepspeed_schema(probe=False)

# Each in the manner of a kind of file that people keep: what is typical of it stands in its name.
FILES = {
    "Megatron example with deprecated cpu_offload": """
{
  "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2,
  "steps_per_print": 1,
  "zero_optimization": {"stage": 2, "cpu_offload": true, "reduce_bucket_size": 7000000,
                        "allgather_bucket_size": 3000000, "contiguous_gradients": true},
  "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true},
  "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2}
}""",
    "Trainer with auto everywhere": """
{
  "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}""",
    "comments and floats": """
{
  # two nodes
  "train_batch_size": 128,      // whole job
  "gradient_accumulation_steps": 4,
  /* memory */
  "zero_optimization": {
    "stage": 2,
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": 5e8,
  },
  "bf16": {"enabled": true},
}""",
    "numbers as text": """
{"train_batch_size": "64", "train_micro_batch_size_per_gpu": "4", "bf16": {"enabled": true},
 "optimizer": {"type": "Adam", "params": {"lr": "3e-4", "weight_decay": 0.0}},
 "zero_optimization": {"stage": 1, "reduce_bucket_size": "2e8"}}""",
    "dict of a Python script": """
ds_config = {
    'train_batch_size': 64,
    'train_micro_batch_size_per_gpu': 4,
    'steps_per_print': 10,
    'zero_optimization': {
        'stage': 3,
        'offload_param': {'device': 'none'},
        'offload_optimizer': {'device': 'cpu'},
        'stage3_param_persistence_threshold': 1e4,
        'stage3_max_live_parameters': 3e7,
        'memory_efficient_linear': False,
    },
    'bf16': {'enabled': True},
    'gradient_clipping': 1.0,
    'prescale_gradients': False,
}""",
    "old file with removed features": """
{"train_batch_size": 64, "bf16": {"enabled": true}, "amp": {"enabled": false, "opt_level": "O1"},
 "elasticity": {"enabled": false}, "sparse_gradients": false,
 "zero_optimization": {"stage": 3, "sub_group_size": 0, "mics_shard_size": -1,
                       "stage3_gather_fp16_weights_on_model_save": true}}""",
    "offloads that do nothing": """
{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "bf16": {"enabled": true},
 "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 1e9,
                       "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "ratio": 1.0}}}""",
    "typing errors at the top": """
{"train_batch_size": 64, "bfloat16": {"enabled": true}, "zero_optimisation": {"stage": 3}, "grad_clip": 1.0,
 "pipeline": {"stages": 2, "partition": "best"}}""",
    "benchmark with compile and monitors": """
{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
 "compile": {"deepcompile": true}, "tensorboard": {"enabled": true, "output_path": "logs"},
 "flops_profiler": {"enabled": false}, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}""",
    "the first generation": """
{"train_batch_size": 64, "fp16": {"enabled": true}, "zero_optimization": true, "dump_state": true}""",
}


def converted(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *more: str) -> dict:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    words = ["convert", str(path), "--model", "llama2-7b", "--gpus", "8", "--json", *more]
    assert run(words) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def _shipped_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped schema: what is installed must not matter here, and asking it takes seconds."""
    monkeypatch.setattr("mist_megatron.ask.convert.deepspeed_schema", lambda probe: SCHEMA)


NOT_PRICED = "benchmark with compile and monitors"
"""DeepCompile: refused by name."""


@pytest.mark.parametrize("name", [name for name in FILES if name != NOT_PRICED])
def test_wild_files_convert_cleanly(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The replacement holds nothing that is rejected or ignored, and is never predicted slower."""
    made = converted(tmp_path, capsys, FILES[name])
    again = read_config(made["config"], SCHEMA)
    assert [f for f in again.findings if f.level in {"rejected", "ignored"}] == []
    assert made["after"]["fits"]
    if made["before"]["fits"]:
        assert made["after"]["iteration_s"] <= made["before"]["iteration_s"]
    assert all(change["reason"] for change in made["changes"])
    json.loads(json.dumps(made["config"], allow_nan=False))
    users_own_choices_stay(read_loose(FILES[name], name), made["config"])


def users_own_choices_stay(raw: dict, made: dict) -> None:
    """Scheduler, precision, optimizer and clipping are not ours to change."""
    for key in ("scheduler", "bf16", "fp16"):
        assert made.get(key) == raw.get(key, made.get(key) if key == "bf16" else None)
    for key, value in raw.get("optimizer", {}).get("params", {}).items():
        kept = made["optimizer"]["params"][key]
        assert kept == (float(value) if isinstance(value, str) and value != "auto" else value)
    assert made.get("gradient_clipping") == raw.get("gradient_clipping")


@pytest.mark.parametrize(
    ("name", "level", "key"),
    [
        ("Megatron example with deprecated cpu_offload", "note", "zero_optimization.cpu_offload"),
        ("Megatron example with deprecated cpu_offload", "ignored", "activation_checkpointing"),
        ("numbers as text", "rejected", "train_batch_size"),
        ("old file with removed features", "rejected", "amp"),
        ("old file with removed features", "rejected", "zero_optimization.mics_shard_size"),
        ("old file with removed features", "note", "zero_optimization.sub_group_size"),
        ("offloads that do nothing", "ignored", "zero_optimization.offload_param"),
        ("offloads that do nothing", "ignored", "zero_optimization.offload_optimizer.device"),
        ("offloads that do nothing", "ignored", "zero_optimization.stage3_max_live_parameters"),
        ("typing errors at the top", "ignored", "zero_optimisation"),
        ("typing errors at the top", "ignored", "pipeline.stages"),
        ("comments and floats", "note", "gradient_clipping"),
    ],
)
def test_what_is_said_about_them(name: str, level: str, key: str) -> None:
    findings = read_config(read_loose(FILES[name], name), SCHEMA).findings
    assert (level, key) in {(f.level, f.key) for f in findings}


def test_keep_leaves_a_key_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = FILES["old file with removed features"]
    kept = converted(tmp_path, capsys, text, "--keep", "zero_optimization.stage")["config"]
    assert kept["zero_optimization"]["stage"] == 3


def test_out_writes_the_file_the_diff_and_the_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    made = converted(tmp_path, capsys, FILES["comments and floats"], "--out", str(out))
    assert json.loads((out / "ds_config.json").read_text()) == made["config"]
    assert (out / "ds_config.diff").read_text().startswith("--- before")
    assert "Predicted" in (out / "CHANGES.md").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "line 1, column 1"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"a": CONFIG_BATCH}', "placeholder"),
        ('{"a": "b}', "closing"),
        ('{"a": {', "end of the file"),
        ("{" * 3000, "wanted"),
        ('{"a":' * 3000, "levels"),
        ("", "start of a configuration"),
    ],
)
def test_broken_files_are_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_loose(text, "x.json")


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ('{"train_batch_size": 50, "train_micro_batch_size_per_gpu": 4}', ()),
        ('{"train_batch_size": -8}', ()),
        ('{"train_batch_size": 64, "zero_optimization": {"stage": 7}}', ()),
        ('{"train_batch_size": 64}', ("--global-batch", "32")),
        ('{"train_batch_size": 64}', ("--target", "megatron")),
    ],
)
def test_bad_input_exits_2(
    text: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert run(["convert", str(path), "--model", "llama2-7b", "--gpus", "8", *more]) == 2
    assert capsys.readouterr().err.startswith("error: ")


AUTO = FILES["Trainer with auto everywhere"]


@pytest.mark.parametrize(
    ("more", "before"),
    [
        (("--global-batch", "64"), (8, 1)),
        (("--global-batch", "96"), (6, 2)),
        (("--global-batch", "256", "--per-device-batch", "4"), (4, 8)),
        (("--global-batch", "256", "--grad-accum", "16"), (2, 16)),
        (("--per-device-batch", "2", "--grad-accum", "3"), (2, 3)),
        ((), (8, 1)),
    ],
)
def test_what_a_trainer_fills_in_is_taken_and_auto_stays(
    more: tuple[str, ...], before: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = converted(tmp_path, capsys, AUTO, *more)
    reading, (micro, steps) = read_config(read_loose(AUTO, "auto"), SCHEMA), before
    asked = dict(zip(more[::2], map(int, more[1::2]), strict=True))
    batch = Batch(
        total=asked.get("--global-batch"),
        micro=asked.get("--per-device-batch"),
        steps=asked.get("--grad-accum"),
    )
    assert batch_of(reading, 8, batch) == before
    assert made["plan"]["training"]["global_batch"] == micro * steps * 8
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        assert made["config"][key] == "auto"


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (AUTO, ("--global-batch", "50"), "--global-batch 50 is not"),
        (AUTO, ("--global-batch", "64", "--per-device-batch", "3"), "--global-batch 64 is not"),
        ('{"train_batch_size": 64}', ("--per-device-batch", "5"), "train_batch_size 64 is not"),
        (
            '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}',
            ("--per-device-batch", "8"),
            "--per-device-batch is 8; the file says train_micro_batch_size_per_gpu 4",
        ),
    ],
)
def test_what_contradicts_the_file_is_refused(
    text: str, more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert run(["convert", str(path), "--model", "llama2-7b", "--gpus", "8", *more]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": {"type": "OneBitAdam", "params": {}}},
        {"tensor_parallel": {"autotp_size": 4}},
        {"sequence_parallel_size": 2},
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        {"torch_autocast": {"enabled": True}},
        {"compile": {"deepcompile": True}},
    ],
)
def test_what_is_not_priced_is_not_converted(
    more: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A price that leaves out what the file does would be no reason for any change."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 64, "bf16": {"enabled": True}, **more}))
    assert run(["convert", str(path), "--model", "llama2-7b", "--gpus", "8"]) == 2
    said = capsys.readouterr().err
    assert "not priced" in said and next(iter(more)) in said


def test_a_file_that_is_best_as_it_is_has_no_tuned_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Converted twice: the second time no reason says that something was tuned."""
    first = converted(tmp_path, capsys, FILES["comments and floats"])
    assert any(change["reason"].startswith("tuned") for change in first["changes"])
    now = ("--checkpointing",) if first["plan"]["stages"][0]["ckpt"] else ()
    again = converted(tmp_path, capsys, json.dumps(first["config"]), *now)
    assert [change for change in again["changes"] if "tuned" in change["reason"]] == []


def test_no_configuration_fits_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
    assert run(["convert", str(path), "--model", "llama3-405b", "--gpus", "8", "--gpu", "l4-24gb"]) == 3


def test_a_file_without_a_batch_is_priced_for_a_told_one_alone(tmp_path):
    """The real one: "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided"."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    job = {"model": "gpt3-1.3b", "gpus": 8}
    with pytest.raises(InputError, match="train_batch_size is missing"):
        mm.convert(path, **job)
    asked = mm.lint(path, **job)
    assert asked.prediction is None
    assert ("open", "train_batch_size") in [(f.level, f.key) for f in asked.findings]
    told = mm.lint(path, **job, global_batch=32)
    assert told.prediction is not None and told.plan.training.global_batch == 32
    assert told.defaults["--seq"].startswith("2048")
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True}}))
    assert mm.lint(path, **job).prediction is not None


def test_a_file_of_an_emitted_folder_is_its_plan(tmp_path, capsys):
    """stages.json says whether layers are recomputed; what it alone says leaves the JSON half a plan."""
    stage = {"stage": 0, "first_rank": 0, "ranks": 8, "layers": 40, "chunk_layers": [40], "dp": 8, "tp": 1}
    stage |= {"micro_batch": 1, "zero": 2, "recompute": "full", "recompute_layers": 40, "arguments": []}
    stage |= {"offload": dict.fromkeys(("weights", "grads", "optimizer", "activations"), 0.0)}
    told = {"schema": 1, "framework": "deepspeed", "plan": "x", "world_size": 8, "tensor_parallel": 1}
    told |= {"context_parallel": 1, "pipeline_parallel": 1, "virtual_pipeline": 1, "micro_batches": 1}
    told |= {"rank_of_gpu": None, "environment": {}, "patches": [], "stages": [stage]}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config | {"zero_optimization": {"stage": 2}}))
    job = ["--model", "llama2-13b", "--gpus", "8", "--gpu", "a100-sxm-80gb"]
    words = ["convert", str(path), *job, "--json"]
    assert run(words) == 0
    without = json.loads(capsys.readouterr().out)["before"]
    (tmp_path / "stages.json").write_text(json.dumps(told))
    assert run(words) == 0
    with_it = json.loads(capsys.readouterr().out)["before"]
    assert run([*words, "--checkpointing"]) == 0
    assert with_it == json.loads(capsys.readouterr().out)["before"] != without
    for change, named in (
        ({"patches": ["state_offload"]}, "state_offload"),
        ({"stages": [stage] * 2}, "2 st"),
    ):
        (tmp_path / "stages.json").write_text(json.dumps(told | change))
        assert run(words) == 2
        assert named in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text("model: {num_layers: 2}\ntrainer: {devices: 8}\n")
    assert run(["convert", str(tmp_path / "a.yaml"), *job]) == 2
    assert "no DeepSpeed JSON" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "kept"), [(4, True), (8, False)])
def test_second_copies_of_weights_are_tuned_over_nodes(
    size: int, kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """hpZ is one of the things that a file can say: never slower than with the file's own, and left out where
    it costs memory for nothing."""
    zero = {"stage": 3, "zero_hpz_partition_size": size, "overlap_comm": True}
    text = json.dumps({"train_batch_size": 64, "bf16": {"enabled": True}, "zero_optimization": zero})
    made = converted(tmp_path, capsys, text, "--gpus", "16", "--bandwidth", "inter=25GB/s")
    assert made["before"]["fits"] and made["after"]["iteration_s"] <= made["before"]["iteration_s"]
    told = made["config"]["zero_optimization"].get("zero_hpz_partition_size")
    assert made["plan"]["execution"].get("hpz_size") == told
    assert kept or told == size or any("hpz" in change["key"] for change in made["changes"])


def test_copies_over_all_gpus_have_no_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    path.write_text(json.dumps({"train_batch_size": 64, "zero_optimization": zero}))
    assert run(["convert", str(path), "--model", "llama2-7b", "--gpus", "8"]) == 2
    assert "all 8 replicas" in capsys.readouterr().err
