"""What replays count with, against plain versions of the same that go through everything one by one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hand_made import HandMade
from playing import recording_of, trace_of

from mist_megatron.errors import InputError
from mist_megatron.recorded import repeats
from mist_megatron.recorded.communicators import communicators
from mist_megatron.recorded.engine import play
from mist_megatron.recorded.gloo import stands
from mist_megatron.recorded.graph import Role
from mist_megatron.recorded.passes import StagePasses, _sides, _Work
from mist_megatron.recorded.pipeline import Stage, rebuilt, shared_out
from mist_megatron.recorded.repeats import Repeat, _runs, repeated, sends_of, windows_of
from mist_megatron.recorded.usage import Window, _busy_per_ms, windows
from mist_megatron.recorded.what_if import Covered, _inside
from mist_megatron.recorded.widths import _of_heads, _Seen, _sorted_out
from mist_megatron.traces.collectives import Meeting, Member
from mist_megatron.traces.columns import Shapes
from mist_megatron.traces.nesting import gloo_calls, link
from mist_megatron.traces.sizes import ATTENTION, LARGEST, PRODUCTS, OperatorWork, is_count, work_of


def drawn(random_: random.Random, most: int) -> tuple[list[int], list[int]]:
    """Intervals in order of their begin: some touch, some lie in others, some are empty."""
    starts = sorted(random_.randint(0, most) for _ in range(random_.randint(1, 9)))
    return starts, [start + random_.choice((0, 1, 2, 3, 10)) for start in starts]


@pytest.mark.parametrize("seed", range(20))
def test_what_encloses_what(seed: int) -> None:
    """On two threads: the last that began before and ends later; of what begins together the longer."""
    random_, made, calls = random.Random(seed), HandMade(), list[tuple[int, float, float]]()

    def nest(thread: int, low: int, high: int, depth: int) -> None:
        at = low
        while at + 2 <= high and len(calls) < 40:
            end = random_.randint(at + 2, high)
            calls.append((thread, at, end))
            made.operator(f"op{len(calls) - 1}", at, end - at, thread)
            if depth < 3 and random_.random() < 0.7:
                nest(thread, at + random_.randint(0, 1), end, depth + 1)
            at = end + random_.choice((0, 0, 1, 4))

    for thread in (1, 2):
        nest(thread, 10, 60, 0)
    trace = trace_of(made)
    parent = link(trace).parent
    number = {trace.name_of(event): event for event in range(len(trace))}
    for one, (thread, low, high) in enumerate(calls):
        around = [
            (start, -end, -other)
            for other, (of, start, end) in enumerate(calls)
            if of == thread
            and other != one
            and start <= low
            and high <= end
            and (start, -end, other) < (low, -high, one)
        ]
        wanted = (
            number[f"op{-max(around, key=lambda each: (each[0], each[1], -each[2]))[2]}"] if around else -1
        )
        assert parent[number[f"op{one}"]] == wanted


@pytest.mark.parametrize("seed", range(30))
def test_time_covered_by_intervals(seed: int) -> None:
    starts, ends = drawn(random.Random(seed), 40)
    inside = [any(low <= at < high for low, high in zip(starts, ends, strict=True)) for at in range(60)]
    order = np.random.default_rng(seed).permutation(len(starts))
    covered = Covered(np.array(starts, float)[order], np.array(ends, float)[order])
    assert covered.until(np.arange(61.0)).tolist() == [sum(inside[:at]) for at in range(61)]


@pytest.mark.parametrize("seed", range(30))
def test_share_of_each_millisecond(seed: int) -> None:
    """In tenths of a millisecond, from 7 ms on; the last is cut off."""
    starts, ends = drawn(random.Random(seed), 40)
    length = random.Random(-seed).choice((5, 19, 30, 50, 51))
    clipped = [(min(low, length), min(high, length)) for low, high in zip(starts, ends, strict=True)]
    clipped = [(low, high) for low, high in clipped if high > low]
    busy = [any(low <= at < high for low, high in clipped) for at in range(length)]
    wanted = [sum(busy[at : at + 10]) / len(busy[at : at + 10]) for at in range(0, length, 10)]
    low, high = (np.array([7e6 + 1e5 * each[side] for each in clipped]) for side in (0, 1))
    told = _busy_per_ms(low, high, Window(0, 7e6, 7e6 + 1e5 * length, None))
    assert told == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_equal_periods_that_follow_each_other(seed: int) -> None:
    random_ = random.Random(seed)
    block = [random_.randint(0, 2) for _ in range(random_.randint(1, 3))]
    names = [
        *([9] * random_.randint(0, 2)),
        *block * random_.randint(1, 4),
        *([8, 7][: random_.randint(0, 2)]),
    ]
    names += [random_.randint(0, 2) for _ in range(random_.randint(0, 4))]
    for period in range(1, len(names) // 2 + 1):
        same = [names[at] == names[at + period] for at in range(len(names) - period)]
        wanted, at = [], 0
        while at < len(same):
            until = at
            while until < len(same) and same[until]:
                until += 1
            if until - at >= period:
                wanted.append((at, until + period))
            at = max(until, at + 1)
        assert _runs(np.array(names), period) == wanted


def test_what_repeats_in_less_than_half_is_no_layer() -> None:
    """Four of one kind, 10 us each, among others: told with the pause behind each run, from 51 % on."""
    names = np.array([0, 1, 1, 1, 1, 2])
    begins = np.arange(6) * 20_000
    for beside, found in ((19.0, True), (21.0, False)):
        weights = np.array([beside, 10.0, 10.0, 10.0, 10.0, beside])
        told = repeated(3, names, weights, begins, begins + 10_000)
        assert (told is not None) == found
        if told is not None:
            assert (told.place, told.count, list(told.runs)) == (3, 4, [(20_000, 100_000)])
    assert repeated(3, names[:3], np.ones(3), begins[:3], begins[:3]) is None


@pytest.mark.parametrize(
    ("moments", "wanted"),
    [((5, 10, 15, 19), (-1, 0, 0, 0)), ((20, 24, 25, 26, 30, 39), (1, 1, 1, -1, 0, 0)), ((40, 99), (1, 1))],
)
def test_what_lies_between_layers_belongs_to_the_nearest(
    moments: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    """Layers from 10 to 20 and from 30 to 40; what is as near to both lies behind the first."""
    host = np.array(moments)
    told = _sides(cast(_Work, SimpleNamespace(host_ns=host)), [(0, 10, 20), (0, 30, 40)])
    assert told.tolist() == list(wanted)


def stage(
    forward: float, backward: float, before: float, behind: float, layers: int, tail: float
) -> StagePasses:
    return StagePasses(
        micro_batches=4, layers=layers, forward_s=forward, backward_s=backward,
        before_s=(before, 2 * before), behind_s=(behind, 3 * behind), tail_s=tail, sends=2,
    )  # fmt: skip


def test_recorded_stages_shared_out_anew() -> None:
    """What middle stages do outside of layers every stage does, embedding and head the ends alone."""
    by_rank = [stage(3.75, 7.75, 0.5, 0.25, 3, 0.6), stage(4.0, 8.75, 0.25, 0.75, 3, 0.9)]
    same = shared_out(by_rank, 2, None)
    assert [(one.forward_s, one.backward_s, one.tail_s) for one in same] == [
        (3.75, 7.75, 0.6),
        (4.0, 8.75, 0.9),
    ]
    forward = 3.75 + 4.0 - 0.5 - 0.75 - 0.25 - 0.25
    backward = 7.75 + 8.75 - 1.0 - 2.25 - 0.75 - 0.5
    for stages, layers in ((1, None), (3, None), (2, 12), (3, 6)):
        told = shared_out(by_rank, stages, layers)
        count = (layers or 6) / 6 / stages
        for at, one in enumerate(told):
            first, last = at == 0, at == stages - 1
            assert one.forward_s == pytest.approx(forward * count + 0.25 + 0.5 * first + 0.75 * last)
            assert one.backward_s == pytest.approx(backward * count + 0.625 + 1.0 * first + 2.25 * last)
            assert one.tail_s == pytest.approx(1.5 * count)
    with pytest.raises(InputError, match="7 layers do not divide among 2 stages"):
        shared_out(by_rank, 2, 7)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (3, 5), (4, 4)])
def test_a_pipeline_of_equal_stages(stages: int, micro_batches: int) -> None:
    """1F1B by its formula: (m + p - 1) passes there and back, and a tail."""
    forward, backward, tail = 0.002, 0.003, 0.0005
    trace, told = rebuilt([Stage(forward, backward, tail)] * stages, micro_batches, 0.0)
    whole = (micro_batches + stages - 1) * (forward + backward) + tail
    assert (trace.end_ns.max() - trace.start_ns.min()) / 1e9 == pytest.approx(whole, rel=1e-6)
    passes, sends = told
    assert (passes.kernels, sends.kernels) == (
        stages * (2 * micro_batches + 1),
        2 * micro_batches * (stages - 1),
    )
    assert passes.after_s == pytest.approx(stages * (micro_batches * (forward + backward) + tail))
    _, (_, slow) = rebuilt([Stage(forward, backward, tail)] * stages, micro_batches, 0.001)
    assert slow.after_s == pytest.approx(0.001 * sends.kernels) and slow.before_s == 0.0


@pytest.mark.parametrize(
    ("members", "transfer", "last"),
    [
        (((0, 10.0, 90.0), (1, 60.0, 95.0), (2, 30.0, 91.0)), 35.0, 1),
        (((0, 10.0, 50.0), (1, 60.0, 60.0)), 0.0, 1),
        (((0, 10.0, 50.0), (1, 60.0, 55.0)), 0.0, 1),
    ],
)
def test_a_meeting_begins_with_the_last(members: Any, transfer: float, last: int) -> None:
    made = tuple(
        Member(**dict(zip(Member.__dataclass_fields__, (rank, 0, start, end), strict=True)))
        for rank, start, end in members
    )
    told = Meeting("dp", "sum", None, made)
    assert (told.transfer_ns, told.last_rank) == (transfer, last)


def shapes(dims: list[object], types: list[object], concrete: list[object] | None = None) -> Shapes:
    fields = {"dims": dims, "types": types, "concrete": concrete}
    return cast(
        Shapes,
        SimpleNamespace(**{key: str(value).replace("'", '"').encode() for key, value in fields.items()}),
    )


@pytest.mark.parametrize("name", ATTENTION)
def test_sizes_of_attention(name: str) -> None:
    """Batch 2, sequence 64, 8 heads of 2 keys' and of size 16; causal where its own place says so."""
    kind, place, order, causal_at = ATTENTION[name]
    size = {"b": 2, "s": 64, "h": 8, "d": 16}
    query, key = [size[at] for at in order], [{**size, "h": 2}[at] for at in order]
    dims: list[object] = [[7]] * place + [query, key]
    types: list[object] = ["float"] * place + ["c10::Half"] * 2
    for flags, causal in ((["True"], True), (["False"], False), ([], False), (["", "True"], False)):
        told = work_of(name, shapes(dims, types, [""] * causal_at + flags))
        assert told == OperatorWork(kind, "fp16", (2.0, 64.0, 8.0, 2.0, 16.0), causal)
    longer = [{**size, "s": 65, "h": 2}[at] for at in order]
    assert work_of(name, shapes([*dims[:-1], longer], types)) is None
    assert work_of(name, shapes(dims[:-1], types)) is None
    assert work_of(name, shapes(dims, types[:-2])) is None


@pytest.mark.parametrize("name", PRODUCTS)
def test_sizes_of_products(name: str) -> None:
    batched, place = "bmm" in name, PRODUCTS[name]
    batch = [3] if batched else []
    dims: list[object] = [[5]] * place + [[*batch, 8, 16], [*batch, 16, 32]]
    types: list[object] = ["Long"] * place + ["c10::BFloat16"] * 2
    told = work_of(name, shapes(dims, types))
    assert told == OperatorWork("gemm", "bf16", (8.0, 32.0, 16.0, 3.0 if batched else 1.0))
    assert work_of(name, shapes([*dims[:-1], [*batch, 15, 32]], types)) is None
    assert work_of(name, shapes(dims, ["Long"] * len(types))) is None
    assert work_of(name, shapes([*dims[:-1], [*batch, 16, 0]], types)) is None


def test_what_counts() -> None:
    assert [is_count(one) for one in (1, int(LARGEST), int(LARGEST) + 1, 0, -1, True, 1.0, "1")] == [
        True, True, False, False, False, False, False, False,
    ]  # fmt: skip


def test_batches_are_of_products_of_several() -> None:
    works = [OperatorWork("gemm", "bf16", (64, 32, 16, batch)) for batch in (1.0, 2.0, 8.0)]
    cores = [OperatorWork("attention_forward", "bf16", (1, 64, 8, 2, 16))]
    seen = cast(
        _Seen, SimpleNamespace(products=works, attention=cores, normed={(64, 16), (32, 16), (64, 99)})
    )
    told = _sorted_out(seen, 16, frozenset({64}), {32.0}, frozenset(), 2)
    assert (told.batches, told.heads, told.local_rows) == ({2, 8}, {8, 2}, {32})
    assert _sorted_out(seen, 16, frozenset({64}), set(), frozenset(), 1).local_rows == frozenset()
    assert _of_heads({8.0}, {3.0}) == {8.0, 3.0, 6.0, 11.0, 14.0}


def test_the_last_step_ends_with_what_it_launched() -> None:
    """Each of 100 us; kernels of 30 begin 80 behind their step's begin, the last ends at 210 of 200."""
    made = HandMade()
    for number in (1, 2):
        at = 100.0 * (number - 1)
        made.step(number, at, 100)
        made.kernel("k", at + 10, at + 80, 30)
    recording = recording_of(made)
    played = play(recording.graph)
    begin = float(played.start_ns.min())
    told = [windows(recording, played, number)[0] for number in (1, 2)]
    assert [(one.start_ns - begin, one.end_ns - begin) for one in told] == [(0.0, 100e3), (100e3, 210e3)]


@pytest.mark.parametrize(
    ("operator", "sends"), [(None, True), ("nccl:all_to_all", False), ("c10d::alltoall_base_", False)]
)
def test_exchanges_of_all_with_all_hand_nothing_on(operator: str | None, sends: bool) -> None:
    """By what asked for the kernel, however deep it lies; here the launch is the file's first event."""
    made = HandMade()
    if operator:
        made.operator(operator, 0, 50)
        made.operator("inside", 1, 20)
    made.kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)", 4, 60, 10)
    part = recording_of(made).parts[0]
    assert sends_of(part).any() == sends


@pytest.mark.parametrize(
    ("longer", "holds"), [(0.5, 2), (1.0, 2), (1.001, 1), (11.0, 1), (12.0, 0), (99.0, 0)]
)
def test_names_outlive_the_calls_that_began_them(longer: float, holds: int) -> None:
    """A name that ends so many us behind the innermost call, the next of which ends 10 later, is held by the
    first that ends no more than a microsecond before it, or by the outermost."""
    made = HandMade()
    for depth, end in enumerate((70.0, 60.0, 50.0)):
        made.operator(f"op{depth}", 10.0 + depth, end - 10.0 - depth)
    made.event("user_annotation", "gloo:send", (100, 1), 20, 30 + longer)
    trace = trace_of(made)
    number = {trace.name_of(event): event for event in range(len(trace))}
    assert link(trace).parent[number["gloo:send"]] == number[f"op{holds}"]


def test_what_the_first_event_encloses() -> None:
    parent, named = np.array([-1, 0, 1, -1, 3]), np.array([True, False, False, False, False])
    assert _inside(parent, named).tolist() == [False, True, True, False, False]
    assert _inside(parent[:2], named[:2]).tolist() == [False, True]
    assert _inside(parent, ~named).tolist() == [False, False, True, False, True]


def test_without_steps_all_of_it_is_one() -> None:
    made = HandMade()
    made.operator("a", 10, 5)
    trace = trace_of(made)
    (step,) = windows_of(trace)
    assert (step.number, step.place, step.start_ns, step.end_ns) == (-1, -1, 0, int(trace.end_ns.max()) + 1)


@pytest.mark.parametrize(
    ("counts", "sends", "told"),
    [
        ((3, 6), True, 3),
        ((3, 3), True, 3),
        ((3, 3), False, 3),
        ((3, 6), False, None),
        ((4, 6), True, None),
        ((), True, None),
    ],
)
def test_passes_of_a_pipeline_follow_each_other(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], sends: bool, told: int | None
) -> None:
    """Twice as many layers are two passes with a transfer between, where there are transfers."""
    found = [(Repeat(0, count, ()),) for count in counts]
    monkeypatch.setattr(repeats, "_passes", lambda part, step: found)
    monkeypatch.setattr(repeats, "repeated", lambda repeat: repeat)
    monkeypatch.setattr(repeats, "sends_of", lambda part: np.array([sends]))
    part = cast(Any, SimpleNamespace(trace=SimpleNamespace(where="t")))
    if told is None:
        with pytest.raises(InputError, match=r"is not clear|no layers found"):
            repeats.layer_repeats(part, cast(Any, None))
    else:
        assert repeats.layer_repeats(part, cast(Any, None))[1] == told


def test_a_collective_belongs_to_the_window_that_it_begins_in() -> None:
    """Three of 10 us, without partners: at the begin, inside, and with the end of what is told."""
    made = HandMade()
    for at in (100.0, 150.0, 200.0):
        made.kernel("ncclDevKernel_AllReduce(x)", at - 50, at, 10)
    recording = recording_of(made)
    played = play(recording.graph)
    begin = float(played.start_ns[recording.graph.nodes.role == Role.GPU].min())
    (told,) = communicators(recording, played, (Window(0, begin, begin + 100e3, None),))
    assert (told.calls, told.collective, told.group, told.matched) == (
        2,
        "ncclDevKernel_AllReduce",
        "stream 7",
        False,
    )
    assert (told.transfer_s, told.waited_s) == (pytest.approx(20e-6), 0.0)


@pytest.mark.parametrize(
    ("ends", "returns", "waited"),
    [
        # Two sums asked for at 10 and 20, the thread does nothing from 30 until it returns.
        ((80.0, 90.0), 95.0, [2]),
        ((90.0, 80.0), 95.0, [2]),
        ((25.0, 28.0), 95.0, []),  # both had ended before it stood still
        ((80.0, 200.0), 95.0, [1]),  # it goes on before the second has ended: it waited for the first
        ((80.0, 90.0), 49.0, []),
    ],
)
def test_for_which_collectives_a_thread_stood_still(
    ends: tuple[float, float], returns: float, waited: list[int]
) -> None:
    made = HandMade()
    made.operator("before", 0, 30)
    for number, end in enumerate(ends):
        asked = 10.0 * (number + 1)
        made.operator("c10d::allreduce_", asked, 2)
        made.event("user_annotation", "gloo:all_reduce", (100, 5 + number), asked + 1, end - asked - 1)
    made.operator("after", returns, 10)
    trace = trace_of(made)
    links = link(trace)
    ran, _ = gloo_calls(trace)
    told = stands(trace, links, ran)
    assert [len(one.awaited) for one in told] == waited
    for one in told:
        assert (one.returned_ns - one.left_ns) == pytest.approx((returns - 30.0) * 1e3)
        begin = int(trace.start_ns.min())
        assert one.ended_ns - begin == pytest.approx(1e3 * max(ends[: len(one.awaited)]))
