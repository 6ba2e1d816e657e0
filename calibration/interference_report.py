"""How well co-run slowdowns are predicted, machine by machine, as a table.

    python calibration/interference_report.py MEASURED/hardware [--write calibration/README.md]

Inputs: interference_raw.csv (co-runs), collective_raw.csv and gemm_raw.csv (each stream alone). The error is
that of amounts of work which took no part in the fit, in 5 folds; beside it a model in which streams do not
disturb each other (the longest alone) and one in which they take turns (the sum). `--write` puts the table in
the place of the one in that file.
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

import numpy as np

from mist_megatron.calibrate.interference import PublishedRows, fit_interference, published_coruns
from mist_megatron.price.overlap import overlapped_time

BEGIN, END = "<!-- interference_report.py -->", "<!-- end of interference_report.py -->"
HEAD = """\
| machine | co-runs | used | ours | maximum | sum | all: ours | maximum | sum |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def read(folder: Path) -> PublishedRows:
    def rows(name: str) -> list[dict[str, str]]:
        with (folder / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return PublishedRows(
        together=rows("interference_raw"), transfers=rows("collective_raw"), products=rows("gemm_raw")
    )


def line(rows: PublishedRows, machine: str) -> str:
    """One row of the table."""
    runs = published_coruns(rows, machine)
    fit = fit_interference(runs, overlapped_time)
    longest, total = runs.alone_s.max(axis=1), runs.alone_s.sum(axis=1)
    shares = (fit.error, fit.maximum_error, fit.sum_error, fit.error_of_all)
    all_of = tuple(float(np.mean(np.abs(model / runs.together_s - 1.0))) for model in (longest, total))
    cells = [machine, f"{len(runs):,}", f"{int(fit.points.sum()):,}"]
    cells += [f"{share:.1%}" for share in (*shares, *all_of)]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("hardware", type=Path, help="folder with these CSV files")
    parser.add_argument("--write", type=Path, help="put the table in the place of the one in this file")
    options = parser.parse_args()
    rows = read(options.hardware)
    machines = sorted({row["hardware"] for row in rows.together})
    table = HEAD + "".join(line(rows, machine) for machine in machines)
    if options.write is None:
        print(table, end="")
        return
    text = options.write.read_text("utf-8")
    if BEGIN not in text or END not in text:
        parser.error(f"{options.write} has no lines {BEGIN} and {END}")
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    options.write.write_text(re.sub(pattern, f"{BEGIN}\n{table}{END}", text, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main()
