"""What keys of a DeepSpeed configuration do to a price, where no price here knows it. Pure.

The one home of that knowledge: `lint` gives no number where such a key acts, and names it. Every section that
DeepSpeed knows is either in one of these tables, or a test says why not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

UNPRICED: Mapping[str, tuple[str, frozenset[object]]] = {
    "tensor_parallel.autotp_size": ("AutoTP splits layers over GPUs", frozenset({0, 1})),
    "sequence_parallel_size": ("Ulysses splits sequences over GPUs", frozenset({1})),
    "zero_optimization.zero_hpz_partition_size": ("hpZ keeps a second copy of weights", frozenset({0, 1})),
    "zero_optimization.zero_quantized_weights": ("gathers fewer bytes and casts them", frozenset({False})),
    "zero_optimization.zero_quantized_nontrainable_weights": ("gathers fewer bytes", frozenset({False})),
    "zero_optimization.zero_quantized_gradients": ("reduces fewer bytes and casts them", frozenset({False})),
    "zero_optimization.zenflow": ("ZenFlow updates in another order", frozenset()),
    "zero_optimization.offload_optimizer.super_offload": ("SuperOffload steps otherwise", frozenset({False})),
    "compile.deepcompile": ("DeepCompile orders gathers and offload anew", frozenset({False})),
    "bf16.bf16_master_weights_and_grads": ("states of another size", frozenset({False})),
    "bf16.bf16_optimizer_states": ("states of another size", frozenset({False})),
    "bf16.immediate_grad_update": ("gradients live shorter", frozenset({False})),
    "fp16.fp16_master_weights_and_grads": ("states of another size", frozenset({False})),
    "torch_autocast.enabled": ("keeps weights in 4 bytes and casts them", frozenset({False})),
    "hybrid_engine.enabled": ("generates text between steps", frozenset({False})),
    "data_efficiency.enabled": ("drops tokens or shortens sequences on the way", frozenset({False})),
    "weight_quantization": ("weights of another size", frozenset()),
    "expert_parallel": ("experts are not priced", frozenset()),
    "communication_data_type": ("reduces another width than the weights'", frozenset({None})),
    "memory_breakdown": ("stops to measure in every step", frozenset({False})),
    "wall_clock_breakdown": ("waits for the GPU at each timer", frozenset({False})),
}
"""Key -> what it does, and the values with which it does nothing of the kind."""

PRICED_OPTIMIZERS = frozenset({"adam", "adamw"})
"""States of 8 bytes for each parameter and one fused pass."""


def unpriced_keys(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Key and reason for everything that acts and is not priced."""
    for path, (why, harmless) in UNPRICED.items():
        value = _at(config, path)
        if value is None or value == "auto" or value in ({}, []):
            continue
        if isinstance(value, (dict, list)) or value not in harmless:
            yield path, f"{why}, which is not priced"
    optimizer = _at(config, "optimizer.type")
    if isinstance(optimizer, str) and optimizer != "auto" and optimizer.lower() not in PRICED_OPTIMIZERS:
        yield (
            "optimizer.type",
            f"{optimizer[:40]} has states of another size, or another pass; Adam is priced",
        )


def _at(config: Mapping[str, object], path: str) -> object:
    value: object = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
