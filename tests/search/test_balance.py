"""Which layers each stage has, against every split of made-up stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

from mist_megatron.search import balance
from mist_megatron.search.balance import Candidate, Split, balanced, eq1_s, even, exact, heuristic, moved
from mist_megatron.search.layerwise import StagePoint


def every_split(layers: int, stages: int) -> Iterator[Split]:
    """Of so many layers, one at least on each stage."""
    for cuts in combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield tuple(ends[k + 1] - ends[k] for k in range(stages))


class MadeUp:
    """Stages whose times are drawn for each place, first layer and number of layers; some fit nowhere."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.layers, stages = int(random.integers(4, 8)), int(random.integers(2, 5))
        job = SimpleNamespace(model=SimpleNamespace(layers=self.layers))
        self.prices = SimpleNamespace(
            stages=stages, grad_accum=int(random.integers(1, 6)), evaluator=SimpleNamespace(job=job)
        )
        shape = (stages, self.layers, self.layers + 1)
        self.t_s = np.cumsum(random.uniform(0.5, 1.5, shape), axis=2)
        self.d_s, self.peak = random.uniform(0.0, 3.0, shape), random.integers(1, 9, shape).astype(float)
        self.fits = random.random(shape) < (1.0, 0.85)[seed % 2]

    def point(self, position: int, first: int, count: int) -> StagePoint | None:
        at = position, first, count
        return StagePoint(self.t_s[at], self.d_s[at], self.peak[at], ()) if self.fits[at] else None

    def points(self, split: Split) -> tuple[StagePoint, ...] | None:
        found = [self.point(k, sum(split[:k]), count) for k, count in enumerate(split)]
        return None if None in found else tuple(point for point in found if point)

    def candidate(self, split: Split) -> Candidate | None:
        points = self.points(split)
        return points and Candidate(eq1_s(points, self.prices.grad_accum), None, split, points, None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("seed", range(30))
def test_the_best_of_all_splits_is_found(seed: int) -> None:
    stages = MadeUp(seed)
    found = exact(stages)  # type: ignore[arg-type]
    values = [stages.candidate(split) for split in every_split(stages.layers, stages.prices.stages)]
    least = min((one.value_s for one in values if one), default=None)
    assert (found and found.value_s) == (least and pytest.approx(least, rel=1e-12))


@pytest.mark.parametrize("seed", range(10))
def test_a_step_takes_what_its_slowest_path_takes(seed: int) -> None:
    """All micro-batches but one at the slowest stage, one through all, and of what only the first or last
    pass does the most that stages before do not hide."""
    random = np.random.default_rng(seed)
    t_s, d_s = random.uniform(0.0, 2.0, (2, 4))
    points = [StagePoint(t, d, 0.0, ()) for t, d in zip(t_s, d_s, strict=True)]
    late = [d_s[k] - sum(t_s[j] for j in range(k)) for k in range(4)]
    assert eq1_s(points, 5) == pytest.approx(4 * max(t_s) + sum(t_s) + max(late))


@pytest.mark.parametrize(("layers", "stages"), [(4, 1), (5, 2), (7, 3), (8, 4), (5, 5)])
def test_splits_are_even_and_balanced(layers: int, stages: int) -> None:
    split = even(layers, stages)
    assert (sum(split), len(split), list(split)) == (layers, stages, sorted(split))
    assert split[-1] - split[0] == (layers % stages > 0)
    sizes = np.random.default_rng(layers).uniform(0.0, 1.0, (stages, layers, layers + 1))

    def largest(split: Split) -> float:
        ends = np.cumsum((0, *split))
        return max(sizes[k, ends[k], ends[k + 1]] for k in range(stages))

    found = balanced(lambda position, first, end: float(sizes[position, first, end]), layers, stages)
    assert largest(found) == min(largest(each) for each in every_split(layers, stages))


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (6, 3), (6, 4)])
def test_one_layer_moves_to_a_neighbour(layers: int, stages: int) -> None:
    for split in every_split(layers, stages):
        for slowest in range(stages):
            told = {
                other
                for other in every_split(layers, stages)
                if {k: b - a for k, (a, b) in enumerate(zip(split, other, strict=True)) if a != b}
                in ({slowest: -1, slowest - 1: 1}, {slowest: -1, slowest + 1: 1})
            }
            assert set(moved(split, slowest)) == told


@pytest.mark.parametrize("seed", range(20))
def test_splits_follow_the_slowest_stage(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """All that moves come to which make no stage slower than the slowest was, and none fuller than the
    fullest of the split that is balanced in time."""
    stages = MadeUp(2 * seed)
    every = list(every_split(stages.layers, stages.prices.stages))
    first = [every[int(k)] for k in np.random.default_rng(seed).integers(0, len(every), 3)]
    monkeypatch.setattr(balance, "starts", lambda stages: first)
    fullest = max(point.peak_bytes for point in stages.points(first[2]) or ())
    wanted, new = set[Split](), set(first)
    while new:
        wanted |= new
        reached = set[Split]()
        for split in new:
            times = [point.t_s for point in stages.points(split) or ()]
            for other in moved(split, int(np.argmax(times))):
                points = stages.points(other) or ()
                if (
                    max(point.t_s for point in points) <= max(times)
                    and max(point.peak_bytes for point in points) <= fullest
                ):
                    reached.add(other)
        new = reached - wanted
    assert {one.split for one in heuristic(stages)} == wanted  # type: ignore[arg-type]
