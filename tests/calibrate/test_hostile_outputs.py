"""Outputs of tools with odd values in them: only a MistError may come out of a reader, in one line."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_import_outputs import HINTS, sweep, table
from test_measured_rows import HEADER, ROW

from mist_megatron.calibrate.importing import read_output
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.errors import InputError, MistError

HUGE = "9" * 5000
"""More digits than Python makes a number of."""
ODD: tuple[Any, ...] = (
    *(
        5,
        0,
        -1,
        1.5,
        1e308,
        10**400,
        True,
        None,
        "",
        "x",
        HUGE,
        "1e999",
        [],
        {},
        [[]],
        [None],
        ["x", 5],
        {"a": []},
    ),
    *([[10**400, 1]], "[" * 100_000, "Infinity", "[1, 2", "\x1b[2J"),
)
SIDE = {"time": 100.0, "alg_bw": 0.01, "bus_bw": 0.0175, "nwrong": "0"}
NCCL_JSON = {
    "args": ["./all_reduce_perf", "-b", "8"],
    "nccl_version": "2.28",
    "devices": [{"rank": at, "group": 0, "hostname": "n", "device_info": "H100"} for at in range(8)],
    "results": [{"size": 1000, "type": "float", "redop": "sum", "out_of_place": SIDE, "in_place": SIDE}],
}
TRACE = {
    "deviceProperties": [{"name": "NVIDIA L4", "totalGlobalMem": 1}],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 5,
         "args": {"External id": 7, "Input Dims": [[64, 32], [32, 16]],
                  "Input type": ["c10::Half", "c10::Half"]}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 2, "dur": 3,
         "args": {"External id": 7, "correlation": 3}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 1,
         "args": {"correlation": 3}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 9, "dur": 4,
         "args": {"bytes": 4096}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 20, "dur": 9,
         "args": {"Collective name": "allreduce", "In msg nelems": 4096, "Out msg nelems": 4096,
                  "Group size": 2, "dtype": "Half", "Process Group Ranks": "[0, 1]"}},
    ],
}  # fmt: skip
RAW = [
    {"conditions": {"id": "a", "device": "L4", "backend": "cuda", "precision": "bf16", "date": "2026-01-01",
                    "versions": {"torch": "2"}, "clock_mhz": 1000.0}},
    {"kind": "gemm", "of": "a", "point": "p", "m": 64, "n": 64, "k": 64, "batch": 1,
     "seconds": 1e-5, "spread": 0.1},
    {"kind": "copy", "of": "a", "point": "q", "direction": "h2d", "bytes": 4096,
     "seconds": 1e-5, "at_once": 2},
]  # fmt: skip


def changed(draw: st.DrawFn, value: Any, odd: st.SearchStrategy[Any]) -> Any:
    """One random place of a document replaced or removed."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 6)) == 0:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed(draw, value[key], odd)}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        index = draw(st.integers(0, len(value) - 1))
        return [changed(draw, v, odd) if k == index else v for k, v in enumerate(value)]
    return draw(odd)


def read(text: str, kind: Any = None) -> None:
    """Reads, or is refused in one line that a terminal can show."""
    try:
        read_output(text, "output", HINTS, kind)
    except MistError as error:
        assert error.message.isprintable()


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(["nccl-tests-json", "kineto"]))
def test_changed_documents(data: st.DataObject, kind: str) -> None:
    document: Any = NCCL_JSON if kind == "nccl-tests-json" else TRACE
    for _ in range(data.draw(st.integers(1, 3))):
        document = changed(data.draw, document, st.sampled_from(ODD))  # type: ignore[arg-type]
    read(json.dumps(document), kind)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_measurements(data: st.DataObject) -> None:
    lines = [changed(data.draw, line, st.sampled_from(ODD)) for line in RAW]  # type: ignore[arg-type]
    read("\n".join(json.dumps(line) for line in lines), "raw")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_tables(data: st.DataObject) -> None:
    words = table(sweep()[:3]).split(" ")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at] = data.draw(
            st.sampled_from([HUGE, "", "x", "-1", "1e999", "nan", "0", "\n", "#", "[" * 50])
        )
    read(" ".join(words), "nccl-tests")


MATRIX = "MsgSize 1048576\nSend a b\na 0.0 100.0\nb 101.0 0.0\nRecv a b\na 0.0 99.0\nb 98.0 0.0\n"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_matrices(data: st.DataObject) -> None:
    words = MATRIX.split(" ")
    at = data.draw(st.integers(0, len(words) - 1))
    words[at] = data.draw(st.sampled_from([HUGE, "", "x", "-1", "1e999", "nan", "0", "1e-320", "\n"]))
    read(" ".join(words), "mpigraph")


@pytest.mark.parametrize("kind", ["kineto", "nccl-tests-json"])
def test_numbers_of_too_many_digits(kind: Any) -> None:
    with pytest.raises(InputError, match="thousands of digits"):
        read_output('{"traceEvents": [{"dur": ' + HUGE + "}]}", "trace.json", HINTS, kind)


@pytest.mark.parametrize(
    "line", [f"# nThread {HUGE} nGpus 1", f"#  Rank {HUGE} Group  0 Pid  1 on n device  0 [0x00] H100"]
)
def test_tables_with_numbers_of_too_many_digits(line: str) -> None:
    read(f"{line}\n{table(sweep()[:3])}", "nccl-tests")


def test_ranks_nested_too_deeply() -> None:
    group = TRACE["traceEvents"][4]  # type: ignore[index]
    nested = {**group, "args": {**group["args"], "Process Group Ranks": "[" * 100_000}}
    read(json.dumps({**TRACE, "traceEvents": [nested]}), "kineto")


def test_devices_that_are_no_list() -> None:
    with pytest.raises(InputError, match="devices is 5; wanted a list"):
        read_output(json.dumps({**NCCL_JSON, "devices": 5}), "all_reduce.json", HINTS)


ROWS = f"{HEADER},measured_stage_peak_mib\n{ROW},"


@pytest.mark.parametrize(
    "peaks", ["[" * 100_000, "[1" + "0" * 400 + "]", "[" + HUGE + "]", "[1e999]", "[NaN]", "[true]"]
)
def test_peaks_that_are_no_sizes(peaks: str) -> None:
    with pytest.raises(InputError, match="measured_stage_peak_mib"):
        read_rows(ROWS + f'"{peaks}"', "rows.csv")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_changed_rows(data: st.DataObject) -> None:
    words = (ROWS + "[100]").split(",")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at] = data.draw(st.sampled_from([HUGE, "", "x", "-1", "1e999", "nan", "0", "1" * 400]))
    with suppress(MistError):
        read_rows(",".join(words), "rows.csv")
