"""For layerwise_case.py and layerwise_peak.py: a plan's model in plain PyTorch, built from its own numbers.

Windows are runs of neighbouring tokens, and merged tokens are neighbours: what they keep does not depend on
where in an image they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import gelu, relu, scaled_dot_product_attention

from mist_megatron.spec.layer import LayerKind
from mist_megatron.spec.model import ModelSpec


class T5Norm(nn.Module):
    """As transformers has it: RMSNorm in fp32 of an input that stays in its own precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)


def norm_of(kind: LayerKind, width: int) -> nn.Module:
    return T5Norm(width) if kind.norm == "rmsnorm" else nn.LayerNorm(width)


class Attention(nn.Module):
    """To its own tokens, through windows where it has them, or to others'."""

    def __init__(self, kind: LayerKind, width: int, window: int | None) -> None:
        super().__init__()
        self.width, self.window = kind.head_dim, window
        inner, bias = kind.heads * kind.head_dim, kind.linear_bias
        self.q = nn.Linear(kind.hidden, inner, bias=bias)
        self.k, self.v = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.o = nn.Linear(inner, kind.hidden, bias=bias)

    def forward(self, x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        parts = [self.q(x), self.k(others), self.v(others)]
        if self.window is not None:
            parts = [part.unflatten(1, (-1, self.window)).flatten(0, 1) for part in parts]
        heads = [part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts]
        core = scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
        return self.o(core.reshape(*x.shape[:2], -1))


class Layer(nn.Module):
    """A transformer layer of a kind."""

    def __init__(self, kind: LayerKind, tokens: int) -> None:
        super().__init__()
        self.activation = relu if kind.activation == "relu" else gelu
        crosses = kind.cross_attention is not None
        self.norms = nn.ModuleList(norm_of(kind, kind.hidden) for _ in range(3 if crosses else 2))
        window = None if kind.window is None or kind.window >= tokens else kind.window
        self.attention = Attention(kind, kind.hidden, window)
        self.cross = Attention(kind, kind.cross_attention.hidden, None) if kind.cross_attention else None
        self.up = nn.Linear(kind.hidden, kind.ffn_hidden, bias=kind.linear_bias)
        self.down = nn.Linear(kind.ffn_hidden, kind.hidden, bias=kind.linear_bias)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y)
        if self.cross is not None and encoded is not None:
            x = x + self.cross(self.norms[2](x), encoded)
        return x + self.down(self.activation(self.up(self.norms[1](x))))


class Entry(nn.Module):
    """A layer between groups."""

    def __init__(self, kind: LayerKind, vocab: int, table: nn.Embedding | None) -> None:
        super().__init__()
        entry = kind.entry
        assert entry is not None
        self.merged, self.late = entry.merged, entry.norm_merged
        self.norm = norm_of(kind, entry.norm_width) if entry.norm else nn.Identity()
        self.table, self.project = table, None
        if entry.table == "own":
            self.table = nn.Embedding(vocab, kind.hidden)
        if entry.projects and entry.inner:
            self.project = nn.Sequential()
            self.project.add_module("up", nn.Linear(entry.merged_width, entry.inner, bias=entry.bias))
            self.project.add_module("activation", nn.GELU())
            self.project.add_module("down", nn.Linear(entry.inner, kind.hidden, bias=entry.bias))
        elif entry.projects:
            self.project = nn.Linear(entry.merged_width, kind.hidden, bias=entry.bias)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor | None = None) -> object:
        x = x if self.late else self.norm(x)
        x = x.unflatten(1, (-1, self.merged)).flatten(-2) if self.merged > 1 else x
        x = self.norm(x) if self.late else x
        if self.project is None:
            return self.table(tokens), x  # type: ignore[misc]
        x = self.project(x)
        return x if self.table is None else torch.cat([x, self.table(tokens)[:, x.shape[1] :]], 1)


class Head(nn.Module):
    """Logits of all tokens, or of their mean."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.pools = model.head_tokens == 1
        self.out = nn.Linear(model.head_shape.hidden, model.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.mean(1, keepdim=True) if self.pools else x)


def modules_of(model: ModelSpec, seq_len: int) -> list[nn.Module]:
    """Embedding, layers, head; what they share is one parameter."""
    width = model.first_shape.hidden
    patches = nn.Linear(model.patch_elements, width, bias=model.patch_bias) if model.patch_elements else None
    embedding = patches or nn.Embedding(model.vocab, width)
    layers: list[nn.Module] = []
    for place in model.kind_of_layer:
        kind = model.kinds[place]
        if kind.entry is None:
            layers.append(Layer(kind, int(kind.sequence(seq_len))))
            continue
        shared = None
        if kind.entry.table == "shared":
            shared = nn.Embedding(model.vocab, kind.hidden)
            shared.weight = embedding.weight
        layers.append(Entry(kind, model.vocab, shared))
    for table in (one for module in (embedding, *layers) for one in module.modules()):
        if isinstance(table, nn.Embedding):
            # As wide as torch has them, logits of a tied one are so large that rounding grows with each step.
            nn.init.normal_(table.weight, std=0.1)
    head = Head(model)
    if model.tied_embeddings:
        head.out.weight = embedding.weight
    return [embedding, *layers, head]


def whole(modules: Sequence[nn.Module], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the model in one piece makes of them."""
    given, *more = inputs
    x, encoded = modules[0](given), None
    for layer in modules[1:-1]:
        if isinstance(layer, Entry):
            tokens = [more.pop(0)] if layer.table is not None else []
            out = layer(x, *tokens)
            x, encoded = out if layer.project is None else (out, None)
        else:
            x = layer(x) if encoded is None else layer(x, encoded)
    return modules[-1](x)


def samples_of(model: ModelSpec, samples: int, seq_len: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Inputs of the embedding and of each layer with a table, and targets."""
    first = int(model.first_shape.sequence(seq_len))
    patches = torch.randn(samples, first, model.patch_elements).to(torch.get_default_dtype())
    inputs = [patches if model.patch_elements else torch.randint(model.vocab, (samples, first))]
    kinds = [model.kinds[place] for place in model.kind_of_layer]
    inputs += [
        torch.randint(model.vocab, (samples, int(kind.sequence(seq_len))))
        for kind in kinds
        if kind.entry is not None and kind.entry.table != "none"
    ]
    return inputs, torch.randint(model.vocab, (samples, int(model.head_shape.sequence(seq_len))))


def tensor_plan(module: nn.Module, *, edges: bool = True) -> dict[str, object]:
    """Split as the model's prices have it; `edges` with token tables and output layer."""
    rows_of_table = RowwiseParallel(input_layouts=Replicate())
    if isinstance(module, nn.Embedding):
        return {"": rows_of_table} if edges else {}
    if isinstance(module, Head):
        return {"out": ColwiseParallel(output_layouts=Replicate())} if edges else {}
    # A single matrix between groups, or of patches, is whole on every rank.
    names = [name for name, inner in module.named_modules() if isinstance(inner, nn.Linear)]
    columns = {name: ColwiseParallel() for name in names if name.split(".")[-1] in ("q", "k", "v", "up")}
    rows = {name: RowwiseParallel() for name in names if name.split(".")[-1] in ("o", "down")}
    table = edges and isinstance(module, Entry) and module.table is not None
    return {**columns, **rows, **({"table": rows_of_table} if table else {})}


def loss_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total / output.shape[1]
