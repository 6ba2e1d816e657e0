"""How far the published latency formulas are from the events on random jobs with unequal links.

    python benchmarks/latency_formulas.py [--jobs 200] [--seed 1]

Megatron's 1F1B on nodes of 8 GPUs, a stage on one node or on two, so that sends and reductions both cross
nodes; the rates of pairs are log-normal around the GPU's usual network, from nearly equal (standard deviation
0.1) to as unequal as in published clusters (1.0). Layers are split evenly, as the formulas' authors do; every
second job has uneven stages. Printed are the mean, the median and the 95th centile of the distance from the
events, and the mean signed.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mist_megatron.ask.latency import Latencies, latencies
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec

FORMULAS = {
    "pipette_s": "Pipette, eq. 3 to 6",
    "amp_s": "AMP",
    "eq1_s": "Mist, eq. 1",
    "closed_form_s": "`predict`",
}
GPUS = ("a100-sxm-80gb", "h100-sxm-80gb")
MODELS = ("gpt3-2.7b", "llama2-7b", "gpt3-13b")
SPREADS = (0.1, 0.4, 0.7, 1.0)
A_NODE = 8


def random_matrix(rng: random.Random, nodes: int, usual_bytes_per_s: float) -> LinkMatrix:
    """The same both ways, all GPUs of a node sending at once."""
    spread = rng.choice(SPREADS)
    rates = {
        (a, b): usual_bytes_per_s * math.exp(rng.gauss(0.0, spread))
        for a in range(nodes)
        for b in range(a + 1, nodes)
    }
    rows = tuple(
        tuple(None if a == b else rates[min(a, b), max(a, b)] for b in range(nodes)) for a in range(nodes)
    )
    hosts = tuple(f"n{node}" for node in range(nodes))
    return LinkMatrix(hosts=hosts, bytes_per_s=rows, gpus_at_once=A_NODE, source="random")


def random_job(rng: random.Random) -> Plan:
    """Stages of equal grids on nodes in the order of their names."""
    model, gpu = PRESETS[rng.choice(MODELS)], CATALOGUE[rng.choice(GPUS)]
    stages = rng.choice([count for count in (2, 4, 8) if model.layers % count == 0])
    a_stage, tp, micro_batch = rng.choice((1, 2)), rng.choice((1, 2, 4, 8)), rng.choice((1, 2))
    nodes, dp = stages * a_stage, a_stage * A_NODE // tp
    grad_accum = stages * rng.choice((1, 2, 4))
    layers = [model.layers // stages] * stages
    for _ in range(stages * rng.randint(0, 1)):
        taken, given = rng.sample(range(stages), 2)
        if layers[taken] > 1:
            layers[taken] -= 1
            layers[given] += 1
    usual = gpu.inter_bytes_per_s.value / A_NODE
    cluster = ClusterSpec(gpu=gpu, nodes=nodes, gpus_per_node=A_NODE)
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=micro_batch * dp * grad_accum, seq_len=2048),
        cluster=replace(cluster, links=LinkOverrides(matrix=random_matrix(rng, nodes, usual))),
        target="megatron",
        grad_accum=grad_accum,
        stages=tuple(
            StagePlan(
                layers=count, nodes=a_stage, gpus_per_node=A_NODE, dp=dp, tp=tp, zero=1,
                micro_batch=micro_batch,
            )
            for count in layers
        ),
    )  # fmt: skip


def compared(jobs: int, seed: int) -> Iterator[Latencies]:
    """So many random jobs by all formulas."""
    rng = random.Random(seed)
    for _ in range(jobs):
        yield latencies(random_job(rng))


def errors(told: list[Latencies], formula: str) -> np.ndarray:
    """Of a formula on each job, against the events."""
    return np.array([getattr(one, formula) / one.events_s - 1.0 for one in told])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    told = list(compared(given.jobs, given.seed))
    print(
        f"| of {given.jobs} jobs | mean error | median | 95th centile | signed mean |\n|---|---|---|---|---|"
    )
    for formula, words in FORMULAS.items():
        off = errors(told, formula)
        far = np.abs(off)
        figures = (far.mean(), np.median(far), np.quantile(far, 0.95))
        print(f"| {words} | {' | '.join(f'{one:.1%}' for one in figures)} | {off.mean():+.1%} |")


if __name__ == "__main__":
    main()
