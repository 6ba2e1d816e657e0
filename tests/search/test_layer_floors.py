"""What layers take bounds every shape, from below."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import small_job

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.search.bounds import SearchProblem, shape_bounds
from mist_megatron.search.layer_floors import LayerFloors
from mist_megatron.search.pipelines import shapes
from mist_megatron.search.space import Limits, cut_to_target, space_named
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import Execution


@pytest.mark.parametrize("target", ["megatron", "megatron+patches", "mist", "deepspeed"])
@pytest.mark.parametrize(("gpus", "per_node", "beside"), [(4, 2, False), (8, 8, True), (6, 3, False)])
def test_no_shape_is_bounded_below_what_its_layers_take(target, gpus, per_node, beside):
    job = small_job(target, layers=12, batch=24)
    execution = Execution(tp_comm_overlap=beside and target.startswith("megatron"), context_parallel=1)
    job = replace(job, cluster=cluster_of(job.cluster.gpu, gpus, per_node), execution=execution)
    space = cut_to_target(space_named("full" if target != "mist" else "mist"), target, "bf16", execution)
    question = SearchProblem(evaluator=evaluator_for(job)[0], space=space, step=0.5)
    every = list(shapes(job, space, Limits()))
    bounds = [bound.value_s for bound in shape_bounds(question, every)]
    floors = LayerFloors().of(question, every)
    assert every and all(0.0 < low <= high for low, high in zip(floors, bounds, strict=True))
    assert max(low / high for low, high in zip(floors, bounds, strict=True)) > 0.2, "it prunes"
