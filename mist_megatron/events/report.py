"""A simulation as one document: the JSON of `simulate`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mist_megatron.events.analysis import STREAM_NAMES, DeviceUsage
from mist_megatron.events.disagreement import disagreement
from mist_megatron.events.iteration import Simulation

POINTS = 96
"""Intervals in which memory over time is told; each holds its largest value."""


def simulation_document(simulation: Simulation, *, every_rank: bool = False) -> dict[str, object]:
    """Seconds and bytes throughout."""
    closed_s = simulation.closed_form_s
    return {
        "iteration_s": simulation.iteration_s,
        "bubble_fraction": simulation.bubble_fraction,
        "closed_form_s": closed_s,
        "closed_form_error": None if not closed_s else closed_s / simulation.iteration_s - 1.0,
        "disagreement": _disagreement(simulation),
        "schedule": simulation.schedule,
        "vpp": simulation.plan.vpp,
        "events": simulation.events,
        "distinct_prices": simulation.prices,
        "devices": devices(simulation, every_rank=every_rank),
        "critical_path": _critical_path(simulation),
        "memory": [_memory(simulation, stage) for stage in range(len(simulation.plan.stages))],
    }


def _disagreement(simulation: Simulation) -> dict[str, object] | None:
    both = disagreement(simulation)
    if both is None:
        return None
    return {
        "passes_s": both.passes_s,
        "waiting_s": both.waiting_s,
        "closed_stable_s": list(both.closed_stable_s),
        "played_stable_s": list(both.played_stable_s),
    }


def devices(simulation: Simulation, *, every_rank: bool) -> list[dict[str, object]]:
    """One entry per stage, or one per rank: ranks of a stage do the same at the same time."""
    documents = []
    for usage in simulation.usage:
        ranks = list(simulation.plan.ranks(usage.device))
        shares: Sequence[list[int]] = [[rank] for rank in ranks] if every_rank else [ranks]
        documents += [{"stage": usage.device, "ranks": share, **_usage(usage)} for share in shares]
    return documents


def _usage(usage: DeviceUsage) -> dict[str, object]:
    return {
        "utilisation": usage.utilisation,
        "exposed_compute_s": usage.exposed_compute_s,
        "exposed_communication_s": usage.exposed_communication_s,
        "overlapped_s": usage.overlapped_s,
        "host_s": usage.host_s,
        "idle_s": usage.idle_s,
        "busy_s": dict(zip(STREAM_NAMES, usage.busy_s, strict=True)),
    }


def _critical_path(simulation: Simulation) -> dict[str, object]:
    timeline, built = simulation.timeline, simulation.built
    return {
        "by_kind": [
            {"kind": share.name, "seconds": share.seconds, "events": share.events}
            for share in simulation.path_shares()
        ],
        "events": [
            {
                "name": timeline.program.name[event],
                "kind": built.kind[event],
                "stage": timeline.program.device[event],
                "start_s": float(timeline.start_s[event]),
                "end_s": float(timeline.end_s[event]),
            }
            for event in simulation.critical_path()
        ],
    }


def _memory(simulation: Simulation, stage: int) -> dict[str, object]:
    curve, predicted = simulation.memory[stage], simulation.prediction.stages[stage]
    moments = np.linspace(0.0, max(simulation.timeline.makespan_s, 1e-12), POINTS + 1)
    return {
        "stage": stage,
        "peak_bytes": curve.peak_bytes,
        # The plan's own schedule holds other micro-batches in flight than one that no plan can name.
        "predicted_peak_bytes": None if simulation.closed_form_s is None else predicted.peak_memory_bytes,
        "limit_bytes": predicted.limit_bytes,
        "fits": curve.peak_bytes <= predicted.limit_bytes,
        "in_flight": curve.in_flight,
        "at_s": moments[:-1].tolist(),
        "largest_bytes": curve.sampled(moments).tolist(),
    }
