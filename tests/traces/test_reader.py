"""Files become columns: streamed, of every age, with or without a fast parser; what is wrong is told in one
line."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import HandMade, two_streams

from mist_megatron.errors import InputError
from mist_megatron.formats.files import open_packed
from mist_megatron.traces.columns import Kind, Trace
from mist_megatron.traces.decode import Decoder
from mist_megatron.traces.nesting import link
from mist_megatron.traces.reader import Reading, read_trace


def read(text: str | bytes, **how: Any) -> Trace:
    data = text if isinstance(text, bytes) else text.encode()
    return read_trace(io.BytesIO(data), "t.json", Reading(**how))


def same(one: Trace, other: Trace) -> bool:
    for field in dataclasses.fields(Trace):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            if not np.array_equal(left, right):
                return False
        elif field.name == "shape_table":
            if [json.loads(entry.dims) for entry in left] != [json.loads(entry.dims) for entry in right]:
                return False
        elif left != right:
            return False
    return True


def many(count: int) -> str:
    """Events with all that could be mistaken for a border: braces, brackets and commas in names and
    arguments."""
    made = two_streams()
    for number in range(count):
        name = ['}, {"', "[[]]", 'quote " and \\ slash', "plain"][number % 4]
        made.operator(
            name, 500 + number, 1, **{"Input Dims": [[number % 3, 2], []], "Input type": ["float", ""]}
        )
    return json.dumps(made.document(traceName="x", baseTimeNanoseconds=5), indent=1)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("size", [1 << 22, 4096, 700])
def test_pieces_change_nothing(fast: bool, size: int) -> None:
    text = many(300)
    whole, pieces = read(text, fast=False, piece_bytes=1 << 22), read(text, fast=fast, piece_bytes=size)
    assert len(whole) == len(two_streams().events) + 300
    assert whole.origin_ns == 5
    assert same(whole, pieces)


def test_the_fast_parser_is_there_for_these_tests() -> None:
    assert Decoder().is_fast


def test_what_comes_before_and_behind_the_events() -> None:
    text = json.dumps({"traceEvents": two_streams().events, "distributedInfo": {"rank": 3, "world_size": 8}})
    assert (read(text).rank, read(text).world) == (3, 8)
    bare = read(json.dumps(two_streams().events))
    assert len(bare) == len(two_streams().events)


def test_categories_of_2021() -> None:
    made = HandMade()
    made.event("Operator", "aten::mm", (9, "9"), 0, 10, **{"External id": 2})
    made.event("Runtime", "cudaLaunchKernel", (9, "9"), 2, 2, correlation=5, **{"external id": 2})
    made.event("Kernel", "sgemm", (0, "stream 7"), 9, 4, correlation=5, stream=7, **{"external id": 2})
    trace = read(json.dumps(made.document()))
    assert trace.kind.tolist() == [Kind.OPERATOR, Kind.CALL, Kind.KERNEL]
    assert trace.places == ((9, 9), (0, 7))
    links = link(trace)
    assert links.launch.tolist() == [-1, -1, 1]
    assert (links.by_external, links.by_nesting) == (1, 0)


def test_external_ids_that_are_numbers_of_calls_link_nothing() -> None:
    """Older traces: External id 5 of the call is the call's own number; operator 5 is another."""
    made = HandMade()
    made.operator("aten::mul", 0, 5, **{"External id": 5})
    made.operator("aten::mm", 10, 10, **{"External id": 6})
    made.event("cuda_runtime", "cudaLaunchKernel", (100, 1), 12, 2, correlation=5, **{"External id": 5})
    made.event("kernel", "sgemm", (0, 7), 19, 4, correlation=5, stream=7, **{"External id": 5})
    trace = read(json.dumps(made.document()))
    links = link(trace)
    call = int(np.flatnonzero(trace.kind == Kind.CALL)[0])
    assert trace.name_of(int(links.operator[call])) == "aten::mm"
    assert (links.by_external, links.by_nesting) == (0, 1)


def test_correlations_that_come_round() -> None:
    made = HandMade()
    for at in (0, 1000):
        made.event("cuda_runtime", "cudaLaunchKernel", (100, 1), at, 2, correlation=1)
        made.event("kernel", "k", (0, 7), at + 5, 4, correlation=1, stream=7)
    trace = read(json.dumps(made.document()))
    assert link(trace).launch.tolist() == [-1, 0, -1, 2]


@pytest.mark.parametrize("fast", [True, False])
def test_times_of_every_version(fast: bool) -> None:
    """Whole microseconds, fractions, and fractions so large that a float has lost their nanoseconds."""
    for first, second, apart in [
        ("1694128201427784", "1694128201427785", 1000),
        ("1419247332972.313", "1419247332972.314", 1),
        ("1694128201427784.123", "1694128201427784.125", 2),
    ]:
        text = "[" + ",".join(
            f'{{"ph": "X", "cat": "cpu_op", "name": "n", "pid": 1, "tid": 1, "ts": {at}, "dur": 0.5}}'
            for at in (first, second)
        )
        trace = read(text + "]", fast=fast)
        assert trace.start_ns.tolist() == [0, apart]
        assert trace.length_ns.tolist() == [500, 500]


@pytest.mark.parametrize("fast", [True, False])
def test_what_json_does_not_know_but_profilers_write(fast: bool) -> None:
    event = '{"ph": "X", "cat": "cpu_op", "name": "a\nb\x01", "pid": 1, "tid": 1, "ts": 1, "dur": 2, '
    event += '"args": {"x": NaN}}'
    trace = read(f'{{"traceEvents": [{event}, {event}]}}', fast=fast, piece_bytes=64)
    assert trace.name_of(0) == "a\nb"
    assert len(trace) == 2


@pytest.mark.parametrize("fast", [True, False])
def test_events_of_two_records_and_numbers_as_text(fast: bool) -> None:
    """One that begins inside another ends first; one that never ends is left out, and told."""
    place = '"pid": 1, "tid": 1'
    records = [
        f'{{"ph": "B", "cat": "cpu_op", "name": "outer", {place}, "ts": 10, "args": {{"External id": 4}}}}',
        f'{{"ph": "B", "cat": "cpu_op", "name": "inner", {place}, "ts": "12.5"}}',
        f'{{"ph": "E", {place}, "ts": 14}}',
        f'{{"ph": "E", {place}, "ts": 20.25}}',
        f'{{"ph": "E", {place}, "ts": 21}}',
        f'{{"ph": "X", "cat": "cpu_op", "name": "whole", {place}, "ts": "1700000000000000.125", "dur": "2"}}',
        f'{{"ph": "B", "cat": "cpu_op", "name": "open", {place}, "ts": 30}}',
    ]
    trace = read("[" + ", ".join(records) + "]", fast=fast)
    assert [trace.name_of(event) for event in range(len(trace))] == ["outer", "inner", "whole"]
    assert trace.length_ns.tolist() == [10_250, 1_500, 2_000]
    assert trace.start_ns.tolist() == [0, 2_500, 1_700_000_000_000_000_125 - 10_000]
    assert trace.external.tolist() == [4, 0, 0]
    assert trace.notes == ("1 events begin (ph B) and do not end: left out",)


def test_what_nobody_asks_for_is_dropped() -> None:
    made = two_streams()
    for number in range(50):
        made.event("python_function", f"f{number}", (100, 1), number, 1)
        made.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 1, "pid": 1, "tid": 1}
        )
    trace = read(json.dumps(made.document()))
    assert len(trace) == len(two_streams().events)
    assert trace.dropped == {"python_function": 50}
    assert trace.events_read == len(made.events)


def cut(text: str) -> str:
    return text[: text.index("adam")]


def wrong_time(value: str) -> Callable[[str], str]:
    return lambda text: text.replace('"ts": 14,', f'"ts": {value},', 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (cut, "cut off at traceEvents"),
        (wrong_time("NaN"), "wanted microseconds"),
        (wrong_time('"soon"'), "wanted microseconds"),
        (wrong_time("1e300"), "wanted microseconds"),
        (lambda text: text.replace('"dur": 165', '"dur": -4'), "from 0 to an hour"),
        (lambda text: text.replace("[", "[5, ", 1), "is no object"),
        (lambda text: text.replace('"tid": 7', '"tid": [7]', 1), "pid or tid"),
        (lambda text: text.replace('"traceEvents"', '"events"'), "no traceEvents"),
        (lambda text: "", "is empty"),
        (lambda text: "[" * 100_000, "a list of whole traces or lists"),
        (lambda text: '[{"a":' * 50_000, "nested too deeply|no traceEvents|cut off"),
        (lambda text: "SQLite format 3\0", "Nsight"),
        (lambda text: '{"schema": "1.1.1-chakra.0.0.4", "nodes": []}', "Chakra"),
        (lambda text: "a,b\n1,2\n", "wanted a trace"),
        (lambda text: text.replace('"name": "adam"', '"name": adam'), "not valid JSON"),
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_bad_files_in_one_line(change: Callable[[str], str], told: str, fast: bool) -> None:
    with pytest.raises(InputError, match=told) as error:
        read(change(json.dumps(two_streams().document())), fast=fast)
    assert "\n" not in error.value.message


@pytest.mark.parametrize("packed", [True, False])
def test_what_a_killed_profiler_left(tmp_path: Path, packed: bool) -> None:
    text = cut(many(2000)) if not packed else many(2000)
    data = gzip.compress(text.encode())[:-2000] if packed else text.encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(data)
    with open_packed(path) as file, pytest.raises(InputError, match="cut off") as error:
        read_trace(file, str(path))
    assert "--partial" in error.value.details[0]
    with open_packed(path) as file:
        trace = read_trace(file, str(path), Reading(partial=True))
    assert 5 < len(trace) < 2020
    assert "cut off" in trace.notes[0]


def test_memory_of_kept_events() -> None:
    """Under 300 bytes each while a file is read, beyond the piece that is being parsed."""
    import tracemalloc

    text = many(20_000).encode()
    tracemalloc.start()
    trace = read_trace(io.BytesIO(text), "t.json", Reading(piece_bytes=1 << 16))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / len(trace) < 300
