"""Counts what real Megatron-core layers with experts or latent attention keep for backward, and their FLOPs.

`python measure_experts.py TP EP` in as many processes as the larger of both; prints one JSON line per rank.
Experts are chosen in turns, so that each has as many tokens as the others, which is what the graphs say.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MixtureShape:
    """One layer, its input, and what of it runs again."""

    name: str
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 4
    seq: int = 16
    batch: int = 2
    experts: int = 8
    top_k: int = 2
    ffn: int = 48
    shared: int = 0
    gate: bool = False
    gated: bool = True
    latent: tuple[int, int, int, int, int] | None = None
    """Latent of queries, latent of keys and values, columns without and with position, value columns."""
    qk_norm: bool = False
    sigmoid: bool = False
    dense: int = 0
    """Inner size of a plain MLP in place of experts."""
    modules: tuple[str, ...] = ()


_PLAIN = (
    MixtureShape("mixtral", kv_heads=2),
    MixtureShape("fine", experts=16, top_k=4, ffn=24, qk_norm=True, kv_heads=2),
    MixtureShape(
        "wide", hidden=96, heads=6, kv_heads=6, experts=4, top_k=1, ffn=160, sigmoid=True, shared=80
    ),
    MixtureShape("shared", shared=80, seq=24, batch=3),
    MixtureShape("gate", shared=64, gate=True),
    MixtureShape("plain", gated=False, shared=32),
    MixtureShape("latent", latent=(24, 16, 12, 4, 10), shared=48, sigmoid=True),
    MixtureShape("narrow", latent=(40, 20, 16, 8, 12), experts=4, seq=32),
    MixtureShape("dense", latent=(32, 16, 8, 8, 8), dense=192),
    MixtureShape("normed", qk_norm=True, kv_heads=2, dense=128),
)
SHAPES = (
    *_PLAIN,
    *(replace(shape, name=f"{shape.name}-core", modules=("core_attn",)) for shape in _PLAIN),
    *(replace(shape, name=f"{shape.name}-moe", modules=("moe",)) for shape in _PLAIN if not shape.dense),
    *(
        replace(shape, name=f"{shape.name}-again-shared", modules=("shared_experts",))
        for shape in _PLAIN
        if shape.shared
    ),
    *(replace(shape, name=f"{shape.name}-up", modules=("mla_up_proj",)) for shape in _PLAIN if shape.latent),
    *(replace(shape, name=f"{shape.name}-mlp", modules=("mlp",)) for shape in _PLAIN if shape.dense),
    MixtureShape("ungated-mlp", hidden=96, dense=256, gated=False, batch=3, modules=("mlp",)),
    MixtureShape("both", qk_norm=True, kv_heads=2, dense=128, modules=("core_attn", "mlp")),
)


def build_layer(shape: MixtureShape, tp: int, ep: int):
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    functional = torch.nn.functional
    more = {}
    kind = TransformerConfig
    if shape.latent:
        q_latent, kv_latent, nope, rope, value = shape.latent
        kind = MLATransformerConfig
        more = {
            "q_lora_rank": q_latent or None, "kv_lora_rank": kv_latent, "qk_head_dim": nope,
            "qk_pos_emb_head_dim": rope, "v_head_dim": value, "rope_type": "rope",
            "multi_latent_attention": True,
        }  # fmt: skip
    if not shape.dense:
        more |= {
            "num_moe_experts": shape.experts, "moe_router_topk": shape.top_k,
            "moe_ffn_hidden_size": shape.ffn,
            "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1,
            "moe_router_score_function": "sigmoid" if shape.sigmoid else "softmax",
            "moe_router_pre_softmax": shape.top_k == 1 and not shape.sigmoid,
            "moe_shared_expert_intermediate_size": shape.shared or None, "moe_shared_expert_gate": shape.gate,
        }  # fmt: skip
    config = kind(
        num_layers=1,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.dense or 256,
        num_attention_heads=shape.heads,
        num_query_groups=None if shape.latent else shape.kv_heads,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm or bool(shape.latent),
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        params_dtype=torch.bfloat16,
        bf16=True,
        transformer_impl="local",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=shape.gated,
        activation_func=functional.silu if shape.gated else functional.gelu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="selective" if shape.modules else None,
        recompute_modules=list(shape.modules) or None,
        **more,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=None if shape.dense else shape.experts,
        moe_grouped_gemm=False,
        qk_layernorm=shape.qk_norm or bool(shape.latent),
        multi_latent_attention=bool(shape.latent),
        normalization="RMSNorm",
    )
    return build_module(spec, config=config, layer_number=1).bfloat16()


def balance(layer, shape: MixtureShape) -> None:
    """Scores that choose experts in turns, whatever the weights say."""
    import torch

    def gating(tokens):
        logits = original(tokens)
        rows = logits.reshape(-1, shape.experts)
        turns = (torch.arange(len(rows))[:, None] * shape.top_k + torch.arange(shape.top_k)) % shape.experts
        return logits + torch.zeros_like(rows).scatter_(1, turns, 1000.0).view_as(logits)

    original = layer.mlp.router.gating
    layer.mlp.router.gating = gating


def measure(shape: MixtureShape, tp: int, ep: int) -> dict[str, int]:
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from summed import Adding
    from torch.utils.flop_counter import FlopCounterMode

    layer = build_layer(shape, tp, ep)
    if not shape.dense:
        balance(layer, shape)
    x = torch.randn(shape.seq // tp, shape.batch, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.triu(torch.ones(1, 1, shape.seq, shape.seq, dtype=torch.bool), 1)
    angles = None if shape.latent else RotaryEmbedding(shape.hidden // shape.heads, 1.0)(shape.seq)
    given = [t.untyped_storage()._cdata for t in (mask, angles) if t is not None]
    excluded = {p.untyped_storage()._cdata for p in layer.parameters()} | set(given)
    kept: dict[int, object] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            kept[storage._cdata] = tensor
        return tensor

    counter = FlopCounterMode(display=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
        out = layer(x, attention_mask=mask, rotary_pos_emb=angles)[0]
    forward = counter.get_total_flops()
    # Before the backward pass fills again what was thrown away.
    saved = sum(t.untyped_storage().nbytes() for t in kept.values())
    counter = FlopCounterMode(display=False)
    with counter, Adding(x.numel()) as adding:
        out.sum().backward()
    experts = sum(p.numel() for n, p in layer.named_parameters() if "local_experts" in n)
    return {
        "saved_bytes": saved,
        "forward_flops": forward,
        "backward_flops": counter.get_total_flops(),
        "summed": adding.times,
        "parameters": sum(p.numel() for p in layer.parameters()),
        "expert_parameters": experts,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import os

    import megatron_cpu

    megatron_cpu.install()
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    tp, ep = int(sys.argv[1]), int(sys.argv[2])
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tp, 1, expert_model_parallel_size=ep, expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(1)
    found = {}
    for shape in SHAPES:
        if shape.name in sys.argv[3:]:
            found[shape.name] = measure(shape, tp, ep)
    print("RESULT " + json.dumps(found), flush=True)
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
