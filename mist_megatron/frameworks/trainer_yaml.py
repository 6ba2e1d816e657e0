"""The part of a trainer's YAML that is about DeepSpeed: Accelerate, LLaMA-Factory, axolotl, Trainer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.frameworks.findings import Finding

_ACCELERATE_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Keys of Accelerate's `deepspeed_config` -> those of the JSON that it makes of them (DeepSpeedPlugin)."""
_TRAINERS = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


@dataclass(frozen=True, kw_only=True)
class NamedConfig:
    """What a trainer's file says of DeepSpeed: the name of a JSON or its content, and what fills it."""

    path: str | None
    config: Mapping[str, Any]
    fills: Mapping[str, Any]
    """Key of the JSON -> the trainer's value."""


def named_config(document: Mapping[str, Any], where: str) -> NamedConfig:
    """The DeepSpeed part of a trainer's YAML or JSON; refused with the reason where there is none."""
    section = document.get("deepspeed_config")
    if isinstance(section, Mapping):
        return _accelerate(document, section)
    named = document.get("deepspeed")
    fills = {key: document[name] for name, key in _TRAINERS.items() if isinstance(document.get(name), int)}
    if isinstance(named, str) and named:
        return NamedConfig(path=named, config={}, fills=fills)
    if isinstance(named, Mapping):
        return NamedConfig(path=None, config=named, fills=fills)
    raise InputError(f"{where}: {_reason(document)}", details=("try: lint the launch script or the JSON",))


def _accelerate(document: Mapping[str, Any], section: Mapping[str, Any]) -> NamedConfig:
    named = section.get("deepspeed_config_file")
    if isinstance(named, str) and named:
        return NamedConfig(path=named, config={}, fills={})
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto"}
    for name, path in _ACCELERATE_KEYS.items():
        if name in section and not (name.endswith("_path") and section[name] in (None, "none")):
            inner = config
            *parents, last = path.split(".")
            for part in parents:
                inner = inner.setdefault(part, {})
            inner[last] = section[name]
    precision = document.get("mixed_precision")
    if precision in ("bf16", "fp16"):
        config[precision] = {"enabled": True}
    return NamedConfig(path=None, config=config, fills={})


def _reason(document: Mapping[str, Any]) -> str:
    """Why nothing here can be read, as far as the keys tell."""
    if "fsdp_config" in document or document.get("distributed_type") == "FSDP" or document.get("fsdp"):
        return "it trains with FSDP, which is no target here"
    if isinstance(document.get("model"), Mapping) and isinstance(document.get("trainer"), Mapping):
        return "a NeMo configuration of another model than Megatron's GPT"
    if isinstance(document.get("policy"), Mapping):
        return "reinforcement learning, whose steps are not priced"
    if "recipe" in document and "step_scheduler" in document:
        return "NeMo AutoModel trains with FSDP2, which is no target here"
    if "apiVersion" in document and "kind" in document:
        return "a job of Kubernetes; the script that it starts can be read"
    if "schema" in document and "stages" in document and "training" in document:
        return "a plan, which predict prices and emit writes files for"
    if "megatron_lm_config" in document:
        return "Accelerate's section for Megatron-LM is not read"
    if any(key in document for key in ("base_model", "model_name_or_path", "finetuning_type")):
        return "a trainer's configuration that names no DeepSpeed JSON under `deepspeed`"
    return "a mapping without a DeepSpeed configuration under `deepspeed` or `deepspeed_config`"


def adapter_findings(document: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Training of a part of the weights, or of quantized ones, which is not priced."""
    signs = {
        "finetuning_type": ("lora", "oft", "freeze"),
        "adapter": ("lora", "qlora"),
        "use_peft": (True,),
        "load_in_4bit": (True,),
        "load_in_8bit": (True,),
    }
    message = "only a part of the weights is trained, or quantized ones, which is not priced"
    return tuple(
        Finding(level="unpriced", key=key, message=message)
        for key, values in signs.items()
        if any(document.get(key) == value for value in values)
    )


def filled(config: Mapping[str, Any], fills: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON with what it leaves to the trainer as the trainer's file says it."""
    return {**config, **{key: value for key, value in fills.items() if config.get(key) == "auto"}}
