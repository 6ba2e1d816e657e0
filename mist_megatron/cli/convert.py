"""`convert`: a hand-written DeepSpeed configuration -> a tuned one that takes its place."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mist_megatron.cli.convert_patched import (
    patched_files,
    patched_plan,
    require_patchable,
    require_same_plan,
)
from mist_megatron.cli.emit import deepspeed_schema
from mist_megatron.cli.options import JobOptions, TakenJob, read_job
from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.formats.files import read_text, write_artifacts
from mist_megatron.formats.plan_yaml import plan_to_mapping
from mist_megatron.frameworks.deepspeed import convert as conversion
from mist_megatron.frameworks.deepspeed.convert import Change, Price, Question
from mist_megatron.frameworks.deepspeed.convert_patched import fit_to_patches, patch_changes
from mist_megatron.frameworks.deepspeed.read import BATCH_KEYS, Config, Reading, read_config
from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema
from mist_megatron.frameworks.deepspeed.write import config_text, patches, provenance, recomputes, stages
from mist_megatron.frameworks.loose_json import read_loose
from mist_megatron.spec import check
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.rules import violations
from mist_megatron.targets.table import targets_of

if TYPE_CHECKING:
    from mist_megatron.cost.evaluate import StageEvaluator
    from mist_megatron.spec.job import Job


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Everything that is shown and written."""

    raw: Config
    reading: Reading
    before: Plan
    before_price: Price
    after: Plan
    after_price: Price
    config: Config
    changes: tuple[Change, ...]
    unpatched_price: Price | None = None
    """Of the best plan without patches, where they were asked for and one fits without."""

    @property
    def patches(self) -> tuple[str, ...]:
        return patches(self.after)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the file cannot say of how it is used, and what must stay."""

    checkpointing: bool = False
    """Whether the script recomputes activations now."""
    may_checkpoint: bool = True
    """Whether the answer may switch that."""
    keep: tuple[str, ...] = ()
    """Keys to leave as they are."""


def convert(
    ds_config: Annotated[Path, typer.Argument(help="DeepSpeed JSON, as hand-written as it is.")],
    *,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Key to leave as it is, such as zero_optimization.reduce_bucket_size; may be repeated."
        ),
    ] = None,
    checkpointing: Annotated[
        bool,
        typer.Option(
            "--checkpointing/--no-checkpointing", help="Whether your script recomputes activations now."
        ),
    ] = False,
    fix_checkpointing: Annotated[
        bool, typer.Option("--fix-checkpointing", help="Do not propose to switch recomputation.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the new file, the diff and the reasons.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files in a folder that is not empty.")
    ] = False,
    job: JobOptions,
    output: OutputOptions,
) -> None:
    """Explains a DeepSpeed configuration, tunes it, and gives a reason for every change."""
    choices = Choices(
        checkpointing=checkpointing, may_checkpoint=not fix_checkpointing, keep=tuple(keep or ())
    )
    made, taken = convert_text(
        read_text(ds_config), str(ds_config), job, choices, deepspeed_schema(probe=True)
    )
    if out is not None:
        write_artifacts(out, conversion_files(made), force=force)
    output.finish(_document(made))
    if not output.json:
        _show(made, output, taken.lines(), out)


def convert_text(
    text: str, where: str, job: JobOptions, choices: Choices, schema: DeepSpeedSchema
) -> tuple[Conversion, TakenJob]:
    """The text of a file, converted; and the job that it was converted for."""
    raw = read_loose(text, where)
    reading = read_config(raw, schema)
    known = tuple(sorted(conversion.keepable(reading, schema)))
    for path in choices.keep:
        check.known("--keep", "key", path, known)
    taken = read_job(_with_batch(job, reading))
    question = Question(
        model=taken.job.model,
        cluster=taken.job.cluster,
        training=taken.job.training,
        checkpointing=choices.checkpointing,
        may_checkpoint=choices.may_checkpoint,
        target=taken.job.target,
    )
    return _convert(raw, reading, question, schema, choices.keep), taken


def _with_batch(job: JobOptions, reading: Reading) -> JobOptions:
    """The job that the file describes, where the options leave it open."""
    asked_for, possible = job.target or "deepspeed", targets_of("deepspeed")
    if asked_for not in possible:
        raise InputError(f"--target is {asked_for}; a DeepSpeed JSON is for {' or '.join(possible)}")
    if job.gpus is None:
        asked = "--gpus is" if job.model is not None else "--model and --gpus are"
        try_ = "--gpus 8" if job.model is not None else "--model llama2-7b --gpus 8"
        raise InputError(f"{asked} missing", details=(f"try: {try_}",))
    micro, steps = conversion.batch_of(reading, job.gpus)
    written = micro * steps * job.gpus
    if job.global_batch is not None and job.global_batch != written:
        raise InputError(
            f"--global-batch is {job.global_batch}; the file says {micro} x {steps} x {job.gpus} GPUs",
            details=("try: without --global-batch, or change the file's batch keys",),
        )
    precision = job.precision or conversion.precision_of(reading)
    return replace(job, target=asked_for, global_batch=written, precision=precision)


def _convert(
    raw: Config, reading: Reading, question: Question, schema: DeepSpeedSchema, keep: tuple[str, ...]
) -> Conversion:
    patched = question.target == "deepspeed+patches"
    if patched:
        require_patchable(reading, question)
    before = conversion.as_written(reading, replace(question, target="deepspeed"))
    price = _pricing()
    plain = conversion.best(conversion.candidates(before, may_checkpoint=question.may_checkpoint), price)
    if patched:
        tuned = patched_plan(before, reading, question, keep)
        chosen: tuple[Plan, Price] | None = (tuned, price(tuned))
    else:
        chosen = plain
    if chosen is None:
        raise NoFeasiblePlan(
            f"no DeepSpeed setting fits {before.model.name} on {before.gpus} x {before.cluster.gpu.name}",
            details=("try: more --gpus, a shorter --seq, or --target deepspeed+patches",),
        )
    after, after_price = chosen
    config = conversion.replacement(reading, after, schema, keep)
    if patched:
        config = fit_to_patches(config, after)
        require_same_plan(config, after, question, schema)
    config["_mist"] = provenance(after, schema) | {"prediction": asdict(after_price)}
    changed = conversion.changes(raw, config, reading, _gains(before, after, after_price, price))
    return Conversion(
        raw=raw,
        reading=reading,
        before=before,
        before_price=price(before),
        after=after,
        after_price=after_price,
        config=config,
        changes=(*changed, *(patch_changes(after) if patched else ())),
        unpatched_price=plain[1] if patched and plain is not None else None,
    )


def _pricing() -> Callable[[Plan], Price]:
    """Prices plans; an evaluator is built once for all that differ in their stages only."""
    from mist_megatron.ask.evaluators import evaluator_for
    from mist_megatron.cost.predict import job_of, predict

    built: dict[Job, StageEvaluator] = {}

    def price(plan: Plan) -> Price:
        job = job_of(plan)
        if job not in built:
            built[job], _ = evaluator_for(job)
        found = predict(plan, built[job])
        used = max(stage.peak_memory_bytes / stage.limit_bytes for stage in found.stages)
        return Price(iteration_s=found.time.total_s, fits=found.fits, memory_used_fraction=used)

    return price


def _gains(
    before: Plan, after: Plan, tuned: Price, price: Callable[[Plan], Price]
) -> dict[str, float | None]:
    """What each group of changes saves: the tuned plan against itself with that group as it was, where the
    target runs that."""
    old, new = before.stages[0], after.stages[0]
    reverted = {
        "batch split": replace(
            after, grad_accum=before.grad_accum, stages=(replace(new, micro_batch=old.micro_batch),)
        ),
        "ZeRO stage and offload": replace(after, stages=(replace(new, zero=old.zero, offload=old.offload),)),
    }
    found: dict[str, float | None] = {}
    for group, plan in reverted.items():
        if after.target == "deepspeed+patches" and violations(plan):
            continue
        cost = price(plan)
        found[group] = 1.0 - tuned.iteration_s / cost.iteration_s if cost.fits else None
    return found


def conversion_files(made: Conversion) -> dict[str, str]:
    new = config_text(made.config)
    old = json.dumps(made.raw, indent=2) + "\n"
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        new.splitlines(keepends=True),
        "before/ds_config.json",
        "after/ds_config.json",
    )
    own = {"ds_config.json": new, "ds_config.diff": "".join(lines), "CHANGES.md": _changes_text(made)}
    return {**(patched_files(made.after) if made.patches else {}), **own}


def _changes_text(made: Conversion) -> str:
    rows = [
        f"| `{c.key}` | {_value(c.old)} | {_value(c.new)} | {_gain(c)} | {c.reason} |" for c in made.changes
    ]
    return "\n".join(
        [
            "# What changed",
            "",
            *_summary(made),
            "",
            "| key | before | after | saves | reason |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _summary(made: Conversion) -> list[str]:
    before, after = made.before_price, made.after_price
    lines = [
        f"Predicted: {before.iteration_s:.4g} s a step before"
        f"{'' if before.fits else ' (does not fit in memory)'}, {after.iteration_s:.4g} s after."
    ]
    if made.after.target == "deepspeed+patches":
        lines += _patch_summary(made)
    now = made.before.stages[0].ckpt > 0
    then = recomputes(made.after)
    if now != then:
        word = "on" if then else "off"
        lines.append(f"Switch activation checkpointing {word} in your script: the plan counts on it.")
    if "auto" in (made.config.get(key) for key in BATCH_KEYS[1:]):
        stage = made.after.stages[0]
        lines.append(
            f"Set per_device_train_batch_size={stage.micro_batch} and "
            f"gradient_accumulation_steps={made.after.grad_accum} in TrainingArguments: "
            '"auto" takes them from there.'
        )
    return lines


def _patch_summary(made: Conversion) -> list[str]:
    if not made.patches:
        return ["No patch makes it faster: the file needs none."]
    plain = made.unpatched_price
    lines = [
        "No setting fits without patches."
        if plain is None
        else f"The best without patches takes {plain.iteration_s:.4g} s a step."
    ]
    stage = made.after.stages[0]
    if stage.ckpt:
        lines.append(
            f"A patch recomputes {stage.ckpt} of {stage.layers} layers; your script must recompute none."
        )
    lines.append(
        f'Needs {", ".join(made.patches)}: call mist_patches.apply("stages.json") before '
        "deepspeed.initialize, or fill in env.sh and start with ./train.sh (pip install mist-megatron)."
    )
    return lines


def _value(value: Any) -> str:
    return "-" if value is None else json.dumps(value)


def _gain(change: Change) -> str:
    if change.needed:
        return "needed to fit"
    # Less than this is no gain: it came along with what is one.
    return "" if change.gain is None or abs(change.gain) < 0.0005 else f"{change.gain:.1%}"


def _document(made: Conversion) -> Mapping[str, Any]:
    return {
        "before": asdict(made.before_price),
        "after": asdict(made.after_price),
        "findings": [asdict(finding) for finding in made.reading.findings],
        "changes": [asdict(change) for change in made.changes],
        **_patch_document(made),
        "config": made.config,
        "plan": plan_to_mapping(made.after),
    }


def _patch_document(made: Conversion) -> Mapping[str, Any]:
    if made.after.target != "deepspeed+patches":
        return {}
    plain = made.unpatched_price
    return {
        "without_patches": None if plain is None else asdict(plain),
        "patches": made.patches,
        "stages": stages(made.after),
    }


def _show(made: Conversion, output: OutputOptions, assumed: list[str], out: Path | None) -> None:
    people = output.people
    for line in assumed:
        people.print(f"assumed: {line}", soft_wrap=True)
    rows = [(f.level, f.key, f.message) for f in made.reading.findings]
    if rows:
        people.print(table(("what the file says", "key", ""), rows))
        people.print()
    changed = [(c.key, _value(c.old), _value(c.new), _gain(c), c.reason) for c in made.changes]
    people.print(table(("key", "before", "after", "saves", "reason"), changed, right=("saves",)))
    people.print()
    for line in _summary(made):
        people.print(line, soft_wrap=True)
    if out is None:
        people.print(
            "nothing was written; --out FOLDER writes ds_config.json, the diff and the reasons"
            f"{', and what starts it under its patches' if made.patches else ''}",
            soft_wrap=True,
        )
    else:
        more = ", and what starts it under its patches," if made.patches else ""
        people.print(f"wrote ds_config.json, ds_config.diff and CHANGES.md{more} to {out}", soft_wrap=True)
