"""Optimizer states that are whole in sub-groups of the replicas (--num-distributed-optimizer-instances):
bytes and traffic by hand, ranks of the groups by Megatron's own words, events beside the closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import grids_of, job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.events.iteration import simulate
from mist_megatron.frameworks.flags import arguments
from mist_megatron.frameworks.megatron import write
from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.read import plan_of
from mist_megatron.price.prices import Collective
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.term import Term
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations
from tests.cost.test_explained_plans import check_plan

LLAMA = presets.PRESETS["llama3.2-1b"]
MIXTURE = presets.PRESETS["qwen3-30b-a3b"]


def plan(instances: int | None, model=LLAMA, *, pp: int = 1, tp: int = 1, zero: int = 1, **more) -> Plan:
    """On four nodes of eight GPUs."""
    dp = 32 // (pp * tp)
    execution = more.pop("execution", {})
    stage = StagePlan(
        layers=model.layers // pp, nodes=4 // pp, gpus_per_node=8, dp=dp, tp=tp, micro_batch=1, zero=zero
    )
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=8 * dp, seq_len=2048),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=4, gpus_per_node=8),
        target="megatron",
        grad_accum=8,
        stages=(stage,) * pp,
        execution=Execution(optimizer_instances=instances, **execution),
        **more,
    )


def found(made: Plan):
    return predict(made, evaluator_for(job_of(made))[0])


@pytest.mark.parametrize("instances", [2, 4, 8])
def test_states_are_shared_out_in_each_sub_group_by_hand(instances: int) -> None:
    one, several = (found(plan(each)).stages[0].memory_terms_bytes for each in (None, instances))
    parameters = LLAMA.parameters
    assert one["optimizer"] == pytest.approx(12 * parameters / 32, rel=1e-3)
    assert several["optimizer"] == pytest.approx(instances * one["optimizer"], rel=1e-12)
    same = set(one) - {"optimizer"}
    assert {name: one[name] for name in same} == {name: several[name] for name in same}


def test_numbers_that_are_asked_about_together_hold_what_each_holds_alone() -> None:
    made = plan(None)
    evaluator, numbers = evaluator_for(job_of(made))[0], np.array([1.0, 2.0, 4.0, 32.0])
    grid = grids_of(made)[0]
    alone = [float(evaluator(replace(grid, instances=np.asarray(one))).peak_bytes) for one in numbers]
    together = evaluator(replace(grid, instances=numbers)).peak_bytes
    assert together.tolist() == pytest.approx(alone, rel=1e-12) and len(set(alone)) == 4


def test_traffic_by_hand() -> None:
    """Four sub-groups, a node each: nothing of the gather leaves a node, and of the reduction a rank's eighth
    of each bucket of 40e6 elements goes round the four nodes."""
    made = plan(4)
    evaluator, _ = evaluator_for(job_of(made))
    parameters, prices = found_parameters(made), evaluator.prices

    def seconds(kind: str, message: float, ranks: int, nodes: int, *, strided: bool) -> float:
        work = Collective(kind, *map(np.asarray, (message, float(ranks), float(nodes))), strided=strided)
        return float(prices.of(work).seconds)

    told = predict(made, evaluator).stages[0].delta_terms_s
    buckets = parameters / 40e6
    gather_s = buckets * seconds("all_gather", 2 * 40e6, 8, 1, strided=False)
    reduce_s = buckets * (
        seconds("reduce_scatter", 4 * 40e6, 8, 1, strided=False)
        + seconds("all_reduce", 4 * 40e6 / 8, 4, 4, strided=True)
    )
    assert told[Term.WEIGHT_GATHER] == pytest.approx(gather_s, rel=1e-6)
    assert told[Term.GRADIENT_REDUCTION] == pytest.approx(reduce_s, rel=1e-6)
    assert told[Term.WEIGHT_GATHER] < found(plan(None)).stages[0].delta_terms_s[Term.WEIGHT_GATHER]


def found_parameters(made: Plan) -> float:
    """Weights of 2 bytes a parameter."""
    return found(made).stages[0].memory_terms_bytes["weights"] / 2


def test_one_of_all_replicas_is_what_is_priced_without() -> None:
    one, none = found(plan(1)), found(plan(None))
    assert one.iteration_s == none.iteration_s
    assert one.stages[0].memory_terms_bytes == none.stages[0].memory_terms_bytes


def test_as_many_as_replicas_are_level_0() -> None:
    """Every rank has all states: nothing is scattered or gathered, all is reduced over all replicas."""
    every, plain = found(plan(32)), found(plan(None, zero=0))
    assert every.iteration_s == pytest.approx(plain.iteration_s, rel=1e-12)
    assert every.stages[0].peak_memory_bytes == plain.stages[0].peak_memory_bytes


def test_ranks_are_those_of_megatron() -> None:
    """parallel_state.py: runs of neighbours in each data-parallel group, and one of each of these."""
    made = plan(4, tp=2)
    whole = made.groups(0, Group.DATA)
    runs = [ranks[k : k + 4] for ranks in whole for k in range(0, 16, 4)]
    assert sorted(made.groups(0, Group.SHARDS)) == sorted(runs)
    across = [tuple(ranks[k::4]) for ranks in whole for k in range(4)]
    assert sorted(made.groups(0, Group.INSTANCES)) == sorted(across)
    spread = plan(2, MIXTURE, execution={"expert_parallel": 8, "expert_tensor_parallel": 1})
    copies = spread.groups(0, Group.EXPERT_DATA)
    assert sorted(spread.groups(0, Group.EXPERT_SHARDS)) == sorted(
        ranks[k : k + 2] for ranks in copies for k in (0, 2)
    )
    # The sub-groups of experts are joined by the same ranks (get_inter_distributed_optimizer_instance_group).
    assert sorted(spread.groups(0, Group.INSTANCES)) == sorted(
        tuple(ranks[k::2]) for ranks in copies for k in (0, 1)
    )


BESIDE = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize("instances", [2, 4])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"execution": BESIDE},
        {"pp": 2},
        {"pp": 2, "tp": 2, "execution": BESIDE},
        {"pp": 2, "schedule": "interleaved", "vpp": 4, "execution": BESIDE},
        {"model": MIXTURE, "execution": {"expert_parallel": 8, "expert_tensor_parallel": 1}},
    ],
)
def test_events_tell_the_same(instances: int, more) -> None:
    made = plan(instances, **more)
    assert not violations(made)
    evaluator, _ = evaluator_for(job_of(made))
    told_s = predict(made, evaluator).iteration_s
    assert simulate(made, evaluator).iteration_s == pytest.approx(told_s, rel=0.03)


def test_every_step_is_explained() -> None:
    check_plan(plan(4, pp=2))


@pytest.mark.parametrize(
    ("instances", "more", "words"),
    [
        (3, {}, "must divide dp x context_parallel 32"),
        (2, {"zero": 0}, "needs zero 1, the distributed optimizer"),
        (8, {"model": MIXTURE, "execution": {"expert_parallel": 8}}, "the 4 copies of each expert"),
    ],
)
def test_what_megatron_refuses(instances: int, more, words: str) -> None:
    assert any(words in rule for rule in violations(plan(instances, **more)))


def test_patches_have_none() -> None:
    patched = replace(plan(2), target="megatron+patches")
    assert any("optimizer_instances" in rule for rule in violations(patched))
    with pytest.raises(InputError, match="optimizer_instances is 0"):
        plan(0)


def read_back(made: Plan) -> Plan:
    options = options_of(arguments((*write.common_flags(made), *write.stage_flags(made, 0))))
    return plan_of(options, (), made.cluster, "args")


def test_written_and_read_back() -> None:
    made = plan(4)
    read = read_back(made)
    assert read.execution.optimizer_instances == 4
    assert read_back(plan(None)).execution.instances == 1
    assert read.stages == made.stages
