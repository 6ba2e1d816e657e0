"""The first and the last chunk of an interleaved stage: what each takes of a stable micro-batch.

The first chunk of the first stage has the embedding, the last chunk of the last stage the head, and these may
have fewer layers than others. What is neither of layers nor of embedding or head is shared out among chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.iteration import ChunkEnds
from mist_megatron.cost.sends import mean_hop_s, waits_of_own_s
from mist_megatron.cost.terms import ZERO, Linear
from mist_megatron.cost.work import StageWork
from mist_megatron.price.prices import Array
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.term import Term

OF_EDGES = (Term.EMBEDDING, Term.HEAD, Term.GRADIENT_ACCUMULATION)
"""Terms of t whose fixed part is of embedding and head."""


def edges_s(stable: Mapping[Term, Linear]) -> Array:
    """What embedding and head take of t; stages with chunks have one of them at most."""
    return sum((stable[name].fixed for name in OF_EDGES if name in stable), start=ZERO)


def ends_of(grid: StageGrid, whole: Linear, edge_s: Array, beyond_s: Array) -> tuple[Array, Array]:
    """The first and the last chunk's times; `whole` is t, of which embedding or head take `edge_s`, and
    `beyond_s` what it lacks."""
    shared_s = (whole.fixed - edge_s + beyond_s) / grid.vpp
    if grid.end_chunks:
        layers = replace(whole, fixed=ZERO)
        first_s, last_s = (layers.at(replace(grid, counts=counts)) for counts in grid.end_chunks)
    else:
        first_s = last_s = (whole.at(grid) - whole.fixed) / grid.vpp
    first_s, last_s = first_s + shared_s, last_s + shared_s
    return (
        first_s + edge_s if grid.role.has_embedding else first_s,
        last_s + edge_s if grid.role.has_head else last_s,
    )


@dataclass(frozen=True)
class ChunkParts:
    """A stage's first and last chunk, there and back."""

    first_s: float
    last_s: float
    edge_s: tuple[float, float] = (0.0, 0.0)
    """Of embedding or head, there and in all."""
    round_s: float = 0.0
    """A micro-batch's sends on its way through all stages."""
    role: StageRole = StageRole.MIDDLE
    sent_s: float = 0.0
    """What sends add to t."""
    own_s: float = 0.0
    """Of `round_s` what is no part of d: a stage waits for what its own passes leave of it."""

    def ends(self, stable_s: float, forward_s: float) -> ChunkEnds:
        """Of a stage with this t and this part of it that is forward: layers share that out alike."""
        edge_forward_s, edge_s = self.edge_s
        own_forward_s, own_s = self.edge_s if self.role.has_embedding else (0.0, 0.0)
        of_others_s = stable_s - edge_s
        share = (self.first_s - own_s) / of_others_s if of_others_s > 0.0 else 0.0
        there_s = own_forward_s + share * (forward_s - edge_forward_s)
        return ChunkEnds(
            first_s=(there_s, self.first_s - there_s),
            last_s=self.last_s,
            round_s=self.round_s,
            sent_s=self.sent_s,
            own_s=self.own_s,
        )


def chunk_parts(
    work: StageWork, whole: Linear, stable: Mapping[Term, Linear], beyond_s: Array
) -> ChunkParts | None:
    """Of one configuration; None of a stage without chunks."""
    grid, loads = work.grid, work.loads
    if not grid.interleaved:
        return None
    edge_s = edges_s(stable)
    first_s, last_s = ends_of(grid, whole, edge_s, beyond_s)
    edge = loads.embedding or loads.head
    there_s = ZERO if edge is None else edge.forward_s + edge.forward_collective_s
    sent = Term.PIPELINE_P2P not in work.context.without
    hop_s = mean_hop_s(work) if sent else ZERO
    both_s = there_s.item(), edge_s.item()
    sent_s = stable.get(Term.PIPELINE_P2P, Linear()).at(grid).item()
    round_s, own_s = ((grid.stages * one).item() for one in (hop_s, waits_of_own_s(work, hop_s)))
    return ChunkParts(first_s.item(), last_s.item(), both_s, round_s, grid.role, sent_s, own_s)
