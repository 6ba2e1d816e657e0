"""Layers that megatron-core 0.19 builds one by one from a JSON of block configs (its heterogeneous models):
which models need that, and what cannot be had beside it.

Sources are file:line of 0.19.2: A = megatron/training/arguments.py, MG = megatron/training/models/gpt.py, HL
= core/models/gpt/heterogeneous/heterogeneous_layer_specs.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan


def by_block_configs(model: ModelSpec) -> bool:
    """Whether its layers are blocks of attention and one MLP, and differ in the MLP's width, in key-value
    heads or in having only one of both, which no other flag says."""
    kinds = model.kinds
    widths = {kind.ffn_hidden for kind in kinds if kind.has_mlp}
    groups = {kind.kv_heads for kind in kinds if kind.attends}
    differ = len(widths) > 1 or len(groups) > 1 or len({kind.half is None for kind in kinds}) > 1
    others = (kind.experts or kind.mamba or kind.delta_net or kind.latent_attention for kind in kinds)
    return differ and model.plain and not any(others)


def block_refusals(model: ModelSpec) -> Iterator[str]:
    """What its parser and its builder want of such a model."""
    if not by_block_configs(model):
        return
    broken = {
        f"its MLP computes {model.mlp_words}, wanted gated silu (A:202)": model.mlp_words != "gated silu",
        "its norm is layernorm, wanted rmsnorm (A:214)": model.norm != "rmsnorm",
        "it has no rotary positions, wanted rotary: true (A:216)": not model.rotary,
        f"{model.constants.rotary_share:.0%} of a head are rotated, wanted all (A:217)": (
            model.constants.rotary_share != 1.0
        ),
        "none of its layers attends, wanted one (A:226)": not any(kind.attends for kind in model.kinds),
        "norms of query and key heads have no weights, wanted qk_norm_weights: true (HL:117)": any(
            not kind.qk_norm_weights for kind in model.kinds
        ),
        "multi-token prediction takes layers that are all alike (MG:293)": model.mtp_layers > 0,
    }
    for why, applies in broken.items():
        if applies:
            yield f"model {model.name}, whose layers differ in width, heads or halves: {why}"


def chunks_refused(model: ModelSpec) -> Iterator[str]:
    """Why stages of such layers have no chunks."""
    if by_block_configs(model):
        yield (
            f"layers of {model.name} differ in width, heads or halves, and Megatron's builder of such knows "
            "no chunks of a stage (MG:90), wanted 1"
        )


def block_rules(plan: Plan) -> Iterator[str]:
    """What cannot be switched on beside such layers."""
    if not by_block_configs(plan.model):
        return
    execution = plan.execution
    if plan.vpp > 1:
        yield from (f"vpp {plan.vpp}: {why}" for why in chunks_refused(plan.model))
    broken = {
        "execution.cuda_graphs: graphs of them were not tried, wanted null": bool(execution.cuda_graphs),
        "execution.offload_modules: what leaves of them was not tried, wanted null": bool(
            execution.offload_modules
        ),
    }
    for why, applies in broken.items():
        if applies:
            yield f"{why}, where layers of {plan.model.name} differ in width, heads or halves"
