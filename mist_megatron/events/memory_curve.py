"""Memory of each stage over the iteration, from the memory model's own parts.

Between passes a stage holds its states and the activations of the micro-batches in flight; during a pass what
the model says of that moment. With as many micro-batches in flight as the schedule really holds, the highest
point is the peak that `predict` gives.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import grid_of
from mist_megatron.events.built import Built, PassSpan
from mist_megatron.events.engine import Array, Timeline
from mist_megatron.spec.passes import PassKind
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.schedule import SCHEDULES

FORWARD_MOMENTS = frozenset({"forward"})
STEP_MOMENTS = frozenset({"reduction", "step"})
"""Names of the memory model's moments; all others are of backward passes."""


@dataclass(frozen=True)
class MemoryCurve:
    """Live bytes of one stage: `live_bytes[k]` from `at_s[k]` on."""

    at_s: Array
    live_bytes: Array
    in_flight: float
    """Most micro-batches held at once, in parts of the stage's chunks."""

    @property
    def peak_bytes(self) -> float:
        return float(self.live_bytes.max())

    def sampled(self, moments: Array) -> Array:
        """Largest value in each interval between moments."""
        bins = np.clip(np.searchsorted(moments, self.at_s, side="right") - 1, 0, len(moments) - 2)
        result = np.zeros(len(moments) - 1)
        np.maximum.at(result, bins, self.live_bytes)
        # What holds at the start of an interval was set before it.
        before = np.clip(np.searchsorted(self.at_s, moments[:-1], side="right") - 1, 0, None)
        return np.maximum(result, self.live_bytes[before])


def memory_curves(
    plan: Plan, schedule: str, evaluator: StageEvaluator, timeline: Timeline, built: Built
) -> tuple[MemoryCurve, ...]:
    """One curve per stage."""
    chunks = plan.vpp
    by_stage: list[list[PassSpan]] = [[] for _ in plan.stages]
    for span in built.spans:
        by_stage[span.stage].append(span)
    frees = PassKind.WEIGHT if SCHEDULES[schedule].splits_backward else PassKind.BACKWARD
    curves = []
    for position, spans in enumerate(by_stage):
        steps = [(first, last) for stage, first, last in built.steps if stage == position]
        counts = _in_flight(spans, chunks, frees)
        moments = _moments(plan, position, evaluator, counts)
        curves.append(_curve(spans, counts, moments, timeline, steps))
    return tuple(curves)


def _in_flight(spans: list[PassSpan], chunks: int, frees: PassKind) -> list[tuple[float, float]]:
    """Micro-batches held during and after each pass."""
    held, counts = 0, []
    for span in spans:
        held += span.step.kind is PassKind.FORWARD
        during = held
        held -= span.step.kind is frees
        counts.append((during / chunks, held / chunks))
    return counts


def _moments(
    plan: Plan, position: int, evaluator: StageEvaluator, counts: list[tuple[float, float]]
) -> dict[str, dict[float, float]]:
    """Bytes by kind of moment and micro-batches in flight; each distinct number is asked for once."""
    numbers = sorted({count for pair in counts for count in pair} | {0.0})
    grid = replace(grid_of(plan, position), in_flight=np.array(numbers))
    sizes = {
        name: np.broadcast_to(value, (len(numbers),))
        for name, value in evaluator.of(grid).memory_moments(grid).items()
    }
    held = sizes["held"]

    beyond_of = {name.removeprefix("beyond."): size for name, size in sizes.items() if "beyond." in name}

    def worst(names: Set[str]) -> dict[float, float]:
        sizes = [size for name, size in beyond_of.items() if name in names]
        most = np.max([held, *(held + beyond for beyond in sizes)], axis=0)
        return dict(zip(numbers, most.tolist(), strict=True))

    between = held + np.where(np.array(numbers) > 0.0, sizes["activations"], 0.0)
    return {
        "between": dict(zip(numbers, between.tolist(), strict=True)),
        "forward": worst(FORWARD_MOMENTS),
        "backward": worst(beyond_of.keys() - FORWARD_MOMENTS - STEP_MOMENTS),
        "step": worst(STEP_MOMENTS),
    }


def _curve(
    spans: list[PassSpan],
    counts: list[tuple[float, float]],
    moments: dict[str, dict[float, float]],
    timeline: Timeline,
    steps: list[tuple[int, int]],
) -> MemoryCurve:
    between = moments["between"]
    points: list[tuple[float, float]] = [(0.0, between[0.0])]
    for span, (during, after) in zip(spans, counts, strict=True):
        kind = "forward" if span.step.kind is PassKind.FORWARD else "backward"
        points.append((float(timeline.start_s[span.first]), moments[kind][during]))
        points.append((float(timeline.end_s[span.last]), between[after]))
    for first, last in steps:
        points.append((float(timeline.start_s[first]), moments["step"][0.0]))
        points.append((float(timeline.end_s[last]), between[0.0]))
    at_s, live = zip(*points, strict=True)
    most = max((during for during, _ in counts), default=0.0)
    return MemoryCurve(np.array(at_s), np.array(live), most)
