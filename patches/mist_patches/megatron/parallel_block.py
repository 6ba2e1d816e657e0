"""Blocks whose attention and MLP stand side by side, for Megatron-core: Falcon, GPT-NeoX, GPT-J.

Why: TransformerLayer adds attention to its input before the MLP reads it. A parallel block computes
`x + attention(norm(x)) + mlp(norm'(x))`, with one norm for both (Falcon-7B, GPT-J) or two (Falcon-40B,
GPT-NeoX), and its two outputs are partial sums that tensor-parallel ranks need to reduce only once.

What: layers are built from Megatron's own modules and run by its own forward pass. What adds attention to
the residual keeps it aside and hands the input on, so that the MLP's norm reads the layer's input; what adds
the MLP adds both, behind one reduction. With one norm there is no second one: its output is handed on to the
MLP, and where it is whole on every rank (no sequence parallelism) gradients of both are summed before the one
reduction of the backward pass. Linear modules that would reduce by themselves are told that their caller
communicates, as those of experts are. Whether they do as told is looked at once: partial sums that are equal
on all ranks were reduced already, which would count them tensor-parallel times.

One dropout mask for the sum, as Falcon has it; GPT-NeoX and GPT-J draw one for each part.

Tested with megatron-core 0.19.2 and its local modules; those of Transformer Engine, which needs a GPU, by
stand-ins that keep its names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mist_patches.core.hooking import PatchRefused, all_or_nothing, log, replace
from mist_patches.megatron.untried import refuse_experts, refuse_graphs

PATCH = "parallel block"
_LAYER = (
    "self", "config", "submodules", "layer_number", "hidden_dropout", "pg_collection", "vp_stage",
    "is_mtp_layer", "add_layer_offset", "pp_layer_offset", "name",
)  # fmt: skip
"""Of TransformerLayer.__init__ in 0.19.2."""
_UNTRIED = (
    "multi_latent_attention",
    "fine_grained_activation_offloading",
    "fp32_residual_connection",
    "fused_residual_rmsnorm",
    "tp_comm_overlap",
    "mtp_num_layers",
    "inference_fuse_tp_communication",
    "use_te_op_fuser",
    "use_transformer_engine_op_fuser",
    "fp8",
    "fp4",
)
"""Settings under which TransformerLayer passes residuals or partial sums another way, or was not tried."""


@all_or_nothing
def parallel_block(norms: int) -> Callable[[], None]:
    """Build every transformer layer as a parallel block with one norm or two; returns what undoes it."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if norms not in (1, 2):
        raise PatchRefused(f"{PATCH}: got {norms!r} norms; wanted parallel_norms 1 or 2 in stages.json")

    def build(original: Callable[..., None]) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
            _refuse_untried(config, submodules)
            made = _with_one_norm(submodules) if norms == 1 else submodules
            original(self, config, made, *args, **kwargs)
            _SideBySide(self, shares_norm=norms == 1)

        return __init__

    log.info("transformer layers: attention and MLP side by side, %d norm%s", norms, "s" if norms > 1 else "")
    return replace(TransformerLayer, "__init__", _LAYER, build)


def _refuse_untried(config: Any, submodules: Any) -> None:
    from megatron.core.transformer.identity_op import IdentityOp

    refuse_graphs(PATCH, config)
    refuse_experts(PATCH, config)
    for name in _UNTRIED:
        value = getattr(config, name, None)
        if value:
            raise PatchRefused(f"{PATCH}: {name}={value} was not tried; switch it off")
    selective = getattr(config, "recompute_granularity", None) == "selective"
    if selective and "layernorm" in (getattr(config, "recompute_modules", None) or ()):
        raise PatchRefused(f"{PATCH}: --recompute-modules layernorm frees a norm's output that the MLP reads")
    if submodules.cross_attention is not IdentityOp:
        raise PatchRefused(f"{PATCH}: layers with cross attention have no such form")


def _with_one_norm(submodules: Any) -> Any:
    """Submodules of a layer whose MLP has no norm of its own, and whose first norm is a module of its own."""
    from megatron.core.extensions import transformer_engine as engine
    from megatron.core.transformer.identity_op import IdentityOp

    attention = submodules.self_attention
    fused = getattr(engine, "TELayerNormColumnParallelLinear", None)
    if fused is None or attention.submodules.linear_qkv is not fused:
        return dataclasses.replace(submodules, pre_mlp_layernorm=IdentityOp)
    column = engine.TEColumnParallelLinear
    qkv = dataclasses.replace(attention.submodules, linear_qkv=column)
    if not isinstance(submodules.mlp, functools.partial):
        raise PatchRefused(f"{PATCH}: an MLP that is not built by MLP.as_mlp_submodule was not tried")
    return dataclasses.replace(
        submodules,
        input_layernorm=engine.TENorm,
        self_attention=dataclasses.replace(attention, submodules=qkv),
        pre_mlp_layernorm=IdentityOp,
        mlp=_with_first_linear(submodules.mlp, column),
        # The name that the fused module gives its norm in checkpoints, as Megatron's local layers do.
        sharded_state_dict_keys_map={
            **submodules.sharded_state_dict_keys_map,
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        },
    )


def _with_first_linear(mlp: Any, linear: Any) -> Any:
    """The MLP's builder, with another first module."""
    parts = dataclasses.replace(mlp.keywords["submodules"], linear_fc1=linear)
    return functools.partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": parts})


class _SideBySide:
    """What one layer's parts hand to each other within a forward pass."""

    def __init__(self, layer: Any, *, shares_norm: bool) -> None:
        self.group = layer.tp_group
        self.reduces = self.group.size() > 1
        self.splits_sequence = bool(layer.config.sequence_parallel) and self.reduces
        self.attention: Any = None
        self.normed: Any = None
        self.looked_at: set[str] = set()
        linears = [layer.self_attention.linear_proj, layer.mlp.linear_fc2]
        self.one_gradient = shares_norm and self.reduces and not self.splits_sequence
        if self.one_gradient:
            linears += [layer.self_attention.linear_qkv, layer.mlp.linear_fc1]
        for linear in linears if self.reduces else ():
            _leave_reducing(linear)
        add = layer.mlp_bda
        layer.self_attn_bda = lambda training, fused: self.keep
        layer.mlp_bda = lambda training, fused: functools.partial(self.add_both, add(training, fused))
        if shares_norm:
            layer.input_layernorm.register_forward_hook(self.share)
            layer.pre_mlp_layernorm = _Shared(self)

    def share(self, module: Any, inputs: Any, normed: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

        if self.one_gradient:
            normed = copy_to_tensor_model_parallel_region(normed, group=self.group)
            if normed.requires_grad:
                normed.register_hook(lambda gradient: self.look_at(gradient, "gradients"))
        self.normed = normed
        return normed

    def keep(self, attention: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
        """In the place of adding attention to the residual."""
        self.attention = attention
        return residual

    def add_both(self, add: Any, mlp: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
        (left, left_bias), self.attention = self.attention, None
        right, right_bias = mlp
        if self.reduces:
            self.look_at(left.detach(), "outputs")
        biases = [bias for bias in (left_bias, right_bias) if bias is not None]
        bias = sum(biases[1:], biases[0]) if biases else None
        whole: torch.Tensor = add((self.reduced(left + right), bias), residual, dropout)
        return whole

    def reduced(self, partial: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        if not self.reduces:
            return partial
        reduce = mappings.reduce_from_tensor_model_parallel_region
        if self.splits_sequence:
            reduce = mappings.reduce_scatter_to_sequence_parallel_region
        total: torch.Tensor = reduce(partial, group=self.group)
        return total

    def look_at(self, partial: torch.Tensor, what: str) -> None:
        """Refuse, the first time, what is the same on all ranks and not zero: it is no partial sum."""
        if what in self.looked_at:
            return
        self.looked_at.add(what)
        mine = partial.float().abs().sum().reshape(1)
        others = [torch.empty_like(mine) for _ in range(self.group.size())]
        torch.distributed.all_gather(others, mine, group=self.group)
        if float(mine) and all(float(one) == float(mine) for one in others):
            raise PatchRefused(
                f"{PATCH}: {what} of attention are reduced over tensor-parallel ranks by its modules, and "
                "would be once more; this patch does not know these modules"
            )


class _Shared(nn.Module):
    """In the place of the MLP's norm: what the layer's one norm made."""

    def __init__(self, parts: _SideBySide) -> None:
        super().__init__()
        self._parts = parts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        parts = self._parts
        normed: torch.Tensor = parts.normed
        parts.normed = None
        return normed


def _leave_reducing(linear: Any) -> None:
    """Megatron's word for it, or Transformer Engine's, which its modules of experts are built with."""
    if hasattr(linear, "explicit_expert_comm"):
        linear.explicit_expert_comm = True
    elif hasattr(linear, "parallel_mode"):
        linear.parallel_mode, linear.sequence_parallel = None, False
    else:
        raise PatchRefused(f"{PATCH}: {type(linear).__name__} cannot be told to leave reducing to its layer")
