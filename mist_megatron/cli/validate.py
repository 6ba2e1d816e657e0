"""`validate CSV...`: predictions held against measured training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mist_megatron.cli.output import OutputOptions, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from mist_megatron.calibrate.rows import MeasuredRow
    from mist_megatron.calibrate.validate import Outcome, Predicted

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
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write predicted against measured as SVG here.")
    ] = None,
    output: OutputOptions,
) -> None:
    """Predict every measured run and report errors, bias, ranking and pick regret."""
    from mist_megatron.calibrate.rows import read_rows
    from mist_megatron.calibrate.validate import document, outcomes_of
    from mist_megatron.spec.load import read_text

    predict = row_predictor()
    by_file: dict[str, tuple[Outcome, ...]] = {}
    for path in files:
        name = path.name if path.name not in by_file else str(path)
        by_file[name] = outcomes_of(read_rows(read_text(path), str(path)), name, predict)
    found = document(by_file)
    if plot is not None:
        _write_plot(plot, by_file)
    output.finish(found)
    if not output.json:
        _show(output.people, found, by_file)


def row_predictor() -> Callable[[MeasuredRow], Predicted]:
    """The cost model as a function of a row; evaluators of equal jobs are made once."""
    from mist_megatron.calibrate.validate import Predicted
    from mist_megatron.cli.evaluators import evaluator_for
    from mist_megatron.cost.predict import job_of
    from mist_megatron.cost.predict import predict as predict_plan

    evaluators: dict[Any, Any] = {}

    def predict(row: MeasuredRow) -> Predicted:
        assert row.plan is not None
        job = job_of(row.plan)
        if job not in evaluators:
            evaluators[job] = evaluator_for(job)[0]
        prediction = predict_plan(row.plan, evaluators[job])
        return Predicted(
            iteration_s=prediction.iteration_s,
            stage_peak_bytes=tuple(stage.peak_memory_bytes for stage in prediction.stages),
            extrapolated_share=prediction.measured_share["extrapolated"],
        )

    return predict


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
