"""Weight offload by bytes for DeepSpeed's ZeRO 1, 2 and 3.

Why: `offload_param` is ZeRO 3's alone, and all or nothing; its `max_in_cpu` is between host and NVMe. A plan
that keeps a quarter of the weights on the host needs a fraction.

What, ZeRO 3: after DeepSpeed has laid all half-precision shards into one buffer on the GPU, the share is laid
into a pinned buffer on the host, in whole sub-groups that are cut where the fraction falls, and the GPU's
buffer is made as small as the rest. DeepSpeed's all-gathers bring every shard to the GPU before they send
it, its step writes each shard where it lies, and its checkpoints copy: nothing else changes. Layers later
in the model go to the host first, so that the first gather of an iteration need not wait for the bus.

What, ZeRO 1 and 2: whole layers, as many as the fraction says, are on the host and come to the device for
their forward and backward pass and their step (deepspeed.flat_weights).

Cost, ZeRO 3: while the engine is built both buffers exist for a moment. A gather of host shards is a
synchronous copy from pinned memory, then the all-gather; DeepSpeed's prefetch runs it ahead of the layer.
Parameters that ZeRO 3 keeps gathered are on the GPU in full besides. `engine.offload_states()` is refused.

Tested with DeepSpeed 0.19.0 and 0.19.8, without offload_param in the JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mist_patches.core.hooking import PatchRefused, all_of, check_fraction, log
from mist_patches.deepspeed.flat_weights import keep_on_host
from mist_patches.deepspeed.groups import cut_for, hosted, optimizer_classes, put

KIND = "weights"
HOST_BUFFER = "_mist_host_weights"


def exact_weight_fraction(fraction: float) -> Callable[[], None]:
    """Keep this fraction of the weights on the host, in every engine built from now on.

    Returns the function that undoes the patch. Engines of ZeRO 3 that are built already stay as they are,
    those of ZeRO 1 and 2 have their weights back.
    """
    fraction = check_fraction("weight offload fraction", fraction)
    stage3, _ = optimizer_classes()
    name = "_create_fp16_partitions_with_defragmentation"
    undone = [
        put(stage3, name, ("self", "fp16_param_groups"), lambda made: _place(made, fraction)),
        keep_on_host(fraction),
        cut_for(KIND, fraction),
    ]
    return all_of(undone)


def _place(original: Callable[..., None], fraction: float) -> Any:
    def _create_fp16_partitions_with_defragmentation(self: Any, fp16_param_groups: Any) -> None:
        if self.offload_param and fraction:
            raise PatchRefused(
                f"weight offload of {fraction:g}: offload_param in the JSON would move all; take it out"
            )
        original(self, fp16_param_groups)
        if not self.offload_param:
            on_host = hosted(self, KIND)
            _move(self, [k for k, group in enumerate(self.fp16_groups) if id(group[0]) in on_host], fraction)

    return _create_fp16_partitions_with_defragmentation


def _move(self: Any, moved: list[int], fraction: float) -> None:
    """Lay the sub-groups into two buffers and let go of the one that held them all."""
    from deepspeed.accelerator import get_accelerator

    flats = self.fp16_partitioned_groups_flat
    sizes = [flat.numel() for flat in flats]
    host_elements = sum(sizes[k] for k in moved)
    if moved:
        whole = self.lp_param_buffer
        host = get_accelerator().pin_memory(torch.empty(host_elements, dtype=whole.dtype))
        device = torch.empty(sum(sizes) - host_elements, dtype=whole.dtype, device=whole.device)
        filled = {id(host): 0, id(device): 0}
        for index, flat in enumerate(flats):
            buffer = host if index in moved else device
            view = buffer.narrow(0, filled[id(buffer)], sizes[index])
            filled[id(buffer)] += sizes[index]
            view.copy_(flat)
            flats[index] = view
            self._unflatten_partitioned_parameters(index)
        self.lp_param_buffer = device
        setattr(self, HOST_BUFFER, host)
    log.info(
        "weight offload: asked %.4f, %d of %d elements (%.4f) in %d sub-groups on the host",
        fraction,
        host_elements,
        sum(sizes),
        host_elements / max(sum(sizes), 1),
        len(moved),
    )
