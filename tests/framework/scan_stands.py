"""Stand-ins for the Triton kernels of mamba_ssm and flash-linear-attention, on a CPU.

They have these packages' names and arguments, give tensors of the right shapes, and keep for backward passes
what mamba_ssm 2.2.4 (ops/triton/ssd_combined.py, MambaSplitConv1dScanCombinedFn; layernorm_gated.py,
LayerNormFn) and flash-linear-attention 0.6.0 (modules/causal_conv1d/ops.py, modules/norm/l2norm.py,
ops/gated_delta_rule/chunk.py) keep. What they compute is nothing of use.
"""

from __future__ import annotations

import sys
import types

import torch
from torch import nn


class _Keeping(torch.autograd.Function):
    """Gives `made` and keeps `kept`; every input gets a gradient of zeros."""

    @staticmethod
    def forward(ctx, made, count, *tensors):
        ctx.save_for_backward(*(t for t in tensors[:count] if t is not None))
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in tensors]
        return made.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, None, *(None if k is None else torch.zeros(k[0], dtype=k[1]) for k in ctx.like)


def keeping(made, kept, read=()):
    return _Keeping.apply(made, len(kept), *kept, *read)


def mamba_split_conv1d_scan_combined(zxbcdt, weight, bias, dt_bias, A, *, D, headdim, ngroups, **_):
    heads, (batch, seq, _) = len(D), zxbcdt.shape
    out = zxbcdt.new_zeros(batch, seq, heads * headdim)
    before_gate = zxbcdt.new_zeros(batch, seq, heads, headdim)
    return keeping(out, (zxbcdt, weight, bias, before_gate, A, D, dt_bias))


class RMSNorm(nn.Module):
    def __init__(self, width, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self._groups = width // group_size

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        return keeping(x, (rows, self.weight, rows.new_zeros(self._groups * len(rows), dtype=torch.float32)))


def causal_conv1d(x, weight, bias=None, **_):
    return keeping(x.contiguous(), (x, weight)), None


def l2norm(x):
    y = x.detach().clone()
    statistics = x.new_zeros(x.shape[:-1], dtype=torch.float32)

    class Normed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(y, statistics)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Normed.apply(x)


def chunk_gated_delta_rule(q, k, v, g, beta, **_):
    inverse = q.new_zeros(*q.shape[:3], 64)
    return keeping(v, (q, k, v, torch.zeros_like(g), beta, inverse), (g,)), None


def install() -> None:
    """Before Megatron's mixers are imported."""
    found = {
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": lambda state_dtype=None: None,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
        "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    }
    for name, members in found.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        for member, value in members.items():
            setattr(sys.modules[name], member, value)
