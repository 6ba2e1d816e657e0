"""Saved activations of parallel blocks (Falcon, GPT-NeoX) against a plain torch layer, to the byte.

Megatron-core has no such layer, so the reference is written here: fused attention, rotation that keeps
nothing (it is undone by rotating back), values copied out of the projection as fused kernels want them.
"""

from __future__ import annotations

import pytest
from plain_values import value_of

from mist_megatron.cost import symbols as s
from mist_megatron.cost.layers import LayerOptions, block, parameters, saved_bytes
from mist_megatron.formats.model_yaml import model_from_mapping

torch = pytest.importorskip("torch", reason="needs the test framework environment")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402


class Rotate(torch.autograd.Function):
    """Rotates pairs of channels by fixed angles."""

    @staticmethod
    def forward(ctx, x, cosine, sine):
        ctx.angles = (cosine, sine)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    @staticmethod
    def backward(ctx, grad):
        cosine, sine = ctx.angles
        first, second = grad.chunk(2, dim=-1)
        return torch.cat([first * cosine + second * sine, second * cosine - first * sine], dim=-1), None, None


class ParallelLayer(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int, norms: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(norms))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=bias), nn.Linear(hidden, hidden, bias=bias)
        self.up, self.down = nn.Linear(hidden, ffn, bias=bias), nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x, cosine, sine):
        batch, seq, hidden = x.shape
        read = [norm(x) for norm in self.norms]
        q, k, v = (part.view(batch, seq, self.heads, -1) for part in self.qkv(read[0]).split(hidden, dim=-1))
        inputs = (Rotate.apply(q, cosine, sine), Rotate.apply(k, cosine, sine), v.contiguous())
        core = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in inputs), is_causal=True)
        attention = self.out(core.transpose(1, 2).reshape(batch, seq, hidden))
        return x + attention + self.down(F.gelu(self.up(read[-1])))


@pytest.mark.parametrize(
    ("hidden", "ffn", "heads", "norms", "batch", "seq", "bias"),
    [
        (64, 256, 4, 1, 2, 32, False),
        (128, 512, 8, 1, 1, 64, False),
        (128, 512, 8, 2, 1, 64, False),
        (96, 320, 6, 2, 3, 16, True),
        (256, 1024, 4, 1, 2, 48, False),
    ],
)
def test_saved_bytes(hidden, ffn, heads, norms, batch, seq, bias):
    layer = ParallelLayer(hidden, ffn, heads, norms, bias).to(torch.bfloat16)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    angles = torch.rand(seq, 1, hidden // heads // 2, dtype=torch.bfloat16)
    x = torch.randn(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, angles.cos(), angles.sin()).sum().backward()
    # Scalars that the fused kernel keeps for its dropout are not activations.
    found = sum(t.untyped_storage().nbytes() for t in kept.values() if t.dim())
    model = model_from_mapping(
        {
            "family": "falcon", "layers": 1, "hidden": hidden, "ffn_hidden": ffn, "heads": heads,
            "vocab": 64, "parallel_norms": norms, "linear_bias": bias,
        },
        "model",
    )  # fmt: skip
    # LayerNorm on CPU keeps its statistics in the precision of its input.
    operators = block(model, LayerOptions(norm_statistics_bytes=4))
    numbers = {
        s.B: batch, s.S: seq, s.TP: 1, s.CP: 1, s.SP: 0, s.HIDDEN: hidden, s.FFN: ffn, s.HEADS: heads,
        s.KV_HEADS: heads, s.HEAD_DIM: hidden // heads,
    }  # fmt: skip
    assert found == int(value_of(saved_bytes(operators), numbers))
    assert sum(p.numel() for p in layer.parameters()) == int(value_of(parameters(operators), numbers))
