"""`replay TRACE...`: recorded steps, explained and asked what if."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mist_megatron.cli.expand import OptionGroup
from mist_megatron.cli.output import OutputOptions
from mist_megatron.cli.output_file import check_output_file
from mist_megatron.cli.progress import busy
from mist_megatron.errors import InputError

PANEL = "What if"
SCALE = (
    "kernel=REGEX:F or op=REGEX:F takes F times as long, an operator with all that it calls and "
    "launches; may be repeated."
)
WAITS = (
    "Which waits between streams count: known (what the trace says), or inferred too (guesses for kernels "
    "that start late)."
)


@dataclass(frozen=True)
class WhatIfOptions(OptionGroup):
    """What would be different."""

    scale: Annotated[list[str] | None, typer.Option(help=SCALE, rich_help_panel=PANEL)] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Kernels take what they would on this GPU of the catalogue, or profile.",
            rich_help_panel=PANEL,
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(help="So many layers: what repeats takes as many times as long.", rich_help_panel=PANEL),
    ] = None
    dp: Annotated[
        int | None,
        typer.Option(help="So many data-parallel ranks: collectives re-timed.", rich_help_panel=PANEL),
    ] = None
    micro_batches: Annotated[
        int | None, typer.Option(help="So many micro-batches a step.", rich_help_panel=PANEL)
    ] = None
    pp: Annotated[
        int | None,
        typer.Option(help="So many pipeline stages: recorded passes in 1F1B's order.", rich_help_panel=PANEL),
    ] = None
    hidden: Annotated[
        int | None,
        typer.Option(help="So wide tokens; heads grow with them, the MLP does not.", rich_help_panel=PANEL),
    ] = None
    ffn: Annotated[int | None, typer.Option(help="So wide inside the MLP.", rich_help_panel=PANEL)] = None
    tp: Annotated[
        int | None,
        typer.Option(help="So many tensor-parallel ranks; dp and pp stay.", rich_help_panel=PANEL),
    ] = None


@dataclass(frozen=True)
class AgainstOptions(OptionGroup):
    """What was predicted."""

    against: Annotated[
        Path | None,
        typer.Option(help="The plan.yaml that was run: prediction beside measurement, term by term."),
    ] = None
    recalibrate: Annotated[
        bool,
        typer.Option(
            "--recalibrate", help="Write a profile with what was measured to --out; tell what it changes."
        ),
    ] = False
    out: Annotated[Path | None, typer.Option(help="The profile of --recalibrate (.yaml).")] = None

    def target(self) -> Path | None:
        """Where the profile goes; None where none is asked for."""
        if self.recalibrate and self.out is None:
            raise InputError(
                "--recalibrate needs --out, the profile to write", details=("try: --out measured.yaml",)
            )
        if self.out is not None and not self.recalibrate:
            raise InputError("--out is of --recalibrate; wanted both or none")
        return self.out


def replay(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces of torch.profiler, one per rank (.json, .json.gz), or folders of them."),
    ] = None,
    *,
    step: Annotated[
        int | None,
        typer.Option(help="Play this ProfilerStep alone; else everything, and a typical step is told."),
    ] = None,
    what_if: WhatIfOptions,
    plan: AgainstOptions,
    waits: Annotated[str, typer.Option(help=WAITS)] = "known",
    partial: Annotated[
        bool, typer.Option("--partial", help="Use what stands before where a file is cut off.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            readable=False, help="Write the replayed timeline, for ui.perfetto.dev and `replay`, here."
        ),
    ] = None,
    how: Annotated[
        str | None,
        typer.Option(help="Tell how to record traces with: torch, megatron, deepspeed; and nothing else."),
    ] = None,
    output: OutputOptions,
) -> None:
    """Plays recorded steps again: where the time goes, who waited for whom, what another speed would give."""
    from mist_megatron.ask.replay import replay as replay_traces
    from mist_megatron.cli.replay_report import show_replay

    if how is not None:
        _tell_how(how, output)
        return
    if not traces:
        raise InputError("no trace is given; wanted files or folders", details=("try: --how torch",))
    if trace is not None:
        check_output_file("--trace", trace, read=tuple(traces), example="replayed.json")
    with busy("reading and playing"):
        played = replay_traces(
            [*traces], step=step, scale=what_if.scale, gpu=what_if.gpu, dp=what_if.dp, layers=what_if.layers,
            micro_batches=what_if.micro_batches, pp=what_if.pp, hidden=what_if.hidden, ffn=what_if.ffn,
            tp=what_if.tp, against=plan.against, recalibrate=plan.target(), waits=waits,
            partial=partial, trace=trace,
        )  # fmt: skip
    output.finish(played.to_dict())
    if output.json:
        return
    show_replay(output.people, played)
    if trace is not None:
        output.people.print(f"wrote {escape(str(trace))}, for ui.perfetto.dev", soft_wrap=True)


def _tell_how(framework: str, output: OutputOptions) -> None:
    from mist_megatron.ask.recording_words import how_to_record

    lines = how_to_record(framework)
    output.finish({"how": framework, "lines": list(lines)})
    if not output.json:
        for line in lines:
            output.people.print(line, soft_wrap=True, markup=False)
