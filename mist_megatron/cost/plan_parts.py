"""Layers with strategies of their own, from a plan to the evaluator's grid."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from mist_megatron.cost.grid import Array, LayerCount, StagePart
from mist_megatron.cost.placed import placed_layout
from mist_megatron.spec.plan import Plan


def parts_of(plan: Plan, position: int) -> dict[str, Any]:
    """Runs of layers of one kind and strategy, where layers have strategies of their own."""
    stage, of_layer = plan.stages[position], plan.model.kind_of_layer
    first = plan.layers_of(position)[0].start
    each = [(of_layer[first + k], strategy) for k, strategy in enumerate(stage.layer_strategies)]
    parts = tuple(
        StagePart(
            kind=kind,
            layers=_one(len(list(run))),
            again=strategy.ckpt,
            micro_batch=_one(stage.micro_batch * stage.dp // strategy.layout.dp),
            dp=_one(strategy.layout.dp),
            tp=_one(strategy.layout.tp),
            zero=_one(strategy.zero),
            layout=strategy.layout,
            placed=placed_layout(plan.cluster, plan.gpu_of, plan.ranks(position), strategy.layout),
        )
        for (kind, strategy), run in groupby(each)
    )
    counts = tuple(LayerCount(part.layers, _one(0)) for part in parts)
    return {"parts": parts, "counts": counts, "ckpt": _one(0), "runs": ((0, len(parts) - 1),)}


def _one(value: int) -> Array:
    return np.asarray(float(value))
