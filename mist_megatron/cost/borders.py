"""What really crosses the borders between stages that differ: for `predict`, the events and climbs of a
search, which know both sides.

A stage alone is priced with its own side of a border (`sends`), which is all there is where neighbours
are alike. Where they are not, what a rank has of a micro-batch goes to several ranks of the other side, or
comes from several, one part after another, and the side whose ranks move more parts makes both wait.

Activations and the gradients of others cross a border at once, posted together, and neither side goes on
before both are through (megatron-core's p2p_communication.py, batch_isend_irecv and the waits after it). So
a border costs both its stages the longer of the two ways. Nor could it cost the receiver less: what arrives
for a rank in parts arrives over one link, and from both neighbours of a stage over the same.

Over megatron-core's bridge one rank of each tensor-parallel group moves whole activations: of d data ranks
and k d, each of the d sends to k others or receives from them, in turn (bridge_communicator.py,
build_comm_map and send_forward). Without a bridge every rank of a stage takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mist_megatron.cost.boundary import boundary_work, hop_seconds, sent_by_rank
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.layerwise import ended
from mist_megatron.cost.placed import Spans, send_seconds
from mist_megatron.cost.turning import leaving_s
from mist_megatron.spec.interleaved import passes_ahead
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.term import Term

Border = tuple[int, int]
"""Two stages, the lower number first."""


def border_seconds(
    plan: Plan, grids: Sequence[StageGrid], evaluator: StageEvaluator
) -> dict[Border, tuple[float, float]]:
    """Activations to the next stage, and their gradients back, where two neighbours differ; what a bridge
    then hands on is not in it."""
    across = plan.hops_across()
    by_border = {}
    for left, (one, other) in enumerate(pairwise(grids)):
        one = ended(one)
        if not alike(one, other):
            spans = _spans_of(one, behind=True)
            seconds = crossing_seconds(one, other, evaluator, across=across[left, left + 1], spans=spans)
            by_border[left, left + 1] = seconds, seconds
        elif not plan.model.alike:
            by_border[left, left + 1] = _side_seconds(one, evaluator, across=across[left, left + 1])
        elif one.placed is not None:
            by_border[left, left + 1] = _sent_seconds((one, other), one.placed.after, evaluator)
    last, first = grids[-1], grids[0]
    if plan.vpp > 1 and last.placed is not None:
        by_border[0, len(grids) - 1] = _sent_seconds((last, first), last.placed.after, evaluator)
    return by_border


def _side_seconds(one: StageGrid, evaluator: StageEvaluator, *, across: bool) -> tuple[float, float]:
    """Forward and backward over the boundary behind a stage, of what its last layer gives."""
    own = evaluator.of(one)
    side = own.loads(one).sides[-1]
    seconds: float = hop_seconds(side.sent_bytes, own.time_context)[1 if across else 0].item()
    return seconds, seconds * side.returns


def border_sends(stages: int, chunks: int, micro_batches: int, border: Border) -> int:
    """Messages that a border of an interleaved schedule carries one after another, there and back at once:
    those of all chunks, behind those of the forward passes before the first gradient comes back. From the
    last stage to the first all but the last chunk go, in bursts of as many as there are stages."""
    first, last = border
    if last - first > 1 or stages == 2:
        return (chunks - 1) * (micro_batches + micro_batches // stages) + stages
    passes = micro_batches * chunks
    return passes + passes_ahead(stages - 1 - first, stages, passes, chunks) + 1


def slowest_border_s(plan: Plan, grids: Sequence[StageGrid], evaluator: StageEvaluator) -> float:
    """What the busiest link of an interleaved schedule carries in a step; 0 where borders are alike, which
    terms of stages tell. They know a mean border only."""
    if plan.vpp == 1 or Term.PIPELINE_P2P in evaluator.time_context.without:
        return 0.0
    if grids[0].placed is None and len(set(plan.hops_across().values())) == 1:
        return 0.0
    stages = len(grids)
    borders = [*pairwise(range(stages)), (0, stages - 1)]
    return max(busy_border_s(plan, grids, evaluator, border) for border in borders)


def busiest_link_s(
    plan: Plan, grids: Sequence[StageGrid], evaluator: StageEvaluator, behind_s: Sequence[float]
) -> float:
    """What the link that carries most in a step of an interleaved schedule carries, between stages or to host
    memory. Of each stage those behind it take so long for a chunk: copies of a stage wait for none of them,
    and its backward passes have their input when the last copies have gone."""
    carried_s = slowest_border_s(plan, grids, evaluator)
    if plan.vpp == 1 or not plan.execution.offload_modules:
        return carried_s
    for grid, others_s in zip(grids, behind_s, strict=True):
        sent_s = leaving_s(evaluator.work(grid), plan.grad_accum, len(grids)).item()
        carried_s = max(carried_s, sent_s - others_s)
    return carried_s


def busy_border_s(plan: Plan, grids: Sequence[StageGrid], evaluator: StageEvaluator, border: Border) -> float:
    """The same of one border; of two stages, or where sends stop compute, terms of stages tell all."""
    stages, pipeline = len(grids), evaluator.time_context.facts.pipeline
    if plan.vpp == 1 or stages == 2 or not pipeline.sends_overlap_when_interleaved:
        return 0.0
    left, right = border
    wraps = right - left > 1
    placed = grids[right if wraps else left].placed
    both = (grids[right], grids[left]) if wraps else (grids[left], grids[right])
    if placed is None:
        seconds = crossing_seconds(*both, evaluator, across=plan.hops_across()[border])
    else:
        seconds, _ = _sent_seconds(both, placed.after, evaluator)
    return seconds * border_sends(stages, plan.vpp, plan.grad_accum, border)


def _sent_seconds(
    both: tuple[StageGrid, StageGrid], spans: Spans, evaluator: StageEvaluator
) -> tuple[float, float]:
    """Forward and backward, between stages that are alike, as long as the slower of both sends."""
    prices = evaluator.time_context.prices
    sizes = [np.asanyarray(_moved_bytes(grid, evaluator)) for grid in both]
    seconds = max(send_seconds(size, spans, prices).item() for size in sizes)
    return seconds, seconds


def _spans_of(grid: StageGrid, *, behind: bool) -> Spans:
    """Of the sends to the stage behind or before; empty where their numbers say it all."""
    if grid.placed is None:
        return ()
    return grid.placed.after if behind else grid.placed.before


def exchanges_seconds(
    plan: Plan, grids: Sequence[StageGrid], evaluator: StageEvaluator
) -> dict[int, tuple[float, float]]:
    """Per stage that differs from a neighbour: what it sends, forward and backward, and is handed on. A
    border to a neighbour that is alike is priced by the same rule."""
    across, last = plan.hops_across(), len(grids) - 1
    seconds = {}
    for stage, grid in enumerate(grids):
        borders = [
            (
                grids[other] if other > stage else ended(grids[other]),
                across[min(stage, other), max(stage, other)],
                _spans_of(grid, behind=other > stage),
            )
            if 0 <= other <= last
            else None
            for other in (stage + 1, stage - 1)
        ]
        own = ended(grid), grid
        differs = [border is not None and (grid.parts or not alike(grid, border[0])) for border in borders]
        if any(differs):
            there, back = (
                None
                if border is None
                else crossing_seconds(mine, border[0], evaluator, across=border[1], spans=border[2])
                for mine, border in zip(own, borders, strict=True)
            )
            seconds[stage] = sent_and_handed_on(there, back, handed_on_seconds(grid, evaluator))
    return seconds


def sent_and_handed_on(
    there_s: float | None, back_s: float | None, handed_on_s: float
) -> tuple[float, float]:
    """Of forward and of backward passes, from the borders behind a stage and before it, if there are."""
    # Forward it is handed what comes from the stage before.
    forward_s = (there_s or 0.0) + (0.0 if back_s is None else handed_on_s)
    return forward_s, (back_s or 0.0) + (0.0 if there_s is None else handed_on_s)


def alike(one: StageGrid, other: StageGrid) -> bool:
    """The same ranks of both sides see the same tokens, on nodes of one kind."""
    return one.group == other.group and all(
        float(getattr(one, name)) == float(getattr(other, name)) for name in ("dp", "tp", "micro_batch")
    )


def crossing_seconds(
    one: StageGrid, other: StageGrid, evaluator: StageEvaluator, *, across: bool, spans: Spans = ()
) -> float:
    """How long a border makes both its stages stand still, once per micro-batch on its way there and once on
    its way back."""
    part_bytes = np.asanyarray(min(_moved_bytes(grid, evaluator) for grid in (one, other)))
    hops_s = []
    # Of nodes of two kinds the slower side decides.
    for context in (evaluator.of(grid).time_context for grid in (one, other)):
        if spans:
            hops_s.append(send_seconds(part_bytes, spans, context.prices).item())
        else:
            hops_s.append(hop_seconds(part_bytes, context)[1 if across else 0].item())
    seconds: float = max(parts_moved(one, other), parts_moved(other, one)) * max(hops_s)
    return seconds


def handed_on_seconds(grid: StageGrid, evaluator: StageEvaluator) -> float:
    """What a bridge hands on in a tensor-parallel group, of one tensor."""
    own = evaluator.of(grid)
    seconds: float = boundary_work(grid, own.loads(grid), own.time_context).handed_on_s.item()
    return seconds


def _moved_bytes(grid: StageGrid, evaluator: StageEvaluator) -> float:
    """What one rank has to send of a micro-batch."""
    own = evaluator.of(grid)
    sent: float = sent_by_rank(grid, own.loads(grid).boundary_bytes, own.time_context).item()
    return sent


def parts_moved(sender: StageGrid, receiver: StageGrid) -> float:
    """Parts that a rank of the busier side moves in turn."""
    ratio: float = (sender.dp / receiver.dp).item()
    each = max(ratio, 1.0)
    if sender.bridged:
        return max(each, 1.0 / ratio)
    # Every rank that receives gets its micro-batch in so many parts, shared out among those that send.
    senders, receivers = (sender.dp * sender.tp).item(), (receiver.dp * receiver.tp).item()
    return max(each, each * receivers / senders)
