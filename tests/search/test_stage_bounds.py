"""Bounds of shapes from the least times of their stages, against pipelines that have exactly these times."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from test_assign import least_time
from test_balance import every_split

from mist_megatron.search.bounds import LeastTimes, bound_of, least_passes, split_bounds
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.points import Point, parts_of
from mist_megatron.search.space import space_named
from mist_megatron.search.splits import first_chunk_shares, split_table

LAYERS = 7


def shape_of(stages: int, grad_accum: int, vpp: int = 1) -> EqualPipeline:
    sizes = {"nodes": 1, "gpus_per_node": 1, "dp": 1, "tp": 1, "micro_batch": 1, "vpp": vpp}
    return EqualPipeline(grad_accum=grad_accum, stages=stages, sequence_parallel=False, zero=(1,), **sizes)


def question_of(layers: int, *, uneven_layers: bool):
    job = SimpleNamespace(model=SimpleNamespace(layers=layers))
    space = replace(space_named("full"), near_even=False, uneven_layers=uneven_layers)
    return SimpleNamespace(evaluator=SimpleNamespace(job=job), space=space)


def random_stages(rng: np.random.Generator, *, in_turn: bool) -> list[LeastTimes]:
    """First, middle and last, of 1 to LAYERS layers: one price a layer, and embedding or head besides."""
    counts, slope = np.arange(1.0, LAYERS + 1), rng.uniform(0.5, 2.0)
    in_turn_s = float(in_turn) * rng.uniform(0.0, 0.4)
    d_s, step_s = rng.uniform(-0.3, 3.0, 3), rng.uniform(0.0, 2.0)
    return [
        LeastTimes(
            t_s=counts * slope + more + in_turn_s,
            both_s=counts * slope + more + in_turn_s + d_s[role],
            step_s=np.full(LAYERS, step_s),
            in_turn_s=in_turn_s,
            layer_backward_s=0.5 * slope,
        )
        for role, more in enumerate((rng.uniform(0.0, 2.0), 0.0, rng.uniform(0.0, 3.0)))
    ]


def least_of(stages: list[LeastTimes], split: tuple[int, ...], grad_accum: int) -> float:
    """Path by path."""
    roles = [0, *[1] * (len(split) - 2), 2][: len(split)]
    fronts = [stages[role].front(count) for role, count in zip(roles, split, strict=True)]
    return least_time([(front, 0) for front in fronts], grad_accum)


def cut(stage: LeastTimes, *counts: int) -> LeastTimes:
    """With these numbers of layers only, and nothing that tells one pass from the other."""
    rows = [count - 1 for count in counts]
    times = {name: getattr(stage, name)[rows] for name in ("t_s", "both_s", "step_s")}
    return replace(stage, layer_backward_s=0.0, **times)


@pytest.mark.parametrize("grad_accum", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("in_turn", [False, True])
def test_bounds_of_known_layers_are_what_the_pipeline_takes(stages: int, grad_accum: int, in_turn: bool):
    """And below that by half of what is sent in turn at most, which a wait may hide."""
    rng = np.random.default_rng(grad_accum)
    shape, table = shape_of(stages, grad_accum), split_table(LAYERS, stages, 1)
    for _ in range(4):
        times = random_stages(rng, in_turn=in_turn)
        even = tuple(cut(one, 2) for one in times)
        near = tuple(cut(one, table.min(), -(-LAYERS // stages), table.max()) for one in times)
        exact = [replace(one, layer_backward_s=0.0) for one in times]
        bounds = split_bounds(shape, near, table)
        found = [(bound, tuple(split)) for bound, split in zip(bounds, table.tolist(), strict=True)]
        alike = bound_of(question_of(2 * stages, uneven_layers=False), shape, even)
        for bound, split in [*found, (alike.value_s, (2,) * stages)]:
            wanted = least_of(exact, split, grad_accum)
            less = 0.5 * times[0].in_turn_s if grad_accum > 1 else 0.0
            assert (wanted - less) * (1 - 2e-9) <= bound <= wanted


@pytest.mark.parametrize("grad_accum", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_split_beats_the_bound_of_all(stages: int, grad_accum: int) -> None:
    rng, shape = np.random.default_rng(grad_accum), shape_of(stages, grad_accum)
    question = question_of(LAYERS, uneven_layers=True)
    for seed in range(6):
        times = random_stages(rng, in_turn=seed % 2 > 0)
        least = min(least_of(times, split, grad_accum) for split in every_split(LAYERS, stages))
        assert 0.5 * least < bound_of(question, shape, tuple(times)).value_s <= least


@pytest.mark.parametrize("grad_accum", [1, 2, 3, 16])
@pytest.mark.parametrize("stages", [3, 4, 6])
def test_bounds_count_what_stages_beside_a_border_of_nodes_send(stages: int, grad_accum: int):
    """Exactly where the border is what makes a step long, whatever layers its stages have."""
    rng, table = np.random.default_rng(stages), split_table(LAYERS, stages, 1)
    shape, uneven = shape_of(stages, grad_accum), question_of(LAYERS, uneven_layers=True)
    for slow_s in (0.1, 1.0, 300.0):
        times, turn = random_stages(rng, in_turn=True), rng.choice([0.0, 0.5])
        seconds = [0.0, *rng.choice([0.0, slow_s], stages - 3), slow_s, 0.0]
        crossed = [((1.0 - turn) * more_s, turn * more_s) for more_s in seconds]
        near = tuple(cut(one, table.min(), -(-LAYERS // stages), table.max()) for one in times)

        def least(split: tuple[int, ...], times=times, crossed=crossed) -> float:
            roles = [0, *[1] * (stages - 2), 2]
            sized = zip(roles, split, crossed, strict=True)
            fronts = [times[role].front(count).beside(more) for role, count, more in sized]
            return least_time([(front, 0) for front in fronts], grad_accum)

        bounds = split_bounds(shape, near, table, crossed)
        best_s = min(least(split) for split in every_split(LAYERS, stages))
        pairs = [(bound, least(tuple(split))) for bound, split in zip(bounds, table.tolist(), strict=True)]
        pairs.append((bound_of(uneven, shape, tuple(times), crossed).value_s, best_s))
        even = bound_of(
            question_of(2 * stages, uneven_layers=False), shape, tuple(cut(one, 2) for one in times), crossed
        )
        for bound, wanted in [*pairs, (even.value_s, least((2,) * stages))]:
            assert bound <= wanted
            assert bound > 0.9 * wanted or slow_s < 300.0


@pytest.mark.parametrize(
    ("stages", "grad_accum", "longer", "layers"),
    [
        (2, 1, 0.5, 12), (2, 2, 0.5, 12), (2, 2, 0.75, 7), (2, 3, 0.5, 12), (3, 2, 0.5, 5), (3, 3, 0.5, 12),
        (3, 3, 0.75, 10), (4, 3, 0.5, 12), (4, 4, 0.5, 10), (3, 8, 0.75, 12), (4, 2, 1.0, 12),
    ],
)  # fmt: skip
def test_of_layers_alone_the_best_split_takes_its_bound(
    stages: int, grad_accum: int, longer: float, layers: int
) -> None:
    """Where whole layers can be spread as the bound spreads them: to early stages, whose waits warm-up passes
    fill, in the proportion of a layer's both passes to the longer one."""
    counts = np.arange(1.0, layers + 1)
    stage = LeastTimes(counts, counts + 0.5, np.full(layers, 0.25), 0.0, longer)
    bound = bound_of(question_of(layers, uneven_layers=True), shape_of(stages, grad_accum), (stage,) * 3)
    least = min(least_of([stage] * 3, split, grad_accum) for split in every_split(layers, stages))
    assert bound.value_s == pytest.approx(least, rel=2e-9)


def in_chunks(t_s: np.ndarray, d_s: np.ndarray, shares: np.ndarray, grad_accum: int) -> float:
    """What passes take, first chunks of the stages before among them, and what comes on top of that."""
    before_s = np.cumsum(shares * t_s) - shares * t_s
    return float((before_s + grad_accum * t_s).max() + (d_s - before_s).max())


@pytest.mark.parametrize("slowest", [None, 0, 1, 2])
@pytest.mark.parametrize("stages", [3, 4])
def test_bounds_of_chunks_are_below_what_any_takes_and_what_the_slowest_does(
    stages: int, slowest: int | None
) -> None:
    """Whatever of d configurations have as t instead. Exactly where one stage is the slowest in all."""
    rng, layers, vpp = np.random.default_rng(stages), 4 * stages, 2
    table, roles = split_table(layers, stages, vpp), [0, *[1] * (stages - 2), 2]
    all_shares = first_chunk_shares(layers, stages, vpp)
    for grad_accum in (4, 8):
        shape, counts = shape_of(stages, grad_accum, vpp), np.arange(1.0, layers + 1)
        d_s = rng.uniform(0.0, 3.0, 3) + 200.0 * (np.arange(3) == slowest)
        times = []
        for role, more in enumerate(rng.uniform(0.0, 2.0, 3)):
            t_s = counts + more + 100.0 * (role == slowest)
            times.append(LeastTimes(t_s, t_s + d_s[role], np.full(layers, 0.5)))
        near = tuple(cut(one, table.min(), -(-layers // stages), table.max()) for one in times)
        found = list(zip(split_bounds(shape, near, table), table, all_shares, strict=True))
        even = bound_of(
            question_of(layers, uneven_layers=False),
            shape,
            tuple(cut(one, layers // stages) for one in times),
        )
        found.append((even.value_s, np.full(stages, layers // stages), np.full(stages, 1.0 / vpp)))
        for bound, split, shares in found:
            t_s = np.array([times[role].t_s[count - 1] for role, count in zip(roles, split, strict=True)])
            own_s = d_s[roles]
            assert bound <= in_chunks(t_s, own_s, shares, grad_accum) + 0.5
            if slowest in (0, 2) or (slowest, stages) == (1, 3):
                assert bound == pytest.approx(in_chunks(t_s, own_s, shares, grad_accum) + 0.5, rel=2e-9)
            for _ in range(20):
                moved = rng.uniform(0.0, 4.0, stages) * (rng.random(stages) < 0.5)
                assert bound <= in_chunks(t_s + moved, own_s - moved, shares, grad_accum) + 0.5


@pytest.mark.parametrize("grad_accum", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [(1,), (2,), (3,), (2, 3), (1, 2, 4), (4,)])
def test_no_pipeline_uses_its_gpus_better_than_the_best(lengths: tuple[int, ...], grad_accum: int) -> None:
    """All GPUs but one of each other stage are the slowest's: what passes and one micro-batch take, by what
    all GPUs could have done then. Up to three stages some pipeline is as good as that."""
    for gpus in (4, 8):
        least = np.inf
        for stages in lengths:
            for times in product((0.0, 0.5, 1.0), repeat=stages):
                if max(times) == 1.0:
                    passes_s, *_ = parts_of(
                        [Point(t_s, 0.5 * t_s, 0.0, 0.0, 0.0) for t_s in times], grad_accum
                    )
                    least = min(least, (passes_s + sum(times)) / (sum(times) + gpus - stages))
        bound = least_passes(gpus, grad_accum, lengths)
        assert bound <= least * (1 + 1e-9)
        if lengths != (4,):
            assert bound == pytest.approx(least, rel=1e-9)
