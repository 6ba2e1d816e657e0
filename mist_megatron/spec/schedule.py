"""Pipeline schedules: what each holds, in which order it runs its passes, and what filling and draining cost.

A new schedule is an entry of SCHEDULES (and its name in ScheduleName, if a plan can ask for it) and the flag
of the framework that runs it. Orders say in which order a rank runs its passes; the event engine says when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, Protocol

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.interleaved import ChunkedTimes, interleaved_s
from mist_megatron.spec.passes import Order, Pass, PassCosts, PassKind, one_forward_one_backward
from mist_megatron.spec.zero_bubble import zero_bubble_2p, zero_bubble_h1

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zb-h1"]
"""What `schedule` of a plan can be: schedules with a closed form."""
ONE_F_ONE_B: ScheduleName = "1f1b"
INTERLEAVED: ScheduleName = "interleaved"


class StageTimes(ChunkedTimes, Protocol):
    """What closed forms ask of a stage (`cost.iteration.StageTiming` says what each is)."""

    @property
    def first_s(self) -> float: ...
    @property
    def in_turn_s(self) -> float: ...
    @property
    def second_s(self) -> float: ...
    @property
    def weight_grad_s(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """What predictions and searches need to know of a schedule."""

    in_flight: Callable[[int, int, int, int], float]
    """Of (stage, stages, grad_accum, vpp): micro-batches whose activations a stage holds at its peak, the one
    being computed included."""
    ramp_s: Callable[[StageTimes, int], float]
    """Of (stage, vpp): what one stage adds to filling and draining the pipeline."""
    passes_s: Callable[[Sequence[StageTimes], Sequence[float], int, int], float]
    """Of (stages, their ramps, grad_accum, vpp): from the first forward pass to the last backward pass."""
    ends_s: Callable[[Sequence[StageTimes], int], list[float]] | None = None
    """Of (stages, grad_accum): no sooner has each stage done its last backward pass; None: nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One pipeline schedule."""

    name: str
    orders: Callable[[int, int, int, PassCosts], tuple[Order, ...]]
    """Of (ranks, micro_batches, vpp, costs): the passes of every rank."""
    closed_form: ClosedForm | None
    """None where only events can tell."""
    chunked: bool = False
    """Ranks have several model chunks each."""
    stops_for_neighbours: bool = False
    """Events play it with neighbours that stop for each other, on targets where they do
    (`PipelineFacts.sends_in_turn`); no such target runs another schedule."""
    splits_backward: bool = False
    """Into a pass for the input's gradient and one for the weights'."""
    check: Callable[[Sequence[int], int, int], None] = lambda layers, grad_accum, vpp: None
    """Of (layers of each stage, grad_accum, vpp): refuses a plan whose numbers it cannot run."""


def _gpipe_order(rank: int, ranks: int, micro_batches: int) -> Order:
    forwards = [Pass(PassKind.FORWARD, k) for k in range(micro_batches)]
    return (*forwards, *(Pass(PassKind.BACKWARD, k) for k in range(micro_batches)))


def _each(
    builder: Callable[[int, int, int], Order],
) -> Callable[[int, int, int, PassCosts], tuple[Order, ...]]:
    """Orders of all ranks from a function that makes one rank's."""

    def orders(ranks: int, micro_batches: int, vpp: int, costs: PassCosts) -> tuple[Order, ...]:
        return tuple(builder(rank, ranks, micro_batches) for rank in range(ranks))

    return orders


def _interleaved(ranks: int, micro_batches: int, vpp: int, costs: PassCosts) -> tuple[Order, ...]:
    """Megatron-core's interleaved 1F1B with its default group of `ranks` micro-batches per chunk.

    Rules of megatron/core/pipeline_parallel/schedules.py (0.19.2): the micro-batch count is at
    least the group and leaves a remainder of 0 or at least `ranks`.
    """
    if ranks == 1:
        raise InputError("the interleaved schedule needs at least 2 pipeline ranks, got 1")
    rest = micro_batches % ranks
    if micro_batches < ranks or rest:
        raise InputError(
            f"interleaved schedule: {micro_batches} micro-batches must be a multiple of the "
            f"{ranks} pipeline ranks"
        )
    table = [
        (first + k, chunk)
        for first in range(0, micro_batches, ranks)
        for chunk in range(vpp)
        for k in range(ranks)
    ]
    orders = []
    for rank in range(ranks):
        warm_up = min((ranks - rank - 1) * 2 + (vpp - 1) * ranks, len(table))
        forwards = [Pass(PassKind.FORWARD, k, c) for k, c in table]
        backwards = [Pass(PassKind.BACKWARD, k, vpp - 1 - c) for k, c in table]
        passes = forwards[:warm_up]
        for k, backward in enumerate(backwards):
            passes.extend(forwards[warm_up + k : warm_up + k + 1])
            passes.append(backward)
        orders.append(tuple(passes))
    return tuple(orders)


def _check_chunks(layers: Sequence[int], grad_accum: int, vpp: int) -> None:
    """Every chunk has a layer, or embedding or head; and every round as many micro-batches as stages."""
    if len(layers) < 2:
        raise InputError("plan: the interleaved schedule needs at least 2 stages, got 1")
    if vpp > max(layers) + 2:
        raise InputError(
            f"plan: vpp is {vpp}; wanted no more chunks than the largest stage has layers, {max(layers)}"
        )
    for index, chunks in enumerate(chunk_layers(layers, vpp)):
        # The embedding may be a chunk of its own, and so may the head.
        full = chunks[index == 0 : vpp - (index == len(layers) - 1)]
        if min(chunks) < 0 or min(full, default=1) < 1:
            raise InputError(
                f"plan: stages[{index}].layers is {layers[index]}; wanted one for each of vpp {vpp} chunks "
                f"where the largest stage has {max(layers)}"
            )
    check.divides("plan", ("the number of stages", len(layers)), ("grad_accum", grad_accum))


def chunk_layers(layers: Sequence[int], vpp: int) -> tuple[tuple[int, ...], ...]:
    """Layers of every chunk of stages with so many. Chunks of a stage are alike where vpp divides the layers
    of every stage. Else the largest stage has one layer less in as many of its last chunks as it takes, so
    that all stages meet at chunks of one size; what another stage lacks beside that is left out of the chunk
    that the embedding shares on the first stage, and of that of the head on the others."""
    if not any(count % vpp for count in layers):
        return tuple((count // vpp,) * vpp for count in layers)
    return tuple(
        uneven_chunks(count, max(layers), vpp, first=index == 0) for index, count in enumerate(layers)
    )


def even_chunks(total: int, before: int, own: int, vpp: int) -> tuple[range, ...]:
    """Layers of each chunk of a stage with `own` of the model's `total`, so many on the stages before it; vpp
    divides all of them."""
    starts = [chunk * (total // vpp) + before // vpp for chunk in range(vpp)]
    return tuple(range(start, start + own // vpp) for start in starts)


def uneven_chunks(layers: int, most: int, vpp: int, *, first: bool) -> tuple[int, ...]:
    """One stage of those, of which the largest has so many layers at most."""
    whole, rest = divmod(most, vpp)
    chunks = [whole + (chunk < rest) for chunk in range(vpp)]
    places = list(range(vpp)) if first else list(reversed(range(vpp)))
    lacking = most - layers
    for place in places:
        taken = min(lacking, max(chunks[place] - 1, 0))
        chunks[place] -= taken
        lacking -= taken
    # Every chunk has one layer: the one beside embedding or head can do without, and no other.
    chunks[places[0]] -= lacking
    return tuple(chunks)


def recomputed_of(chunks: Sequence[int], per_chunk: int) -> int:
    """Layers of a stage that are recomputed where that many of each chunk are, or all of a smaller one."""
    return sum(min(per_chunk, count) for count in chunks)


def recomputed_per_chunk(chunks: Sequence[int], ckpt: int) -> int | None:
    """The other way round; None where no number gives so many."""
    return next((n for n in range(max(chunks) + 1) if recomputed_of(chunks, n) == ckpt), None)


def _alone_s(stage: StageTimes, vpp: int) -> float:
    """A micro-batch passes each stage once, without the transfers the other way."""
    return stage.stable_s - stage.in_turn_s


def _slowest_in_full_s(
    stages: Sequence[StageTimes], ramps: Sequence[float], grad_accum: int, vpp: int
) -> float:
    """The slowest stage computes all micro-batches in full; only the others shrink to their ramp."""
    slowest = max(range(len(stages)), key=lambda index: stages[index].stable_s)
    passes_s = grad_accum * stages[slowest].stable_s + sum(ramps) - ramps[slowest]
    return passes_s + sum(stage.first_s for stage in stages)


def _one_after_the_other_s(
    stages: Sequence[StageTimes], ramps: Sequence[float], grad_accum: int, vpp: int
) -> float:
    """All forward passes, then all backward passes, each as slow as its slowest stage."""
    forward_s, backward_s = (max(stage.split_s[part] for stage in stages) for part in (0, 1))
    return (grad_accum - 1) * (forward_s + backward_s) + sum(ramps) + sum(stage.first_s for stage in stages)


def _longest_path_s(stages: Sequence[StageTimes], ramps: Sequence[float], grad_accum: int, vpp: int) -> float:
    """Until the first stage's last backward pass: the longest of the paths that stand still at one stage."""
    return max(_paths_s(stages, grad_accum))


def _of_chunks_s(stages: Sequence[StageTimes], ramps: Sequence[float], grad_accum: int, vpp: int) -> float:
    """Chunks of all stages take turns."""
    return interleaved_s(stages, grad_accum, vpp) + sum(stage.first_s for stage in stages)


def _ends_s(stages: Sequence[StageTimes], grad_accum: int) -> list[float]:
    """What drains through a stage leaves it before it passes those before it, and behind one that hands on
    its forward passes slowly comes a whole round trip."""
    forward, backward = zip(*(stage.split_s for stage in stages), strict=True)
    paths = _paths_s(stages, grad_accum)
    ends = []
    for index in range(len(stages)):
        drained_s = max(paths[index:]) - sum(backward[:index])
        late_s = sum(forward[index:]) + sum(backward[index:])
        for slow in range(index):
            ahead = len(stages) - 1 - slow
            handed_s = sum(forward[:index]) + (grad_accum - 1) * forward[slow] + late_s
            if grad_accum - 1 > ahead:
                behind_s = sum(forward[slow + 1 :]) + sum(backward[slow + 1 :])
                handed_s += (grad_accum - 1 - ahead) * backward[slow]
                handed_s += max(behind_s - ahead * forward[slow], 0.0)
            drained_s = max(drained_s, handed_s)
        ends.append(drained_s)
    return ends


def _paths_s(stages: Sequence[StageTimes], grad_accum: int) -> list[float]:
    """Until the first stage's last backward pass, of the paths that stand still at each stage."""
    paths, before_s = list[float](), 0.0
    slowest_before = [0.0, 0.0]
    second_s = stages[0].second_s if min(len(stages), grad_accum) > 1 else 0.0
    behind_s = sum(stage.stable_s - stage.in_turn_s for stage in stages)
    late_behind_s = sum(stage.first_s for stage in stages)
    for index, stage in enumerate(stages):
        behind_s -= stage.stable_s - stage.in_turn_s
        late_behind_s -= stage.first_s
        following = len(stages) - 1 - index
        skipped = min(following, grad_accum - 1)
        handed = [
            skipped * max(slower - own, 0.0)
            for slower, own in zip(slowest_before, stage.split_s, strict=True)
        ]
        if second_s > 0.0:
            # Behind the first stage micro-batch 1 is so late, after another pass or, at the end, a whole one.
            between_s = stage.split_s[0] if skipped else stage.stable_s
            late_s = second_s + stages[0].split_s[0] - between_s if index else second_s
            handed[0] = max(handed[0], late_s)
        before_s += stage.first_s
        ways = []
        for shared_s, beyond_s in _in_turn(stage, following, first=index == 0):
            around_s = behind_s - beyond_s
            round_trips = [around_s - skipped * own for own in stage.split_s] if following else [0.0, 0.0]
            round_trips[0] += late_behind_s
            if grad_accum > following + 1:
                waits_s = sum(max(pair) for pair in zip(handed, round_trips, strict=True))
            else:
                waits_s = max(sum(handed), *round_trips)
            ways.append(before_s + grad_accum * stage.stable_s - shared_s + waits_s)
        paths.append(max(ways))
        before_s += stage.stable_s - stage.in_turn_s
        slowest_before = [max(pair) for pair in zip(slowest_before, stage.split_s, strict=True)]
    return paths


def _in_turn(stage: StageTimes, following: int, *, first: bool) -> list[tuple[float, float]]:
    """What of a path through a stage is counted twice where stages send in turn, before it and in its waits:
    all that crosses its borders is its own. A first one shares that behind it alone, which is so much longer
    where it waits for nothing."""
    shared_s = 0.5 * stage.in_turn_s if following else stage.in_turn_s
    usual = [(shared_s, shared_s)]
    return [*usual, (0.0, stage.in_turn_s)] if first and following and shared_s > 0.0 else usual


def _interleaved_in_flight(stage: int, stages: int, grad_accum: int, vpp: int) -> float:
    """Chunks held over chunks per micro-batch. Megatron warms up 2 (stages - stage - 1) + (vpp - 1) stages
    chunks and holds one more (megatron/core/pipeline_parallel/schedules.py)."""
    chunks = min(2 * (stages - stage - 1) + (vpp - 1) * stages + 1, vpp * grad_accum)
    return chunks / vpp


@lru_cache(maxsize=4096)
def held_layers(stage: int, stages: int, grad_accum: int, chunks: tuple[int, ...]) -> int:
    """Most layers whose activations an interleaved stage holds at once, its chunks having so many: forward
    passes take `stages` micro-batches through each chunk in turn, backward passes through each from the last.
    After three rounds everything repeats."""
    rounds = min(-(-grad_accum // stages), 3)
    forward = [count for count in chunks for _ in range(stages)] * rounds
    backward = [count for count in reversed(chunks) for _ in range(stages)] * rounds
    ahead = min(2 * (stages - stage - 1) + (len(chunks) - 1) * stages, len(forward))
    held = most = sum(forward[:ahead])
    for coming, going in zip(forward[ahead:], backward, strict=False):
        held += coming
        most = max(most, held)
        held -= going
    return most


_ALL = (
    Schedule(
        name=ONE_F_ONE_B,
        stops_for_neighbours=True,
        orders=_each(one_forward_one_backward),
        closed_form=ClosedForm(
            in_flight=lambda stage, stages, grad_accum, vpp: float(min(stages - stage, grad_accum)),
            ramp_s=_alone_s,
            passes_s=_longest_path_s,
            ends_s=_ends_s,
        ),
    ),
    Schedule(
        name="gpipe",
        orders=_each(_gpipe_order),
        closed_form=ClosedForm(
            in_flight=lambda stage, stages, grad_accum, vpp: float(grad_accum),
            ramp_s=_alone_s,
            passes_s=_one_after_the_other_s,
        ),
    ),
    Schedule(
        name=INTERLEAVED,
        chunked=True,
        orders=_interleaved,
        check=_check_chunks,
        closed_form=ClosedForm(
            in_flight=_interleaved_in_flight,
            # A chunk is handed on after 1/vpp of the layers.
            ramp_s=lambda stage, vpp: min(sum(stage.first_chunk_s(vpp)), stage.stable_s / vpp),
            passes_s=_of_chunks_s,
        ),
    ),
    Schedule(
        name="zb-h1",
        splits_backward=True,
        orders=_each(zero_bubble_h1),
        closed_form=ClosedForm(
            in_flight=lambda stage, stages, grad_accum, vpp: float(min(stages, grad_accum)),
            # Weight gradients fill the bubble: (p-1)(F + B - W) where the backward pass costs B + W.
            ramp_s=lambda stage, vpp: max(stage.stable_s - 2.0 * stage.weight_grad_s, 0.0),
            passes_s=_slowest_in_full_s,
        ),
    ),
    Schedule(name="zb-2p", splits_backward=True, orders=zero_bubble_2p, closed_form=None),
)
SCHEDULES: Mapping[str, Schedule] = MappingProxyType({schedule.name: schedule for schedule in _ALL})
"""Every schedule that can be simulated."""


def closed_form(name: ScheduleName) -> ClosedForm:
    """Of a schedule that a plan can name."""
    form = SCHEDULES[name].closed_form
    assert form is not None, "ScheduleName holds names of schedules with a closed form"
    return form


def in_flight(
    name: ScheduleName,
    stage: int,
    stages: int,
    grad_accum: int,
    vpp: int = 1,
    chunks: tuple[int, ...] | None = None,
) -> float:
    """Micro-batches whose activations a stage holds at its peak, the one being computed included; where its
    chunks have these layers, which are not alike, as many as have the activations of what it holds."""
    if chunks is not None and len(set(chunks)) > 1:
        return held_layers(stage, stages, grad_accum, chunks) / sum(chunks)
    return closed_form(name).in_flight(stage, stages, grad_accum, vpp)


def usual_schedule(vpp: int) -> ScheduleName:
    """What runs so many model chunks per rank where nobody asks for a schedule."""
    return INTERLEAVED if vpp > 1 else ONE_F_ONE_B


def schedule_orders(
    name: str, ranks: int, micro_batches: int, vpp: int = 1, costs: PassCosts | None = None
) -> tuple[Order, ...]:
    """Passes of every rank, in the order in which the rank runs them."""
    if ranks < 1 or micro_batches < 1 or vpp < 1:
        raise InputError(
            f"schedule {name}: ranks ({ranks}), micro-batches ({micro_batches}) and vpp ({vpp}) "
            "must be at least 1"
        )
    if name not in SCHEDULES:
        raise InputError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    if vpp > 1 and not SCHEDULES[name].chunked:
        raise InputError(f"schedule {name} has one chunk per rank, got vpp {vpp}; use {INTERLEAVED}")
    return SCHEDULES[name].orders(ranks, micro_batches, vpp, costs or PassCosts())
