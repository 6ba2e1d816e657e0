"""Prints the tracked peak of one training step per shape hidden,ffn,heads,layers,vocab,batch,seq,gpt2.

The last is 1 for learned positions and GPT-2's own activation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers.activations import NewGELUActivation


class Layer(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int, activation: Callable) -> None:
        super().__init__()
        self.heads, self.activation = heads, activation
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        batch, seq, hidden = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(hidden, dim=-1)
        )
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(core.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, hidden: int, ffn: int, heads: int, layers: int, vocab: int, positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.positions = nn.Parameter(torch.zeros(positions, hidden)) if positions else None
        activation = NewGELUActivation() if positions else F.gelu
        self.layers = nn.ModuleList(Layer(hidden, ffn, heads, activation) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), tokens.view(-1))
        return loss, logits  # as Hugging Face models do: the logits live on in the output


def peak_bytes(hidden: int, ffn: int, heads: int, layers: int, vocab: int, *rest: int) -> int:
    batch, seq, gpt2 = rest
    with FakeTensorMode():
        model = Model(hidden, ffn, heads, layers, vocab, gpt2 * seq)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, tokens, *(p.grad for p in model.parameters()))
        with tracker:
            output = model(tokens)
            output[0].backward()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        return int(snapshot["Total"])


torch.set_default_dtype(torch.bfloat16)
for argument in sys.argv[1:]:
    print(peak_bytes(*map(int, argument.split(","))))
