"""What really crosses the borders between stages that differ: for `predict` and the events, which know both.

A stage alone is priced with its own side of a border (`step_time`), which is all there is where neighbours
are alike. Where they are not, what a rank has of a micro-batch goes to several ranks of the other side, or
comes from several, one part after another, and the side whose ranks move more parts makes both wait.

Over megatron-core's bridge one rank of each tensor-parallel group moves whole activations: of d data ranks
and k d, each of the d sends to k others or receives from them, in turn (bridge_communicator.py,
build_comm_map and send_forward). Without a bridge every rank of a stage takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.step_time import boundary_seconds, hop_seconds
from mist_megatron.spec.layout import hops_across
from mist_megatron.spec.plan import Plan

Border = tuple[int, int]
"""Two stages, the lower number first."""


def border_seconds(
    plan: Plan, grids: Sequence[StageGrid], evaluator: StageEvaluator
) -> dict[Border, tuple[float, float]]:
    """Activations to the next stage, and their gradients back, where two neighbours differ; what a bridge
    then hands on is not in it."""
    across = hops_across(plan)
    found = {}
    for left, (one, other) in enumerate(pairwise(grids)):
        if _alike(one, other):
            continue
        part_bytes = np.asarray(min(_moved_bytes(grid, evaluator) for grid in (one, other)))
        inside_s, across_s = hop_seconds(part_bytes, evaluator.time_context)
        hop_s = float(across_s if across[left, left + 1] else inside_s)
        found[left, left + 1] = parts_moved(one, other) * hop_s, parts_moved(other, one) * hop_s
    return found


def exchanges_seconds(
    plan: Plan, grids: Sequence[StageGrid], evaluator: StageEvaluator
) -> dict[int, tuple[float, float]]:
    """Per stage that differs from a neighbour: what it sends, forward and backward, and is handed on. A
    border to a neighbour that is alike is priced by the same rule."""
    borders = border_seconds(plan, grids, evaluator)
    across = hops_across(plan)
    found = {}
    for stage in sorted({stage for border in borders for stage in border}):
        (inside, beyond), handed_on = boundary_seconds(
            grids[stage], evaluator.loads(grids[stage]), evaluator.time_context
        )
        sent = [0.0, 0.0]
        for way, border in ((0, (stage, stage + 1)), (1, (stage - 1, stage))):
            if border[0] < 0 or border[1] == len(grids):
                continue
            usual_s = float(beyond if across[border] else inside)
            sent[way] = borders[border][way] if border in borders else usual_s
            # Forward it is handed what comes from the stage before.
            sent[1 - way] += float(handed_on)
        found[stage] = sent[0], sent[1]
    return found


def _alike(one: StageGrid, other: StageGrid) -> bool:
    """The same ranks of both sides see the same tokens."""
    return all(
        float(getattr(one, name)) == float(getattr(other, name)) for name in ("dp", "tp", "micro_batch")
    )


def _moved_bytes(grid: StageGrid, evaluator: StageEvaluator) -> float:
    """What one rank has to send of a micro-batch."""
    own_bytes = float(evaluator.loads(grid).boundary_bytes)
    return own_bytes * float(grid.tp) if grid.bridged and grid.sequence_parallel else own_bytes


def parts_moved(sender: StageGrid, receiver: StageGrid) -> float:
    """Parts that a rank of the busier side moves in turn."""
    ratio = float(sender.dp / receiver.dp)
    each = max(ratio, 1.0)
    if sender.bridged:
        return max(each, 1.0 / ratio)
    # Every rank that receives gets its micro-batch in so many parts, shared out among those that send.
    senders, receivers = float(sender.dp * sender.tp), float(receiver.dp * receiver.tp)
    return max(each, each * receivers / senders)
