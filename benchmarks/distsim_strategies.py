"""DistSim's published strategy search (CF 2023, section 6), by the event simulator.

    python benchmarks/distsim_strategies.py

BERT-exLarge: 48 layers, 16 A10 GPUs on 4 nodes, global batch 16, all 15 ways to split 16 GPUs over data,
tensor and pipeline parallelism. Published, predicted and measured: the best is DP2 x PP8 (2.94 and 2.97
iterations per second), the worst TP16 (0.398 and 0.396), 7.38 and 7.49 times apart, and the second best is
1-2 % behind.

Not published, and taken here: BERT-Large's width (hidden 1024, 16 heads, sequence 512), micro-batch 1,
Megatron's defaults otherwise, the catalogue's A10G, and links at the rates of its datasheet: PCIe inside
a node, 100 Gb/s between nodes. (The A10G profile's own curves are of AWS instances, whose GPUs do not reach
each other over PCIe.)
"""

from __future__ import annotations

from dataclasses import dataclass

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

GPUS, PER_NODE, LAYERS, BATCH = 16, 4, 48, 16
PUBLISHED_RATIO = (7.38, 7.49)
"""Predicted by DistSim, and measured."""
MODEL = {"family": "gpt", "layers": LAYERS, "hidden": 1024, "heads": 16, "vocab": 30592}


@dataclass(frozen=True)
class Strategy:
    """One way to split the GPUs, with its iteration."""

    dp: int
    tp: int
    pp: int
    iteration_s: float
    closed_form_s: float

    def __str__(self) -> str:
        return f"DP{self.dp} x TP{self.tp} x PP{self.pp}"


def plan_of(dp: int, tp: int, pp: int) -> Plan:
    gpu = CATALOGUE["a10g-24gb"]
    stage = dp * tp
    nodes, per_node = (1, stage) if stage <= PER_NODE else (stage // PER_NODE, PER_NODE)
    return Plan(
        model=model_from_mapping(MODEL, "BERT-exLarge"),
        training=TrainingSpec(
            global_batch=BATCH, seq_len=512, precision="fp16", flash_attention=False, dropout=0.1
        ),
        cluster=ClusterSpec(
            gpu=gpu,
            nodes=GPUS // PER_NODE,
            gpus_per_node=PER_NODE,
            links=LinkOverrides(
                intra_bytes_per_s=gpu.pcie_bytes_per_s.value,
                inter_bytes_per_s=gpu.inter_bytes_per_s.value,
            ),
        ),
        target="megatron",
        grad_accum=BATCH // dp,
        stages=tuple(
            StagePlan(
                layers=LAYERS // pp, nodes=nodes, gpus_per_node=per_node, dp=dp, tp=tp, micro_batch=1, zero=0
            )
            for _ in range(pp)
        ),
    )


def strategies() -> list[Strategy]:
    """All of them, fastest first."""
    found = []
    for tp in (1, 2, 4, 8, 16):
        for pp in (1, 2, 4, 8, 16):
            if tp * pp > GPUS:
                continue
            dp = GPUS // (tp * pp)
            plan = plan_of(dp, tp, pp)
            played = simulate(plan, evaluator_for(job_of(plan))[0])
            found.append(Strategy(dp, tp, pp, played.iteration_s, played.closed_form_s or 0.0))
    return sorted(found, key=lambda strategy: strategy.iteration_s)


def main() -> None:
    ranked = strategies()
    for one in ranked:
        print(
            f"{one!s:18s} {one.iteration_s:6.3f} s {1.0 / one.iteration_s:6.3f} it/s   "
            f"closed form {one.closed_form_s:6.3f} s"
        )
    ratio = ranked[-1].iteration_s / ranked[0].iteration_s
    print(f"best {ranked[0]}, worst {ranked[-1]}, {ratio:.2f} times apart; published: DP2 x PP8, TP16, 7.38")


if __name__ == "__main__":
    main()
