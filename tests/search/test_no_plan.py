"""No plan fits: what is ruled out unseen really fits with nothing, and what is suggested helps."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from jobs import evaluator_of, small_job
from short_form import long_form, one_of

from mist_megatron.ask.job_words import read_job
from mist_megatron.ask.tune import tune
from mist_megatron.errors import NoFeasiblePlan
from mist_megatron.search.bounds import SearchProblem, shape_bounds
from mist_megatron.search.equal import solve_equal
from mist_megatron.search.families import mixed_families, possible_mixtures
from mist_megatron.search.infeasible import Asked, differing, possible_shapes
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.mixed import mixture_bounds, solve_mixed
from mist_megatron.search.pipelines import shapes
from mist_megatron.search.search import Settings, search
from mist_megatron.search.space import Limits, cut_to_target, space_named

TARGETS = {
    "mist": "mist",
    "megatron+patches": "full",
    "deepspeed": "deepspeed",
    "megatron": "full",
    "deepspeed+patches": "full",
}


@pytest.mark.parametrize(("limit_gib", "target"), one_of(2, itertools.product((0.4, 1.6), TARGETS)))
def test_what_is_ruled_out_fits_with_nothing(target, limit_gib):
    """Every shape that its least memory rules out is solved over the grid, and gives nothing."""
    evaluator = evaluator_of(small_job(target, gpus=4, layers=4, batch=8, limit_gib=limit_gib))
    space = cut_to_target(space_named(TARGETS[target]), target)
    question = SearchProblem(evaluator=evaluator, space=space, step=0.5)
    found = list(shapes(evaluator.job, space, Limits()))
    kept = possible_shapes(question, Limits())
    out = [shape for shape in found if shape not in kept]
    for bound, shape in list(zip(shape_bounds(question, out), out, strict=True))[::3]:
        assert solve_equal(question, shape, bound, np.inf).solution is None, shape
    mixed = list(mixed_families(evaluator.job, space, Limits()))
    left = possible_mixtures(question, mixed)
    gone = [mixture for mixture in mixed if mixture not in left]
    for bound, mixture in zip(mixture_bounds(question, gone), gone, strict=True):
        assert solve_mixed(question, mixture, bound, np.inf).solution is None


def test_the_refusal_names_the_miss_its_part_and_what_helps():
    job = small_job("megatron", gpus=2, layers=4, batch=16, limit_gib=1.2)
    with pytest.raises(NoFeasiblePlan, match="no plan fits") as caught:
        search(evaluator_of(job), space_named("full"), Settings(step=0.5))
    closest, largest, help_ = caught.value.details
    needed, limit = map(float, re.search(r"-> ([\d.]+) GiB per GPU, limit ([\d.]+) GiB", closest).groups())
    assert needed > limit == 1.2
    assert re.fullmatch(r"largest part: [a-z ]+ [\d.]+ GiB", largest)
    more = re.search(r"--gpus (\d+)", help_)
    assert more, help_
    bigger = small_job("megatron", gpus=int(more[1]), layers=4, batch=16, limit_gib=1.2)
    assert search(evaluator_of(bigger), space_named("full"), Settings(step=0.5)).solutions


def test_the_default_space_is_not_suggested_and_what_does_not_help_neither():
    job = small_job("megatron", gpus=2, layers=4, batch=16, limit_gib=0.05)
    with pytest.raises(NoFeasiblePlan) as caught:
        search(evaluator_of(job), space_named("full"), Settings())
    text = str(caught.value)
    assert "--space" not in text
    assert "--gpus" not in text
    assert "--seq" not in text


@long_form
def test_a_hopeless_job_is_refused_at_once(mist):
    started = time.process_time()
    done = mist("tune", "--model", "gpt3-175b", "--gpus", "8")
    assert done.code == 3
    assert done.err.startswith("error: no plan fits gpt3-175b on 8 x a100-sxm-80gb")
    # On 16 the hosts of two nodes would not hold the states.
    assert "--gpus 32" in done.err
    assert time.process_time() - started < 30.0  # 16 s on a busy machine; it took minutes


def test_closest_misses_are_sought_where_stages_hold_something_else():
    """Of ways of execution that differ in what runs beside what, one; of those that keep other tensors or run
    other pipelines, each; of those that run none, none."""
    job = small_job("megatron", gpus=4, layers=4, batch=16, limit_gib=1.2)
    space = cut_to_target(space_named("full"), "megatron")

    def asked(fixed=(), **execution):
        execution = replace(job.execution, overlap_grad_reduce=True, **execution)
        limits = parse_limits(fixed, (), ())
        return Asked(evaluator_of(replace(job, execution=execution)), space, limits)

    usual, beside, other = asked(), asked(overlap_param_gather=True), asked(recompute_modules=("mlp",))
    few, none = (asked((f"pp={pp}",)) for pp in (2, 64))
    found = differing([usual, beside, other, few, none])
    assert [one for one, _ in found] == [usual, other, few]
    assert {shape.stages for shape in found[2][1]} == {2}


def test_narrow_states_are_offered_where_they_fit():
    """20 GiB for 1.4 billion parameters: 18 bytes each do not fit, 14 do; moments of 16 bits come to 18 while
    they are stepped."""
    job = read_job({"model": "gpt3-1.3b", "gpus": 1, "gpu": "l4-24gb", "global_batch": 2, "seq": 2048}).job
    tight = replace(job, cluster=replace(job.cluster, memory_limit_bytes=20 * 2.0**30))
    limits = parse_limits((), ("offload.optimizer",), ())
    with pytest.raises(NoFeasiblePlan) as refused:
        tune(tight, settings=Settings(limits=limits))
    assert "--fix grad_bytes=2,optimizer_bytes=10" in refused.value.details[-1]
    narrow = parse_limits(("grad_bytes=2,optimizer_bytes=10",), (), ())
    assert tune(tight, settings=Settings(limits=narrow)).plan.execution.optimizer_bytes == 10
