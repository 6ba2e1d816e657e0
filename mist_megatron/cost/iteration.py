"""Time of one optimizer step from the times of its pipeline stages (Mist, EuroSys 2025, eq. 1).

    T = (G - 1) max_i t_i + sum_i t_i + max_i (d_i - sum_{j<i} t_j)

t_i is the stable micro-batch time of stage i, d_i the extra time of its first plus its last micro-batch
(a later stage finishes earlier, so part of its extra hides behind the drain of the stages before it).
What the paper leaves out - boundary transfers, optimizer compute, host Adam, gradient accumulation - is
folded into t_i and d_i by `stage_time`, so that this form, and every search over it, stays exact.

It is exact for equal stages and for stages that get slower towards the end, and an upper bound otherwise
(a slow early stage fills part of its wait with warm-up forwards); the event simulator gives the exact time.

Other schedules keep the form and change what the ramp-up and drain cost per stage, r_i:

    T = G max_i t_i + (sum_i r_i - r_b) + max_i (d_i - sum_{j<i} r_j),   b = argmax t

* 1f1b, gpipe: r = t (GPipe's bubble is as long as 1F1B's, only its memory is larger).
* interleaved with v chunks: r = t / v, because a chunk is handed on after 1/v of the layers. With
  t' = t / v this is eq. 1 with v G micro-batches, which is how a search can use it.
* zb-h1: r = t - 2 w, with w the weight-gradient part of backward, which fills the bubble
  (Qi et al. 2023: bubble (p-1)(F + B - W) where the backward pass costs B + W).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mist_megatron.spec.plan import Schedule


@dataclass(frozen=True, kw_only=True)
class StageTiming:
    """What the iteration formula needs of one stage."""

    stable_s: float
    delta_s: float
    weight_grad_s: float = 0.0
    """Part of the backward pass that only makes weight gradients: what zb-h1 moves into bubbles."""


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """The parts of an iteration; they add up to `total_s`."""

    steady_s: float
    """(G - 1) of the slowest stage's stable micro-batch."""
    ramp_s: float
    """One micro-batch through all stages: fills and drains the pipeline."""
    first_and_last_s: float
    """Exposed extra of the first and last micro-batch: optimizer, gathers, gradient reduction."""
    bubble_fraction: float
    """Share of the iteration in which the slowest stage waits for others to fill or drain."""
    slowest_stage: int
    binding_extra_stage: int
    """Stage whose first-and-last extra is exposed."""

    @property
    def total_s(self) -> float:
        return self.steady_s + self.ramp_s + self.first_and_last_s


def ramp_of(stage: StageTiming, schedule: Schedule, vpp: int) -> float:
    """What one stage adds to filling and draining the pipeline."""
    if schedule == "interleaved":
        return stage.stable_s / vpp
    if schedule == "zb-h1":
        return max(stage.stable_s - 2.0 * stage.weight_grad_s, 0.0)
    return stage.stable_s


def iteration_time(
    stages: Sequence[StageTiming], grad_accum: int, schedule: Schedule = "1f1b", vpp: int = 1
) -> IterationTime:
    """Eq. 1 and its other schedules; `stages` from first to last."""
    slowest = max(range(len(stages)), key=lambda index: stages[index].stable_s)
    ramps = [ramp_of(stage, schedule, vpp) for stage in stages]
    stable = stages[slowest].stable_s
    # The slowest stage computes all G micro-batches in full; only the others shrink to their ramp.
    ramp = stable + sum(ramps) - ramps[slowest]
    before = 0.0
    extra, binding = float("-inf"), 0
    for index, stage in enumerate(stages):
        if stage.delta_s - before > extra:
            extra, binding = stage.delta_s - before, index
        before += ramps[index]
    steady = (grad_accum - 1) * stable
    total = steady + ramp + extra
    return IterationTime(
        steady_s=steady,
        ramp_s=ramp,
        first_and_last_s=extra,
        bubble_fraction=(ramp - stable) / total if total > 0.0 else 0.0,
        slowest_stage=slowest,
        binding_extra_stage=binding,
    )
