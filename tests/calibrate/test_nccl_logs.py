"""Logs of nccl-tests as clusters leave them: the real ones that were published, and what others print."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from nccl_output import FOOTER, MATRIX, nccl_json, nccl_row, sweep, table

from mist_megatron.calibrate.fit_collectives import fit_collectives
from mist_megatron.calibrate.imported import Hints
from mist_megatron.calibrate.importing import read_output
from mist_megatron.errors import InputError
from mist_megatron.price.datasheet import datasheet_profile
from mist_megatron.price.prices import Collective
from mist_megatron.price.profile_prices import prices_of
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec

HINTS = Hints(date="2026-11-21")
USED = {"all_reduce", "all_gather", "reduce_scatter", "send_recv"}


@pytest.fixture
def links_dir(measured_dir):
    folder = measured_dir / "links"
    if not folder.is_dir():
        pytest.skip("the measured logs are not here")
    return folder


def read(path):
    return read_output(path.read_text(), path.name, HINTS)


def test_logs_of_pairs_are_read_or_refused_for_their_true_reason(links_dir):
    """Each holds alltoall_perf, which no plan uses, before sendrecv_perf; some end early."""
    refused = {}
    for path in sorted((links_dir / "xxrjun_h100_pairs_cluster00").iterdir()):
        text = path.read_text()
        whole = text.count("# Avg bus bandwidth") == 2
        try:
            found = read(path)
        except InputError as error:
            refused[path.name] = error.message
            assert not whole, path.name
            assert ("failure" in error.message) == ("failure" in text), path.name
            continue
        assert whole, path.name
        gpus = int(path.name.split("_G")[1].split("_")[0])
        labels = Counter((p.label, p.sizes["ranks"], p.sizes["nodes"]) for p in found.points)
        assert labels == {("send_recv", 2.0 * gpus, 2.0): 10}, path.name
    assert len(refused) == 10
    assert sum("failure" in reason for reason in refused.values()) == 6


def test_logs_of_several_programs_give_each_its_own_rows(links_dir):
    """Newer versions print `Collective test concluded` behind the average: it belongs to the table above."""
    for path in sorted((links_dir / "nccl_logs").glob("*cluster01_*-node*")):
        counts = Counter(point.label for point in read(path).points)
        assert counts == dict.fromkeys(USED, 10), path.name
    counts = Counter(point.label for point in read(links_dir / "gather_then_scatter_2.17.8.log").points)
    assert counts == {"all_gather": 10, "reduce_scatter": 10}


def test_logs_of_other_ages_and_launchers(links_dir):
    logs = links_dir / "nccl_logs"
    for name in ("p5_nccl-test-output-v2.22.3-1.log", "p5_nccl-test-output-v2.22.3-1-with-tuner.log"):
        found = read(logs / name)  # tags of mpirun inside rows, thousands of lines of NCCL_DEBUG
        assert {(p.label, p.sizes["ranks"], p.sizes["nodes"]) for p in found.points} == {
            ("all_reduce", 16.0, 2.0)
        }
        assert found.points[-1].seconds == pytest.approx(66154e-6, rel=0.01)
    gather = read(logs / "superbench_allgather.log")  # no column redop, rows of 0 bytes
    assert (len(gather.points), {p.label for p in gather.points}) == (29, {"all_gather"})
    assert "5 rows of 0 bytes" in gather.notes[-1]
    assert read(logs / "a3mega_h100_2x8.md").points[0].sizes["ranks"] == 16.0
    for name in ("broadcast", "reduce"):
        with pytest.raises(InputError, match=f"{name}_perf: no plan uses it"):
            read(logs / f"superbench_{name}.log")


def prefixed(prefix, text):
    return "\n".join(prefix + line for line in text.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        prefixed("[1,0]<stdout>:", table(sweep())),
        prefixed("[prterun-node-1-42@1,0]<stdout>: ", table(sweep())),
        prefixed("0: ", table(sweep())),
        prefixed("node-1: ", table(sweep())),
        prefixed("2026-11-21T10:00:00.123456Z ", table(sweep())),
        prefixed("\x1b[0m", table(sweep())),
        table(sweep()).replace("\n", "\r\n"),
        table(sweep()).replace("      -1 ", "      -1node-1:7:9 [0] NCCL INFO Connected all rings\n"),
        "node-1:7:9 [0] NCCL INFO Bootstrap\n" * 9000 + table(sweep()),
        table(sweep()).replace("all_reduce_perf", "something"),  # by its bandwidths alone
        table([nccl_row(4, 30.0, 1.75).replace(" 4 ", " 0 ", 1), *sweep()]),
    ],
)
def test_what_launchers_write_into_lines(text):
    whole, found = read_output(table(sweep()), "log.txt", HINTS), read_output(text, "log.txt", HINTS)
    assert [(p.label, p.sizes, p.seconds) for p in found.points] == [
        (p.label, p.sizes, p.seconds) for p in whole.points
    ]


def test_a_program_that_dies_is_told_and_the_others_are_read():
    other = table(sweep(0.875)).replace("all_reduce_perf", "all_gather_perf")
    dies = other.removesuffix(FOOTER) + "n1: Test NCCL failure common.cu:5 'unhandled system error'\n"
    found = read_output(dies + table(sweep()), "job.log", HINTS)
    assert Counter(p.label for p in found.points) == {"all_gather": 21, "all_reduce": 21}
    assert "unhandled system error" in found.notes[0]
    torn = table(sweep()) + other.removesuffix(FOOTER)[:-60]
    found = read_output(torn, "job.log", HINTS)
    assert Counter(p.label for p in found.points) == {"all_reduce": 21, "all_gather": 20}
    assert "cut off, left out" in found.notes[-1]


def test_json_of_newer_versions():
    """Counts of wrong elements are floats there, and a side that was not run is null."""
    one = json.loads(nccl_json())["results"][0]
    one["out_of_place"] = None
    one["in_place"]["nwrong"] = 0.0
    none = {**one, "size": 0}
    found = read_output(nccl_json(results=[none, one]), "out.json", HINTS)
    assert [point.seconds for point in found.points] == [pytest.approx(41e-6)]
    assert "in place only" in found.notes[0]


def test_dead_links_of_mpigraph_are_left_out_and_told():
    found = read_output(prefixed("[1,0]<stdout>:", MATRIX.replace("12000.0", "0.0")), "net.txt", HINTS)
    assert len(found.points) == 10
    assert "2 pairs of 0 MB/s" in found.notes[0]


def test_held_out_sizes_of_collectives_are_predicted(links_dir):
    """Every fifth size held out of what the logs of one cluster (1 and 10 nodes) say, by the profile's own
    prices. Sends round the GPUs of one node get more channels from one size to the next, so that twice the
    bytes take as long: between such sizes time stands still."""
    logs = (links_dir / "nccl_logs").glob("*cluster01_*-node*")
    points = [point for path in logs for point in read(path).points]
    sizes = np.unique([point.sizes["bytes"] for point in points if point.label == "all_reduce"])
    device, missed = gpu("h100-sxm-80gb"), {}
    bare = datasheet_profile(device)
    for fold in range(5):
        held = [p for p in points if np.argmin(np.abs(sizes - p.sizes["bytes"])) % 5 == fold]
        kept = [point for point in points if point not in held]
        profile = replace(bare, collectives=tuple(fit_collectives(kept, next(iter(bare.sources)))))
        for nodes in (1, 10):
            prices = prices_of(profile, ClusterSpec(gpu=device, nodes=nodes, gpus_per_node=8), "bf16")
            for p in (p for p in held if p.sizes["nodes"] == nodes):
                work = Collective(p.label, *(np.array(p.sizes[name]) for name in ("bytes", "ranks", "nodes")))
                off = abs(float(prices.of(work).seconds) / p.seconds - 1.0)
                missed.setdefault((p.label, int(p.sizes["ranks"]), nodes), []).append(off)
    mean = {shape: float(np.mean(off)) for shape, off in missed.items()}
    assert len(mean) == 20
    assert max(mean.values()) < 0.10, mean
