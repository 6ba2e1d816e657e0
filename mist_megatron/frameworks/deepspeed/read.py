"""What a hand-written DeepSpeed configuration says: what acts, what is rejected, what is silently ignored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.frameworks.deepspeed.patches import OF_TARGET, PATCH_OF, Patch
from mist_megatron.frameworks.deepspeed.schema import UNMODELLED, DeepSpeedSchema
from mist_megatron.frameworks.deepspeed.values import ON_WORDS, short, unpriced_keys, wrong_values
from mist_megatron.frameworks.findings import Finding
from mist_megatron.spec.plan import Plan

Config = dict[str, Any]

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
HPZ_KEY = "zero_hpz_partition_size"
OWN_KEYS = frozenset({"_mist", "_comment", "comment"})
"""Passed over by every reader and meant to be."""
_NUMERIC_TEXT = re.compile(r"[-+]?\d[\d_]*(\.\d*)?([eE][-+]?\d+)?")
_STAGE3_KEYS = frozenset(
    {
        "sub_group_size",
        HPZ_KEY,
        "zero_quantized_weights",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
    }
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A configuration in today's spelling, and what was said about the old one."""

    config: Config
    findings: tuple[Finding, ...]

    @property
    def zero(self) -> Mapping[str, object]:
        section = self.config.get("zero_optimization")
        return section if isinstance(section, dict) else {}

    @property
    def stage(self) -> int:
        level = self.zero.get("stage", 0)
        return level if isinstance(level, int) else 0

    @property
    def ratio(self) -> float:
        """Part of the optimizer that `offload_optimizer` asks to move; all of it where it does not say."""
        section = self.zero.get("offload_optimizer")
        share = section.get("ratio", 1.0) if isinstance(section, dict) else 1.0
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
            return 1.0
        return float(share)

    @property
    def hpz_size(self) -> int | None:
        """Ranks that share out a second copy of the weights, where they do."""
        size = self.zero.get(HPZ_KEY)
        return size if isinstance(size, int) and size > 1 and self.stage == 3 else None

    @property
    def wide_grads(self) -> bool:
        """Whether gradients add up in 4 bytes beside 2-byte weights."""
        types = self.config.get("data_types")
        return isinstance(types, dict) and types.get("grad_accum_dtype") == "fp32"

    def moves(self, section: str) -> bool:
        """Whether `offload_optimizer` or `offload_param` moves anything."""
        value = self.zero.get(section)
        device = value.get("device", "none") if isinstance(value, dict) else "none"
        return isinstance(device, str) and device in {"cpu", "nvme"}


def read_config(raw: Config, schema: DeepSpeedSchema) -> Reading:
    """Bring a configuration to today's spelling and list everything that would not act as written."""
    findings: list[Finding] = []
    config = _numbers(raw, "", findings)
    _respell_top(config, findings)
    _respell_zero(config, findings)
    _respell_names(config, findings, schema)
    findings += _unknown(config, schema)
    wrong = wrong_values(config, schema)
    findings += (Finding(level="rejected", key=key, message=message) for key, message in wrong)
    findings += _optimizer(config, schema)
    findings += _without_effect(config)
    findings += _clipping(config, schema)
    unpriced = unpriced_keys(config)
    findings += (Finding(level="unpriced", key=key, message=message) for key, message in unpriced)
    return Reading(config=config, findings=tuple(findings))


def _numbers(value: Any, path: str, findings: list[Finding]) -> Any:
    """Numbers written as text, which DeepSpeed's batch keys take as text and fail on."""
    if isinstance(value, dict):
        return {k: _numbers(v, f"{path}.{k}" if path else k, findings) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v, path, findings) for v in value]
    if isinstance(value, str) and _NUMERIC_TEXT.fullmatch(value.strip()):
        number = float(value.strip().replace("_", ""))
        said = "a number written as text"
        findings.append(Finding(level="rejected" if path in BATCH_KEYS else "note", key=path, message=said))
        value = int(number) if number.is_integer() else number
    if isinstance(value, float) and value.is_integer() and _counts(path):
        value = int(value)
    return value


def _counts(path: str) -> bool:
    """Keys whose values are counts; a rate or a ratio stays a float."""
    return path in BATCH_KEYS or path.endswith(("_size", "_parameters", "_distance", "_threshold", "_steps"))


def _respell_top(config: Config, findings: list[Finding]) -> None:
    if "bfloat16" in config:
        findings.append(Finding(level="note", key="bfloat16", message="old spelling of bf16"))
        config.setdefault("bf16", config.pop("bfloat16"))
    if isinstance(config.get("zero_optimization"), bool):
        stage = int(config["zero_optimization"])
        findings.append(
            Finding(level="note", key="zero_optimization", message=f"old switch; means stage {stage} now")
        )
        config["zero_optimization"] = {"stage": stage}


def _respell_zero(config: Config, findings: list[Finding]) -> None:
    """cpu_offload and its relatives, which DeepSpeed still takes with a warning or has dropped."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for old, new in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_params", "offload_param"),
        ("cpu_offload_param", "offload_param"),
    ):
        if old not in zero:
            continue
        wanted = zero.pop(old)
        findings.append(
            Finding(
                level="note", key=f"zero_optimization.{old}", message=f"deprecated; now {new}.device: cpu"
            )
        )
        if wanted and new not in zero:
            zero[new] = {"device": "cpu", "pin_memory": bool(pinned)}
    if "stage3_gather_fp16_weights_on_model_save" in zero:
        old = "stage3_gather_fp16_weights_on_model_save"
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", zero.pop(old))
        findings.append(
            Finding(level="note", key=f"zero_optimization.{old}", message="deprecated; now ..._16bit_...")
        )
    if zero.get("sub_group_size") == 0:
        message = "0 makes every parameter a group of its own: many small optimizer steps"
        findings.append(Finding(level="note", key="zero_optimization.sub_group_size", message=message))


def _respell_names(config: Config, findings: list[Finding], schema: DeepSpeedSchema) -> None:
    """Second names that DeepSpeed takes as well: max_live_parameters for stage3_max_live_parameters."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    for key in list(zero):
        usual = schema.usual_key("zero_optimization", key)
        if usual == key:
            continue
        path = f"zero_optimization.{key}"
        if usual in zero:
            findings.append(Finding(level="rejected", key=path, message=f"{usual} says it too"))
        else:
            findings.append(Finding(level="note", key=path, message=f"taken; its usual name is {usual}"))
            zero[usual] = zero.pop(key)


def _optimizer(config: Config, schema: DeepSpeedSchema) -> Iterator[Finding]:
    """What the engine refuses to build (engine.py:2017, 2480)."""
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else None
    if isinstance(name, str) and not {name, name.lower()} & schema.optimizers and name != "auto":
        message = (
            f"{name[:40]} is neither DeepSpeed {schema.version}'s nor torch.optim's: refused at the start"
        )
        yield Finding(level="rejected", key="optimizer.type", message=message)
    params = section.get("params") if isinstance(section, dict) else None
    if isinstance(params, dict) and "max_grad_norm" in params:
        message = "refused as a parameter of an optimizer; use gradient_clipping"
        yield Finding(level="rejected", key="optimizer.params.max_grad_norm", message=message)


def _unknown(config: Config, schema: DeepSpeedSchema) -> Iterator[Finding]:
    for key, value in config.items():
        if key in schema.removed:
            message = f"removed from DeepSpeed {schema.version}, rejected even when switched off"
            yield Finding(level="rejected", key=key, message=message)
        elif key not in schema.top_level and key not in OWN_KEYS and not key.startswith("_"):
            yield Finding(level="ignored", key=key, message="no such key: DeepSpeed does not look at it")
        known = UNMODELLED.get(key)
        if known is not None and isinstance(value, dict):
            for inner in (name for name in value if name not in known):
                yield Finding(level="ignored", key=f"{key}.{inner}", message="DeepSpeed never reads it")
    for name, known_keys in schema.sections.items():
        section: object = config
        for part in name.split("."):
            section = section.get(part) if isinstance(section, dict) else None
        for inner in section if isinstance(section, dict) else ():
            removed = name == "zero_optimization" and inner in schema.removed_zero
            if inner not in known_keys or removed:
                why = "removed it" if removed else "has no such key"
                message = f"DeepSpeed {schema.version} {why} and rejects it"
                yield Finding(level="rejected", key=f"{name}.{inner}", message=message)


def _without_effect(config: Config) -> Iterator[Finding]:
    """Combinations that DeepSpeed takes and does nothing, or something else, with."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    reading = Reading(config=config, findings=())
    stage, path = reading.stage, "zero_optimization"
    if zero.get("stage") == "auto":
        yield Finding(
            level="ignored", key=f"{path}.stage", message='"auto" is dropped here: it means stage 0'
        )
    if stage < 3:
        for key in zero:
            default = zero[key] in (False, 1, "auto")
            if (key.startswith("stage3_") or key in _STAGE3_KEYS) and not default:
                yield Finding(
                    level="ignored", key=f"{path}.{key}", message=f"acts at stage 3; this is {stage}"
                )
        if reading.moves("offload_param"):
            message = f"acts at stage 3; at stage {stage} weights stay on the GPU"
            yield Finding(level="ignored", key=f"{path}.offload_param", message=message)
    optimizer = zero.get("offload_optimizer")
    optimizer = optimizer if isinstance(optimizer, dict) else {}
    ratio = optimizer.get("ratio", 1.0)
    if stage in {1, 2} and optimizer.get("device") == "nvme":
        message = f"at stage {stage} nvme means plain CPU memory (stage_1_and_2.py:186)"
        yield Finding(level="ignored", key=f"{path}.offload_optimizer.device", message=message)
    if stage == 0 and reading.moves("offload_optimizer"):
        message = "needs stage 1 or above: DeepSpeedCPUAdam refuses GPU parameters"
        yield Finding(level="rejected", key=f"{path}.offload_optimizer", message=message)
    if isinstance(ratio, (int, float)) and ratio < 1:
        yield _ratio(ratio, stage, reading.moves("offload_optimizer"))
    if "activation_checkpointing" in config:
        message = (
            "acts only where the script calls deepspeed.checkpointing.configure(); the engine never does"
        )
        yield Finding(level="ignored", key="activation_checkpointing", message=message)
    yield from _precision(config)


def _ratio(ratio: float, stage: int, moving: bool) -> Finding:
    key = "zero_optimization.offload_optimizer.ratio"
    if stage != 3:
        return Finding(level="rejected", key=key, message=f"{ratio} needs stage 3; this is stage {stage}")
    if not moving:
        return Finding(level="ignored", key=key, message="no device to offload to")
    message = (
        "counts sub-groups, not bytes; the GPU share keeps the first learning rate and is not checkpointed "
        "(stage3.py:1049, 308)"
    )
    return Finding(level="note", key=key, message=message)


def _precision(config: Config) -> Iterator[Finding]:
    def enabled(key: str) -> bool:
        section = config.get(key)
        return isinstance(section, dict) and section.get("enabled") is True

    if enabled("bf16") and enabled("fp16"):
        yield Finding(level="rejected", key="bf16", message="bf16 and fp16 are both enabled")
    yield from _narrow_states(config)
    width = config.get("communication_data_type")
    if width is not None and width not in ("fp16", "bf16", "fp32"):
        message = f"got {short(width)}, wanted fp16, bf16 or fp32"
        yield Finding(level="rejected", key="communication_data_type", message=message)
    for key in BATCH_KEYS:
        value = config.get(key)
        if value not in (None, "auto") and (isinstance(value, bool) or not _is_count(value)):
            message = f"got {short(value)}, wanted a whole number above 0"
            yield Finding(level="rejected", key=key, message=message)
    for path in SECTIONS:
        section: object = config
        for part in path.split("."):
            section = section.get(part) if isinstance(section, dict) else None
        if section is not None and not isinstance(section, dict):
            message = f"got {short(section)}, wanted a section: {{...}}"
            yield Finding(level="rejected", key=path, message=message)


def _narrow_states(config: Config) -> Iterator[Finding]:
    """Master weights and states of 2 bytes need what runtime/config.py:_do_error_check asserts."""
    stage = Reading(config=config, findings=()).stage

    def on(section: str, key: str) -> bool:
        told = config.get(section)
        value = told.get(key) if isinstance(told, dict) else None
        return value in (1, True) or (isinstance(value, str) and value.lower() in ON_WORDS)

    for section, key in (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    ):
        if on(section, key) and stage == 0:
            yield Finding(level="rejected", key=f"{section}.{key}", message="needs ZeRO stage 1, 2 or 3")
    if on("bf16", "bf16_optimizer_states") and not on("bf16", "bf16_master_weights_and_grads"):
        message = "needs bf16_master_weights_and_grads"
        yield Finding(level="rejected", key="bf16.bf16_optimizer_states", message=message)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1


SECTIONS = (
    *("zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
    *("optimizer", "optimizer.params", "scheduler", "bf16", "fp16", "data_types"),
)
"""What DeepSpeed reads as a mapping, and stops at where it is none."""


def _clipping(config: Config, schema: DeepSpeedSchema) -> Iterator[Finding]:
    if "gradient_clipping" not in config:
        default = f"DeepSpeed {schema.version} clips at {schema.gradient_clipping:g}"
        message = f"not said: {default}, versions before 0.19 did not clip"
        yield Finding(level="note", key="gradient_clipping", message=message)


def filled_in(config: Config, document: Mapping[str, Any]) -> Config:
    """An emitted configuration with what it leaves to the trainer as stages.json beside it says it."""
    if len(document["stages"]) != 1:
        raise InputError(f"stages.json beside it has {len(document['stages'])} stages; wanted one")
    (stage,) = document["stages"]
    told = (None, stage["micro_batch"], document["micro_batches"])
    filled = {key: n for key, n in zip(BATCH_KEYS, told, strict=True) if n and config.get(key) == "auto"}
    return {**config, **filled}


def patch_findings(reading: Reading, document: Mapping[str, Any]) -> Iterator[Finding]:
    """Where a configuration was changed so that a patch which stages.json names refuses it."""
    named = document.get("patches", ())
    key = "zero_optimization.offload_optimizer"
    if Patch.OPTIMIZER_FRACTION in named and not reading.moves("offload_optimizer"):
        message = f"the patch {Patch.OPTIMIZER_FRACTION} of stages.json needs it, with device cpu"
        yield Finding(level="rejected", key=key, message=message)
    if Patch.WEIGHT_FRACTION in named and reading.stage == 3 and reading.moves("offload_param"):
        message = f"the patch {Patch.WEIGHT_FRACTION} of stages.json moves weights itself and refuses this"
        yield Finding(level="rejected", key="zero_optimization.offload_param", message=message)


def with_patches(plan: Plan, reading: Reading, document: Mapping[str, Any], where: str) -> Plan:
    """Add what stages.json says and no JSON of DeepSpeed: fractions, recomputed layers, decoupled steps."""
    told = document.get("stages")
    if not isinstance(told, list) or len(told) != 1 or document.get("world_size") != plan.gpus:
        raise InputError(
            f"{where}: stages.json beside it is for {document.get('world_size')} GPUs; wanted one stage of "
            f"{plan.gpus}",
            details=("try: emit the plan again",),
        )
    (said,), (stage,), named = told, plan.stages, frozenset(document.get("patches", ()))
    asked = {kind: said["offload"][kind] for kind, patch in PATCH_OF.items() if patch in named}
    wide = reading.wide_grads
    own_grads = 0.0 if wide and stage.zero == 2 else stage.offload.grads
    offload = replace(stage.offload, **{"grads": own_grads, **asked})
    execution = replace(
        plan.execution,
        grad_bytes=4 if wide else None,
        decoupled_step=True if Patch.DECOUPLED_STEPS in named else None,
    )
    return replace(
        plan,
        target="deepspeed+patches" if named & OF_TARGET else plan.target,
        execution=execution,
        stages=(replace(stage, offload=offload, ckpt=max(stage.ckpt, said["recompute_layers"])),),
    )
