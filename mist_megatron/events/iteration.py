"""One iteration of a plan, played event by event: the second opinion on the closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import Prediction, predict
from mist_megatron.errors import InputError
from mist_megatron.events.analysis import (
    DeviceUsage,
    PathShare,
    bubble_fraction,
    device_usage,
    path_shares,
)
from mist_megatron.events.build import build, last_iteration
from mist_megatron.events.built import Built
from mist_megatron.events.engine import Progress, Timeline, critical_path, run_program
from mist_megatron.events.memory_curve import MemoryCurve, memory_curves
from mist_megatron.events.tasks import StageTasks, Workload, workload_of
from mist_megatron.spec.passes import PassCosts
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.schedule import ONE_F_ONE_B, SCHEDULES, ScheduleName, schedule_orders

MOST_LAYER_PASSES = 1_000_000
"""Some 3 to 5 million events: minutes, and 1 to 4 GB (benchmarks/simulator_speed.py: 400 to 800 bytes and
10 to 20 microseconds an event)."""


QUICK_LAYER_PASSES = 40_000
"""Some 2 CPU-seconds."""


@dataclass(frozen=True, eq=False)  # it holds arrays: two simulations are two things
class Simulation:
    """What the events of one iteration say; one device stands for all ranks of its stage."""

    plan: Plan
    schedule: str
    iteration_s: float
    timeline: Timeline
    """Where iterations reach into each other it is longer than one: it shows all of one iteration's
    events, of which the first run while other stages end the iteration before."""
    built: Built
    usage: tuple[DeviceUsage, ...]
    memory: tuple[MemoryCurve, ...]
    prediction: Prediction
    closed_form_s: float | None
    """Eq. 1 of the same plan and schedule; None for schedules that it does not cover."""
    prices: int
    """Distinct pieces of work that were priced."""

    @property
    def bubble_fraction(self) -> float:
        return bubble_fraction(self.usage)

    @property
    def events(self) -> int:
        return len(self.built.kind)

    def critical_path(self) -> tuple[int, ...]:
        return critical_path(self.timeline)

    def path_shares(self) -> tuple[PathShare, ...]:
        return path_shares(self.timeline, tuple(self.built.kind))


def simulate(
    plan: Plan, evaluator: StageEvaluator, *, schedule: str | None = None, progress: Progress | None = None
) -> Simulation:
    """Play a plan; `evaluator` is of `job_of(plan)`. `schedule` may be one that no plan can name (zb-2p)."""
    played = schedule or plan.schedule
    _check_size(plan)
    work = workload_of(plan, evaluator)
    built, timeline, period_s = _run(work, played, progress)
    prediction = predict(plan, evaluator)
    return Simulation(
        plan=plan,
        schedule=played,
        iteration_s=period_s,
        timeline=timeline,
        built=built,
        usage=device_usage(timeline, period_s),
        memory=memory_curves(plan, played, evaluator, timeline, built),
        prediction=prediction,
        closed_form_s=prediction.iteration_s if played == plan.schedule else None,
        prices=work.prices,
    )


def _run(work: Workload, schedule: str, progress: Progress | None = None) -> tuple[Built, Timeline, float]:
    """One iteration, and how long one takes in a row of them."""
    plan = work.plan
    costs = _mean_costs(work.stages) if work.stages else None
    orders = schedule_orders(schedule, len(plan.stages), plan.grad_accum, plan.vpp, costs)
    built = build(work, orders, schedule)
    return last_iteration(built, run_program(built.program, work.interference, progress))


FULL_PIPELINES = (2, 3)
"""Of so many micro-batches a stage, another pipeline full adds what every further one does: schedules repeat,
and so do their events (to 1e-12 on recipes with up to 256 micro-batches, 16 stages and 16 chunks)."""


def played_s(plan: Plan, evaluator: StageEvaluator) -> float | None:
    """Seconds of a step by the events alone; of many micro-batches some are played, and the others take as
    long as the last of these. None where even that is long work."""
    stages = len(plan.stages)
    few, more = (times * stages for times in FULL_PIPELINES)
    counts = (few, more) if plan.grad_accum > few + more else (plan.grad_accum,)
    if 2 * sum(counts) * plan.model.layers > QUICK_LAYER_PASSES:
        return None
    some = (_with_micro_batches(plan, count) for count in counts)
    seconds = [_run(workload_of(one, evaluator), plan.schedule)[2] for one in some]
    if len(seconds) == 1:
        return seconds[0]
    less_s, more_s = seconds
    return more_s + (plan.grad_accum - more) * (more_s - less_s) / (more - few)


def _with_micro_batches(plan: Plan, count: int) -> Plan:
    """The same stages with fewer micro-batches."""
    batch = plan.training.global_batch * count // plan.grad_accum
    return replace(plan, grad_accum=count, training=replace(plan.training, global_batch=batch))


def with_schedule(plan: Plan, schedule: str, vpp: int | None = None) -> Plan:
    """The same plan on another schedule, for what-if; zb-2p, which plans cannot name, keeps the plan's
    1f1b."""
    if schedule not in SCHEDULES:
        raise InputError(f"--schedule: unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    chunked = SCHEDULES[schedule].chunked
    chunks = vpp if vpp is not None else (plan.vpp if chunked else 1)
    if chunked and chunks < 2:
        given = "is not given" if vpp is None else f"is {vpp}"
        raise InputError(
            f"--schedule {schedule}: --vpp {given}; wanted --vpp 2 or more, the chunks of each stage"
        )
    named = cast(ScheduleName, schedule if SCHEDULES[schedule].closed_form else ONE_F_ONE_B)
    return replace(plan, schedule=named, vpp=chunks)


def _check_size(plan: Plan) -> None:
    passes = 2 * plan.grad_accum * plan.model.layers
    if passes > MOST_LAYER_PASSES:
        raise InputError(
            f"plan: grad_accum {plan.grad_accum:,} makes {passes:,} passes over layers to simulate; "
            f"wanted at most {MOST_LAYER_PASSES:,}",
            details=(
                f"try: a plan with grad_accum {MOST_LAYER_PASSES // (2 * plan.model.layers):,} or less, or "
                "predict, whose formula takes any",
            ),
        )


def _mean_costs(stages: tuple[StageTasks, ...]) -> PassCosts:
    """What zero-bubble schedules balance, averaged over the stages."""
    sums = [sum(values) / len(stages) for values in zip(*(s.pass_s for s in stages), strict=True)]
    return PassCosts(sums[0], sums[1], sums[2])
