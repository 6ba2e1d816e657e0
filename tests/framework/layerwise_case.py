"""Run by four gloo processes: small models by launch/parallelize.py, and the same models in one piece."""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layerwise_models import loss_sum, modules_of, samples_of, tensor_plan, whole
from torch import nn
from torch.distributed.tensor import DTensor

from mist_megatron.formats.plan_yaml import plan_from_text

Inputs = tuple[list[torch.Tensor], torch.Tensor]


class Alone:
    """The model in one piece, its sums in the order of a plan whose layers all have the same replicas."""

    def __init__(self, modules: Sequence[nn.Module], said: dict[str, Any]) -> None:
        self.modules, self.grad_accum = modules, said["grad_accum"]
        self.layers = [said["embedding"], *(one for stage in said["stages"] for one in stage), said["head"]]
        ends = list(accumulate(len(stage) + (index == 0) for index, stage in enumerate(said["stages"])))
        self.stage = [min(bisect_right(ends, place), len(ends) - 1) for place in range(len(modules))]
        self.ties = self._by_stage()
        for module, layer in zip(modules, self.layers, strict=True):
            module.requires_grad_(not layer.get("frozen", False))
        self.sharded = {
            one: layer["sharded"]
            for module, layer in zip(modules, self.layers, strict=True)
            for one in module.parameters()
            if one.requires_grad
        }

    def _by_stage(self) -> list[list[nn.Parameter]]:
        """A copy of a shared weight for each stage that has it."""
        found: dict[nn.Parameter, dict[int, nn.Parameter]] = {}
        for module, stage in zip(self.modules, self.stage, strict=True):
            for inner in module.modules():
                for name, one in list(inner.named_parameters(recurse=False)):
                    copies = found.setdefault(one, {stage: one})
                    inner.register_parameter(
                        name, copies.setdefault(stage, nn.Parameter(one.detach().clone()))
                    )
        return [list(copies.values()) for copies in found.values() if len(copies) > 1]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.sharded)

    def joined(self) -> None:
        """Gradients of a weight in several stages."""
        for copies in self.ties:
            total = reduce(torch.add, [one.grad for one in copies])
            for one in copies:
                one.grad = total.clone()

    def step(self, given: Inputs) -> torch.Tensor:
        inputs, targets = given
        loss = loss_sum(whole(self.modules, inputs), targets) / len(targets)
        grads = torch.autograd.grad(loss, self.parameters())
        for one, grad in zip(self.parameters(), grads, strict=True):
            one.grad = grad
        self.joined()
        return loss.detach()

    def step_in_order(self, given: Inputs) -> torch.Tensor:
        """Of shared-out layers over replicas in every micro-batch, of others over micro-batches first."""
        inputs, targets = given
        replicas = self.layers[0]["dp"]
        found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(replicas)]
        losses: list[list[torch.Tensor]] = [[] for _ in range(replicas)]
        for parts in zip(*(one.chunk(self.grad_accum) for one in (*inputs, targets)), strict=True):
            for replica, own in enumerate(zip(*(one.chunk(replicas) for one in parts), strict=True)):
                loss = loss_sum(whole(self.modules, own[:-1]), own[-1]) / len(targets)
                losses[replica].append(loss.detach())
                found[replica].append(torch.autograd.grad(loss, self.parameters()))
        for place, (one, shared) in enumerate(self.sharded.items()):
            each = [[grads[place] for grads in replica] for replica in found]
            orders = list(zip(*each, strict=True)) if shared else each
            one.grad = reduce(torch.add, [reduce(torch.add, order) for order in orders])
        self.joined()
        return reduce(torch.add, [torch.stack(one).sum() for one in losses])


def main(folder: str) -> None:
    from parallelize import Parallel

    torch.manual_seed(1)
    said = json.loads(Path(folder, "strategies.json").read_text())
    plan = plan_from_text(Path(folder, "plan.yaml").read_text())
    spec, seq_len, batch = plan.model, plan.training.seq_len, plan.training.global_batch
    exact = "exact" in Path(folder).name
    modules = modules_of(spec, seq_len)
    alone = Alone(copy.deepcopy(modules), said)
    parts = modules[0], modules[1:-1], modules[-1]
    model = Parallel(Path(folder, "strategies.json"), parts, tensor_plan, torch.device("cpu"))
    # Adam would make steps of rounding errors where a gradient is none, as of biases of keys.
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, foreach=False) for one in (model, alone)
    ]
    losses, late, finish = list[tuple[float, float]](), list[int](), model.replicas.finish

    def counted() -> None:
        """What no backward pass has sent."""
        late.append(len(model.replicas.messages) - model.replicas.next)
        finish()

    model.replicas.finish = counted
    for step in range(2):  # FSDP begins with the first, and goes on as it then knows with the second
        torch.manual_seed(10 + step)
        given = samples_of(spec, batch, seq_len)
        in_one_piece = (alone.step_in_order if exact else alone.step)(given)
        losses.append((float(model.step(*given, loss_sum)), float(in_one_piece)))
        for optimizer in optimizers:
            optimizer.step()
    furthest, still = 0.0, True
    for layer, same in zip(model.module.layers, alone.modules[model.own.start :], strict=False):
        for own, one in zip(layer.parameters(), same.parameters(), strict=True):
            full = own.full_tensor() if isinstance(own, DTensor) else own
            furthest = max(furthest, float((full - one).detach().abs().max()))
            still &= own.requires_grad or own.grad is None
    told = {"plan": Path(folder).name, "losses": losses, "furthest": furthest, "still": still}
    told |= {"late": sum(late), "steps": len(late), "messages": len(model.replicas.messages)}
    print(json.dumps(told), flush=True)


def model_of(folder: str) -> str:
    return Path(folder).name.removeprefix("exact-").removeprefix("kept-").split("-")[0]


def trained(folders: Sequence[str]) -> None:
    """The plans of each model in a fork of their own: groups of plans that are done go on waking up their
    threads, more often than all else with those of thirty plans, and torch keeps meshes of groups that are
    gone."""
    import layerwise_peak
    import parallelize  # noqa: F401  # once for all, as is what reads plans, with what it imports when it first does

    plan_from_text(Path(folders[0], "plan.yaml").read_text())
    gc.freeze()  # nothing for a fork's collector to go through, which would copy it
    rank, count, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    for model, alike in groupby(sorted(folders, key=model_of), model_of):
        if (child := os.fork()) == 0:
            store = dist.PrefixStore(model, dist.TCPStore(os.environ["MASTER_ADDR"], port))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
            for folder in alike:
                (layerwise_peak.main if Path(folder).name.startswith("kept") else main)(folder)
            dist.destroy_process_group()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"plans of {model} failed")


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    trained(sys.argv[1:])
