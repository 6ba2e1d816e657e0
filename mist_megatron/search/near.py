"""From which shapes and mixed families a climb by the closed form of `predict` may begin.

Eq. 1 is wrong both ways about what the closed form says. Borders between unequal stages cost more than a
stage knows of them alone, so that the best by eq. 1 may be far behind by the closed form: all that is
before it then is worth a look. And slow early stages fill with warm-up passes what eq. 1 counts as waits: by
so much only where hardly more micro-batches than stages run, which is looked at farther off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mist_megatron.search.bounds import least_passes_s
from mist_megatron.search.known import Item
from mist_megatron.search.mixed import FEW_SLOTS, MixedBound, MixedFamily
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.queue import Order, Pair
from mist_megatron.spec.job import Job

NEAR = 0.03
"""How far behind eq. 1's best a plan may be, by eq. 1, from which a climb begins."""
FAR = 0.15
"""The same where hardly more micro-batches than stages run: of random small jobs the best by the closed form
was up to 13 % behind by eq. 1."""


def worth_a_climb(
    order: Order, best_s: float, told_s: float, has_best: Callable[[Item], bool], job: Job
) -> list[Pair]:
    """What is near the best by eq. 1, or before what is told of that, its own items first; and what else has
    few micro-batches and is quick to solve."""
    near: list[Pair] = []
    far: list[Pair] = []
    near_s = max(best_s * (1.0 + NEAR), told_s)
    # A pipeline has two stages at least.
    small = 2 * job.model.layers <= FEW_SLOTS
    for bound, item in order.below(max(near_s, best_s * (1.0 + FAR)) if small else near_s):
        if bound.value_s < near_s:
            near.append((bound, item))
        elif not _is_quick(item, job):
            continue
        elif isinstance(item, MixedFamily) and isinstance(bound, MixedBound):
            far += _long_ones(item, bound, job.cluster.gpus)
        elif _has_few(item):
            far.append((bound, item))
    return [*sorted(near, key=lambda pair: not has_best(pair[1])), *far]


def farthest_s(item: Item, best_s: float, told_s: float, job: Job) -> float:
    """Where plans of an item may begin by eq. 1."""
    return max(best_s * (1.0 + (FAR if _has_few(item) and _is_quick(item, job) else NEAR)), told_s)


def _is_quick(item: Item, job: Job) -> bool:
    """Whether there is little to price."""
    slots = item.stages if isinstance(item, EqualPipeline) else len(item.meshes)
    return job.model.layers * slots <= FEW_SLOTS


def _has_few(item: Item) -> bool:
    """Hardly more micro-batches than stages, of the shortest pipelines of a mixture."""
    stages = item.stages if isinstance(item, EqualPipeline) else item.lengths[0]
    return item.grad_accum <= stages + 1


def _long_ones(mixture: MixedFamily, bound: MixedBound, gpus: int) -> list[Pair]:
    """The pipelines of a mixture that have few micro-batches."""
    lengths = tuple(count for count in mixture.lengths if count >= mixture.grad_accum - 1)
    if not lengths:
        return []
    least_s = [
        least_passes_s(bound.work_s, gpus, mixture.grad_accum, some) for some in (lengths, mixture.lengths)
    ]
    value_s = bound.value_s + (least_s[0] - least_s[1]) * (1 - 1e-9)
    return [(replace(bound, value_s=value_s), replace(mixture, lengths=lengths))]
