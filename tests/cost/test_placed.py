"""Plans whose ranks lie elsewhere than their numbers say, and links that were measured one by one."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.evaluate import make_evaluator
from mist_megatron.cost.placed import Span, placed_stages
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.formats.files import CacheFolder
from mist_megatron.formats.plan_yaml import plan_from_text, plan_to_yaml
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec.links import LinkMatrix, short_name
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.term import Term

PLAN = """
schema: 1
model: gpt3-7b
training: {global_batch: 64, seq_len: 2048, precision: bf16}
cluster: {gpu: a100-sxm-80gb, nodes: 4, gpus_per_node: 8}
target: megatron
grad_accum: 16
stages:
  - {layers: 16, nodes: 2, gpus_per_node: 8, dp: 4, tp: 4, micro_batch: 1, zero: 1}
  - {layers: 16, nodes: 2, gpus_per_node: 8, dp: 4, tp: 4, micro_batch: 1, zero: 1}
"""
HOSTS = ("node-a", "node-b", "node-c", "node-d")


def by_nodes(*order: int) -> tuple[int, ...]:
    """A map that exchanges whole nodes."""
    return tuple(node * 8 + gpu for node in order for gpu in range(8))


def rates(slow: dict[tuple[int, int], float | None] | None = None, usual: float = 20e9) -> LinkMatrix:
    slow = slow or {}
    rows = tuple(
        tuple(None if a == b else slow.get((a, b), slow.get((b, a), usual)) for b in range(4))
        for a in range(4)
    )
    return LinkMatrix(hosts=HOSTS, bytes_per_s=rows, gpus_at_once=8)


def linked(plan: Plan, matrix: LinkMatrix) -> Plan:
    return replace(plan, cluster=replace(plan.cluster, links=replace(plan.cluster.links, matrix=matrix)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_from_text(PLAN)


_COMPILED = tempfile.TemporaryDirectory()


def predicted(plan: Plan):
    prices = datasheet_prices(plan.cluster, "bf16")
    return predict(plan, make_evaluator(job_of(plan), prices, cache=CacheFolder(Path(_COMPILED.name))))


def seconds(plan: Plan) -> float:
    return predicted(plan).iteration_s


def test_torn_tensor_groups_are_priced_by_the_nodes_that_they_touch(plan):
    usual = seconds(plan)
    scattered = replace(plan, rank_map=tuple(rank % 4 * 8 + rank // 4 for rank in range(32)))
    (first, _) = placed_stages(scattered)
    assert first.of(Group.TENSOR) == (Span(4, 1),)
    assert seconds(scattered) > 1.5 * usual
    exchanged = list(range(32))
    exchanged[3], exchanged[8] = 8, 3
    torn = replace(plan, rank_map=tuple(exchanged))
    (first, second) = placed_stages(torn)
    # Three of one group are left on its node; the other groups of the stage lie as before.
    assert first.of(Group.TENSOR) == (Span(1, 4), Span(2, 1))
    assert second.of(Group.TENSOR) == (Span(1, 4),)
    assert usual < seconds(torn) < seconds(scattered)


def test_maps_that_change_nothing_cost_nothing(plan):
    usual = predicted(plan)
    for order in ((0, 1, 2, 3), (2, 3, 0, 1), (1, 0, 3, 2), (3, 1, 0, 2)):
        assert predicted(replace(plan, rank_map=by_nodes(*order))) == usual


def test_links_are_those_that_the_ranks_use(plan):
    """dp 4 and tp 4 fill two nodes: reductions use the link of a stage's own nodes, sends those between
    node 0 and 2 and between 1 and 3."""
    usual = linked(plan, rates())
    terms = [stage.stable_terms_s for stage in predicted(usual).stages]
    for slow, stage, sends in (((1, 3), None, True), ((0, 1), 0, False), ((2, 3), 1, False)):
        found = predicted(linked(plan, rates({slow: 1e9})))
        for position, (one, before) in enumerate(zip(found.stages, predicted(usual).stages, strict=True)):
            slower = one.stable_terms_s[Term.PIPELINE_P2P] > terms[position][Term.PIPELINE_P2P]
            assert slower == sends
            assert (one.delta_s > before.delta_s * 1.01) == (position == stage)
    unused = predicted(linked(plan, rates({(0, 3): 1e9})))
    assert unused == predicted(usual)
    assert seconds(replace(linked(plan, rates({(1, 3): 1e9})), rank_map=by_nodes(0, 1, 3, 2))) == (
        pytest.approx(seconds(usual))
    )


def test_a_send_takes_what_its_link_says(plan):
    """Each rank sends its micro-batch x sequence x hidden x 2 bytes; the profile adds its latency."""
    message = 1 * 2048 * 4096 * 2.0
    slow, fast = (predicted(linked(plan, rates(usual=rate))).stages[0] for rate in (1e9, 2e9))
    more = slow.stable_terms_s[Term.PIPELINE_P2P] - fast.stable_terms_s[Term.PIPELINE_P2P]
    assert more == pytest.approx(message / 1e9 - message / 2e9)


def test_figures_of_one_gpu_at_a_time_are_shared_out(plan):
    """One GPU alone got 20 GB/s. Eight that share a node's 25 GB/s of adapters do not; eight adapters do."""
    alone = replace(rates(), gpus_at_once=1)
    assert alone.loaded_share(8, 25e9) == pytest.approx(25 / 160)
    assert alone.loaded_share(8, 400e9) == 1.0
    assert alone.loaded_share(8, 1e9) == pytest.approx(1 / 8)
    assert rates().loaded_share(8, 25e9) == 1.0
    fast = rates(usual=40e9)  # 8 of them are twice what an A100 node has
    assert seconds(linked(plan, replace(fast, gpus_at_once=1))) > 1.001 * seconds(linked(plan, fast))


def test_unmeasured_links_count_as_the_slowest_and_dead_ones_are_refused(plan):
    matrix = rates({(1, 3): None, (0, 1): 5e9})
    assert matrix.unmeasured == (("node-b", "node-d"),)
    assert matrix.rate(1, 3) == 5e9
    with pytest.raises(InputError, match="node-b to node-d carries nothing"):
        seconds(linked(plan, rates({(1, 3): 0.0})))
    assert seconds(linked(plan, rates({(0, 3): 0.0}))) == seconds(linked(plan, rates()))


def test_what_is_wrong_with_links_is_told(plan):
    with pytest.raises(InputError, match="links has 4 hosts; wanted one for each of its 2 nodes"):
        replace(plan.cluster, nodes=2, links=replace(plan.cluster.links, matrix=rates()))
    with pytest.raises(InputError, match="check the units"):
        rates({(0, 1): 20e15})
    with pytest.raises(InputError, match="named twice"):
        replace(rates(), hosts=("a", "a.example.org", "c", "d"))
    assert (short_name("10.0.0.7"), short_name("n1.example.org:3")) == ("10.0.0.7", "n1")


def test_plans_carry_their_links(plan):
    placed = replace(linked(plan, rates({(1, 3): None})), rank_map=by_nodes(0, 1, 3, 2))
    assert plan_from_text(plan_to_yaml(placed)) == placed


@pytest.mark.parametrize(
    ("ep", "etp", "dispatcher"), [(16, 1, "alltoall"), (1, 16, "alltoall"), (8, 2, "allgather")]
)
def test_tokens_on_their_way_to_experts_use_the_links_that_they_really_use(ep, etp, dispatcher):
    """Slower links between the two nodes of 16 ranks that have one another's experts, or parts of the same:
    what crosses takes as much longer."""
    plan = plan_from_text(
        f"""
schema: 1
model: qwen3-30b-a3b
training: {{global_batch: 16, seq_len: 2048, precision: bf16}}
cluster: {{gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}}
target: megatron
grad_accum: 2
execution: {{expert_parallel: {ep}, expert_tensor_parallel: {etp}, expert_dispatcher: {dispatcher}}}
sequence_parallel: true
stages: [{{layers: 48, nodes: 2, gpus_per_node: 8, dp: 8, tp: 2, micro_batch: 1, zero: 1}}]
"""
    )

    def exchange_s(rate: float) -> float:
        matrix = LinkMatrix(hosts=("a", "b"), bytes_per_s=((None, rate), (rate, None)), gpus_at_once=8)
        links = replace(plan.cluster.links, matrix=matrix)
        on_links = replace(plan, cluster=replace(plan.cluster, links=links))
        found = predict(on_links, evaluator_for(job_of(on_links))[0])
        return found.stages[0].stable_terms_s[Term.EXPERT_TRAFFIC]

    fast, slow, slower = (exchange_s(rate) for rate in (4e9, 1e9, 0.5e9))
    assert (slower - slow) / (slow - fast) == pytest.approx((2 - 1) / (1 - 1 / 4), rel=1e-6)
    assert slow > 3.0 * fast
