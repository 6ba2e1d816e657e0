"""Flags of megatron-core 0.19 for mixtures of experts, latent attention and multi-token prediction.

What of a model that is: its shape, its router, and what evens loads. What of a plan: over which ranks experts
are spread, and how tokens reach them. Everything is said, since several defaults are another run: the
expert-tensor size is tp unless said, the dispatcher allgather, the inner size that of dense layers, the
latent of keys and values 32 columns, and experts one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.frameworks.megatron.hybrids import is_hybrid
from mist_megatron.spec.experts import LatentAttention
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan

MTP_LOSS = 0.1
"""Share of each depth's loss, Megatron's own default and DeepSeek-V3's for most of its training."""


def latent_attention_of(model: ModelSpec) -> LatentAttention | None:
    """Of all its layers."""
    return model.kinds[0].latent_attention


def expert_flags(model: ModelSpec) -> Flags:
    """Shape, router and balance of a mixture."""
    experts = model.routed
    if experts is None:
        return ()
    grouped = experts.groups > 1
    listed = not is_hybrid(model) and not all(has_experts(model))
    shared = experts.shared_ffn_hidden > 0
    return (
        flag("--num-experts", experts.count),
        *when(listed, flag("--moe-layer-freq", pattern(has_experts(model)))),
        flag("--moe-ffn-hidden-size", experts.ffn_hidden),
        flag("--moe-router-topk", experts.top_k),
        flag("--moe-router-score-function", "sigmoid" if experts.router == "sigmoid" else "softmax"),
        *when(experts.router == "softmax_before_top_k", flag("--moe-router-pre-softmax")),
        *when(grouped, flag("--moe-router-num-groups", experts.groups)),
        *when(grouped, flag("--moe-router-group-topk", experts.group_top_k)),
        *when(experts.scaling != 1.0, flag("--moe-router-topk-scaling-factor", experts.scaling)),
        # Scores in 32 bits, as they are priced; the flex dispatchers take no others.
        flag("--moe-router-dtype", "fp32"),
        flag("--moe-router-load-balancing-type", experts.balance),
        *when(experts.balance != "none", flag("--moe-aux-loss-coeff", experts.balance_loss)),
        *when(experts.balance_bias, flag("--moe-router-enable-expert-bias")),
        *when(shared, flag("--moe-shared-expert-intermediate-size", experts.shared_ffn_hidden)),
        *when(experts.shared_gate, flag("--moe-shared-expert-gate")),
        *when(experts.latent > 0, flag("--moe-latent-size", experts.latent)),
        *when(experts.weighs_input, flag("--moe-apply-probs-on-input")),
    )


def has_experts(model: ModelSpec) -> list[int]:
    """By layer. Megatron's whole number n for it means the first layer and each n-th after it."""
    return [int(model.kinds[place].experts is not None) for place in model.kind_of_layer]


def pattern(layers: Sequence[int]) -> str:
    """`([0]*3+[1]*58)`: a list with an entry for each layer, as Megatron reads it."""
    for period in range(2, min(len(layers), 12) // 2 + 1):
        turn = list(layers[:period])
        if len(layers) % period == 0 and list(layers) == turn * (len(layers) // period):
            return f"({pattern(turn)}*{len(layers) // period})"
    runs = [(kind, len(list(run))) for kind, run in groupby(layers)]
    return f"({'+'.join(f'[{kind}]' if count == 1 else f'[{kind}]*{count}' for kind, count in runs)})"


def latent_flags(model: ModelSpec) -> Flags:
    """Widths of latent attention, whose norms there are with --qk-layernorm alone, and its rotary positions:
    yarn by a factor of 1 is none, and the one kind that has a fused kernel."""
    latent = latent_attention_of(model)
    if latent is None:
        return ()
    constants = model.constants
    return (
        flag("--multi-latent-attention"),
        *when(latent.q_lora > 0, flag("--q-lora-rank", latent.q_lora)),
        flag("--kv-lora-rank", latent.kv_lora),
        flag("--qk-head-dim", latent.nope_head_dim),
        flag("--qk-pos-emb-head-dim", latent.rope_head_dim),
        flag("--v-head-dim", latent.v_head_dim),
        flag("--rope-type", "yarn"),
        flag("--rotary-scaling-factor", constants.rotary_factor),
        flag("--mscale", constants.rotary_mscale),
        flag("--mscale-all-dim", constants.rotary_mscale),
    )


def prediction_flags(model: ModelSpec) -> Flags:
    """Depths of multi-token prediction, which lie with the loss."""
    return when(
        model.mtp_layers > 0,
        flag("--mtp-num-layers", model.mtp_layers),
        flag("--mtp-loss-scaling-factor", MTP_LOSS),
        *when(model.mtp_repeated, flag("--mtp-use-repeated-layer")),
    )


def spread_flags(plan: Plan) -> Flags:
    """Over which ranks experts are spread, and how tokens reach them."""
    if plan.model.routed is None:
        return ()
    execution = plan.execution
    dispatcher = execution.dispatcher
    return (
        flag("--expert-model-parallel-size", execution.ep),
        flag("--expert-tensor-parallel-size", execution.etp),
        flag("--moe-token-dispatcher-type", dispatcher),
        *when(dispatcher == "flex", flag("--moe-flex-dispatcher-backend", flex_backend(plan))),
        flag("--moe-grouped-gemm"),
        flag("--moe-permute-fusion"),
    )


def flex_backend(plan: Plan) -> str:
    """HybridEP where NVLink joins several nodes, for which it was made; DeepEP elsewhere."""
    return "hybridep" if plan.cluster.linked_gpus > plan.cluster.gpus_per_node else "deepep"


def expert_environment(plan: Plan) -> dict[str, str]:
    """What HybridEP must know of NVLink: GPUs of a domain, that it joins nodes, and how many ranks of an
    expert group lie in one."""
    if plan.execution.expert_dispatcher != "flex" or flex_backend(plan) != "hybridep":
        return {}
    return {
        "NVLINK_DOMAIN_SIZE": str(plan.cluster.gpu.linked_gpus),
        "USE_MNNVL": "1",
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": str(min(plan.execution.ep, plan.cluster.linked_gpus)),
    }
