"""Mamba-2 mixers and gated delta nets: the graphs against real Megatron-core modules, around stand-ins for
kernels that need a GPU (scan_stands); and the shapes of hybrid models against FLOPs that their runs print."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")
pytest.importorskip("einops", reason="Megatron's mixers need it")
from measure_scans import SHAPES, ScanShape
from plain_values import value_of
from ranks import run_ranks

from mist_megatron.cost import symbols as s
from mist_megatron.cost.algebra import maximum, number
from mist_megatron.cost.layers import LayerOptions, block, forward_flops, parameters, saved_bytes
from mist_megatron.cost.operators import ZERO
from mist_megatron.cost.shapes import HALF, TOKENS
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.recurrent import CONV_WIDTH, DeltaNet, Mamba

GRIDS = ((1, 1), (2, 1), (1, 2))
"""Tensor parallel, with sequence parallelism, and context parallel."""


@cache
def measured(tp: int, cp: int) -> dict[str, dict[str, int]]:
    """All shapes at once: one start of Megatron per grid."""
    return run_ranks("measure_scans.py", str(tp), str(cp), ranks=tp * cp)[0][0]


def model_of(shape: ScanShape) -> ModelSpec:
    mixer: dict = {
        "mamba": Mamba(heads=shape.heads, head_dim=shape.head_dim, state=shape.state, groups=shape.groups)
    }
    if shape.key_heads:
        mixer = {
            "delta_net": DeltaNet(
                key_heads=shape.key_heads, value_heads=shape.heads, key_dim=shape.state,
                value_dim=shape.head_dim,
            )
        }  # fmt: skip
    return ModelSpec(
        name="model", family="llama", layers=1, hidden=shape.hidden, ffn_hidden=64, heads=4, kv_heads=4,
        head_dim=16, vocab=128, norm="rmsnorm", **mixer,
    )  # fmt: skip


def differences(model: ModelSpec, cp: int) -> object:
    """Beyond our graph: with context parallelism a rank's part of the convolution's weights, and delta nets'
    order of columns; and of a delta net, whose small operators are compiled into one kernel on a GPU, the
    norm's input, what it gives, the gate and its SiLU in 32 bits in place of 16, and two numbers of decay in
    32 bits in place of one in 16."""
    net = model.delta_net
    if net is None:
        mamba = model.mamba
        assert mamba is not None
        groups = maximum(mamba.groups / s.TP, cp)
        columns = mamba.inner / s.TP + 2 * groups * mamba.state
        return HALF * (CONV_WIDTH + 1) * columns / cp if cp > 1 else ZERO
    eager = (6 * net.value_heads + 12 * net.values) * TOKENS / s.TP
    convolved, projected = number(net.convolved) / s.TP, number(net.projected) / s.TP
    return eager + (HALF * CONV_WIDTH * convolved / cp + 8 * projected if cp > 1 else ZERO)


@pytest.mark.parametrize(("tp", "cp"), GRIDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_mixer_is_what_megatron_builds(shape, tp, cp):
    """Parameters, FLOPs of the projections, and what is kept for the backward pass."""
    found = measured(tp, cp)[shape.name]
    model = model_of(shape)
    whole = block(model, LayerOptions(norm_statistics_bytes=4))
    operators = tuple(operator for operator in whole if operator.name.startswith("mixer"))
    numbers = {
        s.B: shape.batch,
        s.S: shape.seq,
        s.TP: tp,
        s.CP: cp,
        s.SP: int(tp > 1),
        s.HIDDEN: shape.hidden,
    }

    def number(expression) -> float:
        return float(value_of(expression, numbers))

    assert found["parameters"] == number(parameters(operators))
    projections = [one for one in operators if one.name in ("mixer_in", "mixer_out")]
    assert found["forward_flops"] == number(forward_flops(projections))
    assert found["saved_bytes"] == number(saved_bytes(operators) + differences(model, cp))
