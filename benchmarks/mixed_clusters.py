"""Published runs on mixed clusters: predicted with the GPUs that they had, and as if all were of one kind.

    python benchmarks/mixed_clusters.py FOLDER

FOLDER holds `amp_time_failures.csv` (AMP, NeurIPS 2022: GPT-2 345M on three nodes of V100 and one of T4) and
`sailor_hetero.csv` (Sailor, SOSP 2025: OPT-350M on RTX 2080, RTX 3090 and Titan RTX). Printed are Spearman's
correlation with the measured times and which of the runs that failed are predicted not to fit.

What is read into the rows: AMP partitions 30 pieces, two before the 24 layers and four behind. The T4 stand
first, since where the partition is not that of its runs on equal GPUs, the first stage has fewer layers. A
stage that lies on both kinds is counted as all of the slower one, which its data-parallel ranks wait for.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.calibrate.validate import spearman
from mist_megatron.cost.predict import Prediction, job_of, predict
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec, Figure, GpuSpec, LinkOverrides, NodeGroup
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

Row = dict[str, str]
BEFORE = 2
"""Pieces of AMP's partition before the first layer."""


@dataclass(frozen=True)
class Run:
    """One row: its plan, and what came of it."""

    plan: Plan
    measured_s: float | None


def as_gpu(base: str, name: str, *, fp16: float, gib: float, gb_per_s: float) -> GpuSpec:
    """A GPU like another one, with these figures of its own datasheet."""
    source = f"datasheet of {name}"
    return replace(
        gpu(base),
        name=name,
        bf16_flops_per_s=None,
        fp16_flops_per_s=Figure(value=fp16 * 1e12, source=source),
        memory_bytes=Figure(value=gib * 2.0**30, source=source),
        memory_bytes_per_s=Figure(value=gb_per_s * 1e9, source=source),
    )


SAILOR_GPUS = {
    "RTX-3090": gpu("rtx3090-24gb"),
    # Turing whitepaper: fp16 tensor cores with 32-bit accumulation.
    "RTX-2080": as_gpu("rtx3090-24gb", "rtx2080-8gb", fp16=40.3, gib=8.0, gb_per_s=448.0),
    "Titan-RTX": as_gpu("rtx3090-24gb", "titan-rtx-24gb", fp16=130.5, gib=24.0, gb_per_s=672.0),
}


def cluster_of(kinds: Sequence[GpuSpec], per_node: int, links: LinkOverrides) -> ClusterSpec:
    """Nodes of these GPUs, in this order; neighbours that are alike are a group."""
    groups: list[NodeGroup] = []
    for kind in kinds:
        if groups and groups[-1].gpu == kind:
            groups[-1] = replace(groups[-1], nodes=groups[-1].nodes + 1)
        else:
            groups.append(NodeGroup(gpu=kind, nodes=1))
    cluster = ClusterSpec(gpu=kinds[0], nodes=len(kinds), gpus_per_node=per_node, links=links)
    return replace(cluster, groups=tuple(groups)) if len(groups) > 1 else cluster


def slowest_by_stage(kinds: Sequence[GpuSpec], stages: int) -> list[GpuSpec]:
    """Nodes as fast as the slowest of those that share a stage with them."""
    each = max(len(kinds) // stages, 1)
    slow = [
        min(kinds[start : start + each], key=lambda kind: kind.fp16_flops_per_s.value)
        for start in range(0, len(kinds), each)
    ]
    return [kind for kind in slow for _ in range(each)]


def amp_runs(rows: Sequence[Row], kinds: Sequence[GpuSpec], links: LinkOverrides) -> Iterator[Run]:
    """AMP's rows of GPT-2 on 16 GPUs, with nodes of these kinds."""
    for row in rows:
        pp, dp, tp, micro = (int(row[name]) for name in ("pp", "dp", "tp", "mbs"))
        ends = [min(max(int(end) - BEFORE, 0), 24) for end in row["stage_partition"].split()]
        layers = [end - start for start, end in pairwise(ends)]
        while 0 in layers:  # embedding or head alone; a plan's stages have a layer each
            layers[layers.index(0)] = 1
            layers[layers.index(max(layers))] -= 1
        gpus = 16 // pp
        stage = StagePlan(
            layers=1,
            nodes=max(gpus // 4, 1),
            gpus_per_node=min(gpus, 4),
            dp=dp,
            tp=tp,
            micro_batch=micro,
            zero=0,
        )
        yield Run(
            plan=Plan(
                model=ModelSpec(
                    name="gpt2-345m", family="gpt", layers=24, hidden=1024, ffn_hidden=4096, heads=16,
                    kv_heads=16, head_dim=64, vocab=int(row["vocab"]), gated_mlp=False, activation="gelu",
                    norm="layernorm", parallel_block=False, linear_bias=True, rotary=False,
                    learned_positions=int(row["seq"]), tied_embeddings=True,
                ),
                training=TrainingSpec(
                    global_batch=int(row["gbs"]), seq_len=int(row["seq"]), precision="fp16",
                    flash_attention=False, dropout=0.1,
                ),
                cluster=cluster_of(slowest_by_stage(kinds, pp), 4, links),
                target="deepspeed",
                grad_accum=int(row["gbs"]) // (dp * micro),
                stages=tuple(replace(stage, layers=count) for count in layers),
            ),
            measured_s=float(row["measured_s"]) if row["measured_s"] else None,
        )  # fmt: skip


def sailor_runs(rows: Sequence[Row], *, alike: bool) -> Iterator[Run]:
    """Sailor's mixed rows; `alike` takes all GPUs for RTX 3090."""
    for row in rows:
        stages = [part.split("+") for part in row["stage_gpu_types"].split(" | ")]
        per_node = int(stages[0][0].rsplit("x", 1)[1])
        kinds = [
            min((SAILOR_GPUS[one.rsplit("x", 1)[0]] for one in nodes), key=lambda g: g.fp16_flops_per_s.value)
            for nodes in stages
            for _ in nodes
        ]
        layers = [int(count) for count in row["layers_per_stage"].split()]
        # Embedding and head are counted as a layer each.
        layers[-1] -= sum(layers) - 24
        dp, tp = int(row["dp"]), int(row["tp"])
        stage = StagePlan(
            layers=1, nodes=len(stages[0]), gpus_per_node=per_node, dp=dp, tp=tp,
            micro_batch=int(row["mbs"]), zero=0,
        )  # fmt: skip
        yield Run(
            plan=Plan(
                model=ModelSpec(
                    name="opt-350m", family="gpt", layers=24, hidden=1024, ffn_hidden=4096, heads=16,
                    kv_heads=16, head_dim=64, vocab=int(row["vocab"]), gated_mlp=False, activation="gelu",
                    norm="layernorm", parallel_block=False, linear_bias=True, rotary=False,
                    learned_positions=int(row["seq"]), tied_embeddings=True,
                ),
                training=TrainingSpec(
                    global_batch=int(row["gbs"]), seq_len=int(row["seq"]), precision="fp16",
                    flash_attention=False, dropout=0.1,
                ),
                cluster=cluster_of(
                    [SAILOR_GPUS["RTX-3090"]] * len(kinds) if alike else kinds, per_node, LinkOverrides()
                ),
                target="deepspeed",
                grad_accum=int(row["gbs"]) // (dp * int(row["mbs"])),
                stages=tuple(replace(stage, layers=count) for count in layers),
            ),
            measured_s=float(row["measured_s"]),
        )  # fmt: skip


def priced(runs: Iterator[Run]) -> list[tuple[Run, Prediction]]:
    """Each run with its prediction."""
    return [(run, predict(run.plan, evaluator_for(job_of(run.plan))[0])) for run in runs]


def told(name: str, found: Sequence[tuple[Run, Prediction]]) -> str:
    """One line of figures."""
    timed = [(run.measured_s, cost.iteration_s) for run, cost in found if run.measured_s is not None]
    measured, predicted = np.array(timed).T
    failed = [cost for run, cost in found if run.measured_s is None]
    over = sum(not cost.fits for cost in failed)
    wrong = sum(not cost.fits for run, cost in found if run.measured_s is not None)
    rank = spearman(predicted, measured)
    error = float(np.mean(np.abs(predicted / measured - 1.0)))
    return (
        f"{name:<34} {len(timed):>4} {rank if rank is not None else float('nan'):>9.3f} {error:>7.0%} "
        f"{over:>6} of {len(failed):<3} {wrong:>4} of {len(timed)}"
    )


def main() -> None:
    """Prints a line of each table and assumption."""
    folder = Path(sys.argv[1])
    amp = list(csv.DictReader((folder / "amp_time_failures.csv").open(encoding="utf-8")))
    sailor = list(csv.DictReader((folder / "sailor_hetero.csv").open(encoding="utf-8")))
    v100, t4 = gpu("v100-sxm-16gb"), gpu("t4-16gb")
    slow = LinkOverrides(inter_bytes_per_s=10e9 / 8)
    mixed = [row for row in amp if row["setting"] == "het_cluster"]
    even = [row for row in amp if row["setting"] == "homogeneous"]
    own = [row for row in sailor if "+" in row["gpu_types"]]
    lines: list[tuple[str, Callable[[], Iterator[Run]]]] = [
        ("AMP, 16 T4", lambda: amp_runs(even, [t4] * 4, LinkOverrides(inter_bytes_per_s=50e9 / 8))),
        ("AMP, mixed: T4 first", lambda: amp_runs(mixed, [t4, v100, v100, v100], slow)),
        ("AMP, mixed: T4 last", lambda: amp_runs(mixed, [v100, v100, v100, t4], slow)),
        ("AMP, mixed: as if all V100", lambda: amp_runs(mixed, [v100] * 4, slow)),
        ("AMP, mixed: as if all T4", lambda: amp_runs(mixed, [t4] * 4, slow)),
        ("Sailor, mixed", lambda: sailor_runs(own, alike=False)),
        ("Sailor, as if all RTX 3090", lambda: sailor_runs(own, alike=True)),
    ]
    print(f"{'runs':<34} {'rows':>4} {'Spearman':>9} {'error':>7} {'failed, over':>12} {'ran, over':>10}")
    for name, runs in lines:
        print(told(name, priced(runs())))


if __name__ == "__main__":
    main()
