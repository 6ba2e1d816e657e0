"""The exact assignment against brute force and against the mixed-integer program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mist_megatron.search.assign import Front, assign, pareto, value_of
from mist_megatron.search.milp import assign_milp


def instance(rng, stages, counts, points):
    """Random fronts: t grows with layers, d is anything, some slots are infeasible."""
    made = []
    for _ in range(stages):
        fronts = {}
        for count in counts:
            if rng.random() < 0.1:
                continue
            t = count * (1 + rng.random(points))
            d = count * 3 * rng.random(points) - 0.2
            keep = pareto(t, d)
            fronts[count] = Front(t[keep], d[keep])
        made.append(fronts)
    return made


def brute_force(stages, layers, grad_accum):
    best = np.inf
    for counts in itertools.product(*[list(fronts) for fronts in stages]):
        if sum(counts) != layers:
            continue
        fronts = [stage[count] for stage, count in zip(stages, counts, strict=True)]
        for picks in itertools.product(*[range(len(front.t_s)) for front in fronts]):
            t = [front.t_s[k] for front, k in zip(fronts, picks, strict=True)]
            d = [front.d_s[k] for front, k in zip(fronts, picks, strict=True)]
            best = min(best, equation_1(t, d, grad_accum))
    return best


def equation_1(t, d, grad_accum):
    """As the Mist paper writes it."""
    late = max(d[i] - sum(t[:i]) for i in range(len(t)))
    return (grad_accum - 1) * max(t) + sum(t) + late


@pytest.mark.parametrize("seed", range(120))
def test_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    layers = int(rng.integers(count, 3 * count + 1))
    grad_accum = int(rng.choice([1, 2, 5, 32]))
    stages = instance(rng, count, (1, 2, 3), 4)
    found, best = assign(stages, layers, grad_accum), brute_force(stages, layers, grad_accum)
    if found is None:
        assert best == np.inf
    else:
        assert found.value_s == pytest.approx(best, rel=1e-12)
        assert sum(found.layers) == layers


@pytest.mark.parametrize("seed", range(200))
def test_equals_the_integer_program(seed):
    rng = np.random.default_rng(1000 + seed)
    count = int(rng.integers(2, 5))
    layers = int(rng.integers(2 * count, 4 * count))
    grad_accum = int(rng.choice([1, 4, 16]))
    stages = instance(rng, count, (2, 3, 4), 4)
    exact, milp = assign(stages, layers, grad_accum), assign_milp(stages, layers, grad_accum)
    assert (exact is None) == (milp is None)
    if exact is not None and milp is not None:
        assert exact.value_s == pytest.approx(milp.value_s, rel=1e-6)


def test_cbc_agrees():
    stages = instance(np.random.default_rng(7), 3, (2, 3, 4), 5)
    exact, cbc = assign(stages, 9, 8), assign_milp(stages, 9, 8, solver="cbc")
    assert exact is not None and cbc is not None
    assert exact.value_s == pytest.approx(cbc.value_s, rel=1e-6)


def test_an_incumbent_is_only_beaten():
    stages = instance(np.random.default_rng(3), 3, (1, 2, 3), 4)
    best = assign(stages, 6, 4)
    assert best is not None
    assert assign(stages, 6, 4, best.value_s) is None
    again = assign(stages, 6, 4, best.value_s * (1 + 1e-6))
    assert again is not None and again.value_s == pytest.approx(best.value_s)


def test_value_is_equation_1():
    rng = np.random.default_rng(0)
    for _ in range(50):
        t, d = rng.random(5), rng.random(5) - 0.3
        assert value_of(t, d, 9) == pytest.approx(equation_1(list(t), list(d), 9))


def test_pareto_keeps_exactly_the_undominated():
    rng = np.random.default_rng(1)
    for _ in range(30):
        t, d = rng.integers(0, 6, 25).astype(float), rng.integers(0, 6, 25).astype(float)
        kept = {(t[k], d[k]) for k in pareto(t, d)}
        points = set(zip(t, d, strict=True))
        expected = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
        assert kept == expected
        assert len(pareto(t, d)) == len(kept)
