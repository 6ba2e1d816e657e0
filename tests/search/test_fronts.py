"""Fronts and whole searches against pricing every configuration, one by one, through `predict`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from operator import le

import numpy as np
import pytest
from jobs import evaluator_of, small_job
from short_form import one_of

from mist_megatron.cost.predict import grid_of, predict, refined
from mist_megatron.errors import NoFeasiblePlan
from mist_megatron.search.choices import AXES, Choices, ckpt_counts, fractions, slot_at
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.search import Settings, Status, Watch, search
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import Limits, apply_limits, cut_to_target, space_named
from mist_megatron.search.stage_fronts import StageTimes, slot_configs
from mist_megatron.search.stage_prices import _along
from mist_megatron.spec.kinds import KINDS, Offload, PerKind
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.recompute import RECOMPUTE_KINDS
from mist_megatron.spec.term import AT_STEP
from mist_megatron.targets.rules import violations

TARGETS = {
    "mist": "mist",
    "megatron+patches": "full",
    "deepspeed": "deepspeed",
    "megatron": "full",
    "deepspeed+patches": "full",
}


def stage_plans(space, shape, layers, step):
    """Every configuration of one stage, from the meaning of the space, not from the search's arrays."""
    ratios = [fractions(allowed, step) for allowed in space.offload.values()]
    options = []
    for zero, *shares in itertools.product(shape.zero, *ratios):
        for recompute in space.recompute:
            for ckpt in ckpt_counts(space, layers, shape.vpp) if recompute == "full" else (0,):
                options.append(
                    StagePlan(
                        layers=layers,
                        nodes=shape.nodes,
                        gpus_per_node=shape.gpus_per_node,
                        dp=shape.dp,
                        tp=shape.tp,
                        micro_batch=shape.micro_batch,
                        zero=zero,
                        ckpt=int(ckpt),
                        recompute=recompute,
                        offload=Offload(**dict(zip(KINDS, map(float, shares), strict=True))),
                    )
                )
    return options


def plan_with(job, shape, stages):
    return Plan(
        model=job.model,
        training=job.training,
        cluster=job.cluster,
        target=job.target,
        grad_accum=shape.grad_accum,
        stages=tuple(stages),
        sequence_parallel=shape.sequence_parallel,
    )


def random_case(seed):
    rng = np.random.default_rng(seed)
    target = list(TARGETS)[seed % len(TARGETS)]
    stages = 1 if target == "deepspeed" else int(rng.choice([1, 2]))
    gpus = int(rng.choice([2, 4]))
    tp = 1 if target.startswith("deepspeed") else int(rng.choice([1, 2]))
    if gpus < stages * tp:
        tp = 1
    dp = gpus // stages // tp
    micro_batch = int(rng.choice([1, 2]))
    job = small_job(target, gpus=gpus, layers=4, batch=8 * dp * micro_batch)
    space = cut_to_target(space_named(TARGETS[target]), target)
    levels = [level for level in space.zero if stages == 1 or level in space.zero_with_pipeline]
    zero = space.zero if space.per_stage_zero else (int(rng.choice(levels)),)
    shape = EqualPipeline(
        grad_accum=8,
        stages=stages,
        nodes=1,
        gpus_per_node=gpus // stages,
        dp=dp,
        tp=tp,
        micro_batch=micro_batch,
        sequence_parallel=False,
        vpp=1,
        zero=zero,
    )
    # A budget between the least and the most that any configuration needs, so that it binds.
    limit = float(rng.uniform(2.5, 14.0)) * 2**30
    job = replace(job, cluster=replace(job.cluster, memory_limit_bytes=limit))
    return job, space, shape, int(rng.integers(0, stages))


def price_one_by_one(evaluator, job, shape, position, options):
    """(t, d without a step that waits for all stages, that step, fits) of every option that breaks no rule
    of the target: one flat row each."""
    rows = []
    for option in options:
        plan = plan_with(job, shape, [option] * shape.stages)
        if not any(f"stages[{position}]" in rule for rule in violations(plan)):
            rows.append((plan, option))
    priced = []
    for recompute in RECOMPUTE_KINDS:
        mine = [(p, s) for p, s in rows if s.recompute == recompute]
        if not mine:
            continue
        grid = grid_of(mine[0][0], position)

        def column(values):
            return np.array([float(value) for value in values])

        stages = [s for _, s in mine]
        grid = replace(
            grid,
            ckpt=column(s.ckpt for s in stages),
            zero=column(s.zero for s in stages),
            offload=PerKind(**{kind: column(s.offload[kind] for s in stages) for kind in KINDS}),
        )
        cost = evaluator(grid)
        d_s = step_s = np.zeros(())
        for name, term in evaluator.terms(grid).delta.items():
            if name in AT_STEP and not evaluator.time_context.facts.step.hides:
                step_s = step_s + term.at(grid)
            else:
                d_s = d_s + term.at(grid)
        fits = cost.peak_bytes <= evaluator.limit_bytes
        fine = refined(evaluator, grid)
        # Activations that leave late are late by what a search does not know of a stage alone.
        table = np.broadcast_arrays(
            cost.stable_s + fine.stable_s, d_s + fine.delta_s - fine.late_s, step_s, fits
        )
        priced += list(zip(*(column.tolist() for column in table), strict=True))
    return priced


@pytest.mark.parametrize("seed", one_of(3, range(32)))
def test_front_equals_brute_force(seed):
    job, space, shape, position = random_case(seed)
    evaluator = evaluator_of(job)
    layers, step = 4 // shape.stages, 0.5
    choices = Choices(space=space, shape=shape, step=step)
    slot = slot_at(shape, position, layers)
    times = StageTimes(evaluator, choices, {slot.role: range(layers, layers + 1)})
    (found,), tally = slot_configs(times, [slot], np.inf)
    options = stage_plans(space, shape, layers, step)
    priced = price_one_by_one(evaluator, job, shape, position, options)
    points = {tuple(point) for *point, fits in priced if fits}
    expected = undominated(points)
    got = [] if found is None else list(zip(found.t_s, found.d_s, found.step_s, strict=True))
    assert tally.priced == len(priced)
    assert bool(got) == bool(expected)
    assert undominated(set(got)) == set(got)
    assert len(got) == len(set(got))
    # Sums in another order may keep one more, or one less, that is equal but for rounding.
    assert all(reached(expected, got))
    assert all(reached(got, points))


def undominated(points):
    return {p for p in points if not any(q != p and all(map(le, q, p)) for q in points)}


def reached(points, others):
    """Of each point whether one of the others is as good in everything, but for rounding."""
    every = np.array(sorted(others)).reshape(-1, 3)
    room = [np.array(p) + 1e-9 * np.abs(p) + 1e-12 for p in points]
    return [(every <= most).all(axis=1).any() for most in room]


@pytest.mark.parametrize("target", list(TARGETS))
def test_search_finds_the_best_of_all_uniform_plans(target):
    """Pipeline size 1: every plan of the space priced one by one."""
    job = small_job(target, gpus=2, layers=2, batch=4, limit_gib=6.0)
    evaluator = evaluator_of(job)
    settings = Settings(step=1.0, limits=Limits(fixed={"pp": 1}))
    result = search(evaluator, space_named(TARGETS[target]), settings)
    space = apply_limits(cut_to_target(space_named(TARGETS[target]), target), settings.limits)
    best = predict(plan_of(evaluator, result.solutions[0]), evaluator).iteration_s
    for tp, micro_batch, sp in itertools.product((1, 2), (1, 2, 4), (False, True)):
        dp = 2 // tp
        if 4 % (dp * micro_batch) or (tp > 1 and not space.tensor_parallel):
            continue
        if sp and (tp == 1 or not space.sequence_parallel):
            continue
        shape = EqualPipeline(
            grad_accum=4 // dp // micro_batch,
            stages=1,
            nodes=1,
            gpus_per_node=2,
            dp=dp,
            tp=tp,
            micro_batch=micro_batch,
            sequence_parallel=sp,
            vpp=1,
            zero=space.zero,
        )
        for stage in one_of(6, stage_plans(space, shape, 2, 1.0)):
            plan = plan_with(job, shape, [stage])
            if not violations(plan):
                prediction = predict(plan, evaluator)
                best = min(best, prediction.iteration_s if prediction.fits else np.inf)
    assert result.objective_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("target", list(TARGETS))
def test_plan_is_runnable_fits_and_costs_what_the_search_says(target):
    job = small_job(target, gpus=4, layers=6, batch=16, limit_gib=7.0)
    evaluator = evaluator_of(job)
    result = search(evaluator, space_named("full"), Settings(step=0.25, top=3))
    assert result.status is Status.OPTIMAL
    assert result.gap == pytest.approx(0.0, abs=1e-9)
    values = [predict(plan_of(evaluator, found), evaluator).iteration_s for found in result.solutions]
    assert values == sorted(values)
    assert result.objective_s <= min(found.value_s for found in result.solutions) * (1 + 1e-12)
    assert len({solution.shape for solution in result.solutions}) == len(values)
    for solution in result.solutions:
        plan = plan_of(evaluator, solution)
        prediction = predict(plan, evaluator)
        assert violations(plan) == ()
        assert prediction.fits
        assert equation_1(plan, prediction, evaluator) == pytest.approx(solution.value_s, rel=1e-9)
        # Which waits that warm-up passes fill make too long.
        assert prediction.iteration_s <= solution.value_s * (1 + 1e-12)


def equation_1(plan, prediction, evaluator):
    """From what `predict` says of each stage; a step that waits for all stages hides behind nothing."""
    stages = prediction.stages
    t_s = [stage.stable_s / plan.vpp for stage in stages]
    steps = [0.0 if evaluator.time_context.facts.step.hides else stage.step_s for stage in stages]
    late = max(
        stage.delta_s - step - sum(t_s[:k]) for k, (stage, step) in enumerate(zip(stages, steps, strict=True))
    )
    return (plan.grad_accum * plan.vpp - 1) * max(t_s) + sum(t_s) + late + max(steps)


def test_wider_spaces_are_never_slower():
    job = small_job("megatron+patches", gpus=8, layers=8, batch=32, limit_gib=5.0)
    evaluator = evaluator_of(job)
    times = {}
    for name in ("megatron", "megatron-expert", "full"):
        times[name] = search(evaluator, space_named(name), Settings()).objective_s
    assert times["full"] <= times["megatron-expert"] * (1 + 1e-12)
    assert times["megatron-expert"] <= times["megatron"] * (1 + 1e-12)


def test_milp_and_exact_searches_agree():
    job = small_job("mist", gpus=4, layers=6, batch=16, limit_gib=7.0)
    evaluator = evaluator_of(job)
    exact = search(evaluator, space_named("mist"), Settings(step=0.5))
    milp = search(evaluator, space_named("mist"), Settings(step=0.5, solver="milp"))
    assert exact.objective_s == pytest.approx(milp.objective_s, rel=1e-6)


def test_a_stop_keeps_the_best_and_its_gap():
    evaluator = evaluator_of(small_job("megatron+patches", gpus=8, layers=8, batch=64))
    bests = []

    def stop():
        return Status.TIME_LIMIT if bests and bests[-1] < float("inf") else None

    watch = Watch(stop=stop, progress=lambda done, total, best_s: bests.append(best_s))
    result = search(evaluator, space_named("full"), Settings(top=40), watch)
    assert result.status is Status.TIME_LIMIT
    assert result.gap >= 0.0


def test_nothing_fits():
    evaluator = evaluator_of(small_job("megatron", limit_gib=0.5))
    with pytest.raises(NoFeasiblePlan, match="no plan fits") as caught:
        search(evaluator, space_named("full"), Settings())
    assert any("closest" in line for line in caught.value.details)
    assert any("try:" in line for line in caught.value.details)


@pytest.mark.parametrize("ends", [(2.0, 6.0), (1.0, 2.0), (3.0, 3.0)])
def test_between_two_numbers_of_layers_times_lie_on_a_line(ends: tuple[float, float]) -> None:
    """And beyond them at the nearer one."""
    shape = (-1, *[1] * len(AXES))
    wanted, values = np.arange(9.0), np.array([3.0, 7.0]) if ends[1] > ends[0] else np.array([5.0])
    found = _along(values.reshape(shape), np.array(ends), wanted.reshape(shape))
    told = np.interp(wanted, np.array(ends)[: len(values)], values)
    assert np.broadcast_to(found, wanted.reshape(shape).shape).ravel() == pytest.approx(told)
