"""Forks of Megatron whose command lines differ: how they are known, and which flags are theirs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.frameworks.findings import Finding
from mist_megatron.frameworks.megatron.command import Options
from mist_megatron.frameworks.megatron.reader import Reader

_SWITCH = "deepspeed"
"""The flag that hands training to DeepSpeed."""
_DEEPSPEED_SIGNS = frozenset(
    {
        *(_SWITCH, "deepspeed_config", "deepspeed-config", "zero-stage", "no-pipeline-parallel"),
        *("deepspeed-activation-checkpointing", "ds-sequence-parallel-size", "deepscale", "deepscale_config"),
    }
)


def is_megatron_deepspeed(options: Options) -> bool:
    """Whether a command line is written for Megatron-DeepSpeed."""
    return not _DEEPSPEED_SIGNS.isdisjoint(options)


def deepspeed_findings(read: Reader, unknown: tuple[str, ...], version: str) -> Iterator[Finding]:
    """What is certain about a Megatron-DeepSpeed command line."""
    options = read.options
    first = next(name for name in options if name in _DEEPSPEED_SIGNS)
    yield Finding(
        level="unpriced",
        key=f"--{first}",
        message="Megatron-DeepSpeed is not priced from its flags; lint its JSON with --model and --gpus",
    )
    if _SWITCH not in options and _SWITCH not in read.maybe:
        yield Finding(
            level="ignored", key=f"--{first}", message="acts only with --deepspeed, which is not there"
        )
    if unknown:
        shown = ", ".join(f"--{name}" for name in unknown[:8])
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        yield Finding(
            level="note",
            key="flags of the fork",
            message=f"not in Megatron-LM {version} and not judged here: {shown}{more}",
        )
    stage, stages = read.number("zero-stage", 0), read.number("pipeline-model-parallel-size", 1)
    if (stage or 0) >= 2 and (stages or 1) > 1 and not read.has("no-pipeline-parallel"):
        yield Finding(
            level="rejected",
            key="--zero-stage",
            message=f"{stage} with {stages} pipeline stages: ZeRO-2 and ZeRO-3 are incompatible with "
            "pipeline parallelism (runtime/pipe/engine.py:77)",
        )


def underscore_finding(options: Options) -> Finding:
    """Flags with underscores: Megatron-LLM and its relatives take them, Megatron-LM knows only dashes."""
    first = next((name for name in options if "-" in name), "num-layers")
    return Finding(
        level="rejected",
        key=f"--{first.replace('-', '_')}",
        message=f"flags with underscores are those of Megatron-LLM; Megatron-LM has --{first}, as read here",
    )
