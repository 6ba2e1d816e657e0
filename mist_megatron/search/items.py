"""What is searched in each way of execution: shapes and mixed families, each list made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.context import HiddenRings, ring_of
from mist_megatron.search.families import MixedFamily, mixed_families
from mist_megatron.search.pipelines import EqualPipeline, Family, shapes
from mist_megatron.search.space import Limits, Space
from mist_megatron.search.ways import Way
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.plan import Execution


class ItemsOfWays:
    """Those of one search. Shapes follow from the space, the limits, and what of an execution has to do with
    ranks: not from how sequences are exchanged, nor from what is run again."""

    def __init__(
        self, ways: Sequence[Way], questions: Sequence[SearchProblem], tick: Callable[[], None]
    ) -> None:
        self._ways, self._questions, self._tick = ways, questions, tick
        self._rings = HiddenRings(ways, questions)
        self._made: dict[Execution, list[tuple[Space, Limits, list[EqualPipeline]]]] = {}

    def equal(self, place: int) -> list[EqualPipeline]:
        """Shapes of a way that no other way outdoes whatever they take."""
        way = self._ways[place]
        return self._rings.left(way, [shape for shape in self._every(place) if way.keeps(shape)])

    def _every(self, place: int) -> list[EqualPipeline]:
        job, space = self._questions[place].evaluator.job, self._questions[place].space
        limits = self._ways[place].limits
        made = self._made.setdefault(varied(ring_of(job.execution), recompute_modules=None), [])
        for other_space, other_limits, every in made:
            if other_space == space and other_limits == limits:
                return every
        every = []
        for shape in shapes(job, space, limits):
            self._tick()
            every.append(shape)
        made.append((space, limits, every))
        return every

    def spread(self, place: int, families: Sequence[Family]) -> list[Family]:
        """Of the families of a way those that no other way outdoes: where experts are is no matter to it."""
        hidden = self._rings.hidden(self._ways[place], [shape for shape, _ in families])
        return [family for family in families if family[0] not in hidden] if hidden else list(families)

    def mixed(self, place: int) -> list[MixedFamily]:
        """Families of stages on different meshes, where a way has them."""
        question, way = self._questions[place], self._ways[place]
        families = []
        for family in mixed_families(question.evaluator.job, question.space, way.limits) if way.mixes else ():
            self._tick()
            families.append(family)
        return families
