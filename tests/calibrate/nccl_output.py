"""What nccl-tests and mpiGraph print, made up of figures that are known."""

from __future__ import annotations

import json

HEADER = """\
# nccl-tests version 2.17.6 nccl-headers=22803 nccl-library=22803
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{ranks}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501
FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 41.1\n#\n"


def rank_lines(hosts: list[str], name: str = "NVIDIA H100 80GB HBM3", group: int = 0, first: int = 0) -> str:
    return "\n".join(
        f"#  Rank {first + at:2d} Group {group:2d} Pid  {4000 + at} on {host} device {at % 8:2d} "
        f"[0x{at:02x}] {name}"
        for at, host in enumerate(hosts)
    )


def nccl_row(size: float, us: float, factor: float, wrong: str = "0") -> str:
    algbw = size / us * 1e-3
    side = f"{us:9.2f} {algbw:7.2f} {algbw * factor:7.2f} {wrong:>6}"
    return f"{int(size):12d} {int(size) // 4:12d}     float     sum      -1 {side} {side}"


def table(rows: list[str], hosts: list[str] | None = None) -> str:
    return HEADER.format(ranks=rank_lines(hosts or ["node-1"] * 8)) + "\n".join(rows) + "\n" + FOOTER


def sweep(factor: float = 1.75, latency_us: float = 20.0, gb_per_s: float = 350.0) -> list[str]:
    """A collective of known latency and bus bandwidth."""
    sizes = [float(1 << power) for power in range(10, 31)]
    return [nccl_row(size, latency_us + factor * size / gb_per_s * 1e-3, factor) for size in sizes]


def nccl_json(**changes):
    entry = {
        "size": 1 << 20, "count": 1 << 18, "type": "bfloat16", "redop": "none", "root": "-1",
        "out_of_place": {"time": 40.0, "alg_bw": 26.2144, "bus_bw": 22.9376, "nwrong": "0"},
        "in_place": {"time": 41.0, "alg_bw": 25.5, "bus_bw": 22.4, "nwrong": "0"},
    }  # fmt: skip
    whole = {
        "version": 1, "start_time": "2026-11-20T10:00:00Z", "args": ["./build/all_gather_perf", "-b", "8"],
        "nccl_version": 22803,
        "devices": [{"rank": at, "group": 0, "hostname": "a", "device": at, "device_info": "NVIDIA H200"}
                    for at in range(8)],
        "results": [entry],
    }  # fmt: skip
    whole.update(changes)
    return json.dumps(whole)


MATRIX = """\
START mpiGraph v1.4
MsgSize\t1048576
Times\t100
Window\t10
Procs\t3

Send\tn1:0\tn2:1\tn3:2
n1:0 to\t0.000\t19204.9\t18990.1
n2:1 to\t19310.4\t0.000\t12000.0
n3:2 to\t19100.0\t19050.5\t0.000

Recv\tn1:0\tn2:1\tn3:2
n1:0 from\t0.000\t19204.9\t18990.1
n2:1 from\t19310.4\t0.000\t12000.0
n3:2 from\t19100.0\t19050.5\t0.000

END mpiGraph
"""
