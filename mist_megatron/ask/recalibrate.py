"""A profile with what traces measured in it, and what that changes: the plan's prediction, and the plan that
is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.plan_words import shape_words
from mist_megatron.ask.tune import tune
from mist_megatron.calibrate.fit_profile import FitRequest, fit_profile
from mist_megatron.calibrate.import_kineto import read_kineto
from mist_megatron.calibrate.imported import Hints
from mist_megatron.calibrate.measurements import Raw
from mist_megatron.calibrate.profiles import base_profile, write_profile
from mist_megatron.cost.predict import job_of
from mist_megatron.cost.predict import predict as predict_plan
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.formats.files import written_on
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan
from mist_megatron.traces.columns import Trace


@dataclass(frozen=True, kw_only=True)
class Recalibrated:
    """A new profile and what follows from it."""

    profile: Path
    points: int
    """Products, attention, copies and collectives that the traces measured."""
    measured_s: float
    before_s: float
    """The plan's step as it was predicted ..."""
    after_s: float
    """... and by the new profile."""
    best_before: str
    """The plan that `tune` chooses for the same job ..."""
    best_after: str
    """... and with the new profile."""
    gain: float
    """How many times as fast the new choice is as the old one, by the new profile."""
    notes: tuple[str, ...]

    @property
    def changes_plan(self) -> bool:
        return self.best_before != self.best_after


def recalibrated(
    traces: Sequence[Trace], plan: Plan, measured_s: float, out: Path, *, force: bool = False
) -> Recalibrated:
    """Writes the profile; refused where traces hold nothing that a profile has."""
    if any(trace.after for trace in traces):
        raise InputError("--recalibrate: a simulated trace measures nothing; wanted traces of a run")
    share = plan.cluster.gpus_per_node
    hints = [Hints(date=written_on(Path(trace.where)), gpus_per_node=share) for trace in traces]
    imported = read_kineto(traces, hints)
    raws = [
        Raw(where=trace.where, conditions={item.identity: item for item in one.conditions}, points=one.points)
        for trace, one in zip(traces, imported, strict=True) if one.points
    ]  # fmt: skip
    gpu = plan.cluster.gpu
    request = FitRequest(
        name=out.stem, gpu=gpu, base=base_profile(gpu, plan.cluster.profile), overlap=overlapped_time,
        rehearsal=False, told=lambda text: None,
    )  # fmt: skip
    fitted = fit_profile(raws, request)
    write_profile(fitted.profile, out, force=force)
    job = job_of(plan)
    again = replace(job, cluster=replace(job.cluster, profile=str(out)))
    moved = replace(plan, cluster=again.cluster)
    best_before, best_after = _best(job), _best(again)
    old_choice = replace(best_before, cluster=again.cluster) if best_before is not None else None
    gain = 1.0
    if old_choice is not None and best_after is not None:
        gain = _predicted(old_choice) / _predicted(best_after)
    return Recalibrated(
        profile=out, points=sum(len(raw.points) for raw in raws), measured_s=measured_s,
        before_s=_predicted(plan), after_s=_predicted(moved), best_before=_words(best_before),
        best_after=_words(best_after), gain=gain, notes=tuple(fitted.notes),
    )  # fmt: skip


def _predicted(plan: Plan) -> float:
    return predict_plan(plan, evaluator_for(job_of(plan)).evaluator).iteration_s


def _best(job: Job) -> Plan | None:
    try:
        return tune(job).plan
    except NoFeasiblePlan:
        return None


def _words(plan: Plan | None) -> str:
    return "no plan fits" if plan is None else shape_words(plan)
