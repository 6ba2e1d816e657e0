"""Megatron's fine-grained offload of activations (`--offload-modules`): what of a plan rules it out, and the
least size of the tensors that it has to take along.

Sources are file:line of megatron-core 0.19.2: TC = core/transformer/transformer_config.py, TL =
core/transformer/transformer_layer.py, AT = core/transformer/attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.offloaded import OffloadModule
from mist_megatron.spec.plan import Plan

USUAL_LEAST_ELEMENTS = 1 << 20
"""Of --min-offloaded-tensor-size: smaller tensors stay."""
OF_EXPERTS: frozenset[OffloadModule] = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
NEEDS: Mapping[OffloadModule, str] = MappingProxyType(
    {
        "attn_norm": "latent attention, before which the norm stands alone: others are fused (TL:1442)",
        "qkv_linear": "attention",
        "core_attn": "attention",
        "attn_proj": "attention",
        "mlp_norm": "experts, before which the norm stands alone: others are fused (TL:1448)",
        "expert_fc1": "experts",
        "moe_act": "experts",
    }
)
"""What a model must have for a module to send anything: elsewhere nothing happens, without a word."""


def offload_rules(plan: Plan) -> Iterator[str]:
    """What --offload-modules would be rejected for, do nothing at, or break on."""
    said = set(plan.execution.offload_modules or ())
    if not said:
        return
    key = "execution.offload_modules"
    for module in sorted(said - _there(plan) - {"fused_group_mlp"}):
        yield f"{key}: {module} needs {NEEDS[module]}, which {plan.model.name} has not"
    again = set(plan.execution.modules) if any(s.recompute == "selective" for s in plan.stages) else set()
    graphs = set(plan.execution.cuda_graphs or ())
    in_graph = ", ".join(sorted(said & {"attn_norm", "qkv_linear", "core_attn", "attn_proj"}))
    delayed = plan.training.precision == "fp8" and plan.execution.quantization in (None, "delayed")
    broken = {
        "attn_proj needs core_attn, which keeps its input for its own backward pass (TC:1868)": (
            "attn_proj" in said and "core_attn" not in said
        ),
        f"{', '.join(sorted(said & OF_EXPERTS))} with moe among recompute_modules, which makes them again "
        "(TC:1874)": "moe" in again and bool(said & OF_EXPERTS),
        "fused_group_mlp needs --use-transformer-engine-op-fuser (TC:1898), which no plan says; wanted "
        "expert_fc1 and moe_act": "fused_group_mlp" in said,
        "excludes recomputation of whole layers, whose second forward pass would count as another one "
        "(fine_grained_activation_offload.py)": any(stage.ckpt for stage in plan.stages),
        "core_attn with core_attn among recompute_modules sends nothing (AT:1544)": (
            "core_attn" in said and "core_attn" in again
        ),
        "core_attn with mla_up_proj among recompute_modules is not modelled: its queries and keys would be "
        "sent and made again": "core_attn" in said and "mla_up_proj" in again,
        "core_attn needs fused attention, wanted flash_attention: true": (
            "core_attn" in said and not plan.training.flash_attention
        ),
        f"{in_graph} with a graph of attn: attn_norm stays there (TL:1461), copies inside a graph are not "
        "priced": bool(in_graph) and "attn" in graphs,
        "mlp_norm with a graph of attn or moe_router stays on the GPU (TL:1473)": (
            "mlp_norm" in said and bool({"attn", "moe_router"} & graphs)
        ),
        "beside expert_overlap copies are 4 % off the events, wanted none": bool(
            plan.execution.expert_overlap
        ),
        "copies inside graphs of layer and full_iteration are not priced": (
            bool({"layer", "full_iteration"} & graphs)
        ),
        "expert_fc1 with delayed scaling: the product cannot keep its input in 16 bits (experts.py:280)": (
            "expert_fc1" in said and delayed
        ),
    }
    for why, applies in broken.items():
        if applies:
            yield f"{key}: {why}"


def _there(plan: Plan) -> set[OffloadModule]:
    """Modules that layers of the model have, as Transformer Engine builds them."""
    kinds = plan.model.kinds
    there: set[OffloadModule] = set()
    if any(kind.attends for kind in kinds):
        there |= {"qkv_linear", "core_attn", "attn_proj"}
    if any(kind.attends and kind.latent_attention is not None for kind in kinds):
        there.add("attn_norm")
    if any(kind.experts is not None for kind in kinds):
        there |= {"mlp_norm", "expert_fc1", "moe_act"}
    return there


def least_elements(plan: Plan) -> int:
    """For --min-offloaded-tensor-size: the usual, or half of the smallest tensor that the plan counts on, for
    tokens that experts get vary."""
    return min(USUAL_LEAST_ELEMENTS, smallest_elements(plan) // 2)


def smallest_elements(plan: Plan) -> int:
    """Of the tensors that modules send; enough where they send none."""
    stage, execution = plan.stages[0], plan.execution
    rows = stage.micro_batch * plan.training.seq_len // execution.context_parallel
    own = rows // stage.tp if plan.sequence_parallel else rows
    sizes = [
        size
        for kind in plan.model.kinds
        for module in execution.offload_modules or ()
        for size in _elements(kind, module, rows // stage.tp, own, plan)
    ]
    return min(sizes, default=2 * USUAL_LEAST_ELEMENTS)


def _elements(kind: LayerSpec, module: OffloadModule, shared: int, own: int, plan: Plan) -> Iterator[int]:
    """Of tensors of a module; `shared` is rows by the tensor-parallel ranks that split columns of one, `own`
    the rows of a rank where none are split."""
    latent, experts, tp = kind.latent_attention, kind.experts, plan.stages[0].tp
    if kind.attends:
        if module in ("attn_norm", "qkv_linear"):
            yield own * kind.hidden
        if module == "qkv_linear" and latent is not None:
            yield own * min(width for width in (latent.q_lora, latent.kv_lora) if width)
        if module in ("core_attn", "attn_proj") and latent is not None:
            yield shared * kind.heads * latent.v_head_dim
        elif module == "attn_proj":
            yield shared * kind.query_width
        elif module == "core_attn":
            yield shared * max(kind.kv_heads, tp) * kind.head_dim
    if experts is not None:
        routed = own * experts.top_k
        if module == "mlp_norm":
            yield own * kind.hidden
        if module == "expert_fc1":
            yield routed * plan.execution.etp * (experts.latent or kind.hidden)
        if module == "moe_act":
            yield routed * (2 if kind.gated_mlp else 1) * experts.ffn_hidden
