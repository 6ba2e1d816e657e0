"""When interleaved stages of Megatron gather weights, worked out by hand."""

from __future__ import annotations

from pipelines import ALONE
from plans_to_play import evaluator_of, plan_of

from mist_megatron.events.build import build
from mist_megatron.events.engine import run_program
from mist_megatron.events.launches import launches
from mist_megatron.events.tasks import (
    LayerTasks,
    NamedLayer,
    PassTasks,
    StageTasks,
    StepTasks,
    Workload,
    workload_of,
)
from mist_megatron.spec.passes import PassKind
from mist_megatron.spec.plan import Execution
from mist_megatron.spec.schedule import schedule_orders

BESIDE = Execution(overlap_grad_reduce=True, overlap_param_gather=True)
NO_STEP = StepTasks(
    reduction_s=0.0,
    tied_s=0.0,
    optimizer_s=0.0,
    host_adam_s=0.0,
    host_copies_s=0.0,
    gather_s=0.0,
    host_s=0.0,
)


def test_chunks_are_gathered_one_ahead_and_aligned_over_stages():
    """Four stages send micro-batches 0 to 3 through each chunk in turn, so that the first pass of chunk 1 is
    a stage's fifth forward pass; chunk 2 is gathered from it on the first stage, three passes sooner on the
    last."""
    plan = plan_of(
        *[3] * 4, target="megatron", schedule="interleaved", vpp=3, execution=BESIDE, dp=2, grad_accum=8
    )
    orders = schedule_orders(plan.schedule, len(plan.stages), plan.grad_accum, plan.vpp)
    found = launches(workload_of(plan, evaluator_of(plan)), orders)
    for before, (order, here) in enumerate(zip(orders, found, strict=True)):
        forward = [place for place, step in enumerate(order) if step.kind is PassKind.FORWARD]
        assert here == {forward[0]: [0, 1], forward[4 - before]: [2]}


def begun_s(*, ahead: bool, tensor_s: float = 0.0) -> dict[tuple[int, str], float]:
    """Two stages of two chunks of two layers: forward 1, backward 2, a layer's weights 3."""
    once = LayerTasks(
        first=PassTasks(compute_s=1.0, tensor_s=tensor_s, gather_s=3.0),
        forward=PassTasks(compute_s=1.0),
        backward=PassTasks(compute_s=2.0),
        last=PassTasks(compute_s=2.0),
    )
    chunks = tuple(tuple(NamedLayer(f"layer {2 * c + k}", once) for k in range(2)) for c in range(2))
    stage = StageTasks(chunks=chunks, host_s=0.0, hop_inside_s=0.0, hop_across_s=0.0, step=NO_STEP)
    work = Workload(
        plan=plan_of(4, 4, target="megatron", schedule="interleaved", vpp=2, grad_accum=2),
        stages=(stage, stage),
        prices=0,
        interference=ALONE,
        step_waits_for_all=False,
        steps_early=False,
        sends_overlap=True,
        gathers_by_chunk=ahead,
    )
    built = build(work, schedule_orders("interleaved", 2, 2, 2), "interleaved")
    timeline = run_program(built.program, ALONE)
    return {
        (timeline.program.device[k], timeline.program.name[k]): float(timeline.start_s[k])
        for k, kind in enumerate(built.kind)
        if kind == "forward"
    }


def test_weights_are_there_before_the_first_micro_batch_is():
    """Both stages gather layers 0 to 3 until 3, 6, 9 and 12. The first needs layer 0 at 3 and layer 1 at 6;
    the other has its first two, one bucket, when its input comes at 7, and hands on at 9. Chunk 1 is whole at
    12 on both, and its input there: 12 to 14 on the first stage, 14 to 16 on the other."""
    begun = begun_s(ahead=True)
    assert [begun[0, f"F0 layer {k}"] for k in (0, 1)] == [3.0, 6.0]
    assert [begun[1, f"F0 layer {k}"] for k in (0, 1)] == [7.0, 8.0]
    assert [begun[0, f"F0.1 layer {k}"] for k in (2, 3)] == [12.0, 13.0]
    assert [begun[1, f"F0.1 layer {k}"] for k in (2, 3)] == [14.0, 15.0]


def test_weights_that_come_with_the_input_hold_all_stages_up():
    """What it would be without: layer 1 of the other stage begins to come when its input does."""
    begun = begun_s(ahead=False)
    assert begun[1, "F0 layer 1"] == begun[1, "F0 layer 0"] + 3.0
    assert begun[1, "F0.1 layer 3"] > begun_s(ahead=True)[1, "F0.1 layer 3"]


def test_traffic_of_layers_does_not_wait_behind_weights_of_chunks_to_come():
    """Layer 0 has its weights at 3 and computes until 4; what it exchanges until 5 goes before layer 1's
    weights, begun at 3, which are there at 7. Layer 1's exchange, from 8 to 9, goes before weights of
    chunk 1: the other stage has its input at 9."""
    begun = begun_s(ahead=True, tensor_s=1.0)
    assert [begun[0, f"F0 layer {k}"] for k in (0, 1)] == [3.0, 7.0]
    assert begun[1, "F0 layer 0"] == 9.0


def test_tokens_on_their_way_to_experts_do_not_wait_behind_weights_that_come_ahead():
    """Layer 0 has its weights at 4 and leaves for its experts at 5; layer 1's weights, begun at 4, stand
    still until 6, and again while results come back from 8 to 9, so that they are there at 10. By one
    communicator the tokens would have waited until 8."""
    first = PassTasks(compute_s=3.0, inside_s=2.0, sent_s=2.0, gather_s=4.0)
    once = LayerTasks(first=first, forward=first, backward=first, last=PassTasks(compute_s=1.0))
    layers = (NamedLayer("layer 0", once), NamedLayer("layer 1", once))
    stage = StageTasks(chunks=(layers,), host_s=0.0, hop_inside_s=0.0, hop_across_s=0.0, step=NO_STEP)
    work = Workload(
        plan=plan_of(2, target="megatron", grad_accum=1),
        stages=(stage,),
        prices=0,
        interference=ALONE,
        step_waits_for_all=False,
        steps_early=False,
        sends_overlap=False,
    )
    built = build(work, schedule_orders("1f1b", 1, 1, 1), "1f1b")
    timeline = run_program(built.program, ALONE)
    played = [
        (kind, name, float(timeline.start_s[k]), float(timeline.end_s[k]))
        for k, (kind, name) in enumerate(zip(built.kind, built.program.name, strict=True))
        if name.startswith("F0")
    ]
    assert ("dispatch", "F0 layer 0", 5.0, 6.0) in played
    assert ("combine", "F0 layer 0", 8.0, 9.0) in played
    assert ("weight gather", "F0 layer 1", 4.0, 10.0) in played
    assert ("forward", "F0 layer 1", 10.0, 11.0) in played
