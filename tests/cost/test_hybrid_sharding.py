"""Sub-groups of replicas of Megatron-FSDP (HSDP): bytes and traffic against counts made by hand, its events,
its rules, and its flags."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.plan_words import shape_words
from mist_megatron.cost.predict import grids_of, job_of, predict
from mist_megatron.events.iteration import simulate
from mist_megatron.frameworks.flags import arguments
from mist_megatron.frameworks.megatron import write
from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.read import plan_of
from mist_megatron.price.prices import Collective
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.rules import violations
from tests.cost.test_explained_plans import check_plan
from tests.cost.test_fsdp_memory import LLAMA, MIXTURE, held, plan

ELEMENTS, TABLE = LLAMA.parameters, LLAMA.vocab * LLAMA.hidden


def told(made: Plan):
    return predict(made, evaluator_for(job_of(made))[0])


def test_bytes_by_hand() -> None:
    """Llama-3 8B on 32 ranks in four sub-groups of eight: what a level shards is an eighth on each rank, and
    optimizer states a thirty-second where the sub-groups share them out."""
    for zero, outer, owners in ((1, None, 8), (2, None, 8), (3, None, 8), (3, True, 32)):
        made = plan(zero=zero, nodes=4, optimizer_instances=4, outer_sharding=outer)
        assert not violations(made)
        terms = held(made)
        assert terms["optimizer"] == pytest.approx(12 * ELEMENTS / owners, rel=1e-6), zero
        assert terms["weights"] == pytest.approx(2 * ELEMENTS / (8 if zero == 3 else 1), rel=1e-6), zero
        assert terms["grads"] == pytest.approx(4 * ELEMENTS / (8 if zero > 1 else 1), rel=1e-6), zero


def test_narrow_gradients_are_cast_where_they_are_stepped() -> None:
    """4 bytes more, for a while, of what a rank updates."""
    for outer, owners in ((None, 8), (True, 16)):
        made = plan(zero=3, grad_bytes=2, optimizer_instances=2, outer_sharding=outer)
        moments = evaluator_for(job_of(made))[0].memory_moments(grids_of(made)[0])
        assert float(moments["beyond.step"]) == pytest.approx(4 * ELEMENTS / owners, rel=1e-6)


def test_experts_are_shared_out_over_copies_of_one_sub_group() -> None:
    experts = MIXTURE.kinds[0].experts
    assert experts is not None
    each = experts.expert_parameters(MIXTURE.hidden, gated=True, bias=False)
    routed = MIXTURE.layers * experts.count * each
    rest = MIXTURE.parameters - routed
    for outer, times in ((None, 1), (True, 2)):
        terms = held(plan(MIXTURE, nodes=4, optimizer_instances=2, outer_sharding=outer))
        assert terms["weights"] == pytest.approx(2 * (rest / 16 + routed / 8 / 2), rel=1e-6)
        assert terms["grads"] == pytest.approx(4 * (rest / 16 + routed / 8 / 2), rel=1e-6)
        states = 12 * (rest / 16 + routed / 8 / 2) / times
        assert terms["optimizer"] == pytest.approx(states, rel=1e-6)


def _seconds(evaluator, kind: str, message_bytes: float, ranks: int, nodes: int, strided: bool) -> float:
    work = Collective(
        kind, np.asarray(message_bytes), np.asarray(float(ranks)), np.asarray(float(nodes)),
        strided=np.asarray(strided),
    )  # fmt: skip
    return float(evaluator.time_context.prices.of(work).seconds)


@pytest.mark.parametrize(("zero", "outer"), [(2, None), (3, None), (3, True)])
def test_once_a_step_a_rank_part_goes_between_sub_groups(zero: int, outer: bool | None) -> None:
    """Two nodes, a sub-group on each: the embedding's gradients, beside which nothing runs, leave in the last
    pass as the code sends them: a table over the eight ranks of a node, an eighth of it between the two."""
    made = plan(zero=zero, optimizer_instances=2, outer_sharding=outer)
    evaluator, _ = evaluator_for(job_of(made))
    timeline = simulate(made, evaluator)
    kinds, ends = timeline.built.kind, timeline.timeline
    last = max(
        (event for event, kind in enumerate(kinds) if kind == "gradient reduction"),
        key=lambda event: float(ends.end_s[event]),
    )
    own = 4 * TABLE / 8
    between = _seconds(evaluator, "reduce_scatter" if outer else "all_reduce", own, 2, 2, True)
    elements = max(40e6, 1e6 * 16)
    inside = _seconds(evaluator, "reduce_scatter", 4 * elements, 8, 1, False) * (TABLE / elements)
    took_s = float(ends.end_s[last] - ends.start_s[last])
    assert took_s == pytest.approx(inside + between, rel=0.02)


def test_level_1_sends_whole_gradients_between_sub_groups() -> None:
    """The distributed optimizer sends the part that a rank updates: an eighth."""
    whole, part = (told(plan(zero=1, optimizer_instances=2, megatron_fsdp=on)) for on in (True, None))
    assert whole.iteration_s > part.iteration_s
    assert whole.stages[0].memory_terms_bytes["grads"] == part.stages[0].memory_terms_bytes["grads"]


def test_gathers_stay_inside_a_sub_group() -> None:
    """Level 3 gathers in every pass: over four nodes what each of them has instead costs nothing more between
    nodes than gradients, once."""
    for grad_accum in (4, 16):
        apart = told(plan(MIXTURE, nodes=4, grad_accum=grad_accum, optimizer_instances=2))
        joined = told(plan(MIXTURE, nodes=4, grad_accum=grad_accum))
        assert apart.stages[0].peak_memory_bytes > joined.stages[0].peak_memory_bytes
        assert apart.iteration_s < joined.iteration_s


@pytest.mark.parametrize("model", [LLAMA, MIXTURE])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("instances", "outer"), [(2, None), (4, None), (2, True)])
@pytest.mark.parametrize("grad_accum", [1, 4])
def test_events_tell_the_same(model, zero: int, instances: int, outer, grad_accum: int) -> None:
    made = plan(
        model, zero, nodes=4, grad_accum=grad_accum, optimizer_instances=instances, outer_sharding=outer
    )
    if violations(made):
        assert zero < 3 or instances == 4
        return
    evaluator, _ = evaluator_for(job_of(made))
    told_s = predict(made, evaluator).iteration_s
    assert simulate(made, evaluator).iteration_s == pytest.approx(told_s, rel=0.005)


@pytest.mark.parametrize(("zero", "outer"), [(1, None), (2, None), (3, None), (3, True)])
def test_every_step_is_explained(zero: int, outer: bool | None) -> None:
    check_plan(plan(zero=zero, optimizer_instances=2, outer_sharding=outer))


def test_one_sub_group_is_what_is_priced_without() -> None:
    for zero in (1, 2, 3):
        one, none = told(plan(zero=zero, optimizer_instances=1)), told(plan(zero=zero))
        assert one.iteration_s == none.iteration_s
        assert one.stages[0].memory_terms_bytes == none.stages[0].memory_terms_bytes


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (plan(zero=2, optimizer_instances=2, outer_sharding=True), "needs zero 3"),
        (plan(zero=3, outer_sharding=True), "does nothing without optimizer_instances"),
        (
            plan(zero=3, optimizer_instances=2, overlap_grad_reduce=None),
            "only with overlap_grad_reduce: true",
        ),
        (plan(zero=3, optimizer_instances=3), "must divide dp x context_parallel 16"),
        (plan(zero=3, optimizer_instances=16), "leaves one rank in each of them"),
        (plan(MIXTURE, zero=3, optimizer_instances=2), "only one rank of 2 execution.optimizer_instances"),
        (
            plan(zero=1, megatron_fsdp=None, optimizer_instances=2, outer_sharding=True),
            "execution.outer_sharding: is of execution.megatron_fsdp",
        ),
        (
            replace(
                plan(zero=1, optimizer_instances=2, megatron_fsdp=None, outer_sharding=True),
                target="megatron+patches",
            ),
            "outer_sharding",
        ),
    ],
)
def test_what_is_refused(made: Plan, words: str) -> None:
    assert any(words in rule for rule in violations(made)), violations(made)


@pytest.mark.parametrize(("zero", "outer"), [(1, None), (2, None), (3, None), (3, True)])
def test_written_and_read_back(zero: int, outer: bool | None) -> None:
    made = plan(zero=zero, optimizer_instances=2, outer_sharding=outer)
    said = arguments(write.common_flags(made))
    assert ("--outer-dp-sharding-strategy" in said) is bool(outer)
    read = plan_of(options_of(said), (), made.cluster, "args")
    assert read.stages == made.stages
    assert (read.execution.optimizer_instances, read.execution.outer_sharding) == (2, outer)
    assert "each of 2 sub-groups" in shape_words(read)
    assert ("over all of them" in shape_words(read)) is bool(outer)
