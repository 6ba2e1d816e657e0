"""What searches before this one say of its shapes: bounds that hold here too, so that most are never priced.

A space that allows less has no faster plan of the same shape. And where Megatron reduces gradients beside
its last backward pass, both together take no longer than one after the other - but for the last layer's
reduction, beside which nothing runs - as long as streams that slow each other down still gain from running
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.search.bounds import SearchProblem, least_recompute
from mist_megatron.search.choices import Array
from mist_megatron.search.families import MixedFamily
from mist_megatron.search.graphs import LAYERS
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.space import Space
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import narrower
from mist_megatron.spec.plan import Execution
from mist_megatron.targets.table import TARGETS

Item = EqualPipeline | MixedFamily
_Sizes = tuple[object, ...]
_BySizes = dict[_Sizes, list[tuple[frozenset[int], EqualPipeline]]]
"""Levels of ZeRO, and shapes with these."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Lower bounds that a search left."""

    job: Job
    space: Space
    step: float
    bounds: Mapping[Item, float]
    """Seconds that no plan of an item beats: of a search that is not done they grow."""
    solved: Mapping[Item, float] = field(default_factory=dict)
    """The same of items that were solved: seconds that no plan of the item, of this space, beats."""

    @cached_property
    def bounds_by_sizes(self) -> _BySizes:
        """Shapes that have bounds by all but their levels of ZeRO."""
        return _by_sizes(self.bounds)

    @cached_property
    def solved_by_sizes(self) -> _BySizes:
        """The same of those that were solved."""
        return _by_sizes(self.solved)


class KnownBounds:
    """Those of many ways of execution, of which few say anything of one: found by what they execute."""

    def __init__(self, known: Iterable[Known] = ()) -> None:
        self._of: dict[Execution, list[Known]] = {}
        self._replays = False
        self.far = False
        """Whether a search has seen bounds that are far above the floors of their shapes."""
        for one in known:
            self.append(one)

    def append(self, one: Known) -> None:
        self._of.setdefault(_runs_nothing_again(one.job.execution), []).append(one)
        self._replays = self._replays or bool(one.job.execution.cuda_graphs)

    def near(self, execution: Execution) -> Iterator[Known]:
        """Of ways that execute the same, but for what is run again and for switches that only gain time."""
        ways = [execution, _reduced_beside(execution)]
        ways += [_replayed(execution)] if self._replays and not execution.cuda_graphs else []
        for way in dict.fromkeys(map(_runs_nothing_again, ways)):
            yield from self._of.get(way, ())


def _runs_nothing_again(execution: Execution) -> Execution:
    return varied(execution, recompute_modules=None)


def _replayed(execution: Execution) -> Execution:
    return replace(execution, cuda_graphs=LAYERS)


def _reduced_beside(execution: Execution) -> Execution:
    return replace(execution, overlap_grad_reduce=True)


def floors(question: SearchProblem, items: Sequence[Item], known: KnownBounds) -> list[float]:
    """What is known of each item without pricing its stages; 0 where nothing is."""
    floors_s = np.zeros(len(items))
    sizes = [None if isinstance(item, MixedFamily) else _sizes(item) for item in items]
    for one in known.near(question.evaluator.job.execution):
        if not _covers(one, question):
            continue
        same = _without_modules(one, one.job) == _without_modules(one, question.evaluator.job)
        switched = (reduces_beside, replays)
        if not same and not any(beside(one.job, question.evaluator) for beside in switched):
            continue
        floors_s = np.maximum(floors_s, _of_items(items, sizes, one.bounds, one.bounds_by_sizes) * (1 - 1e-9))
        if one.solved and one.job == question.evaluator.job and _within(question, one):
            # The same configurations are priced here, so that nothing need be left for rounding.
            floors_s = np.maximum(floors_s, _of_items(items, sizes, one.solved, one.solved_by_sizes))
    return [float(value) for value in floors_s]


_LESS_CKPT = {"none": ("none",), "all": ("all",), "none_or_all": ("none", "all", "none_or_all")}


def _within(question: SearchProblem, known: Known) -> bool:
    """Whether all that stages of a shape may be here they may be there."""
    here, there = question.space, known.space
    rules = (
        "grads_follow_optimizer",
        "weights_least_zero",
        "host_gradients",
        "wide_grads",
        "layer_steps",
        "optimizer_offload_least_zero",
    )
    same_grid = known.step == question.step or "any" not in here.offload.values()
    splits = not here.near_even or (there.near_even and here.per_stage == there.per_stage)
    freer = ("uneven_layers", "per_stage", "per_stage_zero")
    return (
        same_grid
        and splits
        and all(getattr(here, name) <= getattr(there, name) for name in freer)
        and all(getattr(here, name) == getattr(there, name) for name in rules)
        and (there.ckpt == "any" or here.ckpt in _LESS_CKPT[there.ckpt])
        and set(here.recompute) <= set(there.recompute)
        and narrower(here.offload, there.offload) == here.offload
    )


def _of_items(
    items: Sequence[Item], sizes: Sequence[_Sizes | None], bounds: Mapping[Item, float], by_sizes: _BySizes
) -> Array:
    """Of each item itself, or of a shape that may choose from more levels."""
    found = []
    for item, own in zip(items, sizes, strict=True):
        if isinstance(item, MixedFamily) or own is None:
            found.append(bounds.get(item, 0.0))
        else:
            of_levels = by_sizes.get(own, ())
            wider = (bounds[other] for levels, other in of_levels if levels.issuperset(item.zero))
            found.append(max(wider, default=0.0))
    return np.array(found)


def _covers(known: Known, question: SearchProblem) -> bool:
    """Whether a bound of a shape there is one here: it assumes nothing recomputed and nothing offloaded but
    any fraction of the optimizer, and of the layers any split that the space has."""
    there, here = known.space, question.space
    shared = narrower(there.offload, here.offload).optimizer
    same_grid = shared != "any" or known.step == question.step
    if least_recompute(there) not in ("full", least_recompute(here)):
        return False
    return shared == here.offload.optimizer and same_grid and (there.uneven_layers or not here.uneven_layers)


def _without_modules(known: Known, job: Job) -> Job:
    """What is run again is no matter to bounds that have nothing of it."""
    if least_recompute(known.space) != "full":
        return job
    return replace(job, execution=_runs_nothing_again(job.execution))


def _sizes(shape: EqualPipeline) -> _Sizes:
    """All but the levels of ZeRO."""
    pipeline = (shape.grad_accum, shape.stages, shape.nodes, shape.gpus_per_node, shape.vpp)
    split = (shape.dp, shape.tp, shape.cp, shape.ep, shape.etp, shape.micro_batch, shape.instances)
    return (*pipeline, *split, shape.sequence_parallel, shape.bridged)


def _by_sizes(bounds: Mapping[Item, float]) -> _BySizes:
    by_sizes: _BySizes = {}
    for item in bounds:
        if isinstance(item, EqualPipeline):
            by_sizes.setdefault(_sizes(item), []).append((frozenset(item.zero), item))
    return by_sizes


def reduces_beside(job: Job, after: StageEvaluator) -> bool:
    """Whether `job` is the evaluator's but for gradients that are reduced beside the last backward pass there
    and after it here, and running together gains: of two streams that are slowed down by f and g each gets
    1/f and 1/g of the time."""
    execution, target = after.job.execution, TARGETS[job.target]
    switched = _reduced_beside(execution)
    late = target.traffic(execution)
    beside = replace(late, reduction=replace(late.reduction, last_overlaps=True))
    if late == beside or target.traffic(switched) != beside:
        return False
    return job == replace(after.job, execution=switched) and together_gains(after)


def replays(job: Job, after: StageEvaluator) -> bool:
    """Whether `job` is the evaluator's but for graphs, of which kernels begin no later, and running beside
    traffic gains."""
    switched = _replayed(after.job.execution)
    differs = not after.job.execution.cuda_graphs and job == replace(after.job, execution=switched)
    return differs and together_gains(after)


def together_gains(evaluator: StageEvaluator) -> bool:
    """Whether compute and traffic take no longer beside each other than one after the other."""
    slow_compute, slow_traffic = (float(factor) for factor in evaluator.time_context.interference[0b0011, :2])
    return 1.0 / slow_compute + 1.0 / slow_traffic >= 1.0 and min(slow_compute, slow_traffic) >= 1.0
