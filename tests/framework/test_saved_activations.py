"""Saved activations, FLOPs and parameters of the layer graphs against real Megatron-core layers, exactly."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")
from local_layers import local_differences
from measure_layers import RECOMPUTE, SHAPES, LayerShape
from plain_values import value_of
from ranks import run_ranks
from summed import told

from mist_megatron.cost import symbols as s
from mist_megatron.cost.layers import (
    LayerOptions,
    backward_flops,
    block,
    forward_flops,
    parameters,
    saved_bytes,
)
from mist_megatron.cost.shapes import ACTIVATION
from mist_megatron.formats.model_yaml import model_from_mapping

CASES = [
    (shape, tp, sp, recompute)
    for shape in SHAPES
    for tp, sp in ((1, False), (2, False), (2, True))
    for recompute in RECOMPUTE
]


@cache
def measured(tp: int) -> dict[str, dict[str, int]]:
    """All shapes at once: one start of Megatron per tensor-parallel size."""
    found = [found for (found,) in run_ranks("measure_layers.py", str(tp), ranks=tp, ready="megatron")]
    assert all(result == found[0] for result in found), "ranks of one layer keep the same number of bytes"
    return found[0]


def model_of(shape: LayerShape):
    model = model_from_mapping(
        {
            "family": shape.family,
            "layers": 1,
            "hidden": shape.hidden,
            "ffn_hidden": shape.ffn,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "vocab": 128,
            "linear_bias": shape.bias,
        },
        "model",
    )
    return model.kind("layer", half=shape.half)


def values(shape: LayerShape, tp: int, sp: bool) -> dict:
    return {
        s.B: shape.batch,
        s.S: shape.seq,
        s.TP: tp,
        s.CP: 1,
        s.SP: int(sp),
        s.HIDDEN: shape.hidden,
        s.FFN: shape.ffn,
        s.HEADS: shape.heads,
        s.KV_HEADS: shape.kv_heads,
        s.HEAD_DIM: shape.hidden // shape.heads,
    }


# On CPU LayerNorm keeps mean and 1/std in the precision of its input (2 + 2 bytes), RMSNorm 1/std in fp32.
def options_of(shape: LayerShape) -> LayerOptions:
    return LayerOptions(flash_attention=False, norm_statistics_bytes=4)


@pytest.mark.parametrize(
    ("shape", "tp", "sp", "recompute"),
    CASES,
    ids=[f"{c[0].name}-tp{c[1]}-sp{int(c[2])}-{c[3]}" for c in CASES],
)
def test_saved_bytes(shape, tp, sp, recompute):
    found = measured(tp)[f"{shape.name}/{int(sp)}/{recompute}"]["saved_bytes"]
    if recompute == "full":
        expected = ACTIVATION
    else:
        model = model_of(shape)
        expected = saved_bytes(block(model, options_of(shape)), recompute=recompute)
        expected += sum(local_differences(model, recompute=recompute).values())
    assert found == int(value_of(expected, values(shape, tp, sp)))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("tp", [1, 2])
def test_flops_and_parameters(shape, tp):
    found = measured(tp)[f"{shape.name}/0/none"]
    operators = block(model_of(shape), options_of(shape))
    numbers = values(shape, tp, False)
    assert found["forward_flops"] == int(value_of(forward_flops(operators), numbers))
    assert found["backward_flops"] == int(value_of(backward_flops(operators), numbers))
    assert found["parameters"] == int(value_of(parameters(operators), numbers))


@pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES if shape.family == "gpt"], ids=lambda shape: shape.name
)
def test_gradients_that_are_added_up(shape):
    """RMSNorm of torch for the CPU adds some of its own, LayerNorm none."""
    found = measured(1)[f"{shape.name}/0/none"]
    assert found["summed"] == told(block(model_of(shape), options_of(shape))) == 2
