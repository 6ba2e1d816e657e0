"""`convert --target deepspeed+patches`: the search behind it, and the files that the patches read."""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.ask.emit import launch_sources
from mist_megatron.ask.tune import tune
from mist_megatron.cost.predict import job_of
from mist_megatron.errors import InputError
from mist_megatron.frameworks.deepspeed import convert as conversion
from mist_megatron.frameworks.deepspeed import write as deepspeed
from mist_megatron.frameworks.deepspeed.convert import Question
from mist_megatron.frameworks.deepspeed.convert_patched import patch_obstacles
from mist_megatron.frameworks.deepspeed.read import (
    BATCH_KEYS,
    Config,
    Reading,
    filled_in,
    read_config,
    with_patches,
)
from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.search.search import Settings, Watch
from mist_megatron.search.space import Limits
from mist_megatron.spec.plan import Plan

REPLACED = frozenset({"README.md", "ds_config.json", "ds_config_auto.json"})
"""Of an emitted folder: the converted file takes the place of both, and CHANGES.md that of README."""


def require_patchable(reading: Reading, question: Question) -> None:
    """Refuse what the patches would refuse on the cluster."""
    for finding in patch_obstacles(reading):
        raise InputError(f"{finding.key} {finding.message}", details=("try: --target deepspeed",))
    if question.checkpointing and not question.may_checkpoint:
        raise InputError(
            "--checkpointing and --fix-checkpointing: a patch recomputes layers here, not your script",
            details=("try: without --fix-checkpointing, or --target deepspeed",),
        )


def patched_plan(
    before: Plan, reading: Reading, question: Question, keep: tuple[str, ...], watch: Watch
) -> Plan:
    """The best plan of everything that the patches can run, with the same global batch."""
    # A script that trains with this file has the model in one piece: stages need another script.
    fixed: dict[str, int] = {"pp": 1}
    if keep_covers(keep, "zero_optimization.stage"):
        fixed["zero"] = reading.stage
    if keep_covers(keep, BATCH_KEYS[1]):
        fixed["micro_batch"] = before.stages[0].micro_batch
    if keep_covers(keep, BATCH_KEYS[2]):
        fixed["grad_accum"] = before.grad_accum
    forbidden = frozenset() if question.may_checkpoint else frozenset({"recompute.full"})
    execution = replace(before.execution, grad_bytes=4 if reading.wide_grads else None)
    job = replace(job_of(before), target=question.target, execution=execution)
    settings = Settings(limits=Limits(fixed=fixed, forbidden=forbidden))
    tuned = tune(job, settings=settings, watch=watch)
    if tuned.interrupted:
        raise KeyboardInterrupt
    return tuned.plan


def keep_covers(keep: tuple[str, ...], key: str) -> bool:
    """Whether a kept key is this one or a section around it."""
    return any(key == path or key.startswith(f"{path}.") for path in keep)


def require_same_plan(config: Config, tuned: Plan, question: Question, schema: DeepSpeedSchema) -> None:
    """The file and stages.json, read back together, are the tuned plan: a kept key may contradict it."""
    document = deepspeed.stages(tuned)
    reading = read_config(config, schema)
    reading = replace(reading, config=filled_in(reading.config, document))
    asked = replace(question, target="deepspeed", checkpointing=False)
    read_back = with_patches(conversion.as_written(reading, asked), reading, document, "ds_config.json")
    if read_back.stages != tuned.stages:
        raise InputError(
            "--keep: what is kept contradicts the plan that the patches would run",
            details=("try: without --keep, or --target deepspeed",),
        )


def patched_files(tuned: Plan) -> dict[str, str]:
    """What starts the converted file under its patches: an emitted folder around the user's own JSON."""
    texts = artifacts(tuned, launch_sources(probe=False))
    return {
        name: text.replace("ds_config_auto.json", "ds_config.json")
        for name, text in texts.items()
        if name not in REPLACED
    }
