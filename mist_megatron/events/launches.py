"""Where gathers of updated weights begin that run ahead of a chunk's first forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from mist_megatron.events.tasks import NamedLayer, Workload
from mist_megatron.spec.passes import Pass, PassKind


def launches(work: Workload, orders: Sequence[Sequence[Pass]]) -> list[dict[int, list[int]]]:
    """By stage: place in its order -> chunks whose gathers of updated weights begin there, on all stages at
    the same time.

    `forward_backward_pipelining_with_interleaving` of megatron-core 0.19 starts those of the first two chunks
    when the step begins; those of any other as many forward passes before the first one of the chunk before
    it as the stage has stages before it (`param_sync_func`, which Megatron's training.py sets unless it is
    given --no-align-param-gather).
    """
    chunks = len(work.stages[0].chunks) if work.gathers_by_chunk else 0
    return [_of_stage(order, before, chunks) for before, order in enumerate(orders)]


def _of_stage(order: Sequence[Pass], before: int, chunks: int) -> dict[int, list[int]]:
    places = [place for place, step in enumerate(order) if step.kind is PassKind.FORWARD]
    first = {order[place].chunk: k for k, place in enumerate(places) if order[place].micro_batch == 0}
    gathers = {places[0]: list(range(min(2, chunks)))}
    for chunk in range(2, chunks):
        earlier = first[chunk - 1] - before
        if earlier >= 0:
            gathers.setdefault(places[earlier], []).append(chunk)
    return gathers


def waited_for(layers: Sequence[NamedLayer], gathers: Sequence[int], *, bucketed: bool) -> dict[str, int]:
    """Which gather each layer of a chunk waits for: its own; of one bucket the last."""
    return {
        layer.name: gather if bucketed else gathers[-1] for layer, gather in zip(layers, gathers, strict=True)
    }
