"""What Megatron's fine-grained offload (`--offload-modules`) sends to host memory of a layer.

Every tensor that autograd saves inside a chosen module is copied, once for each product that saves it
(`tensor_push` of fine_grained_activation_offload.py), and comes back so. It leaves the GPU where nothing else
holds it. Statistics and weights of tokens are smaller than the least size of what is copied, and stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mist_megatron.cost.algebra import Expr
from mist_megatron.cost.layers import LayerOptions, block
from mist_megatron.cost.operators import ZERO, Operator, SavedTensor
from mist_megatron.cost.symbols import RECOMPUTE
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.offloaded import OffloadModule
from mist_megatron.spec.recompute import PARTIAL, RECOMPUTES, Recompute

_OPERATORS: Mapping[OffloadModule, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("attention", "context_heads"),
        "attn_proj": ("attention_out",),
        "expert_fc1": ("expert_in",),
        "moe_act": ("expert_activation", "expert_activation_clamp"),
        "fused_group_mlp": ("expert_in", "expert_activation", "expert_activation_clamp", "expert_out"),
        "attn_norm": (),
        "mlp_norm": (),
        "qkv_linear": ("qkv", "head_norms", "q_down", "q_norm", "q_up", "kv_down", "kv_norm", "kv_up"),
    }
)
"""Operators that run inside each module, whatever the layer."""
_SMALL = ("_statistics", "core_log_sum", "expert_weights")
"""Ends of names of what is smaller than what is copied."""


@dataclass(frozen=True)
class Moved:
    """Bytes of one layer."""

    freed: Expr
    """That are no longer on the GPU when its forward pass has ended and its copies are made ..."""
    copied: Expr
    """... and that travel, out in the forward pass and back in the backward pass."""


NOT_MOVED = Moved(ZERO, ZERO)


def moved_bytes(model: LayerSpec, options: LayerOptions) -> Moved:
    """Of a layer that is not run again in whole."""
    if not options.offloaded or model.entry is not None:
        return NOT_MOVED
    operators = block(model, options)
    inside = _inside(operators, options.offloaded)
    whole = _moved(operators, inside, "full")
    freed, copied = whole.freed, whole.copied
    for kind in PARTIAL:
        part = _moved(operators, inside, kind)
        freed = freed + RECOMPUTE[kind] * (part.freed - whole.freed)
        copied = copied + RECOMPUTE[kind] * (part.copied - whole.copied)
    return Moved(freed, copied)


def _inside(operators: Sequence[Operator], modules: Sequence[OffloadModule]) -> set[str]:
    """Names of operators that run inside these modules. As layers of Transformer Engine are built, the norm
    before QKV is part of that product, and stands alone before latents; the norm before an MLP stands alone
    before a mixture only."""
    names = {operator.name for operator in operators}
    inside = {name for module in modules for name in _OPERATORS[module]}
    latent = "kv_down" in names
    if ("attn_norm" in modules and latent) or ("qkv_linear" in modules and "qkv" in names):
        inside.add("norm1")
    if "mlp_norm" in modules and "router" in names:
        inside.add("norm2")
    return inside & names


def _kept(operators: Sequence[Operator], recompute: Recompute) -> Iterator[tuple[Operator, SavedTensor]]:
    """What is saved, by whom, without what this kind of recomputation drops."""
    drops = RECOMPUTES[recompute].drops
    for operator in operators:
        for tensor in operator.saved:
            if not (operator.part in drops and tensor.inner) and not (tensor.chosen and drops):
                yield operator, tensor


def _moved(operators: Sequence[Operator], inside: set[str], recompute: Recompute) -> Moved:
    kept = list(_kept(operators, recompute))
    held = {tensor.key for operator, tensor in kept if operator.name not in inside}
    going = [
        tensor for operator, tensor in kept if operator.name in inside and not tensor.key.endswith(_SMALL)
    ]
    freed = {tensor.key: tensor.size_bytes for tensor in going if tensor.key not in held}
    copied = sum((tensor.size_bytes for tensor in going), start=ZERO)
    return Moved(sum(freed.values(), start=ZERO), copied)
