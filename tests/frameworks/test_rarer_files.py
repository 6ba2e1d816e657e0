"""What few files say: every way in which DeepSpeed's JSON places states, sizes that nobody said, patterns of
layers in Megatron's flags, and what files for torch cannot say."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest

import mist_megatron as mm
from mist_megatron.ask.emit import deepspeed_schema
from mist_megatron.errors import InputError, MistError
from mist_megatron.frameworks.deepspeed.convert import (
    LEVELS,
    Batch,
    Price,
    Question,
    as_written,
    batch_of,
    best,
    candidates,
    flat,
    keepable,
    replacement,
    taken_for_auto,
)
from mist_megatron.frameworks.deepspeed.read import Config, Reading, read_config
from mist_megatron.frameworks.loose_json import read_loose
from mist_megatron.frameworks.megatron.write import execution_flags
from mist_megatron.frameworks.megatron.yaml_run import _size
from mist_megatron.frameworks.torch.files import files
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec

SCHEMA = deepspeed_schema(probe=False)


def reading(config: Config) -> Reading:
    return read_config(read_loose(json.dumps(config), "ds.json"), SCHEMA)


def question(*, patched: bool = False, checkpointing: bool = False) -> Question:
    return Question(
        model=preset("gpt3-1.3b"),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-40gb"), nodes=2, gpus_per_node=4),
        training=TrainingSpec(global_batch=8, seq_len=1024),
        checkpointing=checkpointing,
        may_checkpoint=True,
        target="deepspeed+patches" if patched else "deepspeed",
    )


@pytest.mark.parametrize(("optimizer", "weights"), list(product(("cpu", "nvme", "none"), repeat=2)))
@pytest.mark.parametrize("level", range(4))
def test_where_states_live(level: int, optimizer: str, weights: str) -> None:
    """Optimizer states leave from ZeRO 1 on, gradients with them from 2 on, weights at 3 alone; what a ratio
    says acts with patches only. Gradients of 4 bytes stay at ZeRO 2 where patches add them up."""
    for patched, wide, ratio in product((False, True), (False, True), (None, 0.4)):
        section = {"device": optimizer, **({} if ratio is None else {"ratio": ratio})}
        config: Config = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
            "zero_optimization": {
                "stage": level, "offload_optimizer": section, "offload_param": {"device": weights},
            },
            **({"data_types": {"grad_accum_dtype": "fp32"}} if wide else {}),
        }  # fmt: skip
        plan = as_written(reading(config), question(patched=patched))
        (stage,) = plan.stages
        leaves = optimizer != "none" and level >= 1
        assert stage.offload == Offload(
            optimizer=(ratio if patched and ratio is not None else 1.0) if leaves else 0.0,
            grads=1.0 if leaves and (level == 3 or (level == 2 and not (patched and wide))) else 0.0,
            weights=1.0 if weights != "none" and level == 3 else 0.0,
        )
        assert plan.execution.grad_bytes == (4 if patched and wide else None)
        assert (stage.zero, stage.micro_batch, plan.grad_accum, plan.training.global_batch) == (
            level,
            2,
            3,
            48,
        )
        assert (stage.dp, stage.tp, stage.nodes, stage.gpus_per_node, stage.ckpt) == (8, 1, 2, 4, 0)


@pytest.mark.parametrize("overlap", [True, False, None, "auto"])
def test_what_is_said_of_overlap_and_recomputation(overlap: object) -> None:
    zero = {"stage": 2, **({} if overlap is None else {"overlap_comm": overlap})}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    plan = as_written(reading(config), question(checkpointing=True))
    assert plan.execution.overlap_grad_reduce == (overlap if isinstance(overlap, bool) else None)
    assert plan.stages[0].ckpt == plan.model.layers == 24


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("written", "asked", "wanted"),
    [
        ((64, None, None), Batch(), (8, 1)),
        ((64, 4, None), Batch(), (4, 2)),
        ((64, None, 4), Batch(), (2, 4)),
        ((64, 2, 4), Batch(), (2, 4)),
        ((None, 3, None), Batch(), (3, 1)),
        ((None, 3, 5), Batch(), (3, 5)),
        (("auto", "auto", "auto"), Batch(), (8, 1)),
        (("auto", "auto", 5), Batch(), (8, 5)),
        # Trainer's own 8 of 256 / 8 = 32; of 24 / 8 = 3 the next smaller that divides.
        (("auto", "auto", "auto"), Batch(total=256), (8, 4)),
        (("auto", "auto", "auto"), Batch(total=24), (3, 1)),
        (("auto", "auto", "auto"), Batch(total=88), (1, 11)),
        (("auto", "auto", "auto"), Batch(total=96, micro=3), (3, 4)),
        (("auto", "auto", "auto"), Batch(total=96, steps=3), (4, 3)),
        (("auto", "auto", "auto"), Batch(micro=5), (5, 1)),
        (("auto", "auto", "auto"), Batch(steps=5), (8, 5)),
        ((96, "auto", "auto"), Batch(steps=3), (4, 3)),
        ((96, "auto", "auto"), Batch(total=96), (12, 1)),
    ],
)
def test_batches_are_split_as_deepspeed_or_a_trainer_does(
    written: tuple[object, ...], asked: Batch, wanted: tuple[int, int]
) -> None:
    """On 8 GPUs."""
    config = {key: value for key, value in zip(SIZES, written, strict=True) if value is not None}
    assert batch_of(reading(config), 8, asked) == wanted
    said = {"train_micro_batch_size_per_gpu": asked.micro, "gradient_accumulation_steps": asked.steps}
    assert taken_for_auto(reading(config), 8, asked) == {
        key: f'{size} for "auto"'
        for key, size in zip(SIZES[1:], wanted, strict=True)
        if config.get(key) == "auto" and said[key] is None
    }


@pytest.mark.parametrize(
    ("written", "asked", "told"),
    [
        ((None, None, 4), Batch(), "train_batch_size is missing"),
        ((12, None, None), Batch(), "train_batch_size 12 is not micro-batch 1 * accumulation 1 * 8 GPUs"),
        ((4, None, None), Batch(), "train_batch_size 4 is not micro-batch 0"),
        (("auto", 2, 3), Batch(total=40), "--global-batch 40 is not micro-batch 2"),
        ((64, None, None), Batch(total=32), "--global-batch is 32; the file says train_batch_size 64"),
        ((64, 0, None), Batch(), "wanted a whole number above 0"),
        ((10**9 + 1, None, None), Batch(), "wanted at most 1000000000"),
    ],
)
def test_batches_that_do_not_split(written: tuple[object, ...], asked: Batch, told: str) -> None:
    config = {key: value for key, value in zip(SIZES, written, strict=True) if value is not None}
    with pytest.raises(InputError, match=told.replace("*", r"\*")):
        batch_of(reading(config), 8, asked)


def written_plan() -> Plan:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 1},
    }
    return as_written(reading(config), question())


def test_without_a_stage_there_is_no_zero() -> None:
    """As DeepSpeed takes it, whatever else the section says."""
    assert Reading(config={"zero_optimization": {"overlap_comm": True}}, findings=()).stage == 0
    assert Reading(config={"zero_optimization": {"stage": "auto"}}, findings=()).stage == 0
    assert Reading(config={"zero_optimization": {"stage": 2}}, findings=()).stage == 2


def test_all_that_the_json_can_say_is_tried() -> None:
    """6 sequences a GPU: 1, 2, 3 and 6 at once, nine ways of states, with and without recomputation; second
    copies of shared weights on the GPUs over pairs, or over the nodes of 4."""
    plan = written_plan()
    made = list(candidates(plan, may_checkpoint=True))
    told = {
        (
            *(one.stages[0].micro_batch, one.stages[0].zero, one.stages[0].offload, one.stages[0].ckpt),
            one.execution.hpz_size,
        )
        for one in made
    }
    assert told == {
        (size, *level, ckpt, copies)
        for size in (1, 2, 3, 6)
        for level in LEVELS
        for ckpt in (0, 24)
        for copies in ((None, 2, 4) if level[0] == 3 and not level[1].weights else (None,))
    }
    assert len(made) == len(told) and {one.training.global_batch for one in made} == {48}
    assert all(one.stages[0].micro_batch * one.grad_accum == 6 for one in made)
    kept = list(candidates(plan, may_checkpoint=False))
    assert len(kept) == len(made) / 2 and {one.stages[0].ckpt for one in kept} == {0}


def test_the_quickest_that_fits_is_best_and_of_equals_the_one_with_room() -> None:
    plan = written_plan()
    prices = [(1.0, False, 1.2), (3.0, True, 0.1), (2.0, True, 0.9), (2.0, True, 0.5), (2.0, True, 0.7)]
    plans = [replace(plan, grad_accum=number, training=replace(plan.training, global_batch=16 * number))
             for number in range(1, 6)]  # fmt: skip

    def price(one: Plan) -> Price:
        seconds, fits, share = prices[one.grad_accum - 1]
        return Price(iteration_s=seconds, fits=fits, memory_used_fraction=share)

    found = best(iter(plans), price)
    assert found is not None and found[0].grad_accum == 4 and found[1].iteration_s == 2.0
    assert best(iter(plans[:1]), price) is None


@pytest.mark.parametrize("auto", list(product((False, True), repeat=3)))
def test_a_replacement_keeps_what_a_trainer_fills_in(auto: tuple[bool, ...]) -> None:
    values = [*(("auto" if open_ else value) for open_, value in zip(auto, (48, 2, 3), strict=True))]
    config = dict(zip(SIZES, values, strict=True)) | {"zero_optimization": {"stage": 1}, "steps_per_print": 7}
    tuned = replace(written_plan(), grad_accum=1, stages=(replace(written_plan().stages[0], micro_batch=6),))
    made = replacement(reading(config), tuned, SCHEMA, ())
    wanted = dict(zip(SIZES, (48, 6, 1), strict=True))
    for key, open_ in zip(SIZES, auto, strict=True):
        if open_:
            wanted[key] = "auto"  # type: ignore[assignment]
    if auto[1] or auto[2]:
        del wanted["train_batch_size"]  # which would contradict what the trainer fills in
    assert {key: made[key] for key in SIZES if key in made} == wanted
    assert made["steps_per_print"] == 7


def test_kept_keys_are_as_they_were() -> None:
    config = {
        **dict.fromkeys(SIZES, "auto"), "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 12345, "stage3_prefetch_bucket_size": 99},
    }  # fmt: skip
    mine, tuned = reading(config), written_plan()
    plain = replacement(mine, tuned, SCHEMA, ())
    assert plain["zero_optimization"]["stage"] == 1
    assert plain["zero_optimization"]["reduce_bucket_size"] == 12345
    assert "stage3_prefetch_bucket_size" not in plain["zero_optimization"]
    kept = replacement(
        mine, tuned, SCHEMA, ("zero_optimization.stage", "fp16", "zero_optimization.round_robin")
    )
    assert kept["zero_optimization"]["stage"] == 3 and "fp16" not in kept
    assert (
        replacement(mine, tuned, SCHEMA, ("zero_optimization",))["zero_optimization"]
        == config["zero_optimization"]
    )
    assert {"zero_optimization", "zero_optimization.stage", "bf16.enabled"} <= keepable(mine, SCHEMA)
    assert flat({"a": {"b": {"c": 1}, "d": {}}, "_mist": {"x": 1}, "e": 2}) == {"a.b.c": 1, "a.d": {}, "e": 2}


@pytest.mark.parametrize(
    ("replicas", "exchange", "flags"),
    [((1, 1), 1, False), ((1, 2), 1, True), ((2, 1), 1, True), ((2, 2), 1, True), ((1, 1), 2, True)],
)
def test_gradients_are_reduced_where_any_stage_has_replicas(
    replicas: tuple[int, int], exchange: int, flags: bool
) -> None:
    plan = mm.tune(
        model="gpt3-1.3b", gpus=4, gpus_per_node=4, gpu="a100-sxm-40gb", target="megatron", fix="pp=2,dp=2",
        global_batch=16, seq=1024,
    ).plan  # fmt: skip
    assert plan is not None
    execution = replace(plan.execution, overlap_grad_reduce=True, overlap_param_gather=True)
    sizes = {"layers": 12, "nodes": 1, "tp": 1, "micro_batch": 1, "zero": 1}
    stages = [StagePlan(**sizes, gpus_per_node=dp * exchange, dp=dp) for dp in replicas]
    told = SimpleNamespace(
        execution=replace(execution, context_parallel=exchange), stages=stages, training=plan.training,
        target="megatron", model=plan.model, cluster=plan.cluster,
    )  # fmt: skip
    names = {one.name if hasattr(one, "name") else one[0] for one in execution_flags(cast(Plan, told))}
    assert ("--overlap-grad-reduce" in names) == flags


@pytest.mark.parametrize(
    ("trainer", "wanted"),
    [
        ({"devices": 4}, (4, 4)),
        ({"devices": 4, "num_nodes": 3}, (12, 4)),
        ({"devices": [0, 2], "num_nodes": 2}, (4, 2)),
        ({"devices": 0}, (None, None)),
        ({"devices": 4, "num_nodes": 0}, (None, None)),
        ({"devices": "auto"}, (None, None)),
        ({"num_nodes": 2}, (None, None)),
        ("no mapping", (None, None)),
    ],
)
def test_gpus_that_a_trainer_says(trainer: object, wanted: tuple[int | None, int | None]) -> None:
    said = SimpleNamespace(told=SimpleNamespace(value=lambda name, value: value))
    assert _size(trainer, cast(Any, said)) == wanted


@pytest.mark.parametrize(("moved", "told"), [("rank_map", "wanted no rank_map"), ("precision", "no 8-bit")])
def test_files_for_torch_say_neither_ranks_nor_8_bits(moved: str, told: str) -> None:
    found = mm.tune(
        model="gpt3-1.3b", gpus=4, gpus_per_node=4, gpu="h100-sxm-80gb", target="torch", global_batch=16,
        space="galvatron-bmw", seq=512,
    )  # fmt: skip
    assert found.plan is not None
    plan = replace(found.plan, rank_map=(1, 0, 2, 3))
    if moved == "precision":
        plan = replace(found.plan, training=replace(plan.training, precision="fp8"))
    with pytest.raises(MistError, match=told):
        files(plan, None)  # type: ignore[arg-type]
