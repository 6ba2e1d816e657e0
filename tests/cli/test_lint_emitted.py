"""Files that were emitted are linted on the cluster that they were emitted for."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.usefixtures("warm")


def test_emitted_arguments_are_priced_as_their_plan(mist, tmp_path):
    out = tmp_path / "run"
    job = ["--model", "llama-1.3b", "--gpus", "2", "--gpu", "l4-24gb", "--global-batch", "8"]
    tuned = mist("tune", *job, "--space", "megatron", "--out", str(out), "--json")
    assert tuned.code == 0, tuned.err
    told = json.loads(tuned.out)["prediction"]
    linted = mist("lint", str(out / "args.sh"), "--json")
    assert linted.code == 0, linted.err
    priced = json.loads(linted.out)["prediction"]
    assert priced["fits"]
    assert priced["iteration_s"] == pytest.approx(told["iteration_s"], rel=1e-3)


def test_another_cluster_can_be_asked_for(mist, tmp_path):
    out = tmp_path / "run"
    job = ["--model", "llama-1.3b", "--gpus", "2", "--gpu", "l4-24gb", "--global-batch", "8"]
    assert mist("tune", *job, "--space", "megatron", "--out", str(out)).code == 0
    linted = mist("lint", str(out / "args.sh"), "--gpus", "2", "--gpu", "a100-sxm-80gb", "--json")
    assert json.loads(linted.out)["plan"]["cluster"]["gpu"] == "a100-sxm-80gb"


DEEPSPEED_JOB = [
    *("--model", "gpt3-1.3b", "--gpus", "4", "--gpu", "a100-sxm-40gb", "--global-batch", "16"),
    *("--target", "deepspeed+patches", "--memory-limit", "8GiB"),
]
IN_ONE_PIECE = [*DEEPSPEED_JOB, "--fix", "pp=1"]


def test_emitted_deepspeed_files_are_priced_as_their_plan(mist, tmp_path):
    """A budget that asks for partial recomputation or fractions, found with and without decoupled steps."""
    out = tmp_path / "run"
    tuned = mist("tune", *IN_ONE_PIECE, "--grid", "0.25", "--out", str(out), "--json")
    assert tuned.code == 0, tuned.err
    told = json.loads(tuned.out)
    (stage,) = told["stages"]
    assert told["target"] == "deepspeed+patches"
    assert 0 < stage["ckpt"] < 24 or any(0 < share < 1 for share in stage["offload"].values())
    assert told["prediction"]["fits"]
    for name in ("ds_config.json", "ds_config_auto.json"):
        linted = mist("lint", str(out / name), "--json")
        assert linted.code == 0, linted.err
        found = json.loads(linted.out)
        assert found["plan"]["stages"] == told["stages"]
        iteration_s = told["prediction"]["iteration_s"]
        assert found["prediction"]["iteration_s"] == pytest.approx(iteration_s, rel=1e-9)
    for command in (["predict"], ["simulate"], ["explain"]):
        assert mist(*command, str(out / "plan.yaml")).code == 0
    refused = mist("predict", str(_with(out / "plan.yaml", "zero", 0)))
    assert refused.code == 5


def test_a_pipeline_that_is_found_can_be_emitted_read_back_and_played(mist, tmp_path):
    out = tmp_path / "run"
    tuned = mist("tune", *DEEPSPEED_JOB, "--fix", "pp=2", "--grid", "0.25", "--out", str(out), "--json")
    assert tuned.code == 0, tuned.err
    told = json.loads(tuned.out)
    assert len(told["stages"]) == 2 and {stage["zero"] for stage in told["stages"]} == {1}
    assert len({stage["layers"] for stage in told["stages"]}) == 2 or told["stages"][0] != told["stages"][1]
    written = {stage["config"] for stage in json.loads((out / "stages.json").read_text())["stages"]}
    for name in written:
        linted = mist("lint", str(out / name), "--json")
        assert linted.code == 0, linted.err
        found = json.loads(linted.out)
        assert found["findings"] == [] and found["plan"]["stages"] == told["stages"]
        iteration_s = told["prediction"]["iteration_s"]
        assert found["prediction"]["iteration_s"] == pytest.approx(iteration_s, rel=1e-9)
    named = mist("lint", str(out / name), *DEEPSPEED_JOB, "--json")
    assert json.loads(named.out)["prediction"]["iteration_s"] == pytest.approx(iteration_s, rel=1e-9)
    played = mist("simulate", str(out / "plan.yaml"), "--json")
    assert json.loads(played.out)["iteration_s"] == pytest.approx(iteration_s, rel=0.03)


def test_a_token_table_that_only_the_tokenizer_says_is_the_models(mist, tmp_path):
    """No argument of Megatron holds llama3's 128,256 rows: the options' model or plan.yaml does."""
    out = tmp_path / "run"
    job = ("--model", "llama3-8b", "--gpus", "16", "--gpu", "h100-sxm-80gb", "--global-batch", "32")
    limits = ("--space", "megatron", "--fix", "pp=1,tp=2,micro_batch=1")
    assert mist("tune", *job, "--target", "megatron", *limits, "--out", str(out)).code == 0
    for options in ((), job, ("--gpu", "h100-sxm-80gb"), ("--model", "llama3-8b", "--gpus", "16")):
        linted = mist("lint", str(out / "args.sh"), *options, "--json")
        assert json.loads(linted.out)["plan"]["model"]["vocab"] == 128256, options


def test_a_window_of_all_layers_is_read_back_and_priced(mist, tmp_path):
    out = tmp_path / "run"
    job = ("--model", "mistral-7b", "--gpus", "8", "--gpu", "h100-sxm-80gb", "--seq", "8192")
    job += ("--global-batch", "8")
    limits = ("--space", "megatron", "--fix", "pp=1,tp=2,micro_batch=1")
    tuned = mist("tune", *job, "--target", "megatron", *limits, "--out", str(out), "--json")
    found = json.loads(mist("lint", str(out / "args.sh"), "--json").out)
    assert found["findings"] == []
    assert found["prediction"]["iteration_s"] == json.loads(tuned.out)["prediction"]["iteration_s"]


def test_what_stands_for_sizes_left_to_a_trainer_is_told(mist, tmp_path):
    """TrainingArguments' own 8 sequences per GPU; 64 over 4 GPUs are 2 of these."""
    file = tmp_path / "ds.json"
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    file.write_text(json.dumps({**sizes, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    job = ("--model", "gpt3-1.3b", "--gpus", "4", "--gpu", "a100-sxm-40gb")
    for options, steps in (((), 1), (("--global-batch", "64"), 2)):
        told = json.loads(mist("lint", str(file), *job, *options, "--json").out)
        taken = [told["defaults"][key] for key in sizes]
        assert taken == ['8 for "auto"', f'{steps} for "auto"']
        assert (told["plan"]["stages"][0]["micro_batch"], told["plan"]["grad_accum"]) == (8, steps)


def test_mixtures_on_deepspeed_are_not_priced(mist, tmp_path):
    """As `tune` says of them: neither a number that is not modelled, nor that nothing fits."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}))
    job = ("--model", "deepseek-v2-lite", "--gpus", "8", "--gpu", "h200-sxm-141gb")
    linted = json.loads(mist("lint", str(file), *job, "--json").out)
    assert linted["prediction"] is None
    assert any("mixtures of experts" in finding["message"] for finding in linted["findings"])
    done = mist("convert", str(file), *job)
    assert done.code == 2 and "target deepspeed cannot run model deepseek-v2-lite" in done.err


def test_a_change_that_a_patch_refuses_is_said(mist, tmp_path):
    out = tmp_path / "run"
    assert mist("tune", *IN_ONE_PIECE, "--grid", "0.25", "--out", str(out)).code == 0
    document = json.loads((out / "stages.json").read_text())
    document["patches"] = ["optimizer_fraction"]
    document["stages"][0]["offload"]["optimizer"] = 0.5
    (out / "stages.json").write_text(json.dumps(document))
    config = json.loads((out / "ds_config.json").read_text())
    config["zero_optimization"].pop("offload_optimizer", None)
    (out / "ds_config.json").write_text(json.dumps(config))
    linted = mist("lint", str(out / "ds_config.json"), "--json")
    assert linted.code == 2
    rejected = [f["key"] for f in json.loads(linted.out)["findings"] if f["level"] == "rejected"]
    assert "zero_optimization.offload_optimizer" in rejected


def _with(path, key, value):
    """The plan with one key of its stage changed."""
    import yaml

    plan = yaml.safe_load(path.read_text())
    plan["stages"][0][key] = value
    plan["stages"][0]["offload"] = {"weights": 0.5}
    changed = path.with_name("changed.yaml")
    changed.write_text(yaml.safe_dump(plan))
    return changed


def test_a_folder_with_no_job_of_a_framework_names_what_reads_it(mist, tmp_path):
    out = tmp_path / "run"
    words = ("--model", "gpt3-1.3b", "--gpus", "2", "--gpu", "a100-sxm-80gb", "--global-batch", "4")
    done = mist("tune", *words, "--target", "torch", "--space", "galvatron-dp", "--out", str(out))
    assert done.code == 0
    refused = mist("lint", str(out))
    assert refused.code == 2 and "no job of Megatron or DeepSpeed" in refused.err
    assert f"mist-megatron predict {out}" in refused.err
