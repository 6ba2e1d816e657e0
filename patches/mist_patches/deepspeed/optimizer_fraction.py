"""Optimizer offload by bytes for DeepSpeed's ZeRO 1, 2 and 3.

Why: `offload_optimizer.ratio` counts sub-groups (one or two by default), so it does nothing below a billion
parameters per rank; the sub-groups it leaves on the GPU step with a second optimizer whose first group keeps
the learning rate of its construction and whose moments no checkpoint holds, so a run with a schedule or
a resume trains another model. ZeRO 1 and 2 have no ratio at all.

What: groups are cut where the fraction falls (deepspeed.groups), the shares of master weights, gradients
to step with and moments are placed as asked, and the GPU's share is stepped by torch's Adam with the
hyper-parameters and inside the state of the host's optimizer, at the moment of the step. One state: one
schedule, one checkpoint. A checkpoint loads only under the fraction that it was saved with, and says so.

Cost: while the engine is built the host holds all master weights of ZeRO 3 for a moment. A learning-rate
scheduler of ZeRO 1 and 2 must be made by DeepSpeed (from the JSON or a callable): one made before
knows fewer groups.

Tested with DeepSpeed 0.19.0 and 0.19.8. Needs `offload_optimizer` with device cpu in the JSON, and
its Adam on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mist_patches.core.hooking import PatchRefused, all_of, check_fraction, log
from mist_patches.deepspeed.groups import LOAD_STAGE3, LOAD_STAGE12, cut_for, hosted, optimizer_classes, put

KIND = "optimizer"
HYPER_PARAMETERS = ("lr", "betas", "eps", "weight_decay")
_ON_DEVICE = "_mist_on_device"
"""On an engine's optimizer: ids of the master weights that stay on the GPU."""


class DeviceAdam(torch.optim.AdamW):
    """Steps what lies on the GPU as the host's optimizer would: its rates and state, read at each step."""

    def __init__(self, host: Any, groups: int) -> None:
        if not all(group.get("bias_correction", True) for group in host.param_groups):
            raise PatchRefused("the optimizer fraction needs Adam with bias_correction, as torch's has")
        super().__init__([{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)])
        self._host = host
        for group in self.param_groups:
            group["params"] = []
            group["decoupled_weight_decay"] = host.adam_w_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.state = self._host.state  # a new one after each load
        for mine, theirs in zip(self.param_groups, self._host.param_groups, strict=True):
            mine.update({key: theirs[key] for key in HYPER_PARAMETERS})
        return super().step(closure)


def exact_optimizer_fraction(fraction: float | None = None) -> Callable[[], None]:
    """Keep exactly this fraction of the optimizer's bytes on the host, in every engine built from now on.

    None keeps the JSON's `ratio` and only makes it exact. Returns the function that undoes the patch;
    engines that are built already stay as they are.
    """
    if fraction is not None:
        fraction = check_fraction("optimizer offload fraction", fraction)
    stage3, stage12 = optimizer_classes()
    undone = [
        put(stage3, "_create_fp32_partitions", ("self",), lambda f: _place_stage3(f, fraction)),
        put(stage12, "initialize_optimizer_states", ("self",), lambda f: _place_stage12(f, fraction)),
        put(stage3, "_rigid_load_state_dict", LOAD_STAGE3, _then_as_placed),
        put(stage12, "_load_legacy_checkpoint", LOAD_STAGE12, _then_as_placed),
        cut_for(KIND, fraction),
    ]
    return all_of(undone)


def _place_stage3(original: Callable[[Any], None], fraction: float | None) -> Any:
    def _create_fp32_partitions(self: Any) -> None:
        asked = self.partial_offload if fraction is None else fraction
        if not _needed(self, self.offload_optimizer, asked):
            return original(self)
        if self.swap_optimizer:
            raise PatchRefused("the optimizer fraction needs offload_optimizer.device cpu, got nvme")
        from deepspeed.accelerator import get_accelerator

        self.partial_offload = 1.0
        original(self)
        self.partial_offload = asked
        device = get_accelerator()._name
        on_host, on_device = hosted(self, KIND), set()
        for index, params in enumerate(self.fp16_groups):
            if id(params[0]) not in on_host:
                self.subgroup_to_device[index] = device
                master = self.fp32_partitioned_groups_flat[index]
                moved = master.detach().to(device).requires_grad_()
                moved.ds_id = master.ds_id
                self.fp32_partitioned_groups_flat[index] = moved
                on_device.add(id(moved))
        self.backup_optimizer = DeviceAdam(self.optimizer, groups=len(self.optimizer.param_groups))
        setattr(self, _ON_DEVICE, on_device)
        _report(asked, self.fp32_partitioned_groups_flat, on_device)
        return None

    return _create_fp32_partitions


def _place_stage12(original: Callable[[Any], None], fraction: float | None) -> Any:
    def initialize_optimizer_states(self: Any) -> None:
        asked = float(self.cpu_offload) if fraction is None else fraction
        if not _needed(self, self.cpu_offload, asked):
            return original(self)
        from deepspeed.accelerator import get_accelerator

        device = get_accelerator().current_device_name()
        on_host = hosted(self, KIND)
        masters = self.single_partition_of_fp32_groups
        kept = [k for k, group in enumerate(self.bit16_groups) if id(group[0]) not in on_host]
        for index in kept:
            masters[index].data = masters[index].data.to(device)
        original(self)
        for index in kept:
            masters[index].grad = torch.zeros_like(masters[index].data)
            # The half-precision copy that travels from the host: here it is the partition itself.
            rank = torch.distributed.get_rank(group=self.real_dp_process_group[index])
            own = self.parallel_partitioned_bit16_groups[index][rank]
            self.param_buffer_of_bit16_for_cpu_offload_groups[index] = own
        on_device = {id(masters[index]) for index in kept}
        setattr(self, _ON_DEVICE, on_device)
        _step_by_place(self.optimizer, on_device)
        _report(asked, masters, on_device)
        return None

    return initialize_optimizer_states


def _step_by_place(optimizer: Any, on_device: set[int]) -> None:
    """Let the optimizer step what lies on the GPU too: DeepSpeed hands it one group at a time."""
    device_adam, host_step = DeviceAdam(optimizer, groups=1), optimizer.step

    def step(closure: Any = None) -> Any:
        (group,) = optimizer.param_groups
        if not any(id(p) in on_device for p in group["params"]):
            return host_step(closure)
        device_adam.param_groups[0]["params"] = group["params"]
        device_adam.step()
        device_adam.param_groups[0]["params"] = []
        return None

    optimizer.step = step


def _needed(self: Any, offloaded: bool, asked: float) -> bool:
    """Whether there is anything to place; refuses a wish that the JSON does not allow."""
    if offloaded and not hasattr(self.optimizer, "ds_opt_adam"):
        raise PatchRefused(
            f"optimizer offload of {asked:g} needs DeepSpeedCPUAdam, got {type(self.optimizer).__name__}"
        )
    if asked and not offloaded:
        raise PatchRefused(
            f"optimizer offload of {asked:g} asked, but the JSON has no offload_optimizer with device cpu"
        )
    return offloaded


def _then_as_placed(original: Callable[..., None]) -> Any:
    def load(self: Any, *places: Any, **options: Any) -> None:
        original(self, *places, **options)
        _steps_as_placed(self)

    return load


def _steps_as_placed(self: Any) -> None:
    """The two optimizers write the number of the step in different types: each finds its own."""
    on_device: set[int] | None = getattr(self, _ON_DEVICE, None)
    if on_device is None:
        return
    for p, entry in self.optimizer.state.items():
        if "step" in entry:
            number = float(entry["step"])
            entry["step"] = torch.tensor(number) if id(p) in on_device else int(number)


def _report(asked: float, masters: list[Any], on_device: set[int]) -> None:
    elements = sum(m.numel() for m in masters)
    hosted_elements = sum(m.numel() for m in masters if id(m) not in on_device)
    log.info(
        "optimizer offload: asked %.4f, %d of %d elements (%.4f) in %d groups on the host",
        asked,
        hosted_elements,
        elements,
        hosted_elements / max(elements, 1),
        sum(id(m) not in on_device for m in masters),
    )
