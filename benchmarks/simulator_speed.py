"""How long the event simulator takes, in CPU-seconds of one process, without starting Python.

    python benchmarks/simulator_speed.py

Two jobs, each with the targets that the project has set itself:

* 8 stages x 64 micro-batches x 48 layers: under 2 CPU-seconds
* 1,024 GPUs in 16 stages x 128 micro-batches (one rank standing for all of its stage): under 20

and the first one again with twice and four times the micro-batches: time and memory should grow as the number
of events does. Everything is timed from a plan to the finished report: pricing (compiling programs is
not counted: they come from the cache after the first run), events, engine, analysis, memory over
time. What is printed is CPU-seconds, events, and bytes per event at the peak of Python's own allocations.
"""

from __future__ import annotations

import time
import tracemalloc

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.plan_yaml import plan_from_text
from mist_megatron.spec.plan import Plan

TEMPLATE = """
schema: 1
model: {{family: gpt, layers: {layers}, hidden: 8192, heads: 64, vocab: 51200}}
training: {{global_batch: {batch}, seq_len: 2048, precision: bf16, flash_attention: true, dropout: 0.0}}
cluster: {{gpu: a100-sxm-80gb, nodes: {nodes}, gpus_per_node: 8}}
target: {target}
grad_accum: {micro_batches}
stages:
"""
STAGE = """  - {{layers: {layers}, nodes: {nodes}, gpus_per_node: {per_node}, dp: {dp}, tp: {tp},
     micro_batch: 1, zero: {zero}, ckpt: {ckpt},
     offload: {{optimizer: {optimizer}, activations: {activations}}}}}
"""


def plan_of(stages: int, micro_batches: int, layers: int, gpus: int, *, target: str, zero: int) -> Plan:
    """Equal stages, with everything beside compute that the target can do."""
    per_stage = gpus // stages
    per_node = min(per_stage, 8)
    tp = min(per_node, 8)
    dp = per_stage // tp
    rich = target == "mist"
    text = TEMPLATE.format(
        layers=layers,
        batch=micro_batches * dp,
        nodes=gpus // 8,
        target=target,
        micro_batches=micro_batches,
    )
    stage = STAGE.format(
        layers=layers // stages,
        nodes=per_stage // per_node,
        per_node=per_node,
        dp=dp,
        tp=tp,
        zero=zero,
        ckpt=layers // stages // 2,
        optimizer=0.5 if rich else 0.0,
        activations=0.5 if rich else 0.0,
    )
    return plan_from_text(text + stage * stages)


def timed(name: str, plan: Plan, limit_s: float | None) -> None:
    evaluator = evaluator_for(job_of(plan))[0]
    simulate(plan, evaluator) if limit_s is None else None
    evaluator = evaluator_for(job_of(plan))[0]
    started = time.process_time()
    found = simulate(plan, evaluator)
    seconds = time.process_time() - started
    tracemalloc.start()
    simulate(plan, evaluator)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    target = (
        "" if limit_s is None else f"  (target {limit_s:g} s: {'met' if seconds < limit_s else 'MISSED'})"
    )
    print(
        f"{name:44s} {seconds:7.2f} CPU-s  {found.events:8,} events  "
        f"{peak_bytes / found.events:6.0f} B/event{target}"
    )


def main() -> None:
    timed("8 stages x 64 x 48 layers, Megatron, tp 8", plan_of(8, 64, 48, 64, target="megatron", zero=1), 2.0)
    timed("the same, Mist: ZeRO 3, offload", plan_of(8, 64, 48, 64, target="mist", zero=3), 2.0)
    large = plan_of(16, 128, 96, 1024, target="megatron", zero=1)
    timed("1,024 GPUs, 16 stages x 128 x 96 layers", large, 20.0)
    large = plan_of(16, 128, 96, 1024, target="mist", zero=3)
    timed("the same, Mist: ZeRO 3, offload", large, 20.0)
    for factor in (2, 4):
        plan = plan_of(8, 64 * factor, 48, 64, target="megatron", zero=1)
        timed(f"8 stages x {64 * factor} x 48 layers, Megatron", plan, None)


if __name__ == "__main__":
    main()
