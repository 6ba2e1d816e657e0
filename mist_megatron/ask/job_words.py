"""How plain words become a job: one place for the options of the command line and the arguments of Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict, TypeVar, Unpack, cast

from mist_megatron.ask.mixed_words import mixed_cluster
from mist_megatron.ask.words import Texts, texts, with_words
from mist_megatron.calibrate.profiles import read_profile_text
from mist_megatron.errors import InputError, ProfileError
from mist_megatron.formats.document import parse
from mist_megatron.formats.files import load_model
from mist_megatron.formats.gpu_yaml import gpu_from_mapping, is_gpu
from mist_megatron.spec import catalogue, check
from mist_megatron.spec.adapter import adapter_of
from mist_megatron.spec.cluster import MOST_GPUS, ClusterSpec, GpuSpec, cluster_of
from mist_megatron.spec.expert_checks import MOST_IMBALANCE
from mist_megatron.spec.job import Job, parse_bytes, parse_links
from mist_megatron.spec.kinds import BLACKWELL_RECIPES, RECIPES
from mist_megatron.spec.model import ModelSpec, with_adapter
from mist_megatron.spec.plan import TARGET_NAMES, Execution, TargetName
from mist_megatron.spec.training import PRECISION_WORDS, TrainingSpec, precision_of

Taken = TypeVar("Taken", str, int, float)


class JobWords(TypedDict, total=False):
    """A job by the names of the command line's options. What is left out, or None, is filled in and told."""

    model: str | ModelSpec | None
    """Preset name, Hugging Face config.json, model YAML, or a ModelSpec."""
    gpus: int | str | None
    """GPUs of the whole cluster, or by kind: 16xa100-sxm-80gb+16xh100-sxm-80gb."""
    gpu: str | GpuSpec | None
    """Name in the catalogue, a calibrated profile file, or a GpuSpec."""
    gpus_per_node: int | None
    """GPUs of one node."""
    global_batch: int | None
    """Sequences per optimizer step, whole cluster."""
    per_device_batch: int | None
    """In place of global_batch: sequences per GPU and pass, per_device_train_batch_size of Hugging Face."""
    grad_accum: int | None
    """Beside per_device_batch: passes per optimizer step, gradient_accumulation_steps of Hugging Face."""
    seq: int | None
    """Tokens per sequence."""
    precision: str | None
    """fp16, bf16, fp8 (delayed scaling), fp8-tensorwise, fp8-blockwise, mxfp8 or nvfp4."""
    flash_attention: bool | None
    """Fused attention kernel."""
    dropout: float | None
    """Dropout probability."""
    target: str | None
    """Framework to plan for, one of `mist_megatron.targets.table.TARGETS`, in words in docs/plan.md."""
    memory_limit: str | float | None
    """Budget per GPU: bytes, or text such as 76GiB."""
    host_memory: str | float | None
    """Budget of one node for what its GPUs keep in host memory: bytes, or text such as 1TiB."""
    moe_imbalance: float | None
    """Tokens of the busiest expert-parallel rank over the mean; 1 where balance is forced."""
    lora: str | int | None
    """Rank of low-rank adapters, which alone are trained: 16, or 16:q,v for these matrices only."""
    bandwidth: Texts
    """Link speeds that replace the catalogue's: inter=50GB/s, several of these, or {"inter": "50GB/s"}."""


@dataclass(frozen=True)
class AskedJob:
    """A job, and what was assumed because nobody said it."""

    job: Job
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Option -> the value taken and why, in the order of the options."""


SEQUENCES_PER_GPU = 16
"""Global batch when none is given: the runs of the Mist artifact (EuroSys 2025) start at 32 on 2 GPUs."""
SEQ_LEN = 2048
"""Sequence length when none is given: that of the same runs."""


def read_job(words: JobWords) -> AskedJob:
    """The job that the words name; missing ones are filled in and told, `model` and `gpus` are not."""
    named, precision, target = words.get("model"), words.get("precision"), words.get("target")
    if named is None:
        raise InputError(
            "--model is missing", details=("try: --model gpt3-7b, or see: mist-megatron models",)
        )
    if precision is not None:
        check.known("--precision", "precision", precision.lower(), PRECISION_WORDS)
    if target is not None:
        check.known("--target", "target", target, TARGET_NAMES)
    model = named if isinstance(named, ModelSpec) else load_model(named)
    if words.get("lora") is not None:
        model = with_adapter(model, adapter_of(str(words["lora"])))
    defaults: dict[str, str] = {}
    cluster = _cluster(words, defaults)
    words = {**words, "global_batch": _whole_batch(words, cluster.gpus)}
    training = _training(words, model, cluster, defaults)
    if 0 < model.learned_positions < model.first_shape.sequence(training.seq_len):
        # Frameworks make the table as long as the sequences are; it takes memory and traffic.
        why = f"the model has {model.learned_positions:,}"
        rows = _taken(defaults, "learned positions", training.seq_len, why)
        model = replace(model, learned_positions=rows)
    target = target or _taken(defaults, "--target", Job.target, "")
    return AskedJob(
        Job(
            model=model,
            training=training,
            cluster=cluster,
            target=cast(TargetName, target),
            execution=_execution(words, model),
        ),
        defaults,
    )


def _whole_batch(words: JobWords, gpus: int) -> int | None:
    """Sequences per step that the words say, by GPU or in all; None where they do not."""
    each, steps = words.get("per_device_batch"), words.get("grad_accum")
    for option, value in (("--per-device-batch", each), ("--grad-accum", steps)):
        if value is not None and value < 1:
            raise InputError(f"{option} is {value}; wanted at least 1")
    if each is None:
        if steps is not None:
            raise InputError("--grad-accum goes with --per-device-batch, of which it is so many")
        return words.get("global_batch")
    if words.get("global_batch") is not None:
        raise InputError("--per-device-batch is given beside --global-batch; wanted one of them")
    return each * (steps or 1) * gpus


def _execution(words: JobWords, model: ModelSpec) -> Execution:
    """What of it a job may say: the recipe of 8 or 4 bits, and how unevenly experts are chosen."""
    imbalance = words.get("moe_imbalance")
    execution = Execution(quantization=RECIPES.get((words.get("precision") or "").lower()))
    if imbalance is None:
        return execution
    if model.routed is None:
        raise InputError(f"--moe-imbalance is {imbalance:g}, but {model.name} has no experts")
    if not 1.0 <= imbalance <= MOST_IMBALANCE:
        raise InputError(
            f"--moe-imbalance is {imbalance:g}; wanted tokens of the busiest rank over the mean, 1 to "
            f"{MOST_IMBALANCE:g}"
        )
    return replace(execution, expert_imbalance=imbalance)


@with_words
def job(**words: Unpack[JobWords]) -> Job:
    """A job, to ask several things of; `model` and `gpus` are needed."""
    return read_job(words).job


def asked_job(given: Job | None, words: JobWords) -> AskedJob:
    """A job that was made before, or that the words name."""
    if given is None:
        return read_job(words)
    said = [name for name in JobWords.__annotations__ if words.get(name) is not None]
    if said:
        raise InputError(f"{said[0]} is given beside a job, which says it; wanted one of them")
    return AskedJob(given)


def _cluster(words: JobWords, defaults: dict[str, str]) -> ClusterSpec:
    gpus, per_node, host = words.get("gpus"), words.get("gpus_per_node"), words.get("host_memory")
    if gpus is None:
        raise InputError("--gpus is missing", details=("try: --gpus 32",))
    if isinstance(gpus, str):
        return _mixed(gpus, words)
    if gpus > MOST_GPUS:
        raise InputError(f"--gpus is {gpus}; wanted at most {MOST_GPUS}")
    named = words.get("gpu") or _taken(defaults, "--gpu", catalogue.DEFAULT_GPU, "")
    profile = None
    if not isinstance(named, GpuSpec):
        named, profile = _gpu(named)
    cluster = cluster_of(named, gpus, per_node)
    if per_node is None:
        shape = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.gpus_per_node}"
        _taken(defaults, "--gpus-per-node", cluster.gpus_per_node, shape)
    return replace(
        cluster,
        profile=profile,
        links=parse_links(texts(words.get("bandwidth")), cluster.links),
        memory_limit_bytes=_limit_bytes(words.get("memory_limit"), named),
        host_memory_bytes=None if host is None else parse_bytes(str(host), "--host-memory"),
    )


def _mixed(gpus: str, words: JobWords) -> ClusterSpec:
    """Told by kind, each with its GPU's name or profile."""
    if words.get("gpu") is not None:
        raise InputError(f"--gpu is given beside --gpus {gpus}, which names its GPUs; wanted one of them")
    cluster, host = mixed_cluster(gpus, words.get("gpus_per_node"), _gpu), words.get("host_memory")
    limits = [_limit_bytes(words.get("memory_limit"), kind.gpu) for kind in cluster.kinds]
    return replace(
        cluster,
        links=parse_links(texts(words.get("bandwidth")), cluster.links),
        memory_limit_bytes=limits[0],
        host_memory_bytes=None if host is None else parse_bytes(str(host), "--host-memory"),
    )


def _limit_bytes(limit: str | float | None, gpu: GpuSpec) -> float | None:
    if limit is None:
        return None
    limit_bytes = parse_bytes(str(limit), "--memory-limit")
    if limit_bytes > gpu.memory_bytes.value:
        has = f"{gpu.memory_bytes.value / 2**30:.1f}GiB"
        raise InputError(f"--memory-limit is {limit}; {gpu.name} has {has}")
    return limit_bytes


def _gpu(named: str) -> tuple[GpuSpec, str | None]:
    """A catalogue name, a file of one's own figures, or a profile, which names the GPU it was measured on."""
    if named in catalogue.CATALOGUE or not (named.endswith((".yaml", ".yml", ".json")) or "/" in named):
        return catalogue.gpu(named), None
    text = read_profile_text(named)
    try:
        values = parse(text, named)
    except InputError as error:
        raise ProfileError(error.message, details=error.details) from None
    if is_gpu(values):
        return gpu_from_mapping(values, named), None
    device = values.get("gpu")
    if not isinstance(device, str):
        raise ProfileError(f"{named}: not a hardware profile: it has no `gpu`")
    if device not in catalogue.CATALOGUE:
        raise ProfileError(f"{named}: gpu is {device!r}, which is in no catalogue; see `mist-megatron gpus`")
    return catalogue.gpu(device), named


def _training(
    words: JobWords, model: ModelSpec, cluster: ClusterSpec, defaults: dict[str, str]
) -> TrainingSpec:
    oldest = next((kind.gpu for kind in cluster.kinds if kind.gpu.bf16_flops_per_s is None), cluster.gpu)
    modern = oldest.bf16_flops_per_s is not None
    batch, seq = words.get("global_batch"), words.get("seq")
    precision, flash, dropout = words.get("precision"), words.get("flash_attention"), words.get("dropout")
    if batch is None:
        why = f"{SEQUENCES_PER_GPU} sequences per GPU"
        batch = _taken(defaults, "--global-batch", SEQUENCES_PER_GPU * cluster.gpus, why)
    if seq is None and model.tokens is not None:
        seq = _taken(defaults, "--seq", model.tokens, "all the model has")
    elif seq is None:
        # A table of images' positions says nothing of the text.
        rows = model.learned_positions if model.first_shape.tokens is None else 0
        longest = rows or SEQ_LEN
        why = "" if longest >= SEQ_LEN else "all the model has"
        seq = _taken(defaults, "--seq", min(SEQ_LEN, longest), why)
    if precision is not None:
        precision = precision.lower()
        for kind in cluster.kinds:
            _check_precision(precision, kind.gpu)
    else:
        why = "" if modern else f"{oldest.name} has no bf16"
        precision = _taken(defaults, "--precision", "bf16" if modern else "fp16", why)
    if flash is None:
        # FlashAttention-2 and the fused kernels of Transformer Engine start with Ampere, as bf16 does.
        why = "" if modern else f"{oldest.name} is older than the kernel"
        flash = modern
        _taken(defaults, "--flash-attention" if flash else "--no-flash-attention", "", why)
    if dropout is None:
        dropout = model.constants.dropout
        if dropout:
            _taken(defaults, "--dropout", dropout, "the model's own")
    return TrainingSpec(
        global_batch=batch,
        seq_len=seq,
        precision=precision_of(precision),
        flash_attention=flash,
        dropout=dropout,
    )


def _check_precision(precision: str, gpu: GpuSpec) -> None:
    """A chip that lacks a precision would train in it at another's speed, if at all."""
    rates = {"bf16": gpu.bf16_flops_per_s, "fp8": gpu.fp8_flops_per_s, "fp16": gpu.fp16_flops_per_s}
    if RECIPES.get(precision) in BLACKWELL_RECIPES and gpu.name not in catalogue.BLACKWELL:
        raise InputError(
            f"--precision is {precision}, of Blackwell's products alone; {gpu.name} has fp8-blockwise"
        )
    if rates[precision_of(precision)] is None:
        able = ", ".join(name for name in ("fp8", "bf16", "fp16") if rates[name] is not None)
        raise InputError(f"--precision is {precision}; {gpu.name} has {able}")


def _taken(defaults: dict[str, str], option: str, value: Taken, why: str) -> Taken:
    """Notes that a default was taken, and gives it back."""
    defaults[option] = " ".join(part for part in (str(value), why and f"({why})") if part)
    return value
