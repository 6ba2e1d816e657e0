"""Gradient offload by bytes for DeepSpeed's ZeRO 1, 2 and 3.

Why: DeepSpeed keeps the gradients it accumulates with the optimizer states: all on the host or all on the
GPU, even for the share of an `offload_optimizer.ratio` that is stepped on the GPU, whose gradients travel
there and back.

What: the buffers in which gradients add up over the micro-batches are placed by parameter. ZeRO 3: any
fraction, with or without optimizer offload; the step brings the host's share to where its master weights
are, one sub-group at a time. ZeRO 1 and 2: any fraction when the JSON offloads the optimizer and gradients
accumulate in the weights' precision. There DeepSpeed's buffers have the whole parameter, not the rank's
part, and exist from the first micro-batch that needs them: with one micro-batch there are none. With
wider gradients (`data_types.grad_accum_dtype` fp32 beside bf16 weights) DeepSpeed 0.19.8 accumulates on the
GPU whatever the JSON offloads, and a fraction above 0 is refused.

Cost: a host gradient of ZeRO 3 is read, added to and written back at every micro-batch, as DeepSpeed does
it. `engine.offload_states()` is refused.

Tested with DeepSpeed 0.19.0 and 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mist_patches.core.hooking import PatchRefused, all_of, check_fraction, log
from mist_patches.deepspeed.groups import cut_for, hosted, optimizer_classes, put

KIND = "grads"
BUFFERS = "_mist_grad_buffers"
_BY_PARAMETER = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def exact_gradient_fraction(fraction: float) -> Callable[[], None]:
    """Keep this fraction of the accumulated gradients on the host, in every engine built from now on.

    Returns the function that undoes the patch; engines that are built already stay as they are.
    """
    fraction = check_fraction("gradient offload fraction", fraction)
    stage3, stage12 = optimizer_classes()
    undone = [
        put(stage3, "_setup_for_real_optimizer", ("self",), lambda made: _place_stage3(made, fraction)),
        put(stage3, "_prepare_fp32_grad_for_sub_group", ("self", "sub_group_id"), _bring_to_master),
        put(stage3, "has_overflow", ("self", "partition_gradients"), _look_at_both),
        put(stage12, "_create_param_mapping", ("self",), lambda made: _place_stage12(made, fraction)),
        cut_for(KIND, fraction),
    ]
    return all_of(undone)


def _place_stage3(original: Callable[[Any], None], fraction: float) -> Any:
    def _setup_for_real_optimizer(self: Any) -> None:
        original(self)
        from deepspeed.accelerator import get_accelerator

        accelerator, by_parameter = get_accelerator(), getattr(self, _BY_PARAMETER)
        on_host, dtype = hosted(self, KIND), self.grad_partitions_flat_buffer.dtype
        params = [p for group in self.fp16_groups for p in group]
        shares = [[p for p in params if (id(p) in on_host) is wanted] for wanted in (True, False)]
        sizes = [sum(p.partition_numel() for p in share) for share in shares]
        self.grad_partitions_flat_buffer = None
        host = torch.zeros(sizes[0], dtype=dtype)
        if sizes[0]:
            host = accelerator.pin_memory(host)
        device = torch.zeros(sizes[1], dtype=dtype, device=accelerator.current_device_name())
        for buffer, share in zip((host, device), shares, strict=True):
            offset = 0
            for p in share:
                by_parameter[p.ds_id] = buffer.narrow(0, offset, p.partition_numel())
                offset += p.partition_numel()
        setattr(self, BUFFERS, (host, device))
        self.grad_partitions_flat_buffer = device
        _report(fraction, sizes[0], sum(sizes))

    return _setup_for_real_optimizer


def _bring_to_master(original: Callable[[Any, int], None]) -> Any:
    def _prepare_fp32_grad_for_sub_group(self: Any, sub_group_id: int) -> None:
        if hasattr(self, BUFFERS):
            place = self.fp32_partitioned_groups_flat[sub_group_id].device
            grads = self.averaged_gradients[sub_group_id]
            ahead = place.type != "cpu"  # the host would read what has not arrived yet
            self.averaged_gradients[sub_group_id] = [g.to(place, non_blocking=ahead) for g in grads]
        original(self, sub_group_id)

    return _prepare_fp32_grad_for_sub_group


def _look_at_both(original: Callable[..., Any]) -> Any:
    def has_overflow(self: Any, partition_gradients: bool = True) -> Any:
        buffers = getattr(self, BUFFERS, None)
        if buffers is None:
            return original(self, partition_gradients)
        tracker, flags = self.inf_or_nan_tracker, []
        try:
            for buffer in buffers:  # both on every rank: each look is a collective
                self.grad_partitions_flat_buffer = buffer
                self.inf_or_nan_tracker = torch.zeros_like(tracker, device=buffer.device)
                flags.append(original(self, partition_gradients))
        finally:
            self.grad_partitions_flat_buffer, self.inf_or_nan_tracker = buffers[1], tracker
        return any(flags)

    return has_overflow


def _place_stage12(original: Callable[[Any], Any], fraction: float) -> Any:
    def _create_param_mapping(self: Any) -> Any:
        if self.cpu_offload and not _accumulates_on_gpu(self):
            _keep_on_gpu(self, fraction)
        elif fraction:
            cause = (
                "gradients wider than the weights accumulate on the GPU in DeepSpeed 0.19"
                if self.cpu_offload
                else "below ZeRO 3 gradients leave the GPU with offload_optimizer only"
            )
            raise PatchRefused(f"gradient offload of {fraction:g}: {cause}")
        return original(self)

    return _create_param_mapping


def _accumulates_on_gpu(self: Any) -> bool:
    is_compact = getattr(self, "_use_compact_grad_partition_buffer", None)
    if is_compact is None:  # before 0.19.8, not tested with gradients wider than the weights
        return bool(self.use_separate_grad_accum)
    return any(is_compact(k) for k in range(len(self.bit16_groups)))


def _keep_on_gpu(self: Any, fraction: float) -> None:
    """Give DeepSpeed, which makes what is missing on the host, the rest of the buffers on the GPU."""
    from deepspeed.accelerator import get_accelerator

    device, on_host = get_accelerator().current_device_name(), hosted(self, KIND)
    host_elements = elements = 0
    for params in self.params_in_partition:
        for p in params:
            elements += p.numel()
            if id(p) in on_host:
                host_elements += p.numel()
            elif self.gradient_accumulation_steps > 1 and not self.low_precision_master_weights_and_grads:
                buffer = torch.zeros(p.numel(), dtype=p.dtype, device=device)
                self.accumulated_grads_in_cpu[self.get_param_id(p)] = buffer
    _report(fraction, host_elements, elements)


def _report(asked: float, host_elements: int, elements: int) -> None:
    log.info(
        "gradient offload: asked %.4f, %d of %d elements (%.4f) on the host",
        asked,
        host_elements,
        elements,
        host_elements / max(elements, 1),
    )
