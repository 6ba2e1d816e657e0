"""Links as noise leaves them possible: draws have the spread that was measured, dead links stay."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mist_megatron.ask import place
from mist_megatron.ask.place import _drawn, _uses_dead
from mist_megatron.search.place import DEAD, chain_places, ring_places, seconds_per_byte
from mist_megatron.spec.links import LinkMatrix

RATES = (
    (None, 40e9, 20e9, 10e9),
    (30e9, None, 0.0, 40e9),
    (20e9, 40e9, None, None),
    (10e9, 40e9, 20e9, None),
)
MATRIX = LinkMatrix(hosts=("a", "b", "c", "d"), bytes_per_s=RATES, spread=0.1)


def test_a_pair_is_as_slow_as_its_slower_way_and_a_dead_one_a_million_times_the_slowest() -> None:
    told = seconds_per_byte(MATRIX)
    assert told[0, 1] == told[1, 0] == pytest.approx(1 / 30e9)
    assert told[1, 2] == told[2, 1] == pytest.approx(1e6 / 10e9)
    assert told.diagonal().tolist() == [0.0] * 4


@pytest.mark.parametrize(("repeats", "noise"), [(1, 0.1), (4, 0.05)])
def test_draws_have_the_noise_that_was_measured(repeats: int, noise: float) -> None:
    """Both ways alike; a dead link is dead however it is shaken; a mean of four is off by half."""
    matrix = replace(MATRIX, repeats=repeats)
    random, usual = np.random.default_rng(3), seconds_per_byte(matrix)
    drawn = np.array([_drawn(matrix, random) for _ in range(400)])
    assert np.array_equal(drawn, drawn.transpose(0, 2, 1))
    assert (drawn[:, 1, 2] == usual[1, 2]).all() and not drawn[:, range(4), range(4)].any()
    known = np.log(drawn[:, 0, 1])
    assert known.std() == pytest.approx(noise, rel=0.12)
    assert known.mean() == pytest.approx(np.log(usual[0, 1]), abs=0.03)


def test_a_pair_that_nobody_measured_may_be_any_that_was() -> None:
    rates = (RATES[0], RATES[1], (20e9, 40e9, None, None), (10e9, 40e9, None, None))
    matrix = replace(MATRIX, bytes_per_s=rates)
    random = np.random.default_rng(3)
    drawn = {round(1e-9 / _drawn(matrix, random)[2, 3]) for _ in range(100)}
    assert drawn == {10, 20, 30, 40}


@pytest.mark.parametrize(("order", "dead"), [((0, 1, 2), True), ((2, 0, 1), False)])
def test_an_order_uses_a_dead_link_where_neighbours_have_it(order: tuple[int, ...], dead: bool) -> None:
    links = seconds_per_byte(MATRIX)
    assert _uses_dead(chain_places(3), links, order) is dead
    assert _uses_dead(ring_places(3), links, order)  # three in a ring are all neighbours
    assert DEAD == 1e6


def test_a_ring_costs_its_slowest_link_and_a_chain_their_sum() -> None:
    links, orders = seconds_per_byte(MATRIX), np.array([[0, 1, 3], [1, 0, 3]])
    assert ring_places(3).cost(orders, links) == pytest.approx([1 / 10e9, 1 / 10e9])
    assert chain_places(3).cost(orders, links) == pytest.approx([1 / 30e9 + 1 / 40e9, 1 / 30e9 + 1 / 10e9])


def test_the_interval_is_of_the_middle_95_of_100_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains of 0 to 1 in equal steps: from 0.025 to 0.975."""
    gains = iter(np.linspace(0.0, 1.0, place.DRAWS))
    monkeypatch.setattr(place, "_drawn", lambda matrix, random: next(gains))
    places = SimpleNamespace(places=2, cost=lambda orders, rates: np.array([1.0 + rates, 1.0]))
    assert place._interval(places, MATRIX, (1, 0), 0) == pytest.approx((0.025, 0.975))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before_s", "told"),
    [
        (2.0, "no other that was found is faster"),
        (2.0 * (1.0 + 0.9 * place.LEAST_GAIN), "no other that was found is faster"),
        (2.0 * (1.0 + 1.1 * place.LEAST_GAIN), "GPUs inside b in another order: +0.1%"),
        (3.0, "GPUs inside b in another order: +50.0%"),
        (np.inf, "GPUs inside b in another order: a dead link is avoided"),
    ],
)
def test_gpus_move_for_more_than_a_thousandth(monkeypatch, before_s: float, told: str) -> None:
    links = SimpleNamespace(matrix=MATRIX)
    plan = SimpleNamespace(gpu_of=(0, 1, 2, 3), cluster=SimpleNamespace(links=links, gpus_per_node=2))
    ordered = SimpleNamespace(gpu_of=(0, 1, 3, 2))
    monkeypatch.setattr(place, "job_of", lambda plan: None)
    monkeypatch.setattr(place, "evaluator_for", lambda job: (None, ""))
    monkeypatch.setattr(place, "gpus_in_order", lambda plan, evaluator, seed, evaluations: ordered)
    monkeypatch.setattr(place, "_seconds", lambda one: 2.0 if one is ordered else before_s)
    taken, seconds, (note,) = place._gpus_placed(plan, 0, 1)  # type: ignore[arg-type]
    assert told in note
    assert (taken, seconds) == ((ordered, 2.0) if "another" in note else (plan, before_s))
