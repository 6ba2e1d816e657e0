"""The part of a trainer's YAML that is about DeepSpeed: Accelerate, LLaMA-Factory, axolotl, Trainer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.frameworks.findings import Finding
from mist_megatron.frameworks.megatron.command import OPEN_VALUE, CommandLine
from mist_megatron.spec.adapter import PLACES

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
_AUTO = {"enabled": "auto"}


@dataclass(frozen=True, kw_only=True)
class NamedConfig:
    """What a trainer's file says of DeepSpeed: the name of a JSON or its content, and what fills it."""

    path: str | None
    config: Mapping[str, object]
    fills: Mapping[str, object]
    """Key of the JSON -> the trainer's value."""


def named_config(document: Mapping[str, object], where: str) -> NamedConfig:
    """The DeepSpeed part of a trainer's YAML or JSON; refused with the reason where there is none."""
    section = document.get("deepspeed_config")
    fills: dict[str, object] = {
        key: document[name] for name, key in _TRAINERS.items() if isinstance(document.get(name), int)
    }
    fills |= {key: {"enabled": True} for key in ("bf16", "fp16") if document.get(key) is True}
    if isinstance(section, Mapping):
        return _accelerate(document, section, fills)
    named = document.get("deepspeed")
    if isinstance(named, str) and named:
        return NamedConfig(path=named, config={}, fills=fills)
    if isinstance(named, Mapping):
        return NamedConfig(path=None, config=named, fills=fills)
    raise InputError(f"{where}: {_reason(document)}", details=("try: lint the launch script or the JSON",))


def _accelerate(
    document: Mapping[str, object], section: Mapping[str, object], fills: Mapping[str, object]
) -> NamedConfig:
    named = section.get("deepspeed_config_file")
    if isinstance(named, str) and named:
        return NamedConfig(path=named, config={}, fills=fills)
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
    return NamedConfig(path=None, config=config, fills=fills)


def _reason(document: Mapping[str, object]) -> str:
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


@dataclass(frozen=True, kw_only=True)
class TrainerJob:
    """What a trainer's file says of the job; None where it does not."""

    model: str | None
    """Name on the Hub, or a folder."""
    seq: int | None
    checkpointing: bool
    adapter: str | None
    """Rank and matrices of low-rank adapters, as `--lora` takes them."""


_MODELS = ("model_name_or_path", "base_model")
_LENGTHS = ("cutoff_len", "sequence_len", "max_seq_length", "max_length", "block_size", "model_max_length")


def is_llama_factory(document: Mapping[str, object]) -> bool:
    """Whether LLaMA-Factory reads it, whose defaults are LoRA and recomputation."""
    return "stage" in document and bool({"template", "cutoff_len", "finetuning_type"} & document.keys())


def trainer_job(document: Mapping[str, object]) -> TrainerJob:
    """Model, length, recomputation and adapters, by the keys of Trainer, TRL, LLaMA-Factory and axolotl."""
    names = (document.get(key) for key in _MODELS)
    lengths = (document.get(key) for key in _LENGTHS)
    off = is_llama_factory(document) and not document.get("disable_gradient_checkpointing")
    return TrainerJob(
        model=next((name for name in names if isinstance(name, str) and name), None),
        seq=next((length for length in lengths if type(length) is int and length > 0), None),
        checkpointing=bool(document.get("gradient_checkpointing", off)),
        adapter=_adapter(document),
    )


def _low_rank(document: Mapping[str, object]) -> bool:
    kind = document.get("finetuning_type", "lora" if is_llama_factory(document) else None)
    return kind == "lora" or document.get("adapter") == "lora" or document.get("use_peft") is True


def _adapter(document: Mapping[str, object]) -> str | None:
    """Defaults of a rank: LLaMA-Factory's FinetuningArguments, TRL's ModelConfig; axolotl has none."""
    if not _low_rank(document):
        return None
    usual = 8 if is_llama_factory(document) else 16 if document.get("use_peft") is True else None
    rank, places = document.get("lora_rank", document.get("lora_r", usual)), _places(document)
    if type(rank) is not int or places is None:
        return None
    return f"{rank}:{','.join(places)}" if places else f"{rank}"


def _places(document: Mapping[str, object]) -> tuple[str, ...] | None:
    """Matrices with an adapter, () for all; None where they are no LLaMA's or PEFT's choice."""
    if document.get("lora_target_linear") is True:
        return ()
    usual = "all" if is_llama_factory(document) else None
    said = document.get("lora_target", document.get("lora_target_modules", usual))
    names = said.split(",") if isinstance(said, str) else said if isinstance(said, list) else []
    named = [str(name).strip() for name in names]
    if named in (["all"], ["all-linear"]):
        return ()
    places = tuple(name.removesuffix("_proj") for name in named)
    known = all(name.endswith("_proj") and place in PLACES for name, place in zip(named, places, strict=True))
    return places if places and known else None


_QUANTIZED = ("load_in_4bit", "load_in_8bit", "quantization_bit")
_TRAINED_TOO = ("additional_target", "lora_modules_to_save", "modules_to_save")
_MORE = ("use_dora", "peft_use_dora", "lora_dropout")
ADAPTER_KEYS = frozenset({"lora_target_modules", *_MORE})
"""Findings that `--lora` answers."""


def adapter_findings(document: Mapping[str, object]) -> tuple[Finding, ...]:
    """What is not priced of training a part of the weights, or quantized ones."""
    said = {key: value for key, value in document.items() if value not in (None, False, 0, "", [], "none")}
    part = "only a part of the weights is trained, in a way that is not priced"
    found = {key: "quantized weights are not priced" for key in _QUANTIZED if key in said}
    if said.get("adapter") == "qlora":
        found["adapter"] = "quantized weights are not priced"
    for key, kinds in (
        ("finetuning_type", ("oft", "freeze", "galore")),
        ("adapter", ("oft", "llama-adapter")),
    ):
        if said.get(key) in kinds:
            found[key] = part
    if _low_rank(document):
        if _adapter(document) is None:
            wanted = "--lora 16:q,v says rank and matrices (q, k, v, o, gate, up, down)"
            found["lora_target_modules"] = (
                f"which matrices have adapters of which rank is not told here: {wanted}"
            )
        found |= {
            key: "whole matrices that are trained beside adapters are not priced"
            for key in _TRAINED_TOO
            if key in said
        }
        without = "not priced: each adapter keeps more for its backward pass; --lora asks without it"
        found |= {key: without for key in _MORE if key in said}
    return tuple(Finding(level="unpriced", key=key, message=message) for key, message in found.items())


def filled(config: Mapping[str, object], fills: Mapping[str, object]) -> dict[str, object]:
    """The JSON with what it leaves to the trainer as the trainer's file says it."""
    return {**config, **{key: value for key, value in fills.items() if config.get(key) in ("auto", _AUTO)}}


_SIGNS = frozenset({"per_device_train_batch_size", "model_name_or_path", "output_dir"})
"""Flags of TrainingArguments and of the scripts around it; Megatron-DeepSpeed has none of them."""
_NAMERS = frozenset({"deepspeed", "config_file"})
"""Flags that name the JSON, or Accelerate's file."""


def trainer_document(command: CommandLine) -> dict[str, object] | None:
    """What the flags say, as the mapping of a trainer's YAML; None where no trainer is started. Values that
    the script leaves open are left out."""
    flags = {
        name.replace("-", "_"): values for name, values in {**command.launcher, **command.options}.items()
    }
    if not _SIGNS & flags.keys() or not any(flags.get(name) for name in _NAMERS):
        return None
    said = {name: _value(values) for name, values in flags.items()}
    return {name: value for name, value in said.items() if value is not None}


def _value(values: tuple[str, ...]) -> object:
    """As argparse and HfArgumentParser read it: nothing is a switch that is on."""
    if any(OPEN_VALUE.search(value) for value in values):
        return None
    if len(values) != 1:
        return list(values) or True
    [text] = values
    known = {"true": True, "false": False}
    if text.lower() in known:
        return known[text.lower()]
    return int(text) if text.isascii() and text.isdecimal() else text


def processes(document: Mapping[str, object]) -> int | None:
    """How many a launcher starts, by torchrun's flags, DeepSpeed's or Accelerate's."""
    whole = document.get("num_processes")
    if isinstance(whole, int) and whole > 0:
        return whole
    each = document.get("nproc_per_node", document.get("num_gpus"))
    nodes = document.get("nnodes", document.get("num_nodes", 1))
    if type(each) is int and type(nodes) is int and each > 0 and nodes > 0:
        return each * nodes
    return None
