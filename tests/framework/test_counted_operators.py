"""What a layer's graph says of operators that nothing fuses, against those that megatron-core runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")

from mist_megatron.cost.blocks import blocks
from mist_megatron.cost.latent import QUERY_WIDTH
from mist_megatron.cost.layers import LayerOptions, block, saved_bytes
from mist_megatron.cost.mtp import _joined, depths_kept
from mist_megatron.cost.recurrent import COMPILED
from mist_megatron.cost.shapes import ACTIVATION, EXPERT_INNER, EXPERT_ROWS, HALF, TOKENS, VOCAB_SHARE
from mist_megatron.spec.presets import PRESETS

SMALL_PER_KERNEL = 3
"""Operators of a few bytes that count as one kernel of the graph (`cost/latent.py`)."""


@pytest.fixture(scope="module")
def counted():
    program = Path(__file__).with_name("counted_operators.py")
    made = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr[-2000:]
    return json.loads(made.stdout.splitlines()[-1])


def passes(model, name, **options):
    graph = block(model.kinds[-1], LayerOptions(**options))
    found = next(operator for operator in graph if operator.name == name)
    return found.forward[0], found.backward[0]


def test_a_clamped_activation_runs_the_operators_that_the_graph_has(counted):
    inner = HALF * EXPERT_ROWS * EXPERT_INNER
    for work, (kernels, halves) in zip(
        passes(PRESETS["gpt-oss-20b"], "expert_activation_clamp"), counted["clamp"], strict=True
    ):
        assert work.kernels == kernels
        assert float((work.moved_bytes / inner).value) == pytest.approx(halves, rel=0.01)


def test_the_fuser_of_experts_clamps_inside_its_kernel():
    graph = block(PRESETS["gpt-oss-20b"].kinds[-1], LayerOptions(eight_bit=True, fused_experts=True))
    assert "expert_activation_clamp" not in {operator.name for operator in graph}


def test_positions_of_latent_attention_without_yarn_are_operators_of_their_own(counted):
    query = HALF * TOKENS * QUERY_WIDTH
    apart = passes(PRESETS["moonlight-16b-a3b"], "latent_rotary", fused_rotary=False)
    for work, (kernels, queries) in zip(apart, counted["rotary"], strict=True):
        assert work.kernels == pytest.approx(kernels / SMALL_PER_KERNEL, abs=0.5)
        assert float((work.moved_bytes / query).value) == pytest.approx(queries, rel=0.05)


def test_what_a_compiler_made_takes_twice_as_long_and_does_no_more():
    model = PRESETS["nemotron-3-nano-30b-a3b"]
    kind = next(kind for kind in model.kinds if kind.mamba is not None)
    usual, slow = (block(kind, LayerOptions(compiled_slowdown=times)) for times in (1, 2))
    for one, other in zip(usual, slow, strict=True):
        for work, longer in zip(
            (*one.forward, *one.backward), (*other.forward, *other.backward), strict=True
        ):
            times = 2 if work.name.startswith(COMPILED) else 1
            assert longer.flops == work.flops
            if work.gemm is None:
                assert longer.moved_bytes == times * work.moved_bytes
            else:
                assert longer.gemm == (*work.gemm[:3], times * work.gemm[3])


def test_each_depth_of_multi_token_prediction_keeps_what_its_loss_does(counted):
    model, options = replace(PRESETS["deepseek-v3"], mtp_layers=1), LayerOptions()
    logits = TOKENS * VOCAB_SHARE
    # The layer, what was projected and its norms are all that is kept besides.
    by_name = {block.kind.name: block.operators for block in blocks(model, options)}
    others = saved_bytes(by_name[model.mtp_kinds[0].name]) + saved_bytes(_joined(model, options))
    kept = (depths_kept(model, options) - others - 2 * ACTIVATION) / logits
    for told in counted["logits"]:
        assert float(kept.value) == pytest.approx(told, rel=0.01)
