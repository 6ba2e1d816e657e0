"""Makes calibration/error_bars.json: how far predictions are off on sources that they have not seen.

    python calibration/error_bars.py MEASURED/end_to_end/*.csv MEASURED/other/published_perf.csv \\
        MEASURED/other/moe_perf.csv --write calibration/README.md

Of a publication that is in no fit the shipped profiles predict every run. Of one that is, its chip's figures
are fitted anew to the other sources of the fit (`fit_end_to_end.py`), or, where there is no other, are those
from which that fit starts. All runs are predicted once more from datasheets alone: that is the bar of a GPU
that nobody has measured. `--write calibration/README.md` puts errors by source and bars by kind of runs
there; with `--told` they are those of the file that is there, and nothing is fitted.
"""

from __future__ import annotations

import argparse
import csv
import re
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
    bar_among,
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
BEGIN, END = "<!-- error_bars.py -->", "<!-- end of error_bars.py -->"
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
    """Errors by source, what they come to, and the bars, as tables for people."""
    seen = [each for each in found if each.how != UNMEASURED]
    lines = [
        "| source | runs | nothing of it seen because | rows | error | bias |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in seen:
        errors = np.array(each.errors)
        kind = f"{each.kind.words}, {each.kind.framework}"
        lines.append(
            f"| {each.source} | {kind} | {each.how} | {len(errors)} | {np.abs(errors).mean():.1%} | "
            f"{errors.mean():+.1%} |"
        )
    sums = {
        "mixtures": [each for each in seen if each.kind.experts],
        "dense": [each for each in seen if not each.kind.experts],
        "dense without vTrain's, which are of one machine": [
            each for each in seen if not each.kind.experts and each.source != "vtrain_a100"
        ],
    }
    lines += ["", "| all | rows | error | median |", "| --- | --- | --- | --- |"]
    for name, own in sums.items():
        errors = np.abs([error for each in own for error in each.errors])
        lines.append(f"| {name} | {len(errors):,} | {errors.mean():.1%} | {np.median(errors):.1%} |")
    lines += ["", "| runs | bar | sources | rows |", "| --- | --- | --- | --- |"]
    for runs in dict.fromkeys(each.kind for each in seen):
        bar = bar_among(found, runs, profiled=True)
        like = "" if bar.like == runs.words else f" (of {bar.like})"
        lines.append(
            f"| {runs.words}, {runs.framework} | {bar.share:.0%}{like} | {bar.sources} | {bar.rows} |"
        )
    return "\n".join(lines)


def written(page: str, tables: str) -> str:
    """The page with these tables between their marks."""
    if BEGIN not in page or END not in page:
        raise SystemExit(f"the page has no lines {BEGIN} and {END}")
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    return re.sub(pattern, lambda _: f"{BEGIN}\n{tables}\n{END}", page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rows", type=int, default=30, help="most rows of one source that are fitted to")
    parser.add_argument("--only", action="append", help="make this source anew, keep the others; repeatable")
    parser.add_argument("--told", action="store_true", help="only tell what --out has")
    parser.add_argument("--write", type=Path, help="put the tables in the place of those in this file")
    parser.add_argument("--out", type=Path, default=HERE / "error_bars.json")
    options = parser.parse_args()
    known = list(errors_from_text(options.out.read_text()) if options.told or options.only else ())
    if not options.told:
        sources = read(options.files)
        wanted = {name: rows for name, rows in sources.items() if name in (options.only or sources)}
        known = [each for each in known if each.source not in wanted]
        known += unseen_errors(wanted, options.files, options) + datasheet_errors(wanted)
        options.out.write_text(errors_to_text(known))
    tables = told(known)
    if options.write is None:
        print(tables)
    else:
        options.write.write_text(written(options.write.read_text("utf-8"), tables), "utf-8")


if __name__ == "__main__":
    main()
