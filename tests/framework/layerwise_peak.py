"""For layerwise_case.py: what autograd keeps, at its most, while a plan's layers train by
launch/parallelize.py. Parameters and what FSDP gathers of them are not counted."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

SAMPLES, TOKENS, WIDTH, HEAD, CLASSES = 16, 128, 64, 16, 64


class Layer(nn.Module):
    """A transformer layer in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        heads = [part(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        core = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.o(core.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def tensor_plan(module: nn.Module) -> dict[str, object]:
    if not isinstance(module, Layer):
        return {}
    columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    return {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()}


class Kept:
    """Saved tensors that live: each storage once, from its first tensor to its last."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.now, self.most = module, 0, 0
        self.users: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> Any:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        own = (p.to_local() if isinstance(p, DTensor) else p for p in self.module.parameters())
        if storage.data_ptr() in {parameter.untyped_storage().data_ptr() for parameter in own}:
            return tensor
        key, size = storage.data_ptr(), storage.nbytes()
        self.users[key] += 1
        self.now += size * (self.users[key] == 1)
        self.most = max(self.most, self.now)
        held = Held(tensor)
        weakref.finalize(held, self.leave, key, size)
        return held

    def leave(self, key: int, size: int) -> None:
        self.users[key] -= 1
        self.now -= size * (self.users[key] == 0)


class Held:
    """What a hook hands to autograd, which frees it with its node."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def unpack(packed: Any) -> torch.Tensor:
    return packed.tensor if isinstance(packed, Held) else packed


def loss_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / TOKENS


def main(folder: str) -> None:
    from parallelize import Parallel

    torch.set_default_dtype(torch.bfloat16)
    count = sum(map(len, json.loads(Path(folder, "strategies.json").read_text())["stages"]))
    modules = [nn.Embedding(CLASSES, WIDTH), *(Layer() for _ in range(count)), nn.Linear(WIDTH, CLASSES)]
    parts = modules[0], modules[1:-1], modules[-1]
    model = Parallel(Path(folder, "strategies.json"), parts, tensor_plan, torch.device("cpu"))
    tokens = torch.randint(CLASSES, (SAMPLES, TOKENS))
    kept = Kept(model.module)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, unpack):
        model.step(tokens, tokens, loss_sum)
    torch.set_default_dtype(torch.float32)
    print(json.dumps({"plan": Path(folder).name, "stage": model.index, "most": kept.most}), flush=True)
