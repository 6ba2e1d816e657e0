"""Makes calibration/error_bars.json: how far predictions are off on sources that they have not seen.

    python calibration/error_bars.py MEASURED/end_to_end/*.csv MEASURED/other/published_perf.csv \\
        MEASURED/other/moe_perf.csv [--table]

Of a publication that is in no fit the shipped profiles predict every run. Of one that is, its chip's figures
are fitted anew to the other sources of the fit (`fit_end_to_end.py`), or, where there is no other, are those
from which that fit starts. All runs are predicted once more from datasheets alone: that is the bar of a GPU
that nobody has measured. `--table` prints errors by source for calibration/README.md.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from fit_end_to_end import CHIPS, HOST, Chip, Modeller, rows_by_source
from published_rows import converted, table

from mist_megatron.ask.validate import predictor
from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.calibrate.error_bars import (
    UNMEASURED,
    Kind,
    SourceErrors,
    errors_from_text,
    errors_to_text,
    kind_of,
)
from mist_megatron.calibrate.refit import FitLimits, fit, spread
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.calibrate.validate import Predicted, outcomes_of
from mist_megatron.cost.predict import job_of
from mist_megatron.price.datasheet import datasheet_profile
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.plan import Plan

HERE = Path(__file__).resolve().parent
Predict = Callable[[MeasuredRow], Predicted]


FITTED_MIXTURE = "Qwen3-30B-A3B h100"
"""What exchanges and launches of experts are fitted to (`cost/expert_traffic.py`, `cost/experts.py`)."""


def _mixed(plan: Plan) -> bool:
    """Whether it is of experts: dense runs of tables of many models stand in others' tables too."""
    return any(kind.experts is not None for kind in plan.model.kinds)


def read(paths: Sequence[Path]) -> dict[str, list[MeasuredRow]]:
    """Timed rows that can be predicted, by source: a file's, or whom its rows name."""
    found: dict[str, list[MeasuredRow]] = {}
    for path in paths:
        if path.name == "published_perf.csv":
            with path.open(newline="") as file:
                groups = converted(csv.DictReader(file))
            texts = [(source, table(rows)) for (source, _), rows in groups.items()]
        else:
            texts = [(path.stem, path.read_text())]
        for source, text in texts:
            for row in read_rows(text, source):
                if row.plan is None or not row.measured_s:
                    continue
                if not row.setting:
                    found.setdefault(source, []).append(row)
                elif _mixed(row.plan) and not row.setting.startswith(FITTED_MIXTURE):
                    found.setdefault(f"{row.source.split()[0]} mixtures", []).append(row)
    return found


def fitted_without(chip: Chip, source: str, paths: Sequence[Path], options: argparse.Namespace) -> Predict:
    """The model under figures that the other sources of a chip's fit give."""
    modeller = Modeller(chip.gpus)
    others = [
        row
        for name, rows in rows_by_source(paths, chip).items()
        if name != source
        for row in spread(rows, options.rows)
    ]
    start = {**chip.start, **(HOST if chip.host else {})}
    if not others:
        return modeller(start)
    limits = FitLimits(iterations=options.turns, rows=len(others), held=chip.held)
    return modeller(fit(modeller, start, others, limits))


def by_kind(source: str, how: str, rows: Sequence[MeasuredRow], predict: Predict) -> list[SourceErrors]:
    """The errors of a source, a row for each kind of its runs."""
    kinds: dict[Kind, list[float]] = {}
    for outcome in outcomes_of(rows, source, predict):
        if outcome.time_error is not None and outcome.row.plan is not None:
            kinds.setdefault(kind_of(job_of(outcome.row.plan)), []).append(outcome.time_error)
    return [
        SourceErrors(kind=kind, source=source, how=how, errors=tuple(errors))
        for kind, errors in kinds.items()
    ]


def unseen_errors(
    sources: Mapping[str, Sequence[MeasuredRow]], paths: Sequence[Path], options: argparse.Namespace
) -> list[SourceErrors]:
    """Of all sources, each without itself."""
    shipped, found = predictor(), []
    for source, rows in sources.items():
        left = list(rows)
        for name, chip in CHIPS.items():
            mine = [r for r in left if r.plan is not None and r.plan.cluster.gpu.name in chip.gpus]
            if source not in chip.sources or not mine:
                continue
            left = [row for row in left if row not in mine]
            predict = fitted_without(chip, source, paths, options)
            found += by_kind(source, f"the fit of {name} made anew without it", mine, predict)
        found += by_kind(source, "in no fit", left, shipped)
        print(f"{source}: done", flush=True)
    return found


def datasheet_errors(sources: Mapping[str, Sequence[MeasuredRow]]) -> list[SourceErrors]:
    """Of all runs, by what datasheets say."""
    sheets = predictor({name: datasheet_profile(gpu) for name, gpu in CATALOGUE.items()})
    return [each for source, rows in sources.items() for each in by_kind(source, UNMEASURED, rows, sheets)]


def told(found: Sequence[SourceErrors]) -> str:
    """A table for people."""
    lines = [
        "| source | runs | nothing of it seen because | rows | error | bias |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in found:
        if each.how != UNMEASURED:
            errors = np.array(each.errors)
            kind = f"{each.kind.words}, {each.kind.framework}"
            lines.append(
                f"| {each.source} | {kind} | {each.how} | {len(errors)} | {np.abs(errors).mean():.1%} | "
                f"{errors.mean():+.1%} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rows", type=int, default=30, help="most rows of one source that are fitted to")
    parser.add_argument("--only", action="append", help="make this source anew, keep the others; repeatable")
    parser.add_argument("--table", action="store_true", help="print the errors by source")
    parser.add_argument("--out", type=Path, default=HERE / "error_bars.json")
    options = parser.parse_args()
    sources = read(options.files)
    wanted = {name: rows for name, rows in sources.items() if name in (options.only or sources)}
    kept = errors_from_text(options.out.read_text()) if options.only else ()
    known = [each for each in kept if each.source not in wanted]
    known += unseen_errors(wanted, options.files, options) + datasheet_errors(wanted)
    options.out.write_text(errors_to_text(known))
    if options.table:
        print(told(known))


if __name__ == "__main__":
    main()
