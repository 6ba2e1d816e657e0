"""For layerwise_case.py: what autograd keeps, at its most, while a plan's layers train by
launch/parallelize.py. Parameters and what FSDP gathers of them are not counted."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layerwise_models import loss_sum, modules_of, samples_of, tensor_plan
from torch import nn
from torch.distributed.tensor import DTensor

from mist_megatron.formats.plan_yaml import plan_from_text


class Kept:
    """Saved tensors that live: each once however often it is saved, from its first tensor to its last."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.now, self.most = module, 0, 0
        self.users: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> Any:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        own = (p.to_local() if isinstance(p, DTensor) else p for p in self.module.parameters())
        if storage.data_ptr() in {parameter.untyped_storage().data_ptr() for parameter in own}:
            return tensor
        # Micro-batches are views of one batch.
        key, size = local.data_ptr(), local.nbytes
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


def main(folder: str) -> None:
    from parallelize import Parallel

    torch.set_default_dtype(torch.bfloat16)
    plan = plan_from_text(Path(folder, "plan.yaml").read_text())
    modules = modules_of(plan.model, plan.training.seq_len)
    parts, split = (modules[0], modules[1:-1], modules[-1]), partial(tensor_plan, edges=False)
    model = Parallel(Path(folder, "strategies.json"), parts, split, torch.device("cpu"))
    given = samples_of(plan.model, plan.training.global_batch, plan.training.seq_len)
    kept = Kept(model.module)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, unpack):
        model.step(*given, loss_sum)
    torch.set_default_dtype(torch.float32)
    print(json.dumps({"plan": Path(folder).name, "stage": model.index, "most": kept.most}), flush=True)
