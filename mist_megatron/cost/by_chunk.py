"""What reductions of interleaved stages add to d: those of a chunk begin with its last backward pass.

From one chunk to the next a stage has as many passes as there are stages, or a micro-batch goes round all of
them, beside which the chunk's reductions run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mist_megatron.cost.terms import ZERO
from mist_megatron.cost.work import LayerWork, StageWork
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.price.prices import Array


@dataclass(frozen=True)
class Round:
    """What is there between two chunks beside the compute of passes, as a layer's share."""

    work: StageWork
    beside_s: Array
    """Sends and host work, of one pass."""
    on_link_s: Array
    """A send, as far as it goes over links that reductions go over too."""

    @classmethod
    def of(cls, work: StageWork, hop_s: Array, on_link_s: Array) -> Round:
        """Of a stage whose boundaries take so long on average."""
        share = work.grid.vpp * work.grid.stages / work.context.model_layers
        return cls(work, (hop_s + work.host_s / (2.0 * work.grid.vpp)) * share, on_link_s)

    def hidden_s(self, moved_s: Array, compute_s: Array, tensor_s: Array) -> Array:
        """What a layer's collective adds to as many passes over it as there are stages."""
        count, factors = self.work.grid.stages, self.work.context.interference
        alone_s = np.maximum(moved_s - count * self.beside_s, 0.0)
        computed_s, then_s = count * compute_s, count * tensor_s
        return overlapped_time((computed_s, alone_s, ZERO, ZERO), factors, then_s) - computed_s - then_s

    def reduced_s(self, layer: LayerWork) -> Array:
        """Of the chunk that ends the iteration all of it, of the others what is not hidden. Over links that
        sends go over too, a reduction has what these leave, and the last micro-batch's sends are slowed."""
        chunks, count, sent_s = self.work.grid.vpp, self.work.grid.stages, self.on_link_s
        last = layer.last
        exposed_s = self.hidden_s(last.reduce_s, last.compute_s, last.tensor_s)
        passes_s = count * (last.compute_s + last.tensor_s)
        on_link_s = last.reduce_s + count * sent_s - np.maximum(passes_s, count * sent_s)
        slowed_s = np.minimum(count * sent_s, last.reduce_s)
        shared_s = np.where(sent_s > 0.0, np.maximum(on_link_s, slowed_s), 0.0)
        return np.asanyarray((last.reduce_s + (chunks - 1) * np.maximum(exposed_s, shared_s)) / chunks)
