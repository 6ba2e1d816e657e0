"""What pruning may not do: lose a plan that is barely better than the incumbent, or promise too much."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from jobs import evaluator_of, small_job
from short_form import one_of

from mist_megatron.search import mixed as unequal
from mist_megatron.search.borders import ROLES
from mist_megatron.search.bounds import SearchProblem, least_times, shape_bounds
from mist_megatron.search.equal import solve_equal
from mist_megatron.search.families import mixed_families
from mist_megatron.search.mixed import mixture_bounds, solve_mixed
from mist_megatron.search.pipelines import shapes
from mist_megatron.search.space import Limits, cut_to_target, space_named
from mist_megatron.search.stage_fronts import Tally

TARGETS = {
    "mist": "mist",
    "megatron+patches": "full",
    "deepspeed": "deepspeed",
    "megatron": "full",
    "deepspeed+patches": "full",
}


@pytest.mark.parametrize(("limit_gib", "target"), one_of(2, itertools.product((3.0, 1000.0), TARGETS)))
def test_pruning_keeps_what_beats_the_incumbent(target, limit_gib):
    """With an incumbent a hair above a shape's optimum the optimum is found again, and no bound is above it.

    With many data-parallel ranks d can be negative (a first micro-batch has no gradients to add to), which
    a cap on t that forgets it would cut away. Where memory has no limit a bound is what one stage takes, and
    never so low that it sorts nothing: splits of layers that need not be equal are the least known.
    """
    bucket_gib = 1.0 if target.startswith("deepspeed") else 0.0  # which reductions go through
    job = small_job(target, gpus=8, layers=4, batch=32, limit_gib=limit_gib + bucket_gib)
    evaluator = evaluator_of(job)
    space = cut_to_target(space_named(TARGETS[target]), target)
    question = SearchProblem(evaluator=evaluator, space=space, step=1.0)
    found = list(shapes(evaluator.job, space, Limits()))
    solved = 0
    pairs = list(zip(shape_bounds(question, found), found, strict=True))
    uneven = space.uneven_layers and target != "megatron"
    for index in np.random.default_rng(0).permutation(len(pairs))[: 8 if limit_gib < 100.0 else 14]:
        bound, shape = pairs[index]
        alone = solve_equal(question, shape, bound, np.inf)
        if alone.solution is None:
            continue
        solved += 1
        assert bound.value_s <= alone.left_s <= alone.solution.value_s * (1 + 1e-12)
        if limit_gib > 100.0:
            alike = shape.stages == 1 or shape.grad_accum == 1 or shape.vpp > 1
            least = 1.0 - 2e-9 if shape.stages == 1 else 0.65 if uneven and not alike else 0.93
            assert bound.value_s >= least * alone.left_s, shape
        again = solve_equal(question, shape, bound, alone.left_s * (1 + 1e-9))
        assert again.left_s == pytest.approx(alone.left_s, rel=1e-12)
    assert solved > 2


@pytest.mark.parametrize(
    ("limit_gib", "target"), one_of(2, itertools.product((4.0, 1000.0), ("mist", "megatron+patches")))
)
def test_pruning_of_mixtures_keeps_what_beats_the_incumbent(target, limit_gib):
    """The same of pipelines with stages of different sizes, whose steps wait for all stages on Megatron."""
    evaluator = evaluator_of(small_job(target, gpus=4, layers=3, batch=8, limit_gib=limit_gib))
    space = cut_to_target(space_named(TARGETS[target]), target)
    question = SearchProblem(evaluator=evaluator, space=space, step=1.0)
    found = list(mixed_families(evaluator.job, space, Limits()))
    solved = 0
    for bound, mixture in list(zip(mixture_bounds(question, found), found, strict=True))[:3]:
        alone = solve_mixed(question, mixture, bound, np.inf)
        if alone.solution is None:
            continue
        solved += 1
        assert bound.value_s <= alone.left_s
        # What has equal stages is no mixture: no bridge joins them.
        if len(set(alone.solution.shape.meshes)) > 1:
            assert alone.left_s <= alone.solution.value_s * (1 + 1e-12)
        again = solve_mixed(question, mixture, bound, alone.left_s * (1 + 1e-9))
        assert again.left_s == pytest.approx(alone.left_s, rel=1e-12)
    assert solved


def test_meshes_priced_together_cost_what_they_cost_alone():
    """Parts of a node and whole nodes, of which a stage of one GPU is the odd one: True is 1 as a key."""
    evaluator = evaluator_of(small_job("mist", gpus=16, layers=3, batch=16))
    space = cut_to_target(space_named("mist"), "mist")
    question = SearchProblem(evaluator=evaluator, space=space, step=1.0)
    found = [m for m in mixed_families(evaluator.job, space, Limits()) if m.grad_accum == 1]
    for bound, mixture in zip(mixture_bounds(question, found), found, strict=True):
        assert {mesh.gpus_per_node for mesh in mixture.meshes} == {1, 2, 4, 8}
        for mesh, stages, less in zip(mixture.meshes, bound.stages, bound.less_s, strict=True):
            for role, shifted, less_s in zip(ROLES, stages, less, strict=True):
                together = shifted.shifted(-less_s)
                (alone,) = least_times(question, [mesh], role)
                assert together.t_s == pytest.approx(alone.t_s, rel=1e-12)
                assert together.both_s == pytest.approx(alone.both_s, rel=1e-12)


def test_a_first_stage_is_credited_with_no_more_than_its_least_t_and_d_together():
    """Over a slow link the least t that fits is far above the least one, and d may be as much smaller: of
    what a first stage adds only t + d is known. Every configuration that fits must cost that much, too."""
    job = small_job("mist", gpus=4, layers=4, batch=16, limit_gib=2.0)
    links = replace(job.cluster.links, host_to_device_bytes_per_s=1e8, device_to_host_bytes_per_s=1e8)
    evaluator = evaluator_of(replace(job, cluster=replace(job.cluster, links=links)))
    space = cut_to_target(space_named("mist"), "mist")
    question = SearchProblem(evaluator=evaluator, space=space, step=1.0)
    slower = 0
    for mixture in (m for m in mixed_families(evaluator.job, space, Limits()) if m.grad_accum == 4):
        (bound,) = mixture_bounds(question, [mixture])
        windows = [dict.fromkeys(ROLES, range(1, 4)) for _ in mixture.meshes]
        slots = unequal._Slots(question, mixture, bound, windows, (dict.fromkeys(ROLES, np.inf), Tally()))
        slots.price()
        for key in [key for key in slots.keys if key[0] is ROLES[0]]:
            kinds = (0,) * len(mixture.meshes)
            assumed, priced = slots.least_fronts(kinds, key), slots.fronts(kinds, key)
            for size, front in assumed.items():
                meshes = [k for k in range(len(mixture.meshes)) if mixture.size(size[0], k) == size]
                known = [bound.stages[k][0] for k in meshes]
                proved_s = max(float(times.both_s[size[0] - 1]) for times in known) + bound.least_step_s
                assumed_s = float((front.t_s + front.d_s).min())
                assert assumed_s <= proved_s * (1 + 1e-9)
                if size in priced:
                    assert (priced[size].t_s + priced[size].d_s).min() >= assumed_s * (1 - 1e-9)
                slower += front.t_s[0] > 2 * min(float(times.t_s[size[0] - 1]) for times in known)
    assert slower
