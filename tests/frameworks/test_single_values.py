"""Single values of what is written and read, at the places where a rule begins to hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mist_megatron.ask.emit import launch_sources
from mist_megatron.errors import InputError
from mist_megatron.frameworks.deepspeed.convert_patched import patch_changes
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.frameworks.megatron.chosen import chosen
from mist_megatron.frameworks.megatron.command import options_of, read_command_line
from mist_megatron.frameworks.megatron.lint_experts import expert_findings
from mist_megatron.frameworks.megatron.read import plan_of, stage_layers
from mist_megatron.frameworks.megatron.reader import Reader
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

SOURCES = launch_sources(probe=False)


def plan(dp: int = 2, stages: int = 1, *, model: str = "llama2-7b", target: str = "megatron", **more) -> Plan:
    spec = presets.PRESETS[model]
    words = {"layers": spec.layers // stages, "nodes": 1, "gpus_per_node": dp, "dp": dp, "tp": 1}
    stage = StagePlan(**{**words, "micro_batch": 1, **more.pop("stage", {})})
    return Plan(
        model=spec,
        training=TrainingSpec(global_batch=dp * 8, seq_len=2048),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=stages, gpus_per_node=dp),
        target=target,
        grad_accum=8,
        stages=(stage,) * stages,
        **more,
    )


def reader(flags: str) -> Reader:
    return Reader(options=options_of(flags.split()), where="x")


@pytest.mark.parametrize(("dp", "said"), [(1, False), (2, True)])
def test_two_replicas_have_something_to_overlap(dp: int, said: bool) -> None:
    execution = Execution(overlap_grad_reduce=True, overlap_param_gather=True)
    words = artifacts(plan(dp, execution=execution), SOURCES)["args.sh"]
    assert ("--overlap-grad-reduce" in words) == said


@pytest.mark.parametrize("grad_bytes", [2, 4])
def test_narrow_states_say_what_gradients_they_take(grad_bytes: int) -> None:
    execution = Execution(optimizer_bytes=6, grad_bytes=grad_bytes)
    words = artifacts(plan(execution=execution), SOURCES)["args.sh"]
    assert "--exp-avg-dtype bf16" in words
    assert ("--main-grads-dtype bf16" in words) == (grad_bytes == 2)


def test_only_stages_that_differ_are_no_recipe_of_bridge() -> None:
    alike = plan(stages=2, target="megatron+patches")
    other = replace(alike, stages=(replace(alike.stages[0], ckpt=1), alike.stages[1]))
    told = ["Stages differ" in artifacts(one, SOURCES)["bridge.yaml"] for one in (alike, other)]
    assert told == [False, True]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_of_deepspeed_wants_the_package(stages: int) -> None:
    script = artifacts(plan(stages=stages, target="deepspeed+patches"), SOURCES)["train.sh"]
    assert ("needs the package mist-patches" in script) == (stages == 2)


def test_steps_taken_late_are_told_as_taken() -> None:
    late = plan(target="deepspeed+patches", stage={"ckpt": 3}, execution=Execution(decoupled_step=True))
    told = {change.key: change.new for change in patch_changes(late)}
    assert told["stages.json: decoupled_steps"] is True


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", ((8, 8, 8, 8), 4)),
        ("--num-virtual-stages-per-pipeline-rank 2", ((8, 8, 8, 8), 2)),
        ("--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 7", ((5, 10, 10, 7), 1)),
    ],
)
def test_layers_of_stages(flags: str, wanted: object) -> None:
    """32 layers on four, as Megatron divides them."""
    assert stage_layers(reader(f"--num-layers 32 {flags}"), 4) == wanted


def test_flags_alone_are_a_command() -> None:
    text = "--num-layers 4\n--hidden-size 8 \\\n  --bf16\n"
    assert dict(read_command_line(text, "x").options) == dict(options_of(text.replace("\\", " ").split()))


@pytest.mark.parametrize(("flags", "said"), [("", False), ("--tensor-model-parallel-size 2", True)])
def test_what_experts_are_cut_into_is_told_where_tensors_are(flags: str, said: bool) -> None:
    told = {found.key for found in expert_findings(reader(f"--num-experts 8 {flags}"))}
    assert ("--expert-tensor-parallel-size" in told) == said


def test_a_window_of_some_layers_is_the_models() -> None:
    told = {choice.what: choice.value for choice in chosen(plan(model="gpt-oss-20b"))}
    assert told["attention window"] == "128 tokens"


@pytest.mark.parametrize(
    "flags",
    [
        "--num-layers 24 --num-layers-per-virtual-pipeline-stage 13",
        "--num-layers 24 --num-virtual-stages-per-pipeline-rank 1000000000000",
        "--num-layers 1000000000000 --num-layers-per-virtual-pipeline-stage 1",
        "--num-layers 1000000000000 --num-virtual-stages-per-pipeline-rank 100000000000",
    ],
)
def test_virtual_stages_that_no_layer_fills_are_refused_at_once(flags: str) -> None:
    """Each once divided by nothing, or listed what no memory holds."""
    rest = (
        "--hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
        "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 2 --bf16"
    )
    cluster = ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=2, gpus_per_node=8)
    with pytest.raises(InputError, match="layers"):
        plan_of(options_of(f"{flags} {rest}".split()), (), cluster, "run.sh")


@pytest.mark.parametrize("zero", [0, 1])
def test_the_distributed_optimizer_is_zero_1(zero: int) -> None:
    written = plan(stage={"zero": zero})
    options = read_command_line(artifacts(written, SOURCES)["args.sh"], "x").options
    assert ("use-distributed-optimizer" in options) == (zero == 1)
    assert plan_of(options, (), written.cluster, "x").stages[0].zero == zero
