"""Optimizer offload by bytes for Megatron-core's HybridDeviceOptimizer.

Why: Megatron moves whole parameter shards, in order, until the asked fraction is passed. One large
shard at the threshold makes 0.5 become 0.557. A plan that was computed to fit then uses more host
memory and more time on the CPU than it says.

What: the shards to move are chosen so that their sum is as near to the asked fraction as shards allow:
from the largest down, whatever still fits, then one more if that comes closer. The split itself stays
Megatron's: its own function runs once on the chosen shards with fraction 1 and once on the others with
fraction 0, and the two answers are joined.

Two more things go with it. With the distributed optimizer Megatron builds a first HybridDeviceOptimizer on
whole parameters and then another on this rank's shards. The first refers to itself in a circle, so its fp32
copies of whole parameters, on host and device, would stay until the garbage collector comes; here it makes
none. Where gradients are bf16, Megatron widens the device's share on the stream of the copies to the host and
steps it on another without waiting; here the step waits for the widening, not for the copies behind it. And
Megatron pins the half-precision copies of the host's share, but not the fp32 ones that it makes of them and
keeps, so that every step's copy back to the device would stop the host; here those are pinned.

Tested with megatron-core 0.16.1, 0.18.0 and 0.19.2.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mist_patches.core.hooking import PatchRefused, all_of, all_or_nothing, check_fraction, log, replace

_FP32_BYTES = 4
_FACTORY_0_16 = (
    "config", "model_chunks", "param_groups", "per_model_buffers", "model_parallel_group",
    "data_parallel_group", "data_parallel_group_gloo", "data_parallel_group_idx", "intra_dist_opt_group",
    "distributed_optimizer_instance_id", "pg_collection",
)  # fmt: skip
_FACTORY = (_FACTORY_0_16, (*_FACTORY_0_16, "skip_megatron_wrapping"))
"""Of megatron.core.optimizer._get_megatron_optimizer_based_on_param_groups in 0.16.1 and 0.19.2."""
DISTRIBUTED_PARAMETERS = (
    "self", "optimizer", "config", "grad_scaler", "init_state_fn", "model_chunks", "per_model_buffers",
    "data_parallel_group", "data_parallel_group_gloo", "data_parallel_group_idx",
    "distributed_optimizer_instance_id",
)  # fmt: skip
"""Of DistributedOptimizer.__init__."""


def choose_shards(sizes: Sequence[int], fraction: float) -> frozenset[int]:
    """Positions whose sizes add up as near as possible to `fraction` of the total."""
    target = fraction * sum(sizes)
    chosen: set[int] = set()
    taken = 0
    for index in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        if taken + sizes[index] <= target:
            chosen.add(index)
            taken += sizes[index]
    rest = [k for k in range(len(sizes)) if k not in chosen]
    if rest:
        smallest = min(rest, key=lambda k: sizes[k])
        if taken + sizes[smallest] - target < target - taken:
            chosen.add(smallest)
    return frozenset(chosen)


@all_or_nothing
def exact_optimizer_fraction(fraction: float | None = None) -> Callable[[], None]:
    """Make HybridDeviceOptimizer keep exactly this fraction of its bytes on the host.

    None keeps the fraction that Megatron was given (`--optimizer-offload-fraction`) and only makes the
    split exact. Returns the function that undoes the patch.
    """
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    from mist_patches.core.pinned_memory import give_back_cached_host_memory

    if fraction is not None:
        fraction = check_fraction("optimizer offload fraction", fraction)
    first = _FirstOptimizer(fraction)

    def build(original: Callable[[Any, float], tuple[Any, ...]]) -> Any:
        def _get_sub_optimizer_param_groups(self: Any, offload_fraction: float) -> tuple[Any, ...]:
            if first.is_built:
                return [], [], {}, {}, {}
            wanted = check_fraction(
                "optimizer offload fraction", offload_fraction if fraction is None else fraction
            )
            split = _split(self, wanted, original)
            give_back_cached_host_memory()  # of the half-precision copies that Megatron has just widened
            return split

        return _get_sub_optimizer_param_groups

    undone = [
        replace(
            HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", ("self", "offload_fraction"), build
        ),
        replace(HybridDeviceOptimizer, "_init_sub_optimizers", ("self",), _wait_for_wide_gradients),
        replace(HybridDeviceOptimizer, "_set_sub_optimizer_grads", ("self",), _widen_before_copies),
        *first.watch(),
    ]
    return all_of(undone)


class _FirstOptimizer:
    """Whether the HybridDeviceOptimizer that is being built will be thrown away for one on shards."""

    def __init__(self, fraction: float | None) -> None:
        self.fraction = fraction
        self.is_built = False

    def watch(self) -> list[Callable[[], None]]:
        from megatron.core import optimizer
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        def making(original: Callable[..., Any]) -> Any:
            signature = inspect.signature(original)

            @functools.wraps(original)
            def _get_megatron_optimizer_based_on_param_groups(*args: Any, **kwargs: Any) -> Any:
                given = signature.bind(*args, **kwargs).arguments
                _require_offload(given["config"], self.fraction)
                self.is_built = _replaces_the_first(given)
                try:
                    return original(*args, **kwargs)
                finally:
                    self.is_built = False

            return _get_megatron_optimizer_based_on_param_groups

        def on_shards(original: Callable[..., None]) -> Any:
            @functools.wraps(original)
            def __init__(*args: Any, **kwargs: Any) -> None:
                self.is_built = False
                original(*args, **kwargs)

            return __init__

        return [
            replace(optimizer, "_get_megatron_optimizer_based_on_param_groups", _FACTORY, making),
            replace(DistributedOptimizer, "__init__", DISTRIBUTED_PARAMETERS, on_shards),
        ]


def _require_offload(config: Any, fraction: float | None) -> None:
    """Megatron moves nothing unless its own switch is on."""
    if fraction and not config.optimizer_cpu_offload:
        raise PatchRefused(
            f"optimizer offload of {fraction:g} asked, but Megatron is given no --optimizer-cpu-offload "
            "(OptimizerConfig.optimizer_cpu_offload)"
        )


def _replaces_the_first(given: Mapping[str, Any]) -> bool:
    """FSDP and Megatron's bare optimizers keep the one they are given."""
    config, chunks = given["config"], given["model_chunks"]
    fsdp = any(getattr(chunk.ddp_config, "use_megatron_fsdp", False) for chunk in chunks)
    return bool(
        config.optimizer_cpu_offload
        and config.use_distributed_optimizer
        and not given.get("skip_megatron_wrapping")
        and not fsdp
    )


def _wait_for_wide_gradients(original: Callable[[Any], None]) -> Any:
    def _init_sub_optimizers(self: Any) -> None:
        original(self)
        if self.gpu_optimizer is None:
            return
        hybrid = weakref.ref(self)

        def wait(*_: Any) -> None:
            import torch

            owner = hybrid()
            if owner is not None and any(map(_is_widened, owner.param_to_fp32_param)):
                torch.cuda.current_stream().wait_event(owner.mist_widened)

        self.gpu_optimizer.register_step_pre_hook(wait)

    return _init_sub_optimizers


def _widen_before_copies(original: Callable[[Any], None]) -> Any:
    """Megatron does both in one call; between them an event says when the device's share can be stepped."""

    @functools.wraps(original)
    def _set_sub_optimizer_grads(self: Any) -> None:
        import torch

        on_host, masters = self.cpu_optimizers, self.param_to_fp32_param
        try:
            self.cpu_optimizers = []
            original(self)
            self.mist_widened = torch.cuda.current_stream().record_event()
            self.cpu_optimizers, self.param_to_fp32_param = on_host, {}
            original(self)
        finally:
            self.cpu_optimizers, self.param_to_fp32_param = on_host, masters

    return _set_sub_optimizer_grads


def _pin(groups: Sequence[Mapping[str, Any]]) -> None:
    """Move what is on the host into pinned memory, where it is not there already."""
    from mist_patches.core.pinned_memory import pinned

    for group in groups:
        for p in group["params"]:
            if not p.is_pinned():
                p.data = pinned(p.shape, p.dtype).copy_(p.data)


def _is_widened(parameter: Any) -> bool:
    grad = getattr(parameter, "decoupled_grad", parameter.grad)
    return grad is not None and grad.element_size() < _FP32_BYTES


def _split(
    optimizer: Any, fraction: float, original: Callable[[Any, float], tuple[Any, ...]]
) -> tuple[Any, ...]:
    groups = optimizer.param_groups
    movable = [p for group in groups for p in group["params"] if p.is_cuda]
    sizes = [p.numel() * p.element_size() for p in movable]
    chosen = {id(movable[k]) for k in choose_shards(sizes, fraction)}
    moved_bytes = sum(size for p, size in zip(movable, sizes, strict=True) if id(p) in chosen)

    def only(keep: Callable[[Any], bool]) -> list[dict[str, Any]]:
        return [{**group, "params": [p for p in group["params"] if keep(p)]} for group in groups]

    try:
        optimizer.param_groups = only(lambda p: id(p) in chosen)
        host = original(optimizer, 1.0)
        optimizer.param_groups = only(lambda p: id(p) not in chosen)
        device = original(optimizer, 0.0)
    finally:
        optimizer.param_groups = groups
    if optimizer.pin_cpu_params:
        _pin(host[0])
    if getattr(optimizer, "mist_moved_bytes", None) != moved_bytes:  # split again when a checkpoint is loaded
        optimizer.mist_moved_bytes = moved_bytes
        log.info(
            "optimizer offload: asked %.4f, %d of %d bytes (%.4f) on the host",
            fraction,
            moved_bytes,
            sum(sizes),
            moved_bytes / max(sum(sizes), 1),
        )
    return (
        host[0] + device[0],
        host[1] + device[1],
        {**host[2], **device[2]},
        {**host[3], **device[3]},
        {**host[4], **device[4]},
    )
