"""Over which ranks experts may be spread, by loops over all sizes; and what is refused of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from mist_megatron.errors import InputError
from mist_megatron.search.experts import dispatchers, divisors, expert_sizes, require_spread
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec

FULL = space_named("full")


def job_of(gpus: int = 16, name: str = "mixtral-8x7b", device: str = "h100-sxm-80gb", **execution) -> Job:
    return Job(
        model=PRESETS[name],
        training=TrainingSpec(global_batch=16, seq_len=2048),
        cluster=cluster_of(gpu(device), gpus),
        target="megatron",
        execution=Execution(**execution),
    )


def test_divisors_are_all_of_them() -> None:
    for number in range(1, 200):
        assert divisors(number) == tuple(k for k in range(1, number + 1) if number % k == 0)


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
@pytest.mark.parametrize(("stage", "tp"), [(4, 1), (8, 2), (16, 2), (12, 1), (6, 3)])
@pytest.mark.parametrize("imbalance", [None, 2.5])
def test_sizes_are_those_that_rules_leave(
    stage: int, tp: int, dispatcher: str, imbalance: float | None
) -> None:
    """Eight experts of 14,336 columns, nodes of eight GPUs. DeepEP sends tokens of whole experts, somewhere;
    one rank has no more than all tokens."""
    job = job_of(expert_dispatcher=dispatcher, expert_imbalance=imbalance)
    wanted = [
        (ep, etp)
        for etp, ep in product(range(1, 9), range(1, 9))
        if 8 % ep == 0 and 14_336 % etp == 0 and stage % (ep * etp) == 0
        if dispatcher == "alltoall" or (etp == 1 and ep > 1)
        if imbalance is None or ep == 1 or ep >= imbalance
    ]
    assert sorted(expert_sizes(job, FULL, Limits(), (stage, tp, True))) == sorted(wanted)
    few = Limits(fixed={"etp": 1}, most={"ep": 4})
    assert sorted(expert_sizes(job, FULL, few, (stage, tp, True))) == [
        one for one in sorted(wanted) if one[1] == 1 and one[0] <= 4
    ]
    assert (expert_sizes(job, FULL, Limits(), (stage, tp, False)) == ()) == (tp > 1)


def test_tokens_go_over_fast_links_where_there_are_some() -> None:
    assert dispatchers(job_of(), FULL, Limits()) == ["alltoall", "allgather", "flex"]
    assert dispatchers(job_of(device="l4-24gb"), FULL, Limits()) == ["alltoall", "allgather"]
    assert dispatchers(job_of(), FULL, Limits(dispatcher="flex")) == ["flex"]
    banned = Limits(forbidden=frozenset({"dispatcher.flex"}))
    assert dispatchers(job_of(), FULL, banned) == ["alltoall", "allgather"]
    assert dispatchers(job_of(expert_dispatcher="flex"), FULL, Limits()) == ["flex"]


@pytest.mark.parametrize(
    ("fixed", "dispatcher", "told"),
    [
        (
            {"ep": 3},
            None,
            "--fix ep=3: expert_parallel (3) must divide experts of mixtral-8x7b (8); ep may be 1,",
        ),
        ({"ep": 8, "pp": 4}, None, "8 * 1 must divide the 4 GPUs of the stage; ep may be 1, 2, 4"),
        ({"ep": 8, "pp": 3}, None, None),  # another rule's
        ({"tp": 2, "sequence_parallel": 0}, None, "--fix tp=2,sequence_parallel=0: tp is 2 without"),
        ({"tp": 2, "sequence_parallel": 1}, None, None),
        ({"tp": 2}, None, None),
        (
            {"etp": 2, "ep": 2},
            "flex",
            "--fix ep=2,etp=2,dispatcher=flex: expert_tensor_parallel is 2 and dispatcher",
        ),
        (
            {"ep": 1},
            "flex",
            "so that tokens go nowhere; wanted alltoall, or expert_parallel above 1; ep may be 2, 4, 8",
        ),
        ({}, "flex", None),
        ({"ep": 8}, "flex", None),
    ],
)
def test_what_no_plan_can_have_is_refused_with_what_would_do(fixed, dispatcher, told) -> None:
    limits = Limits(fixed=fixed, dispatcher=dispatcher)
    if told is None:
        require_spread(job_of(), FULL, limits)
        return
    with pytest.raises(InputError) as caught:
        require_spread(job_of(), FULL, limits)
    assert told in caught.value.message
    dense = replace(job_of(), model=PRESETS["gpt3-7b"])
    if fixed.get("ep", 1) * fixed.get("etp", 1) > 1 or dispatcher:
        with pytest.raises(InputError, match="gpt3-7b has no experts"):
            require_spread(dense, FULL, limits)


def test_forbidden_sequence_parallelism_leaves_no_tensor_parallelism() -> None:
    banned = Limits(fixed={"tp": 2}, forbidden=frozenset({"sequence_parallel"}))
    with pytest.raises(InputError, match="tp is 2 without sequence_parallel"):
        require_spread(job_of(), FULL, banned)
    require_spread(replace(job_of(), model=PRESETS["gpt3-7b"]), FULL, banned)
