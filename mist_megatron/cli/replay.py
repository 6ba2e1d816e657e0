"""`replay TRACE...`: recorded steps, explained and asked what if."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from mist_megatron.cli.output import OutputOptions
from mist_megatron.cli.output_file import check_output_file
from mist_megatron.errors import InputError

SCALE = (
    "What if: kernel=REGEX:F or op=REGEX:F takes F times as long, an operator with all that it calls and "
    "launches; may be repeated."
)
WAITS = (
    "Which waits between streams count: known (what the trace says), or inferred too (guesses for kernels "
    "that start late)."
)


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
    scale: Annotated[list[str] | None, typer.Option(help=SCALE)] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="The plan.yaml that was run: prediction beside measurement, term by term."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="What if: kernels take what they would on this GPU of the catalogue, or profile."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help="What if: so many layers. What repeats in the recording takes as many times as long."
        ),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="What if: so many micro-batches a step. Not of pipelines.")
    ] = None,
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
    from mist_megatron.ask.recording_words import how_to_record
    from mist_megatron.ask.replay import replay as replay_traces
    from mist_megatron.cli.replay_report import show_replay

    if how is not None:
        lines = how_to_record(how)
        output.finish({"how": how, "lines": list(lines)})
        if not output.json:
            for line in lines:
                output.people.print(line, soft_wrap=True, markup=False)
        return
    if not traces:
        raise InputError("no trace is given; wanted files or folders", details=("try: --how torch",))
    if trace is not None:
        check_output_file("--trace", trace, read=tuple(traces), example="replayed.json")
    played = replay_traces(
        [*traces],
        step=step,
        scale=scale,
        gpu=gpu,
        layers=layers,
        micro_batches=micro_batches,
        against=against,
        waits=waits,
        partial=partial,
        trace=trace,
    )
    output.finish(played.to_dict())
    if output.json:
        return
    show_replay(output.people, played)
    if trace is not None:
        output.people.print(f"wrote {escape(str(trace))}, for ui.perfetto.dev", soft_wrap=True)
