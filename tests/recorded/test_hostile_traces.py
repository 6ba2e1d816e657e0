"""Damaged traces: refused in one line, or played; never anything else."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import pytest
from hand_made import HandMade, two_streams

from mist_megatron.ask.replay import in_order
from mist_megatron.ask.replay_questions import Questions, asked
from mist_megatron.errors import InputError, MistError
from mist_megatron.recorded.engine import play
from mist_megatron.recorded.recording import WAITS, record
from mist_megatron.recorded.report import links_document, page_document, page_of
from mist_megatron.recorded.what_if import parse_scale
from mist_megatron.traces.reader import Reading, read_trace

ODD: list[Any] = [
    None, -1, 0, 10**30, -(10**18), 1.5, float("nan"), "x", "7", [], {}, True, 1e300, "\x00", 2**63,
    "ProfilerStep#1", "nccl",
]  # fmt: skip
QUESTIONS = [
    Questions(scales=[parse_scale("kernel=.:0.5")]),
    Questions(scales=[parse_scale("op=.:2")]),
    Questions(layers=5),
    Questions(micro_batches=5),
    Questions(hidden=2048, gpu="h100-sxm-80gb"),
]


def training() -> HandMade:
    made = two_streams()
    for number in range(6):
        made.operator("autograd::engine::evaluate_function: MmBackward0", 450 + 20 * number, 15, thread=2)
        made.kernel("back", 452 + 20 * number, 460 + 20 * number, 10, thread=2)
    return made


def damaged(chance: random.Random) -> bytes:
    document = json.loads(json.dumps(chance.choice((two_streams, training))().document()))
    events = document["traceEvents"]
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(events))
        event = events[place]
        if chance.random() < 0.2:
            del events[place]
        elif chance.random() < 0.2:
            events.insert(chance.randrange(len(events)), dict(event))
        else:
            inner = event.get("args")
            target = inner if isinstance(inner, dict) and inner and chance.random() < 0.5 else event
            target[chance.choice(list(target))] = chance.choice(ODD)
    return json.dumps(document).encode()


@pytest.mark.parametrize("seed", range(4))
def test_damaged_traces(seed: int) -> None:
    chance = random.Random(seed)
    played = 0
    for _ in range(60):
        text = damaged(chance)
        try:
            traces, _ = in_order(
                [read_trace(io.BytesIO(text), "t.json", Reading(fast=chance.random() < 0.5))]
            )
            recording = record(traces, None, chance.choice(WAITS))
            page = page_of(recording, play(recording.graph), None)
            json.dumps([page_document(page), links_document(recording)], allow_nan=False)
            recording, change, _ = asked(recording, chance.choice(QUESTIONS))
            page_of(recording, play(recording.graph, change), page.step)
            played += 1
        except MistError as error:
            assert "\n" not in error.message
    assert played > 5


def test_what_is_said_twice_is_told() -> None:
    """Numbers that came round, a step of two recordings, and what ran on no GPU."""
    made = two_streams()
    made.step(1, 50, 300)
    for event in made.events:
        if event.get("args", {}).get("correlation"):
            event["args"]["correlation"] = 1
    made.event("mtia_kernel", "other", (1, 2), 0, 9)
    text = json.dumps(made.document()).encode()
    _, notes = in_order([read_trace(io.BytesIO(text), "t.json", Reading())])
    for words in (
        "3 kernels carry a correlation that several calls have",
        "ProfilerStep#1 is marked 2 times",
        "other devices is left out (mtia_kernel)",
    ):
        assert [note for note in notes if words in note]
    text = json.dumps(two_streams().document()).encode()
    assert not in_order([read_trace(io.BytesIO(text), "t.json", Reading())])[1][:-1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.json", '{"trace": {"schemaVersion": 1, "traceEvents": []}}', "the trace lies inside of 'trace'"),
        ("t.json", '{"by": [{}], "run": {"traceEvents": []}}', "the trace lies inside of 'run'"),
        ("t.json", '[{"schemaVersion": 1, "traceEvents": []}]', "a list of whole traces"),
        ("t.json", "[[]]", "a list of whole traces or lists"),
        ("t.json", '{"traceEvents": {"a": 1}}', "traceEvents is no list"),
        ("t.nsys-rep", "??", "a report of Nsight"),
        ("t.json", '{"CudaEvent": {"startNs": "1"}}', "a report of Nsight"),
        ("t.json", '{"traceEvents": [{"ph": "X", "name": "fusion"}]}', "none says its category"),
        ("t.json", '{"traceEvents": [{"ph": "X", "cat": "Trace"}]}', "(only Trace)"),
        (
            "t.json",
            '{"traceEvents": [{"ph": "s", "cat": "async_npu", "id": 1}]}',
            "does not know (async_npu)",
        ),
    ],
)
def test_what_is_no_trace_of_a_gpu(name: str, text: str, words: str) -> None:
    with pytest.raises(InputError) as told:
        in_order([read_trace(io.BytesIO(text.encode()), name, Reading())])
    assert words in told.value.message
    assert told.value.details


def test_ranks_of_runs_of_other_sizes() -> None:
    traces = [
        read_trace(
            io.BytesIO(json.dumps({**two_streams().document(), "distributedInfo": one}).encode()), "t.json"
        )
        for one in ({"rank": 0, "world_size": 2}, {"rank": "1", "world_size": 4})
    ]
    assert [trace.rank for trace in traces] == [0, 1]
    with pytest.raises(InputError, match="of runs of 2 and 4 ranks"):
        in_order(traces)


def test_steps_that_overlap_are_told() -> None:
    made = two_streams()
    made.step(2, 200, 400)
    text = json.dumps(made.document()).encode()
    assert [
        note
        for note in in_order([read_trace(io.BytesIO(text), "t.json")])[1]
        if "step 2 begins before" in note
    ]


def test_ranks_without_numbers_go_by_the_numbers_in_their_names() -> None:
    text = json.dumps(two_streams().document()).encode()
    names = [f"worker{number}.json" for number in (10, 2, 1)]
    traces, _ = in_order([read_trace(io.BytesIO(text), name) for name in names])
    assert [trace.where for trace in traces] == ["worker1.json", "worker2.json", "worker10.json"]


def test_the_step_that_is_told_is_one_that_all_ranks_have() -> None:
    """Rank 0 recorded steps 1 to 3, rank 1 the third alone."""
    ranks = []
    for rank, steps in enumerate(((1, 2, 3), (3,))):
        made = HandMade(rank=rank, world=2)
        for number in steps:
            made.step(number, 400 * number, 400)
            made.kernel("gemm", 400 * number + 10, 400 * number + 15, 100)
        ranks.append(read_trace(io.BytesIO(json.dumps(made.document()).encode()), f"{rank}.json"))
    recording = record(ranks)
    page = page_of(recording, play(recording.graph), None)
    assert page.step == 3
    assert [one.window_s for one in page.ranks] == pytest.approx([400e-6, 400e-6])
