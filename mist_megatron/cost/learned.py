"""Memory that a profile learned of a program, on top of what is computed of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mist_megatron.cost.grid import Array, StageGrid
from mist_megatron.spec.job import Job
from mist_megatron.spec.learned_memory import REACH, LearnedMemory

NEEDED = ("held", "term.activations", "term.framework", "term.buffers")
"""Sizes without which nothing can be added."""


def features_of(job: Job, grid: StageGrid) -> dict[str, Array]:
    """What it was learned from, of every configuration."""
    model, batch = job.model, float(job.training.global_batch)
    given = {
        "gpus": job.cluster.gpus,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "global_batch": batch,
    }
    pipelines = job.cluster.gpus / (grid.dp * grid.tp * float(job.execution.context_parallel))
    return {
        **{name: np.asarray(float(value)) for name, value in given.items()},
        "tensor_parallel": grid.tp,
        "pipeline_parallel": pipelines,
        "data_parallel": grid.dp,
        "stage_layers": model.layers / pipelines,
        "micro_batch": grid.micro_batch,
        "mini_batch": batch / grid.dp,
    }


def with_learned(
    sizes: Mapping[str, Array], learned: LearnedMemory, features: Mapping[str, Array]
) -> dict[str, Array]:
    """The same with what was learned, as a part that is held throughout. Where that is less than nothing the
    peak is still never below states and activations: these are a moment of their own."""
    more = learned_bytes(learned, features)
    least = sizes["term.activations"] - sizes["term.framework"] - sizes["term.buffers"] - more
    return {**sizes, "held": sizes["held"] + more, "term.learned": more, "beyond.states": least}


def learned_bytes(learned: LearnedMemory, sizes: Mapping[str, Array]) -> Array:
    """Beyond what is computed; below 0 where that is too much."""
    total: Array = np.asarray(learned.constant_bytes)
    for feature, slope in learned.slopes_bytes.items():
        low, high = learned.ranges[feature]
        doublings = np.log2(np.minimum(np.maximum(sizes[feature], low / 2**REACH), high * 2**REACH))
        total = total + slope * doublings
    return total
