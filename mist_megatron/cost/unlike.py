"""What a stage has besides its layers where a model's layers differ in width, tokens or training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mist_megatron.cost.grid import Array, StageGrid
from mist_megatron.cost.terms import BoundarySide, LayerLoad
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.model import ModelSpec

Size = Callable[[str], Array]
"""Of a name among `symbolic.size_expressions`, its values."""


def with_tables(
    model: ModelSpec, blocks: Sequence[LayerLoad], role: StageRole, size: Size
) -> list[LayerLoad]:
    """A layer that looks tokens up in the embedding's table has a copy where its stage has no other use of
    it."""
    if role.has_embedding or (role.has_head and model.tied_embeddings):
        return list(blocks)
    return [
        replace(block, parameters=block.parameters + size(f"{kind.name}_table"))
        if kind.entry is not None and kind.entry.table == "shared"
        else block
        for kind, block in zip(model.kinds, blocks, strict=True)
    ]


def boundary_sides(model: ModelSpec, grid: StageGrid, size: Size) -> tuple[BoundarySide, ...]:
    """What the layer before the stage gives, and what its last layer does."""
    ends = [] if grid.before is None else [grid.before]
    ends += [grid.runs[-1][1]] if grid.runs and not grid.role.has_head else []
    kinds = [model.kinds[end] for end in ends]
    return tuple(BoundarySide(size(f"{kind.name}_given"), model.passes_back(kind)) for kind in kinds)
