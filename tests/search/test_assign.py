"""The exact assignment against brute force and against the mixed-integer program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from short_form import one_of

from mist_megatron.search.assign import Pipelines, assign, in_line
from mist_megatron.search.milp import assign_milp
from mist_megatron.search.points import Front, Point, pareto, value_of


def front(rng, layers, speed, points, steps=False):
    t = layers / speed * (1 + rng.random(points))
    d = layers / speed * 3 * rng.random(points) - 0.2
    step = layers / speed * rng.integers(1, 4, points) if steps else None
    keep = pareto(t, d, step)
    in_turn, backward = (
        float(rng.choice([0.0, x])) for x in (0.1 / speed, layers / speed * rng.uniform(0.4, 1))
    )
    return Front(t[keep], d[keep], step[keep] if steps else None, in_turn, backward)


def equal(rng, stages, counts, points, steps=False):
    """Random fronts: t grows with layers, d is anything, some slots are infeasible."""
    return [
        {count: front(rng, count, 1, points, steps) for count in counts if rng.random() > 0.1}
        for _ in range(stages)
    ]


def unequal(rng, nodes, per_node, layers, points, kinds=1, steps=False):
    """Pipelines of all lengths with stages of parts of a node or whole nodes; bigger ones are faster, some
    slots are infeasible, stages with more behind them fit fewer layers, as with real memory, and of several
    kinds some may not stand beside some."""
    apart = np.triu(rng.random((kinds, kinds)) < 0.3, 1)
    gpus = nodes * per_node
    meshes = [k for k in range(1, per_node) if per_node % k == 0]
    meshes += [per_node * k for k in range(1, nodes + 1)]

    def stage(after):
        return {
            (count, mesh, kind): front(rng, count, mesh ** rng.uniform(0.6, 1.0), points, steps)
            for mesh in meshes
            for kind in range(kinds)
            for count in range(1, max(2, 3 * mesh - after + 1))
            if count <= layers and rng.random() > 0.25
        }

    longest = min(gpus, layers)
    return Pipelines(
        inner=[stage(after) for after in range(longest - 1)],
        first={after: stage(after) for after in range(longest) if rng.random() > 0.1},
        layers=layers,
        gpus=gpus,
        gpus_per_node=per_node,
        neighbours=~(apart | apart.T),
    )


def straddles(sizes, per_node):
    """Whether some stage on consecutive GPUs begins or ends inside a node that it does not fill alone."""
    begin = 0
    for _, gpus, _ in sizes:
        touched = set(range(begin // per_node, (begin + gpus - 1) // per_node + 1))
        if len(touched) != max(1, gpus // per_node):
            return True
        begin += gpus
    return False


def brute_force(pipelines, grad_accum):
    best = np.inf
    for after, first in pipelines.first.items():
        stages = [first, *reversed(pipelines.inner[:after])]
        for sizes in itertools.product(*[list(fronts) for fronts in stages]):
            if sum(layers for layers, *_ in sizes) != pipelines.layers:
                continue
            if sum(gpus for _, gpus, _ in sizes) != pipelines.gpus:
                continue
            if not all(pipelines.neighbours[one[2], two[2]] for one, two in itertools.pairwise(sizes)):
                continue
            if pipelines.gpus_per_node and straddles(sizes, pipelines.gpus_per_node):
                continue
            fronts = [stage[size] for stage, size in zip(stages, sizes, strict=True)]
            for picks in itertools.product(*[range(len(f.t_s)) for f in fronts]):
                points = list(zip(fronts, picks, strict=True))
                best = min(best, least_time(points, grad_accum, chunks=pipelines.chunks))
    return best


def least_time(points, grad_accum, *, chunks=1):
    """Path by path: what stands still at a stage, what that waits for at least, and what the first and last
    micro-batch add; and the longest step where each waits for all stages."""
    t = [front.t_s[k] for front, k in points]
    d = [front.d_s[k] for front, k in points]
    step = [0.0 if front.step_s is None else front.step_s[k] for front, k in points]
    late = max(d[i] - sum(t[:i]) for i in range(len(t)))
    paths = []
    for b, (front, _) in enumerate(points):
        following, behind = len(t) - 1 - b, sum(t[b + 1 :])
        fills = following if chunks == 1 else 2 * following
        between = max(grad_accum - 1 - (chunks - 1) * len(t), 0)
        waits = behind - min(fills, between) * min(t[b] / 2, t[b] - front.backward_s)
        if between > fills and following:
            waits = max(waits, 2 * behind - 0.5 * front.in_turn_s - fills * t[b])
        passes = grad_accum * t[b] + (grad_accum - 1) * front.in_turn_s
        paths.append(sum(t[:b]) + passes + waits)
    return max(paths) + late + max(step)


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    layers = int(rng.integers(count, 3 * count + 1))
    grad_accum = int(rng.choice([1, 2, 5, 32]))
    pipelines = in_line(equal(rng, count, (1, 2, 3), 4, seed % 2 > 0), layers, chunks=1 + (seed % 7 == 0))
    found, best = assign(pipelines, grad_accum), brute_force(pipelines, grad_accum)
    if found is None:
        assert best == np.inf
    else:
        assert found.value_s == pytest.approx(best, rel=1e-12)
        assert sum(found.layers) == layers


@pytest.mark.parametrize("seed", range(50))
def test_unequal_stages_equal_brute_force(seed):
    """Pipelines of all lengths at once, with stages of different sizes that do not straddle nodes."""
    rng = np.random.default_rng(seed)
    nodes, per_node = [(1, 4), (2, 2), (2, 4), (1, 6), (3, 2)][seed % 5]
    layers = int(rng.integers(2, 5 if nodes * per_node > 4 else 7))
    grad_accum = int(rng.choice([1, 2, 5, 32]))
    pipelines = unequal(rng, nodes, per_node, layers, 2, kinds=1 + seed % 2, steps=seed % 3 > 0)
    found, best = assign(pipelines, grad_accum), brute_force(pipelines, grad_accum)
    if found is None:
        assert best == np.inf
    else:
        assert found.value_s == pytest.approx(best, rel=1e-12)
        assert sum(found.layers) == layers
        assert sum(gpus for _, gpus, _ in found.sizes) == nodes * per_node
        assert not straddles(found.sizes, per_node)


@pytest.mark.parametrize("seed", one_of(3, range(60)))
def test_equals_the_integer_program(seed):
    rng = np.random.default_rng(1000 + seed)
    count = int(rng.integers(2, 5))
    layers = int(rng.integers(2 * count, 4 * count))
    grad_accum = int(rng.choice([1, 4, 16]))
    pipelines = in_line(equal(rng, count, (2, 3, 4), 4, seed % 2 > 0), layers, chunks=1 + (seed % 7 == 0))
    agree(assign(pipelines, grad_accum), assign_milp(pipelines, grad_accum))


@pytest.mark.parametrize("seed", one_of(3, range(60)))
def test_unequal_stages_equal_the_integer_program(seed):
    rng = np.random.default_rng(2000 + seed)
    nodes, per_node = [(1, 4), (2, 2), (2, 4), (1, 8), (3, 2)][seed % 5]
    layers = int(rng.integers(3, 9))
    grad_accum = int(rng.choice([1, 4, 16]))
    pipelines = unequal(rng, nodes, per_node, layers, 3, kinds=1 + seed % 3, steps=seed % 4 > 1)
    agree(assign(pipelines, grad_accum), assign_milp(pipelines, grad_accum))


def agree(exact, milp):
    assert (exact is None) == (milp is None)
    if exact is not None and milp is not None:
        assert exact.value_s == pytest.approx(milp.value_s, rel=1e-6)


def test_cbc_agrees():
    rng = np.random.default_rng(7)
    for pipelines in (in_line(equal(rng, 3, (2, 3, 4), 5), 9), unequal(rng, 2, 2, 5, 3)):
        exact, cbc = assign(pipelines, 8), assign_milp(pipelines, 8, solver="cbc")
        assert exact is not None
        agree(exact, cbc)


def test_an_incumbent_is_only_beaten():
    pipelines = in_line(equal(np.random.default_rng(3), 3, (1, 2, 3), 4), 6)
    best = assign(pipelines, 4)
    assert best is not None
    assert assign(pipelines, 4, best.value_s) is None
    again = assign(pipelines, 4, best.value_s * (1 + 1e-6))
    assert again is not None and again.value_s == pytest.approx(best.value_s)


def test_what_the_tick_raises_ends_the_search():
    class Enough(Exception):
        pass

    def tick():
        raise Enough

    with pytest.raises(Enough):
        assign(in_line(equal(np.random.default_rng(3), 3, (1, 2, 3), 4), 6), 4, tick=tick)


def test_value_is_the_longest_path():
    rng = np.random.default_rng(0)
    for index in range(50):
        fronts = [front(rng, 3, 1, 4, index % 2 > 0) for _ in range(1 + index % 6)]
        points = [(one, int(rng.integers(len(one.t_s)))) for one in fronts]
        for grad_accum in (1, 2, 3, 9):
            for chunks in (1, 2, 3):
                wanted = least_time(points, grad_accum, chunks=chunks)
                found = value_of([Point.of(*p) for p in points], grad_accum, chunks=chunks)
                assert found == pytest.approx(wanted)


def test_pareto_keeps_exactly_the_undominated():
    rng = np.random.default_rng(1)
    for _ in range(30):
        t, d = rng.integers(0, 6, 25).astype(float), rng.integers(0, 6, 25).astype(float)
        kept = {(t[k], d[k]) for k in pareto(t, d)}
        points = set(zip(t, d, strict=True))
        expected = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
        assert kept == expected
        assert len(pareto(t, d)) == len(kept)


def test_pareto_of_three_keeps_exactly_the_undominated():
    rng = np.random.default_rng(2)
    for _ in range(60):
        every = rng.integers(0, 5, (3, 40)).astype(float)
        kept = pareto(*every)
        points = {tuple(p) for p in every.T}
        expected = {
            p
            for p in points
            if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)
        }
        assert {tuple(every[:, k]) for k in kept} == expected
        assert len(kept) == len(expected)
        assert (np.diff(every[0][kept]) >= 0).all()
