"""What must hold of any simulation, on random plans of every target and schedule with everything that a plan
can ask for: shares that add up, a critical path that is the iteration, and memory as `predict` has it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from plans_to_play import evaluator_of, plan_of

from mist_megatron.errors import InputError
from mist_megatron.events.iteration import simulate
from mist_megatron.spec.kinds import KINDS, Offload
from mist_megatron.spec.plan import Execution, Plan
from mist_megatron.spec.schedule import SCHEDULES
from mist_megatron.targets.rules import violations

TARGETS = ("mist", "megatron", "deepspeed", "megatron+patches", "deepspeed+patches")
EACH = 2
"""Plans of each target and schedule."""


def random_plan(rng: random.Random, target: str, schedule: str) -> Plan:
    """Any plan, whether or not the target runs it; the events take all of them."""
    stages = rng.randint(2 if schedule == "interleaved" else 1, 4)
    vpp = rng.choice((2, 3)) if schedule == "interleaved" else 1
    layers = [vpp * rng.randint(1, 2)] * stages
    if schedule != "interleaved" and rng.random() < 0.5:
        layers = [rng.randint(2, 5) for _ in layers]
    selective = rng.random() < 0.4
    offload = Offload(**{name: rng.choice((0.25, 0.5, 1.0)) for name in KINDS if rng.random() < 0.3})
    return plan_of(
        *layers,
        target=target,
        grad_accum=stages * rng.randint(1, 3) if vpp > 1 else rng.choice((1, 2, 5, 8)),
        schedule="1f1b" if schedule == "zb-2p" else schedule,
        vpp=vpp,
        execution=Execution(overlap_grad_reduce=rng.random() < 0.5),
        sizes={"tied_embeddings": rng.random() < 0.3},
        zero=rng.randint(0, 3),
        dp=rng.choice((1, 2, 4)),
        tp=rng.choice((1, 2)),
        micro_batch=rng.choice((1, 2)),
        ckpt=0 if selective else rng.choice((0, 1, min(layers))),
        recompute="selective" if selective else "full",
        offload=offload,
    )


def runnable_plan(rng: random.Random, target: str, schedule: str) -> Plan | None:
    """One that its target runs, but for the schedule."""
    for _ in range(200):
        try:
            plan = random_plan(rng, target, schedule)
        except InputError:
            continue
        if all("schedule" in rule or "pipeline" in rule for rule in violations(plan)):
            return plan
    return None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("target", TARGETS)
def test_any_plan(target: str, schedule: str) -> None:
    rng = random.Random(f"{target} {schedule}")
    for _ in range(EACH):
        plan = runnable_plan(rng, target, schedule)
        if plan is None:
            pytest.skip(f"{target} runs no such plan")
        found = simulate(plan, evaluator_of(plan), schedule=schedule)
        for usage in found.usage:
            parts = (
                usage.exposed_compute_s,
                usage.exposed_communication_s,
                usage.overlapped_s,
                usage.host_s,
                usage.idle_s,
            )
            assert min(parts) >= 0.0
            assert sum(parts) == pytest.approx(found.iteration_s, rel=1e-9)
        path, timeline = found.critical_path(), found.timeline
        assert all(timeline.end_s[a] == pytest.approx(timeline.start_s[b]) for a, b in pairwise(path))
        assert sum(share.seconds for share in found.path_shares()) == pytest.approx(found.iteration_s)
        for curve, stage in zip(found.memory, found.prediction.stages, strict=True):
            if found.closed_form_s is not None:
                assert curve.peak_bytes == pytest.approx(stage.peak_memory_bytes, rel=1e-9)
            assert curve.live_bytes.min() > 0.0
