"""`validate CSV...`: predictions held against measured training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.cli.output_file import check_output_file
from mist_megatron.cli.progress import progress_bar

if TYPE_CHECKING:
    from mist_megatron.ask.validate import Validated

LEGEND = (
    "error: mean of |predicted / measured - 1|; bias: mean of predicted / measured - 1; rank: Spearman's "
    "correlation within groups; regret: how much slower the row predicted fastest is than the fastest, mean "
    "over groups and worst; too large: rows that ran and are told not to fit; extrapolated: share of layer "
    "time from no measured kernel"
)


def validate(
    files: Annotated[list[Path], typer.Argument(help="CSV files of measured runs.", show_default=False)],
    *,
    by: Annotated[
        str, typer.Option(help="closed-form, as predict, or simulate: time from an event simulation.")
    ] = "closed-form",
    links: Annotated[
        Path | None,
        typer.Option(help="Price runs of several nodes on the first nodes of a links.yaml, in its order."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", readable=False, help="Write predicted against measured as SVG here."),
    ] = None,
    output: OutputOptions,
) -> None:
    """Predict every measured run and report errors, bias, ranking and pick regret."""
    from mist_megatron.ask.validate import validate as validate_files
    from mist_megatron.calibrate.pictures import require_matplotlib

    if plot is not None:
        check_output_file("--plot", plot, read=files, example="validated.svg")
        require_matplotlib("--plot")

    with progress_bar("predicting rows") as progress:
        validated = validate_files(files, by=by, links=links, progress=progress)
    if plot is not None:
        validated.plotted(plot)
    output.finish(validated.to_dict())
    if not output.json:
        _show(output.people, validated)


def _short(name: str) -> str:
    """Columns of 80 characters have no room for an ending that all share."""
    return name.removesuffix(".csv")


def _counts(figures: dict[str, Any]) -> str:
    rows, predicted = figures["rows"], figures["predicted"]
    return str(rows) if rows == predicted else f"{predicted} of {rows}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _time_cells(figures: dict[str, Any]) -> list[str]:
    rank = figures["spearman"]
    regrets = (figures["pick_regret_mean"], figures["pick_regret_max"])
    return [
        _percent(figures["time_mape"]),
        _percent(figures["time_bias"]),
        "-" if rank is None else f"{rank:.3f}",
        *map(_percent, regrets),
    ]


def _memory_cells(figures: dict[str, Any]) -> list[str]:
    errors = [_percent(figures[key]) for key in ("memory_mape", "memory_bias")]
    return [*errors, f"{figures['too_large'] or '-'}", _percent(figures["extrapolated_share"])]


PARTS = (("model, hardware, precision", "by_setting"), ("source", "by_source"))
MOST_TOLD = 20
"""Rows that are left out one by one; of more, how many there are for each reason."""


def _show_parts(people: Console, figures: dict[str, Any]) -> None:
    """Errors of rows that are alike, in files of many models."""
    for title, key in PARTS:
        if key not in figures:
            continue
        names = (title, "rows", "error", "bias", "memory")
        keys = ("time_mape", "time_bias", "memory_mape")
        rows = [
            [name, _counts(each), *(_percent(each[key]) for key in keys)]
            for name, each in figures[key].items()
        ]
        people.print(table(names, rows, right=names[1:]))
        people.print()


def _show_skipped(people: Console, skipped: dict[str, str]) -> None:
    """What was left out, and why."""
    if len(skipped) <= MOST_TOLD:
        for row, reason in skipped.items():
            people.print(f"not predicted: {row}: {reason}", soft_wrap=True, markup=False)
        return
    reasons = sorted(set(skipped.values()), key=lambda reason: -list(skipped.values()).count(reason))
    for reason in reasons:
        count = list(skipped.values()).count(reason)
        people.print(f"not predicted: {count} rows: {reason}", soft_wrap=True, markup=False)


def _show(people: Console, validated: Validated) -> None:
    from mist_megatron.calibrate.text_scatter import text_scatter

    document = validated.to_dict()
    everything = [*document["files"].items(), ("all", document["overall"])]
    names = ("time", "rows", "error", "bias", "rank", "regret", "worst")
    rows = [[_short(name), _counts(figures), *_time_cells(figures)] for name, figures in everything]
    people.print(table(names, rows, right=names[1:]))
    people.print()
    memory = ("memory", "error", "bias", "too large", "extrapolated")
    people.print(
        table(
            memory,
            [[_short(name), *_memory_cells(figures)] for name, figures in everything],
            right=memory[1:],
        )
    )
    people.print()
    people.print(LEGEND, style="dim")
    people.print()
    _show_parts(people, document["overall"])
    people.print("furthest off", style="bold")
    worst = [
        [w["id"], f"{w['measured_s']:.4g}", f"{w['predicted_s']:.4g}", f"{w['time_error']:+.1%}"]
        for w in document["overall"]["worst"]
    ]
    columns = ("row", "measured s", "predicted s", "error")
    people.print(table(columns, worst, right=columns[1:]))
    _show_skipped(people, document["overall"]["skipped"])
    people.print()
    people.print(text_scatter(validated.points()), markup=False)
