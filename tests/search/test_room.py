"""Bounds of mixtures' shapes that count what memory makes them run again, against the shapes' best plans.

On links that are slower than what is computed beside them part of what is run again takes no time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_experts_found import random_job, searched

from mist_megatron.search import queue
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.room import with_room
from mist_megatron.search.solve import solve
from mist_megatron.spec.cluster import LinkOverrides

SENDS = "pp=2,vpp=2,micro_batch=2,ep=1"
GATHERS = "megatron_fsdp=1,zero=3"


@pytest.mark.parametrize(
    ("seed", "fix", "inter", "intra", "limit_gib", "per_gpu"),
    [
        (236, f"{SENDS},tp=2", 0.26e9, 2.4e9, 5.0, 4),
        (252, "pp=2,vpp=2,ep=2,tp=1", 0.48e9, 1.6e9, 3.5, 2),
        (71, GATHERS, 0.49e9, 1.4e9, 3.0, 2),
        (76, GATHERS, 1.9e9, 1.1e9, 5.0, 4),
    ],
)
def test_no_plan_of_a_shape_is_faster_than_its_bound(
    seed: int, fix: str, inter: float, intra: float, limit_gib: float, per_gpu: int, monkeypatch
) -> None:
    job = random_job(seed)
    slow = LinkOverrides(intra_bytes_per_s=intra, inter_bytes_per_s=inter)
    job = replace(
        job,
        training=replace(job.training, seq_len=4096, global_batch=per_gpu * job.cluster.gpus),
        cluster=replace(job.cluster, links=slow, memory_limit_bytes=limit_gib * 2**30),
    )
    seen = []

    def watched(question, pairs, added_s):
        roomy, short = with_room(question, pairs, added_s)
        seen.extend((question, *pair) for pair in roomy if (added_s[pair[1]] > 0.0).any())
        return roomy, short

    monkeypatch.setattr(queue, "with_room", watched)
    searched(job, parse_limits((fix,), (), ()), top=40)
    assert seen, "nothing has to be run again"
    for question, bound, shape in seen:
        found = solve(question, shape, bound, float("inf")).solution
        assert found is None or bound.value_s <= found.value_s, shape
