"""Which node goes where: against every order priced by `predict`, and what is told of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from short_form import one_of

import mist_megatron as mm
from mist_megatron.ask import place
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of
from mist_megatron.errors import InputError
from mist_megatron.formats.links_yaml import links_to_text
from mist_megatron.formats.plan_yaml import plan_from_text
from mist_megatron.search.place import Order, seconds_per_byte
from mist_megatron.search.place_costs import places_of
from mist_megatron.spec.links import LinkMatrix

PLAN = """
schema: 1
model: gpt3-1.3b
training: {global_batch: 64, seq_len: 2048, precision: bf16}
cluster: {gpu: a100-sxm-80gb, nodes: 4, gpus_per_node: 2}
target: megatron
grad_accum: 16
stages:
  - {layers: 12, nodes: 2, gpus_per_node: 2, dp: 4, tp: 1, micro_batch: 1, zero: 1}
  - {layers: 12, nodes: 2, gpus_per_node: 2, dp: 4, tp: 1, micro_batch: 1, zero: 1}
"""
CHAIN = PLAN.replace("nodes: 2,", "nodes: 1,").replace("dp: 4", "dp: 2").replace("global_batch: 64", (
    "global_batch: 32"
)).replace("layers: 12", "layers: 6").replace("stages:\n", (
    "stages:\n" + "  - {layers: 6, nodes: 1, gpus_per_node: 2, dp: 2, tp: 1, micro_batch: 1, zero: 1}\n" * 2
))  # fmt: skip


def matrix_of(rates: np.ndarray, gpus: int = 2, **more) -> LinkMatrix:
    count = len(rates)
    rows = tuple(
        tuple(None if a == b or np.isnan(rates[a, b]) else float(rates[a, b]) for b in range(count))
        for a in range(count)
    )
    hosts = tuple(f"n{k}" for k in range(count))
    return LinkMatrix(
        hosts=hosts, bytes_per_s=rows, gpus_at_once=gpus, date="2026-11-20", **{"spread": 0.001, **more}
    )


def same(count: int, rate: float = 10e9) -> np.ndarray:
    return np.full((count, count), rate)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return str(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def placed(tmp_path, compiled, monkeypatch):
    monkeypatch.setenv("MIST_MEGATRON_CACHE", compiled)

    def call(plan, matrix, **words):
        path = tmp_path / "links.yaml"
        path.write_text(links_to_text([matrix]))
        return mm.place(plan, links=path, **words)

    return call


CHUNKS = CHAIN.replace("grad_accum: 16", "grad_accum: 16\nvpp: 2\nschedule: interleaved")


TIED = CHAIN.replace("gpt3-1.3b", "gpt2-xl").replace("layers: 6", "layers: 12")


@pytest.mark.parametrize(
    ("text", "shares"),
    one_of(2, [(PLAN, (0.98, 1.0)), (CHAIN, (1.0, 1.02)), (CHUNKS, (0.94, 1.0)), (TIED, (1.0, 1.02))]),
)
def test_no_order_is_faster_by_predict(placed, text, shares):
    """All 24 orders of four nodes, each priced by `predict` with its map; the formula that ranks orders tells
    each within the share of it that Mist's eq. 1 leaves."""
    random, plan = np.random.default_rng(11), plan_from_text(text)
    rates = np.exp(random.normal(np.log(4e9), 0.8, (4, 4)))
    matrix = matrix_of(np.minimum(rates, rates.T))
    found = placed(plan, matrix)
    cluster = replace(plan.cluster, links=replace(plan.cluster.links, matrix=matrix))
    linked = replace(plan, cluster=cluster)
    every = [
        mm.predict(replace(linked, rank_map=tuple(2 * node + gpu for node in order for gpu in range(2))))
        for order in permutations(range(4))
    ]
    assert found.proved
    assert found.iteration_s == pytest.approx(min(one.iteration_s for one in every), rel=3e-3)
    asked = places_of(plan, evaluator_for(job_of(linked))[0], matrix)
    costs_s = asked.cost(np.array(list(permutations(range(4)))), seconds_per_byte(matrix))
    for cost_s, one in zip(costs_s, every, strict=True):
        assert shares[0] - 1e-9 <= cost_s / one.iteration_s <= shares[1] + 1e-9
    assert mm.predict(found.plan).iteration_s == pytest.approx(found.iteration_s)
    low, high = found.interval
    assert low - 0.005 <= found.found_gain <= high + 0.005


def test_a_slow_node_is_left_out_where_there_is_a_spare_one(placed):
    rates = same(5)
    rates[1, :] = rates[:, 1] = 5e9
    found = placed(plan_from_text(PLAN), matrix_of(rates))
    assert found.left_out == ("n1",)
    assert found.plan.cluster.links.matrix.hosts == ("n0", "n2", "n3", "n4")
    assert found.gain > 0.01
    assert found.to_dict()["slow_nodes"] == ["n1"]
    without = placed(plan_from_text(PLAN), matrix_of(rates), avoid="n1", spare=0)
    assert (without.left_out, without.kept_default) == ((), True)


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_nodes_are_the_fewest_whose_order_matters(placed, nodes):
    """A stage over all of them, and a spare node with the better link to the last one."""
    head, stages = PLAN.replace("nodes: 4", f"nodes: {nodes}").split("stages:\n")
    stage = stages.splitlines()[0].replace("layers: 12, nodes: 2", f"layers: 24, nodes: {nodes}")
    plan = plan_from_text(f"{head}stages:\n{stage.replace('dp: 4', f'dp: {2 * nodes}')}\n".replace(
        "grad_accum: 16", f"grad_accum: {32 // nodes}"
    ))  # fmt: skip
    rates = same(nodes + 1, 1e9)
    rates[nodes - 1, nodes] = rates[nodes, nodes - 1] = 10e9
    if nodes == 1:
        with pytest.raises(InputError, match="the plan has one node; wanted two or more"):
            placed(plan, matrix_of(rates))
    else:
        assert set(placed(plan, matrix_of(rates)).hosts) == {"n1", "n2"}


def test_islands_are_found(placed):
    """Two islands of two: reductions of a stage stay on one, the sends of its replicas cross."""
    rates = same(4, 2e9)
    for pair in ((0, 2), (1, 3)):
        rates[pair] = rates[pair[::-1]] = 20e9
    found = placed(plan_from_text(PLAN), matrix_of(rates))
    stages = [set(found.hosts[:2]), set(found.hosts[2:])]
    assert {"n0", "n2"} in stages
    assert {"n1", "n3"} in stages


def test_what_is_within_the_noise_is_not_taken(placed):
    random = np.random.default_rng(5)
    rates = 10e9 * np.exp(random.normal(0.0, 0.03, (4, 4)))
    matrix = matrix_of(np.minimum(rates, rates.T), spread=None)
    found = placed(plan_from_text(PLAN), matrix)
    assert found.kept_default
    assert found.plan.rank_map is None
    assert (found.gain, found.interval[0] <= 0.0) == (0.0, True)
    assert any("no pair was measured twice" in note for note in found.notes)


@pytest.mark.parametrize(("text", "seed"), [(CHAIN, 6), (CHUNKS, 5)])
def test_what_noise_explains_moves_nothing_by_either_formula(placed, text, seed):
    """Sends, which the formula of the draws and `predict` price differently: where repeats are as far apart
    as the links, no order has a gain. An interval shifted by what tells them apart said +1 and +3 %."""
    random = np.random.default_rng(seed)
    rates = 0.1e9 * np.exp(random.normal(0.0, 0.15, (4, 4)))
    found = placed(plan_from_text(text), matrix_of(np.minimum(rates, rates.T), spread=0.25, repeats=1))
    assert found.found_gain > 0.04
    assert found.interval == pytest.approx((0.0, 0.0), abs=1e-9)
    assert found.kept_default


def test_dead_and_unmeasured_links(placed):
    rates = same(4)
    rates[0, 2] = rates[2, 0] = rates[0, 3] = rates[3, 0] = 0.0
    rates[2, 3] = rates[3, 2] = np.nan
    found = placed(plan_from_text(CHAIN), matrix_of(rates))
    # n0 reaches n1 alone, so it stands at an end of the chain, and n1 beside it; n2 and n3 are left.
    assert found.hosts[:2] in (("n0", "n1"), ("n2", "n3"), ("n3", "n2"))
    assert found.unmeasured_used == (("n2", "n3"),)
    assert any("nobody measured" in note for note in found.notes)
    json.dumps(found.to_dict(), allow_nan=False)
    rates[0, 1] = rates[1, 0] = 0.0
    with pytest.raises(InputError, match="carries nothing"):
        placed(plan_from_text(CHAIN), matrix_of(rates))


def test_the_same_seed_gives_the_same_answer(placed, tmp_path):
    random = np.random.default_rng(2)
    rates = np.exp(random.normal(np.log(4e9), 0.8, (11, 11)))
    matrix = matrix_of(np.minimum(rates, rates.T))
    one, other = (placed(plan_from_text(CHAIN), matrix, seed=3, evaluations=20_000) for _ in range(2))
    assert (one.hosts, one.interval) == (other.hosts, other.interval)
    # Of two, since in one of them Python may look through all that the tests have made.
    assert max(one.evaluations_per_cpu_s, other.evaluations_per_cpu_s) > 100_000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"avoid": ("n9",)}, "--avoid n9: no such node"),
        ({"avoid": ("n1", "n2.example.org")}, "links are known of 3 without n1, n2.example.org"),
        ({"spare": 2}, "needs 4 nodes and 2 spare ones"),
        ({"gpus_at_once": 8}, "--gpus-at-once is 8; measured were 2"),
    ],
)
def test_wrong_words_are_refused(placed, words, told):
    with pytest.raises(InputError) as caught:
        placed(plan_from_text(PLAN), matrix_of(same(5)), **words)
    assert told in caught.value.message


def test_emitted_folders_of_placed_plans_are_read_back_with_their_map(placed, tmp_path):
    rates = same(4, 20e9)
    rates[0, 1] = rates[1, 0] = rates[2, 3] = rates[3, 2] = 0.5e9
    found = placed(plan_from_text(PLAN), matrix_of(rates))
    assert found.plan.rank_map is not None
    folder = tmp_path / "run"
    mm.emit(found.plan, out=folder)
    read = mm.lint(folder)
    assert read.plan.rank_map == found.plan.rank_map
    assert mm.predict(read.plan).iteration_s == pytest.approx(found.iteration_s, rel=1e-6)


def test_another_file_is_not_taken_for_links(tmp_path):
    (tmp_path / "x.csv").write_text("GB/s,a,b\na,,1\nb,1,\n")
    with pytest.raises(InputError, match=r"not a links\.yaml") as caught:
        mm.place(plan_from_text(PLAN), links=tmp_path / "x.csv")
    assert "calibrate import --links" in caught.value.details[0]


def test_what_links_do_not_price_is_told(placed):
    text = PLAN.replace("gpt3-1.3b", "mixtral-8x7b").replace("layers: 12", "layers: 16")
    told = placed(plan_from_text(text), matrix_of(same(4)))
    assert any("what experts exchange" in note for note in told.notes)
    assert not any(
        "what experts exchange" in note for note in placed(plan_from_text(PLAN), matrix_of(same(4))).notes
    )


@pytest.mark.parametrize(("seconds", "wanted"), [
    ((2.0, 2.0, 2.0), 0),
    ((2.0, 1.9999999, 2.0), 0),
    ((2.0, 1.5, 1.9), 1),
    ((2.0, 1.9, 1.5), 2),
])  # fmt: skip
def test_of_orders_that_are_close_the_first_stays_unless_another_gains(monkeypatch, seconds, wanted):
    orders = [(0, 1), (1, 0), (2, 1)]
    told = iter(seconds)
    monkeypatch.setattr(place, "on_nodes", lambda plan, matrix, nodes: None)
    monkeypatch.setattr(place, "_seconds", lambda plan: next(told))
    order = Order(
        nodes=orders[0], close=tuple(orders[1:]), cost=1.0, first_cost=1.0, proved=True, evaluations=1
    )
    assert place._fastest(None, None, order) == (seconds[wanted], orders[wanted])
