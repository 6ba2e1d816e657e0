"""Galvatron-BMW's published tables against what our spaces of strategies per layer predict.

    python benchmarks/galvatron_bmw.py table2        # 8 RTX TITAN: what is out of memory, and the order
    python benchmarks/galvatron_bmw.py table5        # 16 A100-40: layers of each stage
    python benchmarks/galvatron_bmw.py table6        # 32 A100-80: GPT-3 of 15, 39 and 65 billion parameters
    python benchmarks/galvatron_bmw.py figure6       # strategies of four plans
    python benchmarks/galvatron_bmw.py artifact FILE # predictions of its public code, as a table

Every cell that is missed is printed. How the paper trained is read from its figures. Tables II and V are in
32 bits: Table I's activations of BERT are more than elements of two bytes take, and 29 samples of
BERT-Huge-32 a second are 11 TFLOP/s per RTX TITAN, whose peak is 16.3 in 32 bits and 130.5 in 16. That is
told here in 16 bits with everything counted by halves: memory, bandwidths, and a parameter's 4 + 4 + 8 bytes
as 2 + 2 + 4. Dropout is that of the models' published configurations: 0.1 for BERT and T5, none for ViT and
Swin. Table VI is taken to be in 16 bits, on 1,024 tokens: Table I's 685 MB a layer of GPT3-15B are those of
1,024 tokens in 32 bits, but 61 such samples a second are 181 TFLOP/s per A100, more than it has in 32 bits.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.calibrate.validate import spearman
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import Prediction, job_of, predict
from mist_megatron.formats.files import load_model
from mist_megatron.search.balance import Candidate, candidates, even, pipelines
from mist_megatron.search.galvatron import best_of_each
from mist_megatron.search.layer_rules import LayerRules, PerLayer
from mist_megatron.search.search import Settings, Watch
from mist_megatron.search.solution import Solution
from mist_megatron.search.space import Limits
from mist_megatron.search.strategy_prices import StrategyPrices
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec, Figure, GpuSpec, LinkOverrides, cluster_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.strategies import LayerRun
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.torch import MEMORY, TORCH

TABLE_2 = Path(__file__).with_name("results") / "galvatron_bmw_table2.csv"
GIB = 2.0**30
FLOPS_32_BITS = {"rtx-titan-24gb": 16.3e12, "a100-sxm-40gb": 156e12}
"""Datasheets: CUDA cores of the RTX TITAN; TF32 of the A100's tensor cores, torch's default up to 1.11."""
NETWORK_BYTES_PER_S = {"rtx-titan-24gb": 12.5e9, "a100-sxm-40gb": 12.5e9}
"""Section VII-D."""
FULL = Settings(per_layer=PerLayer(most=None))
AT_ONCE = replace(FULL, limits=Limits(fixed={"grad_accum": 1}))
"""DDP, FSDP and Megatron's tensor parallelism take a batch at once."""
BI_OBJECTIVE = LayerRules(balanced=True)
"""Galvatron (1F1B+Bi-obj): layers move between stages, none is recomputed."""
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
    "gpt3-15b": {"tp": 12.31, "pp": 26.56, "sdp": 45.88, "3d": 37.65, "": 50.79, "base": 57.33, "bmw": 61.42},
    "gpt3-39b": {"tp": 5.56, "pp": 12.38, "sdp": 14.31, "3d": 13.79, "": 14.93, "base": 21.14, "bmw": 22.86},
    "gpt3-65b": {"tp": 2.02, "pp": 4.62, "sdp": 3.40, "3d": 4.91, "": 5.14, "base": 13.97, "bmw": 13.97},
}
"""Samples per second."""
FIGURE_6 = (
    ("A", "bert-huge-32", "rtx-titan-24gb", 8, 184),
    ("B", "swin-huge-32", "rtx-titan-24gb", 8, 360),
    ("C, slow links", "t5-512/4-32", "rtx-titan-24gb", 16, 256),
    ("C, fast links", "t5-512/4-32", "a100-sxm-40gb", 16, 416),
)
"""Case, model, GPU, how many, batch; 8 GB each."""


def as_in_32_bits() -> None:
    """From here on target torch keeps parameters in 32 bits, counted by halves."""
    memory = replace(MEMORY, grad_bytes=2, optimizer_bytes=4)
    object.__setattr__(TORCH, "memory", lambda execution: memory)


def halved(name: str) -> GpuSpec:
    """That GPU in 32 bits, counted by halves."""
    whole, paper = gpu(name), "Galvatron-BMW"

    def half(figure: Figure) -> Figure:
        return Figure(value=0.5 * figure.value, source=figure.source)

    return replace(
        whole,
        bf16_flops_per_s=None,
        fp16_flops_per_s=Figure(value=FLOPS_32_BITS[name], source="datasheet, 32 bits"),
        memory_bytes=half(whole.memory_bytes),
        memory_bytes_per_s=half(whole.memory_bytes_per_s),
        intra_bytes_per_s=half(whole.intra_bytes_per_s),
        pcie_bytes_per_s=half(whole.pcie_bytes_per_s),
        inter_bytes_per_s=Figure(value=0.5 * NETWORK_BYTES_PER_S[name], source=paper),
    )


def cluster(name: str, gpus: int, gib: float | None) -> ClusterSpec:
    """With a budget per GPU."""
    limit = None if gib is None else 0.5 * gib * GIB
    return replace(cluster_of(halved(name), gpus), memory_limit_bytes=limit)


def evaluator_of(model: str, on: ClusterSpec, batch: int, seq_len: int = 512) -> StageEvaluator:
    """Of a job there, attention unfused."""
    spec = load_model(model)
    training = TrainingSpec(
        global_batch=batch, seq_len=spec.tokens or seq_len, precision="fp16", flash_attention=False,
        dropout=0.1 if model.startswith(("bert", "t5")) else 0.0,
    )  # fmt: skip
    return evaluator_for(Job(model=spec, training=training, cluster=on, target="torch"))[0]


def best(evaluator: StageEvaluator, space: str, settings: Settings = FULL) -> Solution | None:
    """The best of a space; None where nothing fits."""
    return best_of_each(evaluator, [space], settings, Watch()).get(space)


def gpipe(evaluator: StageEvaluator) -> Prediction | None:
    """PyTorch's GPipe: as many stages as GPUs, all micro-batches in flight, at the number of them that is
    fastest."""
    job, found = evaluator.job, []
    for grad_accum in range(1, job.training.global_batch + 1):
        if job.training.global_batch % grad_accum == 0:
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
            found.append(predict(plan, evaluator_for(job_of(plan))[0]))
    return min((one for one in found if one.fits), key=lambda one: one.iteration_s, default=None)


def seconds(evaluator: StageEvaluator, strategy: str) -> float | None:
    """Of a pure strategy; None where it does not fit."""
    if strategy == "pp":
        prediction = gpipe(evaluator)
        return None if prediction is None else prediction.iteration_s
    solution = best(evaluator, f"galvatron-{strategy}", AT_ONCE)
    return None if solution is None else solution.value_s


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
    above = sum(value >= 0.8 for value in order.values())
    print(f"{above} of {len(order)} columns at 0.8 or above, mean {sum(order.values()) / len(order):.2f}")


def balanced_split(evaluator: StageEvaluator, stages: int) -> Candidate | None:
    """The fastest by eq. 1, layers balanced between so many stages and none recomputed."""

    def priced(count: int, grad_accum: int) -> StrategyPrices:
        return StrategyPrices(evaluator, count, grad_accum)

    lists = pipelines(evaluator, BI_OBJECTIVE, lambda key, size: key != "pp" or size == stages, priced)
    found = [one for _, one in candidates(lists, BI_OBJECTIVE, solve_exactly=False)]
    return min(found, key=lambda one: one.value_s, default=None)


def table5() -> None:
    """Layers of each stage, with as many stages as the paper's plan has and at its batch."""
    for model, budget, batch, split in TABLE_5:
        evaluator = evaluator_of(model, cluster("a100-sxm-40gb", 16, budget), batch)
        ours = balanced_split(evaluator, len(split))
        told = "nothing fits" if ours is None else f"{list(ours.split)}, {batch / ours.value_s:.1f} a second"
        print(f"{model}, {budget} GB, batch {batch}: paper {list(split)}, ours {told}", flush=True)


def table6() -> None:
    """Samples per second of each space at the best of some batches, against those of sharded data."""
    for model, rates in TABLE_6.items():
        ours: dict[str, float] = {}
        for batch in (32, 128, 512):
            network = LinkOverrides(inter_bytes_per_s=50e9)
            on = replace(cluster_of(gpu("a100-sxm-80gb"), 32), links=network)
            evaluator = evaluator_of(model, on, batch, seq_len=1024)
            names = {name: f"galvatron-{name}".removesuffix("-") for name in rates}
            plans = best_of_each(evaluator, list(names.values()), Settings(), Watch())
            for name, space in names.items():
                if space in plans:
                    ours[name] = max(ours.get(name, 0.0), batch / plans[space].value_s)
        for name, rate in rates.items():
            share, own = rate / rates["sdp"], ours.get(name, 0.0) / ours["sdp"]
            print(f"{model}, {name or 'galvatron'}: of sharded data paper {share:.2f}, ours {own:.2f}")
        both = [(rate, ours.get(name, 0.0)) for name, rate in rates.items()]
        print(f"{model}: Spearman {spearman(*map(list, zip(*both, strict=True))):.2f}", flush=True)


def figure6() -> None:
    """Strategies of the plans drawn there, at their batches."""
    for case, model, name, gpus, batch in FIGURE_6:
        solution = best(evaluator_of(model, cluster(name, gpus, 8), batch), "galvatron-bmw")
        print(f"{case}: {model}, {gpus} x {name}, batch {batch}")
        for runs in solution.strategies if solution else ():
            print("   ", ", ".join(f"{run.count} x {run.strategy}" for run in runs), flush=True)


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


def main(words: Sequence[str]) -> None:
    """A table by name."""
    if words[0] in ("table2", "table5", "figure6"):
        as_in_32_bits()
    known: dict[str, Callable[..., None]] = {
        "table2": table2,
        "table5": table5,
        "table6": table6,
        "figure6": figure6,
        "artifact": artifact,
    }
    known[words[0]](*words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
