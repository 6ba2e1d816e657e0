"""What `tune` and `compare` print for people, within 80 columns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mist_megatron.cli.output import table

if TYPE_CHECKING:
    from mist_megatron.cli.tune import Found
    from mist_megatron.cost.predict import Prediction
    from mist_megatron.spec.plan import Plan, StagePlan

GIB = float(1 << 30)
BAR = 6
"""Cells of the memory bar."""


def show_result(
    people: Console, found: Found, defaults: list[str], written: tuple[Path | None, list[str]]
) -> None:
    """The plan as a table, what binds it, the next best, the proof, and the next command."""
    plan, prediction = found.plans[0], found.predictions[0]
    if defaults:
        people.print(f"[dim]taken by default: {escape(', '.join(defaults))}[/dim]")
    people.print(headline(plan, prediction))
    people.print()
    people.print(stage_table(plan, prediction))
    people.print()
    for line in reasons(prediction):
        people.print(line)
    for other, cost in zip(found.plans[1:], found.predictions[1:], strict=True):
        slower = cost.iteration_s / prediction.iteration_s - 1
        people.print(f"next best: {shape_words(other)}, {slower:+.1%} time")
    people.print(proof_line(found))
    out, files = written
    if out is not None:
        people.print(f"wrote {len(files)} files to {out}: {', '.join(files)}")
        people.print(f"next: mist-megatron predict {out}/plan.yaml", soft_wrap=True)
    else:
        people.print("next: the same command with --out DIR writes the plan and its files", soft_wrap=True)


def headline(plan: Plan, prediction: Prediction) -> str:
    cluster = plan.cluster
    return (
        f"[bold]{escape(plan.model.name)}[/bold] on {cluster.nodes} x {cluster.gpus_per_node} "
        f"{cluster.gpu.name}, {plan.target}: {shape_words(plan)}\n"
        f"[bold]{prediction.iteration_s:.4g} s[/bold] per step, {prediction.tokens_per_s:,.0f} tokens/s, "
        f"{prediction.tflops_per_gpu:.0f} TFLOP/s per GPU, MFU {prediction.mfu:.1%}, "
        f"bubble {prediction.time.bubble_fraction:.1%}"
    )


def shape_words(plan: Plan) -> str:
    """Parallel sizes in one line."""
    stage = plan.stages[0]
    words = [f"pp {plan.pipeline_size}", f"dp {stage.dp}", f"tp {stage.tp}"]
    words += [f"micro-batch {stage.micro_batch}", f"{plan.grad_accum} micro-batches"]
    words += [f"{plan.vpp} chunks per stage"] * (plan.vpp > 1)
    words += ["sequence parallel"] * plan.sequence_parallel
    return ", ".join(words)


def stage_table(plan: Plan, prediction: Prediction) -> Table:
    """One row per stage; equal neighbours are joined."""
    rows: list[list[str]] = []
    previous: tuple[object, ...] | None = None
    start = 0
    for index, (stage, cost) in enumerate(zip(plan.stages, prediction.stages, strict=True)):
        cells = [
            str(stage.layers),
            str(stage.gpus),
            f"{stage.dp}x{stage.tp}",
            str(stage.micro_batch),
            str(stage.zero),
            recompute_words(stage),
            "/".join(f"{round(100 * f):d}" for f in offload_fractions(stage)),
            bar(cost.peak_memory_bytes / cost.limit_bytes),
            f"{cost.peak_memory_bytes / GIB:.1f}/{cost.limit_bytes / GIB:.0f}",
            f"{cost.stable_s * 1e3:.1f}",
        ]
        if previous == tuple(cells):
            rows[-1][0] = f"{start}-{index}"
            continue
        previous, start = tuple(cells), index
        rows.append([str(index), *cells])
    columns = ("stage", "lay", "GPU", "DPxTP", "b", "Z", "recomp.", "off% WGOA", "memory", "GiB", "ms")
    made = table(columns, rows, right=("lay", "GPU", "b", "GiB", "ms"))
    for column in made.columns:
        column.no_wrap = True
    return made


def recompute_words(stage: StagePlan) -> str:
    if stage.recompute == "selective":
        return "selective"
    return f"{stage.ckpt} full" if stage.ckpt else "none"


def offload_fractions(stage: StagePlan) -> tuple[float, float, float, float]:
    offload = stage.offload
    return offload.weights, offload.grads, offload.optimizer, offload.activations


def bar(share: float) -> str:
    """Share of the limit as a bar of fixed width."""
    full = round(min(max(share, 0.0), 1.0) * BAR)
    return "█" * full + "░" * (BAR - full)


def reasons(prediction: Prediction) -> list[str]:
    """What binds the plan, and how far it rests on measurement."""
    from mist_megatron.cost.predict import binding

    what = binding(prediction)
    share = prediction.measured_share
    return [
        f"time: stage {what['slowest_stage']} is slowest, most of it "
        f"{str(what['largest_time_term']).replace('_', ' ')}; memory: stage {what['fullest_stage']} at "
        f"{what['memory_used_fraction']:.0%} of its limit, most of it "
        f"{str(what['largest_memory_term']).replace('_', ' ')}",
        f"prices: {share['exact']:.0%} measured at the exact shape, "
        f"{share['interpolated']:.0%} interpolated, "
        f"{share['extrapolated']:.0%} extrapolated",
    ]


def proof_line(found: Found) -> str:
    """Status, gap, and what it took."""
    result = found.result
    if result.status.value == "optimal":
        proof = f"proved: no plan of space {result.space.name} is faster"
    else:
        proof = f"{result.status.value}: within {result.gap:.1%} of the bound {result.bound_s:.4g} s"
    return (
        f"{proof} ({result.tally.priced:,} configurations priced, {result.shapes_solved} of "
        f"{result.shapes} shapes solved, {found.seconds:.1f} s)"
    )
