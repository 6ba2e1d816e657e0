"""Bare pipelines of uniform passes, for checking schedules and the engine against hand arithmetic."""

from __future__ import annotations

import numpy as np

from mist_megatron.events.engine import Program, Stream, Timeline, run_program
from mist_megatron.spec.passes import Order, PassCosts, PassKind
from mist_megatron.spec.schedule import schedule_orders

ALONE = np.ones((16, 4))


def bare_program(orders: tuple[Order, ...], costs: PassCosts) -> Program:
    """Compute passes only, chained by schedule order and by the data they need."""
    ranks = len(orders)
    chunks = 1 + max(step.chunk for order in orders for step in order)
    last = ranks * chunks - 1
    numbers = {}
    for rank, order in enumerate(orders):
        for step in order:
            numbers[step.kind, step.chunk * ranks + rank, step.micro_batch] = len(numbers)
    program = Program(ranks)
    seconds = {
        PassKind.FORWARD: costs.forward,
        PassKind.BACKWARD: costs.backward,
        PassKind.WEIGHT: costs.weight,
    }
    for rank, order in enumerate(orders):
        before: list[int] = []
        for step in order:
            virtual = step.chunk * ranks + rank
            needs = list(before)
            if step.kind is PassKind.FORWARD and virtual > 0:
                needs.append(numbers[PassKind.FORWARD, virtual - 1, step.micro_batch])
            elif step.kind is PassKind.BACKWARD:
                source = (PassKind.FORWARD, virtual) if virtual == last else (PassKind.BACKWARD, virtual + 1)
                needs.append(numbers[(*source, step.micro_batch)])
            elif step.kind is PassKind.WEIGHT:
                needs.append(numbers[PassKind.BACKWARD, virtual, step.micro_batch])
            work_s = seconds[step.kind] / chunks
            before = [program.add(str(step), rank, Stream.COMPUTE, work_s, needs)]
    return program


def run_bare(schedule: str, ranks: int, micro_batches: int, vpp: int = 1) -> Timeline:
    """A uniform pipeline: forward 1, backward 2 (or 1 + 1 where the schedule splits it)."""
    split = schedule.startswith("zb")
    costs = PassCosts(1.0, 1.0, 1.0) if split else PassCosts(1.0, 2.0, 0.0)
    return run_program(bare_program(schedule_orders(schedule, ranks, micro_batches, vpp), costs), ALONE)
