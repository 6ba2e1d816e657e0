"""Random plans of every schedule against a pipeline of a few lines: passes as sums of their serial work, one
queue of passes a stage, one queue of sends a link. Nothing of the engine, its streams or its events is used;
what runs beside compute is left out by the choice of plans."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from plain_overlap import no_interference
from plans_to_play import evaluator_of, plan_of

from mist_megatron.events.build import build
from mist_megatron.events.engine import run_program
from mist_megatron.events.tasks import StageTasks, Workload, workload_of
from mist_megatron.spec.passes import Order, Pass, PassKind
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.schedule import SCHEDULES, schedule_orders

EACH = 4
"""Plans of each schedule."""
F, B, W = PassKind.FORWARD, PassKind.BACKWARD, PassKind.WEIGHT


def random_plan(rng: random.Random, schedule: str) -> Plan:
    """Uneven layers, on one node or on one each, with recomputed layers."""
    chunked = schedule == "interleaved"
    stages = rng.randint(2 if chunked else 1, 6)
    chunks = rng.randint(2, 4) if chunked else 1
    layers = [chunks * rng.randint(1, 4) for _ in range(stages)]
    plan = plan_of(
        *layers,
        target="megatron",
        grad_accum=stages * rng.randint(1, 3) if chunked else rng.randint(1, 12),
        schedule="1f1b" if schedule == "zb-2p" else schedule,
        vpp=chunks,
        zero=0,
        micro_batch=rng.choice((1, 2, 4)),
        ckpt=rng.choice((0, chunks)),
    )
    placed = replace(plan.cluster, nodes=1, gpus_per_node=stages)
    return replace(plan, cluster=placed) if rng.random() < 0.4 else plan


def seconds_of(work: Workload, stage: StageTasks, step: Pass, split: bool) -> float:
    """A pass, one thing after another."""
    total_s = 0.0 if step.kind is W else stage.host_s / (2 * len(stage.chunks))
    for layer in (named.work for named in stage.chunks[step.chunk]):
        if step.kind is F:
            forward = layer.first if step.micro_batch == 0 else layer.forward
            total_s += forward.compute_s + forward.tensor_s
            continue
        last = step.micro_batch == work.plan.grad_accum - 1
        backward = layer.last if last else layer.backward
        added_s = backward.accumulate_s if step.micro_batch else 0.0
        whole_s = backward.recompute_s + backward.compute_s + backward.tensor_s
        if step.kind is W:
            total_s += backward.weight_s + added_s
        else:
            total_s += whole_s - backward.weight_s if split else whole_s + added_s
    return total_s


def source_of(step: Pass, virtual: int, last: int) -> tuple[PassKind, int, int] | None:
    if step.kind is W or (step.kind is F and virtual == 0):
        return None
    if step.kind is F:
        return F, virtual - 1, step.micro_batch
    return (F, last, step.micro_batch) if virtual == last else (B, virtual + 1, step.micro_batch)


def ends_by_hand(work: Workload, orders: tuple[Order, ...], schedule: str) -> list[float]:
    """When each stage has done its last pass, and has sent its result where it stops for that."""
    stages, across = len(orders), work.plan.hops_across()
    last = stages * work.plan.vpp - 1
    split = SCHEDULES[schedule].splits_backward
    beside = split or SCHEDULES[schedule].chunked
    clock, link, position = [0.0] * stages, [0.0] * stages, [0] * stages
    there: dict[tuple[PassKind, int, int], float] = {}
    while sum(position) < sum(map(len, orders)):
        for number, stage in enumerate(work.stages):
            while position[number] < len(orders[number]):
                step = orders[number][position[number]]
                virtual = step.chunk * stages + number
                source = source_of(step, virtual, last)
                if source is not None and source not in there:
                    break
                start_s = max(clock[number], there[source] if source else 0.0)
                end_s = start_s + seconds_of(work, stage, step, split)
                key = (step.kind, virtual, step.micro_batch)
                peer = (number + (1 if step.kind is F else -1)) % stages
                goes = step.kind is not W and virtual != (last if step.kind is F else 0) and peer != number
                hop_s = 0.0
                if goes:
                    far = across[min(number, peer), max(number, peer)]
                    hop_s = stage.hop_across_s if far else stage.hop_inside_s
                if goes and beside:
                    link[number] = max(link[number], end_s) + hop_s
                    there[key] = link[number]
                else:
                    there[key] = end_s = end_s + hop_s
                clock[number] = end_s
                position[number] += 1
    return clock


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_events_are_a_plain_pipeline(schedule: str) -> None:
    rng = random.Random(schedule)
    for _ in range(EACH):
        plan = random_plan(rng, schedule)
        found = workload_of(plan, evaluator_of(plan))
        work = replace(found, interference=no_interference())
        orders = schedule_orders(schedule, len(plan.stages), plan.grad_accum, plan.vpp)
        built = build(work, orders, schedule)
        timeline = run_program(built.program, work.interference)
        ends = [0.0] * len(plan.stages)
        for span in built.spans:
            ends[span.stage] = max(ends[span.stage], float(timeline.end_s[span.last]))
        if not built.sends_overlap:
            for event, kind in enumerate(built.kind):
                stage = built.program.device[event]
                ends[stage] = max(ends[stage], float(timeline.end_s[event]) * (kind == "send"))
        assert ends == pytest.approx(ends_by_hand(work, orders, schedule), rel=1e-9)
