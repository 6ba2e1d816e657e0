"""Outputs of nccl-tests, mpiGraph and the PyTorch profiler as raw measurements; broken ones are refused."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json

import numpy as np
import pytest
from nccl_output import FOOTER, HEADER, MATRIX, nccl_json, nccl_row, rank_lines, sweep, table

from mist_megatron.calibrate.fit_collectives import fit_collectives
from mist_megatron.calibrate.import_kineto import read_kineto
from mist_megatron.calibrate.imported import Hints
from mist_megatron.calibrate.importing import kind_of, read_output
from mist_megatron.calibrate.measurements import Raw, read_measurements, write_measurements
from mist_megatron.errors import InputError
from mist_megatron.traces.reader import read_trace

HINTS = Hints(date="2026-11-21")


def test_nccl_tests_table_gives_latency_and_bandwidth():
    found = read_output(table(sweep()), "log.txt", HINTS)
    assert (found.kind, len(found.points), found.notes) == ("nccl-tests", 21, ())
    assert {(p.label, p.sizes["ranks"], p.sizes["nodes"]) for p in found.points} == {("all_reduce", 8, 1)}
    (condition,) = found.conditions
    assert condition.device == "NVIDIA H100 80GB HBM3"
    assert condition.versions == {"nccl": "22803"}
    (curve,) = fit_collectives(found.points, "here")
    assert curve.bytes_per_s == pytest.approx(350e9, rel=0.01)
    assert curve.latency_s == pytest.approx(20e-6, rel=0.05)


def test_ranks_of_several_nodes_and_groups():
    across = read_output(table(sweep(1.875), ["a"] * 8 + ["b"] * 8), "log.txt", HINTS)
    assert across.points[0].sizes == {"bytes": 1024.0, "ranks": 16.0, "nodes": 2.0}
    groups = HEADER.format(
        ranks=rank_lines(["a"] * 4) + "\n" + rank_lines(["a"] * 4, group=1, first=4)
    ) + "\n".join([*sweep(1.5), FOOTER])
    assert read_output(groups, "log.txt", HINTS).points[0].sizes["ranks"] == 4.0


def test_published_sweep_goes_through(measured_dir):
    """Real times of 8 A100 as their table: the fit meets the busbw that was printed for large sizes."""
    with (measured_dir / "hardware" / "nvlink_allreduce.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["gpu"] == "A100" and r["n_gpus_one_node"] == "8"][:1024]
    lines = [nccl_row(float(r["size_bytes"]), float(r["out_of_place_us"]), 1.75) for r in rows]
    found = read_output(table(lines), "log.txt", HINTS)
    (curve,) = fit_collectives(found.points, "here")
    large = max(rows, key=lambda row: float(row["size_bytes"]))
    assert curve.bytes_per_s / 1e9 == pytest.approx(float(large["out_of_place_busbw_GBps"]), rel=0.1)
    assert curve.error is not None
    assert curve.error < 0.15


def test_nccl_tests_json():
    found = read_output(nccl_json(), "out.json", HINTS)
    (point,) = found.points
    assert (found.kind, point.label, pytest.approx(point.seconds)) == ("nccl-tests-json", "all_gather", 4e-5)
    assert (found.conditions[0].precision, found.conditions[0].date) == ("bf16", "2026-11-20")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (table([nccl_row(1 << 20, 40.0, 1.75)[:40]]), "columns; wanted 13: cut off?"),
        (table([nccl_row(1 << 20, 40.0, 1.75).replace("40.00", "-40.00")]), "time is '-40.00'"),
        (table([nccl_row(1 << 20, 40.0, 1.75, wrong="3")]), "3 wrong elements"),
        (table([nccl_row(1 << 20, 40.0, 0.875)]), "another collective, or other ranks"),
        (table([nccl_row(1 << 30, 1.0, 1.75)]), "no hardware exceeds"),
        (table([nccl_row(1 << 20, 40.0, 1.75).replace("40.00", "0.040")]), "wanted time in us"),
        (table([]), "no measured size"),
        (table(sweep()).replace(" type ", " "), "the header above has no column type"),
        (table(["9" * 400 + " 1 float sum -1 40.0 26.2 45.9 0 41.0 25.6 44.8 0"]), "wanted a finite number"),
        (table(sweep()).replace("all_reduce_perf", "alltoall_perf"), "no plan uses it"),
        (table(sweep(0.875)).replace("all_reduce_perf", "something"), "which collective ran is not said"),
        (table(sweep(), ["a"] * 4 + ["b"] * 4).replace("#  Rank  0", "# "), "no line of rank 0"),
        (table(sweep()).replace("[0x01] NVIDIA H100 80GB HBM3", "[0x01] NVIDIA L4"),
         "different devices"),
        (nccl_json()[:-40], "not valid JSON"),
        (nccl_json(results=[]), "results is list"),
        (nccl_json(results=[{"size": 8}]), "no out_of_place"),
        (nccl_json().replace('"nwrong": "0"', '"nwrong": 2.0'), "2.0 wrong elements"),
        (nccl_json(devices=[]), "0 ranks"),
        ("{}", "not the output of a known tool"),
        ('{"schema": "1.0.1-chakra.0.0.4", "nodes": []}', "is an execution graph (Chakra)"),
        ("hello\n", "not the output of a known tool"),
        ("", "the file is empty"),
    ],
)  # fmt: skip
def test_broken_nccl_tests_are_refused(text, told):
    with pytest.raises(InputError) as caught:
        read_output(text, "log.txt", HINTS)
    assert told in caught.value.message
    assert caught.value.message.startswith("log.txt")


def test_tables_of_several_programs_in_one_log():
    gather = table(sweep(0.875, gb_per_s=300.0)).replace("all_reduce_perf", "all_gather_perf")
    found = read_output(table(sweep()) + "\n" + gather, "job.log", HINTS)
    assert [p.label for p in found.points] == ["all_reduce"] * 21 + ["all_gather"] * 21
    assert found.points[21].line > found.points[20].line + 10
    curves = {curve.kind: curve.bytes_per_s for curve in fit_collectives(found.points, "here")}
    assert curves["all_gather"] == pytest.approx(300e9, rel=0.01)
    second = gather.replace(nccl_row(1 << 20, 20.0 + 0.875 * (1 << 20) / 3e5, 0.875), "  1048576   12 ")
    with pytest.raises(InputError, match="line 70: 2 columns"):
        read_output(table(sweep()) + "\n" + second, "job.log", HINTS)


def test_cut_sweep_is_told():
    found = read_output(table(sweep()).removesuffix(FOOTER), "log.txt", HINTS)
    assert "cut short" in found.notes[0]


def test_mpigraph_matrix():
    found = read_output(MATRIX, "net.txt", HINTS)
    assert (found.kind, len(found.points)) == ("mpigraph", 12)
    slow = next(
        p for p in found.points if p.label == "send" and p.sizes["row"] == 1 and p.sizes["column"] == 2
    )
    assert slow.sizes["bytes"] / slow.seconds == pytest.approx(12e9)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MATRIX.replace("12000.0", "-12000.0"), "line 9: n2:1 to n3:2 is '-12000.0'"),
        (MATRIX.replace("\t12000.0", ""), "line 9: 2 figures; wanted 3"),
        (MATRIX.split("n3:2 from")[0], "the recv matrix has 2 of 3 rows: cut off?"),
        (MATRIX.replace("19050.5", "nan"), "is 'nan'"),
        (MATRIX.replace("19050.5", "190505000"), "check the units"),
        (MATRIX.replace("n2:1\tn3:2", "n2:1\tn2:1"), "named twice"),
        (MATRIX.replace("n2:1 to", "n9:1 to"), "row 'n9:1'; wanted 'n2:1'"),
        ("START mpiGraph v1.4\nEND mpiGraph\n", "no bandwidth matrix"),
    ],
)
def test_broken_matrices_are_refused(text, told):
    with pytest.raises(InputError) as caught:
        read_output(text, "net.txt", HINTS)
    assert told in caught.value.message


FLASH = "aten::_flash_attention_forward"
MM = ("aten::mm", [[4096, 1024], [1024, 8192]])


def op(number, name, dims, concrete=None, kind="c10::BFloat16"):
    """Lies at a place of its own, so that whatever its kernels say is in it."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 100.0 * number, "dur": 90.0,
        "args": {"External id": number, "Input Dims": dims, "Input type": [kind] * len(dims),
                 "Concrete Inputs": concrete or [""] * len(dims)}}  # fmt: skip


def kernel(number, us, name="sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn", **arguments):
    """With the launch that an operator makes; correlations are those of no other."""
    correlation = 1000 * number + len(name)
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
         "ts": 100.0 * number + 1, "dur": 2.0, "args": {"External id": number, "correlation": correlation}},
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 100.0 * number + 9, "dur": us,
         "args": {"External id": number, "correlation": correlation, "stream": 7, "device": 0, **arguments}},
    ]  # fmt: skip


def trace(*events, **header):
    flat = [one for event in events for one in (event if isinstance(event, list) else [event])]
    return json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
                       **header, "traceEvents": [{"ph": "M", "name": "process_name"}, *flat]})  # fmt: skip


def test_kineto_products_attention_and_copies():
    sdpa = [[2, 4096, 32, 128]] + [[2, 4096, 8, 128]] * 2 + [[], [], [], [], [], []]
    text = trace(
        op(1, *MM), kernel(1, 90.0), kernel(1, 10.0, "splitKreduce"),
        op(2, *MM), kernel(2, 110.0),
        op(3, "aten::baddbmm", [[8, 64, 32], [8, 64, 128], [8, 128, 32]]), kernel(3, 12.0),
        op(4, FLASH, sdpa, [""] * 8 + ["True"]), kernel(4, 800.0, "flash_fwd_kernel"),
        op(5, FLASH, sdpa, [""] * 8 + ["False"]), kernel(5, 1500.0, "flash_fwd_kernel"),
        op(6, "aten::mul", [[4096], [4096]]), kernel(6, 3.0, "elementwise"), kernel(77, 5.0)[1:],
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1, "dur": 1000.0,
         "args": {"bytes": 25_000_000}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "ts": 1, "dur": 9000.0,
         "args": {"bytes": 25_000_000}},
    )  # fmt: skip
    found = read_output(text, "trace.json", HINTS)
    points = {(p.kind, p.label): p for p in found.points}
    product = next(p for p in found.points if p.kind == "gemm" and p.sizes["batch"] == 1.0)
    assert product.sizes == {"m": 4096, "n": 8192, "k": 1024, "batch": 1}
    assert product.seconds == pytest.approx(105e-6)  # median of two calls, one of two kernels
    attention = points["attention_forward", ""]
    assert (attention.seconds, attention.sizes["kv_heads"]) == (pytest.approx(800e-6), 8.0)
    assert points["copy", "h2d"].sizes["bytes"] / points["copy", "h2d"].seconds == pytest.approx(25e9)
    left = " ".join(found.notes)
    assert "pageable" in left
    assert "no recorded operator launched: 1" in left
    assert "_flash_attention_forward of unusual shape, type or mask: 1" in left
    assert {c.device for c in found.conditions} == {"NVIDIA H100 80GB HBM3"}


def test_older_traces_have_numbers_of_calls_for_operators():
    """External id is the number of the call there: which operator made it is told by time alone."""
    launch, late = kernel(5, 80.0)
    for event in (launch, late):
        event["args"]["External id"] = event["args"]["correlation"] = 6
    found = read_output(trace(op(5, *MM), op(6, "aten::mul", [[8]]), launch, late), "trace.json", HINTS)
    assert [(p.kind, p.seconds) for p in found.points] == [("gemm", pytest.approx(80e-6))]


def gathering(rank, at, ends=500.0, **changed):
    """One rank's trace of a gather that it comes to at a time."""
    given = {"Collective name": "_allgather_base", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 23,
             "Group size": 2, "dtype": "BFloat16", "Process Group Name": "1", "Seq": 3,
             "Process Group Ranks": "[0, 1]", **changed}  # fmt: skip
    launch, comm = kernel(1, ends - at, "ncclDevKernel_AllGather_RING_LL", **given)
    comm["ts"] = at
    text = trace(op(1, *MM), kernel(1, 90.0), launch, comm, distributedInfo={"rank": rank, "world_size": 2})
    return read_trace(io.BytesIO(text.encode()), f"rank{rank}.json")


def test_collectives_take_what_they_take_from_the_last_rank_on():
    first, second = read_kineto([gathering(0, 200.0), gathering(1, 440.0)], [HINTS, HINTS])
    (point,) = [p for p in first.points if p.kind == "collective"]
    assert (point.label, point.sizes) == ("all_gather", {"bytes": float(2 << 23), "ranks": 2.0, "nodes": 1.0})
    assert point.seconds == pytest.approx(60e-6)
    assert not [p for p in second.points if p.kind == "collective"]  # it is told once


def test_a_rank_that_has_nothing_but_collectives_counts_for_the_others():
    first = gathering(0, 200.0)
    second = gathering(1, 440.0)
    second = dataclasses.replace(second, shapes=np.full(len(second), -1, np.int32))
    told = read_kineto([first, second], [HINTS, HINTS])
    assert [bool(one.points) for one in told] == [True, False]
    with pytest.raises(InputError, match="no product, attention, copy"):
        read_kineto([second], [HINTS])


def test_a_collective_of_one_rank_tells_no_time():
    (alone,) = read_kineto([gathering(0, 200.0)], [HINTS])
    assert not [p for p in alone.points if p.kind == "collective"]
    assert any("give the traces of all ranks" in note for note in alone.notes)


def test_ranks_of_a_trace_on_nodes():
    far = {"Process Group Ranks": "[0, 8]"}
    traces = [gathering(0, 200.0, **far), gathering(1, 440.0, **far)]
    with pytest.raises(InputError, match="share a node"):
        read_kineto(traces, [HINTS, HINTS])
    hints = Hints(date="2026-11-21", gpus_per_node=8)
    found, _ = read_kineto(traces, [hints, hints])
    (point,) = [p for p in found.points if p.kind == "collective"]
    assert (point.sizes["nodes"], point.strided) == (2.0, True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            trace(op(1, *MM), kernel(1, -3.0)),
            "traceEvents[3]: dur is -3.0",
        ),
        (trace(op(1, *MM), kernel(1, "90 us")), "dur is '90 us'"),
        (trace(op(1, *MM), kernel(1, 90.0))[:-30], "cut off at traceEvents[3]"),
        (trace(op(1, *MM), kernel(1, 0.001)), "no hardware exceeds"),
        (
            trace(op(1, *MM)),
            "no product, attention, copy or collective with its size: nothing in it ran on a GPU",
        ),
        (
            trace(op(1, *MM), [{**one, "cat": "mtia_ccp_events"} for one in kernel(1, 9.0)]),
            "not known here (mtia_ccp_events)",
        ),
        (trace(kernel(1, 9.0)), "shapes were not recorded"),
        (trace(op(1, *MM), kernel(1, 10**400)), "wanted microseconds"),
        (trace(op(1, "aten::mm", [[10**400, 8], [8, 8]]), kernel(1, 9.0)), "no product"),
        (trace(5), "traceEvents[1] is no object"),
        ('{"traceEvents": []}', "no traceEvents"),
        (
            '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": NaN}]}',
            "dur is nan; wanted microseconds",
        ),
    ],
)
def test_broken_traces_are_refused(text, told):
    with pytest.raises(InputError) as caught:
        read_output(text, "trace.json", HINTS)
    assert told in caught.value.message


def test_written_measurements_read_back():
    found = read_output(table(sweep()), "log.txt", HINTS)
    text = write_measurements(found.conditions, found.points)
    assert kind_of(text, "raw.jsonl") == "raw"
    raw = read_measurements(text, "raw.jsonl")
    assert isinstance(raw, Raw)
    assert [(p.sizes, p.seconds) for p in raw.points] == [(p.sizes, p.seconds) for p in found.points]


def test_command_imports_several_files_at_once(mist, tmp_path):
    (tmp_path / "all_reduce.txt").write_text(table(sweep()))
    (tmp_path / "net.txt").write_text(MATRIX)
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        file.write(trace(op(1, *MM), kernel(1, 90.0)))
    files = ["all_reduce.txt", "net.txt", "trace.json.gz"]
    ran = mist("calibrate", "import", *files, "--out", "raw.jsonl", "--json")
    assert (ran.code, json.loads(ran.out)["points"]) == (0, 34)
    assert len((tmp_path / "raw.jsonl").read_text().splitlines()) == 37


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["absent.txt"], "does not exist"),
        (["log.txt", "log.txt"], "given twice"),
        (["log.txt", "--as", "csv"], "--as"),
        (["log.txt", "--as", "kineto"], "wanted a trace of torch.profiler"),
        (["log.txt", "--collective", "broadcast"], "--collective"),
        (["cut.gz"], "cut off or damaged"),
        (["."], "is a directory"),
    ],
)
def test_command_refuses(ran_here, tmp_path, arguments, told):
    (tmp_path / "log.txt").write_text(table(sweep()))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:15])
    ran = ran_here("calibrate", "import", *arguments, "--out", "raw.jsonl")
    assert ran.code == 2
    assert told in ran.err
    assert not (tmp_path / "raw.jsonl").exists()
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "label",
    [
        *("0: ", " 12: ", "[0] ", "[1,0]<stdout>:", "[node-01] ", "node-01:0: ", "worker-0  | ", "> "),
        *(
            "[pod/nccl-launcher-abc/main] ",
            "2026-01-28T14:50:17.123Z ",
            "2026-01-28 14:50:17,123 ",
            "14:50:17 ",
        ),
        *("[2026-01-28 14:50:17] ", "1706453417.123 ", "2026-01-28T14:50:17+00:00 stdout F "),
        *("Jan 28 14:50:17 node-01 nccl[123]: ", "[rank0] 14:50:17 node-01: "),
    ],
)
def test_what_collects_logs_writes_before_each_line(label: str) -> None:
    """Launchers and collectors label every line: the same is read as without."""
    for text in (table(sweep()), MATRIX):
        wanted = read_output(text, "log.txt", HINTS)
        labelled = "".join(label + line for line in text.splitlines(keepends=True))
        assert read_output(labelled, "log.txt", HINTS).points == wanted.points
