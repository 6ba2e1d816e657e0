"""What ways of execution of one search share says of each what it would say of it alone."""

from __future__ import annotations

from dataclasses import replace

from test_experts_found import evaluator_of, random_job

from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.leaders import Leaders
from mist_megatron.search.pipelines import families
from mist_megatron.search.space import Limits, space_named
from mist_megatron.search.ways import questions_of, ways_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution

FULL = space_named("full")


def leaders_of(job: Job) -> tuple[Leaders, list[SearchProblem], list[Limits]]:
    choices = execution_choices(job, FULL, Limits())
    ways, questions = questions_of(ways_of(choices, lambda c: evaluator_of(c.job)), FULL, 1.0, "exact")
    return Leaders(ways, questions), questions, [way.limits for way in ways]


def test_ways_that_share_shapes_have_the_same() -> None:
    """With every dispatcher, traffic beside products or not, shared experts beside tokens or not, and several
    ranks that split sequences."""
    job = replace(random_job(5), execution=Execution())
    routed = job.model.routed
    assert routed is not None
    job = replace(job, model=replace(job.model, experts=replace(routed, shared_ffn_hidden=1024)))
    leaders, questions, limits = leaders_of(job)
    jobs = [question.evaluator.job for question in questions]
    executions = [one.execution for one in jobs]
    assert {one.dispatcher for one in executions} == {"alltoall", "allgather", "flex"}
    assert len({one.context_parallel for one in executions}) > 1
    for name in ("shared_expert_overlap", "tp_comm_overlap", "megatron_fsdp"):
        assert len({bool(getattr(one, name)) for one in executions}) == 2, name
    lists = [leaders.families(place) for place in range(len(jobs))]
    alone = [list(families(*asked)) for asked in zip(jobs, (q.space for q in questions), limits, strict=True)]
    assert lists == alone
    assert len({id(one) for one in lists}) < len({str(one) for one in executions})
