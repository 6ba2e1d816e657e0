"""The job options, the same on every command that takes a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.markup import escape

from mist_megatron.cli.expand import OptionGroup
from mist_megatron.errors import InputError
from mist_megatron.spec.check import either
from mist_megatron.spec.plan import TARGET_NAMES

if TYPE_CHECKING:  # read when a job is read: --help and completion need none of it
    from mist_megatron.ask.job_words import JobWords

PANEL = "Job"
PRECISION_HELP = "fp16, bf16, fp8 (delayed scaling), fp8-tensorwise, fp8-blockwise, mxfp8 or nvfp4."


def _tokens(text: str) -> int:
    from mist_megatron.ask.ranges import token_count

    return token_count(text)


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
    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs of the whole cluster, or by kind: 16xa100-sxm-80gb+16xh100-sxm-80gb; of `tune` also "
            "any<=512.",
            rich_help_panel=PANEL,
        ),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU name, see `gpus`, a calibrated profile, or a file of own figures.",
            autocompletion=complete_gpus,
            rich_help_panel=PANEL,
        ),
    ] = None
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of one node.", rich_help_panel=PANEL)] = None
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per optimizer step, whole cluster.", rich_help_panel=PANEL)
    ] = None
    per_device_batch: Annotated[
        int | None,
        typer.Option(
            help="In place of --global-batch: sequences per GPU and pass, Hugging Face's "
            "per_device_train_batch_size.",
            rich_help_panel=PANEL,
        ),
    ] = None
    grad_accum: Annotated[
        int | None,
        typer.Option(
            help="Beside it: passes per optimizer step, gradient_accumulation_steps; 1 by default.",
            rich_help_panel=PANEL,
        ),
    ] = None
    seq: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sequence: 8192, or 8k.", parser=_tokens, metavar="<int>", rich_help_panel=PANEL
        ),
    ] = None
    precision: Annotated[str | None, typer.Option(help=PRECISION_HELP, rich_help_panel=PANEL)] = None
    flash_attention: Annotated[
        bool | None,
        typer.Option(
            "--flash-attention/--no-flash-attention", help="Fused attention kernel.", rich_help_panel=PANEL
        ),
    ] = None
    dropout: Annotated[float | None, typer.Option(help="Dropout probability.", rich_help_panel=PANEL)] = None
    target: Annotated[
        str | None,
        typer.Option(help=f"{either(TARGET_NAMES)}.", rich_help_panel=PANEL),
    ] = None
    memory_limit: Annotated[
        str | None, typer.Option(help="Budget per GPU, such as 76GiB.", rich_help_panel=PANEL)
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Budget of one node for what its GPUs keep in host memory, such as 1TiB.",
            rich_help_panel=PANEL,
        ),
    ] = None
    moe_imbalance: Annotated[
        float | None,
        typer.Option(
            help="Tokens of the busiest expert-parallel rank over the mean, such as 1.2; 1 by default.",
            rich_help_panel=PANEL,
        ),
    ] = None
    lora: Annotated[
        str | None,
        typer.Option(
            help="Rank of low-rank adapters, which alone are trained: 16, or 16:q,v for these matrices.",
            rich_help_panel=PANEL,
        ),
    ] = None
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            help="Link speed that replaces the catalogue's, such as inter=50GB/s; may be repeated.",
            rich_help_panel=PANEL,
        ),
    ] = None

    def words(self) -> JobWords:
        """The same as the arguments of Python."""
        return cast("JobWords", {**vars(self), "gpus": self._gpus()})

    def _gpus(self) -> int | str | None:
        from mist_megatron.ask.mixed_words import is_mixed
        from mist_megatron.ask.ranges import most_of_any, whole_number

        if most_of_any("--gpus", self.gpus) is not None:
            raise InputError(f"--gpus {self.gpus} asks for their number, which `tune` alone chooses")
        if self.gpus is None or is_mixed(self.gpus):
            return self.gpus
        return whole_number("--gpus", self.gpus)


def show_taken(people: Console, defaults: Mapping[str, str]) -> None:
    """What was taken because nobody said it, for people."""
    said = ", ".join(f"{option} {value}".strip() for option, value in defaults.items())
    if said:
        people.print(f"[dim]taken by default: {escape(said)}[/dim]")
