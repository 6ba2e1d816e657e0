"""What really crosses the borders between stages on different meshes, for many pipelines of the same meshes.

Eq. 1 knows a stage alone, with its own side of its borders. `predict` knows both sides (`cost/borders.py`),
and so do climbs, which this tells what a stage's neighbours change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

import numpy as np

from mist_megatron.cost.borders import alike, crossing_seconds, handed_on_seconds, sent_and_handed_on
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid, StageRole, role_of
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.stage_prices import AXES, StageSlot, stage_grid
from mist_megatron.spec.mesh import lies_across
from mist_megatron.spec.term import Term

Seconds = tuple[float, float]
"""Of a stable micro-batch, and of its forward pass."""
NOTHING = (0.0, 0.0)


class Crossings:
    """Prices of borders, each asked for once."""

    def __init__(self, evaluator: StageEvaluator, meshes: Sequence[EqualPipeline]) -> None:
        self.evaluator, self.meshes = evaluator, meshes
        self.known = Term.PIPELINE_P2P not in evaluator.time_context.without and len(meshes) > 1
        """Whether there is anything to know."""
        self.beyond = cache(self._beyond)
        self._border, self._own = cache(self._border_s), cache(self._own_s)
        self._handed_on = cache(self._handed_on_s)

    def _beyond(self, which: tuple[int, ...]) -> tuple[Seconds, ...]:
        """Per stage of a pipeline on these meshes: what it takes beyond what it says alone."""
        per_node, ends = self.evaluator.job.cluster.gpus_per_node, [0]
        ends += accumulate(self.meshes[mesh].gpus for mesh in which)
        ranks = [range(begin, end) for begin, end in pairwise(ends)]
        across = [lies_across(one, other, per_node) for one, other in pairwise(ranks)]
        borders = [self._border(*pair, far) for pair, far in zip(pairwise(which), across, strict=True)]
        return tuple(self._of_stage(which, position, borders) for position in range(len(which)))

    def _of_stage(
        self, which: tuple[int, ...], position: int, borders: Sequence[tuple[float, bool]]
    ) -> Seconds:
        """As `exchanges_seconds` has it, less the stage's own side."""
        behind = borders[position] if position < len(borders) else None
        before = borders[position - 1] if position else None
        if all(border is None or border[1] for border in (behind, before)):
            return NOTHING
        mesh, role = which[position], role_of(position, len(which))
        there_s, back_s = (None if border is None else border[0] for border in (behind, before))
        forward_s, backward_s = sent_and_handed_on(there_s, back_s, self._handed_on(mesh))
        own_s, own_forward_s = self._own(mesh, role)
        return forward_s + backward_s - own_s, forward_s - own_forward_s

    def _border_s(self, mesh: int, other: int, across: bool) -> tuple[float, bool]:
        """What a border takes either way, and whether both sides are alike."""
        one, two = (self._grid(index, StageRole.MIDDLE) for index in (mesh, other))
        return crossing_seconds(one, two, self.evaluator, across=across), alike(one, two)

    def _handed_on_s(self, mesh: int) -> float:
        return handed_on_seconds(self._grid(mesh, StageRole.MIDDLE), self.evaluator)

    def _own_s(self, mesh: int, role: StageRole) -> Seconds:
        """A first stage hands on forward passes only, a last one backward passes only."""
        grid = self._grid(mesh, role)
        own_s = float(self.evaluator.terms(grid).stable[Term.PIPELINE_P2P].at(grid.layers, grid.ckpt))
        share = 0.0 if role is StageRole.LAST else 1.0 if role is StageRole.FIRST else 0.5
        return own_s, share * own_s

    def _grid(self, mesh: int, role: StageRole) -> StageGrid:
        """Some configuration on a mesh: what it sends does not depend on which."""
        shape, none = self.meshes[mesh], np.asarray(0.0)
        values = {**dict.fromkeys(AXES, none), "zero": np.asarray(float(shape.zero[0]))}
        grid = stage_grid(shape, StageSlot(role=role, layers=1, held=1.0), values, recompute="full")
        return replace(
            grid,
            layers=np.asarray(1.0),
            in_flight=np.asarray(1.0),
            micro_batch=np.asarray(float(shape.micro_batch)),
            dp=np.asarray(float(shape.dp)),
            tp=np.asarray(float(shape.tp)),
            grad_accum=np.asarray(float(shape.grad_accum)),
        )
