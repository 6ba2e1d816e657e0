"""How far the closed form is from the events on random plans, and where the difference comes from.

    python benchmarks/closed_form_against_events.py [--plans 200] [--seed 1]

Four classes of plans with uneven layers and each stage's own number of recomputed layers, and five more:

* `balanced`: Megatron, layers and recomputed layers within 1 of their mean, as a search would leave them
* `uneven`: Megatron, layers within 2 of the mean, recomputed layers from none to all
* `traffic`: Mist, the same, and each stage with its own ZeRO level and offload fractions
* `overlapped`: Megatron that overlaps reductions and, in half of the plans, gathers of weights; any network
* `interleaved`: Megatron, equal chunks, on networks from quick to slower than the chunks' compute
* `chunks`: the same with splits whose chunks are not equal, of small models whose head is some layers' work
* `sharing`: equal chunks of stages of which two or more lie on each node, on networks of 0.3 to 30 GB/s
* `beside`: chunks, equal or not, with tensor-parallel traffic beside products, on networks of 0.3 to 30 GB/s
* `unequal`: patched Megatron, each stage on a grid of its own

Printed per class: quantiles of closed form / events - 1, and the share within 3 %. For the first two, where
nothing runs beside compute, a third opinion decides who is right: the longest path through the 1F1B order,
some lines of this file that share nothing with the engine. It agrees with the events to rounding; the closed
form is the longest of those paths that stand still at one stage, and eq. 1 (printed too) is above both where
a slow stage comes early, because such a stage fills part of its wait with warm-up forwards.
For `traffic` the closed form is finer than t and d, which are all that a search adds up: stages that
recompute nothing, activations that leave behind optimizer states, and exposed traffic of forward passes
(`refinement` in cost/closed_form.py). What is left comes from stages that wait, which hides arrivals of
theirs. `interleaved` is exact while a send is shorter than
a chunk's forward pass; how full pipelines wait is in `cost/work.py`, how they get there and back is
taken as one micro-batch's trip and the pairs of one chunk.
`unequal` stages differ in data and tensor parallelism and micro-batch; both forms price their borders by who
sends to whom (`cost/borders.py`).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of
from mist_megatron.events.iteration import Simulation, simulate
from mist_megatron.events.tasks import Workload, workload_of
from mist_megatron.search.splits import chunk_counts, layer_splits
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.schedule import chunk_layers, recomputed_of
from mist_megatron.spec.training import TrainingSpec

STAGES = ("balanced", "uneven", "traffic", "overlapped")
CLASSES = (*STAGES, "interleaved", "chunks", "sharing", "beside", "unequal")
GPUS = ("a100-sxm-80gb", "a100-sxm-40gb", "l4-24gb", "h100-sxm-80gb")
NEAR = 0.03


@dataclass(frozen=True)
class Compared:
    """One plan under all opinions."""

    played: Simulation
    passes_s: float
    """Until the last pass of the first stage has ended, by the events ..."""
    longest_path_s: float
    """... and by the longest path; comparable where nothing runs beside compute."""

    @property
    def error(self) -> float:
        return (self.played.closed_form_s or 0.0) / self.played.iteration_s - 1.0


MODELS = (PRESETS["gpt3-2.7b"], PRESETS["llama-7b"])


def random_plan(rng: random.Random, kind: str, models: Sequence[ModelSpec] = MODELS) -> Plan:
    """Uneven stages of equal grids, of one of the classes."""
    target, most = "mist" if kind == "traffic" else "megatron", 1 if kind == "balanced" else 2
    stages, tp, dp, micro_batch = (rng.choice(c) for c in ((2, 4, 8), (1, 2, 4), (1, 2), (1, 2)))
    grad_accum = stages * rng.choice((1, 2, 4))
    model = rng.choice(models)
    layers = [model.layers // stages] * stages
    for _ in range(stages):
        taken, given = rng.randrange(stages), rng.randrange(stages)
        mean = model.layers // stages
        if layers[taken] > max(1, mean - most) and layers[given] < mean + most:
            layers[taken] -= 1
            layers[given] += 1
    usual = rng.randint(0, model.layers // stages)
    gpu, execution = "a100-sxm-80gb", Execution()
    if kind == "overlapped":
        gpu, dp = rng.choice(GPUS), 2 * dp
        execution = Execution(overlap_grad_reduce=True, overlap_param_gather=rng.random() < 0.5)

    def recomputed(count: int) -> int:
        if kind == "balanced":
            return min(max(usual + rng.choice((-1, 0, 1)), 0), count)
        return rng.randint(0, count)

    return Plan(
        model=model,
        training=TrainingSpec(global_batch=micro_batch * dp * grad_accum, seq_len=2048),
        cluster=ClusterSpec(gpu=CATALOGUE[gpu], nodes=stages, gpus_per_node=tp * dp),
        target=target,  # type: ignore[arg-type]
        grad_accum=grad_accum,
        stages=tuple(
            StagePlan(
                layers=count,
                nodes=1,
                gpus_per_node=tp * dp,
                dp=dp,
                tp=tp,
                micro_batch=micro_batch,
                zero=rng.choice((0, 1, 2, 3)) if target == "mist" else 1,  # type: ignore[arg-type]
                ckpt=recomputed(count),
                offload=_offload(rng) if target == "mist" else Offload(),
            )
            for count in layers
        ),
        execution=execution,
    )


def random_interleaved(rng: random.Random) -> Plan:
    """Equal chunks on any network, from sends that cost nothing to sends that bind."""
    model = PRESETS[rng.choice(("gpt3-2.7b", "llama-7b", "gpt3-13b"))]
    stages = rng.choice([s for s in (2, 4, 8) if model.layers % s == 0])
    layers = model.layers // stages
    chunks = rng.choice([d for d in range(2, layers + 1) if layers % d == 0])
    tp, dp, micro_batch = rng.choice((1, 2, 4)), rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
    grad_accum = stages * rng.choice((1, 2, 4))
    nodes = stages if stages * tp * dp > 16 else rng.choice((1, stages))
    gpu = rng.choice(GPUS)
    stage = StagePlan(
        layers=layers,
        nodes=1,
        gpus_per_node=tp * dp,
        dp=dp,
        tp=tp,
        micro_batch=micro_batch,
        zero=1,
        ckpt=chunks * rng.randint(0, layers // chunks),
    )
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=micro_batch * dp * grad_accum, seq_len=2048),
        cluster=ClusterSpec(gpu=CATALOGUE[gpu], nodes=nodes, gpus_per_node=stages * tp * dp // nodes),
        target="megatron",
        grad_accum=grad_accum,
        schedule="interleaved",
        vpp=chunks,
        stages=(stage,) * stages,
    )


def random_chunks(rng: random.Random) -> Plan:
    """Splits with unequal chunks, as a search tries them, each chunk with as many recomputed layers."""
    plan = random_interleaved(rng)
    stages, first = len(plan.stages), plan.stages[0]
    layers = rng.choice(
        [stages + 1, 2 * stages - 2, 2 * stages - 1, 3 * stages, 3 * stages - 1, 4 * stages - 1]
    )
    model = replace(rng.choice(MODELS), layers=layers, vocab=rng.choice((8192, 32000, 128256)))
    splits = [
        (split, chunks)
        for chunks in chunk_counts(layers, stages)
        for split in layer_splits(layers, stages, chunks)
        if any(count % chunks for count in split)
    ]
    if not splits:
        return random_chunks(rng)
    split, vpp = rng.choice(splits)
    again = rng.choice((0, 0, 1))
    recomputed = [recomputed_of(chunks, again) for chunks in chunk_layers(split, vpp)]
    own = zip(split, recomputed, strict=True)
    return replace(
        plan,
        model=model,
        vpp=vpp,
        stages=tuple(replace(first, layers=count, ckpt=ckpt) for count, ckpt in own),
    )


def random_sharing(rng: random.Random) -> Plan:
    """Some borders lie between nodes and others do not."""
    plan = random_interleaved(rng)
    stages, gpus = len(plan.stages), plan.stages[0].gpus
    if stages == 2:
        return random_sharing(rng)
    on_node = rng.choice([count for count in (2, 4) if 2 * count <= stages])
    links = LinkOverrides(inter_bytes_per_s=10.0 ** rng.uniform(8.5, 10.5))
    cluster = replace(plan.cluster, nodes=stages // on_node, gpus_per_node=on_node * gpus, links=links)
    return replace(plan, cluster=cluster)


def random_beside(rng: random.Random) -> Plan:
    """Tensor-parallel traffic hides in products, which leaves less for sends to hide in."""
    plan = (random_interleaved if rng.random() < 0.5 else random_chunks)(rng)
    if plan.stages[0].tp == 1:
        return random_beside(rng)
    links = LinkOverrides(inter_bytes_per_s=10.0 ** rng.uniform(8.5, 10.5))
    return replace(
        plan,
        cluster=replace(plan.cluster, links=links),
        sequence_parallel=True,
        execution=Execution(tp_comm_overlap=True),
    )


def random_unequal(rng: random.Random) -> Plan:
    """Stages of as many GPUs, each with its own dp, tp and micro-batch."""
    model, stages, wide = rng.choice(MODELS), rng.choice((2, 4)), rng.choice((4, 8))
    grad_accum = stages * rng.choice((1, 2, 4))
    sizes = [rng.choice((1, 2, 4)) for _ in range(stages)]
    layers = model.layers // stages
    gpus = stages * wide
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=wide * grad_accum, seq_len=2048),
        cluster=ClusterSpec(gpu=CATALOGUE[rng.choice(GPUS)], nodes=gpus // 8, gpus_per_node=8),
        target="megatron+patches",
        grad_accum=grad_accum,
        sequence_parallel=rng.random() < 0.5,
        stages=tuple(
            StagePlan(
                layers=layers,
                nodes=1,
                gpus_per_node=wide,
                dp=wide // tp,
                tp=tp,
                micro_batch=tp,
                zero=1,
                ckpt=rng.randint(0, layers),
            )
            for tp in sizes
        ),
    )


def _offload(rng: random.Random) -> Offload:
    some = (0.0, 0.0, 0.25, 0.5)
    return Offload(optimizer=rng.choice(some), activations=rng.choice(some), grads=rng.choice((0.0, 0.25)))


def compared(plan: Plan) -> Compared:
    evaluator = evaluator_for(job_of(plan))[0]
    played = simulate(plan, evaluator)
    first = [span.last for span in played.built.spans if span.stage == 0]
    passes_s = max(float(played.timeline.end_s[event]) for event in first)
    longest_s = longest_path(workload_of(plan, evaluator), plan.grad_accum)
    return Compared(played, passes_s, longest_s)


def equation_1(played: Simulation) -> float:
    """What the search minimises for 1F1B, of the same stage times."""
    stages, count = played.prediction.stages, played.plan.grad_accum
    times = [stage.stable_s for stage in stages]
    passes_s = (count - 1) * max(times) + sum(times)
    return passes_s + played.prediction.time.first_and_last_s


def longest_path(work: Workload, micro_batches: int) -> float:
    """End of 1F1B where a stage sends before it goes on and nothing runs beside compute."""
    count = len(work.stages)
    forward, backward = [], []
    for number, stage in enumerate(work.stages):
        layers = [layer.work for chunk in stage.chunks for layer in chunk]
        forward.append(stage.host_s / 2 + sum(w.forward.serial_s for w in layers))
        backward.append(stage.host_s / 2 + sum(w.backward.serial_s for w in layers))
        # Every stage of these plans has a node of its own.
        forward[-1] += stage.hop_across_s if number < count - 1 else 0.0
        backward[-1] += stage.hop_across_s if number else 0.0
    return pipeline_end(forward, backward, micro_batches)


def pipeline_end(forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int) -> float:
    """Longest path through 1F1B: each pass starts when its stage is free and its input is there."""
    count = len(forward_s)
    done: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * count, [0] * count
    orders = []
    for stage in range(count):
        warm_up = min(count - 1 - stage, micro_batches)
        order = [("F", k) for k in range(warm_up)]
        for k in range(micro_batches):
            order += [("F", warm_up + k)] * (warm_up + k < micro_batches) + [("B", k)]
        orders.append(order)
    while any(position[s] < len(orders[s]) for s in range(count)):
        for stage in range(count):
            while position[stage] < len(orders[stage]):
                kind, k = orders[stage][position[stage]]
                if kind == "F":
                    source = ("F", stage - 1, k) if stage else None
                else:
                    source = ("B", stage + 1, k) if stage < count - 1 else ("F", stage, k)
                if source is not None and source not in done:
                    break
                ready = done[source] if source is not None else 0.0
                seconds = (forward_s if kind == "F" else backward_s)[stage]
                clock[stage] = done[kind, stage, k] = max(clock[stage], ready) + seconds
                position[stage] += 1
    return clock[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in CLASSES:
        rng = random.Random(options.seed)
        own = {
            "interleaved": random_interleaved,
            "chunks": random_chunks,
            "sharing": random_sharing,
            "beside": random_beside,
            "unequal": random_unequal,
        }
        draw = own.get(name) or partial(random_plan, kind=name)
        found = [compared(draw(rng)) for _ in range(options.plans)]
        errors = np.array([one.error for one in found])
        low, first, middle, third, high = np.quantile(errors, (0.0, 0.05, 0.5, 0.95, 1.0))
        print(
            f"{name:8s} {options.plans} plans: closed form / events - 1 from {low:+.1%} to {high:+.1%}, "
            f"5 % {first:+.1%}, median {middle:+.1%}, 95 % {third:+.1%}; "
            f"{np.mean(np.abs(errors) <= NEAR):.0%} within {NEAR:.0%}"
        )
        if name in ("balanced", "uneven"):
            paper = np.array([equation_1(one.played) / one.played.iteration_s - 1.0 for one in found])
            near = np.mean(np.abs(paper) <= NEAR)
            print(f"{'':8s} eq. 1: up to {paper.max():+.1%}, {near:.0%} within {NEAR:.0%}")
            apart = max(abs(one.longest_path_s / one.passes_s - 1.0) for one in found)
            print(f"{'':8s} events against the longest path: at most {apart:.1e} apart")


if __name__ == "__main__":
    main()
