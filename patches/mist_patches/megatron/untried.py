"""Settings of Megatron-core under which a patch was not run, or is known to compute something else.

Each is refused when the model is built, before the first step, in one line that says what to switch off.
"""

from __future__ import annotations

from typing import Any

from mist_patches.core.hooking import PatchRefused

DISCARDING = ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out")
"""`--recompute-modules` whose output Megatron frees once it is used (tensor_parallel.random,
CheckpointWithoutOutput): the memory of a tensor that autograd has saved then belongs to another one."""


def refuse_graphs(patch: str, config: Any) -> None:
    """CUDA graphs replay kernels without the calls that a patch hooks."""
    graphs = getattr(config, "cuda_graph_impl", "none")
    older = getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False)
    if older or graphs not in (None, "none"):
        raise PatchRefused(
            f"{patch}: CUDA graphs replay without calling Python, where this patch does its work; "
            "wanted --cuda-graph-impl none"
        )


def refuse_experts(patch: str, config: Any) -> None:
    """Which experts run depends on the tokens; their parameters have buffers and optimizers of their own."""
    experts = getattr(config, "num_moe_experts", None)
    if experts:
        raise PatchRefused(
            f"{patch}: num_moe_experts={experts} was not tried; wanted a model without experts"
        )


def refuse_untried_activations(config: Any) -> None:
    """What offload by saved tensors was not tried with, or would copy while its memory is given to others."""
    patch = "activation offload"
    refuse_graphs(patch, config)
    refuse_experts(patch, config)
    for name in ("fp8", "fp4"):
        if getattr(config, name, None):
            raise PatchRefused(
                f"{patch}: {name}={getattr(config, name)} was not tried; wanted bf16, fp16 or fp32"
            )
    if getattr(config, "recompute_granularity", None) == "selective":
        for name in getattr(config, "recompute_modules", None) or ():
            if name in DISCARDING:
                raise PatchRefused(
                    f"{patch}: --recompute-modules {name} frees what this patch copies; "
                    "wanted core_attn or mlp, or layers recomputed in full"
                )
