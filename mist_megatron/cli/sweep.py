"""`sweep`: one model over many clusters, or one job over all its (data, tensor, pipeline) settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from mist_megatron.cli.options import PRECISION_HELP
from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.cli.output_file import check_output_file
from mist_megatron.cli.progress import search_watch
from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from mist_megatron.ask.strategies import Strategies
    from mist_megatron.ask.sweep import SweepWords


def sweep(
    *,
    model: Annotated[str | None, typer.Option(help="Preset name, config.json, or model YAML.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Sizes of the cluster: 8,16,..,1024.")] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="GPUs: a100-sxm-80gb,h100-sxm-80gb.")] = None,
    seq: Annotated[str | None, typer.Option(help="Tokens per sequence: 4k,8k,32k.")] = None,
    bandwidth: Annotated[
        list[str] | None, typer.Option(help="Links, such as inter=50GB/s; each is another cluster.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences per step on every cluster; by default 16 per GPU.")
    ] = None,
    per_device_batch: Annotated[int | None, typer.Option(help="In place of it: per GPU and pass.")] = None,
    grad_accum: Annotated[int | None, typer.Option(help="Beside it: passes per optimizer step.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of one node.")] = None,
    precision: Annotated[str | None, typer.Option(help=PRECISION_HELP)] = None,
    target: Annotated[str | None, typer.Option(help="Framework to plan for, as in `tune`.")] = None,
    space: Annotated[
        str | None, typer.Option(help="Named space: by default full, with --strategies megatron.")
    ] = None,
    price: Annotated[list[str] | None, typer.Option(help="Dollars an hour: 2.5, or l4-24gb=0.7.")] = None,
    strategies: Annotated[
        bool, typer.Option("--strategies", help="Every (dp, tp, pp) of one job, played by events.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    csv: Annotated[Path | None, typer.Option(readable=False, help="Write the points here.")] = None,
    chart: Annotated[Path | None, typer.Option(readable=False, help="Write a picture (SVG) here.")] = None,
    output: OutputOptions,
) -> None:
    """Finds the best plan on each cluster: cost per trillion tokens, scaling; or every setting of a job."""
    _check_files(csv, chart, strategies)
    words: SweepWords = {
        "model": model, "gpus": gpus, "gpu": gpu, "seq": seq, "bandwidth": bandwidth,
        "global_batch": global_batch, "gpus_per_node": gpus_per_node, "precision": precision,
        "target": target, "price": price, "workers": workers, "per_device_batch": per_device_batch,
        "grad_accum": grad_accum,
    }  # fmt: skip
    if strategies:
        answer = _strategies(words, space)
        if not output.json:
            _show_strategies(output, answer)
        output.finish(answer.to_dict())
        _write(output, chart, answer.chart)
        return
    from mist_megatron.ask.sweep import sweep as sweep_clusters

    with search_watch() as watch:
        words["space"] = space or "full"
        swept = sweep_clusters(watch=watch, **words)
    output.finish(swept.to_dict())
    if not output.json:
        heads, rows = swept.table()
        output.people.print(swept.title, markup=False)
        output.people.print(table(heads, rows, right=[head for head in heads if head not in ("GPU", "plan")]))
        for line in swept.reasons():
            output.people.print(line, markup=False)
    _write(output, csv, swept.to_csv)
    _write(output, chart, swept.chart)


def _check_files(csv: Path | None, chart: Path | None, strategies: bool) -> None:
    """Before minutes of work."""
    from mist_megatron.calibrate.pictures import require_matplotlib

    if csv is not None:
        check_output_file("--csv", csv, read=(), example="sweep.csv")
        if strategies:
            raise InputError("--csv is of clusters; with --strategies wanted --json or --chart")
    if chart is not None:
        check_output_file("--chart", chart, read=(), example="sweep.svg")
        require_matplotlib("--chart")


def _strategies(words: SweepWords, space: str | None) -> Strategies:
    from mist_megatron.ask.strategies import one_job, strategies

    with search_watch() as watch:
        return strategies(space=space or "megatron", watch=watch, **one_job(words))


def _show_strategies(output: OutputOptions, answer: Strategies) -> None:
    from mist_megatron.ask.strategies import HEADS

    output.people.print(answer.title, markup=False)
    output.people.print(table(HEADS, answer.rows(), right=[head for head in HEADS if head]))
    if answer.gain is not None:
        output.people.print(f"the best is {answer.gain:.2f} times as fast as the worst that fits")


def _write(output: OutputOptions, path: Path | None, made: Callable[[], str]) -> None:
    from mist_megatron.formats.files import write_pieces

    if path is not None:
        write_pieces(path, (made(),))
        output.people.print(f"wrote {escape(str(path))}", soft_wrap=True)
