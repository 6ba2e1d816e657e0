"""The argument arrays beside an emitted DeepSpeed JSON, read again: they must agree with the plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from mist_megatron.frameworks.deepspeed.write import (
    huggingface_flags,
    megatron_deepspeed_flags,
    pipeline_flags,
)
from mist_megatron.frameworks.findings import Finding
from mist_megatron.frameworks.flags import Flags, arguments
from mist_megatron.frameworks.megatron.command import Options, options_of
from mist_megatron.spec.plan import Plan

DEEPSPEED_ARRAYS = ("HUGGINGFACE_ARGS", "MEGATRON_DEEPSPEED_ARGS", "PIPELINE_ARGS")
"""Names in args.sh of an emitted DeepSpeed plan."""


def argument_findings(plan: Plan, told: Mapping[str, Options | None]) -> tuple[Finding, ...]:
    """Flags that say another thing than the plan, or are missing; what users add is theirs."""
    wanted: Mapping[str, Flags] = {
        "HUGGINGFACE_ARGS": huggingface_flags(plan),
        "MEGATRON_DEEPSPEED_ARGS": megatron_deepspeed_flags(plan),
        "PIPELINE_ARGS": pipeline_flags(plan),
    }
    findings = []
    for array, flags in wanted.items():
        said = told.get(array)
        if said is None:
            continue
        for flag, values in options_of(list(arguments(flags))).items():
            if said.get(flag) == values:
                continue
            got = f"{' '.join(said[flag]) or 'on'} in" if flag in said else "missing in"
            message = f"{got} {array}; the plan says {' '.join(values) or 'on'}"
            findings.append(Finding(level="rejected", key=f"--{flag}", message=message))
    return tuple(findings)
