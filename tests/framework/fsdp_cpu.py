"""What Megatron-FSDP needs beyond megatron_cpu.install to run on CPU and gloo."""

from __future__ import annotations


def allow_fsdp() -> None:
    """Make "cuda:0" and meshes of GPUs mean the CPU and gloo, in a process that install() has rewired."""
    import torch
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp

    cpu = torch.device("cpu")

    class Torch:
        """`torch` to the modules that name a GPU by its number."""

        def __getattr__(self, name: str):
            return getattr(torch, name)

        def device(self, *words: object) -> torch.device:
            return cpu

    adapter.torch = megatron_fsdp.torch = Torch()
    of_group = adapter.DeviceMesh.from_group

    def on_gloo(groups, device_type, *words, **more):
        return of_group(groups, "cpu", *words, **more)

    adapter.DeviceMesh = type("DeviceMesh", (), {"from_group": staticmethod(on_gloo)})
