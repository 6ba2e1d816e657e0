"""Where the closed form and the events disagree: in how long passes take, or in how stages wait.

The closed form knows a stage by its stable time t. The events tell what a micro-batch really took on each
stage; the closed form with those times instead splits the whole difference in two: what passes take, and the
rest, which is waiting (paths that stand still at more than one stage, extras of first and last micro-batch
that hide elsewhere).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mist_megatron.cost.iteration import StageTiming, iteration_time
from mist_megatron.cost.predict import timing_of
from mist_megatron.events.iteration import Simulation


@dataclass(frozen=True)
class Disagreement:
    """Seconds by which the closed form is above the events; the two parts add up to the difference."""

    passes_s: float
    """Because passes take another time than t says."""
    waiting_s: float
    """Because stages wait for each other in another way than the closed form says."""
    closed_stable_s: tuple[float, ...]
    """t of each stage, by the closed form ..."""
    played_stable_s: tuple[float, ...]
    """... and by the events."""

    @property
    def total_s(self) -> float:
        return self.passes_s + self.waiting_s

    @property
    def worst_stage(self) -> int:
        """The stage whose passes differ most."""
        pairs = list(zip(self.closed_stable_s, self.played_stable_s, strict=True))
        return max(range(len(pairs)), key=lambda stage: abs(pairs[stage][0] - pairs[stage][1]))


def disagreement(simulation: Simulation) -> Disagreement | None:
    """None for schedules without a closed form."""
    if simulation.closed_form_s is None:
        return None
    stages = simulation.prediction.stages
    played = _stable_times(simulation)
    timings = [_stretched(timing_of(stages, position), stable_s) for position, stable_s in enumerate(played)]
    plan = simulation.plan
    between_s = iteration_time(
        timings, plan.grad_accum, plan.schedule, plan.vpp, step_hides=simulation.prediction.step_hides
    ).total_s
    return Disagreement(
        passes_s=simulation.closed_form_s - between_s,
        waiting_s=between_s - simulation.iteration_s,
        closed_stable_s=tuple(timing_of(stages, position).stable_s for position in range(len(stages))),
        played_stable_s=played,
    )


def _stretched(timing: StageTiming, stable_s: float) -> StageTiming:
    """The same stage with another time of a micro-batch, split between the passes as before."""
    by = stable_s / timing.stable_s
    chunks = None if timing.chunks is None else timing.chunks.scaled(by)
    return replace(timing, stable_s=stable_s, forward_s=by * timing.split_s[0], chunks=chunks)


def _stable_times(simulation: Simulation) -> tuple[float, ...]:
    """Mean time of a micro-batch on each stage from when its inputs are there, first and last left out, and
    the transfers for which the stage stops. Of two micro-batches none is stable: nothing speaks against t."""
    timeline, built = simulation.timeline, simulation.built
    count = simulation.plan.grad_accum
    chosen = range(1, count - 1)
    if not chosen:
        stages = simulation.prediction.stages
        return tuple(timing_of(stages, position).stable_s for position in range(len(stages)))
    sums = [0.0] * len(simulation.plan.stages)
    for span in built.spans:
        if span.step.micro_batch in chosen:
            sums[span.stage] += float(timeline.end_s[span.last] - timeline.start_s[span.first])
    result = [total_s / len(chosen) for total_s in sums]
    if not built.sends_overlap:
        for event, kind in enumerate(built.kind):
            if kind == "send":
                seconds = float(timeline.end_s[event] - timeline.start_s[event])
                result[timeline.program.device[event]] += seconds / count
    return tuple(result)
