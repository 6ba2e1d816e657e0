"""The command line of a Hugging Face trainer, whose flags are the keys of its YAML. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mist_megatron.frameworks.megatron.command import OPEN_VALUE, CommandLine

_SIGNS = frozenset({"per_device_train_batch_size", "model_name_or_path", "output_dir"})
"""Flags of TrainingArguments and of the scripts around it; Megatron-DeepSpeed has none of them."""
_NAMERS = frozenset({"deepspeed", "config_file"})
"""Flags that name the JSON, or Accelerate's file."""


def trainer_document(command: CommandLine) -> dict[str, Any] | None:
    """What the flags say, as the mapping of a trainer's YAML; None where no trainer is started. Values that
    the script leaves open are left out."""
    flags = {
        name.replace("-", "_"): values for name, values in {**command.launcher, **command.options}.items()
    }
    if not _SIGNS & flags.keys() or not any(flags.get(name) for name in _NAMERS):
        return None
    said = {name: _value(values) for name, values in flags.items()}
    return {name: value for name, value in said.items() if value is not None}


def _value(values: tuple[str, ...]) -> Any:
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


def processes(document: Mapping[str, Any]) -> int | None:
    """How many a launcher starts, by torchrun's flags, DeepSpeed's or Accelerate's."""
    whole = document.get("num_processes")
    if isinstance(whole, int) and whole > 0:
        return whole
    each = document.get("nproc_per_node", document.get("num_gpus"))
    nodes = document.get("nnodes", document.get("num_nodes", 1))
    if type(each) is int and type(nodes) is int and each > 0 and nodes > 0:
        return each * nodes
    return None
