"""What one search leaves for others: bounds that are below what they find, and no other answers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from jobs import small_job
from kept_programs import KEPT

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.tune import tune
from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.search import queue
from mist_megatron.search.bounds import SearchProblem, shape_bounds
from mist_megatron.search.equal import solve_equal
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.families import mixed_families
from mist_megatron.search.known import Known, KnownBounds, floors, reduces_beside
from mist_megatron.search.mixed import mixture_bounds
from mist_megatron.search.orders import Orders
from mist_megatron.search.pipelines import EqualPipeline, shapes
from mist_megatron.search.queue import Look, Order, Queue, Seen
from mist_megatron.search.search import NoneFaster, Settings, search
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import Limits, Space, apply_limits, cut_to_target, space_named
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution


class Interfering:
    """Datasheet prices whose streams slow each other down."""

    def __init__(self, job: Job, slow_compute: float, slow_traffic: float) -> None:
        self._prices = datasheet_prices(job.cluster, job.training.precision)
        self._slow = slow_compute, slow_traffic

    def __getattr__(self, name: str):
        return getattr(self._prices, name)

    def interference(self) -> np.ndarray:
        table = np.ones((16, 4))
        table[0b0011, :2] = self._slow
        return table


def random_job(rng: np.random.Generator) -> Job:
    gpus = int(rng.choice([2, 4, 8, 16])) if rng.random() < 0.5 else 2
    job = small_job("megatron+patches", gpus=gpus, layers=int(rng.choice([1, 2, 4, 6])), batch=gpus * 4)
    links = replace(
        job.cluster.links,
        intra_bytes_per_s=float(10.0 ** rng.uniform(9.0, 11.5)),
        inter_bytes_per_s=float(10.0 ** rng.uniform(8.5, 11.0)),
    )
    seq_len = int(rng.choice([256, 1024, 4096]))
    return replace(
        job, cluster=replace(job.cluster, links=links), training=replace(job.training, seq_len=seq_len)
    )


def asked(job: Job, evaluator: StageEvaluator, space: Space | None = None) -> SearchProblem:
    cut = cut_to_target(space or space_named("full"), job.target, job.training.precision, job.execution)
    return SearchProblem(evaluator=evaluator, space=apply_limits(cut, Limits()), step=0.5)


def items_of(question: SearchProblem) -> tuple[list, list]:
    job = question.evaluator.job
    return list(shapes(job, question.space, Limits())), list(mixed_families(job, question.space, Limits()))


def bounds_of(question: SearchProblem) -> dict:
    equal, mixed = items_of(question)
    found = [*shape_bounds(question, equal), *mixture_bounds(question, mixed)]
    return {item: bound.value_s for item, bound in zip([*equal, *mixed], found, strict=True)}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_reduced_beside_a_pass_bounds_what_is_reduced_after_it(seed):
    """Over random models, links and interference: its own bound is never below what is known."""
    rng = np.random.default_rng(seed)
    job = random_job(rng)
    # Two streams that gain from running together, down to hardly at all.
    slow = float(rng.uniform(1.0, 2.5))
    most = slow / (slow - 1.0) if slow > 1.001 else 3.0
    prices = (
        Interfering(job, slow, float(rng.uniform(1.0, min(most, 3.0))))
        if seed
        else Interfering(job, 2.0, 2.0)
    )
    beside_job = replace(job, execution=Execution(overlap_grad_reduce=True))
    after, beside = (asked(one, make_evaluator(one, prices, cache=KEPT)) for one in (job, beside_job))
    assert reduces_beside(beside_job, after.evaluator)
    known = Known(job=beside_job, space=beside.space, step=beside.step, bounds=bounds_of(beside))
    own = bounds_of(after)
    least = floors(after, list(own), KnownBounds([known]))
    assert (
        sum(floor_s > 0.5 * bound_s for floor_s, bound_s in zip(least, own.values(), strict=True))
        > len(own) / 2
    )
    for (item, bound_s), floor_s in zip(own.items(), least, strict=True):
        assert floor_s <= bound_s * (1 + 1e-9), item


def test_reducing_beside_a_pass_never_takes_longer():
    """Down to streams that gain nothing from running together, interleaved chunks and stages of one layer
    among them: the bound of one way is a floor of the other with nothing allowed for."""
    shorter = interleaved = 0
    for seed in range(24):
        rng = np.random.default_rng(seed)
        job = replace(random_job(rng), target=("megatron", "megatron+patches")[seed % 2])
        prices = Interfering(job, *((2.0, 2.0), (1.2, 1.9), (1.9, 1.2), (1.05, 5.0))[seed % 4])
        beside_job = replace(job, execution=Execution(overlap_grad_reduce=True))
        after, beside = (asked(one, make_evaluator(one, prices, cache=KEPT)) for one in (job, beside_job))
        if not reduces_beside(beside_job, after.evaluator):
            continue
        own, there = bounds_of(after), bounds_of(beside)
        assert all(there[item] <= own[item] * (1 + 1e-9) for item in own)
        shorter += sum(there[item] < own[item] * (1 - 1e-6) for item in own)
        interleaved += sum(isinstance(item, EqualPipeline) and item.vpp > 1 for item in own)
    assert shorter > 100 and interleaved > 100


@pytest.mark.parametrize("slow", [(2.5, 2.5), (3.0, 1.6), (0.9, 1.0)])
def test_streams_that_lose_by_running_together_tell_nothing(slow):
    job = small_job("megatron+patches", gpus=2)
    evaluator = make_evaluator(job, Interfering(job, *slow), cache=KEPT)
    assert not reduces_beside(replace(job, execution=Execution(overlap_grad_reduce=True)), evaluator)


def test_other_switches_tell_nothing():
    job = small_job("megatron+patches", gpus=2)
    evaluator, _ = evaluator_for(job)
    assert reduces_beside(replace(job, execution=Execution(overlap_grad_reduce=True)), evaluator)
    for other in (
        Execution(overlap_grad_reduce=True, overlap_param_gather=True),
        Execution(overlap_grad_reduce=True, deterministic=True),
    ):
        assert not reduces_beside(replace(job, execution=other), evaluator)
    longer = replace(job, execution=Execution(overlap_grad_reduce=True))
    longer = replace(longer, training=replace(job.training, seq_len=1024))
    assert not reduces_beside(longer, evaluator)
    deepspeed = replace(job, target="deepspeed")
    switched = replace(deepspeed, execution=Execution(overlap_grad_reduce=True))
    assert not reduces_beside(switched, evaluator_for(deepspeed)[0])


@pytest.mark.parametrize("target", ["mist", "megatron+patches", "deepspeed"])
def test_a_smaller_space_has_no_smaller_bound(target):
    job = small_job(target, gpus=8, layers=4, batch=32)
    evaluator, _ = evaluator_for(job)
    large = asked(job, evaluator)
    known = Known(job=job, space=large.space, step=large.step, bounds=bounds_of(large))
    small = asked(job, evaluator, space_named("deepspeed" if target == "deepspeed" else "megatron-expert"))
    own = bounds_of(small)
    least = floors(small, list(own), KnownBounds([known]))
    assert any(least)
    assert all(floor_s <= own_s for floor_s, own_s in zip(least, own.values(), strict=True))
    # The other way round nothing is known: stages may have other numbers of layers, and states may leave.
    if target != "deepspeed":
        back = Known(job=job, space=small.space, step=small.step, bounds=own)
        assert not any(floors(large, items_of(large)[0], KnownBounds([back])))


def test_what_other_ways_tell_of_slow_links_is_below_every_bound():
    """Links inside nodes and between them are slow, so that what runs beside what decides."""
    job = small_job("megatron", gpus=8, layers=8, batch=32)
    links = replace(job.cluster.links, intra_bytes_per_s=1e9, inter_bytes_per_s=3e8)
    cluster = replace(job.cluster, links=links, nodes=2, gpus_per_node=4)
    choices = execution_choices(replace(job, cluster=cluster), space_named("full"), Limits())
    known, told = KnownBounds(), []
    for choice in choices:
        question = asked(choice.job, evaluator_for(choice.job)[0])
        found = list(shapes(choice.job, question.space, choice.limits))[::13]
        bounds_s = {
            one: bound.value_s for one, bound in zip(found, shape_bounds(question, found), strict=True)
        }
        known.append(Known(job=choice.job, space=question.space, step=question.step, bounds=bounds_s))
        told.append((question, bounds_s))
    shared = 0
    for question, bounds_s in told:
        floors_s = floors(question, list(bounds_s), known)
        assert all(floor_s <= own_s for floor_s, own_s in zip(floors_s, bounds_s.values(), strict=True))
        shared += sum(map(bool, floors_s))
    assert shared


def test_a_search_finds_the_same_whichever_is_asked_first(monkeypatch):
    """Whether shapes fit, or what they take at least."""
    job = small_job("megatron", gpus=8, layers=4, batch=16, limit_gib=6.0)
    links = replace(job.cluster.links, inter_bytes_per_s=1e8)
    job = replace(job, cluster=replace(job.cluster, links=links, nodes=2, gpus_per_node=4))
    usual, asked_of, plans = queue.possible_of, [], []
    settings = Settings(top=3, limits=Limits(fixed={"cp": 1, "tp_comm_overlap": 0, "cuda_graphs": 0}))

    def watched(question, items):
        asked_of[-1] += len(items)
        return usual(question, items)

    monkeypatch.setattr(queue, "possible_of", watched)
    for far in (1.0, math.inf):
        monkeypatch.setattr(queue, "FAR", far)
        asked_of.append(0)
        plans.append(tune(job, settings=settings).plans)
    assert plans[0] == plans[1]
    assert asked_of[0] < asked_of[1]


@pytest.mark.parametrize("limit_gib", [5.0, 1000.0])
def test_what_is_known_changes_no_answer(limit_gib):
    """The same plans, with what the other way and the larger space left and without."""
    job = small_job("megatron+patches", gpus=4, layers=4, batch=16, limit_gib=limit_gib)
    beside = replace(job, execution=Execution(overlap_grad_reduce=True))
    coarse = Settings(step=0.5, top=2)
    left = search(evaluator_for(beside)[0], space_named("full"), coarse).known
    for one, name in ((job, "full"), (beside, "megatron"), (beside, "megatron-expert")):
        evaluator, _ = evaluator_for(one)
        alone = search(evaluator, space_named(name), coarse)
        told = search(evaluator, space_named(name), replace(coarse, known=left))
        assert [plan_of(evaluator, s) for s in told.solutions] == [
            plan_of(evaluator, s) for s in alone.solutions
        ]
        assert (told.objective_s, told.gap) == (alone.objective_s, 0.0)


def test_several_plans_where_one_is_fast_enough():
    """The first has to be faster than asked; those next to it are the same as without asking."""
    job = small_job("megatron+patches", gpus=4, layers=3, batch=8, limit_gib=5.0)
    evaluator, _ = evaluator_for(job)
    coarse = Settings(step=0.5, top=2)
    alone = search(evaluator, space_named("full"), coarse)
    for factor in (1.0001, 1.03):
        asked_for = replace(coarse, below_s=alone.objective_s * factor)
        assert search(evaluator, space_named("full"), asked_for).solutions == alone.solutions
    with pytest.raises(NoneFaster):
        search(evaluator, space_named("full"), replace(coarse, below_s=alone.objective_s))


def test_the_order_is_that_of_bounds_however_little_is_known():
    """A queue gives what a sorted list would, whatever floors it was told, and looks at no more than it
    must."""
    rng = np.random.default_rng(3)
    job = small_job("megatron", gpus=8, batch=32)
    question = asked(job, evaluator_for(job)[0])
    found = list(shapes(job, question.space, Limits()))
    bounds = dict(zip(found, shape_bounds(question, found), strict=True))
    wanted = sorted(found, key=lambda item: bounds[item].value_s)
    for _ in range(6):
        looked: list = []

        def bounded(items, looked=looked):
            looked += items
            return Seen([(bounds[item], item) for item in items])

        least = [
            bounds[item].value_s * float(rng.choice([0.0, rng.uniform(0.3, 1.0), 1.0])) for item in found
        ]
        order = Orders([Order(Queue(found, least, Look(bounded)))])
        limit_s = bounds[wanted[len(wanted) // 3]].value_s
        given = []
        while (due := order.next(limit_s)) is not None:
            given.append(due[1][1])
        below = [item for item in wanted if bounds[item].value_s < limit_s]
        assert given == below
        assert len(looked) == len(set(looked))
        assert all(floor_s <= limit_s for item, floor_s in zip(found, least, strict=True) if item in looked)
        assert min(order.left_s()) <= min(bounds[i].value_s for i in wanted if i not in given) < math.inf
        assert [item for _, (_, item) in order] == wanted


@pytest.mark.parametrize("target", ["torch", "megatron", "mist"])
def test_a_shape_is_solved_where_it_is_faster_than_what_there_is(target):
    """Down to steps of a tenth of a second, alike stages and others."""
    job = small_job(target, gpus=2, layers=2, batch=4)
    question = asked(job, evaluator_for(job)[0])
    found = [shape for shape in shapes(job, question.space, Limits()) if shape.vpp == 1]
    bounds = shape_bounds(question, found)
    ordered = sorted(zip(bounds, found, strict=True), key=lambda pair: pair[0].value_s)
    firsts = {shape.stages: (bound, shape) for bound, shape in reversed(ordered)}
    assert set(firsts) == {1, 2}
    for bound, shape in firsts.values():
        best = solve_equal(question, shape, bound, math.inf).solution
        assert best.value_s < 0.9
        again = solve_equal(question, shape, bound, best.value_s * (1 + 1e-6)).solution
        assert again == best
        assert solve_equal(question, shape, bound, best.value_s * (1 - 1e-6)).solution is None
