"""Which configuration keys a version of DeepSpeed knows: probed where it is installed, else shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mist_megatron.errors import EmitError

UNMODELLED: Mapping[str, frozenset[str]] = {
    "activation_checkpointing": frozenset(
        {
            "partition_activations",
            "number_checkpoints",
            "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
            "profile",
            "cpu_checkpointing",
        }
    ),
    "pipeline": frozenset(
        {
            "seed_layers",
            "activation_checkpoint_interval",
            "pipe_partitioned",
            "grad_partitioned",
            "use_reentrant",
        }
    ),
    "optimizer": frozenset({"type", "params", "max_grad_norm", "legacy_fusion"}),
    "scheduler": frozenset({"type", "params"}),
    "data_types": frozenset({"grad_accum_dtype"}),
}
"""Sections that DeepSpeed reads key by key and never checks (runtime/activation_checkpointing/config.py:57,
runtime/config.py:428): whatever else stands in them is ignored without a word. `pipeline.stages` and
`pipeline.partition` are not here because nothing reads them."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSchema:
    """What one version accepts; the printed form is that of launch/probe_deepspeed.py."""

    version: str
    top_level: frozenset[str]
    removed: frozenset[str]
    """Top-level keys that this version rejects by name, even when they are switched off."""
    removed_zero: frozenset[str]
    gradient_clipping: float
    """Default, which changed from 0 to 1 between versions."""
    sections: Mapping[str, Mapping[str, object]]
    """Section -> key -> default, for the sections whose unknown keys are rejected."""
    optimizers: frozenset[str]
    """Types that the engine can build: its own in small letters, those of torch.optim as they are written."""

    def usual_key(self, section: str, key: str) -> str:
        """The spelling of the documentation, for keys that this version takes under a second name."""
        usual = f"stage3_{key}"
        return usual if key in self.sections[section] and usual in self.sections[section] else key


def schema_from_text(text: str) -> DeepSpeedSchema:
    """Read what the probe printed."""
    try:
        document = json.loads(text)
        return DeepSpeedSchema(
            version=document["version"],
            top_level=frozenset(document["top_level"]),
            removed=frozenset(document["removed"]),
            removed_zero=frozenset(document["removed_zero"]),
            gradient_clipping=float(document["gradient_clipping"]),
            sections=document["sections"],
            optimizers=frozenset(document["optimizers"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise EmitError(f"the schema of the installed DeepSpeed cannot be read: {error}") from None
