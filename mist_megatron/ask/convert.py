"""A hand-written DeepSpeed configuration -> a tuned one in its place, with a reason for every change."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from mist_megatron.ask.convert_patched import (
    patched_files,
    patched_plan,
    require_patchable,
    require_same_plan,
)
from mist_megatron.ask.emit import deepspeed_schema
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.job_words import JobWords, read_job
from mist_megatron.ask.lint_folder import stages_alone, stages_beside
from mist_megatron.ask.mixed_words import of_one_kind
from mist_megatron.ask.plan_words import lines_repr
from mist_megatron.ask.tune import silently
from mist_megatron.ask.words import texts, with_words
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.formats.files import read_text, write_artifacts
from mist_megatron.formats.plan_yaml import plan_to_mapping
from mist_megatron.frameworks.deepspeed import convert as conversion
from mist_megatron.frameworks.deepspeed.convert import Batch, Change, Price, Question
from mist_megatron.frameworks.deepspeed.convert_patched import fit_to_patches, patch_changes
from mist_megatron.frameworks.deepspeed.patches import patches
from mist_megatron.frameworks.deepspeed.read import BATCH_KEYS, Config, Reading, read_config
from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema
from mist_megatron.frameworks.deepspeed.write import config_text, provenance, recomputes, stages
from mist_megatron.frameworks.file_kinds import kind_of
from mist_megatron.frameworks.loose_json import read_loose
from mist_megatron.search.search import Watch
from mist_megatron.spec import check
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.rules import further_rules, not_modelled, require_job, violations
from mist_megatron.targets.table import TARGETS, targets_of


@dataclass(frozen=True, kw_only=True, repr=False)
class Converted:
    """A tuned configuration beside what it replaces."""

    raw: Config
    """The file as it was."""
    reading: Reading
    """What DeepSpeed makes of it, and what is to be said of that."""
    before: Plan
    """What the file runs now."""
    before_price: Price
    after: Plan
    """The tuned plan."""
    after_price: Price
    config: Config
    """What takes the file's place."""
    changes: tuple[Change, ...]
    """Every key that differs, with the reason."""
    unpatched_price: Price | None = None
    """Of the best plan without patches, where they were asked for and one fits without."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Options that were not given -> what was taken for them."""

    @property
    def plan(self) -> Plan:
        """What the new file runs."""
        return self.after

    @property
    def patches(self) -> tuple[str, ...]:
        """Patches that the new file needs."""
        return patches(self.after)

    def files(self) -> dict[str, str]:
        """Name -> text: the new file, the difference, the reasons, and under patches what starts it."""
        new = config_text(self.config)
        old = json.dumps(self.raw, indent=2) + "\n"
        lines = difflib.unified_diff(
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            "before/ds_config.json",
            "after/ds_config.json",
        )
        own = {"ds_config.json": new, "ds_config.diff": "".join(lines), "CHANGES.md": _changes_text(self)}
        return {**(patched_files(self.after) if self.patches else {}), **own}

    def to_dict(self) -> dict[str, Any]:
        """What `convert --json` prints."""
        return {
            "before": asdict(self.before_price),
            "after": asdict(self.after_price),
            "findings": [asdict(finding) for finding in self.reading.findings],
            "changes": [asdict(change) for change in self.changes],
            **_patch_document(self),
            "config": self.config,
            "plan": plan_to_mapping(self.after),
        }

    def __repr__(self) -> str:
        changed = (
            f"{c.key}: {value_words(c.old)} -> {value_words(c.new)} {gain_words(c)}" for c in self.changes
        )
        return lines_repr(self, [*summary(self), *(line.rstrip() for line in changed)])


class ConvertWords(JobWords, total=False):
    """A conversion by the names of the options of `convert`."""

    keep: str | Sequence[str] | None
    """Keys to leave as they are, such as zero_optimization.reduce_bucket_size."""
    checkpointing: bool
    """Whether the script recomputes activations now."""
    fix_checkpointing: bool
    """Do not propose to switch recomputation."""
    out: str | Path | None
    """Folder for the new file, the difference and the reasons."""
    force: bool
    """Replace files in a folder that is not empty."""


@with_words
def convert(
    ds_config: str | Path,
    *,
    schema: DeepSpeedSchema | None = None,
    watching: Callable[[], AbstractContextManager[Watch]] | None = None,
    **words: Unpack[ConvertWords],
) -> Converted:
    """A tuned replacement for a DeepSpeed JSON, with a reason for every change.

    Keys are those of the installed DeepSpeed, or of a `schema`; `watching` begins the watch of the search
    that patches need.
    """
    text = read_text(ds_config)
    _require_deepspeed(text, str(ds_config))
    checkpointing = words.get("checkpointing", False) or _recomputed_beside(Path(ds_config))
    raw = read_loose(text, str(ds_config))
    schema = schema or deepspeed_schema(probe=True)
    reading, keep = read_config(raw, schema), texts(words.get("keep"))
    known = tuple(sorted(conversion.keepable(reading, schema)))
    for path in keep:
        check.known("--keep", "key", path, known)
    batch = batch_words(words)
    asked = read_job(with_batch(words, reading, batch))
    require_job(asked.job.model, asked.job.training.precision, asked.job.target)
    question = Question(
        model=asked.job.model,
        cluster=asked.job.cluster,
        training=asked.job.training,
        checkpointing=checkpointing,
        may_checkpoint=not words.get("fix_checkpointing", False),
        target=asked.job.target,
        batch=batch,
    )
    made = _converted(raw, reading, question, _Tools(schema, keep, watching or silently))
    taken = conversion.taken_for_auto(reading, asked.job.cluster.gpus, batch)
    made, out = replace(made, defaults={**asked.defaults, **taken}), words.get("out")
    if out is not None:
        write_artifacts(Path(out), made.files(), force=words.get("force", False))
    return made


def _require_deepspeed(text: str, where: str) -> None:
    """Other files that people have beside it are known by what they are."""
    if kind_of(text) == "configuration" and stages_alone(text, where) is None:
        return
    raise InputError(
        f"{where}: no DeepSpeed JSON, which is what convert changes",
        details=("try: `lint` for Megatron's arguments and for YAML, `tune` for a plan in their place",),
    )


def _recomputed_beside(file: Path) -> bool:
    """Whether the stages.json of an emitted file says that layers are recomputed; refuses a file that is one
    part of a plan which the JSON alone does not say."""
    document = stages_beside(file, "ds_config")
    if document is None:
        return False
    stages_told, named = document["stages"], document["patches"]
    if len(stages_told) > 1 or named:
        told = f"{len(stages_told)} stages" if len(stages_told) > 1 else f"patches {', '.join(named)}"
        raise InputError(
            f"{file}: stages.json beside it says {told}, so that it is not the whole plan",
            details=("try: `tune` for another plan, or `lint` to check this one",),
        )
    return bool(stages_told[0]["recompute_layers"])


MEASURING = frozenset({"wall_clock_breakdown", "memory_breakdown"})
"""Keys that slow every step alike, so that which setting is best does not hang on them."""


def require_priced(reading: Reading) -> None:
    """Refuse a file of which a part would be priced as if it were not there."""
    unpriced = [f for f in reading.findings if f.level == "unpriced" and f.key not in MEASURING]
    if unpriced:
        keys = ", ".join(dict.fromkeys(finding.key for finding in unpriced))
        raise InputError(
            f"{keys}: acts in a way that is not priced, so no change can be judged",
            details=(
                *(f"{finding.key}: {finding.message}" for finding in unpriced),
                "try: `lint` to have the file checked, or convert it without",
            ),
        )


def batch_words(words: JobWords) -> Batch:
    """What stands in the place of "auto"."""
    return Batch(
        total=words.get("global_batch"), micro=words.get("per_device_batch"), steps=words.get("grad_accum")
    )


def with_batch(words: JobWords, reading: Reading, batch: Batch) -> JobWords:
    """The job that the file describes, where the words leave it open."""
    wanted, model = words.get("target") or "deepspeed", words.get("model")
    gpus = of_one_kind(words.get("gpus"), "a DeepSpeed JSON")
    possible = targets_of("deepspeed")
    if wanted not in possible:
        raise InputError(f"--target is {wanted}; a DeepSpeed JSON is for {' or '.join(possible)}")
    if gpus is None:
        missing = "--gpus is" if model is not None else "--model and --gpus are"
        try_ = "--gpus 8" if model is not None else "--model llama2-7b --gpus 8"
        raise InputError(f"{missing} missing", details=(f"try: {try_}",))
    micro, steps = conversion.batch_of(reading, gpus, batch)
    written = micro * steps * gpus
    precision = words.get("precision") or conversion.precision_of(reading)
    said: JobWords = {**words, "per_device_batch": None, "grad_accum": None}
    return {**said, "target": wanted, "global_batch": written, "precision": precision}


@dataclass(frozen=True)
class _Tools:
    """What a conversion needs besides the question."""

    schema: DeepSpeedSchema
    keep: tuple[str, ...]
    watching: Callable[[], AbstractContextManager[Watch]]


def _converted(raw: Config, reading: Reading, question: Question, tools: _Tools) -> Converted:
    patched = TARGETS[question.target].patched
    if patched:
        require_patchable(reading, question)
    require_priced(reading)
    before = conversion.as_written(reading, replace(question, target="deepspeed"))
    for rule in (*not_modelled(before), *further_rules(before)):
        raise InputError(
            f"the file as it is: {rule}", details=("try: `tune --target deepspeed` for a plan in its place",)
        )
    price = _pricing()
    plain = conversion.best(conversion.candidates(before, may_checkpoint=question.may_checkpoint), price)
    if patched:
        with tools.watching() as watch:
            tuned = patched_plan(before, reading, question, tools.keep, watch)
        chosen: tuple[Plan, Price] | None = (tuned, price(tuned))
    else:
        chosen = plain
    if chosen is None:
        raise NoFeasiblePlan(
            f"no DeepSpeed setting fits {before.model.name} on {before.gpus} x {before.cluster.gpu.name}",
            details=("try: more --gpus, a shorter --seq, or --target deepspeed+patches",),
        )
    after, after_price = chosen
    config = conversion.replacement(reading, after, tools.schema, tools.keep)
    if patched:
        config = fit_to_patches(config, after)
        require_same_plan(config, after, question, tools.schema)
    config["_mist"] = provenance(after, tools.schema) | {"prediction": asdict(after_price)}
    changed = conversion.changes(raw, config, reading, _gains(before, after, after_price, price))
    return Converted(
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
    built: dict[Job, StageEvaluator] = {}

    def price(plan: Plan) -> Price:
        job = job_of(plan)
        if job not in built:
            built[job], _ = evaluator_for(job)
        predicted = predict(plan, built[job])
        used = max(stage.peak_memory_bytes / stage.limit_bytes for stage in predicted.stages)
        return Price(iteration_s=predicted.time.total_s, fits=predicted.fits, memory_used_fraction=used)

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
        "ZeRO stage and offload": replace(
            after,
            stages=(replace(new, zero=old.zero, offload=old.offload),),
            execution=replace(after.execution, hpz_size=before.execution.hpz_size),
        ),
    }
    gains: dict[str, float | None] = {}
    for group, plan in reverted.items():
        if plan == after:
            continue
        if TARGETS[after.target].patched and violations(plan):
            continue
        cost = price(plan)
        gains[group] = 1.0 - tuned.iteration_s / cost.iteration_s if cost.fits else None
    return gains


def _changes_text(made: Converted) -> str:
    rows = [
        f"| `{c.key}` | {value_words(c.old)} | {value_words(c.new)} | {gain_words(c)} | {c.reason} |"
        for c in made.changes
    ]
    return "\n".join(
        [
            "# What changed",
            "",
            *summary(made),
            "",
            "| key | before | after | saves | reason |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def summary(made: Converted) -> list[str]:
    """What it gains, and what else has to be done for that."""
    before, after = made.before_price, made.after_price
    lines = [
        f"Predicted: {before.iteration_s:.4g} s a step before"
        f"{'' if before.fits else f' (does not fit: {before.memory_used_fraction:.0%} of memory)'}, "
        f"{after.iteration_s:.4g} s after ({after.memory_used_fraction:.0%} of memory)."
    ]
    if TARGETS[made.after.target].patched:
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


def _patch_summary(made: Converted) -> list[str]:
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


def value_words(value: Any) -> str:
    """A value of the JSON, or a dash where there is none."""
    return "-" if value is None else json.dumps(value)


def gain_words(change: Change) -> str:
    """What a change saves, if anything."""
    if change.needed:
        return "needed to fit"
    # Less than this is no gain: it came along with what is one.
    return "" if change.gain is None or abs(change.gain) < 0.0005 else f"{change.gain:.1%}"


def _patch_document(made: Converted) -> Mapping[str, Any]:
    if not TARGETS[made.after.target].patched:
        return {}
    plain = made.unpatched_price
    return {
        "without_patches": None if plain is None else asdict(plain),
        "patches": made.patches,
        "stages": stages(made.after),
    }
