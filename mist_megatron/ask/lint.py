"""What a Megatron command line or a DeepSpeed JSON would do, before it waits an hour in the queue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from mist_megatron.ask.convert import batch_words, with_batch
from mist_megatron.ask.emit import deepspeed_schema
from mist_megatron.ask.job_words import AskedJob, JobWords, read_job
from mist_megatron.ask.lint_folder import (
    config_beside,
    refuse_alone,
    said_by,
    stages_alone,
    stages_beside,
    with_layers,
    with_sourced,
)
from mist_megatron.ask.lint_trainer import beside, started, told_by
from mist_megatron.ask.mixed_words import of_one_kind
from mist_megatron.ask.plan_words import fullest_words, host_words, lines_repr
from mist_megatron.ask.predict import predict
from mist_megatron.ask.words import with_words
from mist_megatron.cost.predict import Prediction, prediction_document
from mist_megatron.errors import InputError
from mist_megatron.formats.files import load_mapping, load_model, load_plan, read_text
from mist_megatron.formats.plan_yaml import plan_to_mapping
from mist_megatron.frameworks.deepspeed import convert as conversion
from mist_megatron.frameworks.deepspeed.arguments import DEEPSPEED_ARRAYS, argument_findings
from mist_megatron.frameworks.deepspeed.convert import Batch, Question
from mist_megatron.frameworks.deepspeed.convert_patched import PATCHED, bare_findings
from mist_megatron.frameworks.deepspeed.pipeline import About, config_files, pipeline_plan, stage_findings
from mist_megatron.frameworks.deepspeed.read import (
    BATCH_KEYS,
    Reading,
    filled_in,
    patch_findings,
    read_config,
    with_patches,
)
from mist_megatron.frameworks.file_kinds import kind_of, mapping_of
from mist_megatron.frameworks.findings import Finding, keeps_from_pricing
from mist_megatron.frameworks.folder import FRAMEWORKS
from mist_megatron.frameworks.loose_json import read_loose
from mist_megatron.frameworks.megatron.command import (
    CommandLine,
    Options,
    json_texts,
    options_of,
    read_array,
    read_command_line,
)
from mist_megatron.frameworks.megatron.lint import lint_command, lint_megatron, missing_sizes, version_notes
from mist_megatron.frameworks.megatron.read import model_of, plan_of, training_of, with_stages
from mist_megatron.frameworks.megatron.reader import Reader
from mist_megatron.frameworks.megatron.yaml_run import YamlRun, yaml_run
from mist_megatron.frameworks.stages_json import with_map
from mist_megatron.frameworks.trainer_yaml import (
    filled,
    named_config,
    trainer_job,
)
from mist_megatron.resources import data_folder
from mist_megatron.spec.job import Job
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.facts import FrameworkName
from mist_megatron.targets.rules import further_rules, job_rules, not_modelled, violations
from mist_megatron.targets.table import TARGETS


@dataclass(frozen=True, kw_only=True, repr=False)
class Linted:
    """What was found; without plan and prediction where too little is known to price it."""

    kind: FrameworkName
    """Whose file it is."""
    findings: tuple[Finding, ...]
    """What would be rejected, and what silently ignored."""
    plan: Plan | None
    """What the framework would run."""
    prediction: Prediction | None = None
    """What that would cost."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Options that were not given and decide the price -> what was taken for them."""

    @property
    def rejected(self) -> bool:
        """Whether the framework would refuse to start."""
        return any(finding.level == "rejected" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """What `lint --json` prints."""
        return {
            "kind": self.kind,
            "findings": [asdict(finding) for finding in self.findings],
            "plan": None if self.plan is None else plan_to_mapping(self.plan),
            "prediction": None if self.prediction is None else prediction_document(self.prediction),
            "defaults": dict(self.defaults),
        }

    def price_words(self) -> str:
        """Whether it fits and what it costs, or what would tell."""
        if kept := keeps_from_pricing(self.findings):
            return f"not priced: {', '.join(dict.fromkeys(finding.key for finding in kept))}"
        if self.prediction is None:
            wanted = FRAMEWORKS[self.kind].priced_with
            return f"not priced: {wanted} would tell whether it fits and what it costs"
        peak = max(stage.peak_memory_bytes / stage.limit_bytes for stage in self.prediction.stages)
        fits = "fits" if self.prediction.fits else "does NOT fit"
        return (
            f"{fits}: fullest stage at {peak:.0%} of its limit; {self.prediction.iteration_s:.4g} s a step, "
            + "; ".join([f"MFU {self.prediction.mfu:.1%}", *host_words(self.prediction)])
        )

    def memory_words(self) -> list[str]:
        """Of what does not fit: what fills it, and what finds something that does."""
        if self.plan is None or self.prediction is None or self.prediction.fits:
            return []
        found_by = FRAMEWORKS[self.kind].found_by
        return [*fullest_words(self.plan, self.prediction), f"next: mist-megatron {found_by} finds what fits"]

    def nothing_words(self) -> str:
        """What is said where there is nothing to say."""
        return f"nothing to say against this {self.kind} file"

    def __repr__(self) -> str:
        told = [f"{f.level}: {f.key}: {f.message}" for f in self.findings] or [self.nothing_words()]
        return lines_repr(self, [*told, self.price_words()])


@with_words
def lint(
    file: str | Path,
    *,
    checkpointing: bool = False,
    given: Mapping[str, str] | None = None,
    **words: Unpack[JobWords],
) -> Linted:
    """What a Megatron command line or a DeepSpeed JSON would do: what is rejected, what silently ignored.

    With a job also whether it fits and what it costs; `checkpointing`: the script recomputes activations;
    `given`: values for variables that a launch script leaves open.
    """
    path = said_by(Path(file))
    text = read_text(path)
    if kind_of(text) == "mapping":
        document = mapping_of(text, str(path))
        run = yaml_run(document, _known_flags(), given or {})
        if run is not None:
            stages = stages_beside(path, "args.")
            if stages is not None:
                return _priced(_of_stages(with_layers(run.options, path), stages, path, words))
            return _priced(_of_yaml(replace(run, options=with_layers(run.options, path)), path, words))
        return _priced(_trainer(document, path, words, checkpointing=checkpointing))
    alone = stages_alone(text, str(path))
    if alone is not None:
        return _stages_only(alone)
    refuse_alone(text, path)
    text = with_sourced(text, path) if kind_of(text) == "command" else text
    is_config = kind_of(text) == "configuration"
    config = None if is_config else config_beside(text, path)
    if is_config:
        linted = _deepspeed(text, path, words, checkpointing=checkpointing)
    elif config is not None:
        linted = _deepspeed(read_text(config), config, words, checkpointing=checkpointing)
        linted = replace(linted, findings=(*linted.findings, *_arguments(text, linted.plan, path)))
    elif (trainer := started(text, path, given or {})) is not None:
        linted = _trainer(trainer, path, words, checkpointing=checkpointing)
    else:
        linted = _megatron(text, path, words, given or {})
    return _priced(linted)


def _priced(linted: Linted) -> Linted:
    """With its price, where nothing keeps from one."""
    if keeps_from_pricing(linted.findings):
        linted = replace(linted, plan=None)
    if linted.plan is None:
        return linted
    return replace(linted, prediction=predict(linted.plan, what_if=True).prediction)


def _trainer(document: Mapping[str, Any], file: Path, words: JobWords, *, checkpointing: bool) -> Linted:
    """The DeepSpeed configuration that a trainer's file or command names or holds."""
    named = named_config(document, str(file))
    told, found = told_by(document, words)
    if named.path is None:
        config = named.config
    else:
        file = beside(named.path, file)
        config = read_loose(read_text(file), str(file))
    text = json.dumps(filled(config, named.fills))
    linted = _deepspeed(text, file, told, checkpointing=checkpointing or trainer_job(document).checkpointing)
    said = {
        f"--{key}": f"{value} (said there)"
        for key, value in told.items()
        if value is not None and words.get(key) is None
    }
    return replace(linted, findings=(*found, *linted.findings), defaults={**said, **linted.defaults})


def _arguments(text: str, plan: Plan | None, file: Path) -> tuple[Finding, ...]:
    """Where the arguments of a DeepSpeed plan and the rest of its folder disagree."""
    if plan is None:
        return ()
    told = {name: read_array(text, name, str(file)) for name in DEEPSPEED_ARRAYS}
    return argument_findings(plan, told)


def _deepspeed(text: str, file: Path, job: JobWords, *, checkpointing: bool) -> Linted:
    where = str(file)
    document = stages_beside(file, "ds_config")
    if document is not None and len(document["stages"]) > 1:
        return _pipeline(file, document, job)
    reading = read_config(read_loose(text, where), deepspeed_schema(probe=True))
    about: Plan | Job | None = None
    defaults: Mapping[str, str] = {}
    batch = batch_words(job) if document is None else Batch()
    if document is not None:
        reading = replace(reading, config=filled_in(reading.config, document))
        about = _emitted(job, document["world_size"], file) if job.get("model") is None else None
    if about is None:
        if job.get("model") is None or job.get("gpus") is None:
            alone = job.get("target") in PATCHED and document is None
            bare = tuple(bare_findings(reading)) if alone else ()
            missing = _missing_batch(reading, batch) if document is None else ()
            return Linted(kind="deepspeed", findings=(*reading.findings, *bare, *missing), plan=None)
        missing = _missing_batch(reading, batch)
        if missing:
            return Linted(kind="deepspeed", findings=(*reading.findings, *missing), plan=None)
        asked = read_job(with_batch(job, reading, batch))
        taken = conversion.taken_for_auto(reading, asked.job.cluster.gpus, batch)
        about, defaults = asked.job, {**asked.defaults, **taken}
    target = about.target if document is None else "deepspeed"
    question = Question(
        model=about.model,
        cluster=about.cluster,
        training=about.training,
        checkpointing=checkpointing,
        may_checkpoint=False,
        target=target,
        batch=batch,
    )
    plan = conversion.as_written(reading, question)
    if document is None:
        patched = TARGETS[target].patched
        more = (*bare_findings(reading), *_refused(plan, "--target")) if patched else ()
        told = (*reading.findings, *more, *_beyond(plan))
        return Linted(kind="deepspeed", findings=told, plan=plan, defaults=defaults)
    plan = with_map(with_patches(plan, reading, document, where), document)
    findings = (*reading.findings, *patch_findings(reading, document), *_refused(plan, "stages.json"))
    return Linted(kind="deepspeed", findings=findings, plan=plan)


def _beyond(plan: Plan) -> tuple[Finding, ...]:
    """What its target is not modelled with, so that no price of it would be honest."""
    job = (*job_rules(plan.model, plan.training.precision, plan.target), *not_modelled(plan))
    told = (("--model", job), ("zero_optimization", further_rules(plan)))
    return tuple(
        Finding(level="unpriced", key=key, message=f"target {plan.target}: {rule}")
        for key, rules in told
        for rule in rules
    )


def _missing_batch(reading: Reading, batch: Batch) -> tuple[Finding, ...]:
    """What the script has to fill in, so that there is nothing to price without it."""
    if not conversion.says_no_batch(reading, batch):
        return ()
    message = f"{conversion.BATCH_MISSING}; --global-batch says what the script fills in"
    return (Finding(level="open", key=BATCH_KEYS[0], message=message),)


def _pipeline(file: Path, document: dict[str, Any], job: JobWords) -> Linted:
    """The files of all stages of a DeepSpeed pipeline: one alone says little."""
    names = config_files(document, str(file.parent / "stages.json"))
    schema = deepspeed_schema(probe=True)
    paths = {index: file.parent / name for index, name in enumerate(names)}
    read = {k: read_config(read_loose(read_text(path), str(path)), schema) for k, path in paths.items()}
    findings = stage_findings(read, document)
    told: Plan | Job | None = _emitted(job, document["world_size"], file)
    if job.get("model") is not None:
        first = next(iter(read.values()))
        precision = job.get("precision") or conversion.precision_of(first)
        gpus = of_one_kind(job.get("gpus"), "lint") or document["world_size"]
        told = read_job({**job, "gpus": gpus, "precision": precision}).job
    if told is None:
        return Linted(kind="deepspeed", findings=findings, plan=None)
    about = About(model=told.model, cluster=told.cluster, training=told.training)
    plan = with_map(pipeline_plan(tuple(read.values()), document, about), document)
    findings = (*findings, *_refused(plan, "stages.json"))
    return Linted(kind="deepspeed", findings=findings, plan=plan)


def _refused(plan: Plan, key: str) -> tuple[Finding, ...]:
    return tuple(Finding(level="rejected", key=key, message=rule) for rule in violations(plan))


def _megatron(text: str, file: Path, job: JobWords, given: Mapping[str, str]) -> Linted:
    where = str(file)
    command = read_command_line(text, where, given)
    command = replace(command, options=with_layers(command.options, file))
    common = command.options
    if not common:
        raise InputError(f"{where}: no flags found; wanted a Megatron command line or a DeepSpeed JSON")
    document = stages_beside(file, "args.")
    if document is not None:
        return _of_stages(common, document, file, job)
    findings = [*lint_command(command, where, _known_flags()), *_written(command, where)]
    if _environment_is_said(text, None):
        findings = _without_connections(findings)
    return _alone(common, _once(findings), job, where)


def _of_stages(common: Options, document: dict[str, Any], file: Path, job: JobWords) -> Linted:
    """Emitted arguments with those of each stage."""
    where = str(file)
    per_stage, findings = _per_stage(common, document, where)
    gpus = of_one_kind(job.get("gpus"), "lint") or document["world_size"]
    if keeps_from_pricing(findings):
        return Linted(kind="megatron", findings=findings, plan=None)
    emitted = _emitted(job, gpus, file)
    cluster = _cluster(job, gpus, common, where).job.cluster if emitted is None else emitted.cluster
    plan = _with_vocabulary(plan_of(common, per_stage, cluster, where), common, _vocabulary(job, file))
    plan = _as_planned(with_map(with_stages(plan, document, where), document), file)
    return Linted(kind="megatron", findings=findings, plan=plan)


def _per_stage(
    common: Options, document: dict[str, Any], where: str
) -> tuple[tuple[Options, ...], tuple[Finding, ...]]:
    """The arguments of each stage, and what is to say about them beside the common ones."""
    stages = tuple(options_of(stage["arguments"]) for stage in document["stages"])
    findings: list[Finding] = []
    for index, options in enumerate(stages):
        findings += lint_megatron({**common, **options}, f"stage {index}", where, _known_flags())
    findings += version_notes(document)
    if _environment_is_said("", document):
        findings = _without_connections(findings)
    return stages, _once(findings)


def _stages_only(document: dict[str, Any]) -> Linted:
    """A stages.json without its folder: what differs between stages, and nothing of what they share."""
    is_megatron = document["framework"] == "megatron-core"
    name = "args.sh" if is_megatron else "ds_config.json"
    told = "not beside it: what all stages have in common stands there"
    known = _known_flags()
    wrong = tuple(
        Finding(level="rejected", key=f"--{flag}", message=f"stage {index}: no such flag")
        for index, stage in enumerate(document["stages"])
        for flag in options_of(stage["arguments"])
        if is_megatron and f"--{flag}" not in known
    )
    kind: FrameworkName = "megatron" if is_megatron else "deepspeed"
    return Linted(kind=kind, findings=(*wrong, Finding(level="open", key=name, message=told)), plan=None)


def _known_flags() -> frozenset[str]:
    """Those of the parser that flags are tested against."""
    return frozenset(load_mapping(data_folder("launch") / "megatron_flags.json")["flags"])


def _without_connections(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if "CUDA_DEVICE_MAX_CONNECTIONS" not in f.message]


def _of_yaml(run: YamlRun, file: Path, job: JobWords) -> Linted:
    """The run that a YAML file of Megatron-core's programs describes, by its keys."""
    where = str(file)
    findings = [*run.findings, *lint_megatron(run.options, "", where, _known_flags(), run.maybe)]
    if run.keys or _environment_is_said(run.environment, None):
        findings = _without_connections(findings)
    per_node = job.get("gpus_per_node") or (run.gpus_per_node if job.get("gpus") is None else None)
    words: JobWords = {**job, "gpus": job.get("gpus") or run.gpus, "gpus_per_node": per_node}
    linted = _alone(run.options, tuple(findings), words, where)
    named = {f"--{flag}": f"{key} (--{flag})" for flag, key in run.keys.items()}
    told = tuple(replace(f, key=named.get(f.key, f.key)) for f in linted.findings)
    return replace(linted, findings=told)


def _alone(common: Options, findings: tuple[Finding, ...], job: JobWords, where: str) -> Linted:
    """One command line for all ranks, with what had to be assumed to price it."""
    gpus = of_one_kind(job.get("gpus"), "lint")
    if gpus is None:
        return Linted(kind="megatron", findings=findings, plan=None)
    findings = (*findings, *missing_sizes(common))
    if keeps_from_pricing(findings):
        return Linted(kind="megatron", findings=findings, plan=None)
    asked = _cluster(job, gpus, common, where)
    vocab = _vocabulary(job, None)
    plan = _with_vocabulary(plan_of(common, (), asked.job.cluster, where), common, vocab)
    defaults = {name: told for name, told in asked.defaults.items() if name in ("--gpu", "--gpus-per-node")}
    if vocab is None and not _VOCABULARY & common.keys():
        defaults["--vocab-size"] = f"{plan.model.vocab} (the tokenizer's own, --model tells it)"
    return Linted(kind="megatron", findings=findings, plan=plan, defaults=defaults)


_VOCABULARY = frozenset({"vocab-size", "padded-vocab-size"})
"""Flags that say the rows of the token table."""


def _with_vocabulary(plan: Plan, common: Options, vocab: int | None) -> Plan:
    """With the rows that are told elsewhere, where no flag says them."""
    if vocab is None or _VOCABULARY & common.keys():
        return plan
    return replace(plan, model=replace(plan.model, vocab=vocab))


def _vocabulary(job: JobWords, emitted: Path | None) -> int | None:
    """Rows of the token table: the tokenizer says them, which stands in env.sh, so the model that the options
    name or the plan.yaml beside emitted arguments tells."""
    named = job.get("model")
    if named is not None:
        return (named if isinstance(named, ModelSpec) else load_model(named)).vocab
    beside = None if emitted is None else emitted.parent / "plan.yaml"
    return None if beside is None or not beside.is_file() else load_plan(beside).model.vocab


def _as_planned(plan: Plan, file: Path) -> Plan:
    """With what no flag says of how tokens choose experts, from the plan.yaml beside emitted arguments."""
    beside = file.parent / "plan.yaml"
    imbalance = load_plan(beside).execution.expert_imbalance if beside.is_file() else None
    return replace(plan, execution=replace(plan.execution, expert_imbalance=imbalance))


def _written(command: CommandLine, where: str) -> list[Finding]:
    """What is to say about the DeepSpeed JSONs that a script writes."""
    findings: list[Finding] = []
    for name, text in json_texts(command).items():
        reading = read_config(read_loose(text, f"{where}: {name}"), deepspeed_schema(probe=True))
        findings += (replace(f, message=f"{name}: {f.message}") for f in reading.findings)
    return findings


def _emitted(job: JobWords, gpus: int, file: Path) -> Plan | None:
    """The plan.yaml beside emitted files, unless the options name another cluster."""
    beside = file.parent / "plan.yaml"
    asked = (
        job.get("gpus"),
        job.get("gpu"),
        job.get("gpus_per_node"),
        job.get("memory_limit"),
        job.get("host_memory"),
    )
    if not beside.is_file() or any(item is not None for item in asked):
        return None
    plan = load_plan(beside)
    return plan if plan.cluster.gpus == gpus else None


def _environment_is_said(text: str, document: Mapping[str, Any] | None) -> bool:
    """Whether the variable that TP and CP need stands in the script or in stages.json."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return f"{name}=1" in text or (document is not None and document["environment"].get(name) == "1")


def _cluster(job: JobWords, gpus: int, common: Options, where: str) -> AskedJob:
    """The options with their cluster; model and batch come from the command line itself."""
    read = Reader(options=common, where=where)
    seq = job.get("seq") or training_of(read).seq_len
    named: JobWords = {**job, "model": job.get("model") or "gpt2", "gpus": gpus, "seq": seq}
    model_of(read, None)
    return read_job(named)


def _once(findings: list[Finding]) -> tuple[Finding, ...]:
    """What every stage has in common is said once."""
    by_rest: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        by_rest.setdefault((finding.level, finding.key, finding.message.partition(": ")[2]), []).append(
            finding
        )
    kept = []
    for (_, _, rest), same in by_rest.items():
        kept.append(same[0] if len(same) == 1 or not rest else replace(same[0], message=rest))
    return tuple(kept)
