"""The job options, the same on every command that takes a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from mist_megatron.cli.expand import OptionGroup
from mist_megatron.errors import InputError, ProfileError
from mist_megatron.spec.plan import TARGET_NAMES

if TYPE_CHECKING:  # read when a job is read: --help and completion need none of it
    from mist_megatron.spec.cluster import ClusterSpec, GpuSpec
    from mist_megatron.spec.job import Job
    from mist_megatron.spec.model import ModelSpec
    from mist_megatron.spec.plan import TargetName
    from mist_megatron.spec.training import Precision, TrainingSpec

PANEL = "Job"
Taken = TypeVar("Taken", str, int)


def complete_models(incomplete: str) -> list[str]:
    """Preset names for the shell; a path completes as a file does when nothing matches."""
    from mist_megatron.spec.presets import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_gpus(incomplete: str) -> list[str]:
    """Catalogue names for the shell."""
    from mist_megatron.spec.catalogue import gpu_names

    return [name for name in gpu_names() if name.startswith(incomplete)]


@dataclass(frozen=True)
class JobOptions(OptionGroup):
    """What was typed; None where the user said nothing, so that the defaults taken can be told."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Preset name, Hugging Face config.json, or model YAML.",
            autocompletion=complete_models,
            rich_help_panel=PANEL,
        ),
    ] = None
    gpus: Annotated[int | None, typer.Option(help="GPUs of the whole cluster.", rich_help_panel=PANEL)] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU name, see `gpus`, or a calibrated profile file.",
            autocompletion=complete_gpus,
            rich_help_panel=PANEL,
        ),
    ] = None
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of one node.", rich_help_panel=PANEL)] = None
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per optimizer step, whole cluster.", rich_help_panel=PANEL)
    ] = None
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence.", rich_help_panel=PANEL)] = None
    precision: Annotated[str | None, typer.Option(help="fp16, bf16 or fp8.", rich_help_panel=PANEL)] = None
    flash_attention: Annotated[
        bool | None,
        typer.Option(
            "--flash-attention/--no-flash-attention", help="Fused attention kernel.", rich_help_panel=PANEL
        ),
    ] = None
    dropout: Annotated[float | None, typer.Option(help="Dropout probability.", rich_help_panel=PANEL)] = None
    target: Annotated[
        str | None,
        typer.Option(
            help="mist, megatron, megatron+patches, deepspeed or deepspeed+patches.", rich_help_panel=PANEL
        ),
    ] = None
    memory_limit: Annotated[
        str | None, typer.Option(help="Budget per GPU, such as 76GiB.", rich_help_panel=PANEL)
    ] = None
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            help="Link speed that replaces the catalogue's, such as inter=50GB/s; may be repeated.",
            rich_help_panel=PANEL,
        ),
    ] = None


@dataclass(frozen=True)
class TakenJob:
    """A job, and what was assumed because nobody said it."""

    job: Job
    defaults: Mapping[str, str]
    """Option -> the value taken and why, in the order of the options."""

    def lines(self) -> list[str]:
        """What was assumed, for people."""
        return [f"{option} {value}".strip() for option, value in self.defaults.items()]


SEQUENCES_PER_GPU = 16
"""Global batch when none is given: the runs of the Mist artifact (EuroSys 2025) start at 32 on 2 GPUs."""
SEQ_LEN = 2048
"""Sequence length when none is given: that of the same runs."""


def read_job(options: JobOptions) -> TakenJob:
    """The job that the options name; missing ones are filled in and told, `--model` and `--gpus` are not."""
    from mist_megatron.formats.files import load_model
    from mist_megatron.spec import check
    from mist_megatron.spec.job import PRECISIONS, Job

    if options.model is None:
        raise InputError(
            "--model is missing", details=("try: --model gpt3-7b, or see: mist-megatron models",)
        )
    if options.precision is not None:
        check.known("--precision", "precision", options.precision, PRECISIONS)
    if options.target is not None:
        check.known("--target", "target", options.target, TARGET_NAMES)
    model = load_model(options.model)
    defaults: dict[str, str] = {}
    cluster = _cluster(options, defaults)
    training = _training(options, model, cluster, defaults)
    target = options.target or _taken(defaults, "--target", Job.target, "")
    return TakenJob(
        Job(model=model, training=training, cluster=cluster, target=cast("TargetName", target)),
        MappingProxyType(defaults),
    )


def _cluster(options: JobOptions, defaults: dict[str, str]) -> ClusterSpec:
    from mist_megatron.spec import catalogue
    from mist_megatron.spec.cluster import MOST_GPUS, cluster_of
    from mist_megatron.spec.job import parse_bytes, parse_links

    if options.gpus is None:
        raise InputError("--gpus is missing", details=("try: --gpus 32",))
    if options.gpus > MOST_GPUS:
        raise InputError(f"--gpus is {options.gpus}; wanted at most {MOST_GPUS}")
    named = options.gpu or _taken(defaults, "--gpu", catalogue.DEFAULT_GPU, "")
    gpu, profile = _gpu(named)
    cluster = cluster_of(gpu, options.gpus, options.gpus_per_node)
    if options.gpus_per_node is None:
        shape = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.gpus_per_node}"
        _taken(defaults, "--gpus-per-node", cluster.gpus_per_node, shape)
    limit_bytes = None
    if options.memory_limit is not None:
        limit_bytes = parse_bytes(options.memory_limit, "--memory-limit")
        if limit_bytes > gpu.memory_bytes.value:
            has = f"{gpu.memory_bytes.value / 2**30:.1f}GiB"
            raise InputError(f"--memory-limit is {options.memory_limit}; {gpu.name} has {has}")
    return replace(
        cluster,
        profile=profile,
        links=parse_links(tuple(options.bandwidth or ()), cluster.links),
        memory_limit_bytes=limit_bytes,
    )


def _gpu(named: str) -> tuple[GpuSpec, str | None]:
    """A catalogue name, or a profile file, which names the GPU that it was measured on."""
    from mist_megatron.calibrate.profiles import read_profile_text
    from mist_megatron.formats.document import parse
    from mist_megatron.spec import catalogue

    if named in catalogue.CATALOGUE or not (named.endswith((".yaml", ".yml", ".json")) or "/" in named):
        return catalogue.gpu(named), None
    text = read_profile_text(named)
    try:
        device = parse(text, named).get("gpu")
    except InputError as error:
        raise ProfileError(error.message, details=error.details) from None
    if not isinstance(device, str):
        raise ProfileError(f"{named}: not a hardware profile: it has no `gpu`")
    if device not in catalogue.CATALOGUE:
        raise ProfileError(f"{named}: gpu is {device!r}, which is in no catalogue; see `mist-megatron gpus`")
    return catalogue.gpu(device), named


def _training(
    options: JobOptions, model: ModelSpec, cluster: ClusterSpec, defaults: dict[str, str]
) -> TrainingSpec:
    from mist_megatron.spec.training import TrainingSpec

    modern = cluster.gpu.bf16_flops_per_s is not None
    batch = options.global_batch
    if batch is None:
        why = f"{SEQUENCES_PER_GPU} sequences per GPU"
        batch = _taken(defaults, "--global-batch", SEQUENCES_PER_GPU * cluster.gpus, why)
    seq = options.seq
    if seq is None:
        longest = model.learned_positions or SEQ_LEN
        seq = _taken(
            defaults, "--seq", min(SEQ_LEN, longest), "" if longest >= SEQ_LEN else "all the model has"
        )
    precision = options.precision
    if precision is not None:
        _check_precision(precision, cluster.gpu)
    if precision is None:
        why = "" if modern else f"{cluster.gpu.name} has no bf16"
        precision = _taken(defaults, "--precision", "bf16" if modern else "fp16", why)
    flash = options.flash_attention
    if flash is None:
        # FlashAttention-2 and the fused kernels of Transformer Engine start with Ampere, as bf16 does.
        why = "" if modern else f"{cluster.gpu.name} is older than the kernel"
        flash = modern
        _taken(defaults, "--flash-attention" if flash else "--no-flash-attention", "", why)
    return TrainingSpec(
        global_batch=batch,
        seq_len=seq,
        precision=cast("Precision", precision),
        flash_attention=flash,
        dropout=0.0 if options.dropout is None else options.dropout,
    )


def _check_precision(precision: str, gpu: GpuSpec) -> None:
    """A chip that lacks a precision would train in it at another's speed, if at all."""
    rates = {"bf16": gpu.bf16_flops_per_s, "fp8": gpu.fp8_flops_per_s, "fp16": gpu.fp16_flops_per_s}
    if rates[precision] is None:
        able = ", ".join(name for name in ("fp8", "bf16", "fp16") if rates[name] is not None)
        raise InputError(f"--precision is {precision}; {gpu.name} has {able}")


def _taken(defaults: dict[str, str], option: str, value: Taken, why: str) -> Taken:
    """Notes that a default was taken, and gives it back."""
    defaults[option] = " ".join(part for part in (str(value), why and f"({why})") if part)
    return value
