"""Pipelines as DeepSpeed's own schedule orders them: its instructions, played by a few lines in which a send
and its receive wait for each other, against the events of the simulator."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("deepspeed", reason="needs the test framework environment")
from deepspeed.runtime.pipe import schedule

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of
from mist_megatron.events.build import build
from mist_megatron.events.built import Built
from mist_megatron.events.engine import run_program
from mist_megatron.events.tasks import LayerTasks, StageTasks, Workload, workload_of
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.passes import PassKind
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.schedule import in_flight, schedule_orders
from mist_megatron.spec.training import TrainingSpec

PAIRS = {"SendActivation": ("RecvActivation", 1), "SendGrad": ("RecvGrad", -1)}
"""A send, the receive that it waits for, and where that stage is."""


def instructions(plan: Plan, stage: int) -> list[str]:
    """Names, one step after another; buffers are of no matter to time."""
    steps = schedule.TrainSchedule(plan.grad_accum, len(plan.stages), stage).steps()
    return [type(command).__name__ for commands in steps for command in commands]


def ends_by_instructions(work: Workload) -> list[list[float]]:
    """When each stage's passes end."""
    plan, count = work.plan, len(work.stages)
    left = [instructions(plan, stage) for stage in range(count)]
    now, ends = [0.0] * count, [list[float]() for _ in range(count)]
    done = [{"ForwardPass": 0, "BackwardPass": 0} for _ in range(count)]

    def run(stage: int) -> bool:
        """The next instruction of a stage, if it can be run."""
        name = left[stage][0]
        if name in PAIRS:
            received, step = PAIRS[name]
            other = stage + step
            if left[other][:1] != [received]:
                return False
            left[other].pop(0)
            hop_s = work.stages[stage].hop_across_s
            now[stage] = now[other] = max(now[stage], now[other]) + hop_s
        elif name.startswith("Recv"):
            return False
        elif name in done[stage]:
            number = done[stage][name]
            now[stage] += seconds_of(work.stages[stage], name == "ForwardPass", number)
            done[stage][name] += 1
            ends[stage].append(now[stage])
        left[stage].pop(0)
        return True

    while any(left):
        went_on = [run(stage) for stage in range(count) if left[stage]]
        assert any(went_on)
    return ends


def seconds_of(stage: StageTasks, forward: bool, number: int) -> float:
    """A pass over a stage, nothing of which runs beside another thing."""
    (chunk,) = stage.chunks

    def each(work: LayerTasks) -> float:
        if forward:
            return work.forward.compute_s
        added_s = work.backward.accumulate_s if number else 0.0
        return work.backward.recompute_s + work.backward.compute_s + added_s

    return stage.host_s / 2 + sum(each(layer.work) for layer in chunk)


def ends_by_events(work: Workload) -> tuple[Built, list[list[float]]]:
    plan = work.plan
    orders = schedule_orders("1f1b", len(plan.stages), plan.grad_accum, 1, None)
    built = build(work, orders, "1f1b")
    timeline = run_program(built.program, work.interference)
    ends = [
        [float(timeline.end_s[span.last]) for span in built.spans if span.stage == stage]
        for stage in range(len(plan.stages))
    ]
    return built, ends


def plan_of(layers: list[int], grad_accum: int, micro_batch: int) -> Plan:
    """Stages on a node each, the first of whose layers is recomputed on every other stage."""
    sizes = {"family": "llama", "layers": sum(layers), "hidden": 1024, "heads": 16, "vocab": 32000}
    words = {"nodes": 1, "gpus_per_node": 1, "dp": 1, "tp": 1, "micro_batch": micro_batch, "zero": 1}
    return Plan(
        model=model_from_mapping(sizes, "model"),
        training=TrainingSpec(global_batch=micro_batch * grad_accum, seq_len=1024),
        cluster=ClusterSpec(gpu=CATALOGUE["a100-sxm-80gb"], nodes=len(layers), gpus_per_node=1),
        target="deepspeed+patches",
        grad_accum=grad_accum,
        stages=tuple(
            StagePlan(layers=number, ckpt=k % 2, **words)  # type: ignore[arg-type]
            for k, number in enumerate(layers)
        ),
    )


def plans() -> list[Plan]:
    rng = random.Random(11)
    return [
        plan_of([rng.randint(1, 6) for _ in range(rng.randint(2, 6))], rng.randint(1, 9), rng.choice((1, 4)))
        for _ in range(12)
    ]


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: f"{len(plan.stages)} x {plan.grad_accum}")
def test_events_end_when_deepspeeds_instructions_do(plan: Plan) -> None:
    work = workload_of(plan, evaluator_for(job_of(plan))[0])
    assert min(stage.hop_across_s for stage in work.stages) > 0.0
    _, ends = ends_by_events(work)
    for played, by_hand in zip(ends, ends_by_instructions(work), strict=True):
        assert played == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize("plan", plans()[:4], ids=lambda plan: f"{len(plan.stages)} x {plan.grad_accum}")
def test_passes_and_micro_batches_in_flight_are_deepspeeds(plan: Plan) -> None:
    orders = schedule_orders("1f1b", len(plan.stages), plan.grad_accum, 1, None)
    for stage, order in enumerate(orders):
        theirs = [name for name in instructions(plan, stage) if name.endswith("Pass")]
        ours = ["ForwardPass" if step.kind is PassKind.FORWARD else "BackwardPass" for step in order]
        assert ours == theirs
        buffers = schedule.TrainSchedule(plan.grad_accum, len(plan.stages), stage).num_pipe_buffers()
        assert max(2.0, in_flight("1f1b", stage, len(plan.stages), plan.grad_accum)) == buffers
