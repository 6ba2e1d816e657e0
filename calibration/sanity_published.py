"""Predictions beside published training runs, source by source, with the runs that are furthest off.

    python calibration/sanity_published.py MEASURED/other/published_perf.csv [--far 0.3]

Nothing is fitted here: it says where predictions and the world part. Takes the runs that `published_rows.py`
can express. Beside the mean error stands that of the same source after its own median ratio is divided out: a
source that is slow throughout (a framework's overhead, another library) keeps a small one.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from published_rows import converted, table

from mist_megatron.ask.validate import predictor
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.calibrate.validate import Outcome, outcomes_of

HEAD = """\
| source | GPU | runs | predicted | error | bias | without bias | further off than {far:.0%} |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def ratios(outcomes: Sequence[Outcome]) -> list[tuple[str, float]]:
    """(run, predicted over measured)."""
    return [(o.row.row_id, 1.0 + error) for o in outcomes if (error := o.time_error) is not None]


def line(source: str, gpu: str, outcomes: Sequence[Outcome], far: float) -> str:
    """One row of the table."""
    found = ratios(outcomes)
    if not found:
        return f"| {source} | {gpu} | {len(outcomes)} | 0 | - | - | - | - |"
    values = np.array([ratio for _, ratio in found])
    even = np.abs(values / np.median(values) - 1.0).mean()
    off = int((np.abs(values - 1.0) > far).sum())
    shares = (float(np.abs(values - 1.0).mean()), float(values.mean() - 1.0), float(even))
    return (
        f"| {source} | {gpu} | {len(outcomes)} | {len(found)} | {shares[0]:.1%} | {shares[1]:+.1%} | "
        f"{shares[2]:.1%} | {off} |"
    )


def outliers(outcomes: Sequence[Outcome], far: float) -> list[str]:
    """Runs that stay far off when the median ratio of their source is divided out."""
    found = ratios(outcomes)
    if not found:
        return []
    median = float(np.median([ratio for _, ratio in found]))
    odd = [(name, ratio) for name, ratio in found if abs(ratio / median - 1.0) > far]
    return [
        f"{name}: {ratio:.2f} of the measured time; median of the source {median:.2f}" for name, ratio in odd
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, help="published_perf.csv")
    parser.add_argument("--far", type=float, default=0.3, help="error from which a run is named")
    options = parser.parse_args()
    with options.runs.open(newline="") as file:
        groups = converted(csv.DictReader(file))
    predict = predictor()
    print(HEAD.format(far=options.far))
    named: list[str] = []
    for (source, gpu), rows in sorted(groups.items()):
        name = f"{source} on {gpu}"
        outcomes = outcomes_of(read_rows(table(rows), name), name, predict)
        print(line(source, gpu, outcomes, options.far))
        named += outliers(outcomes, options.far)
        named += [f"{o.row.row_id}: not predicted: {o.skipped}" for o in outcomes if o.skipped is not None]
    print("\n".join(["", *named]))


if __name__ == "__main__":
    main()
