"""Layers with experts, latent attention and norms of heads: the graphs against real Megatron-core layers."""

from __future__ import annotations

from functools import cache

import pytest
from short_form import one_of

pytest.importorskip("megatron", reason="needs the test framework environment")
from local_layers import local_differences
from measure_experts import SHAPES, MixtureShape
from plain_values import value_of
from ranks import run_ranks
from summed import told

from mist_megatron.cost import symbols as s
from mist_megatron.cost.layers import (
    LayerOptions,
    backward_flops,
    block,
    expert_parameters,
    forward_flops,
    parameters,
    saved_bytes,
)
from mist_megatron.cost.operators import ZERO
from mist_megatron.cost.shapes import (
    EXPERT_ROWS,
    FULL,
    HALF,
    INNER,
    KEY,
    QUERY,
    ROWS,
    SHARED_INNER,
    TOKENS,
)
from mist_megatron.spec.experts import ExpertSpec, LatentAttention
from mist_megatron.spec.model import ModelSpec

GRIDS = ((1, 1), (2, 1), (2, 2))
"""Tensor and expert parallel; the former with sequence parallelism, without which no experts are trained."""
CASES = [(shape, 1, 1) for shape in SHAPES]
CASES += one_of(
    2,
    # The local layers split matrices down to latents, which Transformer Engine's has whole on every rank.
    [(shape, tp, ep) for shape in SHAPES for tp, ep in GRIDS if tp > 1 and not shape.latent],
)


@cache
def measured(tp: int, ep: int) -> dict[str, dict[str, int]]:
    """All shapes at once: one start of Megatron per grid."""
    names = [shape.name for shape, *grid in CASES if grid == [tp, ep]]
    ranks = run_ranks("measure_experts.py", str(tp), str(ep), *names, ranks=max(tp, ep), ready="megatron")
    found = [one for (one,) in ranks]
    assert all(result == found[0] for result in found), "experts in turns: every rank keeps as much"
    return found[0]


def model_of(shape: MixtureShape) -> ModelSpec:
    latent, experts = None, None
    if shape.latent:
        q, kv, nope, rope, value = shape.latent
        latent = LatentAttention(
            q_lora=q, kv_lora=kv, nope_head_dim=nope, rope_head_dim=rope, v_head_dim=value
        )
    if not shape.dense:
        experts = ExpertSpec(
            count=shape.experts,
            top_k=shape.top_k,
            ffn_hidden=shape.ffn,
            shared_ffn_hidden=shape.shared,
            shared_gate=shape.gate,
            router="sigmoid" if shape.sigmoid else "softmax",
        )
    return ModelSpec(
        name="model",
        family="llama",
        layers=1,
        hidden=shape.hidden,
        ffn_hidden=shape.dense or 256,
        heads=shape.heads,
        kv_heads=shape.heads if latent else shape.kv_heads,
        head_dim=latent.qk_head_dim if latent else shape.hidden // shape.heads,
        vocab=128,
        gated_mlp=shape.gated,
        activation="silu" if shape.gated else "gelu",
        norm="rmsnorm",
        experts=experts,
        latent_attention=latent,
        qk_norm=shape.qk_norm,
    )


def values(shape: MixtureShape, tp: int, ep: int) -> dict:
    model = model_of(shape)
    latent = shape.latent or (0, 0, 0, 0, 0)
    return {
        s.B: shape.batch, s.S: shape.seq, s.TP: tp, s.CP: 1, s.SP: int(tp > 1), s.HIDDEN: shape.hidden,
        s.FFN: model.ffn_hidden, s.HEADS: model.heads, s.KV_HEADS: model.kv_heads,
        s.HEAD_DIM: model.head_dim, s.EXPERTS: shape.experts, s.TOP_K: shape.top_k, s.EXPERT_FFN: shape.ffn,
        s.EXPERT_WIDTH: shape.hidden, s.SHARED_FFN: shape.shared, s.EP: ep, s.ETP: 1, s.IMBALANCE: 1,
        s.Q_LATENT: latent[0], s.KV_LATENT: latent[1], s.NOPE_DIM: latent[2], s.ROPE_DIM: latent[3],
        s.VALUE_DIM: latent[4],
    }  # fmt: skip


def differences(shape: MixtureShape, model: ModelSpec) -> list:
    """What these layers keep beyond Transformer Engine's, by what keeps it."""
    core, moe = "core_attn" in shape.modules, "moe" in shape.modules
    plain = local_differences(model, recompute="selective" if core else "none")
    known = [plain["norms_in_fp32"], plain["mask_type"] if core else plain["softmax_in_fp32"]]
    if shape.latent:
        known += _latent_differences(shape)
    else:
        known += [plain["rotary_tables"], plain["qkv_copies"]]
        known += [3 * HALF * TOKENS * (QUERY + KEY)] if shape.qk_norm else []
    if "mlp" in shape.modules:
        # The norm is no part of the local layer's MLP, so that its output is what the checkpoint keeps.
        return [*known, HALF * ROWS * s.HIDDEN]
    if shape.dense:
        return [*known, 2 * HALF * TOKENS * INNER]
    if shape.shared and shape.gated and not moe and "shared_experts" not in shape.modules:
        known.append(2 * HALF * TOKENS * SHARED_INNER)
    return known if moe else known + _expert_differences(shape)


def _latent_differences(shape: MixtureShape) -> list:
    """Norms of the latents in fp32 in place of the half-precision latents, which the common key keeps alive
    where its rotation runs again; cosines and sines, of which the checkpoint keeps the angles only."""
    if "mla_up_proj" in shape.modules:
        return [(8 * s.Q_LATENT + 10 * s.KV_LATENT) * ROWS, FULL * s.S * s.ROPE_DIM]
    return [(6 * s.Q_LATENT + 6 * s.KV_LATENT - 2 * s.ROPE_DIM) * ROWS, 4 * HALF * s.S * s.ROPE_DIM]


def _expert_differences(shape: MixtureShape) -> list:
    """Parts of the activation and its product with probabilities, unfused; what the local router keeps, and
    its indices in 64 bits, for what the fused kernels do."""
    unfused = (3 if shape.gated else 1) * HALF * EXPERT_ROWS * s.EXPERT_FFN
    fused = (13 * s.EXPERTS + 8 * s.EXPERTS + 4) * ROWS + 8 * EXPERT_ROWS
    # Of each token: its experts, the order of all tokens of all experts, its rows, its probabilities.
    own = (8 * s.TOP_K + 8 * s.EXPERTS + 8 * s.TOP_K + 2 * s.TOP_K) * ROWS
    if shape.sigmoid:
        own += (4 * s.EXPERTS + (4 * s.TOP_K + 4 if shape.top_k > 1 else 0)) * ROWS
    else:
        own += 4 * s.TOP_K * ROWS
    return [unfused, own - fused]


@pytest.mark.parametrize(("shape", "tp", "ep"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_layer_is_what_megatron_builds(shape, tp, ep):
    """Parameters, FLOPs forward and backward, and what is kept between them."""
    found, model = measured(tp, ep)[shape.name], model_of(shape)
    options = LayerOptions(flash_attention=False, norm_statistics_bytes=4, modules=shape.modules)
    operators, numbers = block(model, options), values(shape, tp, ep)

    def number(expression) -> int:
        return int(value_of(expression, numbers))

    again = (work.flops for one in operators if one.part and shape.modules for work in one.forward)
    assert found["parameters"] == number(parameters(operators))
    assert found["expert_parameters"] == number(expert_parameters(operators))
    assert found["forward_flops"] == number(forward_flops(operators))
    assert found["backward_flops"] == number(backward_flops(operators) + sum(again, start=ZERO))
    kept = saved_bytes(operators, "selective" if shape.modules else "none")
    assert found["saved_bytes"] == number(kept + sum(differences(shape, model), start=ZERO))


def summed(name: str) -> tuple[int, int]:
    """As the graph has it, and as was counted."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    graph = block(model_of(shape).kinds[-1], LayerOptions(flash_attention=False))
    return told(graph), measured(1, 1)[name]["summed"]


@pytest.mark.parametrize("name", ["latent", "narrow", "dense"])
def test_gradients_that_are_added_up(name):
    """Of the residual stream, and of what several matrices read; two norms for the CPU add one each."""
    expected, found = summed(name)
    assert found == expected + 2


def test_a_gate_of_shared_experts_reads_the_input_too():
    gated, shared, plain = summed("gate"), summed("shared"), summed("mixtral")
    assert gated[0] - shared[0] == gated[1] - shared[1] == 1
    assert shared[0] - plain[0] == 1
