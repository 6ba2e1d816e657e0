"""`validate CSV...`: predictions held against measured training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mist_megatron.cli.output import OutputOptions, table

if TYPE_CHECKING:
    from mist_megatron.calibrate.validate import Outcome

FIGURES = (
    ("time error", "time_mape"),
    ("bias", "time_bias"),
    ("memory error", "memory_mape"),
    ("bias", "memory_bias"),
    ("regret mean", "pick_regret_mean"),
    ("max", "pick_regret_max"),
    ("extrapolated", "extrapolated_share"),
)


def validate(
    files: Annotated[list[Path], typer.Argument(help="CSV files of measured runs.", show_default=False)],
    *,
    cross_validate: Annotated[
        bool,
        typer.Option(
            "--cross-validate",
            help="Learn whole-layer times from the other groups of each file only, in 5 folds.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write predicted against measured as SVG here.")
    ] = None,
    output: OutputOptions,
) -> None:
    """Predict every measured run and report errors, bias, ranking and pick regret."""
    from mist_megatron.calibrate.refit import cross_validated
    from mist_megatron.calibrate.rows import read_rows
    from mist_megatron.calibrate.validate import document, outcomes_of
    from mist_megatron.cli.refitting import learn_layers, predictor
    from mist_megatron.spec.load import read_text

    def told(text: str) -> None:
        output.people.print(text, style="dim")

    predict = predictor()
    by_file: dict[str, tuple[Outcome, ...]] = {}
    for path in files:
        name = path.name if path.name not in by_file else str(path)
        outcomes = outcomes_of(read_rows(read_text(path), str(path)), name, predict)
        by_file[name] = cross_validated(outcomes, learn_layers, told) if cross_validate else outcomes
    found = document(by_file)
    if plot is not None:
        _write_plot(plot, by_file)
    output.finish(found)
    if not output.json:
        _show(output.people, found, by_file)


def _write_plot(path: Path, by_file: dict[str, tuple[Outcome, ...]]) -> None:
    from mist_megatron.calibrate.scatter import svg_scatter
    from mist_megatron.errors import InputError

    try:
        path.write_text(svg_scatter(_points(by_file)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--plot {path} cannot be written: {error.strerror or error}") from None


def _points(by_file: dict[str, tuple[Outcome, ...]]) -> dict[str, list[tuple[float, float]]]:
    return {
        name: [
            (outcome.row.measured_s, outcome.predicted.iteration_s)
            for outcome in outcomes
            if outcome.predicted is not None and outcome.row.measured_s is not None
        ]
        for name, outcomes in by_file.items()
    }


def _show(people: Console, found: dict[str, Any], by_file: dict[str, tuple[Outcome, ...]]) -> None:
    from mist_megatron.calibrate.scatter import text_scatter

    columns = ("file", "rows", "predicted", "rank corr.", *(title for title, _ in FIGURES))
    rows = []
    for name, figures in [*found["files"].items(), ("all", found["overall"])]:
        rank = figures["spearman"]
        cells = [
            name,
            str(figures["rows"]),
            str(figures["predicted"]),
            "-" if rank is None else f"{rank:.3f}",
        ]
        cells += ["-" if figures[key] is None else f"{figures[key]:.1%}" for _, key in FIGURES]
        rows.append(cells)
    people.print(table(columns, rows, right=columns[1:]))
    people.print()
    people.print("furthest off", style="bold")
    worst = [
        [w["id"], f"{w['measured_s']:.4g}", f"{w['predicted_s']:.4g}", f"{w['time_error']:+.1%}"]
        for w in found["overall"]["worst"]
    ]
    names = ("row", "measured s", "predicted s", "error")
    people.print(table(names, worst, right=names[1:]))
    for row, reason in found["overall"]["skipped"].items():
        people.print(f"not predicted: {row}: {reason}", soft_wrap=True, markup=False)
    people.print()
    people.print(text_scatter(_points(by_file)), markup=False)
