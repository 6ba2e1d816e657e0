"""Run by four gloo processes: a small model by launch/parallelize.py, and the same model in one piece."""

from __future__ import annotations

import copy
import json
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

SAMPLES, TOKENS, WIDTH, CLASSES = 16, 4, 16, 11


class Layer(nn.Module):
    """Norm and MLP around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def tensor_plan(module: nn.Module) -> dict[str, object]:
    return {"up": ColwiseParallel(), "down": RowwiseParallel()} if isinstance(module, Layer) else {}


def loss_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / TOKENS


def in_its_order(
    plain: nn.Sequential, said: dict[str, Any], samples: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Gradients and loss of the plain model, added up in the order of a plan whose layers all have the same
    replicas: of shared-out layers over replicas in every micro-batch, of others over micro-batches first."""
    layers = [said["embedding"], *(layer for stage in said["stages"] for layer in stage), said["head"]]
    batch, replicas = samples[0].shape[0], layers[0]["dp"]
    found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(replicas)]
    losses: list[list[torch.Tensor]] = [[] for _ in range(replicas)]
    for tokens, targets in zip(*(one.chunk(said["grad_accum"]) for one in samples), strict=True):
        for replica, own in enumerate(zip(tokens.chunk(replicas), targets.chunk(replicas), strict=True)):
            loss = loss_sum(plain(own[0]), own[1]) / batch
            losses[replica].append(loss.detach())
            found[replica].append(torch.autograd.grad(loss, list(plain.parameters())))
    sharded = [layer["sharded"] for layer, own in zip(layers, plain, strict=True) for _ in own.parameters()]
    for place, (parameter, shared) in enumerate(zip(plain.parameters(), sharded, strict=True)):
        each = [[grads[place] for grads in replica] for replica in found]
        orders = list(zip(*each, strict=True)) if shared else each
        parameter.grad = reduce(torch.add, [reduce(torch.add, one) for one in orders])
    return reduce(torch.add, [torch.stack(one).sum() for one in losses])


def main(folder: str) -> None:
    from parallelize import Parallel

    torch.manual_seed(1)
    said = json.loads(Path(folder, "strategies.json").read_text())
    count, exact = sum(map(len, said["stages"])), Path(folder).name.startswith("exact")
    modules = [nn.Embedding(CLASSES, WIDTH), *(Layer() for _ in range(count)), nn.Linear(WIDTH, CLASSES)]
    plain = nn.Sequential(*copy.deepcopy(modules))
    parts = modules[0], modules[1:-1], modules[-1]
    model = Parallel(Path(folder, "strategies.json"), parts, tensor_plan, torch.device("cpu"))
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2, foreach=False) for one in (model, plain)]
    losses = []
    for step in range(3):
        torch.manual_seed(10 + step)
        tokens = torch.randint(CLASSES, (SAMPLES, TOKENS))
        targets = torch.randint(CLASSES, (SAMPLES, TOKENS))
        optimizers[1].zero_grad()
        if exact:
            alone = in_its_order(plain, said, (tokens, targets))
        else:
            alone = loss_sum(plain(tokens), targets) / SAMPLES
            alone.backward()
        losses.append((float(model.step(tokens, targets, loss_sum)), float(alone)))
        for optimizer in optimizers:
            optimizer.step()
    furthest, same = 0.0, dict(zip([id(one) for one in modules], plain, strict=True))
    for layer in model.module.layers:
        for own, whole in zip(layer.parameters(), same[id(layer)].parameters(), strict=True):
            full = own.full_tensor() if isinstance(own, DTensor) else own
            furthest = max(furthest, float((full - whole).detach().abs().max()))
    print(json.dumps({"plan": Path(folder).name, "losses": losses, "furthest": furthest}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    dist.init_process_group("gloo")
    import layerwise_peak

    for each in sys.argv[1:]:
        (layerwise_peak if Path(each).name.startswith("kept") else sys.modules["__main__"]).main(each)
    dist.destroy_process_group()
