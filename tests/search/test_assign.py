"""The exact assignment against brute force and against the mixed-integer program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mist_megatron.search.assign import Front, Pipelines, assign, in_line, pareto, value_of
from mist_megatron.search.milp import assign_milp


def front(rng, layers, speed, points, steps=False):
    t = layers / speed * (1 + rng.random(points))
    d = layers / speed * 3 * rng.random(points) - 0.2
    step = layers / speed * rng.integers(1, 4, points) if steps else None
    keep = pareto(t, d, step)
    return Front(t[keep], d[keep], step[keep] if steps else None)


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
                t = [f.t_s[k] for f, k in zip(fronts, picks, strict=True)]
                d = [f.d_s[k] for f, k in zip(fronts, picks, strict=True)]
                step = [0.0 if f.step_s is None else f.step_s[k] for f, k in zip(fronts, picks, strict=True)]
                best = min(best, equation_1(t, d, grad_accum, step))
    return best


def equation_1(t, d, grad_accum, step=(0.0,)):
    """As the Mist paper writes it, and the longest step where each waits for all stages."""
    late = max(d[i] - sum(t[:i]) for i in range(len(t)))
    return (grad_accum - 1) * max(t) + sum(t) + late + max(step)


@pytest.mark.parametrize("seed", range(120))
def test_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    layers = int(rng.integers(count, 3 * count + 1))
    grad_accum = int(rng.choice([1, 2, 5, 32]))
    pipelines = in_line(equal(rng, count, (1, 2, 3), 4, seed % 2 > 0), layers)
    found, best = assign(pipelines, grad_accum), brute_force(pipelines, grad_accum)
    if found is None:
        assert best == np.inf
    else:
        assert found.value_s == pytest.approx(best, rel=1e-12)
        assert sum(found.layers) == layers


@pytest.mark.parametrize("seed", range(80))
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


@pytest.mark.parametrize("seed", range(120))
def test_equals_the_integer_program(seed):
    rng = np.random.default_rng(1000 + seed)
    count = int(rng.integers(2, 5))
    layers = int(rng.integers(2 * count, 4 * count))
    grad_accum = int(rng.choice([1, 4, 16]))
    pipelines = in_line(equal(rng, count, (2, 3, 4), 4, seed % 2 > 0), layers)
    agree(assign(pipelines, grad_accum), assign_milp(pipelines, grad_accum))


@pytest.mark.parametrize("seed", range(100))
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


def test_value_is_equation_1():
    rng = np.random.default_rng(0)
    for _ in range(50):
        t, d = rng.random(5), rng.random(5) - 0.3
        step = rng.random(5)
        assert value_of(t, d, 9, step) == pytest.approx(equation_1(list(t), list(d), 9, step))


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
