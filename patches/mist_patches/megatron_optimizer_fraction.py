"""Optimizer offload by bytes for Megatron-core's HybridDeviceOptimizer.

Why: Megatron moves whole parameter shards, in order, until the asked fraction is passed. One large
shard at the threshold makes 0.5 become 0.557. A plan that was computed to fit then uses more host
memory and more time on the CPU than it says.

What: the shards to move are chosen so that their sum is as near to the asked fraction as shards allow:
from the largest down, whatever still fits, then one more if that comes closer. The split itself stays
Megatron's: its own function runs once on the chosen shards with fraction 1 and once on the others with
fraction 0, and the two answers are joined.

Tested with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mist_patches.hooking import check_fraction, log, replace


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


def exact_optimizer_fraction(fraction: float | None = None) -> Callable[[], None]:
    """Make HybridDeviceOptimizer keep exactly this fraction of its bytes on the host.

    None keeps the fraction that Megatron was given (`--optimizer-offload-fraction`) and only makes the
    split exact. Returns the function that undoes the patch.
    """
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    if fraction is not None:
        fraction = check_fraction("optimizer offload fraction", fraction)

    def build(original: Callable[[Any, float], tuple[Any, ...]]) -> Any:
        def _get_sub_optimizer_param_groups(self: Any, offload_fraction: float) -> tuple[Any, ...]:
            wanted = check_fraction(
                "optimizer offload fraction", offload_fraction if fraction is None else fraction
            )
            return _split(self, wanted, original)

        return _get_sub_optimizer_param_groups

    return replace(
        HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", ("self", "offload_fraction"), build
    )


def _split(optimizer: Any, fraction: float, original: Callable[[Any, float], tuple[Any, ...]]) -> Any:
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
