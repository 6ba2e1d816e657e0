"""Learns from measured rows what a profile holds of whole layers: for validation on unseen groups, and for
the program that builds profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mist_megatron.calibrate.rows import MeasuredRow
    from mist_megatron.calibrate.validate import Predicted
    from mist_megatron.spec.profile import Profile

Ratios = dict[tuple[float, ...], tuple[float, int]]
TURNS = 2
"""A layer is most of an iteration but not all of it: its ratio is found by repetition."""


def predictor(
    profiles: Mapping[str, Profile] | None = None, *, by_events: bool = False
) -> Callable[[MeasuredRow], Predicted]:
    """The cost model as a function of a row; `profiles` by GPU replace the shipped ones. `by_events` takes
    the time from a simulation instead of the closed form."""
    from mist_megatron.ask.evaluators import cache_directory, evaluator_for
    from mist_megatron.calibrate.validate import Predicted
    from mist_megatron.cost.evaluate import make_evaluator
    from mist_megatron.cost.predict import job_of
    from mist_megatron.cost.predict import predict as predict_plan
    from mist_megatron.price.profile_prices import prices_of

    evaluators: dict[Any, Any] = {}

    def predict(row: MeasuredRow) -> Predicted:
        assert row.plan is not None
        job = job_of(row.plan)
        if job not in evaluators:
            profile = (profiles or {}).get(job.cluster.gpu.name)
            if profile is None:
                evaluators[job] = evaluator_for(job)[0]
            else:
                prices = prices_of(profile, job.cluster, job.training.precision)
                evaluators[job] = make_evaluator(job, prices, cache=cache_directory())
        prediction, iteration_s = predict_plan(row.plan, evaluators[job]), None
        if by_events:
            from mist_megatron.events.iteration import simulate

            iteration_s = simulate(row.plan, evaluators[job]).iteration_s
        return Predicted(
            iteration_s=prediction.iteration_s if iteration_s is None else iteration_s,
            stage_peak_bytes=tuple(stage.peak_memory_bytes for stage in prediction.stages),
            extrapolated_share=prediction.measured_share["extrapolated"],
        )

    return predict


def learn_layers(rows: Sequence[MeasuredRow]) -> Callable[[MeasuredRow], Predicted]:
    """A predictor whose layer tables come from these rows alone."""
    from mist_megatron.ask.evaluators import profile_of

    clusters = {row.plan.cluster.gpu.name: row.plan.cluster for row in rows if row.plan is not None}
    found = {name: profile_of(cluster) for name, cluster in clusters.items()}
    profiles = {name: profile for name, profile in found.items() if profile is not None}
    return predictor({name: learnt_profile(profile, rows)[0] for name, profile in profiles.items()})


def learnt_profile(profile: Profile, rows: Sequence[MeasuredRow]) -> tuple[Profile, Ratios]:
    """The profile with its layer table from these rows, and that table; unchanged when it had none."""
    from mist_megatron.calibrate.refit import layer_ratios

    had = [table for table in profile.tables if table.operator == "layer"]
    if not had:
        return profile, {}
    own = [row for row in rows if row.plan is not None and row.plan.cluster.gpu.name == profile.gpu]
    ratios: Ratios = {}
    for _ in range(TURNS):
        learnt = with_layers(profile, ratios, had[0].source)
        for shape, (ratio, count) in layer_ratios(own, predictor({profile.gpu: learnt})).items():
            ratios[shape] = (ratios.get(shape, (1.0, 0))[0] * ratio, count)
    return with_layers(profile, ratios, had[0].source), ratios


def with_layers(profile: Profile, ratios: Ratios, source: str) -> Profile:
    """The profile with this layer table instead of its own."""
    from mist_megatron.spec.profile import OperatorTable

    kept = tuple(table for table in profile.tables if table.operator != "layer")
    rows = tuple((*shape, ratio) for shape, (ratio, _) in sorted(ratios.items()))
    if not rows:
        return replace(profile, tables=kept)
    layer = OperatorTable(operator="layer", precision="fp16", source=source, rows=rows)
    return replace(profile, tables=(*kept, layer))
