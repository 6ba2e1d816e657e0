"""What collectives of interleaved stages add to d: a chunk's reductions begin with its last backward pass,
and its weights are gathered while the chunk before it begins.

From one chunk to the next a stage has as many passes as there are stages, or a micro-batch goes round all of
them, beside which a chunk's collectives run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.sends import layers_of_most, mean_hop_s, sent_beside_reductions
from mist_megatron.cost.terms import ZERO, Linear, of_kind
from mist_megatron.cost.traffic import gathers_by_chunk
from mist_megatron.cost.work import BlockWork, LayerWork, PassWork, StageWork
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.price.prices import Array


def gathered_apart(work: StageWork, place: int) -> BlockWork:
    """Layers of the kind at that place; those of chunks find their weights in their first pass, and
    `Round.gathered_s` says what they wait for."""
    block = work.blocks[place]
    if not gathers_by_chunk(work.grid, work.context.facts):
        return block

    def there(layer: LayerWork) -> LayerWork:
        return replace(layer, first=replace(layer.first, gather_s=layer.forward.gather_s))

    kept = there(block.kept)
    whole = kept if block.recomputed is block.kept else there(block.recomputed)
    return BlockWork(kept=kept, recomputed=whole)


@dataclass(frozen=True)
class Round:
    """What is there between two chunks beside the compute of passes, as a layer's share."""

    work: StageWork
    beside_s: Array
    """Sends and host work, of one pass."""
    on_link_s: Array
    """A send, as far as it goes over links that reductions go over too."""

    @classmethod
    def of(cls, work: StageWork) -> Round:
        """Of a stage whose boundaries take as long as they do on average."""
        share = work.grid.vpp / layers_of_most(work)
        beside_s = (mean_hop_s(work) + work.host_s / (2.0 * work.grid.vpp)) * share
        return cls(work, beside_s, sent_beside_reductions(work))

    def hidden_s(self, moved_s: Array, compute_s: Array, tensor_s: Array) -> Array:
        """What a layer's collective adds to as many passes over it as there are stages."""
        count, factors = self.work.grid.stages, self.work.context.interference
        alone_s = np.maximum(moved_s - count * self.beside_s, 0.0)
        computed_s, then_s = count * compute_s, count * tensor_s
        return overlapped_time((computed_s, alone_s, ZERO, ZERO), factors, then_s) - computed_s - then_s

    def reduced_s(self, layer: LayerWork) -> Array:
        """Of the chunk that ends the iteration all of it, of the others what is not hidden."""
        chunks, last = self.work.grid.vpp, layer.last
        exposed_s, shared_s, slowed_s = self._of_a_round_s(last.reduce_s, last)
        each_s = np.maximum(exposed_s + slowed_s, shared_s)
        return np.asarray((last.reduce_s + (chunks - 1) * each_s) / chunks)

    def gathered_s(self, layer: LayerWork, place: int) -> Linear:
        """Of the chunk that begins the iteration all of it, of the others what is not hidden. The very first
        pass of all begins when its first layer is there, others when their chunk is."""
        work, first = self.work, layer.first
        chunks, factors = work.grid.vpp, work.context.interference
        exposed_s, shared_s, slowed_s = self._of_a_round_s(first.gather_s, layer.forward)
        # The one micro-batch that goes round waits for both.
        others_s = (chunks - 1) * np.maximum(exposed_s + slowed_s, shared_s) / chunks
        if not work.grid.role.has_embedding:
            return of_kind(place, first.gather_s / chunks + others_s)
        beside_s = overlapped_time((layer.forward.compute_s, first.gather_s, ZERO, ZERO), factors)
        inside_s = beside_s - layer.forward.compute_s
        begins = place == (work.grid.runs[0][0] if work.grid.runs else 0)
        begun = Linear(first.gather_s - inside_s) if begins else Linear()
        return begun + of_kind(place, inside_s / chunks + others_s)

    def _of_a_round_s(self, moved_s: Array, passes: PassWork) -> tuple[Array, Array, Array]:
        """What a layer's collective adds to a round: to its compute; over links that sends go over too, of
        which it has what these leave; and to the sends of the one micro-batch that goes round."""
        count, sent_s = self.work.grid.stages, self.on_link_s
        exposed_s = self.hidden_s(moved_s, passes.compute_s, passes.tensor_s)
        passes_s = count * (passes.compute_s + passes.tensor_s)
        on_link_s = moved_s + count * sent_s - np.maximum(passes_s, count * sent_s)
        return exposed_s, np.where(sent_s > 0.0, on_link_s, 0.0), np.minimum(count * sent_s, moved_s)
