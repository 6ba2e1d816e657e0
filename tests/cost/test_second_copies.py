"""Second copies of weights inside groups of replicas (DeepSpeed's hpZ): bytes and traffic against counts made
by hand, its events, its rules, and its file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import mist_megatron
from mist_megatron.ask.emit import deepspeed_schema
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.plan_words import shape_words
from mist_megatron.cost.predict import grids_of, job_of, predict
from mist_megatron.cost.work import LayerWork, stage_work
from mist_megatron.errors import InputError
from mist_megatron.events.iteration import simulate
from mist_megatron.frameworks.deepspeed import write
from mist_megatron.frameworks.deepspeed.convert import Question, as_written
from mist_megatron.frameworks.deepspeed.read import read_config
from mist_megatron.price.prices import Collective
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.adapter import Adapter
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations
from tests.cost.test_explained_plans import check_plan

LLAMA = presets.PRESETS["llama3-8b"]
SCHEMA = deepspeed_schema(probe=False)


def plan(size: int | None = 8, nodes: int = 4, grad_accum: int = 2, **more: object) -> Plan:
    model = more.pop("model", LLAMA)
    gpus = 8 * nodes
    stage = {"zero": 3, **{key: more.pop(key) for key in ("zero", "ckpt", "offload") if key in more}}
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=gpus * grad_accum, seq_len=4096),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=nodes, gpus_per_node=8),
        target=more.pop("target", "deepspeed"),
        grad_accum=grad_accum,
        stages=(
            StagePlan(
                layers=model.layers, nodes=nodes, gpus_per_node=8, dp=gpus, tp=1, micro_batch=1, **stage
            ),
        ),
        execution=Execution(hpz_size=size, **more),
    )


def held(made: Plan) -> dict[str, float]:
    (stage,) = mist_megatron.predict(made).prediction.stages
    return dict(stage.memory_terms_bytes)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_bytes_by_hand(size: int) -> None:
    """Llama-3 8B on 32 ranks: a thirty-second of all states, and of the weights one part of so many more."""
    with_copy, without = held(plan(size)), held(plan(None))
    assert without["weights"] == pytest.approx(2 * LLAMA.parameters / 32, rel=1e-6)
    assert with_copy["weights"] == pytest.approx(2 * LLAMA.parameters * (1 / 32 + 1 / size), rel=1e-6)
    for name in without.keys() - {"weights"}:
        assert with_copy[name] == without[name], name


def test_frozen_weights_have_a_copy_and_never_lose_it() -> None:
    """What an adapter leaves alone is gathered inside the groups in every pass, also in a step's first."""
    model = replace(LLAMA, adapter=Adapter(rank=8, on=("q", "v")))
    with_copy, without = held(plan(8, model=model)), held(plan(None, model=model))
    more = with_copy["weights"] - without["weights"]
    assert more == pytest.approx(2 * LLAMA.parameters / 8, rel=0.01)
    work, whole = layer_work(plan(8, model=model)), layer_work(plan(8))
    more_s, all_s = (float(one.first.gather_s - one.forward.gather_s) for one in (work, whole))
    assert 0.0 < more_s < 0.25 * all_s


def layer_work(made: Plan) -> LayerWork:
    """Of a layer, on the only stage."""
    evaluator, _ = evaluator_for(job_of(made))
    (grid,) = grids_of(made)
    return stage_work(grid, evaluator.loads(grid), evaluator.time_context).kept


def _gathered_s(evaluator, elements: float, ranks: int, nodes: int) -> float:
    """A layer that is larger than what is fetched at least, in three pieces (`LARGEST_SHARE`)."""
    sizes = (np.asarray(2.0 * elements / 3), np.asarray(float(ranks)), np.asarray(float(nodes)))
    work = Collective("all_gather", *sizes, strided=np.asarray(False))
    return 3 * float(evaluator.time_context.prices.of(work).seconds)


@pytest.mark.parametrize(("size", "nodes"), [(4, 1), (8, 1), (16, 2)])
def test_only_the_first_forward_pass_leaves_the_group(size: int, nodes: int) -> None:
    """As tests/framework/test_deepspeed_copies.py counts it in DeepSpeed itself: over 32 ranks on four nodes
    once, in the other passes over a group."""
    made, layer = plan(size, overlap_grad_reduce=False), LLAMA.kinds[0].block_parameters
    evaluator, _ = evaluator_for(job_of(made))
    work = layer_work(made)
    inside_s, everywhere_s = _gathered_s(evaluator, layer, size, nodes), _gathered_s(evaluator, layer, 32, 4)
    assert float(work.forward.blocking_gather_s) == pytest.approx(inside_s, rel=0.001)
    assert float(work.backward.blocking_gather_s) == pytest.approx(inside_s, rel=0.001)
    assert float(work.first.blocking_gather_s) == pytest.approx(everywhere_s, rel=0.001)


def test_gradients_are_reduced_over_all() -> None:
    """And added to shards of all: nothing but gathers changes."""
    with_copy, without = layer_work(plan(8)), layer_work(plan(None))
    for pick in (
        lambda work: work.backward.reduce_s,
        lambda work: work.last.reduce_s,
        lambda work: work.accumulate_s,
        lambda work: work.forward.compute_s,
    ):
        assert float(pick(with_copy)) == float(pick(without)) > 0.0


def test_patches_run_beside_them() -> None:
    some = Offload(optimizer=0.5, grads=0.25, activations=0.5)
    made = plan(8, target="deepspeed+patches", offload=some)
    assert not violations(made)
    evaluator, _ = evaluator_for(job_of(made))
    assert simulate(made, evaluator).iteration_s == pytest.approx(
        predict(made, evaluator).iteration_s, rel=0.02
    )


@pytest.mark.parametrize("size", [2, 8, 16])
@pytest.mark.parametrize("grad_accum", [1, 2, 4])
@pytest.mark.parametrize("overlap", [None, False])
@pytest.mark.parametrize("again", [False, True])
def test_events_tell_the_same(size: int, grad_accum: int, overlap: bool | None, again: bool) -> None:
    made = plan(size, grad_accum=grad_accum, overlap_grad_reduce=overlap, ckpt=LLAMA.layers if again else 0)
    evaluator, _ = evaluator_for(job_of(made))
    told_s = predict(made, evaluator).iteration_s
    assert simulate(made, evaluator).iteration_s == pytest.approx(told_s, rel=0.001)


def test_it_gains_over_slow_links_and_costs_memory() -> None:
    """With more micro-batches more of all gathers stay inside nodes."""
    shares = []
    for grad_accum in (1, 4):
        both = (plan(size, grad_accum=grad_accum) for size in (8, None))
        links = LinkOverrides(inter_bytes_per_s=50e9)
        slow = (replace(made, cluster=replace(made.cluster, links=links)) for made in both)
        inside, over = map(mist_megatron.predict, slow)
        assert inside.prediction.stages[0].peak_memory_bytes > over.prediction.stages[0].peak_memory_bytes
        shares.append(inside.iteration_s / over.iteration_s)
    assert shares[1] < shares[0] < 1.0


@pytest.mark.parametrize("overlap", [None, False])
def test_every_step_is_explained(overlap: bool | None) -> None:
    check_plan(plan(8, overlap_grad_reduce=overlap))


def test_one_rank_is_none() -> None:
    one, none = (mist_megatron.predict(plan(size)) for size in (1, None))
    assert one.iteration_s == none.iteration_s
    assert held(plan(1)) == held(plan(None))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (plan(8, zero=2), "acts at zero 3, this is 2"),
        (plan(32), "all 32 replicas"),
        (plan(6, nodes=3), "lie across nodes of 8 GPUs"),
        (plan(8, offload=Offload(weights=1.0)), "beside offload.weights"),
        (plan(8, target="deepspeed+patches", decoupled_step=True), "beside execution.decoupled_step"),
        (plan(8, target="deepspeed+patches", offload=Offload(weights=0.5)), "beside offload.weights"),
        (plan(8, target="torch"), "execution.hpz_size: it has no such switch"),
        (plan(8, target="megatron", zero=1), "execution.hpz_size: it has no such switch"),
        (plan(8, optimizer_instances=2), "execution.optimizer_instances: it has no such switch"),
    ],
)
def test_what_is_refused(made: Plan, words: str) -> None:
    assert any(words in rule for rule in violations(made)), violations(made)


def test_a_size_that_does_not_divide_is_no_plan() -> None:
    with pytest.raises(InputError, match=r"hpz_size is 5; wanted a divisor of dp x context_parallel 32"):
        plan(5)
    with pytest.raises(InputError, match="hpz_size is 0"):
        plan(0)


def question(made: Plan) -> Question:
    return Question(
        model=made.model, cluster=made.cluster, training=made.training, checkpointing=False,
        may_checkpoint=False, target="deepspeed",
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 8, 16, None])
def test_written_and_read_back(size: int | None) -> None:
    made = plan(size, overlap_grad_reduce=True)
    assert not violations(made)
    config = write.explicit_config(made, SCHEMA, write.OptimizerChoice())
    write.check_against_schema(config, SCHEMA)
    assert config["zero_optimization"].get("zero_hpz_partition_size") == size
    auto = write.auto_config(made, SCHEMA)["zero_optimization"]
    assert auto.get("zero_hpz_partition_size") == size
    reading = read_config(config, SCHEMA)
    assert [f for f in reading.findings if f.level in {"rejected", "ignored", "unpriced"}] == []
    read = as_written(reading, question(made))
    assert (read.stages, read.execution.hpz_size) == (made.stages, size)
    assert ("second copies of weights over" in shape_words(made)) is (size is not None)


def test_a_file_that_deepspeed_stops_at_is_refused() -> None:
    config = write.explicit_config(plan(8), SCHEMA, write.OptimizerChoice())
    config["zero_optimization"]["zero_hpz_partition_size"] = 5
    with pytest.raises(InputError, match="zero_hpz_partition_size is 5; wanted a divisor of 32 GPUs"):
        as_written(read_config(config, SCHEMA), question(plan(8)))
