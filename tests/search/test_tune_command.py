"""`tune` and `compare` as a user meets them."""

from __future__ import annotations

import json

import pytest

from mist_megatron.formats.files import load_plan

JOB = ("--model", "gpt3-1.3b", "--gpus", "2", "--gpu", "l4-24gb", "--global-batch", "16")


def test_tune_answers_in_json(mist):
    done = mist("tune", *JOB, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["search"]["status"] == "optimal"
    assert document["search"]["gap"] == 0.0
    assert document["search"]["configs"] > 0
    assert document["prediction"]["fits"] is True
    assert document["provenance"]["space"] == "full"
    assert document["provenance"]["profile_hash"] in document["provenance"]["profile"]
    for name in ("megatron", "megatron-expert"):
        gain = document["gain"][name]
        assert gain["speedup"] == pytest.approx(gain["iteration_s"] / document["prediction"]["iteration_s"])
        assert gain["speedup"] >= 1.0
    assert sum(stage["layers"] for stage in document["stages"]) == 24


def test_a_gain_is_over_something_that_runs(mist):
    """Megatron-core has no parallel blocks: Falcon by hand is DeepSpeed's."""
    job = ("--model", "falcon-1.3b", "--gpus", "2", "--gpu", "l4-24gb", "--global-batch", "16")
    done = mist("tune", *job, "--target", "mist", "--space", "mist", "--json")
    assert done.code == 0, done.err
    gain = json.loads(done.out)["gain"]
    assert list(gain) == ["deepspeed"]
    assert gain["deepspeed"]["speedup"] >= 1.0


def test_tune_writes_a_plan_that_predicts_the_same(mist, tmp_path):
    done = mist("tune", *JOB, "--out", "run", "--json")
    assert done.code == 0, done.err
    plan = load_plan(tmp_path / "run" / "plan.yaml")
    again = mist("predict", "run/plan.yaml", "--json")
    assert json.loads(again.out)["iteration_s"] == pytest.approx(plan.prediction["iteration_s"], rel=1e-12)
    refused = mist("tune", *JOB, "--out", "run")
    assert refused.code == 2
    assert "not empty" in refused.err


def test_tune_writes_nothing_without_out(mist, tmp_path):
    done = mist("tune", *JOB)
    assert done.code == 0, done.err
    assert list(tmp_path.iterdir()) == []
    assert "proved" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines() if line.startswith(("stage", "0")))


def test_what_is_proved_reads_as_a_sentence_where_there_is_no_pipeline(mist):
    done = mist("tune", "--model", "gpt2", "--gpus", "2", "--global-batch", "4", "--target", "deepspeed")
    assert "no plan of space full on this target is faster (" in " ".join(done.out.split())


def test_workers_find_the_same(mist):
    one = json.loads(mist("tune", *JOB, "--json").out)
    two = json.loads(mist("tune", *JOB, "--json", "--workers", "2").out)
    assert two["prediction"]["iteration_s"] == one["prediction"]["iteration_s"]


def test_compare(mist):
    done = mist("compare", *JOB, "--space", "megatron", "--space", "full", "--json")
    assert done.code == 0, done.err
    spaces = json.loads(done.out)["spaces"]
    assert spaces["full"]["iteration_s"] <= spaces["megatron"]["iteration_s"]
    assert max(space["speedup"] for space in spaces.values()) >= 1.0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--fix", "tp=4", "--max", "tp=2"), 2, "contradicts"),
        (("--fix", "tpp=4"), 2, "did you mean"),
        (("--forbid", "offload.weight"), 2, "offload.weights"),
        (("--space", "mists"), 2, "did you mean mist"),
        (("--time-limit", "0"), 2, "more than 0"),
        (("--grid", "0.3"), 2, "whole number"),
        (("--fix", "tp=3"), 2, "--fix tp=3: wanted one of 1, 2"),
        (("--target", "megatron", "--fix", "cp=3"), 2, "over 1, 2; wanted one of these"),
        (
            ("--target", "deepspeed", "--fix", "cp=2"),
            2,
            "over 1 (deepspeed has no context parallelism); wanted",
        ),
        (("--target", "megatron", "--no-flash-attention", "--fix", "cp=2"), 2, "not fused knows no split"),
        (("--space", "megatron", "--fix", "cp=2"), 2, "(space megatron has no context parallelism)"),
        (("--target", "deepspeed", "--fix", "tp_comm_overlap=1"), 2, "has no such way to train"),
        (("--fix", "dp=2,tp=2"), 2, "tp 2 x dp 2 is 4, which does not make 2 GPUs"),
        (("--fix", "dp=2,grad_accum=3"), 2, "is not a multiple of dp 2 x grad_accum 3; wanted 12 or 18"),
        (("--fix", "pp=2", "--max", "pp=1"), 2, "contradicts"),
        (("--space", "megatron", "--fix", "pp=2,vpp=5"), 2, "no parallel configuration"),
        (("--fix", "tp=²"), 2, "is not a positive whole number"),
        (("--bandwidth", "inter=5GB/s", "--bandwidth", "inter=6GB/s"), 2, "inter is both 5GB/s and 6GB/s"),
        (("--gpus", "x"), 2, "--gpus is 'x'; wanted a whole number"),
        (("--gpus=2.5",), 2, "--gpus is '2.5'; wanted a whole number"),
        (("--grid", "fine"), 2, "--grid is 'fine'; wanted a number"),
        (("--gpus", "12", "--gpu", "a100-sxm-80gb"), 2, "wanted 8 or 16 GPUs, or --gpus-per-node 6"),
        (("--memory-limit", "1GiB"), 3, "no plan fits"),
        (("--top", "0"), 2, "at least 1"),
    ],
)
def test_bad_input_is_one_line(mist, arguments, code, words):
    done = mist("tune", *JOB, *arguments)
    assert done.code == code
    assert done.out == ""
    assert words in done.err
    assert "Traceback" not in done.err
    assert done.err.startswith("error: ")


def test_experts_beside_tensor_parallelism_need_sequence_parallelism(mist):
    """Megatron's layer of experts raises without."""
    job = ("--model", "mixtral-8x7b", "--gpus", "64", "--gpu", "h100-sxm-80gb", "--global-batch", "64")
    done = mist("tune", *job, "--space", "megatron", "--fix", "tp=2", "--forbid", "sequence_parallel")
    assert done.code == 2
    assert "--fix tp=2: tp is 2 without sequence_parallel" in done.err
    assert len(done.err.splitlines()) == 1
