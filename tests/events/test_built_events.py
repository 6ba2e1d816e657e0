"""Events of a plan against timelines worked out by hand, from stage work with round numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pipelines import ALONE
from plans_to_play import plan_of

from mist_megatron.events.build import build
from mist_megatron.events.engine import Deadlock, Stream, Timeline, run_program
from mist_megatron.events.tasks import (
    LayerTasks,
    NamedLayer,
    PassTasks,
    StageTasks,
    StepTasks,
    Workload,
)
from mist_megatron.spec.passes import Pass, PassKind
from mist_megatron.spec.schedule import schedule_orders

NO_STEP = StepTasks(
    reduction_s=0.0,
    tied_s=0.0,
    optimizer_s=0.0,
    host_adam_s=0.0,
    host_copies_s=0.0,
    gather_s=0.0,
    host_s=0.0,
)


def layer(forward: PassTasks, backward: PassTasks, **special: PassTasks) -> LayerTasks:
    return LayerTasks(
        first=special.get("first", forward),
        forward=forward,
        backward=backward,
        last=special.get("last", backward),
    )


PLAIN = layer(PassTasks(compute_s=1.0), PassTasks(compute_s=2.0, weight_s=1.0))


def stage(
    *layers: LayerTasks, hop_s: float = 0.0, host_s: float = 0.0, step: StepTasks = NO_STEP
) -> StageTasks:
    named = tuple(NamedLayer(f"layer {k}", one) for k, one in enumerate(layers))
    return StageTasks(chunks=(named,), host_s=host_s, hop_inside_s=hop_s, hop_across_s=hop_s, step=step)


def workload(*stages: StageTasks, grad_accum: int = 2, **changes: bool) -> Workload:
    return Workload(
        plan=plan_of(*[len(s.chunks[0]) for s in stages], grad_accum=grad_accum),
        stages=stages,
        prices=0,
        interference=ALONE,
        step_waits_for_all=changes.get("step_waits_for_all", False),
        steps_early=changes.get("steps_early", False),
        sends_overlap=changes.get("sends_overlap", False),
    )


def ran(
    work: Workload, schedule: str = "1f1b"
) -> tuple[dict[tuple[int, str, str], tuple[float, float]], Timeline]:
    """Start and end of every event by (stage, kind, name)."""
    orders = schedule_orders(schedule, len(work.stages), work.plan.grad_accum)
    built = build(work, orders, schedule)
    timeline = run_program(built.program, work.interference)
    spans = {
        (timeline.program.device[k], kind, timeline.program.name[k]): (
            float(timeline.start_s[k]),
            float(timeline.end_s[k]),
        )
        for k, kind in enumerate(built.kind)
    }
    return spans, timeline


def test_two_stages_with_hops() -> None:
    """Forward 1, backward 2, hop 0.5, a stage sends before it goes on. Stage 0: F0 0-1, send to 1.5, F1
    1.5-2.5, send to 3; stage 1: F0 1.5-2.5, B0 2.5-4.5, send to 5, F1 5-6, B1 6-8, send to 8.5; stage 0: B0
    5-7, B1 8.5-10.5."""
    spans, timeline = ran(workload(stage(PLAIN, hop_s=0.5), stage(PLAIN, hop_s=0.5)))
    assert spans[0, "send", "send F1"] == (2.5, 3.0)
    assert spans[1, "backward", "B0 layer 0"] == (2.5, 4.5)
    assert spans[1, "forward", "F1 layer 0"] == (5.0, 6.0)
    assert spans[0, "backward", "B1 layer 0"] == (8.5, 10.5)
    assert timeline.makespan_s == 10.5


def test_sends_beside_compute() -> None:
    """The same with sends that nobody waits for but the receiver: F1 on stage 1 follows B0 at once."""
    work = workload(stage(PLAIN, hop_s=0.5), stage(PLAIN, hop_s=0.5), sends_overlap=True)
    spans, timeline = ran(work)
    assert spans[0, "forward", "F1 layer 0"] == (1.0, 2.0)
    assert spans[1, "forward", "F1 layer 0"] == (4.5, 5.5)
    assert timeline.makespan_s == 10.0


def test_a_bridge_hands_on_inside_the_receiving_stage() -> None:
    """Ranks of stage 1 each move twice as much (hop 1 against 0.5), and what came goes to its other ranks in
    0.25; stage 0 has no others. F0 0-1, on its way to 2, handed on to 2.25, F0 to 3.25, B0 to 5.25, on its
    way to 6.25, B0 to 8.25."""
    wide = replace(stage(PLAIN, hop_s=1.0), hand_on_s=0.25)
    spans, timeline = ran(workload(stage(PLAIN, hop_s=0.5), wide, grad_accum=1))
    assert spans[0, "send", "send F0"] == (1.0, 2.0)
    assert spans[1, "tensor-parallel collective", "hand on F0"] == (2.0, 2.25)
    assert spans[1, "forward", "F0 layer 0"] == (2.25, 3.25)
    assert spans[1, "send", "send B0"] == (5.25, 6.25)
    assert timeline.makespan_s == 8.25


def test_weights_come_in_one_layer_ahead() -> None:
    """Compute 2, gather 1, three layers: only the first gather is seen, forward takes 1 + 3 x 2."""
    gathered = layer(PassTasks(compute_s=2.0, gather_s=1.0), PassTasks(compute_s=1.0))
    spans, _ = ran(workload(stage(gathered, gathered, gathered), grad_accum=1))
    assert spans[0, "weight gather", "F0 layer 1"] == (1.0, 2.0)
    assert spans[0, "weight gather", "F0 layer 2"] == (3.0, 4.0)
    assert spans[0, "forward", "F0 layer 2"] == (5.0, 7.0)


def test_a_layer_waits_for_what_left_two_layers_before() -> None:
    """Compute 1, departure 3: the third layer starts when the first one's departure is over, at 4, the fourth
    at 7, and the last departure ends at 13."""
    leaving = layer(PassTasks(compute_s=1.0, copy_out_s=3.0), PassTasks(compute_s=1.0))
    spans, _ = ran(workload(stage(leaving, leaving, leaving, leaving), grad_accum=1))
    assert spans[0, "forward", "F0 layer 1"] == (1.0, 2.0)
    assert spans[0, "forward", "F0 layer 2"] == (4.0, 5.0)
    assert spans[0, "forward", "F0 layer 3"] == (7.0, 8.0)
    assert spans[0, "copy out", "F0 layer 3"] == (10.0, 13.0)


def test_reductions_of_the_last_micro_batch_hold_nothing_up() -> None:
    """ZeRO 0 and 1 reduce in the last backward pass only: compute 1 a layer, reduction 2."""
    backward = PassTasks(compute_s=1.0)
    reduced = layer(PassTasks(compute_s=1.0), backward, last=replace(backward, reduce_s=2.0))
    spans, timeline = ran(workload(stage(reduced, reduced, reduced), grad_accum=1))
    assert spans[0, "backward", "B0 layer 0"] == (5.0, 6.0)
    assert timeline.makespan_s == 4.0 + 3 * 2.0


def test_split_backward() -> None:
    """ZB-H1 on two stages, forward, backward and weight gradient 1 each, two micro-batches: F F _ B W B W
    against _ F B F B W W, 7 long."""
    spans, timeline = ran(workload(stage(PLAIN), stage(PLAIN)), "zb-h1")
    assert spans[0, "backward", "B0 layer 0"] == (3.0, 4.0)
    assert spans[0, "weight gradient", "W0 layer 0"] == (4.0, 5.0)
    assert timeline.makespan_s == 7.0


def test_step_waits_for_the_norm_over_all_stages() -> None:
    """Stage 1 ends at 4 and stage 0 at 6; steps of 1 and 5 start together at 6."""
    stages = [stage(PLAIN, step=replace(NO_STEP, optimizer_s=seconds)) for seconds in (1.0, 5.0)]
    spans, timeline = ran(workload(*stages, grad_accum=1, step_waits_for_all=True))
    assert spans[1, "optimizer step", "optimizer step"] == (6.0, 11.0)
    assert timeline.makespan_s == 11.0
    assert ran(workload(*stages, grad_accum=1))[1].makespan_s == 9.0


def test_end_of_the_iteration_in_order() -> None:
    step = StepTasks(
        reduction_s=1.0,
        tied_s=0.0,
        optimizer_s=2.0,
        host_adam_s=3.0,
        host_copies_s=4.0,
        gather_s=5.0,
        host_s=6.0,
    )
    spans, timeline = ran(workload(stage(PLAIN, host_s=1.0, step=step), grad_accum=1))
    assert timeline.makespan_s == 3.0 + 1.0 + 21.0
    assert spans[0, "host Adam", "host Adam"] == (7.0, 10.0)


def test_gradients_are_added_from_the_second_micro_batch_on() -> None:
    added = layer(PassTasks(compute_s=1.0), PassTasks(compute_s=1.0, accumulate_s=0.5))
    spans, timeline = ran(workload(stage(added), grad_accum=3))
    assert timeline.makespan_s == 6.0 + 2 * 0.5
    assert (0, "gradient accumulation", "B0 layer 0") not in spans


def test_interference_slows_a_pass_down() -> None:
    """Compute 2 a layer beside a gather of 2 for the next: both take 2 x 1.5 while together."""
    factors = np.array(ALONE)
    factors[0b0011] = 1.5
    gathered = layer(PassTasks(compute_s=2.0, gather_s=2.0), PassTasks(compute_s=1.0))
    work = replace(workload(stage(gathered, gathered), grad_accum=1), interference=factors)
    spans, _ = ran(work)
    assert spans[0, "forward", "F0 layer 0"] == (2.0, 5.0)
    assert spans[0, "forward", "F0 layer 1"] == (5.0, 7.0)


def test_decoupled_steps_run_before_the_input_is_there() -> None:
    """Stage 1 steps (4) while stage 0 computes (3): its forward starts at 4, not at 7."""
    stepping = layer(
        PassTasks(compute_s=3.0), PassTasks(compute_s=1.0), first=PassTasks(compute_s=3.0, step_s=4.0)
    )
    quick = layer(PassTasks(compute_s=3.0), PassTasks(compute_s=1.0))
    work = workload(stage(quick), stage(stepping), grad_accum=1, steps_early=True)
    spans, _ = ran(work)
    start, end = spans[1, "forward", "F0 layer 0"]
    last_end_s = spans[0, "backward", "B0 layer 0"][1]
    # The second of two iterations: stage 1 was free 1 s before stage 0.
    assert spans[1, "optimizer step", "step layer 0"][0] == pytest.approx(start - 4.0)
    assert last_end_s - end == pytest.approx(2.0)


def test_the_first_stage_steps_layer_by_layer() -> None:
    """It waits for nothing: each layer steps (2) and runs (1), states (1) coming in one layer ahead."""
    first = PassTasks(compute_s=1.0, step_s=2.0, copy_in_s=1.0)
    stepping = layer(PassTasks(compute_s=1.0), PassTasks(compute_s=1.0), first=first)
    spans, _ = ran(workload(stage(stepping, stepping), grad_accum=1, steps_early=True))
    assert spans[0, "optimizer step", "F0 layer 0"] == (1.0, 3.0)
    assert spans[0, "copy in", "F0 layer 1"] == (1.0, 2.0)
    assert spans[0, "forward", "F0 layer 0"] == (3.0, 4.0)
    assert spans[0, "optimizer step", "F0 layer 1"] == (4.0, 6.0)


def test_what_is_gathered_first_waits_for_its_update_on_the_host() -> None:
    """The host steps (4) when the pass begins; weights of the first layer are gathered (2) after that."""
    gathered = layer(PassTasks(compute_s=1.0, gather_s=2.0), PassTasks(compute_s=1.0))
    one = stage(gathered, step=replace(NO_STEP, host_adam_s=4.0))
    spans, timeline = ran(replace(workload(one), steps_on_arrival=True))
    assert spans[0, "host Adam", "host Adam"] == (0.0, 4.0)
    assert spans[0, "weight gather", "F0 layer 0"] == (4.0, 6.0)
    # The second micro-batch, whose weights come in again, finds them updated.
    assert timeline.makespan_s == 4.0 + 2 * (2.0 + 1.0 + 1.0)


def test_what_comes_in_beside_the_layer_before_the_head_waits_until_that_runs() -> None:
    """Activations of three layers leave (5 each) and come in (3) for two. The last layer's backward pass
    waits until its own have left, at 16; then those of the layer before it come in."""
    forward, backward = PassTasks(compute_s=1.0, copy_out_s=5.0), PassTasks(compute_s=1.0, copy_in_s=3.0)
    last = layer(forward, PassTasks(compute_s=1.0))
    one = stage(layer(forward, backward), layer(forward, backward), last, PLAIN)
    named = [
        replace(layer, name="head") if place == 3 else layer for place, layer in enumerate(one.chunks[0])
    ]
    spans, _ = ran(workload(replace(one, chunks=(tuple(named),)), grad_accum=1))
    assert spans[0, "copy out", "F0 layer 2"] == (11.0, 16.0)
    assert spans[0, "backward", "B0 head"] == (12.0, 14.0)
    assert spans[0, "backward", "B0 layer 2"] == (16.0, 17.0)
    assert spans[0, "copy in", "B0 layer 1"] == (16.0, 19.0)
    assert spans[0, "copy in", "B0 layer 0"] == (19.0, 22.0)


@pytest.mark.parametrize(("on_arrival", "begins_s", "ends_s"), [(False, 1.0, 7.0), (True, 6.0, 10.0)])
def test_copies_in_for_a_pass_wait_for_its_input_where_its_first_layer_fetches_them(
    on_arrival: bool, begins_s: float, ends_s: float
) -> None:
    """Stage 1 passes a gradient back at 6; what stage 0 needs for it comes in for 3 s."""
    fetching = layer(PassTasks(compute_s=1.0), PassTasks(compute_s=1.0, copy_in_s=3.0))
    slow = layer(PassTasks(compute_s=1.0), PassTasks(compute_s=4.0))
    work = workload(stage(fetching), stage(slow), grad_accum=1)
    spans, timeline = ran(replace(work, copies_on_arrival=on_arrival))
    assert spans[0, "copy in", "B0 layer 0"] == (begins_s, begins_s + 3.0)
    assert timeline.makespan_s == ends_s


def test_weights_of_a_head_that_are_on_their_way_out_turn_round() -> None:
    """They step in the first forward pass and leave (4); its backward pass waits for that, and nothing comes
    in (3) but for the second micro-batch."""
    forward, first = PassTasks(compute_s=1.0, copy_in_s=3.0), PassTasks(compute_s=1.0, copy_out_s=4.0)
    head = layer(forward, PassTasks(compute_s=2.0, copy_in_s=3.0), first=first)
    one = stage(head)
    named = replace(one.chunks[0][0], name="head")
    spans, _ = ran(workload(replace(one, chunks=((named,),))))
    assert spans[0, "copy out", "F0 head"] == (1.0, 5.0)
    assert (0, "copy in", "B0 head") not in spans
    assert spans[0, "backward", "B0 head"] == (5.0, 7.0)
    assert spans[0, "copy in", "B1 head"] == (11.0, 14.0)


def test_events_run_on_the_streams_that_they_are_priced_for() -> None:
    rich = PassTasks(
        compute_s=1.0, recompute_s=1.0, tensor_s=1.0, blocking_gather_s=1.0, copy_in_s=1.0, copy_out_s=1.0
    )
    orders = schedule_orders("1f1b", 1, 1)
    built = build(workload(stage(layer(rich, rich), host_s=1.0), grad_accum=1), orders, "1f1b")
    streams: dict[str, set[int]] = {}
    for kind, stream in zip(built.kind, built.program.stream, strict=True):
        streams.setdefault(kind, set()).add(stream)
    assert streams["forward"] == streams["recompute"] == {Stream.COMPUTE}
    assert streams["tensor-parallel collective"] == streams["weight gather"] == {Stream.GPU_TO_GPU}
    assert streams["copy in"] == {Stream.HOST_TO_DEVICE}
    assert streams["copy out"] == {Stream.DEVICE_TO_HOST}
    assert streams["host work"] == {Stream.HOST}


def test_a_schedule_that_cannot_complete_is_named() -> None:
    forward, backward = Pass(PassKind.FORWARD, 0), Pass(PassKind.BACKWARD, 0)
    orders = ((backward, forward), (forward, backward))
    with pytest.raises(Deadlock, match="stage 0 B0, stage 1 F0"):
        build(workload(stage(PLAIN), stage(PLAIN), grad_accum=1), orders, "1f1b")


def test_boundaries_between_nodes() -> None:
    """Four stages of two GPUs on two nodes of four: only the middle boundary and the way back cross."""
    plan = plan_of(2, 2, 2, 2, tp=2)
    plan = replace(plan, cluster=replace(plan.cluster, nodes=2, gpus_per_node=4))
    assert plan.hops_across() == {(0, 1): False, (1, 2): True, (2, 3): False, (0, 3): True}
    mapped = replace(plan, rank_map=(0, 1, 4, 5, 2, 3, 6, 7))
    assert mapped.hops_across() == {(0, 1): True, (1, 2): True, (2, 3): True, (0, 3): True}
