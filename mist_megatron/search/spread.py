"""Shapes of models with experts, of which there are too many to look at each: bounds of all at once.

A family is a shape with every spread of its experts. What one micro-batch takes on all stages together, and
on the slowest one at least, follows from the time of one layer of each kind, which few numbers decide. Shapes
are made from their families when their bound is the least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import LayerCount, StageGrid
from mist_megatron.cost.terms import NO_SLOPE, LayerLoad
from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.choices import Array, Ints
from mist_megatron.search.pipelines import EqualPipeline, Family
from mist_megatron.search.spread_rows import SpreadRows
from mist_megatron.search.stage_prices import Times
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.kinds import alike
from mist_megatron.spec.mesh import StageRole

Rival = tuple[StageEvaluator, StageEvaluator]
"""Prices of a way of execution, and of the same with another dispatcher."""
PIECES = (
    "forward_collective_s",
    "backward_collective_s",
    "forward_exchange_s",
    "backward_exchange_s",
    "forward_inside_s",
    "backward_inside_s",
    "weight_grad_s",
)
"""Of a layer's load, what more of never makes a step shorter, as is compute that is not done inside."""


def _outdone(rivals: Sequence[Rival], grid: StageGrid) -> NDArray[np.bool_]:
    """Whether the other dispatcher is as fast in every piece of every layer, and holds the same. A last stage
    has all that other roles have of these pieces."""
    outdone, last = np.ones(len(grid.tp), dtype=bool), replace(grid, role=StageRole.LAST)
    for own, other in rivals:
        if own.stage.memory != other.stage.memory:
            return np.zeros(len(grid.tp), dtype=bool)
        loads = [evaluator.loads(last) for evaluator in (own, other)]
        for mine, theirs in zip(*([*load.blocks, load.head] for load in loads), strict=True):
            if mine is not None and theirs is not None:
                outdone &= _no_less(mine, theirs)
    return outdone


def _no_less(mine: LayerLoad, theirs: LayerLoad) -> NDArray[np.bool_]:
    pairs = [(getattr(mine, name), getattr(theirs, name)) for name in PIECES]
    for name in ("forward", "backward"):
        alone = [getattr(load, f"{name}_s") - getattr(load, f"{name}_inside_s") for load in (mine, theirs)]
        pairs.append((alone[0], alone[1]))
    no_less = [np.asarray(two <= one * (1.0 + 1e-12) + 1e-15) for one, two in pairs]
    return np.asarray(np.logical_and.reduce(np.broadcast_arrays(*no_less)))


MANY = 1e9
"""Micro-batches, so many that the first and the last do not count."""


class Floors:
    """What ways of one search share: rows of families, by the identity of these, which are kept with them;
    and floors of ways that differ in what is run again, which no floor counts."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, ...], tuple[Sequence[Family], SpreadRows]] = {}
        self._ordered: dict[object, tuple[Array, Ints]] = {}

    def rows(self, families: Sequence[Family]) -> SpreadRows:
        """Of some families."""
        ids = tuple(map(id, families))
        if ids not in self._rows:
            self._rows[ids] = families, SpreadRows(families)
        return self._rows[ids][1]

    def ordered(
        self, question: SearchProblem, spread: SpreadRows, rivals: Sequence[Rival], *, computed: bool
    ) -> tuple[Array, Ints]:
        """Floors of rows, the least first, and whose they are; what has none is left out."""
        execution = varied(question.evaluator.job.execution, recompute_modules=None)
        held = tuple(own.stage.memory == other.stage.memory for own, other in rivals)
        key = computed, execution, id(spread), held
        if key not in self._ordered:
            floors_s = _computed(question, spread) if computed else _floors(question, spread, rivals)
            order = np.argsort(floors_s, kind="stable")[: int(np.isfinite(floors_s).sum())]
            self._ordered[key] = floors_s[order], order
        return self._ordered[key]


class SpreadShapes:
    """The shapes of some families, those with the least bound first."""

    def __init__(
        self,
        question: SearchProblem,
        families: Sequence[Family],
        keeps: Callable[[EqualPipeline], bool],
        rivals: Sequence[Rival] = (),
        known: Floors | None = None,
        *,
        computed: bool = False,
    ) -> None:
        """`computed`: with bounds that count what is computed alone, which few prices tell."""
        self._keeps, known = keeps, known or Floors()
        self._spread = known.rows(families)
        self.floors_s, self._order = known.ordered(question, self._spread, rivals, computed=computed)
        self._taken = 0

    def __len__(self) -> int:
        """Shapes that were not taken yet."""
        return len(self._order) - self._taken

    @property
    def left_s(self) -> Array:
        """Their bounds, the least first."""
        return self.floors_s[self._taken :]

    def least_s(self, keeps: Callable[[EqualPipeline], bool], families: Sequence[EqualPipeline]) -> float:
        """The least bound of those that are kept, of some families; infinite where none is."""
        some = np.zeros(len(self._spread.shapes), dtype=bool)
        some[[self._place[shape] for shape in families]] = True
        places = np.flatnonzero(some[self._spread.of_family[self._order]])
        for place, row in zip(places.tolist(), self._order[places].tolist(), strict=True):
            if keeps(self._spread.shape(row)):
                return float(self.floors_s[place])
        return math.inf

    @cached_property
    def _place(self) -> dict[EqualPipeline, int]:
        """Of each family."""
        return {shape: place for place, shape in enumerate(self._spread.shapes)}

    def below(self, limit_s: float) -> list[tuple[float, EqualPipeline]]:
        """Those whose bounds are no larger, with these; they count as taken after `take`."""
        end = int(np.searchsorted(self.floors_s, limit_s, side="right"))
        under = []
        for place in range(self._taken, end):
            shape = self._spread.shape(int(self._order[place]))
            if self._keeps(shape):
                under.append((float(self.floors_s[place]), shape))
        return under

    def take(self, limit_s: float) -> None:
        """All of these."""
        self._taken = max(self._taken, int(np.searchsorted(self.floors_s, limit_s, side="right")))


@dataclass(frozen=True)
class _Parts:
    """What one micro-batch takes, by distinct sizes of layers."""

    of_kind_s: list[Array]
    first_s: Array
    """Of a first stage without its layers ..."""
    last_s: Array
    """... and of a last one; of an only stage all of both is in `first_s`."""
    once_s: Array
    """What is in a step once: all of d of an only stage, whose layers are known; else the step of one with
    the even share of layers, and the tied embedding of a first one, beside which nothing else of its d is
    less than nothing."""

    def at(self, columns: Ints) -> _Parts:
        """Of some of these sizes."""
        of_kind_s = [part[columns] for part in self.of_kind_s]
        return _Parts(of_kind_s, self.first_s[columns], self.last_s[columns], self.once_s[columns])


def _floors(question: SearchProblem, spread: SpreadRows, rivals: Sequence[Rival]) -> Array:
    """Seconds that no plan of each shape beats; infinite where states alone do not fit, and where tokens that
    are sent otherwise are never slower."""
    floors = np.full(len(spread), np.inf)
    for same in spread.priced:
        question.tick()
        # Of models with experts all shapes of a search have as many.
        sized = partial(_grid, question, sliced=same.sliced, instances=spread.shapes[0].instances[0])
        left = _left(question, sized, same.distinct, rivals)
        if not len(left):
            continue
        stages = same.distinct[left, 0]
        parts = _parts(question, sized(same.distinct[left]), stages)
        for count in np.unique(stages).tolist():
            columns = np.flatnonzero(stages == count)
            column = np.full(len(same.distinct), -1, dtype=np.intp)
            column[left[columns]] = np.arange(len(columns))
            own = column[same.places]
            some = np.flatnonzero(own >= 0)
            often = same.vpp[some], same.grad_accum[some]
            floors[same.rows[some]] = _steps(question, parts.at(columns), int(count), own[some], *often)
    return floors


def _left(
    question: SearchProblem, sized: Callable[[Array], StageGrid], distinct: Array, rivals: Sequence[Rival]
) -> Ints:
    """Which of these sizes hold no more than there is, and are not outdone."""
    grid = sized(distinct)
    here = _fits(question, grid, distinct[:, 0])
    if grid.sequence_parallel and np.any(grid.tp == 1.0):
        whole = replace(grid, sequence_parallel=False)
        here = here | ((grid.tp == 1.0) & _fits(question, whole, distinct[:, 0]))
    left = np.flatnonzero(here)
    sends = left[(grid.etp[left] == 1.0) & (grid.ep[left] > 1.0)]
    if not rivals or not len(sends):
        return left
    return np.setdiff1d(left, sends[_outdone(rivals, sized(distinct[sends]))], assume_unique=True)


def _computed(question: SearchProblem, spread: SpreadRows) -> Array:
    """The same of what layers and head compute, on all stages: the slowest takes the mean or more."""
    floors, model = np.zeros(len(spread)), question.evaluator.job.model
    for same in spread.computed:
        question.tick()
        loads = question.evaluator.loads(_grid(question, same.distinct, sliced=same.sliced))
        each_s = [load.forward_s + load.backward_s for load in loads.blocks]
        sum_s = sum((each_s[place] for place in model.kind_of_layer), start=np.zeros(len(same.distinct)))
        if loads.head is not None:
            sum_s = sum_s + loads.head.forward_s + loads.head.backward_s
        floors[same.rows] = same.grad_accum / same.stages * sum_s[same.places] * (1 - 1e-9)
    return floors


def _grid(question: SearchProblem, sizes: Array, *, sliced: bool, instances: int = 1) -> StageGrid:
    """Stages on these nodes, of these levels and sizes of layers: only ones with all of them, others with
    none as yet."""
    job, zero = question.evaluator.job, np.zeros(1)
    cp, model = job.execution.context_parallel, job.model
    stages, nodes, per_node, levels, micro_batch, tp, ep, etp = sizes.T
    only = stages[0] == 1.0
    layers = [zero + (model.layers_of_kind[kind.name] if only else 0.0) for kind in model.kinds]
    several = len(layers) > 1
    return StageGrid(
        role=StageRole.ONLY if only else StageRole.FIRST,
        nodes=nodes,
        gpus_per_node=per_node,
        sequence_parallel=sliced,
        recompute="full",
        layers=sum(layers, start=zero),
        ckpt=zero,
        in_flight=zero + 1.0,
        micro_batch=micro_batch,
        dp=nodes * per_node / (tp * cp),
        tp=tp,
        zero=levels,
        # Passes that are paired with a neighbour's are all but some of the first and of the last.
        grad_accum=zero + (MANY if job.execution.expert_overlap else 1.0),
        offload=alike(zero),
        ep=ep,
        etp=etp,
        instances=np.asarray(float(instances)),
        stages=1 if only else 2,
        counts=tuple(LayerCount(each, zero) for each in layers) if several else (),
        runs=((model.kind_of_layer[0], model.kind_of_layer[-1]),) if several and only else (),
    )


def _parts(question: SearchProblem, grid: StageGrid, stages: Array) -> _Parts:
    evaluator, model, count = question.evaluator, question.evaluator.job.model, len(grid.tp)

    def wide(value: Array) -> Array:
        return np.broadcast_to(value, (count,))

    times, last_s = Times.of(evaluator, grid), np.zeros(1)
    slopes = [*times.stable.slopes, *[NO_SLOPE] * (len(model.kinds) - len(times.stable.slopes))]
    if grid.role is StageRole.ONLY:
        once_s = times.step.at(grid) + times.delta.at(grid)
    else:
        last = Times.of(evaluator, replace(grid, role=StageRole.LAST))
        last_s = last.stable.fixed - last.sent_s
        each_s = np.minimum.reduce(np.broadcast_arrays(*(slope.per_layer for slope in times.step.slopes)))
        once_s = np.maximum(times.step.fixed + -(-model.layers // stages) * each_s, 0.0) + times.tied_s
    first_s = times.stable.fixed - times.sent_s
    return _Parts([wide(slope.per_layer) for slope in slopes], wide(first_s), wide(last_s), wide(once_s))


def _steps(
    question: SearchProblem, parts: _Parts, stages: int, index: Ints, vpp: Array, grad_accum: Array
) -> Array:
    """Of each shape, by its distinct sizes of layers."""
    model = question.evaluator.job.model
    loads = np.stack([parts.of_kind_s[place] for place in model.kind_of_layer])
    sum_s = loads.sum(axis=0) + parts.first_s + parts.last_s
    mean_s = sum_s / stages
    share = -(-model.layers // stages)
    least_s = loads.min(axis=0)
    split_s = np.maximum(mean_s, least_maximum(loads, parts.first_s, parts.last_s, stages))
    sum_s, mean_s, least_s, split_s, once_s = (
        part[index] for part in (sum_s, mean_s, least_s, split_s, parts.once_s)
    )
    others = grad_accum - 1.0
    # Where chunks take turns, the slowest stage's passes, and those of the last stage but one, which has its
    # share or more, behind the first chunks of middle ones, that have one layer less at most.
    chunk = np.ceil((share - 1) / vpp)
    of_layers = grad_accum * share + max(stages - 3, 0) * chunk
    chunked_s = np.maximum(grad_accum * mean_s, of_layers * least_s)
    passes_s = np.where(vpp > 1.0, chunked_s, least_steady_s(stages, others, mean_s, split_s) + sum_s)
    return np.asarray((passes_s + once_s) * (1 - 1e-9))


def least_steady_s(stages: int, others: Array, mean_s: Array, least_s: Array) -> Array:
    """U of stages whose t have this mean, the largest being `least_s` or more.

    Of the slowest stage b with f behind it, m is its t and B theirs: all stages take at most m, so that what
    warm-up passes fill of its waits is at most f m - B <= stages (m - mean), and half of each such pass. With
    no more other micro-batches than stages less of m is left the larger it is, until the latter is less."""
    half = 0.5 * np.minimum(stages - 1.0, others)
    turns_s = np.maximum(least_s, stages / (stages - half) * mean_s)
    slowest_s = np.where(others < stages, turns_s, least_s)
    return others * slowest_s - np.minimum(half * slowest_s, stages * (slowest_s - mean_s))


def least_maximum(loads: Array, first: Array, last: Array, stages: int) -> Array:
    """The least that the heaviest of so many runs of layers can weigh; a column each."""
    layers = len(loads)
    sums = np.concatenate([np.zeros((1, loads.shape[1])), np.cumsum(loads, axis=0)])
    sums[1:] += first
    unlike = np.flatnonzero((loads != loads[-1]).any(axis=1))
    begin = int(unlike[-1]) + 1 if len(unlike) else 1
    if stages > 1 and begin <= layers // 8 + 1:
        return _least_of_alike(sums, loads[-1], last, (begin, stages))
    sums[-1] += last
    least = sums.copy()
    least[0] = np.inf
    for stage in range(1, stages):
        after = np.full_like(least, np.inf)
        ends = range(stage + 1, layers - (stages - 1 - stage) + 1)
        for end in ends if stage < stages - 1 else (layers,):
            some = np.maximum(least[stage:end], sums[end] - sums[stage:end])
            after[end] = some.min(axis=0)
        least = after
    return np.asarray(least[layers])


def _least_of_alike(sums: Array, layer: Array, last: Array, sizes: tuple[int, int]) -> Array:
    """The same of layers that weigh the same from one on; `sums` are of all before each and of what is first.
    Of the runs that begin before that one the last may end anywhere; behind it all are alike. The further it
    goes the heavier it is, and the lighter what is behind it: the least is where these meet."""
    begin, stages = sizes
    layers, columns = len(sums) - 1, np.arange(sums.shape[1])
    least = np.full(sums.shape[1], np.inf)
    before = {0: np.zeros(sums.shape[1])}
    """By where runs end, before that layer: what the heaviest of them weighs."""
    for runs in range(1, min(begin, stages) + 1):
        left, first_end = stages - runs, max(begin, runs)
        if not left:
            least = np.minimum(least, _run_on(before, sums[-1] + last, sums))
        elif first_end <= layers - left:
            low, high = (np.full(len(columns), end, dtype=np.intp) for end in (first_end, layers - left))
            while np.any(low < high):
                middle = (low + high) // 2
                heavy = _run_on(before, sums[middle, columns], sums)
                more = heavy < _least_of_same(layers - middle, left, layer, last)
                low, high = np.where(more & (low < high), middle + 1, low), np.where(more, high, middle)
            for end in (low, np.maximum(low - 1, first_end)):
                heavy = _run_on(before, sums[end, columns], sums)
                behind = _least_of_same(layers - end, left, layer, last)
                least = np.minimum(least, np.maximum(heavy, behind))
        before = {
            end: _run_on({k: v for k, v in before.items() if k < end}, sums[end], sums)
            for end in range(runs, begin)
        }
    return least


def _run_on(before: Mapping[int, Array], end: Array, sums: Array) -> Array:
    """The heaviest with a run more, up to where so much is before."""
    return np.asarray(np.min([np.maximum(some, end - sums[start]) for start, some in before.items()], axis=0))


def _least_of_same(layers: Ints, runs: int, layer: Array, last: Array) -> Array:
    """Of so many layers that weigh the same, in so many runs, a number of layers each: with x of them in all
    runs but the last, which falls with x, the heaviest is least where both weigh the same, or hardly so."""
    if runs == 1:
        return last + layers * layer
    even = np.floor((last / np.maximum(layer, np.finfo(float).tiny) + layers) / runs)
    fewest = -(-(layers - 1) // (runs - 1))
    least: Array = np.asarray(np.inf)
    for count in (np.clip(even, 1.0, fewest), np.clip(even + 1.0, 1.0, fewest)):
        rest = np.maximum(layers - (runs - 1) * count, 1.0)
        least = np.minimum(least, np.maximum(count * layer, last + rest * layer))
    return least


def _fits(question: SearchProblem, grid: StageGrid, stages: Array) -> NDArray[np.bool_]:
    """Whether what stages hold throughout would fit if all held the same: on the mean they hold that, and
    embedding and head besides."""
    evaluator, model = question.evaluator, question.evaluator.job.model
    one = np.ones(len(stages))
    counts = [LayerCount(one * model.layers_of_kind[kind.name] / stages, 0.0 * one) for kind in model.kinds]
    mean = replace(
        grid,
        role=StageRole.ONLY if grid.role is StageRole.ONLY else StageRole.MIDDLE,
        layers=one * model.layers / stages,
        counts=tuple(counts) if len(counts) > 1 else (),
    )
    held, _ = evaluator.moments(mean)
    return np.broadcast_to(held <= evaluator.limit_bytes, (len(grid.tp),))
