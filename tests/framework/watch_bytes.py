"""Counts, inside a training process, the bytes of every kind that are on the device and on the host.

Started by a sitecustomize in processes whose "device" is the CPU: what tells the two apart is which storages
exist, and what is a copy. Writes one JSON file per rank when the process ends.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import weakref
from collections import Counter
from pathlib import Path
from typing import Any


class Live:
    """Bytes of distinct objects that are alive now, and the most there ever were."""

    def __init__(self) -> None:
        self.now, self.peak = 0, 0
        self.uses: Counter[Any] = Counter()

    def hold(self, owner: Any, key: Any, size: int) -> None:
        """Count `size` bytes under `key` for as long as `owner` lives."""
        self.uses[key] += 1
        if self.uses[key] == 1:
            self.now += size
            self.peak = max(self.peak, self.now)
        weakref.finalize(owner, self._drop, key, size)

    def _drop(self, key: Any, size: int) -> None:
        self.uses[key] -= 1
        if self.uses[key] == 0:
            self.now -= size


class Stays:
    """Stands in the autograd graph for a tensor that was left on the device."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def start(folder: str) -> None:
    device, host = Live(), Live()
    states: dict[str, int] = {}
    _watch_activations(device, host)
    _watch_recomputed(device)
    _watch_states(states)

    def write() -> None:
        found = {
            **states,
            **_optimizer_bytes(),
            "activations_device": device.peak,
            "activations_host": host.peak,
            "activations_left": device.now + host.now,
        }
        Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")

    atexit.register(write)


def _watch_activations(device: Live, host: Live) -> None:
    from mist_patches.core import activation_offload
    from mist_patches.megatron.activation_offload import offload_block_activations

    # The tensors of a tiny model are all below the size that is worth a copy.
    offload_block_activations.__defaults__ = (0,)
    offload = activation_offload.ActivationOffload
    pack, unpack, decide = offload._pack, offload._unpack, offload._decide

    def counted_decide(self: Any, tensor: Any, size: int, tape: Any) -> Any:
        copy = decide(self, tensor, size, tape)
        if copy is not None:
            host.hold(copy, id(copy), copy.host.untyped_storage().nbytes())
        return copy

    def counted_pack(self: Any, tensor: Any, tape: Any) -> Any:
        packed, storage = pack(self, tensor, tape), tensor.untyped_storage()
        if packed is not tensor or storage.data_ptr() in self._staying:
            return packed
        kept = Stays(tensor)
        device.hold(kept, (storage.data_ptr(), storage.nbytes()), storage.nbytes())
        return kept

    def counted_unpack(self: Any, packed: Any) -> Any:
        return packed.tensor if isinstance(packed, Stays) else unpack(self, packed)

    offload._pack, offload._unpack, offload._decide = counted_pack, counted_unpack, counted_decide


def _watch_recomputed(device: Live) -> None:
    from megatron.core import tensor_parallel

    original = tensor_parallel.checkpoint

    def checkpoint(function: Any, distribute: Any, *inputs: Any) -> Any:
        output = original(function, distribute, *inputs)
        found = output[0] if isinstance(output, tuple) else output
        if found.grad_fn is not None:  # its node owns the input
            kept = found.grad_fn.metadata["watched"] = Stays(None)
            device.hold(kept, id(kept), inputs[0].untyped_storage().nbytes())
        return output

    tensor_parallel.checkpoint = checkpoint


def _watch_states(states: dict[str, int]) -> None:
    import torch
    from megatron.core.distributed import DistributedDataParallel
    from patched_megatron import state_bytes

    def after(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            states.update(state_bytes([module]))

    torch.nn.modules.module.register_module_forward_hook(after)


def _optimizer_bytes() -> dict[str, int]:
    """fp32 master weights and moments, by the optimizer that steps them.

    Found through its owner: Megatron builds a first one on whole parameters and replaces it by one on shards
    (distrib_optimizer.py), and whether the first is still alive at the end is the garbage collector's choice.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    found = {"optimizer_device": 0, "optimizer_host": 0, "optimizer_shard": 0}
    for owner in [one for one in gc.get_objects() if type(one) is DistributedOptimizer]:
        for optimizer in owner.optimizer.sub_optimizers:
            on_host = optimizer in owner.optimizer.cpu_optimizers
            where = "optimizer_host" if on_host else "optimizer_device"
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state[parameter]
                shard = sum(t.nbytes for t in (parameter, state["exp_avg"], state["exp_avg_sq"]))
                found[where] += shard
                found["optimizer_shard"] = max(found["optimizer_shard"], shard)
    return found
