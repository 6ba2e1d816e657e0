"""Which exchange of ranks that split sequences is searched, and that none is missed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from jobs import small_job
from short_form import long_form, one_of

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.tune import Tuned, tune
from mist_megatron.ask.tune_words import tune as tune_words
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.search import context
from mist_megatron.search.execution import contexts, execution_choices
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.search import Settings
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec.cluster import LinkOverrides, cluster_of
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.kinds import CONTEXT_EXCHANGES
from mist_megatron.targets.rules import violations

FULL = replace(space_named("full"), near_even=False)


def split_job(gpus: int, per_node: int, *, seq: int, kv_heads: int = 16, batch: int = 1, window=None):
    job = small_job("megatron", layers=4, batch=batch)
    cluster = replace(cluster_of(job.cluster.gpu, gpus, per_node), memory_limit_bytes=1e12)
    model = replace(job.model, kv_heads=kv_heads, window=window)
    return replace(job, model=model, cluster=cluster, training=replace(job.training, seq_len=seq))


@cache
def best(job, kinds: tuple[str, ...] = FULL.context_exchanges, fix: tuple[str, ...] = ()) -> Tuned:
    """Of searches with no test's changes."""
    space = replace(FULL, context_exchanges=kinds)
    return tune(job, space=space, settings=Settings(limits=parse_limits(fix, (), ())))


def best_s(job, *kinds: str, fix: tuple[str, ...] = ()) -> float:
    return best(job, kinds, fix).iteration_s


JOBS = [
    split_job(8, 4, seq=2048, kv_heads=4),
    split_job(8, 2, seq=4096),
    split_job(8, 4, seq=8192, kv_heads=2, batch=2),
    split_job(8, 8, seq=1024, kv_heads=4),
]


@pytest.mark.parametrize("job", JOBS[1:3])
def test_more_kinds_never_give_a_slower_plan(job) -> None:
    ring, two, all_of_them = (best_s(job, *kinds) for kinds in (("p2p",), ("p2p", "a2a"), CONTEXT_EXCHANGES))
    assert all_of_them <= two <= ring


@pytest.mark.parametrize(
    ("job", "fix"), [(JOBS[0], ()), (JOBS[2], ()), *((job, ("pp=1,tp=1,dp=1",)) for job in JOBS)]
)
def test_no_plan_is_lost_where_attention_hides_the_ring(job, fix, monkeypatch) -> None:
    """The same answer as with every exchange of every shape looked at."""
    cut = best(job, fix=fix)
    monkeypatch.setattr(context.HiddenRings, "hidden", lambda self, way, shapes: set())
    whole = tune(job, space=FULL, settings=Settings(limits=parse_limits(fix, (), ())))
    assert cut.iteration_s == whole.iteration_s and cut.plan.execution == whole.plan.execution
    assert cut.result.shapes <= whole.result.shapes


def test_shapes_are_passed_over_where_attention_hides_the_ring(monkeypatch) -> None:
    """Long sequences inside a node, which leave hardly any."""
    job = split_job(8, 8, seq=65536)
    cut = tune(job, space=FULL)
    monkeypatch.setattr(context.HiddenRings, "hidden", lambda self, way, shapes: set())
    whole = tune(job, space=FULL)
    assert cut.iteration_s == whole.iteration_s and cut.plan.execution == whole.plan.execution
    assert cut.result.shapes < 0.6 * whole.result.shapes


def test_levels_win_where_heads_are_few_and_nodes_are_slow() -> None:
    """Eight ranks of two nodes share two key heads inside them; a ring alone would cross at every step."""
    job = split_job(8, 4, seq=2048, kv_heads=2)
    slow = replace(job, cluster=replace(job.cluster, links=LinkOverrides(inter_bytes_per_s=2e9)))
    found = tune(slow, space=FULL, settings=Settings(limits=parse_limits(("cp=8",), (), ())))
    assert found.plan.execution.context_exchange == "a2a+p2p"
    assert found.plan.execution.context_inner == 2
    assert best_s(slow, "p2p", "a2a", fix=("cp=8",)) > found.iteration_s


def test_keys_are_gathered_where_windows_keep_them_from_a_ring() -> None:
    """All-to-all wants a key head for each rank; of one there is, only all keys will do."""
    job = split_job(4, 4, seq=8192, kv_heads=1, window=1024)
    found = tune(job, space=FULL, settings=Settings(limits=parse_limits(("cp=4",), (), ())))
    assert found.plan.execution.context_exchange == "all_gather"
    kinds = {one.exchange for one in contexts(job, FULL, Limits()) if one.ranks > 1}
    assert kinds == {"a2a", "all_gather"}
    whole = {one.exchange for one in contexts(split_job(4, 4, seq=8192), FULL, Limits())}
    assert whole == {None, "a2a", "a2a+p2p"}


def test_levels_are_fixed_bounded_and_forbidden() -> None:
    job = split_job(8, 8, seq=2048)

    def inner(*fix: str, most: tuple[str, ...] = (), forbid: tuple[str, ...] = ()) -> set[int | None]:
        choices = execution_choices(job, FULL, parse_limits(fix, forbid, most))
        split = (choice.job.execution for choice in choices if choice.job.execution.context_parallel == 8)
        return {one.context_inner for one in split if one.context_exchange == "a2a+p2p"}

    assert inner() == {2, 4}
    assert inner("context_inner=4") == {4}
    assert inner("context_inner=4,context_exchange=a2a+p2p") == {4}
    assert inner(most=("context_inner=2",)) == {2}
    assert inner(forbid=("context_exchange.a2a+p2p",)) == set()
    with pytest.raises(InputError, match="context_inner=3"):
        execution_choices(job, FULL, parse_limits(("cp=8,context_inner=3",), (), ()))


@cache
def mixtral(fix: str = "") -> Tuned:
    """A plan whose sequences are split."""
    words = {"model": "mixtral-8x7b", "gpus": 16, "gpu": "h100-sxm-80gb", "seq": 32768, "global_batch": 16}
    fixed = "cp=4,tp=2,pp=1,ep=8,zero=1,micro_batch=1,expert_overlap=0,cuda_graphs=0"
    return tune_words(**words, target="megatron", fix=f"{fixed}{fix}", forbid="fewer_gpus")


@pytest.mark.parametrize("kind", one_of(3, ["a2a+p2p", "all_gather", "a2a"]))
def test_mixtures_take_an_exchange_that_is_asked_for(kind: str) -> None:
    """As fast at least as the plan with a ring is once its exchange is another one, where that runs."""
    asked, ring = mixtral(f",context_exchange={kind}"), mixtral()
    assert asked.plan.execution.context_exchange == kind and ring.plan.execution.context_exchange is None
    assert asked.iteration_s >= ring.iteration_s * (1 - 1e-9) or kind != "all_gather"
    changed = replace(
        ring.plan.execution, context_exchange=kind, context_inner=2 if kind == "a2a+p2p" else None
    )
    other = replace(ring.plan, execution=changed)
    assert not violations(other)
    evaluator = evaluator_for(job_of(other))[0]
    if predict(other, evaluator).fits:
        assert asked.iteration_s <= predict(other, evaluator).iteration_s


def mixture(gpus: int, per_node: int, *, seq: int, inter_bytes_per_s: float):
    """Two layers of eight experts, few key heads, slow links between nodes."""
    job = split_job(gpus, per_node, seq=seq, kv_heads=4, batch=8)
    experts = ExpertSpec(count=8, top_k=2, ffn_hidden=1024)
    model = replace(job.model, layers=2, gated_mlp=True, activation="silu", experts=experts)
    links = LinkOverrides(inter_bytes_per_s=inter_bytes_per_s)
    return replace(job, model=model, cluster=replace(job.cluster, links=links))


@long_form
def test_mixtures_are_searched_with_every_exchange(monkeypatch) -> None:
    """None that is slower with more of them, and none lost where attention hides the ring."""
    job = mixture(8, 4, seq=16384, inter_bytes_per_s=2e9)
    fix = ("cp=8,cuda_graphs=0,expert_overlap=0",)
    ring, every = best_s(job, "p2p", fix=fix), best_s(job, *CONTEXT_EXCHANGES, fix=fix)
    each = [
        best_s(job, *CONTEXT_EXCHANGES, fix=(f"{fix[0]},context_exchange={kind}",))
        for kind in ("p2p", "all_gather", "a2a+p2p")
    ]
    assert every == min(each) <= ring
    monkeypatch.setattr(context.HiddenRings, "hidden", lambda self, way, shapes: set())
    assert tune(job, space=FULL, settings=Settings(limits=parse_limits(fix, (), ()))).iteration_s == every
