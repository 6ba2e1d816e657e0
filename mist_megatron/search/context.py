"""Shapes on which a ring of keys and values is hidden whole behind attention, so that no other exchange of
ranks that split sequences gains anything.

Where all of it is hidden the ring adds nothing to a pass, forward or backward. Every other exchange adds what
it sends, keeps no less, and changes nothing else: on the same shape it has no faster plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.layer_floors import Ranks, grids_of, ranks_of
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.ways import Way
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.plan import Execution


def ring_of(execution: Execution) -> Execution:
    """The same with the ring in place of another exchange."""
    return varied(execution, context_exchange=None, context_inner=None)


def _of_attention(execution: Execution) -> Execution:
    """What of an execution matters to attention and to what runs beside it."""
    same = varied(execution, recompute_modules=None, offload_modules=None, overlap_param_gather=None)
    return varied(same, expert_dispatcher=None, expert_overlap=None, shared_expert_overlap=None)


class HiddenRings:
    """What rings hide in the ways of one search."""

    def __init__(self, ways: Sequence[Way], questions: Sequence[SearchProblem]) -> None:
        self._rings = {
            question.evaluator.job.execution: (way, question)
            for way, question in zip(ways, questions, strict=True)
            if question.evaluator.job.execution.context_exchange in (None, "p2p")
        }
        self._hidden: dict[Execution, dict[Ranks, bool]] = {}
        self._of_lists: dict[object, tuple[Sequence[EqualPipeline], set[EqualPipeline]]] = {}
        """Of lists of shapes, which ways that differ in experts have the same of: these by the identity of
        their shapes, and so with them, since an identity is taken again by what comes after one is gone."""

    def left(self, way: Way, shapes: Sequence[EqualPipeline]) -> list[EqualPipeline]:
        """Of the shapes of a way those that the same way with a ring does not outdo."""
        hidden = self.hidden(way, shapes)
        return [shape for shape in shapes if shape not in hidden] if hidden else list(shapes)

    def hidden(self, way: Way, shapes: Sequence[EqualPipeline]) -> set[EqualPipeline]:
        """Of the shapes of a way those that the same way with a ring outdoes."""
        job = way.evaluator.job
        ring = ring_of(job.execution)
        found = self._rings.get(ring)
        if ring == job.execution or found is None or not job.model.alike or way.evaluator.groups:
            return set()
        other, question = found
        if other.limits != way.limits:
            return set()
        attention = _of_attention(ring)
        key = attention, other.keeps, tuple(map(id, shapes))
        if key not in self._of_lists:
            hidden = self._hidden.setdefault(attention, {})
            new = {ranks_of(shape) for shape in shapes} - hidden.keys()
            hidden.update(_hidden(question, new))
            outdone = {shape for shape in shapes if hidden.get(ranks_of(shape), False) and other.keeps(shape)}
            self._of_lists[key] = shapes, outdone
        return self._of_lists[key][1]


def _hidden(question: SearchProblem, ranks: set[Ranks]) -> dict[Ranks, bool]:
    """Whether attention hides all that a ring sends; of ranks that lie on no whole nodes nothing is said."""
    hidden: dict[Ranks, bool] = {}
    for members, grid in grids_of(question, ranks):
        blocks = question.evaluator.loads(grid).blocks
        each_s = [block.forward_context_s + block.backward_context_s for block in blocks]
        exposed_s = np.broadcast_to(sum(each_s, start=np.zeros(1)), (len(members),))
        hidden.update(zip(members, (exposed_s == 0.0).tolist(), strict=True))
    return hidden
