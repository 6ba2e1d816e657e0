"""What `tune` and `compare` print for people, within 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mist_megatron.cli.output import table
from mist_megatron.spec.term import Busy

if TYPE_CHECKING:
    from mist_megatron.ask.found import Found
    from mist_megatron.cost.predict import Prediction, StagePrediction
    from mist_megatron.spec.plan import Plan, StagePlan

GIB = float(1 << 30)
BAR = 6
"""Cells of the memory bar."""


def show_result(
    people: Console,
    found: Found,
    defaults: list[str],
    written: tuple[Path | None, list[str]],
    others: Mapping[str, float],
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
    others_words = told_apart(found.plans)[1:]
    for words, cost in zip(others_words, found.predictions[1:], strict=True):
        slower = cost.iteration_s / prediction.iteration_s - 1
        people.print(f"next best: {words}, {slower:+.1%} time")
    gain = hand_made_line(found, others)
    if gain is not None:
        people.print(gain)
    people.print(proof_line(found))
    out, files = written
    if out is not None:
        people.print(f"wrote {len(files)} file{'s' * (len(files) != 1)} to {out}: {', '.join(files)}")
        people.print(next_command(out, files), soft_wrap=True)
    else:
        people.print("next: the same command with --out DIR writes the plan and its files", soft_wrap=True)


def next_command(out: Path, files: list[str]) -> str:
    """What to type next: start the training where there is something to start."""
    if "train.sh" in files:
        return f"next: fill in {out}/env.sh, then {out}/train.sh, or sbatch {out}/slurm.sbatch"
    return f"next: mist-megatron predict {out}/plan.yaml"


def headline(plan: Plan, prediction: Prediction) -> str:
    cluster = plan.cluster
    return (
        f"[bold]{escape(plan.model.name)}[/bold] on {cluster.nodes} x {cluster.gpus_per_node} "
        f"{cluster.gpu.name}, {plan.target}: {shape_words(plan)}\n"
        f"[bold]{prediction.iteration_s:.4g} s[/bold] per step, {prediction.tokens_per_s:,.0f} tokens/s, "
        f"{prediction.tflops_per_gpu:.0f} TFLOP/s per GPU, MFU {prediction.mfu:.1%}, "
        f"bubble of the slowest stage {prediction.time.bubble_fraction:.1%}"
    )


def shape_words(plan: Plan) -> str:
    """Parallel sizes in one line."""
    stages = plan.stages
    words = [f"pp {plan.pipeline_size}"]
    words += [f"GPUs {_each(s.gpus for s in stages)}"] * (len({s.gpus for s in stages}) > 1)
    words += [f"dp {_each(s.dp for s in stages)}", f"tp {_each(s.tp for s in stages)}"]
    words += [f"micro-batch {_each(s.micro_batch for s in stages)}"]
    words += [f"{plan.grad_accum} micro-batch{'es' * (plan.grad_accum > 1)}"]
    words += [f"{plan.vpp} chunks per stage"] * (plan.vpp > 1)
    words += ["sequence parallel"] * plan.sequence_parallel
    words += ["decoupled steps"] * bool(plan.execution.decoupled_step)
    return ", ".join(words)


def told_apart(plans: Sequence[Plan]) -> list[str]:
    """Each plan's shape, and of plans of one shape what else differs between them."""
    words = [shape_words(plan) for plan in plans]
    told = []
    for plan, shape in zip(plans, words, strict=True):
        alike = [other for other, other_shape in zip(plans, words, strict=True) if other_shape == shape]
        for name, of_stage in _DETAILS.items():
            each = [[of_stage(stage) for stage in other.stages] for other in alike]
            if any(values != each[0] for values in each):
                shape += f", {name} {_each(map(of_stage, plan.stages))}"
        told.append(shape)
    return told


def _each(values: Iterable[object]) -> str:
    """One number, or one per stage."""
    listed = list(values)
    return "/".join(map(str, listed)) if len(set(listed)) > 1 else str(listed[0])


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
            "/".join(f"{round(100 * f):d}" for f in stage.offload.values()),
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


_DETAILS: Mapping[str, Callable[[StagePlan], str]] = MappingProxyType(
    {
        "layers": lambda stage: str(stage.layers),
        "ZeRO": lambda stage: str(stage.zero),
        "recomputed": recompute_words,
        "off% WGOA": lambda stage: "-".join(f"{100 * part:.0f}" for part in stage.offload.values()),
    }
)
"""What plans of one shape may differ in, stage by stage."""


def bar(share: float) -> str:
    """Share of the limit as a bar of fixed width."""
    full = round(min(max(share, 0.0), 1.0) * BAR)
    return "█" * full + "░" * (BAR - full)


def reasons(prediction: Prediction) -> list[str]:
    """What binds the plan, and how far it rests on measurement."""
    from mist_megatron.cost.predict import binding

    what = binding(prediction)
    share = prediction.measured_share
    slowest = what["slowest_stage"]
    parts = stream_shares(prediction.stages[slowest])
    listed = ", ".join(f"{name} {part:.0%}" for name, part in parts.items() if part >= 0.005)
    step = prediction.time
    # The slowest stage is busy with each micro-batch; only what the others add to one is waiting.
    own_s = min(prediction.stages[slowest].stable_s, step.ramp_s)
    split = [(step.steady_s + own_s, "steady"), (step.ramp_s - own_s, "fill and drain")]
    split += [(step.first_and_last_s, "first and last micro-batch")]
    return [
        f"time binds in stage {slowest}: {listed}",
        "step: " + ", ".join(f"{name} {seconds / step.total_s:.0%}" for seconds, name in split),
        f"memory is fullest in stage {what['fullest_stage']}: {what['memory_used_fraction']:.0%} of its "
        f"limit, most of it {str(what['largest_memory_term']).replace('_', ' ')}",
        f"prices: {share['exact']:.0%} measured at the exact shape, "
        f"{share['interpolated']:.0%} interpolated, "
        f"{share['extrapolated']:.0%} extrapolated",
    ]


def stream_shares(stage: StagePrediction) -> dict[str, float]:
    """Parts of a stage's stable micro-batch by what is busy; what is not counted elsewhere is the host's."""
    terms, total = stage.stable_terms_s, stage.stable_s
    shares = {
        busy.value: sum(seconds for term, seconds in terms.items() if term.busy is busy) / total
        for busy in Busy
        if busy is not Busy.HOST
    }
    return {**shares, Busy.HOST.value: 1.0 - sum(shares.values())}


def hand_made_line(found: Found, others: Mapping[str, float]) -> str | None:
    """How much faster than the best plans of hand-made spaces."""
    best = found.predictions[0].iteration_s
    listed = [f"{value / best:.2f}x the speed of space {name}" for name, value in others.items()]
    return f"gain: {', '.join(listed)}, each at its best" if listed else None


def proof_line(found: Found) -> str:
    """Status, gap, and what it took."""
    result = found.result
    if result.status.value == "optimal":
        stages = "stages of any sizes" if result.space.unequal else "stages of equal sizes"
        pipelines = f", {stages}," if result.space.pipeline else ""
        space = f"plan of space {result.space.name} on this target{pipelines}"
        proof = f"proved: no {space} is faster by eq. 1"
        behind = result.solutions[0].value_s / result.objective_s - 1
        if behind > 1e-9:
            proof = (
                f"proved: by eq. 1 no {space} is faster than {result.objective_s:.6g} s; this one is "
                f"{behind:.2%} behind that, and ahead by predict"
            )
    else:
        proof = f"{result.status.value}: within {result.gap:.1%} of the bound {result.bound_s:.4g} s"
    return (
        f"{proof} ({result.tally.priced:,} configurations priced, {result.shapes_solved} of "
        f"{result.shapes} shapes solved, {found.seconds:.1f} s)"
    )
