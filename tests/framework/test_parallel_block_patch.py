"""Layers of Megatron under the patch `parallel_block` compute what those of transformers do."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")
pytest.importorskip("transformers", reason="needs the test framework environment")
from ranks import run_ranks

ONE_NORM, TWO_NORMS = ("falcon-7b", "falcon-11b", "gpt-j"), ("falcon-40b", "gpt-neox")
ENGINE, SEQUENCE = {"engine": True}, {"sequence_parallel": True}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"tp": 1, "model": name} for name in (*ONE_NORM, *TWO_NORMS)},
    "made again, tp 1": {"tp": 1, "model": "gpt-neox", "recompute": "full"},
    "Transformer Engine, tp 1": {"tp": 1, "model": "gpt-j", **ENGINE},
    **{f"{name}, tp 2": {"tp": 2, "model": name} for name in ("falcon-11b", "gpt-j", *TWO_NORMS)},
    "one norm, sequence": {"tp": 2, "model": "falcon-11b", **SEQUENCE},
    "two norms, sequence": {"tp": 2, "model": "gpt-neox", **SEQUENCE},
    "made again": {"tp": 2, "model": "falcon-11b", "recompute": "full"},
    "MLP made again": {"tp": 2, "model": "falcon-40b", "recompute": "mlp"},
    "Transformer Engine, one norm": {"tp": 2, "model": "gpt-j", **ENGINE},
    "Transformer Engine, two norms": {"tp": 2, "model": "gpt-neox", **ENGINE},
    "Transformer Engine, one norm, sequence": {"tp": 2, "model": "falcon-11b", **ENGINE, **SEQUENCE},
    "Transformer Engine, two norms, sequence": {"tp": 2, "model": "falcon-40b", **ENGINE, **SEQUENCE},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deaf row": ({"model": "gpt-neox", **ENGINE, "deaf": "row"}, "outputs of attention are reduced"),
    "deaf column": ({"model": "gpt-j", **ENGINE, "deaf": "column"}, "gradients of attention are reduced"),
    "norms": ({"model": "gpt-j", "norms": 3}, "got 3 norms; wanted parallel_norms 1 or 2"),
    "residuals": (
        {"model": "gpt-j", "settings": {"fp32_residual_connection": True}},
        "fp32_residual_connection=True was not tried",
    ),
    "norm made again": (
        {
            "model": "gpt-j",
            "settings": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        },
        "--recompute-modules layernorm frees",
    ),
}


@cache
def found() -> dict[str, list[dict[str, Any]]]:
    wrong = {name: {"tp": 2, "may_fail": True, **case} for name, (case, _) in REFUSED.items()}
    cases = CASES | wrong
    by_rank = run_ranks(
        "parallel_blocks.py", json.dumps(list(cases.values())), ranks=2, ready="megatron", seconds=300
    )
    return dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_transformers(name: str) -> None:
    for rank in found()[name]:
        assert max(rank["apart"].values()) < 1e-6, rank["apart"]
        assert len(rank["apart"]) >= 8


SPOKEN = {
    "falcon-7b": ([], []),
    "falcon-11b, tp 2": (["all_reduce"], ["all_reduce"]),
    "gpt-neox, tp 2": (["all_reduce"], ["all_reduce"] * 2),
    "Transformer Engine, one norm": (["all_reduce"], ["all_reduce"]),
    "Transformer Engine, two norms": (["all_reduce"], ["all_reduce"] * 2),
    "two norms, sequence": (["gather", "gather", "scatter"], ["gather"] * 4 + ["scatter"] * 2),
    "one norm, sequence": (["gather", "gather", "scatter"], ["gather"] * 4 + ["scatter"] * 2),
}
"""What goes over tensor-parallel ranks, forward and backward: a sequential layer reduces twice. Of gathers in
a backward pass one is of the program's own input, which it hands out by rows."""


@pytest.mark.parametrize("name", SPOKEN)
def test_outputs_are_reduced_once(name: str) -> None:
    for rank in found()[name]:
        assert (rank["spoken"]["forward"], sorted(rank["spoken"]["backward"])) == SPOKEN[name]


def test_one_norm_is_one_norm_and_named_as_in_other_checkpoints() -> None:
    one, two = (found()[name][0] for name in ("falcon-11b", "falcon-40b"))
    assert two["parameters"] - one["parameters"] == 2 * 32
    assert not any("pre_mlp_layernorm" in key for key in one["state"])
    assert one["norm_in_checkpoints"] == "self_attention.linear_qkv.layer_norm_"
    engine = found()["Transformer Engine, one norm"][0]
    assert engine["norm_in_checkpoints"] == one["norm_in_checkpoints"]
    assert engine["state"] == found()["gpt-j, tp 2"][0]["state"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name: str) -> None:
    for rank in found()[name]:
        assert rank["failed"].startswith("PatchRefused: parallel block: ")
        assert REFUSED[name][1] in rank["failed"] and "\n" not in rank["failed"]
