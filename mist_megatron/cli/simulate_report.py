"""A simulation for people, 80 columns wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mist_megatron.cli.output import table

if TYPE_CHECKING:
    from mist_megatron.ask.simulate import Simulated
    from mist_megatron.events.iteration import Simulation
    from mist_megatron.events.memory_curve import MemoryCurve

GIB = float(1 << 30)
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "12345678"
"""The same heights, in eighths of the limit, where a terminal has no blocks."""
WIDTH = 40
"""Characters of memory over time, where the terminal has room for them."""
HANGING = 4
"""Blanks before a cell that a narrow terminal folds."""
LONGEST = 6
"""Events of the critical path that are told one by one."""


def show_simulation(people: Console, played: Simulated) -> None:
    """Time, who is busy, memory over time, and the critical path."""
    from mist_megatron.ask.plan_words import closed_form_words

    simulation, before = played.simulation, played.before
    plan, cluster = simulation.plan, simulation.plan.cluster
    chunks = f" v={plan.vpp}" if plan.vpp > 1 else ""
    people.print(
        f"[bold]{escape(plan.model.name)}[/bold] on {cluster.words}, {plan.target}, "
        f"{simulation.schedule}{chunks}, {plan.grad_accum} micro-batches",
    )
    people.print(
        f"iteration [bold]{simulation.iteration_s:.4g} s[/bold]   "
        f"idle, mean of the stages, {simulation.bubble_fraction:.1%} (their bubble)"
    )
    people.print(f"closed form {closed_form_words(simulation)}")
    if before is not None:
        people.print(
            f"as the plan is {before.iteration_s:.4g} s, idle {before.bubble_fraction:.1%}: this is "
            f"{before.iteration_s / simulation.iteration_s:.3g} times as fast"
        )
    people.print()
    people.print(_usage_table(simulation))
    people.print()
    people.print(_memory_table(simulation, people))
    if (over := too_full(simulation)) is not None:
        people.print(over)
    people.print()
    people.print(_path_table(simulation))
    people.print()
    people.print(_longest_table(simulation))
    people.print()
    people.print(f"{simulation.events:,} events from {simulation.prices} distinct prices: {played.prices}")


def _usage_table(simulation: Simulation) -> Table:
    columns = ("stage", "ranks", "utilised", "compute alone", "comm. alone", "both", "host", "idle")
    rows = []
    first = 0
    for usage, stage in zip(simulation.usage, simulation.plan.stages, strict=True):
        shares = (
            usage.utilisation * usage.makespan_s,
            usage.exposed_compute_s,
            usage.exposed_communication_s,
            usage.overlapped_s,
            usage.host_s,
            usage.idle_s,
        )
        ranks = f"{first}-{first + stage.gpus - 1}" if stage.gpus > 1 else str(first)
        rows.append([str(usage.device), ranks, *(f"{s / simulation.iteration_s:.1%}" for s in shares)])
        first += stage.gpus
    return table(columns, rows, right=columns[2:])


def too_full(simulation: Simulation) -> str | None:
    """Whether stages would run out of memory, with the worst of them."""
    pairs = enumerate(zip(simulation.memory, simulation.prediction.stages, strict=True))
    over = [
        (curve.peak_bytes - predicted.limit_bytes, stage, curve.peak_bytes, predicted.limit_bytes)
        for stage, (curve, predicted) in pairs
        if curve.peak_bytes > predicted.limit_bytes
    ]
    if not over:
        return None
    _, stage, peak_bytes, limit_bytes = max(over)
    others = f"; {len(over)} of {len(simulation.memory)} stages are over" if len(over) > 1 else ""
    return f"does not fit: stage {stage} needs {peak_bytes / GIB:.2f} of {limit_bytes / GIB:.2f} GiB{others}"


def _memory_table(simulation: Simulation, people: Console) -> Table:
    columns = ("stage", "memory over time", "in flight", "peak GiB", "limit")
    bars = BARS if people.encoding.lower().startswith("utf") else ASCII_BARS
    width = max(min(WIDTH, people.width - HANGING), 1)
    rows = []
    for stage, (curve, predicted) in enumerate(
        zip(simulation.memory, simulation.prediction.stages, strict=True)
    ):
        rows.append(
            [
                str(stage),
                sparkline(curve, simulation.timeline.makespan_s, predicted.limit_bytes, bars, width),
                f"{curve.in_flight:.3g}",
                f"{curve.peak_bytes / GIB:.2f}",
                f"{predicted.limit_bytes / GIB:.2f}",
            ]
        )
    return table(columns, rows, right=columns[2:])


def sparkline(curve: MemoryCurve, until_s: float, full_bytes: float, bars: str, width: int) -> str:
    """Largest value of each interval, as heights of the limit."""
    values = curve.sampled(np.linspace(0.0, max(until_s, 1e-12), width + 1))
    heights = np.ceil(values / full_bytes * len(bars)).astype(int)
    return "".join(bars[min(max(height, 1), len(bars)) - 1] for height in heights)


def _path_table(simulation: Simulation) -> Table:
    columns = ("critical path", "events", "seconds", "share")
    total_s = simulation.iteration_s or 1.0
    rows = [
        [share.name, f"{share.events:,}", f"{share.seconds:.4g}", f"{share.seconds / total_s:.1%}"]
        for share in simulation.path_shares()
        if share.seconds > 0.0005 * total_s
    ]
    return table(columns, rows, right=columns[1:])


def _longest_table(simulation: Simulation) -> Table:
    timeline, program = simulation.timeline, simulation.timeline.program
    path = simulation.critical_path()
    longest = sorted(path, key=lambda event: timeline.start_s[event] - timeline.end_s[event])[:LONGEST]
    made = table(("longest events on it", "stage", "from s", "ms"), [], right=("stage", "from s", "ms"))
    for event in sorted(longest, key=lambda event: timeline.start_s[event]):
        made.add_row(
            Text(f"{simulation.built.kind[event]}: {program.name[event]}"),
            str(program.device[event]),
            f"{timeline.start_s[event]:.4g}",
            f"{(timeline.end_s[event] - timeline.start_s[event]) * 1e3:.2f}",
        )
    return made
