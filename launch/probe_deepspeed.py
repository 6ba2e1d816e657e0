"""Print, as JSON, which configuration keys the installed DeepSpeed knows, with their defaults.

Run by mist-megatron in a process of its own, so that the tuner never imports torch. What is printed is also
shipped for a named version (`deepspeed_schema.json`), for machines without DeepSpeed.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import io
import json
import os
import sys
from typing import ClassVar

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

SECTIONS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_optimizer": (
        "deepspeed.runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    "zero_optimization.offload_param": (
        "deepspeed.runtime.zero.offload_config",
        "DeepSpeedZeroOffloadParamConfig",
    ),
    "zero_optimization.zenflow": ("deepspeed.runtime.zenflow.zenflow_config", "ZenFlowConfig"),
    "zero_optimization.leaf_module": (
        "deepspeed.runtime.zero.leaf_module_config",
        "DeepSpeedZeroLeafModuleConfig",
    ),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
    "comms_logger": ("deepspeed.comm.config", "CommsLoggerConfig"),
    "tensorboard": ("deepspeed.monitor.config", "TensorBoardConfig"),
    "wandb": ("deepspeed.monitor.config", "WandbConfig"),
    "csv_monitor": ("deepspeed.monitor.config", "CSVConfig"),
    "comet": ("deepspeed.monitor.config", "CometConfig"),
    "tensor_parallel": ("deepspeed.runtime.tensor_parallel.config", "TPTrainingConfig"),
    "hybrid_engine": ("deepspeed.runtime.config", "HybridEngineConfig"),
}
READ_ELSEWHERE = frozenset(
    {
        *(
            "zero_optimization",
            "bf16",
            "bfloat16",
            "fp16",
            "optimizer",
            "scheduler",
            "activation_checkpointing",
        ),
        *(
            "autotuning",
            "aio",
            "hybrid_engine",
            "pipeline",
            "tensor_parallel",
            "data_efficiency",
            "checkpoint",
        ),
        *("sequence_parallel_size", "data_parallel_size", "weight_quantization", "flops_profiler"),
        *("tensorboard", "wandb", "csv_monitor", "comet"),
    }
)
"""Top-level keys read only under conditions, or outside DeepSpeedConfig (engine.py, __init__.py)."""


class Recorder(dict):
    """A configuration that remembers which of its keys were asked for; copies remember together."""

    asked: ClassVar[set[str]] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self):
        return self  # `x in config.keys()` is a question too


def plain(value: object) -> object:
    """A default as JSON; what JSON cannot say (a model, a sentinel) is its text."""
    if isinstance(value, enum.Enum):
        value = value.value
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def section(module: str, name: str) -> dict[str, object] | None:
    """Key -> default of one section, by every name that JSON files may use; None if this version lacks it."""
    try:
        model = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    fields = model.model_fields.items()
    by_name = {key: plain(field.default) for key, field in fields if field.alias}
    return {field.alias or key: plain(field.default) for key, field in fields} | by_name


def top_level() -> list[str]:
    """Keys that DeepSpeed's own parser looks up: it ignores all others without a word."""
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(Recorder(train_batch_size=1, bf16={"enabled": True}))
    return sorted({key for key in Recorder.asked if isinstance(key, str)} | READ_ELSEWHERE)


def optimizers() -> list[str]:
    """Types that the engine builds by itself: its own, in any case of letters, and those of torch.optim."""
    import torch
    from deepspeed.runtime import config

    theirs = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
    }
    return sorted(theirs | {name.lower() for name in config.DEEPSPEED_OPTIMIZERS})


def probe() -> dict[str, object]:
    import deepspeed
    from deepspeed.runtime import config, constants

    removed = sorted(getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ()))
    return {
        "version": deepspeed.__version__.partition("+")[0],
        "top_level": sorted(set(top_level()) - set(removed)),
        "removed": removed,
        "removed_zero": sorted(getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", ())),
        "optimizers": optimizers(),
        "gradient_clipping": constants.GRADIENT_CLIPPING_DEFAULT,
        "sections": {key: found for key, place in SECTIONS.items() if (found := section(*place)) is not None},
    }


def main() -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed logs to stdout on import
        found = probe()
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
