"""What of a DeepSpeed configuration says more than its keys. Pure.

Values that DeepSpeed refuses to start with: the type of a key is that of its default in the schema, as
pydantic takes it (texts such as "on" for switches, 5e8 for counts). And what keys do to a price, where no
price here knows it, which has its one home here: `lint` gives no number where such a key acts, and names it.
Every section that DeepSpeed knows is either in one of these tables, or a test says why not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema

_CHOICES: Mapping[str, tuple[object, ...]] = {"stage": (0, 1, 2, 3), "device": ("none", "cpu", "nvme")}
"""ZeroStageEnum of runtime/zero/config.py, OffloadDeviceEnum of runtime/zero/offload_config.py."""
_SWITCHES = frozenset({"overlap_comm"})
"""Switches whose default depends on the stage, so that the schema has none."""
_SHARES = frozenset({"ratio", "cpuadam_cores_perc"})
ON_WORDS = frozenset({"on", "t", "y", "true", "yes"})
_SWITCH_WORDS = ON_WORDS | {"off", "f", "n", "false", "no"}
_MOST = 1 << 63
"""Counts are 64-bit integers."""
_LEAST: Mapping[str, int] = {
    "max_out_tokens": 1,
    "reduce_bucket_size": 1,
    "stage3_module_granularity_threshold": -_MOST,
}
"""Bounds in runtime/zero/config.py other than 0; the second has none."""
_NO_SWITCH = frozenset({"fp16.loss_scale_window", "fp16.min_loss_scale"})
"""Counts for which true is refused; elsewhere pydantic takes it for 1."""


def short(value: object) -> str:
    """A value as a message can show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def wrong_values(config: Mapping[str, object], schema: DeepSpeedSchema) -> Iterator[tuple[str, str]]:
    """Key and message; what the trainer fills in ("auto") is nobody's to judge."""
    for name, defaults in schema.sections.items():
        section: object = config
        for part in name.split("."):
            section = section.get(part) if isinstance(section, Mapping) else None
        for key, value in section.items() if isinstance(section, Mapping) else ():
            judged = key in defaults and value != "auto" and (value is not None or key not in _SWITCHES)
            wanted = _wanted(f"{name}.{key}", defaults[key]) if judged else None
            if wanted is not None and not _taken(f"{name}.{key}", value, wanted):
                yield f"{name}.{key}", f"got {short(value)}, wanted {wanted}"
    yield from _loss_scale(config.get("fp16"))


def _loss_scale(section: object) -> Iterator[tuple[str, str]]:
    """Two counts that must be above 0 while the scale is dynamic (runtime/precision_config.py:189)."""
    if not isinstance(section, Mapping) or section.get("enabled") is not True or section.get("loss_scale"):
        return
    for key in ("loss_scale_window", "min_loss_scale"):
        value = section.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
            yield f"fp16.{key}", f"got {value}, wanted a whole number above 0 while loss_scale is 0"


def _wanted(path: str, default: object) -> str | None:
    key = path.rpartition(".")[2]
    if key in _CHOICES:
        *first, last = map(str, _CHOICES[key])
        return f"{', '.join(first)} or {last}"
    if key in _SHARES:
        return "a number from 0 to 1"
    if path == "fp16.loss_scale":
        return "a number from 0"
    if isinstance(default, bool) or key in _SWITCHES:
        return "true or false"
    if not isinstance(default, int):
        return None
    least = _least(path)
    return "a whole number" if least < 0 else f"a whole number from {least}"


def _least(path: str) -> int:
    """Sections other than ZeRO's have no bound, but for what is listed."""
    section, _, key = path.rpartition(".")
    bounded = section.startswith("zero_optimization") and section != "zero_optimization.zenflow"
    return _LEAST.get(key, 0 if bounded else -_MOST)


def _taken(path: str, value: object, wanted: str) -> bool:
    key = path.rpartition(".")[2]
    if wanted == "true or false":
        if isinstance(value, str):
            return value.lower() in _SWITCH_WORDS
        return isinstance(value, (int, float)) and value in (0, 1)
    if key == "device":
        return value in _CHOICES[key]
    if not isinstance(value, (int, float)):
        return False
    if key in _CHOICES:
        return value in _CHOICES[key]
    if key in _SHARES:
        return 0.0 <= value <= 1.0
    if path == "fp16.loss_scale":
        return not isinstance(value, bool) and 0.0 <= value < float("inf")
    if path in _NO_SWITCH and isinstance(value, bool):
        return False
    return _least(path) <= value < _MOST and float(value).is_integer()


UNPRICED: Mapping[str, tuple[str, frozenset[object]]] = {
    "tensor_parallel.autotp_size": ("AutoTP splits layers over GPUs", frozenset({0, 1})),
    "sequence_parallel_size": ("Ulysses splits sequences over GPUs", frozenset({1})),
    "zero_optimization.mics_shard_size": (
        "MiCS, which DeepSpeed 0.19.8 has no more, shares states out in groups of replicas",
        frozenset({-1, 0}),
    ),
    "zero_optimization.zero_quantized_weights": ("gathers fewer bytes and casts them", frozenset({False})),
    "zero_optimization.zero_quantized_nontrainable_weights": ("gathers fewer bytes", frozenset({False})),
    "zero_optimization.zero_quantized_gradients": ("reduces fewer bytes and casts them", frozenset({False})),
    "zero_optimization.zenflow": ("ZenFlow updates in another order", frozenset()),
    "zero_optimization.offload_optimizer.super_offload": (
        "SuperOffload steps on the host during the backward pass without gradient_clipping, and with it only"
        " once the norm is known, as without SuperOffload; a process of its own holds the states",
        frozenset({False}),
    ),
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
