"""Files that were emitted are linted on the cluster that they were emitted for."""

from __future__ import annotations

import json

import pytest


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
