"""`convert --target deepspeed+patches`: the file and stages.json together are the plan that was priced."""

from __future__ import annotations

import json

import pytest
from command_line import run

from mist_megatron.ask.emit import deepspeed_schema
from mist_megatron.frameworks.deepspeed.read import read_config

SCHEMA = deepspeed_schema(probe=False)
JOB = ("--model", "gpt3-1.3b", "--gpus", "4", "--gpu", "a10g-24gb", "--memory-limit", "9GiB")
PATCHED = ("--target", "deepspeed+patches")
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 7e7},
}


@pytest.fixture(autouse=True)
def _shipped_schema(monkeypatch):
    """What is installed must not matter here, and asking it takes seconds."""
    for module in ("convert", "lint"):
        monkeypatch.setattr(f"mist_megatron.ask.{module}.deepspeed_schema", lambda probe: SCHEMA)


def written(tmp_path, config):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_the_folder_is_the_plan_and_is_faster(tmp_path, capsys):
    out = tmp_path / "new"
    words = ["convert", written(tmp_path, CONFIG), *JOB, *PATCHED, "--out", str(out), "--json"]
    assert run(words) == 0, capsys.readouterr().err
    made = json.loads(capsys.readouterr().out)
    assert made["patches"]
    assert made["without_patches"] is None or (
        made["after"]["iteration_s"] <= made["without_patches"]["iteration_s"]
    )
    # Read again from the disk by the command that checks what people changed.
    assert run(["lint", str(out / "ds_config.json"), "--json"]) == 0, capsys.readouterr().err
    linted = json.loads(capsys.readouterr().out)
    assert linted["plan"]["stages"] == made["plan"]["stages"]
    assert linted["prediction"]["iteration_s"] == pytest.approx(made["after"]["iteration_s"], rel=1e-9)
    assert run(["lint", str(out / "args.sh")]) == 0, capsys.readouterr().out
    # What is the user's own stays, and every change has its reason.
    config = json.loads((out / "ds_config.json").read_text())
    assert [f for f in read_config(config, SCHEMA).findings if f.level != "note"] == []
    assert (config["gradient_clipping"], config["optimizer"]) == (0.5, CONFIG["optimizer"])
    assert all(change["reason"] for change in made["changes"])
    told = {change["key"] for change in made["changes"]}
    assert {f"stages.json: {name}" for name in made["patches"]} <= told
    files = {path.name for path in out.iterdir()}
    assert {"stages.json", "train_deepspeed.py", "train.sh", "CHANGES.md", "ds_config.diff"} <= files
    assert not any("ds_config_auto" in path.read_text("utf-8") for path in out.iterdir())
    # A flag that was changed says another plan.
    text = (out / "args.sh").read_text()
    (out / "args.sh").write_text(text.replace("--zero-stage ", "--zero-stage 1"))
    capsys.readouterr()
    assert run(["lint", str(out / "args.sh"), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "deepspeed"
    assert [f["key"] for f in found["findings"] if f["level"] == "rejected"] == ["--zero-stage"]


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        ({"optimizer": {"type": "Lion", "params": {}}}, (), "optimizer.type is Lion"),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, (), "torch_adam"),
        ({"compile": {"deepcompile": True}}, (), "compile.deepcompile"),
        ({}, ("--checkpointing", "--fix-checkpointing"), "--fix-checkpointing"),
        ({}, ("--keep", "zero_optimization.stagee"), "did you mean zero_optimization.stage?"),
    ],
)
def test_what_patches_cannot_do_is_refused(change, more, said, tmp_path, capsys):
    assert run(["convert", written(tmp_path, CONFIG | change), *JOB, *PATCHED, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


def test_a_bare_file_is_linted_for_the_patches(tmp_path, capsys):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    path = written(tmp_path, CONFIG | {"zero_optimization": zero})
    assert run(["lint", path, *JOB, *PATCHED, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["target"] == "deepspeed+patches"
    assert found["plan"]["stages"][0]["offload"]["optimizer"] == 0.5
    assert any("stages.json" in finding["message"] for finding in found["findings"])
    wide = {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}
    assert run(["lint", written(tmp_path, CONFIG | wide), *JOB, *PATCHED]) == 2


@pytest.mark.parametrize("wrong", ["two", 5, [1]])
@pytest.mark.parametrize("key", ["zero_optimization", "optimizer", "bf16", "data_types"])
def test_a_section_of_another_kind_is_rejected(key, wrong):
    found = read_config({"train_batch_size": 64, key: wrong}, SCHEMA).findings
    assert ("rejected", key) in {(f.level, f.key) for f in found}


@pytest.mark.parametrize("text", ["{}", '{"schema": 1, "stages": []}', "[1]", "garbage"])
@pytest.mark.parametrize("name", ["ds_config.json", "args.sh"])
def test_a_broken_stages_json_is_one_line(name, text, tmp_path, capsys):
    (tmp_path / "stages.json").write_text(text)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "args.sh").write_text("MEGATRON_ARGS=(\n  --num-layers 24\n)\n")
    assert run(["lint", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert "stages.json: " in error
    assert len(error.splitlines()) == 1


def test_no_pipeline_stage_is_one_line(tmp_path, capsys):
    flags = (
        "--bf16 --num-layers 24 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1"
    )
    more = "--max-position-embeddings 64 --global-batch-size 8 --pipeline-model-parallel-size 0"
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py {flags} {more}\n")
    assert run(["lint", str(tmp_path / "run.sh"), "--gpus", "8"]) == 2
    assert "pp and cp are 1, 1, 0, 1" in capsys.readouterr().err
