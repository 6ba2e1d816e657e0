"""Least times of slots that are priced together, against every configuration of one slot at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from jobs import evaluator_of, small_job

from mist_megatron.search.choices import Choices, StageSlot, stage_grid
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.sieve import Sieve
from mist_megatron.search.space import cut_to_target, space_named
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.mesh import StageRole

HELD = (1, 2, 5)


def mesh(nodes: int, dp: int, tp: int, micro_batch: int) -> EqualPipeline:
    return EqualPipeline(
        grad_accum=8, stages=2, nodes=nodes, gpus_per_node=2, dp=dp, tp=tp, micro_batch=micro_batch,
        sequence_parallel=False, vpp=1, zero=(0, 1, 2, 3),
    )  # fmt: skip


MESHES = (mesh(1, 2, 1, 2), mesh(2, 4, 1, 1), mesh(1, 1, 2, 4), mesh(2, 2, 2, 2))


@pytest.mark.parametrize(
    ("role", "limit_gib"), [(StageRole.FIRST, 3.0), (StageRole.LAST, 6.0), (StageRole.MIDDLE, 20.0)]
)
def test_no_configuration_that_fits_is_faster_and_one_is_as_fast(role: StageRole, limit_gib: float) -> None:
    job = small_job("mist", gpus=8, layers=4, batch=32)
    cluster = replace(cluster_of(gpu("a100-sxm-40gb"), 8, 2), memory_limit_bytes=limit_gib * 2**30)
    evaluator, space = evaluator_of(replace(job, cluster=cluster)), cut_to_target(space_named("mist"), "mist")
    sieve, window = Sieve(evaluator, space, 0.5, MESHES), range(1, 4)
    for one in MESHES:
        found = sieve.least_times(one, role, window, HELD, np.inf)
        choices = Choices(space=space, shape=one, step=0.5)
        for row, layers in enumerate(window):
            for column, held in enumerate(HELD):
                least = np.inf
                for recompute in space.recompute:
                    axes = choices.axes(choices.counts(layers, recompute=recompute))
                    slot = StageSlot(role=role, layers=layers, held=float(held))
                    grid = stage_grid(one, slot, axes, recompute=recompute)
                    fits = evaluator.fits(grid) & choices.valid(layers, axes)
                    t_s = np.where(fits, evaluator.factors(grid).stable.at(grid), np.inf)
                    least = min(least, t_s.min())
                assert found[row, column] == pytest.approx(least, rel=1e-9), (one, layers, held)
