"""GPUs inside a node: bridges between pairs of them beside PCIe."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

import mist_megatron as mm
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.place import place_on
from mist_megatron.calibrate.imported import Hints
from mist_megatron.calibrate.links import matrices_of, read_links
from mist_megatron.cost.predict import job_of
from mist_megatron.errors import InputError
from mist_megatron.formats.links_yaml import links_from_text, links_to_text
from mist_megatron.formats.plan_yaml import plan_from_text, plan_to_yaml
from mist_megatron.search.place_gpus import gpus_in_order

PLAN = """
schema: 1
model: gpt3-1.3b
training: {global_batch: 32, seq_len: 2048, precision: bf16}
cluster: {gpu: a100-sxm-80gb, nodes: 2, gpus_per_node: 4}
target: megatron
grad_accum: 16
stages:
  - {layers: 12, nodes: 1, gpus_per_node: 4, dp: 2, tp: 2, micro_batch: 1, zero: 1}
  - {layers: 12, nodes: 1, gpus_per_node: 4, dp: 2, tp: 2, micro_batch: 1, zero: 1}
"""


def table(inside: dict[str, np.ndarray]) -> str:
    """A GPU a row, 20 GB/s between nodes."""
    names = [f"{host}:{gpu}" for host, rates in inside.items() for gpu in range(len(rates))]
    lines = [",".join(["GB/s", *names])]
    for one in names:
        cells = []
        for other in names:
            (host, a), (there, b) = one.split(":"), other.split(":")
            rate = 20.0 if host != there else inside[host][int(a), int(b)]
            cells.append("" if one == other or np.isnan(rate) else f"{rate}")
        lines.append(",".join([one, *cells]))
    return "\n".join(lines) + "\n"


def measured(inside: dict[str, np.ndarray]):
    found = read_links(table(inside), "gpus.csv", Hints(date="2026-11-20", gpus_at_once=4))
    ((matrix,), _) = matrices_of(found.links)
    return matrix


def bridged(*pairs: tuple[int, int], slow: float = 20.0) -> np.ndarray:
    rates = np.full((4, 4), slow)
    for a, b in pairs:
        rates[a, b] = rates[b, a] = 200.0
    return rates


@pytest.fixture
def plan(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("MIST_MEGATRON_CACHE", str(tmp_path_factory.getbasetemp() / "programs"))
    return plan_from_text(PLAN)


def test_tensor_parallel_pairs_get_the_bridges(plan):
    """n1 bridges neighbours as the plan has them, n2 0-2 and 1-3; all 24 orders of n2 by `predict`."""
    matrix = measured({"n1": bridged((0, 1), (2, 3)), "n2": bridged((0, 2), (1, 3))})
    found = place_on(plan, matrix)
    groups = [{found.plan.gpu_of[rank] % 4 for rank in ranks} for ranks in ((4, 5), (6, 7))]
    assert sorted(map(sorted, groups)) == [[0, 2], [1, 3]]
    assert tuple(found.plan.gpu_of[:4]) == (0, 1, 2, 3)
    assert not found.kept_default and found.gain > 0.02
    assert any("GPUs inside n2 in another order" in note for note in found.notes)
    linked = replace(plan, cluster=found.plan.cluster)
    every = [
        mm.predict(replace(linked, rank_map=(0, 1, 2, 3, *(4 + gpu for gpu in order)))).iteration_s
        for order in permutations(range(4))
    ]
    assert found.iteration_s == pytest.approx(min(every))
    assert mm.simulate(found.plan).iteration_s < 0.99 * mm.simulate(linked).iteration_s
    assert plan_from_text(plan_to_yaml(found.plan)) == found.plan


def test_links_inside_that_are_alike_change_nothing(plan):
    same = np.full((4, 4), 200.0)
    matrix = measured({"n1": same, "n2": same})
    found, usual = place_on(plan, matrix), place_on(plan, replace(matrix, inside=()))
    assert (found.iteration_s, found.kept_default) == (usual.iteration_s, True)
    assert found.plan.rank_map is None


@pytest.mark.parametrize(("slow", "moves"), [(20.0, True), (150.0, True), (189.0, True), (191.0, False)])
def test_order_is_thought_of_where_a_pair_is_a_twentieth_slower(plan, slow, moves):
    """Bridges of 200 GB/s between 0-2 and 1-3 of the second node, whose stage is the slowest."""
    matrix = measured({"n1": bridged((0, 1), (2, 3), slow=slow), "n2": bridged((0, 2), (1, 3), slow=slow)})
    linked = replace(plan, cluster=replace(plan.cluster, links=replace(plan.cluster.links, matrix=matrix)))
    ordered = gpus_in_order(linked, evaluator_for(job_of(linked))[0], seed=0, evaluations=1000)
    pairs = {frozenset(gpu - 4 for gpu in ordered.gpu_of[at : at + 2]) for at in (4, 6)}
    assert (pairs == {frozenset((0, 2)), frozenset((1, 3))}) == moves
    assert (ordered.rank_map is None) == (not moves)


def test_dead_and_unmeasured_links_inside(plan):
    """A dead link is avoided; a pair that nobody measured counts as the slowest that was."""
    dead = bridged((0, 1), (2, 3), (0, 2), (1, 3))
    dead[0, 1] = 0.0
    found = place_on(plan, measured({"n1": dead, "n2": bridged((0, 1), (2, 3))}))
    assert {found.plan.gpu_of[rank] for rank in (0, 1)} in ({0, 2}, {1, 3})
    with pytest.raises(InputError, match="inside a node that the plan"):
        mm.predict(replace(plan, cluster=found.plan.cluster))
    gap = bridged((0, 1), (2, 3))
    gap[0, 2] = gap[2, 0] = np.nan
    assert measured({"n1": gap, "n2": gap}).inside_shares(0)[0] == pytest.approx((1.0, 1.0, 0.1, 0.1))


def test_files_hold_them(plan):
    matrix = measured({"n1": bridged((0, 1)), "n2": bridged((0, 2))})
    text = links_to_text([matrix])
    assert links_from_text(text, "links.yaml") == (matrix,)
    again = matrices_of(read_links(text, "links.yaml", Hints(date="")).links)[0][0]
    assert again.inside == matrix.inside
    assert matrix.take([1, 0]).inside == matrix.inside[::-1]
    with pytest.raises(InputError, match="between 4 GPUs of each node; its nodes have 8"):
        links = replace(plan.cluster.links, matrix=matrix)
        replace(plan.cluster, gpus_per_node=8, links=links)
    broken = text.replace("- - [null", "- - [-1.0", 1)
    with pytest.raises(InputError, match="inside"):
        links_from_text(broken, "links.yaml")
