"""Galvatron-BMW's published tables against what our spaces of strategies per layer predict.

    python benchmarks/galvatron_bmw.py table1        # activations of the layers that models of 48 have more
    python benchmarks/galvatron_bmw.py table2        # 8 RTX TITAN: what is out of memory, and the order
    python benchmarks/galvatron_bmw.py table5        # 16 A100-40: layers of each stage
    python benchmarks/galvatron_bmw.py table6        # 32 A100-80: GPT-3 of 15, 39 and 65 billion parameters
    python benchmarks/galvatron_bmw.py figure6       # strategies of four plans
    python benchmarks/galvatron_bmw.py artifact FILE # predictions of its public code, as a table: our prices
    python benchmarks/galvatron_bmw.py counted FILE  # the same from its own inputs and constants

Every cell that is missed is printed. How the paper trained is in galvatron_runs.py.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from galvatron_runs import (
    GIB,
    GPIPE_MICRO_BATCHES,
    TITAN,
    as_in_32_bits,
    cluster,
    evaluator_of,
    priced,
    with_fairscale,
)  # fmt: skip

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.calibrate.validate import spearman
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import Prediction, job_of, predict
from mist_megatron.formats.files import load_model
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.search.balance import Candidate, candidates, eq1_s, even, pipelines
from mist_megatron.search.galvatron import best_of_each
from mist_megatron.search.layer_rules import LayerRules, PerLayer
from mist_megatron.search.layerwise import LayerChoices, StageProblem, point_of
from mist_megatron.search.search import Settings, Watch
from mist_megatron.search.solution import Solution
from mist_megatron.search.space import Limits
from mist_megatron.search.strategy_prices import StrategyPrices
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import LinkOverrides, cluster_of
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.schedule import ONE_F_ONE_B, in_flight
from mist_megatron.spec.strategies import LayerRun
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.torch import MEMORY, TORCH

TABLE_2 = Path(__file__).with_name("results") / "galvatron_bmw_table2.csv"
FULL = Settings(per_layer=PerLayer(most=None))
AT_ONCE = replace(FULL, limits=Limits(fixed={"grad_accum": 1}))
"""DDP, FSDP and Megatron's tensor parallelism take a batch at once."""
EIGHT_AT_MOST = replace(FULL, limits=Limits(most={"grad_accum": 8}))
"""Micro-batches of a pipeline: max_chunk of search_engine.py in hetu-galvatron 1.0.0; figure 4 has 8."""
BI_OBJECTIVE = LayerRules(balanced=True)
"""Galvatron (1F1B+Bi-obj): layers move between stages, none is recomputed."""
TABLE_1 = {
    "bert-huge": (3149.39, 4657.51),
    "vit-huge": (646.5, 968.59),
    "t5-large": (4119.66, 6107.75),
    "t5-512/4": (1777.06, 2473.10),
    "swin-huge": (726.59, 1016.8),
}
"""MB of activations a sample with 32 and with 48 layers, in 32 bits."""
TABLE_5 = (
    ("bert-huge-32", 8, 96, (14, 18)),
    ("bert-huge-48", 8, 64, (7, 9, 13, 19)),
    ("t5-512/4-32", 8, 128, (8, 24)),
    ("t5-512/4-48", 8, 48, (12, 36)),
    ("bert-huge-32", 16, 192, (16, 16)),
    ("bert-huge-48", 16, 144, (22, 26)),
    ("t5-512/4-32", 16, 192, (11, 21)),
    ("t5-512/4-48", 16, 192, (11, 37)),
)
"""Model, GB, batch and layers of each stage."""
TABLE_6 = {
    "gpt3-15b": {
        "sdp": (45.88, 128), "tp": (12.31, 24), "pp": (26.56, 128), "3d": (37.65, 128),
        "": (50.79, 128), "base": (57.33, 512), "bmw": (61.42, 2560),
    },
    "gpt3-39b": {
        "sdp": (14.31, 96), "tp": (5.56, 20), "pp": (12.38, 64), "3d": (13.79, 48),
        "": (14.93, 96), "base": (21.14, 160), "bmw": (22.86, 2048),
    },
    "gpt3-65b": {
        "sdp": (3.40, 32), "tp": (2.02, 2), "pp": (4.62, 24), "3d": (4.91, 16),
        "": (5.14, 16), "base": (13.97, 288), "bmw": (13.97, 288),
    },
}  # fmt: skip
"""Samples per second, and the batch at which."""
FIGURE_6 = (
    ("A", "bert-huge-32", "rtx-titan-24gb", 8, 184),
    ("B", "swin-huge-32", "rtx-titan-24gb", 8, 360),
    ("C, slow links", "t5-512/4-32", "rtx-titan-24gb", 16, 256),
    ("C, fast links", "t5-512/4-32", "a100-sxm-40gb", 16, 416),
)
"""Case, model, GPU, how many, batch; 8 GB each."""


def best(evaluator: StageEvaluator, space: str, settings: Settings = FULL) -> Solution | None:
    """The best of a space; None where nothing fits."""
    return best_of_each(evaluator, [space], settings, Watch()).get(space)


def gpipe(evaluator: StageEvaluator, micro_batches: Sequence[int]) -> Prediction | None:
    """PyTorch's GPipe: as many stages as GPUs, all micro-batches in flight, at the number of them that is
    fastest among these."""
    job, found = evaluator.job, []
    for grad_accum in micro_batches:
        stages = tuple(
            StagePlan(
                layers=count, nodes=1, gpus_per_node=1, dp=1, tp=1, zero=0, ckpt=0,
                micro_batch=job.training.global_batch // grad_accum,
                strategies=(LayerRun(count=count, strategy="serial"),),
            )
            for count in even(job.model.layers, job.cluster.gpus)
        )  # fmt: skip
        plan = Plan(
            model=job.model, training=job.training, cluster=job.cluster, target="torch",
            grad_accum=grad_accum, stages=stages, schedule="gpipe",
        )  # fmt: skip
        found.append(predict(plan, priced(job_of(plan))))
    return min((one for one in found if one.fits), key=lambda one: one.iteration_s, default=None)


def seconds(evaluator: StageEvaluator, strategy: str) -> float | None:
    """Of a pure strategy; None where it does not fit."""
    if strategy == "pp":
        batch = evaluator.job.training.global_batch
        tuned = [count for count in range(1, batch + 1) if batch % count == 0]
        on_titans = evaluator.job.cluster.gpu.name == TITAN
        prediction = gpipe(evaluator, [GPIPE_MICRO_BATCHES] if on_titans else tuned)
        return None if prediction is None else prediction.iteration_s
    solution = best(evaluator, f"galvatron-{strategy}", AT_ONCE)
    return None if solution is None else solution.value_s


def in_order(columns: Iterable[float]) -> int:
    """How many of these correlations are 0.8 or above: two neighbours of four in the other order are 0.8,
    less what sums lose."""
    return sum(value > 0.8 - 1e-9 for value in columns)


def layers_mib(model: str) -> float:
    """What all layers keep of a sample on one GPU, in 32 bits counted by halves."""
    evaluator = evaluator_of(model, cluster("a100-sxm-40gb", 1, None), 1)
    kinds = evaluator.job.model.kind_of_layer
    prices = StrategyPrices(evaluator, 1, 1)
    each = [prices.choices(0, kind, False, False, None) for kind in range(max(kinds) + 1)]
    return 2.0 * sum(float(each[kind].saved_bytes[0, 0]) for kind in kinds) / 2**20


def table1() -> None:
    """The layers that models of 48 have more than those of 32: embedding and head cancel. Those of T5-512/4
    are no stack of equal layers: 16 more keep less than their 8 encoder layers do, which are T5-Large's."""
    for model, (less, more) in TABLE_1.items():
        ours = layers_mib(f"{model}-48") - layers_mib(f"{model}-32")
        told = f"paper {more - less:.2f} MB, ours {ours:.2f} MiB, {ours / (more - less) - 1.0:+.2%}"
        print(f"{model}, 16 layers more: {told}")


def table2() -> None:
    """Which of 128 cells are out of memory, and the order of those that are not."""
    with TABLE_2.open() as file:
        rows = list(csv.DictReader(file))
    right, columns = 0, defaultdict(list)
    for row in rows:
        budget, strategy, model = int(row["budget_gib"]), row["space"], row["model"]
        fits = seconds(evaluator_of(model, cluster("rtx-titan-24gb", 8, budget), 8), strategy) is not None
        right += fits == bool(row["batch"])
        if fits != bool(row["batch"]):
            ours = "fits" if fits else "out of memory"
            print(f"missed: {model}, {budget} GB, {strategy}: {row['batch'] or 'OOM'}, ours {ours}")
        if row["batch"]:
            roomy = evaluator_of(model, cluster("rtx-titan-24gb", 8, 400), int(row["batch"]))
            took_s = seconds(roomy, strategy)
            if took_s is not None:
                rates = float(row["samples_per_s"]), int(row["batch"]) / took_s
                columns[model, budget].append((strategy, *rates))
    print(f"out of memory or not: {right} of {len(rows)}")
    order = {}
    for (model, budget), cells in columns.items():
        if len(cells) > 2:
            order[model, budget] = spearman([one for _, one, _ in cells], [ours for _, _, ours in cells])
            told = ", ".join(f"{name} {one:.1f}/{ours:.1f}" for name, one, ours in cells)
            print(f"{model}, {budget} GB: Spearman {order[model, budget]:.2f} (paper/ours: {told})")
    mean = sum(order.values()) / len(order)
    print(f"{in_order(order.values())} of {len(order)} columns at 0.8 or above, mean {mean:.2f}")


def balanced_split(evaluator: StageEvaluator, stages: int) -> Candidate | None:
    """The fastest by eq. 1, layers balanced between so many stages and none recomputed."""

    def prices(count: int, grad_accum: int) -> StrategyPrices:
        return StrategyPrices(evaluator, count, grad_accum)

    lists = pipelines(evaluator, BI_OBJECTIVE, lambda key, size: key != "pp" or size == stages, prices)
    found = [one for _, one in candidates(lists, BI_OBJECTIVE, solve_exactly=False)]
    return min(found, key=lambda one: one.value_s, default=None)


def table5() -> None:
    """Layers of each stage, with as many stages as the paper's plan has and at its batch."""
    for model, budget, batch, split in TABLE_5:
        evaluator = evaluator_of(model, cluster("a100-sxm-40gb", 16, budget), batch)
        ours = balanced_split(evaluator, len(split))
        told = "nothing fits" if ours is None else f"{list(ours.split)}, {batch / ours.value_s:.1f} a second"
        print(f"{model}, {budget} GB, batch {batch}: paper {list(split)}, ours {told}", flush=True)


def large_job(model: str, batch: int, gib: int) -> StageEvaluator:
    """On 32 A100-80 with 400 Gb/s between nodes. FairScale's FSDP reduces gradients in 16 bits."""
    network = LinkOverrides(inter_bytes_per_s=50e9)
    on = replace(cluster_of(gpu("a100-sxm-80gb"), 32), links=network, memory_limit_bytes=gib * GIB)
    job = evaluator_of(model, on, batch, seq_len=1024).job
    return evaluator_for(replace(job, execution=Execution(grad_bytes=2)))[0]


def table6(*models: str) -> None:
    """Samples per second of each space at the paper's batch, against those of sharded data; where that batch
    does not fit 80 GB, on GPUs with more (three samples of GPT3-39B are 88 GB by half of its own Table I)."""
    for model, rows in ((name, TABLE_6[name]) for name in models or TABLE_6):
        ours: dict[str, float] = {}
        for name, (rate, batch) in rows.items():
            told, took_s = "", large_seconds(model, name, batch, 80)
            if took_s is None:
                told, took_s = " (does not fit)", large_seconds(model, name, batch, 400)
            ours[name] = 0.0 if took_s is None else batch / took_s
            share, own = rate / rows["sdp"][0], ours[name] / ours.get("sdp", np.inf)
            print(f"{model}, {name or 'galvatron'}, {batch}: paper {rate}, ours {ours[name]:.2f}{told}; "
                  f"of sharded data {share:.2f}, {own:.2f}", flush=True)  # fmt: skip
        both = [(rate, ours[name]) for name, (rate, _) in rows.items()]
        print(f"{model}: Spearman {spearman(*map(list, zip(*both, strict=True))):.2f}", flush=True)


def large_seconds(model: str, name: str, batch: int, gib: int) -> float | None:
    """Of one of its rows."""
    evaluator = large_job(model, batch, gib)
    if name in ("tp", "pp", "sdp"):
        return seconds(evaluator, name)
    solution = best(evaluator, f"galvatron-{name}".removesuffix("-"), Settings())
    return None if solution is None else solution.value_s


def directions(case: str, stages: Sequence[Sequence[LayerRun]]) -> dict[str, bool]:
    """What the paper says of a case, and whether it holds of these stages."""
    layers = [run.strategy for runs in stages for run in runs for _ in range(run.count)]
    split = ["tp" in strategy for strategy in layers]
    early, late = split[: len(split) // 2], split[len(split) // 2 :]
    if case == "A":
        words = {"stages": len(stages) > 1, "recomputation": any("ckpt" in one for one in layers)}
        return {**words, "sharded data": any("sdp" in one for one in layers)}
    if case == "C, fast links":
        return {"no tensor parallelism": not any(split)}
    return {"no tensor parallelism early": not any(early), "some late": any(late)}


def figure6() -> None:
    """Strategies of the plans drawn there, at their batches, and which directions hold."""
    for case, model, name, gpus, batch in FIGURE_6:
        solution = best(evaluator_of(model, cluster(name, gpus, 8), batch), "galvatron-bmw", EIGHT_AT_MOST)
        print(f"{case}: {model}, {gpus} x {name}, batch {batch}")
        for runs in solution.strategies if solution else ():
            print("   ", ", ".join(f"{run.count} x {run.strategy}" for run in runs), flush=True)
        for words, holds in directions(case, solution.strategies if solution else ()).items():
            print(f"    {words}: {'holds' if holds else 'missed'}", flush=True)


def artifact(path: str) -> None:
    """Its public code's predictions for LLaMA-2 7B on A100s (those without Ulysses) against ours, with its
    bandwidths (154 GB/s inside a node, 45 between nodes) and 16 bytes per parameter. It gathers weights once
    per micro-batch and reduces gradients once a step, as ZeRO 1 does, and its bandwidths between nodes are
    those of one group alone; its memory has profiled embeddings and activations, which ours does not."""
    object.__setattr__(TORCH, "memory", lambda execution: replace(MEMORY, optimizer_bytes=10))
    with Path(path).open() as file:
        rows = [row for row in csv.DictReader(file) if row["ulysses_sp"] == "1"]
    links, pairs = LinkOverrides(intra_bytes_per_s=154e9, inter_bytes_per_s=45e9), defaultdict(list)
    for row in rows:
        gpus, batch, grad_accum, pp, tp, dp = (
            int(row[key]) for key in ("num_gpus", "global_batch", "microbatches", "pp", "tp", "dp")
        )
        stage = StagePlan(
            layers=32 // pp, nodes=max(1, gpus // pp // 8), gpus_per_node=min(gpus // pp, 8), dp=dp, tp=tp,
            micro_batch=batch // grad_accum // dp, zero={"zero2": 1, "zero3": 3, "ddp": 0}[row["dp_type"]],
            ckpt=32 // pp * int(row["ckpt"]),
        )  # fmt: skip
        plan = Plan(
            model=load_model("llama2-7b"), training=TrainingSpec(global_batch=batch, seq_len=2048),
            cluster=replace(cluster_of(gpu("a100-sxm-80gb"), gpus), links=links), target="torch",
            grad_accum=grad_accum, stages=(stage,) * pp, sequence_parallel=tp > 1,
        )  # fmt: skip
        ours = predict(plan, evaluator_for(job_of(plan))[0])
        peak = max(one.peak_memory_bytes for one in ours.stages) / 2.0**20
        told = float(row["iteration_time_s"]), ours.iteration_s, float(row["peak_MiB"]), peak
        pairs["all"].append(told)
        pairs[f"{gpus} GPUs, batch {batch}"].append(told)
    for name, cells in pairs.items():
        theirs_s, ours_s, theirs_mib, ours_mib = (list(column) for column in zip(*cells, strict=True))
        time, memory = spearman(theirs_s, ours_s), spearman(theirs_mib, ours_mib)
        print(f"{name}: {len(cells)} rows, Spearman of time {time:.3f}, of memory {memory:.3f}")


PARAMETERS_MIB = 2 * 389.111816
"""Of a layer of LLaMA-2 7B in 32 bits: `grad_sync_MiB` of two replicas is of 16."""
EDGES_MIB = 2 * 32000 * 4096 * 4 / 2**20
"""Of embedding and output layer."""
SAVED_MIB = {1: 515.0, 2: 273.0, 4: 137.0, 8: 68.0}
"""A layer's profiled activations of a sample, by ranks that split it (tensor parallelism or Ulysses) ..."""
INPUT_MIB = 32.0
"""... and where it is recomputed."""
CONTEXT_MIB = 1024.0
SLOWDOWN = 1.1256
"""Its overlap coefficient, of compute and of collectives."""


def state_share(row: Mapping[str, str]) -> float:
    """Of 16 bytes per parameter, what a rank holds: its constants for mixed precision."""
    ranks, once = int(row["dp"]) * int(row["ulysses_sp"]), row["microbatches"] == "1"
    part = 1.0 / ranks + 0.003
    shared = {"zero2": 7 / 8 if once else 6 / 8, "zero3": 1.0 if once else 7 / 8, "ddp": 0.0}[row["dp_type"]]
    return shared * part + 1.0 - shared


def counted_row(row: Mapping[str, str], edge_mib: tuple[float, float]) -> tuple[float, float]:
    """Seconds, and MiB of the fullest stage, from its inputs: layers by `overlapped_time` and `point_of`,
    stages by `eq1_s`. `edge_mib` is what embedding and head take besides their states, per sample in flight
    and at all."""
    number = {name: float(row[name]) for name in INPUTS}
    pp, grad_accum, tp = (int(row[key]) for key in ("pp", "microbatches", "tp"))
    ranks = tp * int(row["ulysses_sp"])
    samples = int(row["global_batch"]) / grad_accum / int(row["dp"])
    factors = np.ones((16, 4))
    factors[0b0011] = [SLOWDOWN, SLOWDOWN, 1.0, 1.0]
    message_ms = number["grad_sync_MiB"] * number["grad_sync_coe_ms_per_MiB"]
    back_ms = float(
        overlapped_time(tuple(np.asarray(x) for x in (number["layer_bwd_ms"], message_ms, 0.0, 0.0)), factors)
    )
    t_s = 1e-3 * (
        number["layer_fwd_ms"]
        + number["layer_bwd_ms"]
        + number["zero3_gather_ms"]
        + number["tp_comm_ms"]
        + number["p2p_ms"]
    )
    d_s = 1e-3 * (back_ms - number["layer_bwd_ms"])
    states, kept = (
        4.0 * PARAMETERS_MIB / tp * state_share(row),
        samples * (INPUT_MIB / ranks if row["ckpt"] == "1" else SAVED_MIB[ranks]),
    )
    edge_states = 4.0 * EDGES_MIB / (1 if pp == 1 else 2) / tp * state_share(row) + CONTEXT_MIB + edge_mib[1]
    points = []
    for position in range(pp):
        held = in_flight(ONE_F_ONE_B, position, pp, grad_accum, 1, None)

        def choice(t_s: float, d_s: float, states: float, kept: float, held: float = held) -> LayerChoices:
            cells = (t_s, d_s, states + (held - 1) * kept, kept, 0.0)
            return LayerChoices(*(np.full((1, 1), value) for value in cells))

        layers = [choice(t_s, d_s, states, kept)] * (32 // pp)
        begin = choice(number["embed_nosync_s_first"], 0.0, edge_states, samples * edge_mib[0])
        end = choice(
            number["embed_nosync_s_last"] * (pp > 1),
            0.0,
            edge_states * (pp > 1),
            samples * edge_mib[0] * (pp > 1),
        )
        layers = [begin] * (position == 0) + layers + [end] * (position == pp - 1)
        none = np.zeros((1, 1))
        problem = StageProblem(tuple(layers), (none,) * (len(layers) - 1), none, none, np.inf, 1.0)
        points.append(point_of(problem, ((0, 0),) * len(layers)))
    return eq1_s(points, grad_accum), max(point.peak_bytes for point in points)


INPUTS = (
    "layer_fwd_ms", "layer_bwd_ms", "grad_sync_MiB", "grad_sync_coe_ms_per_MiB", "zero3_gather_ms",
    "tp_comm_ms", "p2p_ms", "embed_nosync_s_first", "embed_nosync_s_last",
)  # fmt: skip


def counted(path: str) -> None:
    """All its predictions from its own inputs: whether our layer-wise sums count the terms that it counts.
    What it profiled of embedding and head is not published: two numbers for each way to lay out a stage are
    read off every second row's memory, and held against the others."""
    with Path(path).open() as file:
        rows = list(csv.DictReader(file))
    layouts = defaultdict(list)
    for place, row in enumerate(rows):
        layouts[row["pp"], row["tp"], row["ulysses_sp"]].append((place, row))
    theirs, ours, memory = [], [], []
    for _, alike in sorted(layouts.items()):
        read = alike[::2]
        bare = [float(row["peak_MiB"]) - counted_row(row, (0.0, 0.0))[1] for _, row in read]
        slopes = np.array(
            [
                [
                    counted_row(row, edge)[1] - counted_row(row, (0.0, 0.0))[1]
                    for edge in ((1.0, 0.0), (0.0, 1.0))
                ]
                for _, row in read
            ]
        )
        edge = tuple(np.linalg.lstsq(slopes, np.array(bare), rcond=None)[0])
        for place, (_, row) in enumerate(alike):
            took_s, mib = counted_row(row, edge)
            theirs.append(float(row["iteration_time_s"]))
            ours.append(took_s)
            if place % 2:
                memory.append(mib / float(row["peak_MiB"]) - 1.0)
    apart = [abs(one / other - 1.0) for one, other in zip(ours, theirs, strict=True)]
    print(f"{len(rows)} rows: Spearman of time {spearman(theirs, ours):.4f}, at most {max(apart):.1%} apart")
    within = sum(abs(one) <= 0.02 for one in memory)
    print(f"memory: {within} of {len(memory)} rows that nothing was read from are within 2 %")


def main(words: Sequence[str]) -> None:
    """A table by name."""
    if words[0] in ("table2", "table5", "table6", "figure6"):
        with_fairscale()
    if words[0] in ("table1", "table2", "table5", "figure6"):
        as_in_32_bits()
    known: dict[str, Callable[..., None]] = {
        "table1": table1,
        "table2": table2,
        "table5": table5,
        "table6": table6,
        "figure6": figure6,
        "artifact": artifact,
        "counted": counted,
    }
    known[words[0]](*words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
