"""The cost model as a function of measured rows: what validation and the fitting of profiles ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mist_megatron.calibrate.rows import MeasuredRow
    from mist_megatron.calibrate.validate import Predicted
    from mist_megatron.spec.profile import Profile


def predictor(
    profiles: Mapping[str, Profile] | None = None, *, by_events: bool = False
) -> Callable[[MeasuredRow], Predicted]:
    """The cost model as a function of a row; `profiles` by GPU replace the shipped ones. `by_events` takes
    the time from a simulation instead of the closed form."""
    from mist_megatron.ask.evaluators import evaluator_for, kept_programs
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
                evaluators[job] = make_evaluator(job, prices, cache=kept_programs())
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
