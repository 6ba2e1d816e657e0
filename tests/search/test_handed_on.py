"""What queues hand on to slower ways of execution, and what becomes of it there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mist_megatron.search.bounds import EqualBound, LeastTimes
from mist_megatron.search.known import Item
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.queue import HandedQueue, Look, Queue, Seen

SIZES = {"nodes": 1, "gpus_per_node": 4, "dp": 4, "tp": 1, "grad_accum": 2, "stages": 1, "vpp": 1}
ONE, TWO = (EqualPipeline(**SIZES, micro_batch=size, sequence_parallel=False, zero=(1,)) for size in (1, 2))


def bound_of(value_s: float) -> EqualBound:
    nothing = LeastTimes(np.zeros(1), np.zeros(1), np.zeros(1))
    return EqualBound(value_s, 0.0, 0.0, (nothing, nothing, nothing))


def test_the_higher_of_bound_and_floor_is_handed_on() -> None:
    """Both hold in the ways after it: with the lower one these would solve what cannot be faster."""
    handed: list[tuple[float, Item]] = []
    look = Look(lambda items: Seen((), [(2.0, item) for item in items]), handed.extend)
    assert Queue([ONE, TWO], [3.0, 1.0], look).next(math.inf) is None
    assert sorted(handed, key=lambda pair: pair[0]) == [(2.0, TWO), (3.0, ONE)]


@pytest.mark.parametrize(("floor_s", "value_s"), [(3.0, 3.0), (1.0, 2.0)])
def test_what_was_handed_on_keeps_its_floor(floor_s: float, value_s: float) -> None:
    """In its place in the order; but no later search may know of it: it may be without the way in which it
    does not fit."""
    queue = HandedQueue(Look(lambda items: Seen([(bound_of(2.0), item) for item in items])))
    queue.add([(floor_s, ONE)])
    assert queue.next(value_s) is None
    found = queue.next(math.inf)
    assert found is not None and (found[0].value_s, found[1]) == (value_s, ONE)
    assert not queue.known()
