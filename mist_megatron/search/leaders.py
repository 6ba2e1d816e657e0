"""Floors of many ways of execution at once: of those that differ in switches that only gain time, the one
that has all of them set is a floor of the others, which are looked at when it is no more than what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.execution import Kept
from mist_megatron.search.known import together_gains
from mist_megatron.search.pipelines import EqualPipeline, Family, families
from mist_megatron.search.space import Limits
from mist_megatron.search.spread import Floors, SpreadShapes
from mist_megatron.search.ways import Way, every
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.plan import Execution

GAIN = ("tp_comm_overlap", "overlap_param_gather", "expert_overlap", "cuda_graphs")
"""Switches of execution that take memory and never time, where a shape may have them."""


class Led(NamedTuple):
    """What the leader of a way tells."""

    computed_s: float
    """Seconds that no plan of the way beats, ..."""
    least_s: Callable[[], float]
    """... and more such seconds, which take longer to tell."""
    floors: Floors


class _Ends:
    """Shapes that tell of each of some families whether any is searched; each rule is asked once of all."""

    def __init__(self, ends: Sequence[Sequence[EqualPipeline]]) -> None:
        self._every = [shape for each in ends for shape in each]
        self._starts = np.cumsum([0, *map(len, ends)])[:-1]
        self._out: dict[object, NDArray[np.bool_]] = {}

    def left(self, keeps: Callable[[EqualPipeline], bool]) -> list[bool]:
        """By family."""
        if not self._every:
            return []
        if not isinstance(keeps, Kept):
            out = np.array([not keeps(shape) for shape in self._every])
        else:
            out = np.zeros(len(self._every), dtype=bool)
            for name, rules_out in keeps.rules_out.items():
                if name not in self._out:
                    self._out[name] = np.array([rules_out(shape) for shape in self._every])
                out |= self._out[name]
        left: list[bool] = np.logical_or.reduceat(~out, self._starts).tolist()
        return left


class Leaders:
    """Shapes of ways, and seconds that no plan of a way beats."""

    def __init__(self, ways: Sequence[Way], questions: Sequence[SearchProblem]) -> None:
        self._pairs = list(zip(ways, questions, strict=True))
        self._families: dict[object, list[Family]] = {}
        self._of_way: dict[int, list[Family]] = {}
        self._contained: dict[tuple[int, int], bool] = {}
        groups: dict[object, list[int]] = {}
        for place, (_, question) in enumerate(self._pairs):
            execution = question.evaluator.job.execution
            exchange = execution.context_exchange, execution.context_inner
            groups.setdefault((_alike(execution), exchange), []).append(place)
        self._leader: dict[int, int] = {}
        self._widest: dict[int, int] = {}
        for members in groups.values():
            leader = max(members, key=lambda member: len(_gains(self._execution(member))))
            widest = max(members, key=lambda member: len(self.families(member)))
            self._leader.update(dict.fromkeys(members, leader))
            self._widest.update(dict.fromkeys(members, widest))
        self._spread: dict[tuple[int, int, bool], SpreadShapes] = {}
        self._of_shapes = Floors()
        self._least_s: dict[object, float] = {}
        self._kept: dict[object, list[Family]] = {}
        self._ends: dict[int, list[EqualPipeline]] = {}
        self._ends_of_lists: dict[tuple[int, ...], _Ends] = {}

    def _execution(self, place: int) -> Execution:
        return self._pairs[place][1].evaluator.job.execution

    def families(self, place: int) -> list[Family]:
        """Shapes of a way; made once for those that have the same."""
        if place not in self._of_way:
            way, question = self._pairs[place]
            execution, limits = self._execution(place), way.limits
            key = _shaping(execution), _sizes(limits)
            if key not in self._families:
                self._families[key] = list(families(question.evaluator.job, question.space, limits))
            self._of_way[place] = self._families[key]
        return self._of_way[place]

    def told(self, place: int) -> Led:
        """Of a way, for its queue."""
        return Led(self.floor_s(place, computed=True), partial(self.floor_s, place), self._of_shapes)

    def floor_s(self, place: int, *, computed: bool = False) -> float:
        """Seconds that no plan of a way beats; 0 where none of the others tells. Of what is computed alone
        they are sooner told."""
        leader, widest = self._leader[place], self._widest[place]
        gains = together_gains(self._pairs[leader][1].evaluator)
        if not gains or not _gains(self._execution(place)) <= _gains(self._execution(leader)):
            return 0.0
        own, most = self.families(place), self.families(widest)
        lists = id(own), id(most)
        if lists not in self._contained:
            self._contained[lists] = own is most or set(own) <= set(most)
        if not self._contained[lists]:
            return 0.0
        led = leader, widest, computed
        if led not in self._spread:
            question = self._pairs[leader][1]
            self._spread[led] = SpreadShapes(question, most, every, known=self._of_shapes, computed=computed)
        searched = self._pairs[place][0].keeps
        key = led, searched, id(own)
        if key not in self._least_s:
            kept = [shape for shape, _ in self.kept(place, own)]
            self._least_s[key] = self._spread[led].least_s(searched, kept)
        return self._least_s[key]

    def kept(self, place: int, some: Sequence[Family]) -> list[Family]:
        """Of these families of a way those of which any spread is searched in it."""
        keeps, ids = self._pairs[place][0].keeps, tuple(map(id, some))
        key = keeps, ids
        if key not in self._kept:
            if ids not in self._ends_of_lists:
                self._ends_of_lists[ids] = _Ends([self._ends_of(family) for family in some])
            left = self._ends_of_lists[ids].left(keeps)
            self._kept[key] = [family for family, is_left in zip(some, left, strict=True) if is_left]
        return self._kept[key]

    def _ends_of(self, family: Family) -> list[EqualPipeline]:
        """Of its shapes those that tell whether any is searched: spread over most ranks, or the fewest."""
        if id(family) not in self._ends:
            shape, spreads = family
            others = {min(spreads), max(spreads)} - {(shape.ep, shape.etp)}
            self._ends[id(family)] = [shape, *(varied(shape, ep=ep, etp=etp) for ep, etp in others)]
        return self._ends[id(family)]


def _alike(execution: Execution) -> object:
    shared, sharded = execution.shared_expert_overlap, execution.megatron_fsdp
    spread = execution.context_parallel, execution.dispatcher, execution.ep, execution.etp
    return *spread, shared, sharded, execution.outer_sharding


def _shaping(execution: Execution) -> object:
    """What of ways of one search shapes follow from: of dispatchers `flex` alone has rules of its own about
    spreads (`spec/expert_rules.py`)."""
    spread = execution.context_parallel, execution.dispatcher == "flex", execution.ep, execution.etp
    return *spread, execution.tp_comm_overlap, execution.megatron_fsdp, execution.outer_sharding


def _sizes(limits: Limits) -> object:
    return frozenset(limits.fixed.items()), frozenset(limits.most.items()), limits.forbidden


def _gains(execution: Execution) -> set[str]:
    return {name for name in GAIN if getattr(execution, name)}
