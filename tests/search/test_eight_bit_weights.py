"""Weights in 8 bits alone, where --fix asks for them: found, written, and no slower than beside 16 bits."""

from __future__ import annotations

import pytest
from short_form import long_form

import mist_megatron as mm
from mist_megatron.errors import InputError

JOB = {"model": "llama3-8b", "gpus": 8, "gpu": "h100-sxm-80gb", "seq": 8192, "global_batch": 32}


@long_form
def test_less_memory_is_no_slower() -> None:
    words = {**JOB, "precision": "fp8-tensorwise"}
    usual = mm.tune(**words)
    alone = mm.tune(**words, fix=["fp8_param_gather=1"])
    assert alone.plan.execution.fp8_param_gather
    assert all(stage.zero for stage in alone.plan.stages)
    assert alone.prediction.iteration_s <= usual.prediction.iteration_s * (1.0 + 1e-9)
    assert not usual.plan.execution.fp8_param_gather


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"precision": "bf16"}, "wanted precision fp8"),
        ({"precision": "fp8", "target": "megatron+patches"}, "wanted target megatron"),
        ({"precision": "fp8", "fix": ["fp8_param_gather=1,zero=0"]}, "needs zero 1"),
        ({"precision": "fp8", "fix": ["fp8_param_gather=1,optimizer_bytes=6"]}, "wanted optimizer_bytes 12"),
    ],
)
def test_what_cannot_have_them_is_refused(more: dict[str, object], why: str) -> None:
    with pytest.raises(InputError, match=why):
        mm.tune(**{**JOB, "fix": ["fp8_param_gather=1"], **more})
