"""Predictions held against measured training runs; the cost model as a function of rows is for fits too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mist_megatron.ask.evaluators import evaluator_for, kept_programs
from mist_megatron.ask.links import load_links, on_first_nodes
from mist_megatron.ask.plan_words import columns, lines_repr
from mist_megatron.ask.words import with_words
from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.calibrate.pictures import require_matplotlib, svg_scatter
from mist_megatron.calibrate.profiles import profile_of
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.calibrate.validate import Outcome, Predicted, document, outcomes_of
from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.predict import job_of
from mist_megatron.cost.predict import predict as predict_plan
from mist_megatron.errors import InputError
from mist_megatron.events.engine import Progress
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.files import read_text, write_pieces
from mist_megatron.price.attention_kernels import AttentionName, EightBitAttention, with_attention
from mist_megatron.price.datasheet import datasheet_profile
from mist_megatron.price.prices import Collective, Prices
from mist_megatron.price.profile_prices import prices_of
from mist_megatron.price.wrappers import EightBitOutput, WideLayers
from mist_megatron.spec.job import Job
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.profile import Profile

WAYS = ("closed-form", "simulate")


def silent(*said: object) -> None:
    """Nobody listens."""


@dataclass(frozen=True, repr=False)
class Validated:
    """Every measured row beside what is predicted of it."""

    by_file: Mapping[str, tuple[Outcome, ...]]

    def points(self) -> dict[str, list[tuple[float, float]]]:
        """Measured and predicted seconds of the rows of each file."""
        return {
            name: [
                (outcome.row.measured_s, outcome.predicted.iteration_s)
                for outcome in outcomes
                if outcome.predicted is not None and outcome.row.measured_s is not None
            ]
            for name, outcomes in self.by_file.items()
        }

    def plotted(self, path: str | Path) -> Validated:
        """Writes predicted against measured as SVG."""
        require_matplotlib("--plot")
        write_pieces(Path(path), (svg_scatter(self.points()),))
        return self

    def to_dict(self) -> dict[str, Any]:
        """What `validate --json` prints."""
        return {**document(self.by_file)}

    def __repr__(self) -> str:
        figures = self.to_dict()
        rows = [("file", "rows", "mean error", "bias")]
        for name, file in [*figures["files"].items(), ("all", figures["overall"])]:
            errors = (file["time_mape"], file["time_bias"])
            rows.append((name, str(file["rows"]), *("-" if e is None else f"{e:.1%}" for e in errors)))
        return lines_repr(self, columns(rows))


@with_words
def validate(
    files: str | Path | Sequence[str | Path],
    *,
    by: str = "closed-form",
    links: str | Path | None = None,
    progress: Progress | None = None,
) -> Validated:
    """Measured runs in CSV files, each predicted: by the closed form of `predict`, or `by="simulate"`. With
    `links` those of several nodes are taken to have run on the first nodes of that links.yaml, in its order.
    """
    if by not in WAYS:
        raise InputError(f"--by: unknown way {by!r}; known: {', '.join(WAYS)}")
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    if not paths:
        raise InputError("files: none is named; wanted at least one CSV file of measured runs")
    read = {path: read_rows(read_text(path), str(path)) for path in paths}
    total = sum(row.plan is not None for rows in read.values() for row in rows)
    predict = predictor(by_events=by == "simulate")
    if links is not None:
        predict = linked(predict, load_links(links))
    predict = counted(predict, progress or silent, total)
    by_file: dict[str, tuple[Outcome, ...]] = {}
    for path, rows in read.items():
        name = path.name if path.name not in by_file else str(path)
        by_file[name] = outcomes_of(rows, name, predict)
    return Validated(by_file)


def linked(
    predict: Callable[[MeasuredRow], Predicted], matrices: Sequence[LinkMatrix]
) -> Callable[[MeasuredRow], Predicted]:
    """The same on nodes whose links were measured; a run on one node used none of them."""

    def on_nodes(row: MeasuredRow) -> Predicted:
        if row.plan is None or row.plan.cluster.nodes == 1:
            return predict(row)
        return predict(replace(row, plan=on_first_nodes(row.plan, matrices)))

    return on_nodes


def counted(
    predict: Callable[[MeasuredRow], Predicted], progress: Progress, total: int
) -> Callable[[MeasuredRow], Predicted]:
    """The same, with every row told; one that cannot be predicted counts too."""
    done = 0
    progress(done, total)

    def counting(row: MeasuredRow) -> Predicted:
        nonlocal done
        try:
            return predict(row)
        finally:
            done += 1
            progress(done, total)

    return counting


def predictor(
    profiles: Mapping[str, Profile] | None = None, *, by_events: bool = False
) -> Callable[[MeasuredRow], Predicted]:
    """The cost model as a function of a row; `profiles` by GPU replace the shipped ones. `by_events` takes
    the time from a simulation instead of the closed form."""
    evaluators: dict[tuple[Job, AttentionName | None, float, bool], StageEvaluator] = {}

    def predict(row: MeasuredRow) -> Predicted:
        assert row.plan is not None
        job = job_of(row.plan)
        asked = (job, row.attention, row.wide_share, row.eight_bit_output)
        if asked not in evaluators:
            evaluators[asked] = _evaluator(job, row, (profiles or {}).get(job.cluster.gpu.name))
        prediction = predict_plan(row.plan, evaluators[asked])
        timed = simulate(row.plan, evaluators[asked]) if by_events else prediction
        return Predicted(
            iteration_s=timed.iteration_s + _broadcasts_s(row, (profiles or {}).get(job.cluster.gpu.name)),
            stage_peak_bytes=tuple(stage.peak_memory_bytes for stage in prediction.stages),
            extrapolated_share=prediction.measured_share["extrapolated"],
            fits=prediction.fits,
        )

    return predict


def _broadcasts_s(row: MeasuredRow, profile: Profile | None) -> float:
    """What a ring over all replicas waits for, once for each rank that sends: their bytes are those of the
    gather that is priced."""
    if row.plan is None or not row.lone_broadcasts:
        return 0.0
    cluster, stage = row.plan.cluster, row.plan.stages[0]
    known = profile or profile_of(cluster) or datasheet_profile(cluster.gpu)
    one = Collective(
        kind="all_gather", moved_bytes=np.ones(1), ranks=np.array([stage.dp]), nodes=np.array([stage.nodes])
    )
    seconds = prices_of(known, cluster, row.plan.training.precision).of(one).seconds
    return row.lone_broadcasts * float(seconds[0])


def _evaluator(job: Job, row: MeasuredRow, profile: Profile | None) -> StageEvaluator:
    """By a profile, else the shipped one, else the datasheet, with what a row ran besides."""
    besides = row.attention is not None or row.wide_share or row.eight_bit_output
    if profile is None and not besides:
        return evaluator_for(job).evaluator
    known = profile or profile_of(job.cluster) or datasheet_profile(job.cluster.gpu)
    prices: Prices = prices_of(with_attention(known, row.attention), job.cluster, job.training.precision)
    if row.attention == "eight-bit":
        prices = EightBitAttention(prices)
    if row.wide_share:
        prices = WideLayers(prices, row.wide_share)
    if row.eight_bit_output:
        prices = EightBitOutput(prices, job.model.vocab)
    return make_evaluator(job, prices, cache=kept_programs())
