"""Stage terms against sums made by hand, with prices so simple that a person can check them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from plain_overlap import no_interference

from mist_megatron.cost.closed_form import closed_form
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.terms import LayerLoad, StageLoads, TimeContext
from mist_megatron.cost.traffic import exposed_beside_products
from mist_megatron.cost.work import stage_work
from mist_megatron.price.prices import (
    EXACT,
    Attention,
    Collective,
    DeviceAdam,
    Gemm,
    HostAdam,
    HostCopy,
    MemoryPass,
    Priced,
    Work,
)
from mist_megatron.spec.kinds import alike
from mist_megatron.spec.mesh import (
    AXES,
    Group,
    Mesh,
    StageRole,
    boundary_crossing_share,
    own_crossings,
    role_of,
)
from mist_megatron.spec.plan import Execution
from mist_megatron.targets.table import TARGETS

PARAMETERS = 100.0
HOST_S = 0.01
"""More than the host's work of a micro-batch, which hides the beginning of first arrivals ..."""
HOP_S = 7.0
"""... as does the send of a middle stage's result of the pass before."""


class OneSecondPerByte:
    """Memory is free, a collective takes a second per message byte, copies two seconds per byte."""

    def of(self, work: Work) -> Priced:
        match work:
            case Gemm():
                seconds = work.m * work.n * work.k * work.batch
            case Attention():
                seconds = work.batch * work.seq
            case MemoryPass():
                seconds = 0.0 * np.asarray(work.moved_bytes)
            case Collective():
                passes = 2.0 if work.kind == "all_reduce" else 1.0
                seconds = np.broadcast_arrays(work.moved_bytes, work.ranks)[0] * passes
            case HostCopy():
                seconds = 2.0 * np.asarray(work.moved_bytes)
            case HostAdam():
                seconds = 5.0 * np.asarray(work.parameters)
            case DeviceAdam():
                seconds = 0.5 * np.asarray(work.parameters)
        return Priced(np.asarray(seconds, dtype=np.float64), EXACT)

    def interference(self) -> np.ndarray:
        return no_interference()


def array(value: float) -> np.ndarray:
    return np.asarray(float(value))


BLOCK = LayerLoad(
    forward_s=array(1000),
    backward_s=array(2000),
    forward_collective_s=array(10),
    backward_collective_s=array(20),
    parameters=array(PARAMETERS),
    saved_bytes=array(50),
)
GRID = StageGrid(
    role=StageRole.MIDDLE,
    nodes=1,
    gpus_per_node=4,
    sequence_parallel=False,
    recompute="full",
    layers=array(6),
    ckpt=array(0),
    in_flight=array(1),
    micro_batch=array(1),
    dp=array(4),
    tp=array(1),
    zero=array(1),
    grad_accum=array(8),
    offload=alike(array(0)),
    stages=3,
)


def terms_of(
    target: str,
    grid: StageGrid = GRID,
    block: LayerLoad = BLOCK,
    head: LayerLoad | None = None,
    **execution: Any,
) -> tuple[dict[str, float], dict[str, float]]:
    switches = Execution(**execution)
    context = TimeContext(
        prices=OneSecondPerByte(),
        facts=TARGETS[target].traffic(switches),  # type: ignore[arg-type]
        interference=no_interference(),
        weight_bytes=2.0,
        grad_bytes=2.0,
        optimizer_bytes=12.0,
        tensor_collectives_overlap=bool(switches.tp_comm_overlap),
        cluster_gpus=4,
        cluster_gpus_per_node=4,
        context_parallel=1,
        model_layers=8,
        without=frozenset(),
        recomputes_first_layers=TARGETS[target].memory(switches).recomputes_first_layers,  # type: ignore[arg-type]
    )
    loads = StageLoads(block=block, embedding=None, head=head, boundary_bytes=array(HOP_S))
    result = closed_form(stage_work(grid, loads, context))
    return tuple(  # type: ignore[return-value]
        {name: float(term.at(grid)) for name, term in terms.items()}
        for terms in (result.stable, result.delta)
    )


def test_plain_data_parallel_megatron() -> None:
    stable, delta = terms_of("megatron", replace(GRID, zero=array(0)))
    assert stable["forward"] == 6 * 1000
    assert stable["backward"] == 6 * 2000
    assert stable["tensor_parallel"] == 6 * (10 + 20)
    assert stable["recompute"] == 0
    assert stable["pipeline_p2p"] == 2 * 7
    # One all-reduce of 6 layers' fp16 gradients after the last backward pass, at 2 s per byte.
    assert delta["gradient_reduction"] == 2 * 2 * 6 * PARAMETERS
    assert delta["weight_gather"] == 0
    assert delta["optimizer_compute"] == 0.5 * 6 * PARAMETERS


def test_distributed_optimizer_shards_the_step() -> None:
    _, delta = terms_of("megatron")
    assert delta["gradient_reduction"] == 2 * 6 * PARAMETERS
    assert delta["weight_gather"] == 2 * 6 * PARAMETERS
    assert delta["optimizer_compute"] == 0.5 * 6 * PARAMETERS / 4


OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def test_overlapped_reduction_hides_behind_the_last_backward() -> None:
    first = replace(GRID, role=StageRole.FIRST)
    _, delta = terms_of("megatron", first, **OVERLAPPED)
    assert "gradient_reduction" not in delta
    # 200 s of reduction beside 2000 s of compute: only the last layer's own reduction stands alone.
    assert delta["last_backward_traffic"] == pytest.approx(2 * PARAMETERS)
    assert delta["first_gather"] == pytest.approx(2 * PARAMETERS, abs=HOP_S + HOST_S)


def test_later_stages_of_megatron_overlap_with_no_pass() -> None:
    """schedules.py has only the first stage reduce within its last backward pass, and a later stage's weights
    are one bucket (distributed_data_parallel.py)."""
    _, apart = terms_of("megatron")
    _, delta = terms_of("megatron", **OVERLAPPED)
    assert delta["last_backward_traffic"] == 0
    assert delta["gradient_reduction"] == apart["gradient_reduction"] == 2 * 6 * PARAMETERS
    assert delta["first_gather"] == apart["weight_gather"] == 2 * 6 * PARAMETERS


def test_reductions_longer_than_layers_end_one_after_the_other() -> None:
    """The first of 6 layers computes 2000 s, then 6 reductions of 5000 s follow each other."""
    first = replace(GRID, role=StageRole.FIRST)
    heavy = replace(BLOCK, parameters=array(2500), backward_collective_s=array(0))
    _, delta = terms_of("megatron", first, heavy, overlap_grad_reduce=True)
    assert delta["last_backward_traffic"] == pytest.approx(2000 + 6 * 5000 - 6 * 2000)


ROUND_S = 3 * (HOP_S + HOST_S / 6)
"""A layer's share of sends and host work of three passes of a chunk, of which the largest of 3 stages, with 3
of 8 layers, has one a layer."""


@pytest.mark.parametrize(
    ("parameters", "waits_s"), [(1000.0, 0.0), (4000.0, 2 * (8000.0 - 3 * 2000.0 - ROUND_S))]
)
def test_interleaved_stages_reduce_chunk_by_chunk(parameters: float, waits_s: float) -> None:
    """Of 3 chunks with 2 layers the last one reduces on its own, and each other beside the passes of 3
    micro-batches of the next chunk, with the sends between and the host's work. Reductions stay inside nodes,
    sends between them do not."""
    chunks = replace(GRID, vpp=3)
    block = replace(BLOCK, parameters=array(parameters), backward_collective_s=array(0))
    _, delta = terms_of("megatron", chunks, block, overlap_grad_reduce=True)
    assert "gradient_reduction" not in delta
    assert delta["chunk_reductions"] == pytest.approx(2 * 2 * parameters + 2 * waits_s)


def test_full_and_selective_recomputation() -> None:
    stable, _ = terms_of("megatron", replace(GRID, ckpt=array(2)))
    assert stable["recompute"] == 2 * 1000
    assert stable["tensor_parallel"] == 6 * 30 + 2 * 10
    core = replace(BLOCK, dropped_s=array(100), dropped_collective_s=array(1))
    stable, _ = terms_of("megatron", GRID, core)
    assert stable["recompute"] == 6 * 100
    assert stable["tensor_parallel"] == 6 * 31
    stable, _ = terms_of("megatron", replace(GRID, ckpt=array(2)), core)
    assert stable["recompute"] == 2 * 1000 + 4 * 100


def test_zero3_gathers_and_reduces_every_micro_batch() -> None:
    stable, delta = terms_of("deepspeed", replace(GRID, zero=array(3), stages=1))
    # Gathers (200 s) hide behind forward (1000 s) and backward; the first one of each pass does not. The last
    # reduction of a pass leaves beside the next pass; after the last pass of all there is none.
    assert stable["exposed_traffic"] == 0
    assert stable["pipeline_fill_of_layers"] == pytest.approx(200 + 200, abs=HOST_S)
    assert delta["last_backward_traffic"] == pytest.approx(200)
    assert delta["gradient_reduction"] == 0
    assert delta["optimizer_compute"] == 0.5 * 6 * PARAMETERS / 4


def test_zero2_of_deepspeed_stops_for_its_reductions_unless_told_to_overlap() -> None:
    grid = replace(GRID, zero=array(2), stages=1)
    stable, _ = terms_of("deepspeed", grid)
    assert stable["tensor_parallel"] == 6 * 30
    # A bucket is reduced on all ranks, which takes twice as long as one that is scattered.
    assert stable["blocking_data_parallel"] == 6 * 4 * PARAMETERS
    stable, _ = terms_of("deepspeed", grid, overlap_grad_reduce=True)
    assert stable["blocking_data_parallel"] == 0


def test_host_adam_of_an_offloaded_optimizer() -> None:
    _, delta = terms_of("megatron+patches", GRID.offloading(optimizer=array(0.5)))
    share = 6 * PARAMETERS / 4 * 0.5
    assert delta["optimizer_compute"] == 0.5 * share
    assert delta["host_adam"] == 5.0 * share
    # 2 s a byte, 4 bytes out and 4 back whatever the device has; 5 s pass while the host updates others.
    assert delta["host_adam_copies"] == pytest.approx((16.0 - 5.0) * share)
    _, delta = terms_of("deepspeed", replace(GRID, stages=1, zero=array(2)).offloading(optimizer=array(1.0)))
    # DeepSpeed sums in fp32 out, half-precision weights back: six bytes.
    assert delta["host_adam_copies"] == pytest.approx(12.0 * 6 * PARAMETERS / 4)


def test_mist_swaps_optimizer_states_behind_the_first_forward() -> None:
    swapped = GRID.offloading(optimizer=array(1.0))
    stable, delta = terms_of("mist", replace(swapped, role=StageRole.FIRST))
    assert stable["exposed_traffic"] == 0
    # Per layer in (and out): 2 s * 12 B * 25 parameters = 600 s, hidden behind 1012.5 s of forward and step,
    # except the first layer's swap in (the last one's swap out is beside the next pass); gathers of 200 s
    # hide too, but for the first, which arrives beside the longer swap.
    assert delta["first_forward_traffic"] == pytest.approx(600 - HOP_S, abs=HOST_S)
    assert delta["optimizer_compute"] == pytest.approx(6 * 0.5 * 25)
    assert delta["last_backward_traffic"] == pytest.approx(2 * PARAMETERS)
    assert "host_adam" not in delta
    # A stage that waits for its input steps meanwhile: its first layer has to copy, step and gather, of the
    # others only the step takes compute from forward passes.
    _, delta = terms_of("mist", swapped)
    ready_s = 600 + 12.5 + 200 + 5 * 12.5
    assert delta["first_forward_traffic"] + delta["optimizer_compute"] == pytest.approx(ready_s)


def test_activation_offload_copies_out_and_in() -> None:
    grid = GRID.offloading(activations=array(1.0))
    stable, _ = terms_of("megatron+patches", grid)
    # 2 s * 50 B each way, hidden behind compute, but for the way back of the first layer of a backward pass.
    assert stable["exposed_traffic"] == 0
    assert stable["pipeline_fill_of_layers"] == pytest.approx(100, abs=HOST_S)
    # Mist recomputes the last layers of a stage, which come first in backward and need nothing of this.
    assert terms_of("mist", grid)[0]["pipeline_fill_of_layers"] == 0
    # Recomputed layers keep only their inputs, which stay.
    whole = replace(grid, ckpt=GRID.layers)
    assert terms_of("megatron+patches", whole)[0]["pipeline_fill_of_layers"] == 0


def test_copies_go_on_beside_tensor_collectives() -> None:
    """500 s of copies each way beside 310 s forward (10 of them collectives) and 620 s backward."""
    block = replace(BLOCK, forward_s=array(300), backward_s=array(600), saved_bytes=array(250))
    grid = GRID.offloading(activations=array(1.0))
    stable, _ = terms_of("megatron+patches", grid, block=block)
    # What the last layer saves leaves beside the backward pass.
    assert stable["exposed_traffic"] == pytest.approx(5 * (500 - 310))
    assert stable["pipeline_fill_of_layers"] == pytest.approx(500, abs=HOST_S)


def test_interleaved_boundaries() -> None:
    stable, delta = terms_of("mist", replace(GRID, vpp=2))
    assert stable["pipeline_p2p"] == 2 * 2 * 7
    stable, delta = terms_of("megatron", replace(GRID, vpp=2))
    # Hidden behind chunks, but for a micro-batch's way through 3 x 2 of them and back.
    assert stable["pipeline_p2p"] == 0
    assert delta["pipeline_p2p"] == 2 * 5 * 7


EVEN = replace(GRID, vpp=2, layers=array(3))
"""As many as the largest of 3 stages has of a model of 8."""


def of_passes_s(layer_s: float) -> float:
    """Between the two chunks, which are not equal, 3 hops there and 3 back are waited for as far as a stage's
    own passes leave them, but for a fifth of a forward pass of 1.5 layers each."""
    return 6 * (7 - 0.2 * 1.5 * layer_s)


def test_interleaved_sends_longer_than_a_layer() -> None:
    """2 chunks on 3 stages of a model of 8 layers, of which the largest has 3: a layer has 2/3 of a send,
    14/3 s, to hide behind a forward pass of 2 s and 1 s of its collectives, and behind a backward pass of
    4 s: 5/3 s and 2/3 s are left, less what the host does between passes."""
    slow = {"forward_s": 2, "forward_collective_s": 1, "backward_s": 3, "backward_collective_s": 1}
    block = replace(BLOCK, **{name: array(seconds) for name, seconds in slow.items()})
    stable, delta = terms_of("megatron", EVEN, block=block)
    assert stable["pipeline_p2p"] == pytest.approx(3 * 7 / 3, abs=HOST_S)
    # A trip through 6 chunks takes 5 hops each way, instead of what 5 pairs of passes wait: where chunks are
    # not equal, those of the largest stage, whatever a stage has.
    way_s = 5 * 2 * 7 - of_passes_s(3.0)
    assert delta["pipeline_p2p"] == pytest.approx(way_s - 5 * 3 * 7 / 3 / 2, abs=6 * HOST_S)


def test_interleaved_sends_between_the_two_passes() -> None:
    """Longer than forward by 5/3 s, shorter than backward: one chunk in two waits for its round trip."""
    slow = {"forward_s": 2, "forward_collective_s": 1, "backward_s": 8, "backward_collective_s": 1}
    block = replace(BLOCK, **{name: array(seconds) for name, seconds in slow.items()})
    stable, delta = terms_of("megatron", EVEN, block=block)
    assert stable["pipeline_p2p"] == pytest.approx(3 * 5 / 3 / 2, abs=HOST_S)
    way_s = 5 * 2 * 7 - of_passes_s(3.0)
    assert delta["pipeline_p2p"] == pytest.approx(way_s - 8 * 3 * 5 / 3 / 2 / 2, abs=6 * HOST_S)


@pytest.mark.parametrize(("stages", "own"), [(4, True), (3, False)])
def test_what_fills_equal_chunks_is_of_their_own_layers(stages: int, own: bool) -> None:
    """8 layers make 4 stages of 2 chunks alike, and 3 stages of which the largest tells for all."""
    slow = {"forward_s": 2, "forward_collective_s": 1, "backward_s": 3, "backward_collective_s": 1}
    block = replace(BLOCK, **{name: array(seconds) for name, seconds in slow.items()})
    delta_s = [
        terms_of("megatron", replace(GRID, stages=stages, vpp=2, layers=layers), block=block)[1]
        for layers in (GRID.layers, 2 * GRID.layers)
    ]
    once, twice = (float(one["pipeline_p2p"]) for one in delta_s)
    assert (twice < once - 1.0) == own and (twice == once) == (not own)


def test_what_is_made_again_hides_sends_with_all_its_work() -> None:
    """Of 14/3 s a forward pass of 1 s and its collective leave 8/3; where the layer is made again, a
    backward pass of 1 s, its collective and both of the layer's once more leave 2/3."""
    each = ("forward_s", "forward_collective_s", "backward_s", "backward_collective_s")
    block = replace(BLOCK, **{name: array(1) for name in each})
    stable, _ = terms_of("megatron", replace(EVEN, ckpt=EVEN.layers), block=block)
    assert stable["pipeline_p2p"] == pytest.approx(3 * 10 / 3, abs=HOST_S)


def test_of_two_stages_a_chunk_sends_once() -> None:
    """2 chunks on 2 stages of a model of 8 layers: a layer has half a send, 3.5 s. One chunk waits for both
    of its sends, 2.5 and 0.5 s; the one at the pipeline's end for half of the longer, which the other hides
    while it still sends."""
    slow = {"forward_s": 1, "forward_collective_s": 0, "backward_s": 3, "backward_collective_s": 0}
    block = replace(BLOCK, **{name: array(seconds) for name, seconds in slow.items()})
    grid = replace(EVEN, stages=2, layers=array(4), role=StageRole.FIRST)
    stable, _ = terms_of("megatron", grid, block=block)
    assert stable["pipeline_p2p"] == pytest.approx(4 * (3.0 + 1.25) / 2, abs=HOST_S)


def test_a_head_fills_waits_for_the_link() -> None:
    """Two sends of 14/3 s a layer and pair against 6 s of passes leave 10/3 s. At the pipeline's end one of
    two chunks sends once only, and in what is left the head may run."""
    slow = {"forward_s": 2, "forward_collective_s": 1, "backward_s": 2, "backward_collective_s": 1}
    block = replace(BLOCK, **{name: array(seconds) for name, seconds in slow.items()})
    head = replace(BLOCK, forward_s=array(0.1), backward_s=array(0.2))
    middle, _ = terms_of("megatron", EVEN, block=block)
    last, _ = terms_of("megatron", replace(EVEN, role=StageRole.LAST), block=block, head=head)
    assert middle["pipeline_p2p"] == pytest.approx(3 * 10 / 3, abs=HOST_S)
    # The largest stage has 3 layers: each hides a third of the head.
    hidden_s = middle["pipeline_p2p"] - last["pipeline_p2p"]
    assert hidden_s == pytest.approx(3 * (7 / 3 + 0.3 / 3))


def test_stages_with_other_numbers_of_layers_wait_as_long() -> None:
    """14/3 s a layer, of which a forward pass of 1 s and its collective leave 8/3, a backward pass as long
    8/3, and 2/3 where the layer is made again. The largest stage of even ones has 3 layers, which wait 10 s
    if all are made again; so does any other stage, and each layer that is not made again hides 2 s less."""
    each = ("forward_s", "forward_collective_s", "backward_s", "backward_collective_s")
    block = replace(BLOCK, **{name: array(1) for name in each})
    for layers, again in ((3, 0), (3, 3), (2, 0), (5, 0), (5, 5), (5, 2), (9, 9)):
        grid = replace(EVEN, layers=array(layers), ckpt=array(again))
        stable, _ = terms_of("megatron", grid, block=block)
        wanted_s = 3 * 10 / 3 + 2.0 * (layers - again)
        assert stable["pipeline_p2p"] == pytest.approx(wanted_s, abs=2 * HOST_S), (layers, again)


def test_tensor_parallel_overlap_moves_collectives_beside_compute() -> None:
    """All of it, but for adding up the pieces that forward passes scatter: half of one of theirs."""
    grid = replace(GRID, tp=array(4))
    stopped, _ = terms_of("megatron", grid)
    beside, _ = terms_of("megatron", grid, tp_comm_overlap=True)
    assert stopped["tensor_parallel"] > 0
    # In these tests streams do not disturb each other, and compute lasts longer than what is beside it.
    assert beside["tensor_parallel"] == pytest.approx(GRID.layers * BLOCK.forward_collective_s / 8)


def test_what_travels_beside_products_is_a_pipeline_of_pieces() -> None:
    """Against the pieces themselves, in the order in which they run."""
    rng = np.random.default_rng(3)
    for _ in range(100):
        ranks, compute_s, collective_s = int(rng.integers(1, 9)), *rng.uniform(0.0, 2.0, 2)
        ranks += 1
        arrived = done = 0.0  # a rank's own piece is there
        for _piece in range(ranks):
            done = max(done, arrived) + compute_s / ranks
            arrived += collective_s / (ranks - 1)
        times = (array(compute_s), array(collective_s), array(ranks))
        assert exposed_beside_products(*times, np.ones((16, 4))) == pytest.approx(done - compute_s)


@pytest.mark.parametrize(
    ("stages", "stage_gpus", "gpus_per_node"),
    [(4, 8, 8), (4, 2, 8), (8, 2, 8), (2, 4, 8), (16, 1, 4), (9, 2, 8), (2, 8, 8), (3, 4, 8), (4, 16, 8)],
)
def test_stages_cross_as_many_node_borders_as_there_are(
    stages: int, stage_gpus: int, gpus_per_node: int
) -> None:
    """Counted on the nodes that each boundary's two stages stand on."""
    first_nodes = [k * stage_gpus // gpus_per_node for k in range(stages)]
    crosses = [here != there for here, there in pairwise(first_nodes)]

    def share(role: StageRole) -> float:
        return boundary_crossing_share(stages, stage_gpus, gpus_per_node, role)

    assert boundary_crossing_share(stages, stage_gpus, gpus_per_node) == pytest.approx(np.mean(crosses))
    assert share(StageRole.FIRST) == crosses[0]
    assert share(StageRole.LAST) == crosses[-1]
    own = [own_crossings(k, stages, stage_gpus, gpus_per_node) for k in range(stages)]
    assert own == [tuple(crosses[max(k - 1, 0) : k + 1]) for k in range(stages)]
    assert all(share(StageRole.MIDDLE) <= np.mean(each) for each in own[1:-1])


def test_groups_and_nodes() -> None:
    def mesh(**sizes: float) -> Mesh[Any]:
        arrays = {axis: array(sizes.get(axis, 1)) for axis in (*AXES, "ep", "etp", "instances", "inner")}
        return Mesh(**arrays, gpus_per_node=8)

    assert mesh(tp=8).nodes(Group.TENSOR) == 1
    assert mesh(tp=16).nodes(Group.TENSOR) == 2
    # Data parallel over 8 ranks with tensor parallel 4 on nodes of 8: two ranks a node.
    assert mesh(dp=8, tp=4).nodes(Group.DATA) == 4
    # Each context-parallel rank of 2 has a tensor-parallel group for itself, and so has each of 4 replicas.
    assert mesh(dp=4, cp=2, tp=4).size(Group.DATA) == 8
    assert mesh(dp=4, cp=2, tp=4).stride(Group.CONTEXT) == 4
    assert mesh(dp=4, cp=2, tp=4).nodes(Group.CONTEXT) == 1
    assert [role_of(i, 3) for i in range(3)] == [StageRole.FIRST, StageRole.MIDDLE, StageRole.LAST]
    assert role_of(0, 1) is StageRole.ONLY
