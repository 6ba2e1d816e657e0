"""Stand-ins for Transformer Engine's modules in a layer of Megatron, on a CPU.

They keep what the patches know of the real ones: a norm fused with the linear module behind it
(`layer_norm_weight`), `parallel_mode` and `sequence_parallel`, by which a module decides in each pass whether
it gathers and reduces, and Megatron's names for its wrappers around them. The real ones need a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine as engine
from torch import nn
from torch.nn import functional


class _Linear(nn.Module):
    """te.pytorch.Linear as Megatron's TELinear returns from it: its output, and a bias left to add."""

    mode = ""
    obeys = True

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        config: Any,
        bias: bool,
        skip_bias_add: bool,
        tp_group: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self._group, self._leaves_bias, size = tp_group, skip_bias_add, tp_group.size()
        self.parallel_mode: str | None = self.mode
        self.sequence_parallel = config.sequence_parallel and size > 1
        rows = outputs // size if self.mode == "column" else outputs
        columns = inputs // size if self.mode == "row" else inputs
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        if self.bias is not None and self.mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> Any:
        mode = self.parallel_mode if self.obeys else self.mode
        x = self._entered(x) if mode == "column" else x
        y = functional.linear(x, self.weight, None if self._leaves_bias else self.bias)
        if mode == "row" and self.sequence_parallel:
            y = tensor_parallel.reduce_scatter_to_sequence_parallel_region(y, group=self._group)
        elif mode == "row":
            y = tensor_parallel.reduce_from_tensor_model_parallel_region(y, group=self._group)
        return y, self.bias if self._leaves_bias else None

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(x, group=self._group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(x, group=self._group)


class Column(_Linear):
    mode = "column"


class Row(_Linear):
    mode = "row"


class DeafRow(Row):
    """A release that fixes its mode when it is built."""

    obeys = False


class NormAndColumn(Column):
    def __init__(self, inputs: int, outputs: int, **settings: Any) -> None:
        super().__init__(inputs, outputs, **settings)
        self.layer_norm_weight = nn.Parameter(torch.empty(inputs))
        self.layer_norm_bias = nn.Parameter(torch.empty(inputs))
        for p in (self.layer_norm_weight, self.layer_norm_bias):
            p.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> Any:
        width, weight, bias = x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias
        return super().forward(functional.layer_norm(x, width, weight, bias))


def norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
    made = nn.LayerNorm(hidden_size, eps=eps)
    for p in made.parameters():
        p.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made


class DeafColumn(Column):
    obeys = False


def engine_spec(local: Any, *, deaf: str = "") -> Any:
    """Megatron's spec of a layer of Transformer Engine's modules, made from that of its own ones."""
    from megatron.core.transformer.identity_op import IdentityOp

    engine.TELayerNormColumnParallelLinear = NormAndColumn
    engine.TEColumnParallelLinear, engine.TENorm = DeafColumn if deaf == "column" else Column, norm
    row, parts = DeafRow if deaf == "row" else Row, local.submodules
    attention = dataclasses.replace(
        parts.self_attention.submodules, linear_qkv=NormAndColumn, linear_proj=row
    )
    mlp = parts.mlp
    inner = dataclasses.replace(mlp.keywords["submodules"], linear_fc1=NormAndColumn, linear_fc2=row)
    mlp = functools.partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": inner})
    made = dataclasses.replace(
        parts,
        input_layernorm=IdentityOp,
        self_attention=dataclasses.replace(parts.self_attention, submodules=attention),
        pre_mlp_layernorm=IdentityOp,
        mlp=mlp,
        sharded_state_dict_keys_map={},
    )
    return dataclasses.replace(local, submodules=made)
